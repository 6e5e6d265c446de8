"""Runs an artifact and measures it: inputs from a file or random ones, timed passes, outputs to a file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.checkpoint.binding import listed
from penstock.runtime.files.tensor_file import open_tensors
from penstock.runtime.module import StreamedModule
from penstock.runtime.program import Program
from penstock.runtime.stream.engine import Stats
from penstock.schedule.clock.turns import turns_of
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.facts.model import Input, Method
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    import torch


_SIMULATED_PASSES = 3

_NUMBERS: Mapping[str, type] = {"int": int, "float": float}
"""The types of inputs that are Python numbers, by name. No dtype of a tensor has such a name."""


@dataclass(frozen=True)
class Trial:
    """The method to run, the number of passes, and the inputs and outputs.

    The inputs are the tensors of the safetensors file `input`, or random tensors of the recorded shapes, for
    which `sizes` gives dynamic sizes, and numbers. The outputs of the last pass are written to the file
    `output`; an existing file is replaced only with `force`.
    """

    method: str | None = None
    passes: int = 1
    input: Path | None = None
    output: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    force: bool = False


@dataclass(frozen=True)
class TrialResult:
    """Seconds of loading and of each pass, the module's counters, and dtype and shape of each output."""

    load_seconds: float
    pass_seconds: tuple[float, ...]
    stats: Stats
    outputs: dict[str, str]

    def facts(self) -> dict[str, Any]:
        """The results as JSON."""
        return {
            "load_seconds": self.load_seconds,
            "pass_seconds": list(self.pass_seconds),
            "outputs": self.outputs,
            **asdict(self.stats),
        }


def run_trial(
    program: Program, asked: Trial, load: Callable[[], StreamedModule], say: Callable[[str], None]
) -> TrialResult:
    """Run a method of `program` in the module that `load` returns; `say` is called with a text for each pass.

    Raises StreamError for inputs that do not fit the method, SourceError for files that cannot be read or
    written, and the errors of `load`.
    """
    import torch

    method = _method(program, asked.method)
    leaves = _from_file(asked.input, method) if asked.input else _generated(method, asked.sizes, asked.seed)
    began = time.perf_counter()
    with load() as module, torch.inference_mode():
        load_seconds = time.perf_counter() - began
        args, kwargs = module.arguments(leaves, method.name)
        seconds = []
        for number in range(asked.passes):
            say(f"pass {number + 1} of {asked.passes}")
            began = time.perf_counter()
            outputs = module.call(method.name, *args, **kwargs)
            seconds.append(time.perf_counter() - began)
        named = _named_outputs(outputs)
        if asked.output is not None:
            _write(asked.output, named, force=asked.force)
        return TrialResult(load_seconds, tuple(seconds), module.stats, _described(named))


def run_simulated(program: Program, plan: Plan, device: str) -> list[dict[str, Any]]:
    """Run each method three times on a simulated device, on random inputs; return times and outputs as JSON.

    Methods whose calls come in turn run in turn, since one may read what another has left in memory.

    Raises StreamError if the device's memory does not suffice, and RaceError if two accesses of the same
    bytes are not ordered by an event.
    """
    import torch

    methods = {method.graph: method for method in program.payload.methods}
    by_method: dict[str, dict[str, Any]] = {}
    with program.load(plan=plan, device=device) as module, torch.inference_mode():
        for turn in turns_of(plan.traces):
            for k in [*turn] * _SIMULATED_PASSES:
                method = methods[plan.traces[k].graph]
                args, kwargs = module.arguments(_generated(method, {}, 0), method.name)
                before = module.stats
                outputs = module.call(method.name, *args, **kwargs)
                after = module.stats
                measured = by_method.setdefault(
                    method.name,
                    {"method": method.name, "device": device, "pass_seconds": [], "bytes_moved": 0},
                )
                measured["pass_seconds"].append(
                    (after.simulated_seconds or 0.0) - (before.simulated_seconds or 0.0)
                )
                measured["outputs"] = _described(_named_outputs(outputs))
                measured["bytes_moved"] += after.bytes_moved - before.bytes_moved
                measured["bytes_written"] = (
                    measured.get("bytes_written", 0) + after.bytes_written - before.bytes_written
                )
    return [by_method[method.name] for method in program.payload.methods if method.name in by_method]


def _method(program: Program, name: str | None) -> Method:
    methods = {m.name: m for m in program.payload.methods}
    if name is None and len(methods) == 1:
        return next(iter(methods.values()))
    if name not in methods:
        missing = "there are several methods" if name is None else f"there is no method {name!r}"
        raise StreamError(f"{missing}: choose one of {', '.join(methods)} with --method")
    steps = program.payload.trace_for(methods[name].graph).steps
    read, written = {s for step in steps for s in step.reads}, {s for step in steps for s in step.writes}
    if any(program.payload.storages[s].kind == "produced" for s in read - written):
        raise StreamError(
            f"{name} reads what a call before it has left in memory, and cannot run by itself: run another "
            "method, or simulate the program with --device sim"
        )
    return methods[name]


