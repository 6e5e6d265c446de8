"""Runs the cases: competitors in their own processes, once a round each, in an order that rotates."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.disk.cases import make_meta_module, name_weights, write_weights
from benchmarks.disk.competitors import Job
from benchmarks.disk.reader import choose_fastest, measure_readers
from benchmarks.ways import in_turn, run_apart, started
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size, parse_size

WORKER = "benchmarks.disk.worker"

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
            ready = [job for job in jobs if self._prepare(job, result["failures"])]
            limits = {}
            if case.state == "cgroup":
                result["cgroup_bytes"] = weight_bytes // CGROUP_SHARE
                limited = (job.way for job in ready if job.competitor not in ("memory", "raw"))
                limits = dict.fromkeys(limited, result["cgroup_bytes"])
            return self._measure(case, ready, limits, result)
        except typer.BadParameter as error:
            return result | {"skipped": error.message}
        finally:
            for job in jobs:
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
        job = Job("", "raw", model, self.options.nbytes, 1, str(path), folder="")
        if not self.readers:
            self._say("reading the disk in every way")
            self.readers = measure_readers(path)
        return job, weight_bytes

    def _list_jobs(self, case: Case, base: Job, weight_bytes: int) -> list[Job]:
        """A job for each competitor."""
        base = dataclasses.replace(base, tokens=case.tokens)
        stem = base.weights.removesuffix(".safetensors")
        jobs = [
            dataclasses.replace(base, way=name, competitor=name, folder=f"{stem}-{name}")
            for name in ("memory", *case.peers)
        ]
        if case.cold:
            for way, best in choose_fastest(self.readers).items():
                reader = (best["way"], best["threads"], best["block"])
                jobs.append(dataclasses.replace(base, way=f"disk, {way}", reader=reader))
        for budget, engine in itertools.product(case.budgets, self.options.engines):
            # Cold, an artifact each: what one has mapped stays in the page cache, where another would
            # find it. Warm, a second copy would only take the cache that the peers' files need.
            number = len(jobs) if case.cold else 0
            how = "" if engine == "auto" else f", {engine}"
            ours = dataclasses.replace(
                base,
                way=f"penstock {budget}{how}",
                competitor="penstock",
                folder=f"{stem}-{case.tokens}-{number}.penstock",
                budget=parse_size(budget, total=weight_bytes),
                engine=engine,
            )
            jobs.append(ours)
        return jobs

    def _prepare(self, job: Job, failures: dict[str, str]) -> bool:
        """Write the files of a competitor. One that fails is dropped from its case; `failures` says why."""
        if job.competitor not in ("memory", "raw", "mmap") and not Path(job.folder).exists():
            self._say(f"{job.model}, {job.tokens} tokens: preparing {job.competitor}")
            try:
                run_apart(WORKER, "--prepare", json.dumps(dataclasses.asdict(job)))
            except StreamError as error:
                failures[job.way] = str(error)
                self._say(f"{job.way}: {error}")
        return job.way not in failures

    def _measure(
        self, case: Case, jobs: Sequence[Job], limits: dict[str, int], result: dict[str, Any]
    ) -> dict[str, Any]:
        train = json.dumps({"passes": self.options.passes, "cold": case.cold})
        with started(WORKER, jobs, limits, environment={}) as ways:
            for number in range(self.options.rounds):
                for name in in_turn(ways, number):
                    ways[name].step(train)
                    answered = ways[name].steps[-1:] if not ways[name].failure else ()
                    for step in answered:
                        seconds = ", ".join(f"{sample['seconds']:.3f}" for sample in step["samples"])
                        self._say(f"{case.title}, round {number + 1}: {name} {seconds} s")
            for job in jobs:
                way = ways[job.way]
                if way.failure:
                    result["failures"][job.way] = f"{job.way} {way.failure}"
                    self._say(result["failures"][job.way])
                    continue
                facts = {"kind": job.competitor, "budget_bytes": job.budget, "rounds": way.steps}
                facts |= {"bare_anonymous": way.bare, "peak_anonymous": way.peak_anonymous}
                facts |= {name: way.steps[0][name] for name in ("load_seconds", "bare_total")}
                result["competitors"][job.way] = facts
        return result
