"""Makes one call after another go wrong in scenarios, as a program that is given a folder.

The double must be preloaded. Each line of standard input is JSON: the name of a scenario, how many of the
calls that are alike meet faults at most, and every which fault is injected. A line of JSON answers it, which
says what came of all injections. Each scenario has a forked process, and each injection one that is forked
from that, so none imports torch.
"""

import errno
import gc
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch

from penstock.schedule.facts.errors import PenstockError
from tests.faults.double import Action, Double, Kind
from tests.faults.scenarios import scenario, warm
from tests.faults.states import UNFINISHED, State

HANGS_S = 300
DELAY_US = 3000

MOVES = re.compile(r"p?(read|write)(v|64|v2|v64|v64v2)?")
"""Calls that move bytes, and may move fewer than they are asked to."""

INTERRUPTED = re.compile(rf"{MOVES.pattern}|open(at)?(64)?|fsync|flock")
"""Calls that a signal may interrupt, which are then made again."""


@dataclass(frozen=True)
class Fault:
    """What a call meets, and whether that must be absorbed."""

    name: str
    action: Action
    value: int = 0
    absorbed: bool = False

    @property
    def kills(self):
        return self.action in (Action.KILL_BEFORE, Action.KILL_AFTER)

    @property
    def changes(self):
        """Whether the file itself is another one afterwards."""
        return self.action in (Action.TRUNCATE, Action.REPLACE)


EIO = Fault("EIO", Action.FAIL, errno.EIO)
ENOSPC = Fault("ENOSPC", Action.FAIL, errno.ENOSPC)
EINTR = Fault("EINTR", Action.FAIL, errno.EINTR, absorbed=True)
SHORT = Fault("short", Action.SHORTEN, absorbed=True)
SLOW = Fault("slow", Action.DELAY, DELAY_US, absorbed=True)
CHANGES = (Fault("truncation", Action.TRUNCATE), Fault("replacement", Action.REPLACE))
KILLS = (Fault("kill before", Action.KILL_BEFORE), Fault("kill after", Action.KILL_AFTER))


def faults_of(call, before):
    """The faults that a call can meet."""
    yield EIO
    if call.writing and call.kind & (Kind.OPENS | Kind.WRITES | Kind.SYNCS | Kind.NAMES):
        yield ENOSPC
    if INTERRUPTED.fullmatch(call.name):
        yield EINTR
    if MOVES.fullmatch(call.name):
        yield from (SHORT, SLOW)
    if call.kind & (Kind.READS | Kind.MAPS | Kind.OPENS) and not call.writing and before.holds(call.path):
        yield from CHANGES
    if call.writing and call.kind & (Kind.SYNCS | Kind.NAMES):
        yield from KILLS


