"""Reads and writes of weights between calls, as merging an adapter makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from penstock.integrations.called.kinds import IN_MEMORY
from penstock.integrations.called.measuring import OwnMemory
from penstock.integrations.called.places import Places, Watched
from penstock.integrations.emptied.absent import SAVE_INSTEAD
from penstock.integrations.kept import KeptWeights, digest_of, in_file
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.checkpoint.binding import Rules, find_values
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.files.artifact_files import stamp_file
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.facts.model import ALIGNMENT, part_nbytes

_log = logging.getLogger(__name__)

_WAITING = 64 << 20
"""Written weights of these bytes are saved at once, so that merging a whole model takes little memory."""

Keep = Callable[[Mapping[str, torch.Tensor]], KeptWeights]
"""Writes tensors to a file that is then kept."""


@dataclass(eq=False)
class _Opened:
    """A weight that something has read between calls."""

    watched: Watched
    digests: tuple[str, ...] | None = None  # of its parts, when views of it were handed out
    was_written: bool = False

    @property
    def is_written(self) -> bool:
        """Tell whether something has written to the weight, by whatever way if views were handed out."""
        written = self.was_written or self.watched.is_written
        return written or (self.digests is not None and _digests(self.watched.value) != self.digests)


class BetweenCalls:
    """Weights that are read or written between calls.

    A weight is read from its file into memory of its own. A weight that was written is saved to the cache,
    and streams from there. A weight stays in memory if something keeps a view of it.

    Args:
        places: The places of the weights when the model was applied.
        own: What reads weights from the files, with the facts of the module.
        kept: The files that hold the weights; files that are written are added.
        keep: What writes weights to the cache; None where they stay in memory.
        make_room: What is told of bytes before they are read, and says whether the cap has room for them.

    Attributes:
        own: What reads weights from where they are now, by their names of then.
        twins: The twins, by id.
        names: Their names of then, by id.
    """

    def __init__(
        self,
        places: Places,
        own_memory: OwnMemory,
        weight_files: list[KeptWeights],
        keep: Keep | None,
        make_room: Callable[[int], bool],
    ) -> None:
        self.own, self.twins, self.names = own_memory, places.twins, places.names
        self.has_changed = False
        self._kept, self._keep, self._make_room = weight_files, keep, make_room
        self.opened: dict[int, _Opened] = {}
        self._written: dict[int, torch.Tensor] = {}
        self._pointed: dict[int, torch.Tensor] = {}  # those whose addresses are known

    def value(self, twin: int) -> torch.Tensor:
        """Return a weight with its values."""
        self._close_unused(but=twin)
        if twin not in self.opened:
            # No variable may refer to the value: references to it are counted.
            if was_written := twin in self._written:
                watched = Watched(self._written.pop(twin))
            else:
                self._make_room(self._pointed_bytes(twin))
                watched = Watched(self.own.weight(self.twins[twin], self.names[twin], {}))
            watched.start()
            self.opened[twin] = _Opened(watched, was_written=was_written)
        return self.opened[twin].watched.value

    def address(self, twin: int, suffix: str) -> int:
        """Return where a part of a weight stays, until a call begins or memory is given back.

        Raises StreamError if the cap has no room for all whose addresses are known.
        """
        if twin not in self._pointed and not self._make_room(self._pointed_bytes(twin)):
            raise StreamError(
                f"the parameter {self.names[twin]} and {len(self._pointed)} others would have to stay in "
                "memory, as something reads them by their addresses, and memory= has no room for that: "
                f"{SAVE_INSTEAD}"
            )
        value = self.value(twin)
        self.share(twin)
        self._pointed[twin] = value
        return plain_tensors("", value)[suffix].data_ptr()

    def forget_addresses(self) -> None:
        """Give back the weights whose addresses are known."""
        if self._pointed:
            self._pointed.clear()
            self._close_unused()

    def _pointed_bytes(self, twin: int) -> int:
        """The bytes of a weight and of all whose addresses are known."""
        return sum(part.nbytes for known in {*self._pointed, twin} for part in self._parts(known).values())

    def share(self, twin: int) -> None:
        """Note that something has a view of the value of a weight."""
        opened = self.opened[twin]
        if opened.digests is None:
            opened.digests = _digests(opened.watched.value)

    def write(self, twin: int) -> None:
        """Note that the value of a weight was written to. Raises StreamError where that cannot count."""
        opened, stands_for = self.opened[twin], self.twins[twin]
        parts = plain_tensors("", opened.watched.value).values()
        if [(part.shape, part.dtype) for part in parts] != [
            (part.shape, part.dtype) for part in self._parts(twin).values()
        ]:
            del self.opened[twin]
            raise StreamError(
                f"the parameter {self.names[twin]} streams as {list(stands_for.shape)} of "
                f"{stands_for.dtype}, and was given other memory: {IN_MEMORY}"
            )
        self._refuse_shared(twin)
        opened.was_written = True

    def finish(self) -> dict[int, torch.Tensor]:
        """Save what was written; returns weights that stay in memory in the next call.

        Something keeps views of those that are still `opened`. The others cannot be saved, and stay for good.
        """
        self._pointed.clear()
        self._close_unused()
        for twin, opened in list(self.opened.items()):
            if self.shares(twin) is not None and opened.is_written:
                del self.opened[twin]
                self._refuse_shared(twin)
            self.share(twin)
        self._save()
        staying = {twin: opened.watched.value for twin, opened in self.opened.items()} | self._written
        self._written.clear()
        self.own.close()
        return staying

    def _parts(self, twin: int) -> dict[str, torch.Tensor]:
        return plain_tensors(self.names[twin], self.twins[twin])

    def _close_unused(self, but: int | None = None) -> None:
        """Give back the memory of weights to which nothing refers any more."""
        for twin, opened in list(self.opened.items()):
            if twin == but or opened.watched.is_viewed:
                continue
            del self.opened[twin]
            value = opened.watched.value
            if opened.is_written:
                self._refuse_shared(twin)
                self._written[twin] = value
        if sum(value.nbytes for value in self._written.values()) >= _WAITING:
            self._save()

    def shares(self, twin: int) -> str | None:
        """Return the name of another weight that lies in the memory of a weight, or None."""
        storages = self._storages(twin)
        pairs = self.names.items()
        return next((name for tied, name in pairs if tied != twin and storages & self._storages(tied)), None)

    def _storages(self, twin: int) -> set[int]:
        return {self.own.facts.parts[name].storage for name in self._parts(twin)}

    def _refuse_shared(self, twin: int) -> None:
        name = self.shares(twin)
        if name is not None:
            raise StreamError(
                f"the parameter {self.names[twin]} shares its memory with {name}, and was written to: "
                f"{IN_MEMORY}"
            )

    def _save(self) -> None:
        """Write weights to the cache, from where they stream then, if they are alone in their storages."""
        saved = {twin: value for twin, value in self._written.items() if self._can_save(twin, value)}
        if not saved or self._keep is None:
            return
        names: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        for twin, value in saved.items():
            for name, part in plain_tensors(self.names[twin], value.detach()).items():
                names[name] = f"{name} (written {len(self._kept)})"
                tensors[names[name]] = part.detach()
        try:
            file = self._keep(tensors)
        except SourceError as error:
            _log.warning("weights that were written stay in memory, as they cannot be saved: %s", error)
            return
        digests = {name: file.digests[stored] for name, stored in names.items()}
        self._kept.append(replace(file, names=names, digests=digests))
        self._place(names, file, {name: value.data_ptr() % ALIGNMENT for name, value in tensors.items()})
        for twin in saved:
            del self._written[twin]

    def _can_save(self, twin: int, value: torch.Tensor) -> bool:
        written, former = plain_tensors("", value), self._parts(twin)
        if [*map(_geometry, written.values())] != [*map(_geometry, former.values())]:
            return False  # kernels add up weights that lie otherwise in another order
        parts = [self.own.facts.parts[name] for name in self._parts(twin)]
        return all(
            part.offset == 0 and part_nbytes(part) == self.own.facts.storages[part.storage].nbytes
            for part in parts
        )

    def _place(self, names: Mapping[str, str], weights_kept: KeptWeights, phases: Mapping[str, int]) -> None:
        """Have the facts name the file in which weights are now."""
        weights = [
            replace(weight, parts=(in_file(weight.parts[0]),))
            for weight in self.own.facts.weights
            if weight.fqn in names
        ]
        values = find_values(weights, open_checkpoint(weights_kept.files), Rules(names))
        storages, first = list(self.own.facts.storages), len(self.own.facts.files)
        placed = values.placed(storages)
        for weight in weights:
            s = weight.parts[0].storage
            extents = tuple(replace(extent, file=extent.file + first) for extent in placed[s].extents)
            storages[s] = replace(storages[s], extents=extents, phase=phases[names[weight.fqn]])
        files = tuple(stamp_file(path, recorded_path=str(path.absolute())) for path in values.files)
        self.own.facts = replace(
            self.own.facts, files=(*self.own.facts.files, *files), storages=tuple(storages)
        )
        self.own.close()
        self.has_changed = True


def _geometry(part: torch.Tensor) -> tuple[object, ...]:
    return part.shape, part.dtype, part.stride()


def _digests(value: torch.Tensor) -> tuple[str, ...]:
    return tuple(digest_of(part) for part in plain_tensors("", value).values())
