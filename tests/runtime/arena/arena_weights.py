"""Two weight files, storages in them, and plans for each kind of arena."""

import random
from functools import cache

import pytest

from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import HUGE_PAGE, PAGE
from penstock.schedule.facts.model import Arena, Extent, Hardware, Part, Range, Storage, WeightFile
from penstock.schedule.plan import Plan
from tests.engines import ENGINES
from tests.runtime.arena.native_arena import open_with

MIB = 1 << 20
LARGE = 5 * HUGE_PAGE + 3 * PAGE
"""Bytes of the first weight file: five huge granules and a few pages of a sixth."""
SMALL = 40_000
KINDS = ("mapped", "anonymous", "contiguous")
over_engines = pytest.mark.parametrize("weights", ENGINES, indirect=True)
"""A test of what `weights` opens, over arenas of both engines."""


@cache
def _random(nbytes):
    return random.Random(nbytes).randbytes(nbytes)


class Weights:
    """Two weight files of random bytes, storages in them, and plans for each kind of arena.

    Storages of the large file: 0 over more than a granule, 1 small, 2 up to the end. Of the small
    file: 3. The layout has the small file behind the large one.
    """

    def __init__(self, folder, engine="python"):
        self.engine = engine
        self.paths = (folder / "large", folder / "small")
        self.content = (_random(LARGE), _random(SMALL))
        for path, content in zip(self.paths, self.content, strict=True):
            path.write_bytes(content)
        small_base = 6 * HUGE_PAGE
        self.segments = (Range(0, LARGE), Range(small_base, small_base + SMALL))
        spots = (
            (0, 128, 3 * MIB),
            (0, 128 + 3 * MIB, 1000),
            (0, 4 * MIB, LARGE - 4 * MIB),
            (1, 64, SMALL - 64),
        )
        self.storages = tuple(Storage(n, "streamable", (Extent(f, at, 0, n),)) for f, at, n in spots)
        self.layout = tuple((0, small_base)[f] + at for f, at, _ in spots)
        self.source = Source(
            [WeightFile(str(p), len(c), 0, 0, "", "") for p, c in zip(self.paths, self.content, strict=True)],
            folder,
            check=False,
        )

    def plan(self, kind, *, granule=HUGE_PAGE, addresses=None):
        contiguous = kind == "contiguous"
        arena = Arena(
            "contiguous" if contiguous else "paged",
            "mapped" if kind == "mapped" else "anonymous",
            granule,
            self.layout,
            tuple(Range(0, s.stop) for s in self.segments[-1:]) if contiguous else self.segments,
        )
        places = tuple(addresses or _one_after_the_other(self.storages)) if contiguous else ()
        room = [a + s.nbytes for a, s in zip(places, self.storages, strict=False) if a >= 0]
        hardware = Hardware("test", 1.0, 1.0, 1.0, 0)
        return Plan(0, arena, max(room, default=0), (), places, (), (), "overlap", (), (), hardware)

    def open(self, kind, **options):
        return self.open_plan(self.plan(kind), **options)

    def open_plan(self, plan, **options):
        return open_with(self.engine, plan, self.storages, self.source, **options)

    def bytes_of(self, storage):
        extent = self.storages[storage].extents[0]
        return self.content[extent.file][extent.file_offset :][: extent.nbytes]


def _one_after_the_other(storages):
    end = 0
    for storage in storages:
        yield end
        end += storage.nbytes + -storage.nbytes % 64


def whole(storage, nbytes):
    return Part("", "uint8", (nbytes,), (1,), storage, 0)


def content(arena, weights, storage):
    return arena.view(whole(storage, weights.storages[storage].nbytes)).numpy().tobytes()
