"""A long run: passes, loads, interrupts, budgets, arenas, methods and devices, in an order that a seed draws.

    python -m tests.soak.endurance [DEVICE ...] [--loads 1000] [--passes 10000] [--seed 1]

After each pass the bits are those of the model in memory, also where the pass before was interrupted, and the
caller's stream is the one that it was. In the end the process has as many descriptors and threads as at the
beginning, and no more memory than after a fifth of the loads.
"""

import argparse
import gc
import linecache
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from dis import opmap
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.fx.graph_module import _loader

import penstock
from penstock import LoadOptions
from penstock.runtime.program import Program
from penstock.runtime.system.memory import anonymous_bytes, give_back_unused
from tests.engines import ENGINES
from tests.rig import machine
from tests.runtime.models import aligned

DEVICES = ("cpu", "sim", "rig")

GROWTH = 4 << 20
"""Bytes that a process may have more after its loads than after a fifth of them: those of no arena here.

The fifth in which it grows most does not count. In one of them Python's table of interned names doubles.
"""

WIDTH, LAYERS, TOKENS = 256, 4, 2048


class Model(nn.Module):
    """A table that is read by rows, and layers: 6 MiB."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()[..., :WIDTH]
        return x


class NoMoreThanBeforeError(AssertionError):
    """The process has more than it had."""


@dataclass(frozen=True)
class Held:
    """What a process has."""

    descriptors: int
    threads: int
    nbytes: int

    @classmethod
    def now(cls):
        give_back_unused()
        tasks = len(os.listdir("/proc/self/task"))
        return cls(len(os.listdir("/proc/self/fd")), tasks, anonymous_bytes())


@dataclass
class Interrupt:
    """Raises KeyboardInterrupt in this thread before the line of penstock's code that it is told to count to.

    An interrupt of the system's comes within lines as well, at a moment that nobody can repeat. None comes
    after the last line of a `with`, before its exit: the interpreter looks for signals after calls, where
    functions begin, and where loops go round, and there is none of these between the two.
    """

    lines: int
    happened: bool = False
    where: str = ""

    @contextmanager
    def coming(self):
        """Within the body, an interrupt comes, and ends it."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        except KeyboardInterrupt:
            self.happened = True
        finally:
            sys.settrace(before)

    def _called(self, frame, event, _):
        name = frame.f_code.co_filename
        return self._line if "/penstock/" in name and frame.f_code.co_name not in _UNRAISABLE else None

    def _line(self, frame, event, _):
        if event == "line":
            self.lines -= 1
            if self.lines <= 0 and not self.where and not _leaves_with(frame):
                self.where = _where(frame)
                raise KeyboardInterrupt
        return self._line


def _leaves_with(frame):
    """Whether a `with` ends without an exception: its exit is called with three constants, all None."""
    begins = frame.f_lasti
    return bool(frame.f_code.co_code[begins : begins + 6 : 2] == _THREE_CONSTANTS)


_THREE_CONSTANTS = bytes([opmap["LOAD_CONST"]] * 3)


