"""Which pieces are issued together: neighbours that may start, of one direction."""

import pytest

from penstock.runtime.stream.engine import MethodTable, Piece, Position, Queue

IN = (
    Piece(0, 64, 1, 0),
    Piece(64, 128, 1, 0),
    Piece(128, 192, 2, 0),
    Piece(192, 256, 3, 1),
    Piece(300, 364, 3, 1),
)
OUT = (Piece(0, 64, 2, 0, out=True), Piece(64, 128, 2, 0, out=True), Piece(128, 192, 3, 0))


def position_of(pieces, *, index=0, ended=4):
    """In a pass of four steps, of which some have ended."""
    queue = Queue.of(0, pieces, 4)
    table = MethodTable(0, 0, ((),) * 4, ((),) * 4, False, (), {}, queue, queue, (), False)
    return Position(queue, table, index=index, ahead=False, ended=ended)


@pytest.mark.parametrize(
    ("pieces", "index", "ended", "places"),
    [
        (IN, 0, 1, [0, 64, 128]),  # the others wait for step 1
        (IN, 0, 2, [0, 64, 128, 192]),  # the last one does not begin where they stop
        (IN, 2, 2, [128, 192]),
        (IN, 4, 2, [300]),
        (OUT, 0, 1, [0, 64]),
        (OUT, 1, 1, [64]),
        (OUT, 2, 1, [128]),
        ((IN[0], OUT[1]), 0, 1, [0]),
    ],
)
def test_neighbours_of_one_direction_are_issued_together(pieces, index, ended, places):
    found = position_of(pieces, index=index, ended=ended).adjacent_pieces()
    assert [piece.start for piece in found] == places
