"""Changes of the source of the streamer and of the device's memory, each of which is a bug."""

from __future__ import annotations

WAIT = "self._device.wait(self._copies, self._freed(piece))"
_COPY = 'self._copy(Range(piece.start, piece.stop), f"for step {piece.step}")'
_RECORD = "reading.arrived[piece.step] = self._device.record(self._copies)"
_READING = "reading = self._next if position.ahead else self._this"
_ENDED = "self._this.ended[step] = self._device.record(self._device.current_stream())"
_KERNELS_WAIT = "self._device.wait(self._device.current_stream(), event)"
_DEMAND_BEFORE = "self._device.wait(self._copies, self._device.record(stream))"
_DEMAND_AFTER = "self._device.wait(stream, self._device.record(self._copies))"
_DEMAND_COPY = 'self._copy(item, "on demand")'
_FREED = "self._this.ended[piece.after + self._position.method.steps]"
_ENTRY = "self._entry = self._device.record(self._device.current_stream())"
_TURN = "self._this, self._next = self._next, _Pass()"
_POISON = "self._overwrite(self.methods[graph].drops.get(step, ()))"
_BARRIER = "self._device.wait(self._device.current_stream(), self._device.record(self._copies))"

STREAMER = {
    "copies do not wait": (WAIT, "pass"),
    "copies wait for themselves": (
        WAIT,
        "self._device.wait(self._copies, self._device.record(self._copies))",
    ),
    "copies wait for the entry only": (WAIT, "self._device.wait(self._copies, self._entry)"),
    "copies wait when they are done": (f"{WAIT}\n            {_COPY}", f"{_COPY}\n            {WAIT}"),
    "nothing is copied": (_COPY, "pass"),
    "a copy begins a granule late": (_COPY, _COPY.replace("piece.start,", "piece.start + 64,")),
    "a copy ends a granule early": (_COPY, _COPY.replace("piece.stop)", "piece.stop - 64)")),
    "a copy is recorded before it": (
        f"{_COPY}\n            {_READING}\n            {_RECORD}",
        f"{_READING}\n            {_RECORD}\n            {_COPY}",
    ),
    "a copy is recorded on the kernels": (
        _RECORD,
        "reading.arrived[piece.step] = self._device.record(self._device.current_stream())",
    ),
    "a copy is not recorded": (_RECORD, "pass"),
    "the first copy of a step counts": (
        _RECORD,
        "reading.arrived.setdefault(piece.step, self._device.record(self._copies))",
    ),
    "copies for the next pass count for this": (_READING, "reading = self._this"),
    "kernels do not wait": (_KERNELS_WAIT, "pass"),
    "copies wait instead of kernels": (_KERNELS_WAIT, "self._device.wait(self._copies, event)"),
    "kernels wait for the step before": (
        "event = self._this.arrived.get(step)",
        "event = self._this.arrived.get(step - 1)",
    ),
    "kernels do not wait for what stays": ("self._await(method.steps)", "pass"),
    "a release is not recorded": (_ENDED, "self._this.ended[step] = self._entry"),
    "a release is recorded on the copies": (
        _ENDED,
        "self._this.ended[step] = self._device.record(self._copies)",
    ),
    "a release counts for the step before": (_ENDED, _ENDED.replace("[step]", "[step - 1]")),
    "steps end one early": ("self._position.ended = step + 1", "self._position.ended = step + 2"),
    "steps end one late": ("self._position.ended = step + 1", "self._position.ended = step"),
    "copies wait for a step before": (
        "self._this.ended[piece.after]",
        "self._this.ended.get(piece.after - 1, self._entry)",
    ),
    "copies across calls wait for the entry": (_FREED, "self._entry"),
    "copies across calls wait for a step before": (
        _FREED,
        "self._this.ended.get(piece.after - 1 + self._position.method.steps, self._entry)",
    ),
    "the events of a pass are lost": (_TURN, "self._this, self._next = _Pass(), _Pass()"),
    "the entry is not recorded again": (
        _ENTRY,
        f"self._entry = self.__dict__.get('_entry') or {_ENTRY[14:]}",
    ),
    "the entry is recorded on the copies": (_ENTRY, "self._entry = self._device.record(self._copies)"),
    "dropped bytes are overwritten after the release": (
        f"        if self._poison:\n            {_POISON}\n        {_ENDED}",
        f"        {_ENDED}\n        if self._poison:\n            {_POISON}",
    ),
    "more than dropped bytes is overwritten": (
        "move.target + move.nbytes, POISON",
        "move.target + move.nbytes + 64, POISON",
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
    "what stays is never loaded": (
        "queue = first_pass(self._plan, method, resident_loaded=self._resident_loaded, piece=None)",
        "queue = first_pass(self._plan, method, resident_loaded=True, piece=None)",
    ),
    "nothing is enqueued when a pass begins": (
        "        self._issue()\n        self._await(method.steps)",
        "        self._await(method.steps)",
    ),
    "nothing is enqueued at a release": (
        "self._position.ended = step + 1\n        self._issue()",
        "self._position.ended = step + 1",
    ),
    "a miss is taken for a hit": (
        "if self._demand is None and self._expected and self._expected[-1] == step:",
        "if True:",
    ),
}

MEMORY = {
    "a copy arrives 64 bytes late": (
        "Move(piece.file_offset, piece.address,",
        "Move(piece.file_offset, piece.address + 64,",
    ),
    "a copy is read 64 bytes early": ("Move(piece.file_offset,", "Move(piece.file_offset - 64,"),
    "a copy is 64 bytes short": ("piece.stop - piece.start)", "piece.stop - piece.start - 64)"),
    "a copy is 64 bytes long": ("piece.stop - piece.start)", "piece.stop - piece.start + 64)"),
    "resident storages are not loaded": ("self._load_outside(device, source)", "pass"),
    "addresses are those of the layout": ("layout[s], plan.addresses[s])", "layout[s], layout[s])"),
}
