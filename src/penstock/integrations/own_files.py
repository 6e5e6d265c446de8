"""The safetensors files from which a library loaded a module, where they hold the bytes that it has now."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from penstock._extras import local_folder
from penstock.integrations.folders import weight_sets
from penstock.integrations.kept import KeptWeights, bytes_of, digest_of
from penstock.integrations.libraries import origin_of
from penstock.integrations.weight_files import store
from penstock.models.configuration import names_in_checkpoint
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.weights.lifted import storage_identity
from penstock.passes.weights.subclasses import has_parts
from penstock.runtime.cache import Cache
from penstock.runtime.checkpoint.binding import Names, listed, tensor_names
from penstock.runtime.checkpoint.opening import Checkpoint, open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import StoredTensor
from penstock.runtime.files.safetensors_file import TORCH_NAMES
from penstock.runtime.files.tensor_file import open_tensors
from penstock.schedule.facts.model import ALIGNMENT

_log = logging.getLogger(__name__)

_WRAPPED = ".base_layer."
"""In the name of a weight whose layer an adapter has wrapped, and not in its name in files."""

Matches = Mapping[str, Names]
"""For each weight of a module the tensors of its files that are as large: one, or several for its rows."""


def keep_weights(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], cache: Cache, made_for: str
) -> list[KeptWeights]:
    """Keep tensors of a module in files: its own where they hold the same bytes, and one that is written.

    A library says where it loaded a module from. Each byte there is compared with the one in memory. What
    was converted, quantised or changed since, and what was added, is written to the cache.
    """
    checkpoint, matches, phases = _best_match(module, tensors)
    if not phases:
        return [store(tensors, cache, made_for)]
    staying = {fqn: tensors[fqn] for fqn in phases}
    written = {fqn: value for fqn, value in tensors.items() if fqn not in phases}
    # Nothing else is what these files hold under its name: weights that have changed, buffers, constants.
    aliases = _aliases(module)
    hidden: dict[str, Names] = {name: f"penstock: {name}" for name in checkpoint.tensors}
    names = hidden | {alias: matches[fqn] for fqn in staying for alias in aliases[fqn]}
    _log.info(
        "%d of %d tensors of %s stay where they are, in %s",
        len(staying),
        len(tensors),
        made_for,
        checkpoint.files[0].parent,
    )
    own_files = KeptWeights(
        checkpoint.files,
        {fqn: name for fqn, name in names.items() if name != (fqn,)},
        {fqn: digest_of(value) for fqn, value in staying.items()},
        {alias: phase for fqn, phase in phases.items() if phase is not None for alias in aliases[fqn]},
    )
    if not written:
        return [own_files]
    _log.info("%s are not in those files as they are in memory", listed(list(written)))
    free = {fqn: tensor_names(fqn, hidden)[0] for fqn in written}
    stored = store({free[fqn]: value for fqn, value in written.items()}, cache, made_for)
    return [own_files, replace(stored, digests={fqn: stored.digests[free[fqn]] for fqn in written})]


def _best_match(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[Checkpoint, Matches, Mapping[str, int | None]]:
    """The checkpoint that holds most bytes of a module, its matches, and `_same_bytes`; all may be empty."""
    best: tuple[Checkpoint, Matches, Mapping[str, int | None]] = Checkpoint((), {}), {}, {}
    most, total = 0, _nbytes(tensors, tensors)
    for checkpoint in _checkpoints(module):
        matches = _matches(module, tensors, checkpoint)
        if _nbytes(tensors, matches) > most:
            phases = dict(_same_bytes(checkpoint, matches, tensors))
            if (nbytes := _nbytes(tensors, phases)) > most:
                best, most = (checkpoint, matches, phases), nbytes
        if most == total:
            break
    return best


def _nbytes(tensors: Mapping[str, torch.Tensor], fqns: Iterable[str]) -> int:
    return sum(tensors[fqn].nbytes for fqn in fqns)


def _checkpoints(module: nn.Module) -> Iterator[Checkpoint]:
    """Yield the checkpoints in the folder, or in the hub's cache, that a module was loaded from.

    Libraries say of neither a revision nor a component's sub-folder that they loaded it, so those of all
    snapshots and sub-folders follow.
    """
    origin = origin_of(module)
    if not origin:
        return
    with suppress(Exception):  # the folder is gone: what is in memory is all there is
        folder = local_folder(origin, getattr(module.config, "_commit_hash", None))
        snapshots = folder.parent.iterdir() if folder.parent.name == "snapshots" else ()
        for root in dict.fromkeys((folder, *snapshots)):
            for place in (root, *(path for path in sorted(root.iterdir()) if path.is_dir())):
                yield from _opened(place)


def _opened(folder: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a folder and of each variant; none where it holds no safetensors."""
    with suppress(Exception):
        for files in weight_sets(folder):
            try:
                yield open_checkpoint(files)
            except Exception as error:
                _log.info("the weights of %s are not used where they are: %s", folder, error)


def _matches(module: nn.Module, tensors: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> Matches:
    stored = checkpoint.tensors
    aliases, converted = _aliases(module), names_in_checkpoint(module, stored)
    matches: dict[str, Names] = {}
    for fqn, value in tensors.items():
        for alias in aliases.get(fqn, ()):  # none for a part of a quantised weight
            plain = alias.replace(_WRAPPED, ".")
            for names in (converted.get(alias), converted.get(plain), (alias,), (plain,)):
                if names and all(n in stored for n in names) and _fits(value, [stored[n] for n in names]):
                    matches.setdefault(fqn, names)
    return matches


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of the bytes of each parameter and buffer, by each of them, but for quantised ones."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    places: dict[object, list[str]] = {}
    for fqn, value in ((fqn, value) for fqn, value in named if not has_parts(value)):
        place = (storage_identity(value), value.storage_offset(), value.shape, value.dtype)
        places.setdefault(place, []).append(fqn)
    return {fqn: tuple(together) for together in places.values() for fqn in together}


def _fits(value: torch.Tensor, stored: Sequence[StoredTensor]) -> bool:
    dtypes = {TORCH_NAMES.get(tensor.dtype) for tensor in stored}
    alike = value.is_contiguous() and (len(stored) > 1 or stored[0].shape == tuple(value.shape))
    return alike and dtypes == {dtype_name(value.dtype)} and sum(s.nbytes for s in stored) == value.nbytes


def _same_bytes(
    checkpoint: Checkpoint, matches: Matches, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, int | None]]:
    """Yield weights whose bytes are those of their tensors in the files, and the phases of those moved since.

    A library computes on tensors where their file is mapped. A copy of the model has them elsewhere.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(open_tensors(file)) for file in checkpoint.files]
        where = {name: file for file in opened for name in file.entries}
        for fqn, names in matches.items():
            stored = tensor_names(fqn, {fqn: names})
            entries = [where[name].entries[name] for name in stored]
            phase = tensors[fqn].data_ptr() % ALIGNMENT
            mapped = len(stored) > 1 or entries[0].start % ALIGNMENT == phase
            parts = torch.split(bytes_of(tensors[fqn]), [tensor.nbytes for tensor in entries])
            if all(where[name].holds(name, part) for name, part in zip(stored, parts, strict=True)):
                yield fqn, None if mapped or tensors[fqn].device.type != "cpu" else phase
