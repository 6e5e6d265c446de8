"""Changes of the sources of the streamer, its memory and its staging, each of which is a bug."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

WAIT = "self._device.wait(self._copies, self._freed(piece))"
_COPY = 'self._copy(item, f"for step {piece.step}", slot)'
_RECORD = "self._arrived = reading.arrived[piece.step] = self._device.record(self._copies)"
_READING = "reading = self._next if position.ahead else self._this"
_ENDED = "self._this.ended[step] = self._device.record(self._device.current_stream())"
_KERNELS_WAIT = "self._device.wait(self._device.current_stream(), event)"
_DEMAND_BEFORE = "self._device.wait(self._copies, self._device.record(stream))"
_DEMAND_AFTER = "self._device.wait(stream, self._device.record(self._copies))"
_DEMAND_COPY = 'self._copy(item, "on demand", slot)'
_FREED = "passed.end_of(piece.after + self._position.method.steps)"
_ENTRY = "self._this = _Pass(entry=self._device.record(self._device.current_stream()))"
_TURN = "self._before, self._this, self._next = self._this, self._next, _Pass()"
_POISON = "self._overwrite(self.methods[graph].drops.get(step, ()))"
_BARRIER = "self._device.wait(self._device.current_stream(), self._arrived)"

STREAMER = {
    "copies do not wait": (WAIT, "pass"),
    "copies wait for themselves": (
        WAIT,
        "self._device.wait(self._copies, self._device.record(self._copies))",
    ),
    "copies wait for the first pass only": (
        WAIT,
        "self.first = self.__dict__.get('first', self._freed(piece)); "
        "self._device.wait(self._copies, self.first)",
    ),
    "copies wait when they are done": (f"{WAIT}\n            {_COPY}", f"{_COPY}\n            {WAIT}"),
    "nothing is copied": (_COPY, "pass"),
    "a copy begins a granule late": (_COPY, _COPY.replace("item", "Range(item.start + 64, item.stop)")),
    "a copy ends a granule early": (_COPY, _COPY.replace("item", "Range(item.start, item.stop - 64)")),
    "a copy is recorded before it": (
        f"{_COPY}\n            {_READING}\n            {_RECORD}",
        f"{_READING}\n            {_RECORD}\n            {_COPY}",
    ),
    "a copy is recorded on the kernels": (
        _RECORD,
        _RECORD.replace("self._copies", "self._device.current_stream()"),
    ),
    "a copy is not recorded": (_RECORD, "self._arrived = self._device.record(self._copies)"),
    "the first copy of a step counts": (
        _RECORD,
        "self._arrived = reading.arrived.setdefault(piece.step, self._device.record(self._copies))",
    ),
    "copies for the next pass count for this": (_READING, "reading = self._this"),
    "kernels do not wait": (_KERNELS_WAIT, "pass"),
    "copies wait instead of kernels": (_KERNELS_WAIT, "self._device.wait(self._copies, event)"),
    "kernels wait for the step before": (
        "event = self._this.arrived.get(step)",
        "event = self._this.arrived.get(step - 1)",
    ),
    "a release is not recorded": (_ENDED, "self._this.ended[step] = self._device.record(self._copies)"),
    "a release counts for the step before": (_ENDED, _ENDED.replace("[step]", "[step - 1]")),
    "steps end one early": ("self._position.ended = step + 1", "self._position.ended = step + 2"),
    "steps end one late": ("self._position.ended = step + 1", "self._position.ended = step"),
    "copies wait for a step before": (
        "self._this.ended[piece.after]",
        "self._this.ended.get(piece.after - 1) or self._device.record(self._copies)",
    ),
    "copies across calls wait for nothing": (_FREED, "self._device.record(self._copies)"),
    "copies across calls wait for a step before": (
        _FREED,
        "passed.entry or passed.end_of(max(0, piece.after - 1 + self._position.method.steps))",
    ),
    "the events of a pass are lost": (
        _TURN,
        "self._before, self._this, self._next = self._this, _Pass(), _Pass()",
    ),
    "the pass before is lost": ("if self._position.ahead else self._before", ""),
    "the entry is not recorded again": (
        _ENTRY,
        f"self.first = self.__dict__.get('first') or {_ENTRY[13:]}; self._this = self.first",
    ),
    "the entry is recorded on the copies": (
        _ENTRY,
        "self._this = _Pass(entry=self._device.record(self._copies))",
    ),
    "dropped bytes are overwritten after the release": (
        f"        if self._poison:\n            {_POISON}\n        {_ENDED}",
        f"        {_ENDED}\n        if self._poison:\n            {_POISON}",
    ),
    "more than dropped bytes is overwritten": (
        "start, stop, POISON",
        "start, stop + 64, POISON",
    ),
    "copies on demand do not wait": (_DEMAND_BEFORE, "pass"),
    "kernels do not wait for copies on demand": (_DEMAND_AFTER, "pass"),
    "nothing is copied on demand": (_DEMAND_COPY, "pass"),
    "a barrier is none": (_BARRIER, "pass"),
    "a pass of another method goes on": ("if now.method.graph == graph:", "if True:"),
    "a pass that failed goes on": (
        "self._restart(self._position.method.graph)",
        "self._running = False",
    ),
    "a miss is taken for a hit": (
        "if self._demand is None and self._expected and self._expected[-1] == step:",
        "if True:",
    ),
    "copies do not wait for the disk": ("self._device.wait(self._copies, slot.read)", "pass"),
    "a read that goes on is taken for done": ("and not self._has_read(slot, block)", "and False"),
    "nothing waits for the disk at an acquire": (
        "self._issue(lambda: self._position.left[step] > 0)",
        "self._issue()",
    ),
    "a barrier leaves out what the disk still reads": ("self._issue(lambda: barrier)", "self._issue()"),
    "a slot is free before it is copied": (
        "self._staging.copied(slot, self._arrived)",
        "self._staging.copied(slot, slot.read)",
    ),
    "copies on demand do not wait for the disk": ("self._has_read(slot, lambda: True)", "pass"),
    "a slot copied on demand is free before": (
        "self._staging.copied(slot, self._device.record(self._copies))",
        "self._staging.copied(slot, self._device.record(stream))",
    ),
}

STAGING = {
    "reads do not wait": ("self._device.wait(self._disk, slot.copied)", "pass"),
    "reads wait for reads": (
        "self._device.wait(self._disk, slot.copied)",
        "self._device.wait(self._disk, slot.read)",
    ),
    "reads do not wait for copies to come": (
        "if not self._slots or self._slots[0].copied is None:",
        "if not self._slots:",
    ),
    "the ring is larger than it is": (
        "self._host.ring.numel():\n            if",
        "self._host.ring.numel() + 64:\n            if",
    ),
    "a read lies 64 bytes too far": ("% size\n", "% size + 64\n"),
    "a read forgets its room": ("self._used += nbytes", "self._used += nbytes - 64"),
    "a ring that begins anew does not wait for copies": (
        "for stream in (self._copies, self._disk):",
        "for stream in (self._disk,):",
    ),
    "a ring that begins anew does not wait for reads": (
        "for stream in (self._copies, self._disk):",
        "for stream in (self._copies,):",
    ),
    "a ring that begins anew keeps its slots": ("self._slots.clear()", "pass"),
    "a ring that begins anew keeps what was read": ("self._ready.clear()", "pass"),
    "reads end with the first copy": (
        "self._ready.popleft()\n        self._read_ahead()",
        "self._ready.popleft()",
    ),
    "the last read is copied first": ("self._ready.popleft()", "self._ready.pop()"),
    "a read is recorded before it": (
        "self._device.record(self._disk))\n",
        "self._slots[-1].read if self._slots else self._device.record(self._disk))\n",
    ),
    "a pass is read in its first order again": ("chain(missing[0], cycle(missing[1]))", "cycle(missing[0])"),
}

HOST = {
    "the slab begins 64 bytes late": ("initial=0", "initial=64"),
    "what the host lacks is not read": ("= subtract([item], self._held)", "= []"),
    "the disk is read 64 bytes late": (
        "FileRead(piece.file, piece.file_offset,",
        "FileRead(piece.file, piece.file_offset + 64,",
    ),
    "the disk reads 64 bytes too far": (
        "piece.file_offset, part.offset,",
        "piece.file_offset, part.offset + 64,",
    ),
    "the disk reads 64 bytes less": ("part.stop - part.start)", "max(0, part.stop - part.start - 64))"),
    "a slab is not filled": ("self.reads(self._slabs)", "self.reads(self._slabs[1:])"),
}

RESIDENT = {
    "reads do not wait for copies": ("device.wait(disk, copied)", "pass"),
    "copies do not wait for reads": ("device.wait(stream, read)", "pass"),
    "the last batch is not copied": ("device.synchronize(_copy(device, memory, *before))", "pass"),
    "the last copy is not waited for": (
        "device.synchronize(_copy(device, memory, *before))",
        "_copy(device, memory, *before)",
    ),
    "halves overlap": ("which * half +", "which * (half // 2) +"),
    "a load is 64 bytes off": ("self.offset + at", "self.offset + at + 64"),
}

MEMORY = {
    "a copy arrives 64 bytes late": (
        "piece.address + part.start - piece.start,",
        "piece.address + part.start - piece.start + 64,",
    ),
    "a copy is read 64 bytes early": (
        "Move(part.memory, part.offset,",
        "Move(part.memory, part.offset - 64,",
    ),
    "a copy is 64 bytes short": ("part.stop - part.start)", "part.stop - part.start - 64)"),
    "a copy is 64 bytes long": ("part.stop - part.start)", "part.stop - part.start + 64)"),
    "nothing that stays is loaded": ("list(self._staying())", "[]"),
    "resident ranges are not loaded": ("merge(self._plan.resident)", "[]"),
    "addresses are those of the layout": ("plan.addresses[s] + e.storage_offset", "start"),
    "what is staged is left out": ("(*self.host.held(item), *staged)", "self.host.held(item)"),
    "what is held is left out": ("(*self.host.held(item), *staged)", "staged"),
}


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one piece of its source replaced, which must be there once."""
    assert module.__file__
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{source.count(old)} times: {old}"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec
    changed = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(old, new), module.__file__, "exec"), changed.__dict__)
    return changed
