"""Weight files in the cache, each named by its content, so that equal content is written once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from penstock.integrations.adapters import refuse_transposed
from penstock.integrations.called.facts import joined
from penstock.integrations.emptied.absent import AbsentTensor, is_plain_subclass
from penstock.integrations.emptied.hollow import plain_parts
from penstock.integrations.kept import KeptWeights, bytes_of, digests_of
from penstock.passes.graph.nodes import dtype_name
from penstock.runtime.cache import Cache, Hold
from penstock.runtime.files.pack import PackedTensor, PackEntry, tensor_chunks, write_packed
from penstock.runtime.files.safetensors_file import open_tensors
from penstock.runtime.system.atomic import write_artifact
from penstock.schedule.facts.errors import PassError

_log = logging.getLogger(__name__)

WEIGHTS = "weights.safetensors"


def computed_buffers(module: nn.Module) -> set[str]:
    """Return the FQNs of buffers that no checkpoint of the module holds."""
    children = module.named_modules()
    return {joined(path, key) for path, child in children for key in child._non_persistent_buffers_set}


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a checkpoint of the module holds, by FQN.

    Raises PassError for a tensor without values.
    """
    computed = computed_buffers(module)
    tensors = plain_parts(module.named_parameters())
    tensors |= plain_parts((name, value) for name, value in module.named_buffers() if name not in computed)
    for name, tensor in tensors.items():
        value = tensors[name] = tensor.as_subclass(torch.Tensor) if is_plain_subclass(tensor) else tensor
        if isinstance(value, AbsentTensor):
            raise PassError(
                f"this module, a part of it, or another model that shares {name} with it streams already: "
                "restore() that first where apply was called; what load returned is to be used as it is"
            )
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise PassError(
                f"weight {name} is a {type(value).__name__}, which does not say what tensors it is made of: "
                "quantise with torchao, or load the model without quantisation (docs/quantised.md)"
            )
        if value.device.type == "meta" or value.untyped_storage().nbytes() < value.nbytes:
            raise PassError(
                f"weight {name} has no values: load the model first, or give its folder to "
                "penstock.integrations.load"
            )
        if not value.is_contiguous():
            refuse_transposed(name, value, tensors)
            raise PassError(f"weight {name} has strides {list(value.stride())}: make it contiguous first")
    return tensors


def store(tensors: Mapping[str, torch.Tensor], cache: Cache, made_for: str) -> KeptWeights:
    """Write tensors to a file of the cache, unless it is there, and keep it there.

    Its folder is named by the sha256 of names, dtypes, shapes and bytes. How many bytes are written is logged
    before. What is there and is not what was written is written again. Raises SourceError where they cannot
    be written.
    """
    digests = digests_of(tensors)
    facts = [f"{n} {value.dtype} {tuple(value.shape)} {digests[n]}\n" for n, value in tensors.items()]
    folder = cache.place_of(hashlib.sha256("".join(facts).encode()).hexdigest()[:32])
    entries = [_entry(name, value) for name, value in tensors.items()]
    hold = keep_packed(
        folder, entries, cache, made_for, whole=lambda: not tensors or _holds(folder / WEIGHTS, tensors)
    )
    return KeptWeights((folder / WEIGHTS,), digests=digests, hold=hold)


def keep_packed(
    folder: Path,
    entries: Sequence[PackEntry],
    cache: Cache,
    made_for: str,
    *,
    whole: Callable[[], bool],
    how: str = "",
    finish: Callable[[Path, Sequence[PackedTensor]], None] = lambda folder, placed: None,
) -> Hold:
    """Keep a folder with a file of these entries in the cache.

    How many bytes are written, and `how`, is logged before. What is written counts once `finish` returns,
    which is given the unfinished folder and the places of the entries. A folder that is there already, but of
    which `whole` returns False or fails, is removed and written again. Raises SourceError where it cannot be
    written, or where a process uses the damaged one.
    """
    nbytes = sum(entry.nbytes for entry in entries)

    def build(unfinished: Path) -> None:
        finish(unfinished, write_packed(unfinished / WEIGHTS, entries))

    def write() -> None:
        _log.info("writing %s bytes of weights of %s%s to %s", f"{nbytes:,}", made_for, how, folder)
        write_artifact(folder, force=False, build=build)

    def is_whole() -> bool:
        try:
            return whole()
        except Exception:  # a damaged file may raise anything
            return False

    return cache.keep(folder, made_for, write, nbytes, whole=is_whole)


def _holds(file: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a file holds these tensors, byte for byte."""
    with open_tensors(file) as opened:
        return all(opened.holds(name, bytes_of(value)) for name, value in tensors.items())


def _entry(name: str, value: torch.Tensor) -> PackEntry:
    flat = bytes_of(value)
    return PackEntry(
        name, dtype_name(value.dtype), tuple(value.shape), value.nbytes, lambda: tensor_chunks(flat)
    )