def _where(frame):
    """The lines of penstock's that run, from the outermost on."""
    lines = []
    while frame is not None:
        name = frame.f_code.co_filename.rpartition("/penstock/")
        if name[1]:
            lines.append(f"{name[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(lines))


_UNRAISABLE = ("__del__",)
"""Functions out of which nothing is raised, whatever comes."""


@dataclass
class Endurance:
    """A program on a device, and what has been done with it."""

    program: Program
    calls: Mapping[str, list[tuple[torch.Tensor, torch.Tensor]]]
    device: str
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    _last: str = "no line"

    def run(self, loads, passes):
        """Load so often, and make so many passes in all. Raises an error for wrong bits, and for growth."""
        chosen = random.Random(f"{self.device} {self.seed}")
        self._load(chosen, 1)
        if self.device == "rig":
            _start_streams()
        before, fifths = self._held(), []
        for number in range(1, loads + 1):
            self._load(chosen, passes // loads)
            if number in {loads * k // 5 for k in range(1, 5)}:
                fifths.append(self._held().nbytes)
        after = self._settled(before)
        if (after.descriptors, after.threads) != (before.descriptors, before.threads):
            raise NoMoreThanBeforeError(f"the process had {before}, and has {after}")
        fifths.append(after.nbytes)
        *steady, once = sorted(later - earlier for earlier, later in pairwise(fifths)) or [0]
        if sum(steady) > GROWTH:
            raise NoMoreThanBeforeError(f"after each fifth of the loads the process had {fifths} bytes")
        self.done["bytes more"], self.done["bytes more once"] = sum(steady), once

    def _held(self):
        if self.device == "rig":
            torch.ops.rig.restart()  # what is late has run
            torch.accelerator.empty_cache()
        _loader.eval_cache.clear()  # sources of generated code, which torch.fx keeps for tracebacks
        linecache.clearcache()
        gc.collect()
        return Held.now()

    def _settled(self, before):
        """What the process has when threads that are ending have ended."""
        for _ in range(1000):
            if len(os.listdir("/proc/self/task")) <= before.threads:
                break
            time.sleep(0.005)
        return self._held()

    @cached_property
    def plans(self):
        """Plans for small, middling and large budgets in each arena of the device."""
        found = []
        for arena in self.program.arenas() if self.device == "cpu" else (None,):
            floor = self.program.floor(self.device, arena)
            for share in (0, 50, 100):
                budget = max(floor, self.program.largest_budget * share // 100)
                found.append(self.program.plan(budget, device=self.device, arena=arena, hardware="laptop"))
        return found

    def _load(self, chosen, passes):
        plan = chosen.choice(self.plans)
        options = {"plan": plan, "device": self.device}
        if self.device == "cpu":
            options["options"] = LoadOptions(engine=chosen.choice(ENGINES), readers=chosen.randint(1, 3))
        if chosen.random() < 0.05:
            self._interrupted_load(chosen, options)
        module = self.program.load(**options)
        self.done["loads"] += 1
        try:
            for _ in range(passes):
                if chosen.random() < 0.1 and "runtime/device/simulated.py" in self._interrupted_pass(
                    chosen, module
                ):
                    break  # it has half of an operation, and says so
                self._pass(chosen, module)
        finally:
            if chosen.random() < 0.05:
                with (one := Interrupt(chosen.randint(1, 60))).coming():
                    module.close()
                self.done["interrupted closes"] += one.happened
            module.close()

    def _pass(self, chosen, module):
        if self.device == "rig" and torch.accelerator.current_stream().stream_id:
            raise AssertionError(f"after an interrupt at {self._last} another stream is current")
        method = chosen.choice(sorted(self.calls))
        tokens, expected = chosen.choice(self.calls[method])
        with torch.no_grad():
            got = module.call(method, tokens)
        if not torch.equal(got.cpu(), expected):
            raise AssertionError(
                f"{method} gave other bits in pass {self.done['passes']}, after an interrupt at {self._last}"
            )
        self.done["passes"] += 1

    def _interrupted_pass(self, chosen, module):
        with (one := Interrupt(chosen.randint(1, 2000))).coming():
            self._pass(chosen, module)
        self.done["interrupted passes"] += one.happened
        self._last = one.where or self._last
        return one.where

    def _interrupted_load(self, chosen, options):
        module = None
        with (one := Interrupt(chosen.randint(1, 20_000))).coming():
            module = self.program.load(**options)
        if module is not None:
            module.close()
        self.done["interrupted loads"] += one.happened


def _start_streams():
    """Use every stream that the rig hands out: from its first kernel on, each has a thread that stays."""
    for priority in (0, -1):
        for _ in range(32):
            with torch.Stream("rig", priority=priority):
                torch.zeros(1, device="rig")


def make(folder, device, seed):
    """A small program of two methods, and what they return."""
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    drawn = torch.Generator().manual_seed(seed)
    given = {
        name: [torch.randint(0, TOKENS, size, generator=drawn) for _ in range(4)]
        for name, size in (("prefill", (1, 8)), ("decode", (1, 1)))
    }
    exported = {name: torch.export.export(model, (tokens[0],)) for name, tokens in given.items()}
    program = penstock.compile(exported, folder / "model.penstock")
    if device == "rig":
        machine.load()
    reference = aligned(model).to(device if device == "rig" else "cpu")
    calls = {}
    for name, inputs in given.items():
        moved = [tokens.to(device if device == "rig" else "cpu") for tokens in inputs]
        calls[name] = [(tokens, reference(tokens).cpu()) for tokens in moved]
    return Endurance(program, calls, device, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", choices=[*DEVICES, []])
    parser.add_argument("--loads", type=int, default=1000)
    parser.add_argument("--passes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    devices = asked.devices or DEVICES
    for device in devices:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            one = make(Path(folder), device, asked.seed)
            one.run(asked.loads // len(devices), asked.passes // len(devices))
        print(f"{device}: {dict(sorted(one.done.items()))}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
