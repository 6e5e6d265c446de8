"""Weight files in the cache: tensors in the dtypes of a module, each file named by its content."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.called.facts import joined
from penstock.integrations.emptied.absent import AbsentTensor, is_plain_subclass
from penstock.integrations.emptied.hollow import REPLACED, plain_parts
from penstock.integrations.kept import KeptWeights, bytes_of, digest_of, in_file, state_of
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.weights.lifted import part_of
from penstock.passes.weights.subclasses import has_parts
from penstock.runtime.cache import Cache, Hold
from penstock.runtime.checkpoint.binding import Names, digest_of_chunks, tensor_names
from penstock.runtime.checkpoint.opening import Checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading, StoredTensor
from penstock.runtime.files.artifact_files import file_chunks
from penstock.runtime.files.pack import PackedTensor, PackEntry, tensor_chunks, write_packed
from penstock.runtime.files.safetensors_file import FLOATS, TORCH_NAMES, read_header
from penstock.runtime.files.tensor_file import open_tensors
from penstock.runtime.system.atomic import write_artifact
from penstock.schedule.atomic_file import replace_file, write_all
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import PassError, SourceError

_log = logging.getLogger(__name__)

WEIGHTS = "weights.safetensors"


def computed_buffers(module: nn.Module) -> set[str]:
    """Return the FQNs of buffers that no checkpoint of the module holds."""
    children = module.named_modules()
    return {joined(path, key) for path, child in children for key in child._non_persistent_buffers_set}


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of the module holds, by FQN. Raises PassError for one without values."""
    computed = computed_buffers(module)
    tensors = plain_parts(module.named_parameters())
    tensors |= plain_parts((name, value) for name, value in module.named_buffers() if name not in computed)
    streams = any(REPLACED in vars(child) for child in module.modules())
    for name, tensor in tensors.items():
        value = tensors[name] = tensor.as_subclass(torch.Tensor) if is_plain_subclass(tensor) else tensor
        if streams or isinstance(value, AbsentTensor):
            raise PassError(
                f"this module, a part of it, or another model that shares {name} with it streams already: "
                "restore() that first where apply was called; what load returned is to be used as it is"
            )
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise PassError(
                f"weight {name} is a {type(value).__name__}, which does not say what tensors it is made of: "
                "give its folder to penstock.integrations.load, or quantise with torchao (docs/quantised.md)"
            )
        if value.layout != torch.strided:
            raise PassError(f"weight {name} is sparse ({value.layout}): call to_dense() first")
        if value.device.type == "meta" or (value.nbytes and not value.untyped_storage().nbytes()):
            raise PassError(
                f"weight {name} has no values: load the model first, or give its folder to "
                "penstock.integrations.load"
            )
    return tensors


def store(tensors: Mapping[str, torch.Tensor], cache: Cache, made_for: str) -> KeptWeights:
    """Write tensors to a file of the cache, unless it is there, and keep it there.

    Its folder is named by the sha256 of names, dtypes, shapes and bytes. How many bytes are written is logged
    before. What is there and is not what was written is written again. Raises SourceError where they cannot
    be written.
    """
    digests = {name: digest_of(value) for name, value in tensors.items()}
    entries = [_entry(name, value) for name, value in tensors.items()]
    facts = [f"{e.name} torch.{e.dtype} {e.shape} {digests[e.name]}\n" for e in entries]
    folder = cache.place_of(hashlib.sha256("".join(facts).encode()).hexdigest()[:32])
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
    nbytes = sum(tensor.nbytes for tensor in entries)

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
    with open_tensors(file) as opened:
        return all(opened.holds(name, bytes_of(value)) for name, value in tensors.items())


def _entry(name: str, value: torch.Tensor) -> PackEntry:
    flat, part = bytes_of(value), in_file(part_of(value, 0))
    return PackEntry(name, part.dtype, part.shape, flat.nbytes, lambda: tensor_chunks(flat))


_SUMS, _STATE, _SOURCES = "sums.json", "state", "sources"
"""The file beside converted weights: what the system said of these when they were written, the ctimes of the
files that they were converted from, and the sha256 of each tensor."""


@dataclass(frozen=True)
class _Change:
    """A tensor of the files, and torch's name of the dtype that it is to have."""

    name: str
    tensor: StoredTensor
    dtype: str

    @property
    def new_name(self) -> str:
        return f"{self.name} as {self.dtype}"

    def entry(self, files: Sequence[Path]) -> PackEntry:
        reading = Reading(self.tensor, self.tensor.whole, cast=self.dtype)
        return PackEntry(
            self.new_name, self.dtype, self.tensor.shape, reading.nbytes, lambda: reading.chunks(files)
        )


def is_converted(stored: StoredTensor, value: torch.Tensor) -> bool:
    """Tell whether a tensor of files has another dtype than a weight, to which libraries convert it."""
    before, after = TORCH_NAMES.get(stored.dtype), dtype_name(value.dtype)
    return before != after and before in FLOATS and after in FLOATS


