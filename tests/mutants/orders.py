"""Faults of order by name, each a change of one expression, which `make mutants ROOM=orders` makes in turn.

Random changes do not make these, and only kernels that run late show them. So each has a scenario of its
own in tests/rig/test_orders_on_the_rig.py.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.mutants.changes import replaced

DEVICE = "runtime/device"


@dataclass(frozen=True)
class OrderFault:
    """In the method `scope` of a file of penstock, the expression or statement `before` becomes `after`."""

    path: str
    scope: str
    before: str
    after: str

    def mutant(self, tree):
        """Return the fault as a change of the file's syntax tree."""
        return replaced(self.path, tree, self.scope, self.before, self.after)

    def code_for(self, function):
        """Return the code of the method with the fault, given the method without."""
        source = Path(function.__code__.co_filename)
        tree = ast.parse(source.read_text())
        self.mutant(tree).put(True)
        codes = [compile(tree, str(source), "exec")]
        for name in self.scope.split("."):
            constants = [one for one in codes[-1].co_consts if isinstance(one, CodeType)]
            codes.append(next(one for one in constants if one.co_name == name))
        return codes[-1]


ORDER_FAULTS = {
    "copies on demand do not wait for earlier kernels": OrderFault(
        f"{DEVICE}/streamer.py",
        "DeviceStreamer._load_on_demand",
        "self._device.wait(self._copies, self._device.record(stream))",
        "pass",
    ),
    "the end of a step waits for the copies out of another": OrderFault(
        f"{DEVICE}/streamer.py",
        "DeviceStreamer._wait_out",
        "self._position.method.steps + 1 + step",
        "self._position.method.steps + step",
    ),
    "closing does not wait for replays": OrderFault(
        f"{DEVICE}/streamer.py", "PassOrder.close", "self.captured or not self._known", "not self._known"
    ),
    "events of a thread that has failed look done": OrderFault(
        f"{DEVICE}/accelerator.py", "PageableStream._recorded", "self.error is not None", "False"
    ),
    "a pass follows the reads ahead of another method": OrderFault(
        f"{DEVICE}/streamer.py", "DeviceStreamer._can_follow", "expected or not self._ring_bytes", "True"
    ),
    "a read skips bytes of the ring that are not free": OrderFault(
        f"{DEVICE}/streamer.py", "Staging._align", "self._used + nbytes + skip", "self._used + nbytes"
    ),
    "copies have a stream that the caller can get": OrderFault(
        f"{DEVICE}/accelerator.py",
        "AcceleratorDevice._new_stream",
        "torch.Stream(self.torch_device, priority=-1)",
        "torch.Stream(self.torch_device)",
    ),
}
