"""How much of a pass the link at least pauses, by how much memory is refilled: a convex curve from below.

Let z be the memory that does not hold the same bytes all the time and D the bytes that do not fit, so that a
pass copies D + z at least. Copies follow one another on the link. When the next one begins, its room is
free, and all bytes of the one before are still there but those that were read and dropped since it
arrived. So two neighbours are together no larger than z and what was dropped between them; around the pass

    2 (D + z) <= n z + dropped,

for n copies. Bytes that are dropped between two copies were read there from beginning to end, while the link
was idle. With the latency l, and y[k] the share of the read of step k (r[k] long, of s[k] bytes) for which
the link is idle,

    l n + sum y[k] r[k]  >=  2 l (D + z) / z - max over y of sum y[k] (l s[k] / z - r[k]),

where sum y[k] s[k] <= D + z. Bytes that several steps read are dropped after the last of these reads, so they
count at the longest of them only; if they are copied more than once, each further copy adds twice as much
on the left as is dropped after it. The maximum takes the steps with most bytes a nanosecond first: a
knapsack that may be cut anywhere. Neither are more than z bytes dropped at once: steps that read much more
than others (an embedding) are left out of both sums, and cost one latency each.

No two copies that begin within one read replace each other, so those that do are together no larger than z.
A read whose copies are left out takes z from what is copied, and two neighbours apart: the last copy before
it and the first after it, of z at most each, have one neighbour only. So n is less by 3 at most for each
read left out; and one copy before it may pause within it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_POINTS_AN_OCTAVE = 24
_LARGE = 8
"""Times the mean bytes of a step, from which it counts as one that reads much."""


class PauseCurve:
    """The right-hand side as a function of z, for given reads."""

    def __init__(self, excess: float, latency: float, nbytes: numpy.ndarray, read: numpy.ndarray) -> None:
        import numpy

        self.large = nbytes > _LARGE * nbytes.mean()
        nbytes = numpy.where(self.large, 0.0, nbytes)
        nbytes, read = nbytes[nbytes > 0], read[nbytes > 0]
        with numpy.errstate(divide="ignore"):
            density = nbytes / read
        order = numpy.argsort(-density, kind="stable")
        self._excess, self._latency, self._density = excess, latency, density[order]
        self._nbytes = numpy.concatenate(([0.0], nbytes[order].cumsum()))
        self._read = numpy.concatenate(([0.0], read[order].cumsum()))

    def lines(
        self, smallest: float, largest: float, *, apart: int = 0
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Slopes and values at 0 of lines that lie nowhere above the curve up to `largest`.

        Below `smallest` they keep below what the curve can fall to there. The copies that begin within
        `apart` reads do not count.
        """
        import numpy

        octaves = max(1.0, float(numpy.log2(largest / smallest)))
        grid = numpy.geomspace(smallest, largest, int(octaves * _POINTS_AN_OCTAVE) + 2)
        lost = (4 * apart + int(self.large.sum())) * self._latency
        values = self._least_between(grid[:-1], grid[1:]) - lost
        below = self._latency * (1 + self._excess / smallest) - lost
        points = [(0.0, below)]
        for z, following, value in zip(grid[:-1].tolist(), grid[1:].tolist(), values.tolist(), strict=True):
            points += [(z, value), (following, value)]
        x, y = numpy.array(_lower_hull(points)).T
        slopes = numpy.diff(y) / numpy.diff(x)
        return slopes, y[:-1] - slopes * x[:-1]

    def _least_between(self, low: numpy.ndarray, high: numpy.ndarray) -> numpy.ndarray:
        """No more than the curve anywhere between `low` and `high`."""
        import numpy

        gaining = numpy.searchsorted(-self._density, -low / self._latency)
        bytes_dropped = numpy.minimum(self._nbytes[gaining], self._excess + high)
        idle = numpy.interp(bytes_dropped, self._nbytes, self._read)
        gain = self._latency * bytes_dropped / low - idle
        least: numpy.ndarray = 2 * self._latency * (1 + self._excess / high) - gain
        return least


def _lower_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull, by Andrew's monotone chain; of points with one x the lowest counts."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and hull[-1][0] == x:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull
