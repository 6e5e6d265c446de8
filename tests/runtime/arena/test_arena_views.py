"""Views into arenas, and the bookkeeping of ranges and pieces."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.arena.reading import HeldRanges
from penstock.runtime.files.source import FileRange, FileRanges
from penstock.runtime.system.memory import HUGE_PAGE
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Part
from tests.runtime.arena.arena_weights import KINDS

DTYPES = sorted(
    name
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and not name.startswith(("q", "bits"))
)


@pytest.mark.parametrize("name", DTYPES)
def test_views_of_every_dtype(weights, name):
    arena = weights.open("mapped")  # whose pages are read-only, which not all ways to a tensor bear
    arena.fill(0, HUGE_PAGE)
    dtype = getattr(torch, name)
    view = arena.view(Part("", name, (3, 2), (1, 4), 0, 64))
    reference = torch.frombuffer(bytearray(weights.bytes_of(0)[64:512]), dtype=dtype).as_strided(
        (3, 2), (1, 4)
    )
    assert (view.dtype, view.shape, view.stride()) == (dtype, (3, 2), (1, 4))
    assert not view.requires_grad
    assert view.data_ptr() % 64 == 0
    assert _raw(view) == _raw(reference)
    empty = arena.view(Part("", name, (0, 7), (7, 1), 1, 0))
    assert (empty.dtype, empty.shape, empty.stride()) == (dtype, (0, 7), (7, 1))
    scalar = arena.view(Part("", name, (), (), 1, 0))
    assert (scalar.shape, scalar.dtype) == ((), dtype)
    del view, empty, scalar
    arena.close()


def _raw(tensor):
    size = tensor.element_size()
    memory = tensor.untyped_storage()
    data = ctypes.string_at(memory.data_ptr(), memory.nbytes())
    rows, columns = tensor.shape
    row, column = tensor.stride()
    start = tensor.storage_offset()
    spots = [(start + r * row + c * column) * size for r in range(rows) for c in range(columns)]
    return [data[spot : spot + size] for spot in spots]


@pytest.mark.parametrize("kind", KINDS)
def test_views_that_cannot_be(weights, kind):
    arena = weights.open(kind)
    with pytest.raises(PlanError, match="a view of 1001 bytes was asked of storage 1, which has 1000"):
        arena.view(Part("", "uint8", (501,), (2,), 1, 0))
    with pytest.raises(PlanError, match="'float7' is not a dtype"):
        arena.view(Part("", "float7", (1,), (1,), 1, 0))
    arena.close()


EDGES = st.integers(0, 40)


@given(st.lists(st.tuples(st.booleans(), EDGES, EDGES)))
def test_held_ranges_are_a_set_of_bytes(changes):
    held, model, peak = HeldRanges(), set[int](), 0
    for add, start, stop in changes:
        (held.add if add else held.remove)(start, stop)
        touched = set(range(start, stop))
        model = model | touched if add else model - touched
        peak = max(peak, len(model))
        assert (held.nbytes, held.peak_nbytes) == (len(model), peak)
        assert {b for low, high in held.within(3, 33) for b in range(low, high)} == model & set(range(3, 33))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 5)), max_size=12),
    st.tuples(EDGES, EDGES),
    st.integers(0, 2),
)
def test_pieces_cover_the_storages_and_at_most_the_gaps(spots, wanted, gap):
    pieces, position = [], 0
    for file, skip, nbytes in spots:
        position += skip
        pieces.append(FileRange(position, position + nbytes, file, position, 1000 + position))
        position += nbytes
    found = list(FileRanges(pieces, gap=gap).within(*wanted))
    needed = {(b, p.file) for p in pieces for b in range(p.start, p.stop) if wanted[0] <= b < wanted[1]}
    read = {(b, p.file) for p in found for b in range(p.start, p.stop)}
    assert needed <= read
    assert all(p.file_offset == p.start and p.address == 1000 + p.start for p in found)
    assert all(wanted[0] <= b < wanted[1] for b, _ in read)
    if gap == 0:
        assert needed == read
