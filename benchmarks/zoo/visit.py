"""One model of the zoo, from its configuration to its streamed output, and the results."""

from __future__ import annotations

import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import penstock
from benchmarks.zoo.entry import Entry
from penstock.models.configuration import names_in_checkpoint
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.checkpoint.binding import Rename
from penstock.runtime.checkpoint.opening import open_checkpoint

RESIDENT_BELOW = "1KiB"
"""Compiled programs keep small weights in memory; these models have only small ones."""
OPTIONS = {"emulate_precision_casts": True}
"""Inductor's: bfloat16 is rounded as eager PyTorch does, and not where a kernel happens to end."""
ALL = "100%"
CLOSE = 1e-2
"""How far from the library's own output a compiled program may be: more is another function."""

REFUSALS = "## What may be refused"
LISTED = re.compile(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
"""The section of docs/zoo.md, and a row of its table: a sentence in which `...` stands for any text."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Streamed:
    """A load within a budget: whether its output has the expected bits, and what it copied."""

    budget: int
    equal: bool
    bytes_moved: int


@dataclass
class Run:
    """The results of one lowering.

    `from_library` is the largest difference from the library's own output, over that output's largest value;
    `from_alone` that from what AOTInductor compiles by itself.
    """

    compile_s: float = 0.0
    floor_bytes: int = 0
    streamed: list[Streamed] = field(default_factory=list)
    from_library: float = 0.0
    from_alone: float = 0.0
    failure: str = ""

    @property
    def works(self) -> bool:
        """Whether it ran, every output has the expected bits, and they are what the model computes."""
        equal = bool(self.streamed) and all(one.equal for one in self.streamed)
        return equal and not self.failure and self.from_library < CLOSE


@dataclass
class Row:
    """The results of a model."""

    name: str
    weight_bytes: int = 0
    export_s: float = 0.0
    bound: str = ""
    failure: str = ""
    runs: dict[str, Run] = field(default_factory=dict)


class Visit:
    """One model in a folder: its checkpoint, the library's model read from it, and the exported program."""

    def __init__(self, entry: Entry, folder: Path, row: Row) -> None:
        self.entry, self.folder, self.row = entry, folder, row
        self.checkpoint = folder / "checkpoint"
        torch.manual_seed(0)
        model = entry.build().eval()
        entry.write(model, self.checkpoint)
        self.rename = entry.rename or self._library_names(model)
        self.model = align(entry.wrap(entry.load(model, self.checkpoint)).eval())
        self.expected = call(self.model, entry.inputs)
        began = time.perf_counter()
        self.exported = penstock.fake_export(entry.exports(self.checkpoint), entry.inputs)
        row.export_s = time.perf_counter() - began
        self.bound = self.bind()

    def _library_names(self, model: nn.Module) -> Rename:
        """The names in the checkpoint of weights that transformers names differently in the model."""
        return names_in_checkpoint(model, open_checkpoint(self.checkpoint).tensors) or None

    def bind(self) -> ExportedProgram:
        """The program with the values of the checkpoint, all of whose tensors it must use or ignore."""
        self.row.bound = "renamed" if self.rename else "by name"
        return penstock.bind(self.exported, self.checkpoint, rename=self.rename, ignore=self.entry.ignore)

    def run(self, lowering: str) -> Run:
        """Compile and stream; a failure is part of the result."""
        run = Run()
        try:
            self._run(lowering, run)
        except Exception as error:
            run.failure = first_line(error, self.folder)
        return run

    def _run(self, lowering: str, run: Run) -> None:
        compiled = lowering == "inductor"
        began = time.perf_counter()
        program = penstock.compile(
            self.bound if compiled else self.exported,
            self.folder / f"{lowering}.penstock",
            lowering=lowering,
            weights=self.checkpoint,
            rename=self.rename,
            options=OPTIONS if compiled else None,
            resident_below=RESIDENT_BELOW if compiled else None,
        )
        run.compile_s = time.perf_counter() - began
        self.row.weight_bytes, run.floor_bytes = program.weight_bytes, program.floor_bytes
        expected = self.expected
        if compiled:
            with program.load(ALL) as module:
                expected = call(module, self.entry.inputs)
        for budget in (program.floor_bytes, max(program.floor_bytes, program.weight_bytes // 2)):
            with program.load(budget) as module:
                output = call(module, self.entry.inputs)
                moved = module.stats.bytes_moved
            run.streamed.append(Streamed(budget, same_bits(output, expected), moved))
        run.from_library = difference(expected, self.expected)
        if compiled:
            alone = compile_plainly(self.bound, self.entry.inputs, self.folder)
            run.from_alone = difference(expected, call(alone, self.entry.inputs))


def visit(entry: Entry, lowerings: Sequence[str]) -> Row:
    """Everything about one model, in a folder that goes away."""
    row = Row(entry.name)
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            one = Visit(entry, Path(folder), row)
        except Exception as error:
            row.failure = first_line(error, Path(folder))
            return row
        for lowering in lowerings:
            row.runs[lowering] = one.run(lowering)
    return row


def align(module: nn.Module) -> nn.Module:
    """The module itself, every weight cloned into memory that torch aligns to 64 bytes."""
    for tensor in [*module.parameters(), *module.buffers()]:
        for part in plain_tensors("", tensor).values():
            part.data = part.data.clone()
    return module


def compile_plainly(bound: ExportedProgram, inputs: Mapping[str, Any], folder: Path) -> Call:
    """The program compiled by AOTInductor alone, over weights of 64-byte alignment."""
    from torch._inductor import aot_compile
    from torch._inductor.package.package import load_package, package_aoti

    options = OPTIONS | {"aot_inductor.package": True, "aot_inductor.package_constants_in_so": False}
    files = aot_compile(bound.module(check_guards=False), (), dict(inputs), options=options)
    assert isinstance(files, list)
    package_aoti(str(folder / "plain.pt2"), {"model": files})
    runner: Any = load_package(str(folder / "plain.pt2"))
    values = {**bound.state_dict, **bound.constants}
    wanted = {name: values[name].detach().clone() for name in runner.get_constant_fqns()}
    runner.load_constants(wanted, check_full_update=True)
    plain: Call = runner
    return plain


def call(module: Call, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of what it returns."""
    with torch.no_grad():
        output = module(**inputs)
    return [value.clone() for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor)]


def same_bits(output: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether there are as many tensors, each of the same bits, and all of them numbers."""
    if len(output) != len(expected) or not expected:
        return False
    return all(torch.equal(a, b) and bool(b.isfinite().all()) for a, b in zip(output, expected, strict=True))


def difference(output: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(output, expected, strict=True)
    )


def first_line(error: BaseException, folder: Path) -> str:
    """An exception in one line, without the temporary folder."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}".replace(f"{folder}/", "")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' warnings and progress bars, which say nothing about the result."""
    import diffusers
    import transformers

    with warnings.catch_warnings(action="ignore"):
        for library in (transformers, diffusers):
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
        yield


def is_listed(sentence: str) -> bool:
    """Tell whether docs/zoo.md lists the sentence of a refusal, which `first_line` gives."""
    page = (Path(__file__).parents[2] / "docs/zoo.md").read_text(encoding="utf-8")
    section = page.partition(REFUSALS)[2].partition("\n## ")[0]
    patterns = [re.escape(one).replace(re.escape("..."), ".*") for one in LISTED.findall(section)]
    return any(re.fullmatch(one, sentence, re.DOTALL) for one in patterns)