@dataclass
class Report:
    """What came of the injections into a scenario: how many of each kind, and what is wrong."""

    name: str
    sites: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    came: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What an action came to: `how` is right, refused, killed or raw error, `why` what the error says.

    `value` is what it returned, `found` what the target then held, `changes` those of the folder (`State`).
    `next_value`, `at_last` and `left` are these of the same action again, without a fault.
    """

    how: str
    why: str
    value: str
    found: str
    changes: Sequence[Sequence[str]]
    next_value: str
    at_last: str
    left: Sequence[Sequence[str]]


def forked(do, hangs_s=HANGS_S):
    """What a function returns in a process of its own, None if that was killed by SIGKILL.

    Raises RuntimeError with what the process said, or its status, if it ends in another way.
    """
    heard, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(heard)
            signal.alarm(hangs_s)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # commands print
            os.write(told, json.dumps(do()).encode())
        except BaseException:
            os.write(told, b"!" + traceback.format_exc()[-3000:].encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(heard, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return None
    if status or answer.startswith("!"):
        raise RuntimeError(f"ended with status {status}: {answer}")
    return json.loads(answer)


class Bench:
    """A scenario in a folder, and what should come of it."""

    def __init__(self, name, place, double):
        shutil.rmtree(place, ignore_errors=True)
        self._root, self._beside = place / "root", place / "beside"
        self._root.mkdir(parents=True)
        self._beside.mkdir()
        self._double, self._scenario = double, scenario(name)
        self._scenario.kept = place.parent / "kept"
        remembered = self._root if self._scenario.remembers else self._beside
        os.environ["XDG_CACHE_HOME"] = str(remembered / "cache")
        self._scenario.once()
        forked(lambda: self._scenario.prepare(self._root, self._beside))
        self._started = self._scenario.start(self._root, self._beside) if self._scenario.inherits else None
        self.before = State(self._root, place / "aside")
        self._others = {}
        self._old = forked(self._found)
        self._new = ("", "")
        self.report = Report(name)

    def count(self):
        """The calls of the action when it meets no fault; what comes of it then is what should."""

        def act():
            self._double.arm(self._root, Kind(0))
            started = self._start()
            self._double.arm(self._root)
            value = self._scenario.act(self._root, started)
            self._double.disarm()
            return value, self._found()

        forked(act)  # what is remembered beside the folder is remembered from now on
        self.before.restore()
        self._new = tuple(forked(act))
        calls = [self._double.call(number) for number in range(self._double.seen)]
        self.before.restore()
        return calls

    def inject(self, kind, number, fault):
        """Have a call meet a fault, and report what is not as it should be; returns whether the call came.

        Its number is that among those of its kind, so that threads which read change none of an opening.
        """
        outcome, problems = None, list[str]()
        try:
            outcome = forked(lambda: self._act(kind, number, fault)) or forked(self._next)
        except RuntimeError as error:
            problems.append(str(error))
        self._double.disarm()  # a process that ended before it could
        call = self._double.call(number) if self._double.fired else None
        # Threads make calls in another order than when they were counted.
        other = call is not None and fault not in faults_of(call, self.before)
        how = "crashed"
        if outcome and not other:
            how = outcome["how"]
            problems += self._wrong_at_once(fault, call, Outcome(**outcome))
            problems += self._wrong_at_last(Outcome(**outcome))
        came = call is not None and not other
        if came:
            self.report.injected[fault.name] += 1
            self.report.came[how] += 1
        where = f"{call.name} of {call.path}" if call else "which did not come"
        self.report.problems += [
            f"{fault.name} at call {number} of its kind, {where}: {one}" for one in problems
        ]
        self.before.restore()
        return came

    def _start(self):
        return self._started or self._scenario.start(self._root, self._beside)

    def _act(self, kind, number, fault):
        self._double.arm(self._root, Kind(0))  # what is mapped from now on is known
        started = self._start()
        self._double.arm(self._root, kind, number=number, action=fault.action, value=fault.value)
        how, why, value = "right", "", ""
        try:
            value = self._scenario.act(self._root, started)
        except PenstockError as error:
            how, why = "refused", str(error)
        except BaseException:
            how, why = "raw error", traceback.format_exc()
        self._double.disarm()
        found = self._found()
        if fault.changes and self._double.fired:
            self.before.put_back(self._double.call(number).path)
            started = self._scenario.reload(self._root, started)
        first = {"how": how, "why": why, "value": value, "found": found, "changes": self.before.changes()}
        return first | self._again(started)

    def _next(self):
        """What the process after one that was killed finds, and does."""
        first = {
            "how": "killed",
            "why": "",
            "value": "",
            "found": self._found(),
            "changes": self.before.changes(),
        }
        return first | self._again(self._start())

    def _again(self, started):
        try:
            value = self._scenario.again(self._root, started)
        except BaseException:
            value = traceback.format_exc()
        return {"next_value": value, "at_last": self._found(), "left": self.before.changes()}

    def _found(self):
        try:
            return self._scenario.found(self._root)
        except PenstockError as error:
            return f"refused: {error}"

    def _wrong_at_once(self, fault, call, outcome):
        results = {self._new}
        if fault.action is Action.REPLACE and call:
            results.add(self._of_other(call.path))
        found = outcome.found
        # What was written may refer to a file that has changed, or be killed half way, and then says so.
        named = call.path if fault.changes and call else self._scenario.torn if fault.kills else ""
        refers = found.startswith("refused: ") and bool(named) and named in found
        if outcome.how == "right" and not refers and (outcome.value, found) not in results:
            yield f"it came to {outcome.value!r} and wrote {found!r}, expected {results}"
        if not refers and found not in {self._old, *(new for _, new in results)}:
            yield f"the target holds {found!r}, neither what was there nor what is new"
        if outcome.how == "raw error":
            yield outcome.why
        if outcome.how == "refused" and fault.absorbed:
            yield f"it was not absorbed: {outcome.why}"
        if outcome.how == "refused" and call and not self._scenario.names(outcome.why, call.path):
            yield f"the file is not named: {outcome.why}"
        # What cannot be removed is removed by the next call.
        removing = call is not None and not call.writing and ".tmp-" in call.path
        yield from self._strange(outcome.changes, unfinished=fault.kills or removing)

    def _wrong_at_last(self, outcome):
        if (outcome.next_value, outcome.at_last) != self._new:
            yield f"the next call came to {outcome.next_value!r} and wrote {outcome.at_last!r}"
        for one in self._strange(outcome.left, unfinished=False):
            yield f"after the next call: {one}"

    def _strange(self, changes, *, unfinished):
        """Changes that are not the action's own; `unfinished` files may be there after some faults."""
        lost, other, new = changes
        yield from (f"{name} is lost or changed" for name in (*lost, *other) if not self._is_own(name))
        for name in new:
            if any(UNFINISHED.fullmatch(part) for part in Path(name).parts):
                if not unfinished:
                    yield f"{name} is left"
            elif not self._is_own(name):
                yield f"{name} appeared"

    def is_target(self, name):
        """Whether a path in the folder is what the scenario writes, or in it."""
        target = self._scenario.target
        return name == target or name.startswith(f"{target}/")

    def is_always(self, call, fault):
        """Whether the scenario always meets this."""
        what = f"{fault.name} {call.name} {call.path}"
        return bool(self._scenario.always) and re.match(self._scenario.always, what) is not None

    def _is_own(self, name):
        return self.is_target(name) or any(fnmatch(name, one) for one in self._scenario.adds)

    def _of_other(self, name):
        """What comes of the action where a file is another one from the start, as in double.c."""
        if name not in self._others:

            def act():
                path = self._root / name
                started = self._start()
                half, data = path.stat().st_size // 2, path.read_bytes()
                path.unlink()
                path.write_bytes(data[:half] + bytes(one ^ 1 for one in data[half:]))
                try:
                    return self._scenario.act(self._root, started), self._found()
                except PenstockError as error:
                    return str(error), self._old

            self.before.restore()
            self._others[name] = tuple(forked(act))
            self.before.restore()
        return self._others[name]


