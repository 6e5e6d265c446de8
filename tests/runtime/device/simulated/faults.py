"""What can go wrong between the parts of the runtime, by name: each is a bug of the part that causes it.

A fault alters what one part is given by another: calls of the device, reads of the source, the plan that
the verifier has accepted, the tables that a streamer looks up, or the calls of the program's probes. No
fault knows the source text of what it alters. `by` says what finds it: `race` (the vector clocks of the
simulated device), `bits` (what a step reads differs from the files), `error` (another PenstockError), or
`count` (bytes moved or copied, or misses, differ from those of a run without the fault).

Private decisions of a part have no fault of their own where nothing outside shows them but a fault that is
here: which of its events a streamer keeps ("the events of a pass are lost" is "kernels wait for copies of
the pass before"), how a ring counts its room ("a read forgets its room" is "reads do not wait for copies"),
in which half of the host's memory resident weights are loaded ("loading does not wait for its copies"), and
whether an abort starts over at once: the next pass does where it did not.
"""

from dataclasses import replace
from typing import Literal

from tests.runtime.device.device_runs import Memory, Parts
from tests.runtime.device.faulty_device import (
    FaultyDevice,
    Site,
    answer,
    block,
    copy_without,
    fill_more,
    give_first,
    give_less,
    leave_out,
    overlap,
    put_off,
    record_on,
    reverse,
    shift,
    shift_read,
    wait_for,
    wait_for_older,
)

By = Literal["race", "bits", "error", "count"]


class Fault(Parts):
    """A way in which a run goes wrong; `fired` counts how often something was altered."""

    def __init__(self, by):
        self.by = by
        self.fired = 0


class Passing:
    """A streamer that passes every call of the probes on to another."""

    def __init__(self, streamer):
        self.streamer = streamer
        self.counters, self.probed = streamer.counters, streamer.probed

    def pass_on(self, name, *args):
        getattr(self.streamer, name)(*args)

    def begin(self, graph):
        self.pass_on("begin", graph)

    def acquire(self, graph, step):
        self.pass_on("acquire", graph, step)

    def release(self, graph, step):
        self.pass_on("release", graph, step)

    def end(self, graph):
        self.pass_on("end", graph)

    def abort(self):
        self.pass_on("abort")

    def close(self):
        self.pass_on("close")


class OfDevice(Fault):
    """Calls of the device at `site` are replaced by `change`."""

    def __init__(self, by, site, change):
        super().__init__(by)
        self._site, self._change = site, change
        self._device: FaultyDevice

    def device(self, device):
        self._device = FaultyDevice(device, self._site, self._count)
        return self._device

    def streamer(self, streamer):
        return _Telling(streamer, self._device)

    def begin_pass(self, how):
        self._device.how = how

    def _count(self, device, call):
        self.fired += 1
        return self._change(device, call)


class _Telling(Passing):
    """Tells a faulty device which of the streamer's calls is running."""

    def __init__(self, streamer, device):
        super().__init__(streamer)
        self._device = device

    def pass_on(self, name, *args):
        self._device.during = name
        super().pass_on(name, *args)


class OfSource(Fault):
    """The source reads from another offset, or fewer bytes."""

    def __init__(self, by, *, offset=0, nbytes=0):
        super().__init__(by)
        self._offset, self._nbytes = offset, nbytes

    def source(self, source):
        fault = self

        class Source(Memory):
            def read_into(self, file, offset, address, nbytes):
                fault.fired += 1
                super().read_into(file, offset + fault._offset, address, max(0, nbytes + fault._nbytes))

        return Source(source.contents)


class OfProbes(Fault):
    """The program's probes call something else, by the name of the call that is replaced."""

    def __init__(self, by, **changes):
        super().__init__(by)
        self._changes = changes

    def streamer(self, streamer):
        fault = self

        class Probes(Passing):
            def pass_on(self, name, *args):
                if name in fault._changes:
                    fault.fired += 1
                    fault._changes[name](self.streamer, *args)
                else:
                    super().pass_on(name, *args)

        return Probes(streamer)


class OfPlan(Fault):
    """Weights, streamer, or both are given another plan than the verifier has accepted."""

    def __init__(self, by, change, to="weights streamer"):
        super().__init__(by)
        self._change, self._to = change, to

    def plan_of_weights(self, plan):
        return self._spoil(plan) if "weights" in self._to else plan

    def plan_of_streamer(self, plan):
        return self._spoil(plan) if "streamer" in self._to else plan

    def _spoil(self, plan):
        spoiled = self._change(plan)
        self.fired += spoiled != plan
        return spoiled


def of_schedules(change):
    return lambda plan: replace(plan, schedules=tuple(map(change, plan.schedules)))


