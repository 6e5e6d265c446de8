"""What meets faults: each scenario prepares a folder, and acts in it in a way that can be done again."""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import ExportedProgram, export

import penstock
from penstock.passes.trace import PRESET_CPU
from penstock.runtime.cache import list_entries, prune
from penstock.runtime.checkpoint.convert import convert
from penstock.runtime.relink import relink
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.payload.codec import plan_from_json
from tests.runtime.models import Stack, aligned

TOKENS = torch.tensor([[5, 17, 99, 23, 42], [1, 2, 3, 4, 255]])


def bits(*tensors: torch.Tensor) -> str:
    """The hash of the bytes of tensors."""
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(one.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def stack(seed: int, width: int = 32) -> nn.Module:
    """A stack of 70 KiB, or of 9 MiB with a width of 384."""
    torch.manual_seed(seed)
    return aligned(Stack(width, 2, 256)).eval().requires_grad_(False)


@cache
def exported(seed: int, width: int = 32) -> ExportedProgram:
    return export(stack(seed, width), (TOKENS,))


def save_checkpoint(seed: int, folder: Path) -> None:
    """Two shards of a stack, and their index."""
    folder.mkdir(parents=True)
    tensors = {name: one for name, one in stack(seed).state_dict().items() if name != "head.weight"}
    whole = folder.with_suffix(".safetensors")
    save_file(tensors, whole)
    convert(whole, folder, shard_size="40KiB", force=True)
    whole.unlink()


def of_artifact(path: Path) -> str:
    """The hashes of what an artifact computes, and of its weights, with which all bytes of it agree."""
    if not path.exists():
        return ""
    program = penstock.open(path)
    program.verify(strict=True)
    assert program.payload.program is not None
    said = [str(one.sha256) for one in program.payload.storages]
    with ZipFile(path / program.payload.program.path) as archive:  # which has the times of its writing
        said += [f"{one.filename} {one.CRC}" for one in archive.infolist()]
    return hashlib.sha256("".join(said).encode()).hexdigest()[:16]


def of_files(path: Path) -> str:
    """The hash of a file, or of all in a folder; empty if there is none."""
    if path.is_dir():
        return hashlib.sha256("".join(map(of_files, sorted(path.iterdir()))).encode()).hexdigest()[:16]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


class Scenario(ABC):
    """`target` is the path, within the folder, of what is written; `adds` are patterns of what may appear.

    What penstock remembers of the machine meets faults as well if it `remembers` in the folder.
    """

    target = "new"
    adds: tuple[str, ...] = ()
    remembers = False

    @abstractmethod
    def prepare(self, root: Path, beside: Path) -> None:
        """Fill an empty folder; what is put beside it meets no fault."""

    def start(self, root: Path, beside: Path) -> Any:
        """Do what comes before and meets no fault, and return what `act` is given."""
        return None

    @abstractmethod
    def act(self, root: Path, started: Any) -> str:
        """Do what meets a fault, and return what came of it."""

    def again(self, root: Path, started: Any) -> str:
        """Do the same again, in the same process, over what is there."""
        return self.act(root, started)

    def reload(self, root: Path, started: Any) -> Any:
        """What `again` is given once a file was changed and put back: what ran on it may refuse for ever."""
        return started

    def found(self, root: Path) -> str:
        """What the target holds; empty if it is not there."""
        return ""


class Compiling(Scenario):
    """`over` an artifact of other values, from a checkpoint or from memory, packed or in place."""

    target = "model.penstock"

    def __init__(self, *, over: bool = False, checkpoint: bool = False, pack: bool = True) -> None:
        self._over, self._checkpoint, self._pack = over, checkpoint, pack

    def prepare(self, root: Path, beside: Path) -> None:
        save_checkpoint(1, root / "checkpoint")
        if self._over:
            penstock.compile(exported(2), root / self.target)

    def act(self, root: Path, started: Any) -> str:
        return self._compile(root, force=self._over)

    def again(self, root: Path, started: Any) -> str:
        return self._compile(root, force=True)

    def _compile(self, root: Path, *, force: bool) -> str:
        weights = root / "checkpoint" if self._checkpoint else None
        penstock.compile(exported(1), root / self.target, weights=weights, pack=self._pack, force=force)
        return ""

    def found(self, root: Path) -> str:
        return of_artifact(root / self.target)


class Converting(Scenario):
    """From one form to another: a file, or shards in a folder."""

    def __init__(self, source: str, target: str, *, over: bool) -> None:
        self._source, self.target, self._over = source, target, over

    def prepare(self, root: Path, beside: Path) -> None:
        tensors = {name: one for name, one in stack(1).state_dict().items() if name != "head.weight"}
        root.mkdir(exist_ok=True)
        if self._source == "shards":
            save_checkpoint(1, root / "shards")
        elif self._source == "distributed":
            from torch.distributed.checkpoint import save

            save(tensors, checkpoint_id=root / "distributed", no_dist=True)
        elif self._source.endswith(".pt"):
            torch.save(tensors, root / self._source)
        else:
            save_file(tensors, root / self._source)
        if self._over:
            save_checkpoint(2, root / "other")
            self._convert(root / "other", root, force=False)

    def act(self, root: Path, started: Any) -> str:
        return self._convert(root / self._source, root, force=self._over)

    def again(self, root: Path, started: Any) -> str:
        return self._convert(root / self._source, root, force=True)

    def _convert(self, source: Path, root: Path, *, force: bool) -> str:
        target = root / self.target
        most = None if target.suffix else "40KiB"
        convert(source, target, shard_size=most, dtype="bfloat16", force=force)
        return ""

    def found(self, root: Path) -> str:
        return of_files(root / self.target)


class Relinking(Scenario):
    """An artifact that refers to files in place gets the paths of copies of them."""

    target = "model.penstock"

    def prepare(self, root: Path, beside: Path) -> None:
        save_checkpoint(1, root / "before")
        penstock.compile(exported(1), root / self.target, weights=root / "before", pack=False)
        (root / "before").rename(root / "after")

    def act(self, root: Path, started: Any) -> str:
        relink(root / self.target, [root / "after"])
        return ""

    def found(self, root: Path) -> str:
        return of_files(root / self.target / "payload.json")


class Loading(Scenario):
    """An artifact is opened and loaded, and runs twice."""

    def __init__(self, arena: str, engine: str, *, width: int = 32, budget: str = "60%") -> None:
        self._arena, self._engine, self._width, self._budget = arena, engine, width, budget

    def prepare(self, root: Path, beside: Path) -> None:
        program = penstock.compile(exported(1, self._width), root / "model.penstock")
        plan = program.plan(self._budget, arena=self._arena, hardware=PRESET_CPU)
        assert plan.streamed_bytes > 0
        (beside / "plan.json").write_text(plan.to_json())

    def start(self, root: Path, beside: Path) -> Any:
        return plan_from_json((beside / "plan.json").read_bytes(), source="plan.json")

    def act(self, root: Path, started: Any) -> str:
        with self._load(root, started) as module:
            return bits(module(TOKENS), module(TOKENS))

    def _load(self, root: Path, plan: Any) -> Any:
        program = penstock.open(root / "model.penstock")
        return program.load(plan=plan, engine=self._engine, poison=self._arena == "contiguous", readers=2)


class Running(Loading):
    """A module that is loaded runs."""

    def start(self, root: Path, beside: Path) -> Any:
        self._plan = super().start(root, beside)
        module = self._load(root, self._plan)
        module(TOKENS)
        return module

    def act(self, root: Path, started: Any) -> str:
        return bits(started(TOKENS), started(TOKENS))

    def reload(self, root: Path, started: Any) -> Any:
        started.close()
        return self._load(root, self._plan)


class Verifying(Scenario):
    """Every byte of an artifact is compared."""

    def prepare(self, root: Path, beside: Path) -> None:
        penstock.compile(exported(1), root / "model.penstock")

    def act(self, root: Path, started: Any) -> str:
        program = penstock.open(root / "model.penstock")
        return f"{program.verify(strict=True)} {program.digest}"


class Planning(Scenario):
    """A plan is asked for that another process has made; the machine's rates are known."""

    adds = ("cache/penstock/*",)
    remembers = True

    def prepare(self, root: Path, beside: Path) -> None:
        penstock.compile(exported(1), root / "model.penstock")
        self.act(root, None)

    def act(self, root: Path, started: Any) -> str:
        plan = penstock.open(root / "model.penstock").plan("60%", arena="paged")
        return f"{plan.budget} {plan.arena.kind}"  # the rest depends on rates, which may be measured again


class Reporting(Scenario):
    """The page of a plan takes the place of another."""

    target = "plan.html"

    def prepare(self, root: Path, beside: Path) -> None:
        program = penstock.compile(exported(1), beside / "model.penstock")
        plan = program.plan("60%", arena="paged", hardware=PRESET_CPU)
        (beside / "plan.json").write_text(plan.to_json())
        root.mkdir(exist_ok=True)
        (root / self.target).write_text("old")

    def start(self, root: Path, beside: Path) -> Any:
        return plan_from_json((beside / "plan.json").read_bytes(), source="plan.json")

    def act(self, root: Path, started: Any) -> str:
        started.save_report(root / self.target, force=True)
        return ""

    def found(self, root: Path) -> str:
        return of_files(root / self.target)


class Plain(nn.Module):
    """Linears with weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


X = torch.linspace(-1, 1, 64).reshape(2, 32)


class Command(Scenario):
    """A command of the command line, given its arguments."""

    def __init__(self, *arguments: str, target: str = "new") -> None:
        self._arguments, self.target = arguments, target

    def prepare(self, root: Path, beside: Path) -> None:
        penstock.compile(export(Plain().eval(), (X,)), root / "model.penstock")
        save_file({"x": X}, root / "in.safetensors")
        (root / "out.safetensors").write_bytes(b"old")

    def act(self, root: Path, started: Any) -> str:
        from penstock.cli.main import assemble

        arguments = [one.replace("ROOT", str(root)) for one in self._arguments]
        assemble()(arguments, prog_name="penstock", standalone_mode=False)
        return ""

    def found(self, root: Path) -> str:
        return of_files(root / self.target)


class Applying(Scenario):
    """`apply` with a cache, which is `warm` if another process has filled it."""

    adds = ("cache", "cache/*")

    def __init__(self, *, warm: bool) -> None:
        self._warm = warm

    def prepare(self, root: Path, beside: Path) -> None:
        if self._warm:
            self.act(root, self.start(root, beside))

    def start(self, root: Path, beside: Path) -> Any:
        self._applied = None
        return Plain().eval().requires_grad_(False)

    def act(self, root: Path, started: Any) -> str:
        from penstock.integrations import apply

        self._applied = apply(started, "1MB", example=X, cache=root / "cache")
        value = bits(started(X))
        self._applied.restore()
        self._applied = None
        return value

    def reload(self, root: Path, started: Any) -> Any:
        """A model that cannot be restored, because what it was given back for has changed, is made again."""
        return self.start(root, root)

    def again(self, root: Path, started: Any) -> str:
        if self._applied is not None:
            self._applied.restore()
        return self.act(root, started)


class Pruning(Scenario):
    """The cache is emptied; what a killed run left goes as well."""

    adds = ("*",)

    def prepare(self, root: Path, beside: Path) -> None:
        from penstock.integrations import apply

        with apply(Plain().eval().requires_grad_(False), "1MB", example=X, cache=root):
            pass
        left = root / "weights" / f".{'0' * 32}.tmp-01234567"
        left.mkdir()
        (left / "weights.safetensors").write_bytes(b"left")

        (beside / "entries").write_text(str(len(list_entries(root))))

    def start(self, root: Path, beside: Path) -> Any:
        return (beside / "entries").read_text()

    def act(self, root: Path, started: Any) -> str:
        done = prune(root, before=math.inf)
        return str(len(done.removed) + len(done.in_use))

    def again(self, root: Path, started: Any) -> str:
        prune(root, before=math.inf)
        assert not [path for path in root.rglob("*") if path.is_file()]
        return str(started)


class Carelessly(Scenario):
    """What penstock does not do: the double must show each fault of this."""

    def prepare(self, root: Path, beside: Path) -> None:
        (root / "in").write_bytes(bytes(range(100)))
        (root / self.target).write_bytes(b"old")

    def act(self, root: Path, started: Any) -> str:
        unfinished = root / f".{self.target}.tmp-0"
        fd = os.open(root / "in", os.O_RDWR)
        data = os.read(fd, 100)
        if len(data) < 60:
            raise SourceError("the file has shrunk")
        os.write(fd, data)  # in the file itself, at its end
        os.ftruncate(fd, 100)
        os.close(fd)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT)
        os.write(fd, data)
        os.close(fd)
        (root / self.target).write_bytes(data)
        fd = os.open(root / self.target, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SourceError("the disk may be full") from error
        os.close(fd)
        unfinished.unlink()
        return ""

    def again(self, root: Path, started: Any) -> str:
        (root / self.target).write_bytes((root / "in").read_bytes())
        return ""

    def found(self, root: Path) -> str:
        return of_files(root / self.target)


_LARGE: Mapping[str, Any] = {"width": 384, "budget": "80%"}
"""For arenas whose granules are of 2 MiB."""

_SCENARIOS: Mapping[str, Callable[[], Scenario]] = {
    "compile": Compiling,
    "compile over another": lambda: Compiling(over=True),
    "compile a checkpoint": lambda: Compiling(checkpoint=True),
    "compile in place": lambda: Compiling(checkpoint=True, pack=False),
    "convert a file": lambda: Converting("in.safetensors", "out.safetensors", over=True),
    "convert to shards": lambda: Converting("shards", "out", over=True),
    "convert torch's": lambda: Converting("in.pt", "out.safetensors", over=False),
    "convert a distributed one": lambda: Converting("distributed", "out.safetensors", over=False),
    "relink": Relinking,
    "verify": Verifying,
    "plan": Planning,
    "report": Reporting,
    "penstock run": lambda: Command(
        "run", "ROOT/model.penstock", "--budget", "100%", "--arena", "paged", "--engine", "python",
        "--input", "ROOT/in.safetensors", "--output", "ROOT/out.safetensors", "--force",
        target="out.safetensors",
    ),
    "apply": lambda: Applying(warm=False),
    "apply again": lambda: Applying(warm=True),
    "penstock cache clear": Pruning,
    **{
        f"{kind.__name__.lower()} {arena}, {engine}": lambda kind=kind, arena=arena, engine=engine: kind(
            arena, engine, **(_LARGE if arena in ("mapped", "pooled") else {})
        )
        for kind in (Loading, Running)
        for arena in ("paged", "contiguous", "mapped", "pooled")
        for engine in ("python", "native")
    },
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The names of all scenarios but the careless one."""
    return tuple(_SCENARIOS)


def scenario(name: str) -> Scenario:
    return Carelessly() if name == "carelessly" else _SCENARIOS[name]()


def warm(place: Path) -> None:
    """Do once what the first call in a process takes long for, so that forked processes need not."""
    path = place / "model.penstock"
    place.mkdir(parents=True, exist_ok=True)
    for seed in (1, 2):
        penstock.compile(exported(seed), path, force=True)
    of_artifact(path)