def chosen(calls, most):
    """The numbers of the calls that meet faults: at most so many of those that are alike."""
    alike = {}
    for number, call in enumerate(calls):
        alike.setdefault((call.name, re.sub(r"tmp-[0-9a-f]+", "tmp", call.path)), []).append(number)
    return sorted(number for numbers in alike.values() for number in numbers[:: -(-len(numbers) // most)])


def run(name, place, double, *, most, every):
    """Inject every so manyth of the faults that a scenario can meet, and those that it always meets."""
    bench = Bench(name, place, double)
    gc.freeze()  # the collector of forked processes need not look at, and so copy, what they inherit
    calls = bench.count()
    numbers = chosen(calls, most)
    bench.report.sites = len(numbers)
    # What others do to the target itself is theirs.
    faults = [
        (number, fault)
        for number, call in enumerate(calls)
        for fault in faults_of(call, bench.before)
        if not (fault.changes and bench.is_target(call.path))
    ]
    always = [one for one in faults if bench.is_always(calls[one[0]], one[1])] if every > 1 else []
    faults = [one for one in faults if one[0] in numbers]

    def inject(number, fault):
        kind = calls[number].kind
        return bench.inject(kind, sum(one.kind == kind for one in calls[:number]), fault)

    # Scenarios begin at different ones, so that together they meet more of them.
    first = sum(name.encode()) % min(every, len(faults))
    for start in range(first, len(faults), every):
        any(inject(*one) for one in faults[start : start + every])  # up to one that comes
    for number, fault in always:
        if not inject(number, fault):
            bench.report.problems.append(f"{fault.name} did not come at {calls[number]}")
    return bench.report


def main(place):
    torch.set_num_threads(1)
    double = Double()
    warm(place / "warm")
    for line in sys.stdin:
        name, most, every = json.loads(line)
        asked = partial(run, name, place / "bench", double, most=most, every=every)
        print(json.dumps(forked(lambda asked=asked: vars(asked()), 0)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