def of_transfers(change):
    return of_schedules(lambda s: replace(s, transfers=tuple(map(change, s.transfers))))


def of_drops(change):
    return of_schedules(lambda s: replace(s, drops=tuple(map(change, s.drops))))


def at_layout(plan):
    pairs = zip(plan.addresses, plan.arena.layout, strict=True)
    return replace(plan, addresses=tuple(a if a < 0 else start for a, start in pairs))


def nothing(*args):
    pass


IN_CALLS = ("begin", "acquire", "release", "end", "abort")
COPIES_FREED = Site("wait", "copies", behind="kernels", during=IN_CALLS)
KERNELS_READ = Site("wait", "kernels", behind="copies")
COPIES_READ = Site("wait", "copies", behind="disk")
RING_FREED = Site("wait", "disk", behind="copies")
PASSES = Site("wait", "kernels", behind="kernels")
PASSED = Site("record", "kernels", during=("end",))
COPY = Site("copy", "copies")
READ = Site("read", "disk", during=IN_CALLS)
COPIED = Site("record", "copies")
MISS = "backwards"

WAITS = {
    "copies do not wait for kernels": OfDevice("race", COPIES_FREED, leave_out),
    "copies wait for themselves": OfDevice("race", COPIES_FREED, wait_for("copies")),
    "copies wait for the first kernels only": OfDevice("race", COPIES_FREED, wait_for_older(10**6)),
    "copies wait for the step before": OfDevice("race", COPIES_FREED, wait_for_older(1)),
    "copies wait once they are made": OfDevice("race", COPIES_FREED, put_off("copy")),
    "kernels wait for copies to be freed": OfDevice("race", COPIES_FREED, reverse),
    "copies ahead do not wait": OfDevice("race", replace(COPIES_FREED, during=("end", "begin")), leave_out),
    "kernels do not wait for copies": OfDevice("race", KERNELS_READ, leave_out),
    "copies wait for kernels that read": OfDevice("race", KERNELS_READ, reverse),
    "kernels wait for themselves": OfDevice("race", KERNELS_READ, wait_for("kernels")),
    "kernels wait for the copy before": OfDevice("race", KERNELS_READ, wait_for_older(1)),
    "kernels wait for copies of the pass before": OfDevice("race", KERNELS_READ, wait_for_older(12)),
    "a barrier is none": OfDevice("race", replace(KERNELS_READ, during=("end",)), leave_out),
    "copies do not wait for the disk": OfDevice("race", COPIES_READ, leave_out),
    "copies wait for the read before": OfDevice("race", COPIES_READ, wait_for_older(1)),
    "the disk waits for copies to be read": OfDevice("race", COPIES_READ, reverse),
    "reads do not wait for copies": OfDevice("race", RING_FREED, leave_out),
    "reads wait for reads": OfDevice("race", RING_FREED, wait_for("disk")),
    "reads wait for the copy before": OfDevice("race", RING_FREED, wait_for_older(1)),
    "copies wait for reads to be freed": OfDevice("race", RING_FREED, reverse),
    "a ring that begins anew does not wait for copies": OfDevice(
        "race", replace(RING_FREED, during=("begin", "abort")), leave_out
    ),
    "a ring that begins anew does not wait for reads": OfDevice(
        "race", Site("wait", "disk", behind="disk", during=IN_CALLS), leave_out
    ),
    "copies on demand do not wait for kernels": OfDevice(
        "race", replace(COPIES_FREED, during=("acquire",), how=MISS), leave_out
    ),
    "kernels do not wait for copies on demand": OfDevice("race", replace(KERNELS_READ, how=MISS), leave_out),
    "copies on demand do not wait for the disk": OfDevice("race", replace(COPIES_READ, how=MISS), leave_out),
    "reads on demand do not wait for copies": OfDevice("race", replace(RING_FREED, how=MISS), leave_out),
    "loading does not wait for its copies": OfDevice(
        "race", Site("wait", "disk", behind="kernels"), leave_out
    ),
    "loading copies before it has read": OfDevice("race", Site("wait", "kernels", behind="disk"), leave_out),
    "loading does not wait for its last copy": OfDevice(
        "race", Site("synchronize", behind="kernels", during=("load",)), leave_out
    ),
    "loading does not wait for the host's weights": OfDevice(
        "race", Site("synchronize", behind="disk", during=("load",)), leave_out
    ),
    "a pass does not wait for the one before": OfDevice("race", PASSES, leave_out),
    "a pass waits for itself": OfDevice("race", PASSES, wait_for("kernels")),
    "a pass waits for the first kernels only": OfDevice("race", PASSES, wait_for_older(10**6)),
    "closing does not wait for kernels": OfDevice(
        "race", Site("synchronize", behind="kernels", during=("close",)), leave_out
    ),
    "the host waits for kernels": OfDevice("count", COPIES_FREED, block),
    "the host waits for copies": OfDevice("count", KERNELS_READ, block),
    "the host waits for the pass before": OfDevice("count", PASSES, block),
}
"""Waits that are left out, reversed, made later, made for something else, or made by the host."""

