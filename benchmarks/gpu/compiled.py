"""Whether what Inductor compiles for the device streams there, with the bits that it has without penstock."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from benchmarks.gpu.target import Report, Target, make_stack, on_host, require
from penstock.passes.lowering.inductor import AHEAD
from penstock.runtime.dynamo.backend import compile_piece
from penstock.schedule.facts.errors import PassError

WIDTH, DEPTH, TOKENS = 2048, 8, 16


def run(target: Target, report: Report) -> None:
    """A line for the backend of torch.compile, and one for AOTInductor."""
    module = target.draw(make_stack(target.width(WIDTH), DEPTH, bias=True))
    given = target.normal(TOKENS, target.width(WIDTH))
    # What calls the kernels is compiled in seconds less.
    quick = torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"})
    with _generator(target) as options, target.plan_sizes(), quick:
        report(what="torch.compile", **_compare_backend(target, module, given, options))
        if target.where.type in AHEAD:
            figures = _compare_ahead(target, module, given)
        else:
            figures = {"refused": _refusal(target, module, given)}
        report(what="AOTInductor", **figures)


def _generator(target: Target) -> AbstractContextManager[dict[str, Any]]:
    """The options of Inductor for the device. On the rig, every operator is a call."""
    if not target.where_is_rig:
        return nullcontext({})
    rig: Any = import_module("tests.rig.inductor")
    return rig.registered(guarded=True)  # type: ignore[no-any-return]


def _compare_backend(
    target: Target, module: nn.Module, given: torch.Tensor, options: dict[str, Any]
) -> dict[str, Any]:
    expected = torch.compile(module, options=options or None)(given)
    torch._dynamo.reset()
    streamed, weights = on_host(module), target.folder / "stack.safetensors"
    save_file(streamed.state_dict(), weights)
    record = penstock.offload(streamed, weights, device=target.device)
    own: dict[str, Any] = {"budget": "50%", "resident_below": None, **options}
    call = torch.compile(streamed, backend=compile_piece, options=own)  # by itself: penstock is not installed
    equal = all(torch.equal(call(given), expected) for _ in range(2))
    stats = record.stats
    record.close()
    require(equal, "a compiled module has other bits with penstock than without")
    require(
        stats.bytes_moved > 0 and stats.peak_bytes <= stats.budget, "nothing streamed, or too much was held"
    )
    return {"equal": equal, "bytes_moved": stats.bytes_moved, "misses": stats.misses}


def _compare_ahead(target: Target, module: nn.Module, given: torch.Tensor) -> dict[str, Any]:
    exported = torch.export.export(module, (given,))
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(target.folder / "plain.pt2")
    )
    expected = torch._inductor.aoti_load_package(package)(given)
    program = penstock.compile(exported, target.folder / "ahead.penstock", lowering="inductor")
    plan = program.plan(program.floor(target.device), device=target.device)
    with program.load(plan=plan, device=target.device) as streamed:
        equal = all(torch.equal(streamed(given), expected) for _ in range(2))
        stats = streamed.stats
    require(equal, "a program that was compiled ahead has other bits with penstock than without")
    return {"equal": equal, "bytes_moved": stats.bytes_moved, "misses": stats.misses}


def _refusal(target: Target, module: nn.Module, given: torch.Tensor) -> str:
    path: Path = target.folder / "ahead.penstock"
    try:
        penstock.compile(torch.export.export(module, (given,)), path, lowering="inductor")
    except PassError as refused:
        return str(refused).partition(": ")[0]
    raise AssertionError(f"AOTInductor was not refused for {target.device}")
