"""Runs the cases: competitors in their own processes, once a round each, in an order that rotates."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.disk.cases import make_meta_module, name_weights, write_weights
from benchmarks.disk.competitors import Job
from benchmarks.disk.process import Worker, WorkerError
from benchmarks.disk.reader import choose_fastest, measure_readers
from benchmarks.machine import drop_cache
from examples.demo.cgroup import make_group
from penstock.schedule.facts.sizes import format_size, parse_size

STATES = ("cold", "warm", "resident", "cgroup")
CGROUP_SHARE = 4
"""A cgroup has the bare process's memory and, with the page cache, the weights divided by this number."""


@dataclass(frozen=True)
class Case:
    """One table of results; `state` is one of STATES."""

    model: str
    tokens: int
    state: str
    budgets: tuple[str, ...]
    peers: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.state}"

    @property
    def cold(self) -> bool:
        return self.state in ("cold", "cgroup")


@dataclass(frozen=True)
class Options:
    """What every case shares. `nbytes` is the size asked for; a model may differ from it by a layer."""

    nbytes: int
    rounds: int
    passes: int
    work: Path
    pack: bool
    engines: tuple[str, ...] = ("auto",)


def list_cases(
    models: Sequence[str],
    tokens: Sequence[int],
    states: Sequence[str],
    *,
    budgets: Sequence[str],
    peers: Sequence[str],
) -> list[Case]:
    """Every case of the options; the cgroup's is for the fewest tokens and the smallest budget."""
    least = min(budgets, key=lambda budget: parse_size(budget, total=1 << 40))
    chosen = {
        "cold": (tuple(budgets), tuple(peers)),
        "warm": (tuple(budgets), tuple(peers)),
        "resident": (("100%",), ()),
        "cgroup": ((least,), tuple(peers)),
    }
    return [
        Case(model, count, state, *chosen[state])
        for model in models
        for count in tokens
        for state in states
        if state != "cgroup" or count == min(tokens)
    ]


class _NoGroupError(Exception):
    """No memory cgroup can be made here."""