RECORDS = {
    "copies are recorded before they are made": OfDevice("race", COPY, put_off("record")),
    "copies are recorded on the kernels": OfDevice("race", COPIED, record_on("kernels")),
    "steps are recorded on the copies": OfDevice(
        "race", Site("record", "kernels", during=("release",)), record_on("copies")
    ),
    "an entry is recorded on the copies": OfDevice(
        "race", Site("record", "kernels", during=("begin", "abort")), record_on("copies")
    ),
    "an entry is recorded once": OfDevice(
        "race", Site("record", "kernels", during=("begin", "abort")), give_first
    ),
    "steps are recorded once": OfDevice("race", Site("record", "kernels", during=("release",)), give_first),
    "reads are recorded before they are made": OfDevice("race", READ, put_off("record")),
    "reads are recorded on the copies": OfDevice(
        "race", Site("record", "disk", during=IN_CALLS), record_on("copies")
    ),
    "passes are recorded once": OfDevice("race", PASSED, give_first),
    "passes are recorded on the copies": OfDevice("race", PASSED, record_on("copies")),
    "dropped bytes are overwritten after their step": OfDevice(
        "race", Site("fill", "kernels"), put_off("record")
    ),
}
"""Events that say something is done which is not."""

COPIES = {
    "nothing is copied": OfDevice("bits", COPY, leave_out),
    "one copy is left out": OfDevice("bits", replace(COPY, number=7), leave_out),
    "copies swap places": OfDevice("bits", COPY, put_off("copy")),
    "a copy begins a granule late": OfDevice("bits", COPY, shift(start=64, target=64, nbytes=-64)),
    "a copy ends a granule early": OfDevice("bits", COPY, shift(nbytes=-64)),
    "a copy ends a granule late": OfDevice("race", COPY, shift(nbytes=64)),
    "a copy arrives a granule late": OfDevice("bits", COPY, shift(target=64)),
    "a copy arrives a granule early": OfDevice("race", COPY, shift(target=-64)),
    "a copy is read a granule late": OfDevice("bits", COPY, shift(start=64)),
    "a copy is read a granule early": OfDevice("error", COPY, shift(start=-64)),
    "nothing is copied from what the host holds": OfDevice("bits", COPY, copy_without("slab")),
    "nothing is copied from the ring": OfDevice("bits", COPY, copy_without("ring")),
    "nothing is copied on demand": OfDevice("bits", replace(COPY, how=MISS), leave_out),
    "more than dropped bytes is overwritten": OfDevice("race", Site("fill"), fill_more(0, 64)),
    "bytes before the dropped are overwritten": OfDevice("race", Site("fill"), fill_more(-64, 0)),
}
"""Copies of other bytes than those asked for."""

READS = {
    "nothing is read into the ring": OfDevice("bits", READ, leave_out),
    "one read is left out": OfDevice("bits", replace(READ, number=3), leave_out),
    "the disk is read a granule late": OfDevice("bits", READ, shift_read(offset=64)),
    "the disk is read a granule early": OfDevice("bits", READ, shift_read(offset=-64)),
    "a read arrives a granule late": OfDevice("error", READ, shift_read(target=64)),
    "a read arrives a granule early": OfDevice("race", READ, shift_read(target=-64)),
    "a read ends a granule early": OfDevice("bits", READ, shift_read(nbytes=-64)),
    "a read ends a granule late": OfDevice("error", READ, shift_read(nbytes=64)),
    "what the host holds is not read": OfDevice("bits", Site("read", into="slab"), leave_out),
    "what the host holds is read a granule late": OfDevice(
        "bits", Site("read", into="slab"), shift_read(offset=64)
    ),
    "what the host holds arrives a granule late": OfDevice(
        "error", Site("read", into="slab"), shift_read(target=64)
    ),
    "resident weights are read a granule late": OfDevice(
        "bits", Site("read", during=("load",)), shift_read(offset=64)
    ),
    "resident weights are read in part": OfDevice(
        "bits", Site("read", during=("load",)), shift_read(nbytes=-64)
    ),
    "resident ranges are not copied": OfDevice("bits", Site("copy", "kernels", into="arena"), leave_out),
    "weights outside the arena are not copied": OfDevice(
        "bits", Site("copy", "kernels", into="outside"), leave_out
    ),
    "resident weights arrive a granule late": OfDevice("error", Site("copy", "kernels"), shift(target=64)),
    "the first resident weights are not copied": OfDevice(
        "bits", Site("copy", "kernels", number=0), leave_out
    ),
    "the source reads a granule late": OfSource("bits", offset=64),
    "the source reads a granule less": OfSource("bits", nbytes=-64),
    "the arena is a granule smaller": OfDevice("error", Site("allocate"), give_less),
    "the host's memory is a granule smaller": OfDevice("error", Site("allocate_host"), give_less),
    "the ring reaches into what the host holds": OfDevice("bits", Site("allocate_host"), overlap),
}
"""Reads of other bytes than those asked for, and memory of another size."""