def _from_file(path: Path, method: Method) -> list[Any]:
    with open_tensors(path) as file:
        tensors = [leaf for leaf in method.inputs if leaf.value is None]
        missing = [leaf.name for leaf in tensors if leaf.name not in file.entries]
        unknown = sorted(set(file.entries) - {leaf.name for leaf in tensors})
        if missing or unknown:
            raise StreamError(
                f"{path} must hold the tensors {listed([leaf.name for leaf in tensors])}: "
                + f"it lacks {listed(missing, 3) or 'none'}, and also has {listed(unknown, 3) or 'none'}"
            )
        for leaf in tensors:
            _refuse_other_shape(path, leaf, file.entries[leaf.name].shape, method)
        tensors_given = {leaf.name: file.get_tensor(leaf.name) for leaf in tensors}
    values: list[Any] = []
    for leaf in method.inputs:
        value: Any = tensors_given[leaf.name] if leaf.value is None else _constant(leaf)
        if leaf.value is None and leaf.dtype in _NUMBERS:
            value = _NUMBERS[leaf.dtype](value.item())
        values.append(value)
    return values


def _refuse_other_shape(path: Path, leaf: Input, shape: tuple[int, ...], method: Method) -> None:
    """Raise StreamError, before a tensor is read, for a shape that an input cannot have."""
    if leaf.dtype in _NUMBERS:
        if math.prod(shape) != 1:
            raise StreamError(
                f"input {leaf.name} is a number: give a tensor of one element, got {list(shape)}"
            )
        return
    limits = {symbol.name: (symbol.lower, symbol.upper) for symbol in method.symbols}
    sizes = [limits[size] if isinstance(size, str) else (size, size) for size in leaf.shape]
    pairs = zip(shape, sizes, strict=False)
    fits = all(least <= got and (most is None or got <= most) for got, (least, most) in pairs)
    if len(sizes) != len(shape) or not fits:
        raise StreamError(f"{path} has {leaf.name} of the shape {list(shape)}, expected {list(leaf.shape)}")


def _generated(method: Method, sizes: Mapping[str, int], seed: int) -> list[Any]:
    import torch

    known = {leaf.name: 2 for leaf in method.inputs if leaf.dtype in _NUMBERS and leaf.value is None}
    known |= {s.name: s.example for s in method.symbols}
    unknown = sorted(set(sizes) - set(known))
    if unknown:
        raise StreamError(
            f"there is no dynamic size {', '.join(unknown)}: "
            + (f"choose from {', '.join(known)}" if known else "the program was exported with fixed sizes")
        )
    chosen = known | dict(sizes)
    for symbol in method.symbols:
        size, upper = chosen[symbol.name], math.inf if symbol.upper is None else symbol.upper
        if not symbol.lower <= size <= upper:
            raise StreamError(
                f"the size {symbol.name}={size} is out of its range: expected {symbol.lower} to {upper}"
            )
    generator = torch.Generator().manual_seed(seed)
    try:
        return [
            _random(leaf, chosen, generator) if leaf.value is None else _constant(leaf)
            for leaf in method.inputs
        ]
    except (RuntimeError, TypeError, ValueError) as error:  # raised for sizes that no tensor can have
        raise StreamError(
            f"inputs of the sizes {chosen} cannot be made ({str(error).splitlines()[0]}): "
            "give smaller ones with --size"
        ) from error


def _random(leaf: Input, sizes: Mapping[str, int], generator: torch.Generator) -> Any:
    import torch

    if leaf.dtype in _NUMBERS:
        return _NUMBERS[leaf.dtype](sizes[leaf.name])
    shape = [sizes[d] if isinstance(d, str) else d for d in leaf.shape]
    dtype = getattr(torch, leaf.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    # Zero and one are valid as token numbers, positions, masks and flags.
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _constant(leaf: Input) -> Any:
    """The Python value that export has made constant, from its repr."""
    import ast

    assert leaf.value is not None
    if leaf.dtype == "float":  # `inf` and `nan` are no literals
        return float(leaf.value)
    try:
        return ast.literal_eval(leaf.value)
    except (ValueError, SyntaxError) as error:
        raise StreamError(
            f"input {leaf.name} is {leaf.value}, which cannot be given here: call the program from Python"
        ) from error


def _named_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    import torch
    from torch.utils import _pytree as pytree

    from penstock.passes.calls.signature import path_name

    leaves = pytree.tree_leaves_with_path(outputs)
    return {path_name(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{_dtype(t)} {list(t.shape)}" for name, t in tensors.items()}


def _write(path: Path, tensors: dict[str, torch.Tensor], *, force: bool) -> None:
    from safetensors.torch import save

    from penstock.schedule.atomic_file import replace_file, write_all

    try:
        data = save({name: t.contiguous().clone() for name, t in tensors.items()})
    except Exception as error:  # a dtype that the format lacks raises errors of several types
        dtypes = ", ".join(sorted({_dtype(t) for t in tensors.values()}))
        raise SourceError(
            f"outputs of {dtypes} cannot be written to a safetensors file ({error}); leave --output out"
        ) from error
    with replace_file(path, force=force) as fd:
        write_all(fd, data)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
