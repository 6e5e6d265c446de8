"""A device that forwards every call but those that a fault changes.

A `Site` selects calls of the `Device` protocol, by the stream that they are made on, by the stream of the
event that they wait for, and by what the streamer was doing. A `Change` is done in their place: the call is
left out, made later, made on another stream, or made with other bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.runtime.device.protocol import FileRead, Move

GRANULE = 64


@dataclass(frozen=True)
class FaultyEvent:
    """An event of the device behind, with the stream that it was recorded on and its number there."""

    event: Any
    on: str
    number: int


@dataclass(frozen=True)
class Call:
    """A call of the device: the method's name, the stream if it takes one, and the other arguments."""

    name: str
    stream: Any
    args: tuple[Any, ...]

    @property
    def event(self):
        """That of a wait, a query or a synchronization."""
        event = self.args[0]
        return event


@dataclass(frozen=True)
class Site:
    """The calls that a fault changes. What is left empty matches everything.

    `on` is the call's stream, `behind` the stream of its event: `kernels`, `copies` or `disk`. `into` is the
    memory that it writes: `arena`, `outside`, `slab` or `ring`. `during` is `load` while weights are loaded,
    then the method of the streamer that is running, and `how` the way in which the pass runs. `number`
    selects one of the calls that match, counted from 0.
    """

    name: str
    on: str = ""
    behind: str = ""
    into: str = ""
    during: tuple[str, ...] = ()
    how: str = ""
    number: int | None = None


class FaultyDevice:
    """`device`, of whose calls those at `site` are replaced by `change`."""

    def __init__(self, device, site, change):
        self.device, self.site, self.change = device, site, change
        self.during, self.how = "load", ""
        self._matched = 0
        self.recorded = {"kernels": [], "copies": [], "disk": []}
        self.named = {}
        self.memories = []
        self._postponed = []

    # What is passed on as it is.

    @property
    def name(self):
        return self.device.name

    @property
    def torch_device(self):
        return self.device.torch_device

    @property
    def in_reader(self):
        return self.device.in_reader

    @property
    def capturing(self):
        return self.device.capturing

    def finish(self):
        self.device.finish()

    def free_host(self, memory):
        self.device.free_host(memory)

    def trim(self):
        self.device.trim()

    def open_stream(self, name):
        self.named[name] = self.device.open_stream(name)
        return self.named[name]

    def current_stream(self):
        self.named["kernels"] = self.device.current_stream()
        return self.named["kernels"]

    def open_disk(self, source):
        self.named["disk"] = self.device.open_disk(source)
        return self.named["disk"]

    def close(self):
        self.device.close()

    # What a fault may change.

    def allocate(self, nbytes, purpose):
        memory = self._call(Call("allocate", None, (nbytes, purpose)))
        self.memories.append(("arena" if purpose == "the arena" else "outside", memory))
        return memory

    def allocate_host(self, nbytes, *, once=False):
        memory = self._call(Call("allocate_host", None, (nbytes, once)))
        self.memories.append(("ring" if once else "slab", memory))
        return memory

    def read(self, disk, target, reads, label):
        self._call(Call("read", disk, (target, list(reads), label)))

    def copy(self, stream, target, moves, label):
        self._call(Call("copy", stream, (target, list(moves), label)))

    def copy_out(self, stream, source, moves, label):
        self._call(Call("copy_out", stream, (source, list(moves), label)))

    def fill(self, stream, target, start, stop, value):
        self._call(Call("fill", stream, (target, start, stop, value)))

    def record(self, stream):
        return self._call(Call("record", stream, ()))

    def mark(self, stream, spent):
        return self.record(stream)

    def wait(self, stream, event):
        self._call(Call("wait", stream, (event,)))

    def query(self, event):
        return self._call(Call("query", None, (event,)))

    def synchronize(self, event):
        self._call(Call("synchronize", None, (event,)))

    def _call(self, call):
        if not self._matches(call):
            return self.perform(call)
        self._matched += 1
        if self.site.number is not None and self.site.number != self._matched - 1:
            return self.perform(call)
        return self.change(self, call)

    def _matches(self, call):
        site = self.site
        return (
            call.name == site.name
            and (not site.on or site.on == self.kind_of(call.stream))
            and (not site.behind or site.behind == call.event.on)
            and (not site.into or self.is_in(site.into, call.args[0]))
            and (not site.during or self.during in site.during)
            and (not site.how or site.how == self.how)
        )

    # What changes are made of.

    def kind_of(self, stream):
        """Which of the streams this is; the kernels' on a device that makes a new object of it each time."""
        kinds = [kind for kind, known in self.named.items() if known is stream]
        return kinds[0] if kinds else "kernels"

    def is_in(self, memory, tensor):
        """Whether a tensor is the memory of that name, or one of them."""
        return any(kind == memory and known is tensor for kind, known in self.memories)

    def perform(self, call):
        """Make the call on the device behind, and then what was put off until after it."""
        args = [one.event if isinstance(one, FaultyEvent) else one for one in call.args]
        if call.name == "allocate_host":
            return self.device.allocate_host(args[0], once=args[1])
        method = getattr(self.device, call.name)
        done = method(*args) if call.stream is None else method(call.stream, *args)
        if call.name == "record":
            of_stream = self.recorded[self.kind_of(call.stream)]
            of_stream.append(FaultyEvent(done, self.kind_of(call.stream), len(of_stream)))
            done = of_stream[-1]
        for late in [
            late
            for late in self._postponed
            if late[0] == call.name and self.kind_of(late[1].stream) == self.kind_of(call.stream)
        ]:
            self._postponed.remove(late)
            self.perform(late[1])
        return done

    def postpone(self, call, until):
        """Make the call once the next call of the method `until` on its stream has been made."""
        self._postponed.append((until, call))