PLANS = {
    "transfers start a step early": OfPlan(
        "race", of_transfers(lambda t: replace(t, after=t.after - 1)), to="streamer"
    ),
    "transfers start a step late": OfPlan(
        "error", of_transfers(lambda t: replace(t, after=t.after + 1)), to="streamer"
    ),
    "transfers across calls start a step early": OfPlan(
        "race", of_transfers(lambda t: replace(t, after=t.after - (t.after < 0))), to="streamer"
    ),
    "transfers of a pass start before it": OfPlan(
        "bits", of_transfers(lambda t: replace(t, after=min(t.after, -1))), to="streamer"
    ),
    "transfers are for the step behind": OfPlan(
        "race", of_transfers(lambda t: replace(t, step=t.step + 1)), to="streamer"
    ),
    "the first transfer is forgotten": OfPlan(
        "bits",
        of_schedules(lambda s: replace(s, transfers=s.transfers[1:], staged=s.staged[1:])),
        to="streamer",
    ),
    "transfers are made in the opposite order": OfPlan(
        "error",
        of_schedules(lambda s: replace(s, transfers=s.transfers[::-1], staged=s.staged[::-1])),
        to="streamer",
    ),
    "the last range of the boundary is forgotten": OfPlan(
        "bits", lambda plan: replace(plan, boundary=plan.boundary[:-1]), to="streamer"
    ),
    "a method's own boundary lacks its last range": OfPlan(
        "bits", of_schedules(lambda s: replace(s, boundary=s.boundary and s.boundary[:-1])), to="streamer"
    ),
    "calls are not taken to come in turn": OfPlan(
        "race",
        lambda plan: replace(plan, traces=tuple(replace(t, follows=None) for t in plan.traces)),
        to="streamer",
    ),
    "drops come a step early": OfPlan(
        "race", of_drops(lambda d: replace(d, step=max(0, d.step - 1))), to="streamer"
    ),
    "drops come a step late": OfPlan("race", of_drops(lambda d: replace(d, step=d.step + 1)), to="streamer"),
    "a resident range is not loaded": OfPlan(
        "bits", lambda plan: replace(plan, resident=plan.resident[1:]), to="weights"
    ),
    "storages lie where the layout has them": OfPlan("error", at_layout, to="weights"),
    "storages lie a granule early": OfPlan(
        "race",
        lambda plan: replace(plan, addresses=tuple(a - 64 * (a > 0) for a in plan.addresses)),
        to="weights",
    ),
    "the ring is a granule smaller": OfPlan(
        "error", of_schedules(lambda s: replace(s, staging_bytes=max(0, s.staging_bytes - 64))), to="weights"
    ),
}
"""Plans that are altered on their way to the weights or to the streamer, behind the verifier's back."""

PROBES = {
    "a release comes with its acquire": OfProbes(
        "race", acquire=lambda s, *at: (s.acquire(*at), s.release(*at)), release=nothing
    ),
    "releases are forgotten": OfProbes("count", release=nothing),
    "acquires are forgotten": OfProbes("race", acquire=nothing),
    "acquires name the step before": OfProbes(
        "bits", acquire=lambda s, graph, step: s.acquire(graph, max(0, step - 1))
    ),
    "releases name the step before": OfProbes(
        "error", release=lambda s, graph, step: s.release(graph, max(0, step - 1))
    ),
    "the end of a pass is forgotten": OfProbes("race", end=nothing),
    "every pass is one of the first method": OfProbes("race", begin=lambda s, graph: s.begin(0)),
    "an unforeseen step is taken for the one expected": OfProbes("race", acquire=lambda s, *at: None),
}
"""Probes that the lowering has put elsewhere."""

FAULTS = {**WAITS, **RECORDS, **COPIES, **READS, **PLANS, **PROBES}

HARMLESS = {
    "queries say that every read is done": OfDevice("error", Site("query", behind="disk"), answer(True)),
    "aborts are forgotten": OfProbes("error", abort=nothing),
    "closing does not wait for copies": OfDevice(
        "error", Site("synchronize", behind="copies", during=("close",)), leave_out
    ),
}
"""What the streamer does not rely on: waits for a disk are the host's, a pass may never end, and a device
that is closed waits for its streams itself.
"""
