"""Compares the Inductor lowering with plain AOTInductor and with the eager lowering, in one run.

A decoder of random weights: the kernels that are generated with and without probes, the time of a call with
everything in memory over that of plain AOTInductor, and at smaller budgets over the eager lowering's;
whether all outputs are equal bit for bit; and what compiling takes for more and more layers. Rounds are
interleaved, and the weight files are in the page cache.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional

import penstock
from benchmarks.machine import describe_machine
from benchmarks.table import write_between
from penstock import LoadOptions

BEGIN = "<!-- benchmarks.calls.inductor writes from here -->"
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)
"""Budgets besides the floor, as shares of the way from that of the preferred arena to all weights."""

VOCABULARY, HEADS = 8192, 8
LOADS = 7


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, HEADS, -1).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        down: torch.Tensor = self.down(functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def export(width: int, layers: int, tokens: int) -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    model = Decoder(width, layers).eval()
    return torch.export.export(model, (torch.arange(tokens)[None] % VOCABULARY,))


def compile_plainly(exported: torch.export.ExportedProgram, folder: Path) -> tuple[Callable[..., Any], int]:
    """Plain AOTInductor over aligned weights, and the kernels that it generated."""
    from torch._inductor import aot_compile, metrics
    from torch._inductor.package.package import load_package, package_aoti

    metrics.reset()
    files = aot_compile(
        exported.module(check_guards=False),
        *exported.example_inputs,
        options={"aot_inductor.package": True, "aot_inductor.package_constants_in_so": False},
    )
    assert isinstance(files, list)
    package_aoti(str(folder / "plain.pt2"), {"model": files})
    runner = load_package(str(folder / "plain.pt2"))
    bind_aligned(runner, exported)
    return runner, metrics.generated_kernel_count


def bind_aligned(runner: Any, exported: torch.export.ExportedProgram) -> None:
    """Gives a runner new copies of its weights, in memory as torch aligns it."""
    runner.values = {name: value.detach().clone() for name, value in exported.state_dict.items()}
    runner.load_constants(runner.values, check_full_update=True, user_managed=True)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compare(calls: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> tuple[dict[str, float], bool]:
    """The median seconds of each call over interleaved rounds, and whether all return the same bits.

    The order is random, since the call before can change a time by up to one percent, through the caches.
    """
    chance = random.Random(0)
    outputs = [call() for call in calls.values()]
    equal = all(torch.equal(outputs[0], output) for output in outputs[1:])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in chance.sample(list(calls), len(calls)):
            times[name].append(seconds(calls[name]))
    return {name: median(some) for name, some in times.items()}, equal


def measure(width: int, layers: int, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each budget."""
    from torch._inductor import metrics

    exported = export(width, layers, tokens)
    arguments = exported.example_inputs[0]
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = Path(temporary)
        plain, kernels = compile_plainly(exported, folder)
        metrics.reset()
        compiled = penstock.compile(exported, folder / "inductor.penstock", lowering="inductor")
        probed = metrics.generated_kernel_count
        eager = penstock.compile(exported, folder / "eager.penstock")
        for path in folder.glob("*.penstock/weights.safetensors"):
            path.read_bytes()
        loads = []
        for _ in range(LOADS):  # where the weights come to lie counts for as much as what is measured
            bind_aligned(plain, exported)
            with compiled.load("100%") as module:
                calls = {"plain": partial(plain, *arguments), "ours": partial(module, *arguments)}
                loads.append(compare(calls, rounds))
        ratios = [times["ours"] / times["plain"] for times, _ in loads]
        yield {
            "budget": "100%",
            "kernels": [kernels, probed],
            "equal": all(equal for _, equal in loads),
            "plain": median(times["plain"] for times, _ in loads),
            "ratios": ratios,
        }
        # Below the floor of its preferred arena a program streams through another one, which copies.
        preferred = max(p.floor(arena=p.arenas()[0]) for p in (compiled, eager))
        budgets = [preferred + int((compiled.weight_bytes - preferred) * share) for share in SHARES]
        for budget in [max(compiled.floor_bytes, eager.floor_bytes), *budgets]:
            with compiled.load(budget) as module, eager.load(budget) as other:
                calls = {"ours": partial(module, *arguments), "eager": partial(other, *arguments)}
                times, _ = compare(calls, rounds)
                equal = torch.equal(module(*arguments), plain(*arguments))
                misses = module.stats.misses
            with compiled.load(budget, options=LoadOptions(arena="contiguous", poison=True)) as module:
                equal = equal and torch.equal(module(*arguments), plain(*arguments))
            yield {
                "budget": f"{budget / compiled.weight_bytes:.1%}",
                "equal": equal,
                "misses": misses,
            } | times


def measure_compiling(width: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Seconds to compile without and with probes, by the number of layers; caches are not used."""
    from torch._inductor import config

    for layers in (4, 8, 16, 32):
        exported = export(width, layers, tokens)
        with tempfile.TemporaryDirectory() as temporary, config.patch(force_disable_caches=True):
            folder = Path(temporary)
            plain = seconds(partial(compile_plainly, exported, folder))
            ours = seconds(partial(penstock.compile, exported, folder / "c.penstock", lowering="inductor"))
        yield {"layers": layers, "plain": plain, "ours": ours}


def render(rows: list[dict[str, Any]], compiling: list[dict[str, Any]]) -> str:
    full, streamed = rows[0], rows[1:]
    ratios, kernels = full["ratios"], full["kernels"]
    lines = [
        f"Kernels generated: {kernels[1]} with probes, {kernels[0]} without. With everything in memory "
        f"{median(ratios):.3f} times plain AOTInductor ({full['plain'] * 1e3:.1f} ms; from {min(ratios):.3f} "
        f"to {max(ratios):.3f} over {len(ratios)} loads of both). Outputs equal bit for bit, freed bytes "
        f"overwritten: {'yes' if all(r['equal'] for r in rows) else 'NO'}.",
        "",
        "| budget | inductor, ms | eager, ms | over eager | over plain, all in memory |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['budget']} | {r['ours'] * 1e3:.1f} | {r['eager'] * 1e3:.1f} | {r['ours'] / r['eager']:.3f} "
        f"| {r['ours'] / full['plain']:.3f} |"
        for r in streamed
    ]
    if compiling:
        lines += ["", "| layers | plain AOTInductor, s | with probes and packing, s |", "|---|---|---|"]
        lines += [f"| {r['layers']} | {r['plain']:.1f} | {r['ours']:.1f} |" for r in compiling]
    return "\n".join(lines)


def main(
    *,
    width: Annotated[int, typer.Option(min=HEADS, help="Of the decoder.")] = 1024,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1)] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    compiling: Annotated[bool, typer.Option(help="Also time compiling 4 to 32 layers.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the tables into this document.")] = None,
) -> None:
    """Compare the Inductor lowering.

    Example: python -m benchmarks.calls.inductor --json inductor.json --docs docs/lowering.md
    """
    warnings.simplefilter("ignore")
    rows = list(measure(width, layers, tokens, rounds))
    times = list(measure_compiling(128, tokens)) if compiling else []
    facts = describe_machine()
    machine = f"{facts['cpu']}, {facts['cores']} cores"
    text = (
        f"A decoder of {layers} layers, width {width}, float32, {tokens} tokens a call, medians of {rounds} "
        f"interleaved rounds, files in the page cache ({machine}, torch {torch.__version__}).\n\n"
        f"{render(rows, times)}"
    )
    if json_path:
        found = {"machine": facts, "torch": torch.__version__, "rows": rows, "compiling": times}
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
