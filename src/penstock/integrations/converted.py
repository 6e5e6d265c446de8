"""Tensors of a checkpoint in the dtypes that a module has them in, converted once into the cache.

A library converts while it loads: to the dtype that was asked for or that the configuration states, but for
what it keeps in float32. A module that was built by its rules has these dtypes, so the module says what to
convert.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.cached import WEIGHTS, keep_packed, place_of
from penstock.integrations.kept import KeptWeights
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.weights.subclasses import has_parts
from penstock.runtime.cache import Cache
from penstock.runtime.checkpoint.binding import Names, tensor_names
from penstock.runtime.checkpoint.opening import Checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading, StoredTensor
from penstock.runtime.files.pack import Chunk, PackedTensor, PackEntry
from penstock.runtime.files.safetensors_file import FLOATS, TORCH_NAMES, read_header
from penstock.runtime.files.stamp import file_chunks
from penstock.schedule.atomic_file import replace_file, write_all
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import SourceError

_log = logging.getLogger(__name__)

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
    """Whether a tensor of files has another dtype than a weight, to which libraries convert it."""
    before, after = TORCH_NAMES.get(stored.dtype), dtype_name(value.dtype)
    return before != after and before in FLOATS and after in FLOATS


def keep_converted(
    module: nn.Module, checkpoint: Checkpoint, names: Mapping[str, Names], cache: Cache, made_for: str
) -> list[KeptWeights]:
    """The files that hold a module's weights: its own, and one of the cache for those of other dtypes.

    `names` is what the files call weights otherwise. Raises SourceError where the cache cannot be written, or
    where the checkpoint changes meanwhile.
    """
    own = {fqn: tensor_names(fqn, names) for fqn, _ in _named(module)}
    changes = {
        (name, fqn): _Change(name, checkpoint.tensors[name], dtype_name(value.dtype))
        for fqn, value in _convertible(module)
        for name in own[fqn]
        if name in checkpoint.tensors and is_converted(checkpoint.tensors[name], value)
    }
    if not changes:
        return [KeptWeights(checkpoint.files, names)]
    changed: dict[str, Names] = {}
    for fqn in dict.fromkeys(fqn for _, fqn in changes):
        pairs = [(name, changes.get((name, fqn))) for name in own[fqn]]
        changed[fqn] = tuple(change.new_name if change else name for name, change in pairs)
    written = _write(tuple(dict.fromkeys(changes.values())), checkpoint.files, cache, made_for)
    # Where all is converted, nothing more is read from the checkpoint.
    left = any(
        has_parts(value) or any(n in checkpoint.tensors and (n, fqn) not in changes for n in own[fqn])
        for fqn, value in _named(module)
    )
    rest = {fqn: found for fqn, found in names.items() if fqn not in changed}
    kept = [KeptWeights(checkpoint.files, rest)] if left else []
    return [*kept, KeptWeights(written.files, changed, hold=written.hold)]


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _convertible(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a checkpoint of the module holds, but for quantised ones."""
    computed = {
        f"{path}.{key}" if path else key
        for path, child in module.named_modules()
        for key in child._non_persistent_buffers_set
    }
    yield from ((fqn, one) for fqn, one in _named(module) if fqn not in computed and not has_parts(one))


def _write(changes: Sequence[_Change], files: Sequence[Path], cache: Cache, made_for: str) -> KeptWeights:
    """Write converted tensors to a file of the cache, unless it is there, and keep it there.

    Its folder is named by what the system says of the checkpoint's files, by their headers, and by the names
    and dtypes of the tensors: the files themselves are read once, and again where their ctimes have changed.
    """
    before, ctimes = _states(files), _ctimes(files)
    in_file = sorted(changes, key=lambda one: [(box.file, box.start) for box in one.tensor.boxes])
    entries = [change.entry(files) for change in in_file]
    headers = [hashlib.sha256(read_header(file).raw).hexdigest() for file in files]
    facts = f"converted {before} {headers} {[entry.name for entry in entries]}"
    folder = place_of(
        cache.weights,
        hashlib.sha256(facts.encode()).hexdigest()[:32],
        is_seen=lambda made: _facts(made).get(_SOURCES) == ctimes,
        is_current=lambda made: _is_current(made, entries, ctimes),
    )

    def finish(made: Path, placed: Sequence[PackedTensor]) -> None:
        now = _ctimes(files)
        touched = now != ctimes and [one.sha256 for one in placed] != [
            _digest(one.chunks()) for one in entries
        ]
        if touched or _states(files) != before:
            raise SourceError(
                f"{files[0].parent} was written to while it was being converted: leave it as it is, and load "
                "it again"
            )
        header = hashlib.sha256(read_header(made / WEIGHTS).raw).hexdigest()
        sums = [[one.file_offset, one.nbytes, one.sha256] for one in placed]
        facts = {_STATE: _state(made / WEIGHTS), _SOURCES: now, "header": header, "sums": sums}
        (made / _SUMS).write_text(json.dumps(facts), encoding="utf-8")

    how = f", converted to {' and '.join(sorted({change.dtype for change in changes}))},"
    whole = partial(_is_whole, folder)
    held = keep_packed(folder, entries, cache, made_for, how=how, finish=finish, whole=whole)
    return KeptWeights((folder / WEIGHTS,), hold=held)


def _states(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    """What the system says of files, which differs once one of them is written to or replaced."""
    states = [file.stat() for file in files]
    return [(state.st_size, state.st_mtime_ns, state.st_ino) for state in states]


def _ctimes(files: Sequence[Path]) -> list[int]:
    return [file.stat().st_ctime_ns for file in files]


def _facts(folder: Path) -> dict[str, Any]:
    """What is noted beside converted weights; nothing where that is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / _SUMS).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _note(folder: Path, facts: Mapping[str, Any]) -> None:
    with suppress(SourceError), replace_file(folder / _SUMS, force=True) as written:
        write_all(written, json.dumps(facts).encode())


def _is_current(folder: Path, entries: Sequence[PackEntry], ctimes: Sequence[int]) -> bool:
    """Whether the files give now, whose ctimes have changed, what was converted of them before."""
    facts = _facts(folder)
    with suppress(TypeError, ValueError):  # of damaged facts, by which the entry is written again
        sums = [sha256 for _, _, sha256 in facts.get("sums", ())]
        if len(sums) == len(entries):
            _log.info("the ctimes of what %s was converted from have changed: it is compared", folder)
            same = all(_digest(e.chunks()) == sha256 for e, sha256 in zip(entries, sums, strict=True))
            if same:
                _note(folder, {**facts, _SOURCES: list(ctimes)})
            return same
    return True


def _digest(chunks: Iterable[Chunk]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _state(file: Path) -> list[int]:
    """What the system says of a file, which differs once it is written to, replaced or copied."""
    state = file.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _is_whole(folder: Path) -> bool:
    """Whether a file of the cache is the one that was written.

    What the system says of the file is compared with what it said then. Where that differs, every byte is
    hashed, which reads about 1.8 GB/s, and what the system says now is noted for the next time.
    """
    file, facts = folder / WEIGHTS, json.loads(read_bounded(folder / _SUMS, "an index"))
    if (now := _state(file)) == facts[_STATE]:
        return True
    _log.info("%s is not as it was left: all of its bytes are compared", file)
    if hashlib.sha256(read_header(file).raw).hexdigest() != facts["header"]:
        return False
    for start, nbytes, sha256 in facts["sums"]:
        if _digest(file_chunks(file, start, start + nbytes)) != sha256:
            return False
    _note(folder, facts | {_STATE: now})
    return True
