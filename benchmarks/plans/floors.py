"""The least memory for weights: penstock's floor, and that of designs which prefetch a number of steps.

    python -m benchmarks.plans.floors

A design with prefetch of depth d holds the weights of d + 1 steps in a row at once, and none of them leaves
before its step ends. One that keeps the model in memory, and copies what a step reads, needs all weights and
the largest. penstock's floor is the least budget with which it runs at all, in an arena of one buffer; what a
budget above it buys is prefetch, as deep as it fits, step by step. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.corpus import Program, list_programs
from benchmarks.table import write_between
from penstock.schedule.facts.problem import Demand
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.planner import floor
from penstock.schedule.space.layout import packed_arena

PAGE = Path(__file__).resolve().parents[2] / "docs" / "backends.md"
BEGIN = "<!-- benchmarks.plans.floors writes from here -->"
DEPTHS = (0, 1, 2, 4)
PROGRAMS = (
    "llama-3.1-8b, decode",
    "llama-3.1-70b, decode",
    "gemma-3-27b, decode",
    "whisper-large-v3, decode",
    "vit-h-14, prefill",
    "flux.1-dev, denoise",
    "sdxl-unet, denoise",
)


def held_bytes(program: Program, depth: int) -> int:
    """The most bytes that `depth + 1` steps in a row read; behind the last step comes the first."""
    reads, sizes = [step.reads for step in program.trace.steps], [one.nbytes for one in program.storages]
    cycle = [*reads, *reads]
    windows = ({s for one in cycle[k : k + depth + 1] for s in one} for k in range(len(reads)))
    return max(sum(sizes[s] for s in window) for window in windows)


def floor_bytes(program: Program) -> int:
    """The least budget for which addresses in one buffer exist."""
    arena = packed_arena(program.storages, [program.trace], kind="contiguous", granule=4096, alignment=4096)
    return floor(Demand(program.storages, (program.trace,), arena)).upper_bytes


def render() -> Iterator[str]:
    """The lines of the table, as Markdown."""
    depths = " | ".join(f"depth {depth}" for depth in DEPTHS)
    yield f"| model | all weights | all and the largest | {depths} | penstock's floor |"
    yield "|---" * (len(DEPTHS) + 4) + "|"
    for name in PROGRAMS:
        program = list_programs()[name]()
        largest = max(storage.nbytes for storage in program.storages)
        held = [held_bytes(program, depth) for depth in DEPTHS]
        figures = [program.nbytes, program.nbytes + largest, *held, floor_bytes(program)]
        yield f"| {name} | {' | '.join(map(format_size, figures))} |"


if __name__ == "__main__":
    write_between(PAGE, "\n".join(render()), BEGIN)
    print("\n".join(render()))
