"""The position of a streamer in its queue: the piece that is issued next, and the pieces that may start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.runtime.stream.queue import PIECE, MethodTable, Piece, Queue


@dataclass
class Position:
    """The next piece to issue, and how far the pass is.

    `queue.pieces[index]` is issued next. It is `ahead` when it is for the pass after the one whose
    steps are counted by `ended`. `left` and `left_ahead` count, by step, the pieces that are not
    copied yet. Every change needs the streamer's lock.
    """

    queue: Queue
    method: MethodTable
    left: list[int] = field(default_factory=list)
    left_ahead: list[int] = field(default_factory=list)
    index: int = 0
    ahead: bool = True
    ended: int = 0

    @classmethod
    def before(cls, queue: Queue, method: MethodTable) -> Position:
        """The position before a pass that begins with `queue`, after a pass that has ended."""
        return cls(queue, method, left_ahead=list(queue.counts), ended=method.steps)

    def begin(self, method: MethodTable) -> None:
        """Begin the pass that was ahead, as a pass of `method`."""
        if self.method is not method:
            self.queue, self.method = method.steady, method
            self.left_ahead = list(method.steady.counts)
        self.left, self.left_ahead = self.left_ahead, list(method.steady.counts)
        self.ahead, self.ended = False, 0
        self._turn()

    def may_start(self, index: int) -> bool:
        """Whether the step that piece `index` waits for has ended."""
        if index >= len(self.queue.pieces):
            return False
        after = self.queue.pieces[index].after
        if self.ahead:
            return after < 0 and after + self.method.steps < self.ended
        return after < self.ended

    @property
    def counts(self) -> list[int]:
        """The counts that the next piece belongs to."""
        return self.left_ahead if self.ahead else self.left

    def small_pieces(self) -> Sequence[Piece]:
        """The next piece and those behind it that may start too, up to the size of a large one."""
        nbytes, end = 0, self.index
        while self.may_start(end):
            nbytes += self.queue.pieces[end].stop - self.queue.pieces[end].start
            if nbytes > PIECE and end > self.index:
                break
            end += 1
        return self.queue.pieces[self.index : end]

    def adjacent_pieces(self) -> Sequence[Piece]:
        """The next piece and those that may start too, each from where the one before it stops."""
        pieces, end = self.queue.pieces, self.index + 1
        while self.may_start(end) and pieces[end].start == pieces[end - 1].stop:
            end += 1
        return pieces[self.index : end]

    def advance(self, count: int) -> None:
        """Go past the next `count` pieces, which are issued, and behind the last one into the next pass."""
        self.index += count
        self._turn()

    def _turn(self) -> None:
        if not self.ahead and self.index >= len(self.queue.pieces):
            self.queue, self.index, self.ahead = self.method.steady, 0, True
