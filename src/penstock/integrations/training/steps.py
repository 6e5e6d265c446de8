"""What steps of training moved, said in the log less and less often."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from penstock.schedule.facts.sizes import format_size, format_time

_log = logging.getLogger(__name__)


@dataclass
class Steps:
    """Counts the backward passes of a component, and logs the first, the second, the fourth, and so on.

    A line says what was moved since the one before, on average. Where the weights were loaded again
    meanwhile, it counts from then.
    """

    name: str
    done: int = 0
    _since: int = 0
    _said_to_fit: bool = False
    _before: tuple[int, int, float, int] = (0, 0, 0.0, 0)
    _written: tuple[int, int] = (0, 0)

    def add(self, stats: Any, streamed: int, written: int) -> None:
        """Count a backward pass, after which the loaded module has these counters.

        `streamed` are the bytes that its plan copies in a step. Once it is said where there are none.
        `written` are those of activations that have left memory so far.
        """
        self.done, self._since = self.done + 1, self._since + 1
        if not streamed and not self._said_to_fit:
            self._said_to_fit = True
            _log.warning(
                "all weights of %s fit into memory, and nothing streams: it trains as fast without penstock",
                self.name,
            )
        now = stats.passes, stats.bytes_moved, stats.stall_seconds, stats.misses
        if now[0] < self._before[0]:
            self._before, self._since = (0, 0, 0.0, 0), 1
        if self.done & (self.done - 1):
            return
        _, moved, stalled, misses = (a - b for a, b in zip(now, self._before, strict=True))
        _log.info(
            "%s, step %d: %s of weights moved and %s waited for them in each, misses %d; "
            "%s of activations written to a file and read again",
            self.name,
            self.done,
            format_size(int(moved // self._since)),
            format_time(stalled / self._since * 1e9),
            misses,
            format_size((written - self._written[1]) // (self.done - self._written[0])),
        )
        self._before, self._since, self._written = now, 0, (self.done, written)