Change = Callable[[FaultyDevice, Call], Any]


# Changes of any call.


def leave_out(device, call):
    pass


def put_off(until):
    """The call is made after the next call of the method `until` on the same stream."""
    return lambda device, call: device.postpone(call, until)


def block(device, call):
    """The host waits for the event, too."""
    device.perform(Call("synchronize", None, call.args))
    device.perform(call)


def answer(value):
    """Of a query, whether or not the event has completed."""
    return lambda device, call: value


# Changes of what is waited for.


def wait_for_older(count):
    """The event recorded `count` events before on the same stream, or the first one."""

    def change(device, call):
        older = device.recorded[call.event.on][max(0, call.event.number - count)]
        device.perform(replace(call, args=(older,)))

    return change


def wait_for(kind):
    """What is enqueued on another stream, instead of the event."""
    return lambda device, call: device.perform(
        replace(call, args=(device.perform(Call("record", device.named[kind], ())),))
    )


def reverse(device, call):
    """The stream that should be waited for waits instead."""
    waiting = device.perform(Call("record", call.stream, ()))
    device.perform(Call("wait", device.named[call.event.on], (waiting,)))


def record_on(kind):
    return lambda device, call: device.perform(replace(call, stream=device.named[kind]))


def give_first(device, call):
    """The first event ever recorded on the stream, instead of a new one."""
    of_stream = device.recorded[device.kind_of(call.stream)]
    return of_stream[0] if of_stream else device.perform(call)


# Changes of what is copied, read and filled.


def shift(*, start=0, target=0, nbytes=0):
    """All moves of a copy begin elsewhere, end elsewhere, or both."""

    def change(device, call):
        memory, moves, label = call.args
        moved = [Move(m.source, m.start + start, m.target + target, max(0, m.nbytes + nbytes)) for m in moves]
        device.perform(replace(call, args=(memory, moved, label)))

    return change


def shift_read(*, offset=0, target=0, nbytes=0):
    """All parts of a read begin elsewhere, end elsewhere, or both."""

    def change(device, call):
        memory, reads, label = call.args
        moved = [
            FileRead(r.file, r.offset + offset, r.target + target, max(0, r.nbytes + nbytes)) for r in reads
        ]
        device.perform(replace(call, args=(memory, moved, label)))

    return change


def copy_without(source):
    """Only those moves of a copy that are not from `slab` or `ring`."""

    def change(device, call):
        memory, moves, label = call.args
        kept = [move for move in moves if not device.is_in(source, move.source)]
        device.perform(replace(call, args=(memory, kept, label)))

    return change


def fill_more(start, stop):
    def change(device, call):
        memory, first, last, value = call.args
        device.perform(replace(call, args=(memory, first + start, last + stop, value)))

    return change


# Changes of memory.


def give_less(device, call):
    """Memory that is a granule smaller than asked for."""
    given = device.perform(replace(call, args=(max(0, call.args[0] - GRANULE), *call.args[1:])))
    return given


def overlap(device, call):
    """The ring begins a granule before the end of what the host holds."""
    nbytes, once = call.args
    if not once:
        device.whole = device.perform(replace(call, args=(nbytes + (1 << 20), False)))
        device.end = nbytes
        return device.whole[:nbytes]
    start = max(0, device.end - GRANULE)
    return device.whole[start : start + nbytes]
