"""The least period of a paged arena, by trying every plan of a tiny problem of one method.

Tries every choice of what is copied again, every order of it, and every way to join neighbours in that order,
which need not be neighbours in the layout. Shares nothing with the bound or the planner: the exact clock
alone times each schedule.
"""

from __future__ import annotations

import itertools
import math

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.facts.model import Schedule, Transfer


class PagedPlans:
    """The plans of `problem`, which has one method, within `budget` bytes."""

    def __init__(self, problem, budget):
        self.problem, self.budget, self.trace = problem, budget, problem.traces[0]
        arena, self.n, users = problem.arena, len(self.trace.steps), {}
        for k, step in enumerate(self.trace.steps):
            for s in step.reads:
                stop = arena.layout[s] + problem.storages[s].nbytes
                for granule in range(arena.layout[s] // arena.granule, -(-stop // arena.granule)):
                    users.setdefault(granule, set()).add(k)
        always = {
            granule
            for s in problem.keep
            for granule in range(
                arena.layout[s] // arena.granule,
                -(-(arena.layout[s] + problem.storages[s].nbytes) // arena.granule),
            )
        }
        end = arena.segments[-1].stop
        self.nbytes = {g: min(arena.granule, end - g * arena.granule) for g in users}
        self.gaps = []
        self.always = sum(self.nbytes[g] for g in always)
        for g, steps in users.items():
            reads = sorted(steps)
            if g not in always:
                self.gaps += [(g, a, b) for a, b in itertools.pairwise([*reads, reads[0] + self.n])]

    def least_ns(self, most=4):
        """The least period; None if a plan that might be the best copies more than `most` granules."""
        best, moving = math.inf, self.problem.hardware
        for count in range(len(self.gaps) + 1):
            for copied in itertools.combinations(self.gaps, count):
                room = self._room(copied)
                total = sum(self.nbytes[g] for g, _, _ in copied)
                if min(room) < 0 or moving.copy_ns(total) >= best:
                    continue
                if count > most:
                    return None
                best = min(best, self._least_of(copied, room, best))
        return best

    def _room(self, copied):
        """The free memory at each step if copies arrive just in time."""
        room = [self.budget - self.always] * self.n
        for gap in self.gaps:
            g, opens, closes = gap
            for k in range(closes if gap in copied else opens + 1, closes + 1):
                room[k % self.n] -= self.nbytes[g]
        return room

    def _least_of(self, copied, room, best):
        seen = set()
        for first in sorted({closes % self.n for _, _, closes in copied}) or [0]:
            rows = []
            for g, opens, closes in copied:
                back = closes // self.n * self.n - (self.n if closes % self.n < first else 0)
                rows.append((closes - back, opens - back, self.nbytes[g]))
            for order in itertools.permutations(rows):
                for edges in itertools.product((False, True), repeat=max(0, len(order) - 1)):
                    copies = [[row] for row in order[:1]]
                    for row, begins in zip(order[1:], edges, strict=True):
                        if begins:
                            copies.append([])
                        copies[-1].append(row)
                    key = tuple(tuple(sorted(copy)) for copy in copies)
                    if key not in seen:
                        seen.add(key)
                        best = min(best, self._time(copies, room, best))
        return best

    def _time(self, copies, room, best):
        hardware = self.problem.hardware
        if sum(hardware.copy_ns(sum(row[2] for row in copy)) for copy in copies) >= best:
            return math.inf
        after = [max(opens for _, opens, _ in copy) for copy in copies]
        if any(self._alone(copy, begins) >= best for copy, begins in zip(copies, after, strict=True)):
            return math.inf
        if not self._fit(copies, after, room):
            return math.inf
        transfers = []
        for copy, begins in zip(copies, after, strict=True):
            step, nbytes = min(row[0] for row in copy), sum(row[2] for row in copy)
            if begins >= step:
                return math.inf
            transfers.append((step, begins, nbytes))
        late = [t for t in transfers if t[0] >= self.n]
        if transfers[len(transfers) - len(late) :] != late:
            return math.inf
        line = [Transfer(0, b, k - self.n, a - self.n) for k, a, b in late]
        line += [Transfer(0, b, k, a) for k, a, b in transfers[: len(transfers) - len(late)]]
        lines = [line] if self.problem.wrap == "overlap" else self._not_in_flight(line)
        for some in lines:
            if any(t.after < -self.n for t in some):
                continue
            if any(some[i].after >= t.step for j, t in enumerate(some) for i in range(j + 1)):
                continue
            facts = (Schedule(0, tuple(some), (), 0), hardware, self.problem.wrap)
            best = min(best, steady_period_ns(self.trace, *facts, enough=best))
        return best

    def _alone(self, copy, after):
        """What one copy would make a pass take: it lies between a step's end and another step's read."""
        step, compute = min(row[0] for row in copy), self.trace.compute_ns
        ended = list(itertools.accumulate(step.lead_ns + step.read_ns for step in self.trace.steps))
        between = ended[step % self.n] + compute * (step // self.n) - self.trace.steps[step % self.n].read_ns
        between -= ended[after % self.n] + compute * (after // self.n)
        hardware = self.problem.hardware
        copy_ns = hardware.link_fill_ns + hardware.copy_ns(sum(row[2] for row in copy))
        return compute + max(0, copy_ns - between)

    def _not_in_flight(self, line):
        for early in range(len(line) + 1):
            if all(t.after < 0 for t in line[:early]):
                yield [
                    *line[:early],
                    *(Transfer(t.start, t.stop, t.step, max(0, t.after)) for t in line[early:]),
                ]

    def _fit(self, copies, after, room):
        """Put copies off until all have room in every step, the last in the line first; False if never."""
        n, changed = self.n, True
        while changed:
            changed = False
            for i in range(len(after)):
                least = after[i - 1] - (n if i == 0 else 0)
                if after[i] < least:
                    after[i], changed = least, True
            for k in range(n):
                early = list(self._early(copies, after, k))
                if sum(size for _, _, size in early) > room[k]:
                    shift, i, _ = max(early)
                    after[i], changed = k - shift, True
            if any(begins >= min(row[0] for row in copy) for begins, copy in zip(after, copies, strict=True)):
                return False
        return True

    def _early(self, copies, after, k):
        """Yield the pass of each copy, its number and the bytes that wait in step `k` for later reads."""
        for i, copy in enumerate(copies):
            for shift in range(-2 * self.n, 3 * self.n, self.n):
                size = sum(nbytes for closes, _, nbytes in copy if after[i] + shift < k < closes + shift)
                if size:
                    yield shift, i, size