@contextlib.contextmanager
def _require_group(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new memory cgroup, for one process; raises _NoGroupError."""
    with make_group(limit_bytes) as group:
        if group is None:
            raise _NoGroupError
        yield group.folder


class Bench:
    """What the cases share: the weights on disk, and the way of reading them that is fastest there."""

    def __init__(self, options: Options, say: Callable[[str], object]) -> None:
        self.options = options
        self.readers: list[dict[str, Any]] = []
        self._say = say

    def run(self, case: Case) -> dict[str, Any]:
        """Measure one case; everything that was measured, as JSON can carry it."""
        base, weight_bytes = self._make_weights(case.model)
        jobs = self._list_jobs(case, base, weight_bytes)
        result: dict[str, Any] = dataclasses.asdict(case) | {"weight_bytes": weight_bytes}
        result |= {"competitors": {}, "failures": {}, "skipped": None, "cgroup_bytes": None}
        try:
            for name, job in jobs.items():
                with self._tolerate(name, result):
                    self._prepare(job)
            if case.state == "cgroup":
                result["cgroup_bytes"] = weight_bytes // CGROUP_SHARE
            return self._measure(case, jobs, result)
        except _NoGroupError:
            return result | {"skipped": "no memory cgroup can be made here"}
        finally:
            for job in jobs.values():
                if job.competitor == "penstock":
                    shutil.rmtree(job.folder, ignore_errors=True)

    def remove(self, model: str) -> None:
        """Delete what the model's cases left on disk."""
        for path in self._list_paths(model):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _list_paths(self, model: str) -> list[Path]:
        return sorted(self.options.work.glob(f"{name_weights(model, self.options.nbytes)}*"))

    def _make_weights(self, model: str) -> tuple[Job, int]:
        """A job that knows the weights, which are written if they are not there, and their bytes."""
        path = self.options.work / f"{name_weights(model, self.options.nbytes)}.safetensors"
        module = make_meta_module(model, self.options.nbytes)
        weight_bytes = sum(value.numel() * value.element_size() for value in module.state_dict().values())
        if not path.exists():
            self._say(f"{model}: writing {format_size(weight_bytes)} of weights")
            write_weights(module, path)
        job = Job("raw", model, self.options.nbytes, 1, str(path), folder="", pack=self.options.pack)
        if not self.readers:
            self._say("reading the disk in every way")
            self.readers = measure_readers(path)
        return job, weight_bytes

    def _list_jobs(self, case: Case, base: Job, weight_bytes: int) -> dict[str, Job]:
        """A job for each competitor, by the name it has in the tables."""
        base = dataclasses.replace(base, tokens=case.tokens)
        stem = base.weights.removesuffix(".safetensors")
        jobs = {
            name: dataclasses.replace(base, competitor=name, folder=f"{stem}-{name}")
            for name in ("memory", *case.peers)
        }
        if case.cold:
            for way, best in choose_fastest(self.readers).items():
                reader = (best["way"], best["threads"], best["block"])
                jobs[f"disk, {way}"] = dataclasses.replace(base, reader=reader)
        for budget, engine in itertools.product(case.budgets, self.options.engines):
            # Cold, an artifact each: what one has mapped stays in the page cache, where another would
            # find it. Warm, a second copy would only take the cache that the peers' files need.
            number = len(jobs) if case.cold else 0
            how = "" if engine == "auto" else f", {engine}"
            jobs[f"penstock {budget}{how}"] = dataclasses.replace(
                base,
                competitor="penstock",
                folder=f"{stem}-{case.tokens}-{number}.penstock",
                budget=parse_size(budget, total=weight_bytes),
                engine=engine,
            )
        return jobs

    def _prepare(self, job: Job) -> None:
        if job.competitor not in ("memory", "raw", "mmap") and not Path(job.folder).exists():
            self._say(f"{job.model}, {job.tokens} tokens: preparing {job.competitor}")
            with contextlib.closing(self._start(job, None)) as worker:
                worker.ask("prepare")

    def _start(self, job: Job, group: Path | None) -> Worker:
        return Worker(job, self.options.work / "log.txt", group=group)

    def _bare(self, job: Job) -> int:
        """The anonymous memory in bytes of a process that has the competitor's libraries, and no weights."""
        with contextlib.closing(self._start(job, None)) as worker:
            return int(worker.ask("bare"))

    def _measure(self, case: Case, jobs: dict[str, Job], result: dict[str, Any]) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            workers = {}
            for name, job in jobs.items():
                if name in result["failures"]:
                    continue
                with self._tolerate(name, result):
                    worker, loaded = self._load(job, result["cgroup_bytes"], stack)
                    result["competitors"][name] = {
                        "kind": job.competitor,
                        "budget_bytes": job.budget,
                    } | loaded
                    workers[name] = worker
            rounds = self._run_rounds(case, workers, result)
            for name, worker in workers.items():
                result["competitors"][name] |= {
                    "rounds": rounds[name],
                    "peak_anonymous": worker.peak_anonymous,
                }
        return result

    def _load(
        self, job: Job, cgroup_bytes: int | None, stack: contextlib.ExitStack
    ) -> tuple[Worker, dict[str, Any]]:
        """The process of a competitor that has loaded, and what it says; `stack` ends it."""
        group = None
        if cgroup_bytes and job.competitor not in ("memory", "raw"):
            group = stack.enter_context(_require_group(self._bare(job) + cgroup_bytes))
        worker = stack.enter_context(contextlib.closing(self._start(job, group)))
        # What is warm later a competitor's own pass has read. And pages that others have cached are
        # charged to them, not to a cgroup.
        drop_cache(self._list_files(job))
        return worker, worker.ask("load")

    def _list_files(self, job: Job) -> list[Path]:
        """What a competitor may read: the weights, and what was prepared for it."""
        prepared = Path(job.folder).rglob("*") if job.folder else ()
        return [Path(job.weights), *(path for path in prepared if path.is_file())]

    @contextlib.contextmanager
    def _tolerate(self, name: str, result: dict[str, Any]) -> Iterator[None]:
        """Drop a competitor that fails from its case; the result says why."""
        try:
            yield
        except WorkerError as error:
            self._say(str(error))
            result["failures"][name] = str(error)

    def _run_rounds(
        self, case: Case, workers: dict[str, Worker], result: dict[str, Any]
    ) -> dict[str, list[dict[str, Any]]]:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        names = list(workers)
        for number in range(self.options.rounds):
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                if name in result["failures"]:
                    continue
                with self._tolerate(name, result):
                    train = workers[name].ask("train", passes=self.options.passes, cold=case.cold)
                    rounds[name].append(train)
                    seconds = ", ".join(f"{sample['seconds']:.3f}" for sample in train["samples"])
                    self._say(f"{case.title}, round {number + 1}: {name} {seconds} s")
        return rounds
