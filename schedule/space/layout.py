"""The order and offsets of all storages in their source: packed by first use, or as found in files.

A layout is a fact, not a decision: it says where bytes lie before anything is planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from penstock.schedule.facts.model import (
    ALIGNMENT,
    IN_ARENA,
    Arena,
    ArenaKind,
    Extent,
    Range,
    Storage,
    Trace,
    WeightFile,
)
from penstock.schedule.facts.problem import first_uses


def packed_arena(
    storages: Sequence[Storage], traces: Sequence[Trace], *, kind: ArenaKind, granule: int, alignment: int
) -> Arena:
    """An arena of anonymous memory whose layout holds the storages in first-use order.

    Each storage begins its phase behind a multiple of `alignment` bytes, itself a multiple of ALIGNMENT if
    any storage has a phase. One segment covers all weights, and each produced storage has one of its own;
    there is no segment when nothing is streamed.
    """
    layout = [-1] * len(storages)
    end = 0
    used = first_uses(storages, traces)
    for index in (s for s in used if storages[s].kind != "produced"):
        layout[index] = _align(end, alignment) + storages[index].phase
        end = layout[index] + storages[index].nbytes
    segments = (Range(0, end),) if end else ()
    produced = tuple(_produced_segments(storages, used, layout, end, (granule, alignment)))
    return Arena(kind, "anonymous", granule, tuple(layout), (*segments, *produced))


def _produced_segments(
    storages: Sequence[Storage], some: Sequence[int], layout: list[int], end: int, multiples: Sequence[int]
) -> Iterator[Range]:
    """Lay out the produced ones of some storages from `end` on, each at these multiples, and yield them."""
    for index in (s for s in some if storages[s].kind == "produced"):
        for multiple in multiples:
            end = _align(end, multiple)
        layout[index], end = end, end + storages[index].nbytes
        yield Range(layout[index], end)


def mapped_arena(
    storages: Sequence[Storage],
    files: Sequence[WeightFile],
    *,
    granule: int,
    page: int = 4096,
    traces: Sequence[Trace] = (),
) -> Arena | None:
    """An arena that maps the files in which the weights lie, or None if a storage cannot be mapped.

    The layout consists of the files one after the other, each beginning at a multiple of the granule. It
    holds every streamable storage with bytes or, if `traces` are given, those that the traces read. Each of
    them has to be one run of bytes in one file, at an offset of the storage's phase modulo ALIGNMENT. There
    is one segment for each file, which reaches, in whole pages, from the first to the last byte of the
    storages in it. Behind the files, produced storages have segments of anonymous memory of their own.
    """
    wanted = range(len(storages)) if not traces else first_uses(storages, traces)
    chosen = [s for s in wanted if storages[s].kind in IN_ARENA and storages[s].nbytes > 0]
    bases = tuple(_file_bases(files, max(granule, page)))
    layout = [-1] * len(storages)
    bounds: dict[int, Range] = {}
    for index in sorted(s for s in chosen if storages[s].kind != "produced"):
        place = place_in_file(storages[index])
        if place is None or place[1] % ALIGNMENT != storages[index].phase:
            return None
        file, offset = place
        if not 0 <= offset <= files[file].nbytes - storages[index].nbytes:
            return None
        layout[index] = bases[file] + offset
        stop = layout[index] + storages[index].nbytes
        seen = bounds.get(file, Range(layout[index], stop))
        bounds[file] = Range(min(seen.start, layout[index]), max(seen.stop, stop))
    segments = tuple(
        Range(bounds[file].start // page * page, _align(bounds[file].stop, page)) for file in sorted(bounds)
    )
    end = max((_align(segment.stop, page) for segment in segments), default=0)
    produced = tuple(_produced_segments(storages, chosen, layout, end, (granule, page)))
    return Arena("paged", "mapped", granule, tuple(layout), (*segments, *produced))


def place_in_file(storage: Storage) -> tuple[int, int] | None:
    """The file of a storage and the offset of its first byte; None if its extents are not one run."""
    extents = storage.extents
    if not extents or not _is_one_run(extents):
        return None
    return extents[0].file, extents[0].file_offset - extents[0].storage_offset


def _file_bases(files: Sequence[WeightFile], alignment: int) -> Iterator[int]:
    end = 0
    for file in files:
        yield end
        end = _align(end + file.nbytes, alignment)


def _is_one_run(extents: Sequence[Extent]) -> bool:
    return all(
        before.file == after.file
        and before.file_offset + before.nbytes == after.file_offset
        and before.storage_offset + before.nbytes == after.storage_offset
        for before, after in itertools.pairwise(extents)
    )


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
