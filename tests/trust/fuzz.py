"""`make fuzz`: changed files, for as long as one likes, in processes of their own.

    python -m tests.trust.fuzz [TARGET ...] [--seconds 60] [--seed 1]

Each case is opened in a child. It has to end in a result or a PenstockError, within ten seconds of the
processor, and may not end the process. What does otherwise is printed with its number, and its file is kept
in build/fuzz: a case is made of the target, the seed and its number alone. Where the process has ended, a
file beside it has the lines of Python that its threads were at.
"""

import argparse
import faulthandler
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tests.trust.fuzz_targets import NAMES, make_target

LONGEST, STUCK = 10.0, 120.0
"""Seconds of the processor that a case may take, and seconds of the clock, in which it may do nothing."""

MEMORY = 16 << 30
KEPT = Path("build/fuzz")


def outcome(use, data):
    """What became of a file: fine, refused, or the error that is a fault."""
    from penstock.schedule.facts.errors import PenstockError

    try:
        use(data)  # type: ignore[operator]
    except PenstockError:
        return "refused"
    except MemoryError:
        return "fault: MemoryError"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"fault: {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[:200]
    return "fine"


@dataclass(frozen=True)
class _Case:
    """What a child says of the case that it is at: its number, and the two times at which it began.

    The times are of the clock, and of the processor in this process. They are in the future while a target is
    made.
    """

    number: Synchronized
    clock: Synchronized
    processor: Synchronized

    def begin(self):
        self.clock.value, self.processor.value = time.monotonic(), time.process_time()

    def is_hanging(self, process):
        """Tells whether the child of that number is at the case for too long."""
        used = _processor_seconds(process) - self.processor.value
        return used > LONGEST or time.monotonic() - self.clock.value > STUCK


def _processor_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(name, seed, case, said, lines):
    faulthandler.enable(lines)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(10)
    warnings.simplefilter("ignore")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (libraries write there what they think of a file)
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(name, Path(folder))
        outcome(target.use, target.seeds[0])  # imports what it needs
        while True:
            case.begin()
            found = outcome(target.use, target.case(seed, case.number.value))
            said.put((case.number.value, found))  # type: ignore[attr-defined]
            case.number.value += 1


class Run:
    """A target that is being fuzzed, in one child after another."""

    def __init__(self, name, seed):
        self.name, self.seed = name, seed
        self.counts = Counter()
        self.faults = {}
        context = multiprocessing.get_context("fork")
        self._context, self._said = context, context.SimpleQueue()
        self._case = _Case(context.Value("q", 0), context.Value("d", 0.0), context.Value("d", 0.0))
        KEPT.mkdir(parents=True, exist_ok=True)
        self._lines = (KEPT / f"{name}-{seed}.lines").open("w+")

    def run(self, seconds):
        """Fuzz for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._case.clock.value = self._case.processor.value = time.monotonic() + 1e6  # it is made first
            child = self._context.Process(
                target=_work, args=(self.name, self.seed, self._case, self._said, self._lines), daemon=True
            )
            child.start()
            while child.is_alive() and time.monotonic() < end:
                child.join(0.2)
                self._listen()
                if child.is_alive() and self._case.is_hanging(child.pid):
                    self._fault("hang")
                    break
            if child.exitcode is not None:
                self._listen()
                self._fault(f"crash: the process ended with {child.exitcode}")
            child.kill()
            child.join()
            self._case.number.value += 1
        self._listen()
        if not self._lines.seek(0, os.SEEK_END):
            Path(self._lines.name).unlink(missing_ok=True)

    def _listen(self):
        while not self._said.empty():
            number, found = self._said.get()
            self.counts[found.partition(":")[0]] += 1
            if found.startswith("fault"):
                self._note(found, number)

    def _fault(self, what):
        self.counts[what.partition(":")[0]] += 1
        self._note(what, self._case.number.value)

    def _note(self, what, number):
        if what not in self.faults:
            self.faults[what] = number
            print(f"{self.name} {number}: {what}", flush=True)


def keep(run):
    """Write the files of faults to build/fuzz."""
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(run.name, Path(folder))
        for number in run.faults.values():
            (KEPT / f"{run.name}-{run.seed}-{number}").write_bytes(target.case(run.seed, number))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*NAMES, []])
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    faults = 0
    for name in asked.targets or NAMES:
        run = Run(name, asked.seed)
        run.run(asked.seconds)
        faults += len(run.faults)
        if run.faults:
            keep(run)
        print(f"{name}: {sum(run.counts.values())} cases, {dict(sorted(run.counts.items()))}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
