"""The arenas that weight files allow: where weights may lie, and in which units."""

from dataclasses import replace

import pytest

from penstock.runtime.arena import kinds
from penstock.runtime.arena.kinds import allowed_arenas, cpu_arenas
from penstock.runtime.system.memory import PAGE
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Extent, Step, Storage, Trace, WeightFile
from penstock.schedule.payload.codec import Payload

LARGE = 64 << 10
"""Weights of at least so many bytes are packed at pages of the file."""


def payload_of(*places):
    """A payload of weights in one file, each given by its offset there and its bytes."""
    storages = tuple(Storage(n, "streamable", (Extent(0, at, 0, n),), phase=at % 64) for at, n in places)
    steps = (Step("all", tuple(range(len(places))), 1, 1),)
    return Payload(
        lowering="none",
        torch="",
        files=(WeightFile("weights", max(at + n for at, n in places), 0, 0, "", ""),),
        storages=storages,
        weights=(),
        methods=(),
        traces=(Trace("forward", 0, "", steps, 0, 0, "modelled"),),
    )


@pytest.mark.parametrize(
    ("places", "granule"),
    [
        ([(PAGE, LARGE)], PAGE),
        ([(64, LARGE)], 64),
        ([(64, LARGE - 1), (32 * PAGE, LARGE)], PAGE),  # small weights need not lie at pages
        ([(64, LARGE), (32 * PAGE, LARGE)], 64),
    ],
)
def test_a_contiguous_arena_is_of_pages_where_all_large_weights_begin_at_pages(places, granule):
    arena = cpu_arenas(payload_of(*places))["contiguous"]
    assert arena.granule == granule
    assert all(start % granule == 0 for start in arena.layout)


def test_an_arena_that_is_not_there_is_refused_for_its_own_reason(monkeypatch):
    plain = payload_of((PAGE, LARGE))
    writing = replace(plain, storages=(*plain.storages, Storage(PAGE, "produced", ())))
    assert list(allowed_arenas(plain, "cpu", "mapped")) == ["mapped"]
    monkeypatch.setattr(kinds, "supports_populate", lambda: False)
    for payload, arena, words in (
        (plain, "mapped", "these weights cannot be in an arena 'mapped': choose from contiguous, paged"),
        (writing, "mapped", "an arena 'mapped' has the weight files' own pages, .* compile with spill=False"),
        (writing, "heap", "these weights cannot be in an arena 'heap': choose from contiguous, paged"),
    ):
        with pytest.raises(PlanError, match=words):
            allowed_arenas(payload, "cpu", arena)