def keep_converted(
    module: nn.Module, checkpoint: Checkpoint, names: Mapping[str, Names], cache: Cache, made_for: str
) -> list[KeptWeights]:
    """Return the files that hold a module's weights: its own, and one of the cache for converted weights.

    `names` is what the files call weights otherwise. Raises SourceError where the cache cannot be written, or
    where the checkpoint changes meanwhile.
    """
    stored, computed = checkpoint.tensors, computed_buffers(module)
    weights: list[tuple[str, torch.Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    weights += module.named_buffers(remove_duplicate=False)
    names_of = {fqn: tensor_names(fqn, names) for fqn, _ in weights}
    changes = {
        (name, fqn): _Change(name, stored[name], dtype_name(value.dtype))
        for fqn, value in weights
        if fqn not in computed and not has_parts(value)
        for name in names_of[fqn]
        if name in stored and is_converted(stored[name], value)
    }
    if not changes:
        return [KeptWeights(checkpoint.files, names)]
    changed: dict[str, Names] = {}
    for fqn in dict.fromkeys(fqn for _, fqn in changes):
        pairs = [(name, changes.get((name, fqn))) for name in names_of[fqn]]
        changed[fqn] = tuple(change.new_name if change else name for name, change in pairs)
    written = _write(tuple(dict.fromkeys(changes.values())), checkpoint.files, cache, made_for)
    # Where all is converted, nothing more is read from the checkpoint.
    reads_checkpoint = any(
        has_parts(value) or any(name in stored and (name, fqn) not in changes for name in names_of[fqn])
        for fqn, value in weights
    )
    unchanged = {fqn: stored_names for fqn, stored_names in names.items() if fqn not in changed}
    own_files = [KeptWeights(checkpoint.files, unchanged)] if reads_checkpoint else []
    return [*own_files, KeptWeights(written.files, changed, hold=written.hold)]


def _write(changes: Sequence[_Change], files: Sequence[Path], cache: Cache, made_for: str) -> KeptWeights:
    """Write converted tensors to a file of the cache, unless it is there, and keep it there."""
    before, ctimes = _states(files)
    in_file = sorted(changes, key=lambda change: [(box.file, box.start) for box in change.tensor.boxes])
    entries = [change.entry(files) for change in in_file]
    headers = [hashlib.sha256(read_header(file).raw).hexdigest() for file in files]
    facts = f"converted {before} {headers} {[tensor.name for tensor in entries]}"
    folder = _place_of(cache, hashlib.sha256(facts.encode()).hexdigest()[:32], entries, ctimes)

    def finish(unfinished: Path, placed: Sequence[PackedTensor]) -> None:
        after, now = _states(files)
        written = [tensor.sha256 for tensor in placed]
        touched = now != ctimes and written != [digest_of_chunks(tensor.chunks()) for tensor in entries]
        if touched or after != before:
            raise SourceError(
                f"{files[0].parent} was written to while it was being converted: leave it as it is, and load "
                "it again"
            )
        file = unfinished / WEIGHTS
        header = hashlib.sha256(read_header(file).raw).hexdigest()
        sums = [[tensor.file_offset, tensor.nbytes, tensor.sha256] for tensor in placed]
        facts = {_STATE: state_of(file), _SOURCES: now, "header": header, "sums": sums}
        (unfinished / _SUMS).write_text(json.dumps(facts), encoding="utf-8")

    how = f", converted to {' and '.join(sorted({change.dtype for change in changes}))},"
    hold = keep_packed(
        folder, entries, cache, made_for, how=how, finish=finish, whole=lambda: _is_whole(folder)
    )
    return KeptWeights((folder / WEIGHTS,), hold=hold)


def _states(files: Sequence[Path]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return what the system says of files: what differs once a file is replaced, and the ctimes."""
    states = [state_of(file) for file in files]
    return [state[:3] for state in states], [state[3] for state in states]


def _place_of(cache: Cache, name: str, entries: Sequence[PackEntry], ctimes: Sequence[int]) -> Path:
    """Return the place of what was converted of files as they are now, or of nothing yet.

    Nothing but the ctime may tell a file from what it was before, so the conversions of both have the same
    `name`, and the place of the second is that of a number beside it.
    """

    def place(number: int) -> Path:
        numbered = hashlib.sha256(f"{name} {number}".encode()).hexdigest()[:32] if number else name
        return cache.place_of(numbered)

    there = list(takewhile(Path.is_dir, map(place, count())))
    seen = (path for path in there if _facts(path).get(_SOURCES) == ctimes)
    current = (path for path in there if _is_current(path, entries, ctimes))
    return next(chain(seen, current), place(len(there)))


def _facts(folder: Path) -> dict[str, Any]:
    """Return what is noted beside converted weights; nothing where that is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        facts = json.loads((folder / _SUMS).read_bytes())
        return facts if isinstance(facts, dict) else {}
    return {}


def _note(folder: Path, facts: Mapping[str, Any]) -> None:
    with suppress(SourceError), replace_file(folder / _SUMS, force=True) as written:
        write_all(written, json.dumps(facts).encode())


def _is_current(folder: Path, entries: Sequence[PackEntry], ctimes: Sequence[int]) -> bool:
    """Tell whether the files, whose ctimes have changed, still give what was converted of them before."""
    facts = _facts(folder)
    with suppress(TypeError, ValueError):  # of damaged facts, by which the entry is written again
        sums = [sha256 for _, _, sha256 in facts.get("sums", ())]
        if len(sums) == len(entries):
            _log.info("the ctimes of what %s was converted from have changed: it is compared", folder)
            if any(digest_of_chunks(e.chunks()) != sha256 for e, sha256 in zip(entries, sums, strict=True)):
                return False
            _note(folder, {**facts, _SOURCES: list(ctimes)})
    return True


def _is_whole(folder: Path) -> bool:
    """Tell whether a file of the cache is what was written; all is hashed if its state has changed."""
    file, facts = folder / WEIGHTS, json.loads(read_bounded(folder / _SUMS, "an index"))
    if (now := list(state_of(file))) == facts[_STATE]:
        return True
    _log.info("%s is not as it was left: all of its bytes are compared", file)
    if hashlib.sha256(read_header(file).raw).hexdigest() != facts["header"]:
        return False
    for start, nbytes, sha256 in facts["sums"]:
        if digest_of_chunks(file_chunks(file, start, start + nbytes)) != sha256:
            return False
    _note(folder, facts | {_STATE: now})
    return True
