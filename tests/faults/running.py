"""Scenarios that run: artifacts are planned for, loaded, called and verified, and machine code is."""

import shutil
import tempfile
from pathlib import Path

import penstock
from penstock import LoadOptions
from penstock.passes.trace import PRESET_CPU
from penstock.schedule.payload.codec import plan_from_json
from tests.faults.scenario import TOKENS, Scenario, bits, exported


class Loading(Scenario):
    """An artifact is opened and loaded, and runs twice."""

    lowering = "eager"

    def __init__(self, arena, engine, *, width=32, budget="60%"):
        self._arena, self._engine, self._width, self._budget = arena, engine, width, budget

    def prepare(self, root, beside):
        kept = self.kept / f"{self.lowering} {self._arena}"
        if not kept.exists():
            kept.mkdir(parents=True)
            small = None if self.lowering == "eager" else "1KiB"
            program = penstock.compile(
                exported(1, self._width),
                kept / "model.penstock",
                lowering=self.lowering,
                resident_below=small,
            )
            plan = program.plan(self._budget, arena=self._arena, hardware=PRESET_CPU)
            assert plan.streamed_bytes > 0
            (kept / "plan.json").write_text(plan.to_json())
        shutil.copytree(kept / "model.penstock", root / "model.penstock")
        shutil.copy2(kept / "plan.json", beside)

    def start(self, root, beside):
        return plan_from_json((beside / "plan.json").read_bytes(), source="plan.json")

    def act(self, root, started):
        with self._load(root, started) as module:
            return bits(module(TOKENS), module(TOKENS))

    def _load(self, root, plan):
        program = penstock.open(root / "model.penstock")
        return program.load(
            plan=plan, options=LoadOptions(engine=self._engine, poison=self._arena == "contiguous", readers=2)
        )


class Running(Loading):
    """A module that is loaded runs."""

    def start(self, root, beside):
        self._plan = super().start(root, beside)
        module = self._load(root, self._plan)
        module(TOKENS)
        return module

    def act(self, root, started):
        return bits(started(TOKENS), started(TOKENS))

    def reload(self, root, started):
        started.close()
        return self._load(root, self._plan)


class Compiled(Loading):
    """An artifact of machine code; its package is unpacked in a folder that meets faults as well."""

    lowering = "inductor"
    adds = ("temporary", "temporary/*")

    def start(self, root, beside):
        tempfile.tempdir = str(root / "temporary")
        Path(tempfile.tempdir).mkdir(exist_ok=True)
        return super().start(root, beside)

    def _load(self, root, plan):
        return penstock.open(root / "model.penstock", trust=True).load(
            plan=plan, options=LoadOptions(engine=self._engine)
        )


class Verifying(Scenario):
    """Every byte of an artifact is compared."""

    def prepare(self, root, beside):
        penstock.compile(exported(1), root / "model.penstock")

    def act(self, root, started):
        program = penstock.open(root / "model.penstock")
        return f"{program.verify(strict=True)} {program.digest}"


class Planning(Scenario):
    """A plan is asked for that another process has made; the machine's rates are known."""

    adds = ("cache/penstock/*",)
    remembers = True

    def prepare(self, root, beside):
        penstock.compile(exported(1), root / "model.penstock")
        self.act(root, None)

    def act(self, root, started):
        plan = penstock.open(root / "model.penstock").plan("60%", arena="paged")
        return f"{plan.budget} {plan.arena.kind}"  # the rest depends on rates, which may be measured again
