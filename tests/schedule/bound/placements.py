"""The least period of a contiguous arena, by trying every plan of a tiny problem of one method.

Tries every choice of what lies outside the arena, all addresses of the others, every way to cut into copies
what has to be copied, and every order of the copies. Shares nothing with the bound or the planner: the exact
clock alone times each schedule.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.facts.model import Schedule, Transfer


class Placements:
    """The plans of `problem`, which has one method, within `budget` bytes."""

    def __init__(self, problem, budget):
        self.problem, self.budget, self.granule = problem, budget, problem.arena.granule
        self.trace, self.layout = problem.traces[0], problem.arena.layout
        self.nbytes = [storage.nbytes for storage in problem.storages]
        self.reads = [
            [k for k, step in enumerate(self.trace.steps) if s in step.reads] for s in range(len(self.nbytes))
        ]
        ends = (start % self.granule + n for start, n in zip(self.layout, self.nbytes, strict=True))
        self.sizes = [-(-end // self.granule) for end in ends]

    def least_ns(self, most_copies=5):
        """The least period; None if a plan that might be the best has more than `most_copies` copies."""
        best = math.inf
        units = [
            ([self._copy(read, [unit]) for read, some in needs for unit in some], needs)
            for needs in self._all_needs()
        ]
        for least, needs in sorted((self._least_of(copies), needs) for copies, needs in units):
            if least >= best:
                break
            for cuts in itertools.product(*(self._cuts(*need) for need in needs)):
                transfers = [transfer for cut in cuts for transfer in cut]
                if (
                    max(self._least_of(transfers), sum(map(self.problem.hardware.moving_ns, transfers)))
                    >= best
                ):
                    continue
                if len(transfers) > most_copies:
                    return None
                best = min(best, self._fastest_ns(transfers, best))
        return best

    def _least_of(self, transfers):
        """What each copy alone would make a pass take: it is between a step's end and another step's read."""
        steps, hardware = self.trace.steps, self.problem.hardware
        ended = list(itertools.accumulate(step.lead_ns + step.read_ns for step in steps))
        ended += [
            end - self.trace.compute_ns for end in ended
        ]  # those of the pass before, from -len(steps) on
        alone = (
            steps[t.step].read_ns
            + hardware.link_fill_ns
            + hardware.moving_ns(t)
            - ended[t.step]
            + ended[t.after]
            for t in transfers
        )
        return self.trace.compute_ns + max(0, *alone, 0)

    def _all_needs(self):
        """What has to be copied, for each choice of storages outside and of addresses; each case once."""
        every, cases = [s for s, nbytes in enumerate(self.nbytes) if nbytes], set()
        cut = [s for s in every if self.sizes[s] * self.granule > self.nbytes[s]]
        for outside in itertools.chain.from_iterable(
            itertools.combinations(cut, n) for n in range(len(cut) + 1)
        ):
            room = (self.budget - sum(self.nbytes[s] for s in outside)) // self.granule
            inside = [s for s in every if s not in outside]
            free = (range(room - self.sizes[s] + 1) for s in inside)
            for places in itertools.product(*free) if room >= 0 else ():
                needs = self._needs(zip(inside, places, strict=True))
                if needs is not None:
                    cases.add(needs)
        return cases

    def _part(self, s, unit):
        """The bytes of the layout that storage `s` has in its granule number `unit`."""
        start, first = self.layout[s], self.layout[s] // self.granule * self.granule + unit * self.granule
        return range(max(start, first), min(start + self.nbytes[s], first + self.granule))

    def _needs(self, places):
        """For each read of a storage, its granules that others have been in since, with their last reads.

        None if a storage overlaps another that the same step reads, or one that is kept.
        """
        users, needs = defaultdict(list), defaultdict(dict)
        for s, place in places:
            for unit in range(self.sizes[s]):
                inside = {byte % self.granule for byte in self._part(s, unit)[:: self.granule // 8]}
                users[place + unit].append((s, unit, inside))
        for (s, unit, mine), (t, _, other) in (
            pair for here in users.values() for pair in itertools.permutations(here, 2)
        ):
            if mine.isdisjoint(other):
                continue
            if {s, t} & self.problem.keep or set(self.reads[s]) & set(self.reads[t]):
                return None
            for k in self.reads[s]:
                last = self._last_read(t, k)
                if last > self._last_read(s, k):
                    units = needs[k, s]
                    units[unit] = max(last, units.get(unit, last))
        return tuple(sorted((read, tuple(sorted(units.items()))) for read, units in needs.items()))

    def _last_read(self, s, k):
        """The last step before `k` that reads storage `s`; negative in the pass before."""
        return max(q - (q >= k) * len(self.trace.steps) for q in self.reads[s])

    def _cuts(self, read, units):
        """Yield every way to divide these granules among copies for a read."""
        for edges in itertools.product((False, True), repeat=len(units) - 1):
            runs = [[units[0]]]
            for unit, begins in zip(units[1:], edges, strict=True):
                if begins:
                    runs.append([])
                runs[-1].append(unit)
            yield [self._copy(read, run) for run in runs]

    def _copy(self, read, units):
        """The copy that brings some granules for a read, and those between them."""
        k, s = read
        after = max(last for _, last in units)
        if units[-1][0] - units[0][0] + 1 > len(units):
            after = max(after, self._last_read(s, k))
        return Transfer(self._part(s, units[0][0]).start, self._part(s, units[-1][0]).stop, k, after)

    def _fastest_ns(self, transfers, enough):
        """The least period of these copies in any order in which none waits for a step behind its own."""
        for order in itertools.permutations(transfers):
            for line in (order,) if self.problem.wrap == "overlap" else self._not_in_flight(order):
                if any(line[i].after >= t.step for j, t in enumerate(line) for i in range(j + 1)):
                    continue
                facts = (Schedule(0, line, (), 0), self.problem.hardware, self.problem.wrap)
                enough = min(enough, steady_period_ns(self.trace, *facts, enough=enough))
        return enough

    def _not_in_flight(self, order):
        """Yield the order with each number of copies that may start in the pass before, which come first."""
        for early in itertools.takewhile(lambda n: n == 0 or order[n - 1].after < 0, range(len(order) + 1)):
            yield (*order[:early], *(replace(t, after=max(0, t.after)) for t in order[early:]))
