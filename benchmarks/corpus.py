"""Traces of well-known models, from their configurations alone: what each step reads, and what it costs.

Sizes are those of the published configurations. A step is one matrix product (or convolution) with
its weight; norms and biases are read with the product that follows them. A token's context is
`CONTEXT` long.

`draw_problem` draws programs like these, in other sizes, with a machine and a budget. As a command, this
module plans such problems and compares each plan with its bound.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.table import quantile
from penstock.schedule.facts.hardware import PRESETS, stretched, with_times
from penstock.schedule.facts.model import Hardware, Step, Storage, Trace, Work
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from penstock.schedule.verify.proof import verify_plan

ADAPTED, FULL = 1.04, 2.0
"""The work of a backward as a multiple of the forward's.

Where adapters are trained, each frozen product has one product in the backward, for the gradient of its
input, and the adapters add little: 1.04 was measured on a small decoder. Where everything is trained
there is a second product, for the gradient of the weight.
"""

CONTEXT = 2048
PREFILL = 2048
IMAGE_TOKENS = 4096
TEXT_TOKENS = 512


@dataclass(frozen=True)
class Program:
    """A model in one phase: its storages, their names, and a trace without times."""

    name: str
    storages: tuple[Storage, ...]
    names: tuple[str, ...]
    trace: Trace

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)


@dataclass
class Builder:
    """Collects weights and steps in the order in which they are read."""

    tokens: int
    bits: float = 16
    names: dict[str, int] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    waiting: Work = field(default_factory=Work)

    def weight(self, name: str, elements: int, *, bits: float | None = None) -> int:
        if name not in self.names:
            self.names[name] = len(self.nbytes)
            self.nbytes.append(int(elements * (bits or self.bits) / 8))
        return self.names[name]

    def compute(self, flops: float, nbytes: float) -> None:
        """Work that reads no weight: the next step's lead."""
        self.waiting = Work(self.waiting.flops + int(flops), self.waiting.nbytes + int(nbytes))

    def linear(
        self, name: str, inputs: int, outputs: int, *, tokens: int | None = None, norm: int = 0
    ) -> None:
        """One product of `tokens` rows with a weight, which may have a norm before it."""
        rows = self.tokens if tokens is None else tokens
        reads = [self.weight(f"{name}.weight", inputs * outputs)]
        if norm:
            reads.append(self.weight(f"{name}.norm", norm, bits=16))
        self.step(name, reads, 2 * inputs * outputs * rows, 2 * rows * (inputs + outputs))

    def experts(self, name: str, mixture: tuple[int, int, int, float], inputs: int, outputs: int) -> None:
        """One grouped product over a three-dimensional weight of which each token uses `active` parts."""
        count, active, _, bits = mixture
        weight = self.weight(f"{name}.weight", count * inputs * outputs, bits=bits)
        touched = min(count, active * self.tokens)
        flops = 2 * inputs * outputs * self.tokens * active
        moved = self.nbytes[weight] * touched // count + 2 * self.tokens * active * (inputs + outputs)
        self.append(name, (weight,), Work(flops, moved))

    def embed(self, name: str, vocabulary: int, width: int) -> None:
        weight = self.weight(name, vocabulary * width, bits=16)
        self.append(name, (weight,), Work(0, 4 * self.tokens * width))

    def step(self, name: str, reads: Sequence[int], flops: float, activations: float) -> None:
        moved = sum(self.nbytes[s] for s in reads) + int(activations)
        self.append(name, reads, Work(int(flops), moved))

    def attention(self, heads: int, width: int, *, keys: int, kv_width: int) -> None:
        """Scores and values of `keys` positions, whose cache is read once."""
        self.compute(4 * self.tokens * keys * heads * width, 2 * keys * 2 * kv_width)

    def finish(self, name: str, phase: str) -> Program:
        storages = tuple(Storage(n, "streamable") for n in self.nbytes)
        trace = Trace(phase, 0, "", tuple(self.steps), 0, 0, "modelled", self.waiting)
        return Program(f"{name}, {phase}", storages, tuple(self.names), trace)

    def append(self, name: str, reads: Sequence[int], work: Work) -> None:
        self.steps.append(Step(name, tuple(sorted(reads)), 0, 0, self.waiting, work))
        self.waiting = Work()


@dataclass(frozen=True)
class Decoder:
    """A decoder of language: `experts` is (count, active, width, bits) where its layers are mixtures."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool = False
    experts: tuple[int, int, int, float] | None = None
    matrices: int = 3


DECODERS = {
    "llama-3.1-8b": Decoder(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": Decoder(80, 8192, 28672, 64, 8, 128, 128256),
    "llama-3.1-405b": Decoder(126, 16384, 53248, 128, 8, 128, 128256),
    "qwen3-235b-a22b": Decoder(94, 4096, 0, 64, 4, 128, 151936, experts=(128, 8, 1536, 16)),
    "gpt-oss-120b": Decoder(36, 2880, 0, 64, 8, 64, 201088, experts=(128, 4, 2880, 4.25)),
    "gemma-3-27b": Decoder(62, 5376, 21504, 32, 16, 128, 262208, tied=True),
}


def decoder(name: str, phase: str, *, bits: float = 16) -> Program:
    """A decoder for a token (`decode`), a prompt (`prefill`), or training (`train-lora`, `train-full`)."""
    return decoder_of(DECODERS[name], phase, name=name, bits=bits)


def decoder_of(shape: Decoder, phase: str, *, name: str = "decoder", bits: float = 16) -> Program:
    """A decoder of any shape, in the phases of `decoder`."""
    build = Builder(1 if phase == "decode" else PREFILL, bits)
    build.embed("embed_tokens", shape.vocabulary, shape.width)
    for layer in range(shape.layers):
        _decoder_layer(build, f"layers.{layer}", shape)
    head = "embed_tokens" if shape.tied else "lm_head"
    weight = build.weight(head, shape.vocabulary * shape.width, bits=16)
    rows = 1 if phase == "prefill" else build.tokens
    norm = build.weight("norm", shape.width, bits=16)
    build.step(
        "lm_head", (weight, norm), 2 * shape.vocabulary * shape.width * rows, 2 * shape.vocabulary * rows
    )
    if phase == "train-lora":
        # The gradients of the first adapters need no product with the weights that they stand beside.
        _train(build, ADAPTED, unread=("embed_tokens", *(f"layers.0.{part}" for part in "qkv")))
    if phase == "train-full":
        _train(build, FULL, unread=("embed_tokens",))
    return build.finish(name if bits == 16 else f"{name} {bits:g}-bit", phase)


def _decoder_layer(build: Builder, name: str, shape: Decoder) -> None:
    inner, cache = shape.heads * shape.head, shape.kv_heads * shape.head
    build.linear(f"{name}.q", shape.width, inner, norm=shape.width)
    build.linear(f"{name}.k", shape.width, cache)
    build.linear(f"{name}.v", shape.width, cache)
    build.attention(shape.heads, shape.head, keys=CONTEXT, kv_width=cache)
    build.linear(f"{name}.o", inner, shape.width)
    if shape.experts:
        count, _, width, _ = shape.experts
        build.linear(f"{name}.router", shape.width, count, norm=shape.width)
        build.experts(f"{name}.gate_up", shape.experts, shape.width, 2 * width)
        build.experts(f"{name}.down", shape.experts, width, shape.width)
        return
    build.linear(f"{name}.gate", shape.width, shape.ffn, norm=shape.width)
    build.linear(f"{name}.up", shape.width, shape.ffn)
    build.linear(f"{name}.down", shape.ffn, shape.width)


def _train(build: Builder, times: float, *, unread: Collection[str]) -> None:
    """Add a backward that takes `times` the work of the forward and reads in reverse what it reads.

    It does not read the weights of the steps `unread`, and multiplies with none of them: the gradient of a
    table needs its indices alone, and none is needed of what the model is given.
    """
    for step in reversed(tuple(build.steps)):
        if step.name in unread:
            build.compute(*_multiple(step.read_work, times - 1))
        else:
            build.append(f"{step.name}.backward", step.reads, Work(*_multiple(step.read_work, times)))
        build.compute(*_multiple(step.lead_work, times))  # what came before the step comes behind it


def _multiple(work: Work, times: float) -> tuple[int, int]:
    return int(times * work.flops), int(times * work.nbytes)


def _block(
    build: Builder, name: str, width: int, ffn: int, *, keys: int, cross: int = 0, inner: int = 0
) -> None:
    """A transformer block with biases left out: attention, attention to `cross` positions, two products."""
    inner = inner or width
    for part, positions in (("self", keys), ("cross", cross)):
        if not positions:
            continue
        build.linear(f"{name}.{part}.q", width, inner, norm=width)
        rows = positions if part == "cross" and build.tokens > 1 else build.tokens
        if part == "self" or build.tokens > 1:  # one token finds the keys of the encoder in its cache
            build.linear(f"{name}.{part}.k", width, inner, tokens=rows)
            build.linear(f"{name}.{part}.v", width, inner, tokens=rows)
        build.attention(1, inner, keys=positions, kv_width=inner)
        build.linear(f"{name}.{part}.o", inner, width)
    build.linear(f"{name}.up", width, ffn, norm=width)
    build.linear(f"{name}.down", ffn, width)


def whisper(phase: str) -> Program:
    """Whisper large v3: the encoder and a prompt, or one token of the decoder."""
    build = Builder(1500 if phase == "prefill" else 1)
    if phase == "prefill":
        build.linear("conv1", 3 * 128, 1280)
        build.linear("conv2", 3 * 1280, 1280)
        for layer in range(32):
            _block(build, f"encoder.{layer}", 1280, 5120, keys=1500)
        build.tokens = 224
    build.embed("embed_tokens", 51866, 1280)
    for layer in range(32):
        _block(build, f"decoder.{layer}", 1280, 5120, keys=448, cross=1500)
    build.step("lm_head", (build.weight("embed_tokens", 0),), 2 * 51866 * 1280, 2 * 51866)
    return build.finish("whisper-large-v3", phase)


def t5(phase: str, *, name: str = "t5-3b", layers: int = 24, width: int = 1024, wide: int = 4) -> Program:
    """T5 3B, or one of another size: encoder, decoder and head read the same embedding."""
    build = Builder(512 if phase == "prefill" else 1)
    add_block = partial(_block, build, width=width, ffn=16 * width, keys=512, inner=wide * width)
    if phase == "prefill":
        build.embed("shared", 32128, width)
        for layer in range(layers):
            add_block(f"encoder.{layer}")
    build.embed("shared", 32128, width)
    for layer in range(layers):
        add_block(f"decoder.{layer}", cross=512)
    build.step("lm_head", (build.weight("shared", 0),), 2 * 32128 * width * build.tokens, 2 * 32128)
    return build.finish(name, phase)


def vit(phase: str) -> Program:
    """ViT-H/14: one image, or a step of training all of it (`train-full`) over 32."""
    build = Builder(257 * (32 if phase == "train-full" else 1))
    build.linear("patches", 3 * 14 * 14, 1280)
    for layer in range(32):
        _block(build, f"blocks.{layer}", 1280, 5120, keys=257)
    build.linear("head", 1280, 1000, norm=1280)
    if phase == "train-full":
        _train(build, FULL, unread=("patches",))
    return build.finish("vit-h-14", phase)


def flux(phase: str) -> Program:
    """FLUX.1 dev, one step of denoising at 1024 x 1024: 19 double blocks and 38 single ones."""
    build, width = Builder(IMAGE_TOKENS + TEXT_TOKENS), 3072
    build.linear("x_embedder", 64, width, tokens=IMAGE_TOKENS)
    build.linear("context_embedder", 4096, width, tokens=TEXT_TOKENS)
    for layer in range(19):
        for stream, tokens in (("image", IMAGE_TOKENS), ("text", TEXT_TOKENS)):
            name = f"double.{layer}.{stream}"
            build.linear(f"{name}.modulation", width, 6 * width, tokens=1)
            for part in "qkv":
                build.linear(f"{name}.{part}", width, width, tokens=tokens)
        build.attention(24, 128, keys=build.tokens, kv_width=width)
        for stream, tokens in (("image", IMAGE_TOKENS), ("text", TEXT_TOKENS)):
            name = f"double.{layer}.{stream}"
            build.linear(f"{name}.o", width, width, tokens=tokens)
            build.linear(f"{name}.up", width, 4 * width, tokens=tokens)
            build.linear(f"{name}.down", 4 * width, width, tokens=tokens)
    for layer in range(38):
        name = f"single.{layer}"
        build.linear(f"{name}.modulation", width, 3 * width, tokens=1)
        build.linear(f"{name}.mlp", width, 4 * width)
        for part in "qkv":
            build.linear(f"{name}.{part}", width, width)
        build.attention(24, 128, keys=build.tokens, kv_width=width)
        build.linear(f"{name}.out", 5 * width, width)
    build.linear("proj_out", width, 64, tokens=IMAGE_TOKENS)
    return build.finish("flux.1-dev", phase)


def unet(
    phase: str, *, name: str = "sdxl-unet", width: int = 320, depths: tuple[int, int] = (2, 10)
) -> Program:
    """The U-Net of Stable Diffusion XL, one step of denoising at 1024 x 1024, guided (two samples).

    Others have another `width` of the first level, or `depths` of the other two levels.
    """
    build, (middle, deep) = Builder(0), depths
    w, w2, w4 = width, 2 * width, 4 * width
    down = ((w, w, 128, 0), (w, w2, 64, middle), (w2, w4, 32, deep))
    up = ((w4, w4, 32, deep), (w4, w2, 64, middle), (w2, w, 128, 0))
    _convolve(build, "conv_in", 4, w, 128)
    for level, (inputs, outputs, side, depth) in enumerate(down):
        for number in range(2):
            _residual(build, f"down.{level}.{number}", inputs if number == 0 else outputs, outputs, side)
            _spatial(build, f"down.{level}.{number}", outputs, side, depth)
        if level < 2:
            _convolve(build, f"down.{level}.sample", outputs, outputs, side // 2)
    _residual(build, "middle.0", w4, w4, 32)
    _spatial(build, "middle", w4, 32, deep)
    _residual(build, "middle.1", w4, w4, 32)
    skips = ((w4, w4, w2), (w2, w2, w), (w, w, w))
    for level, (inputs, outputs, side, depth) in enumerate(up):
        for number, skip in enumerate(skips[level]):
            _residual(
                build, f"up.{level}.{number}", (inputs if number == 0 else outputs) + skip, outputs, side
            )
            _spatial(build, f"up.{level}.{number}", outputs, side, depth)
        if level < 2:
            _convolve(build, f"up.{level}.sample", outputs, outputs, side * 2)
    _convolve(build, "conv_out", w, 4, 128)
    return build.finish(name, phase)


def _convolve(build: Builder, name: str, inputs: int, outputs: int, side: int, *, kernel: int = 3) -> None:
    build.tokens = 2 * side * side
    build.linear(name, inputs * kernel * kernel, outputs)


def _residual(build: Builder, name: str, inputs: int, outputs: int, side: int) -> None:
    _convolve(build, f"{name}.conv1", inputs, outputs, side)
    build.linear(f"{name}.time", 1280, outputs, tokens=2)
    _convolve(build, f"{name}.conv2", outputs, outputs, side)
    if inputs != outputs:
        _convolve(build, f"{name}.skip", inputs, outputs, side, kernel=1)


def _spatial(build: Builder, name: str, width: int, side: int, depth: int) -> None:
    if not depth:
        return
    build.tokens = 2 * side * side
    build.linear(f"{name}.proj_in", width, width)
    for layer in range(depth):
        block = f"{name}.blocks.{layer}"
        for part in "qkv":
            build.linear(f"{block}.self.{part}", width, width)
        build.attention(1, width, keys=side * side, kv_width=width)
        build.linear(f"{block}.self.o", width, width)
        build.linear(f"{block}.cross.q", width, width)
        for part in "kv":
            build.linear(f"{block}.cross.{part}", 2048, width, tokens=2 * 77)
        build.attention(1, width, keys=77, kv_width=width)
        build.linear(f"{block}.cross.o", width, width)
        build.linear(f"{block}.up", width, 8 * width)
        build.linear(f"{block}.down", 4 * width, width)
    build.linear(f"{name}.proj_out", width, width)


def list_programs() -> dict[str, Callable[[], Program]]:
    """Every model and phase of the corpus, by name; each is built when it is called."""
    makers: list[tuple[str, str, Callable[[], Program]]] = [
        (name, phase, partial(decoder, name, phase)) for name in DECODERS for phase in ("decode", "prefill")
    ]
    for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"):
        makers.append((f"{name} 4.5-bit", "decode", partial(decoder, name, "decode", bits=4.5)))
    makers.append(("llama-3.1-8b", "train-lora", partial(decoder, "llama-3.1-8b", "train-lora")))
    rows = (
        ("whisper-large-v3", whisper, ("decode", "prefill")),
        ("t5-3b", t5, ("decode", "prefill")),
        ("vit-h-14", vit, ("prefill", "train-full")),
        ("flux.1-dev", flux, ("denoise",)),
        ("sdxl-unet", unet, ("denoise",)),
    )
    makers += [(name, phase, partial(make, phase)) for name, make, phases in rows for phase in phases]
    return {f"{name}, {phase}": make for name, phase, make in makers}


KINDS = ("decoder", "tied", "experts", "train-lora", "train-full", "encoder-decoder", "unet", "linears")
ENDS = (0.0, 0.01, 0.02, 0.05, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
"""Shares near which plans are hardest: they are drawn half of the time, and any other share otherwise."""

Arena = Literal["paged", "contiguous"]


@dataclass(frozen=True)
class Drawn:
    """A problem to plan within `budget` bytes: `share` of the way from its floor to all of its weights."""

    name: str
    problem: Problem
    share: float
    budget: int


def make_problem(program: Program, trace: Trace, hardware: Hardware, kind: Arena, granule: int) -> Problem:
    """The problem of a program in an arena of that kind; `trace` is the program's, with times."""
    arena = packed_arena(program.storages, [trace], kind=kind, granule=granule, alignment=4096)
    return Problem(program.storages, (trace,), arena, hardware=hardware)


def draw_linears(draw: random.Random, name: str, most: int = 14) -> Program:
    """Some products of random sizes of a few granules."""
    build = Builder(draw.choice((1, 64, 512)))
    for layer in range(draw.randint(4, most)):
        inputs, outputs = draw.choice((512, 1024, 1536, 2048, 4096)), draw.choice((1024, 2048, 4096))
        build.linear(f"layers.{layer}", inputs, outputs)
    return build.finish(name, "decode")


def draw_program(draw: random.Random) -> Program:
    """A program of up to 380 storages, of any kind in `KINDS`."""
    kind, phase = draw.choice(KINDS), draw.choice(("decode", "prefill"))
    if kind == "linears":
        return draw_linears(draw, kind, draw.choice((4, 14, 32)))
    if kind == "unet":
        depths = draw.choice(((0, 1), (1, 2), (1, 4)))
        return unet("denoise", name=kind, width=draw.choice((64, 128, 320)), depths=depths)
    if kind == "encoder-decoder":
        layers, width = draw.choice((1, 2, 4, 8)), draw.choice((128, 512, 1024))
        return t5(phase, name=kind, layers=layers, width=width, wide=draw.choice((1, 4)))
    width = draw.choice((256, 512, 1024, 2048, 4096))
    heads = width // 64
    shape = Decoder(
        draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 24)),
        width,
        int(width * draw.choice((2.7, 3.5, 4))),
        heads,
        max(1, heads // draw.choice((1, 4, 8))),
        64,
        draw.choice((1000, 32000, 128256)),
        tied=kind == "tied",
        experts=(draw.choice((8, 16, 64)), draw.choice((1, 2, 4)), width // draw.choice((1, 2)), 16)
        if kind == "experts"
        else None,
    )
    kind, phase = ("decoder", kind) if kind.startswith("train") else (kind, phase)
    return decoder_of(shape, phase, name=kind, bits=draw.choice((16, 16, 8, 4.5)))


def draw_machine(draw: random.Random) -> Hardware:
    """A preset, or a machine of any rates, whose link may be slow to answer and to fill."""
    if draw.random() < 0.6:
        return PRESETS[draw.choice(list(PRESETS))]
    rate = draw.choice((0.3e9, 1e9, 2.2e9, 6e9, 25e9))
    return Hardware(
        "drawn",
        draw.choice((1e11, 1e12, 1e13)),
        draw.choice((2e10, 1e11)),
        rate,
        draw.choice((0, 5_000, 60_000, 400_000)),
        draw.choice((0, int(rate * 1e-4), int(rate * 1e-3))),
    )


def draw_problem(seed: int, arena: Arena | None = None) -> Drawn:
    """A problem, the same for the same seed; its arena is drawn unless one is given."""
    draw = random.Random(seed)
    drawn: Arena = draw.choice(("paged", "contiguous"))
    program, hardware = draw_program(draw), draw_machine(draw)
    trace = with_times(program.trace, hardware)
    if draw.random() < 0.3:
        trace = stretched(trace, trace.compute_ns * draw.choice((0.3, 3, 20)))
    share = draw.choice(ENDS) if draw.random() < 0.5 else draw.random()
    kind = arena or drawn
    sizes = (4096, 65536, 2 << 20) if program.nbytes < 64 << 20 else (65536, 2 << 20)
    granule = 4096 if kind == "contiguous" else draw.choice(sizes)
    problem = make_problem(program, trace, hardware, kind, granule)
    lowest = floor(problem).upper_bytes
    return Drawn(program.name, problem, share, lowest + int((program.nbytes - lowest) * share))


def plan_drawn(seed: int, arena: Arena | None, check: bool) -> dict[str, Any]:
    """The figures of the plan of a drawn problem; `seconds` are the processor's."""
    drawn = draw_problem(seed, arena)
    problem = drawn.problem
    began = time.process_time()
    plan = make_plan(problem, drawn.budget)
    seconds = time.process_time() - began
    if check:
        verify_plan(problem.storages, problem.traces, plan)
    return {
        "seed": seed,
        "name": drawn.name,
        "hardware": problem.hardware.name,
        "arena": problem.arena.kind,
        "share": round(drawn.share, 4),
        "storages": len(problem.storages),
        "steps": len(problem.traces[0].steps),
        "weight_bytes": sum(storage.nbytes for storage in problem.storages),
        "granule": problem.arena.granule,
        "budget": drawn.budget,
        "predicted_ns": plan.predicted_ns,
        "lower_bound_ns": plan.lower_bound_ns,
        "ratio": plan.ratio,
        "seconds": round(seconds, 3),
    }


def main(
    *,
    count: Annotated[int, typer.Option("--random", min=1, help="How many problems to draw.")] = 100,
    seed: Annotated[int, typer.Option(help="The seed of the first; each next one has the next seed.")] = 0,
    arena: Annotated[Arena | None, typer.Option(help="All problems in this arena; else it is drawn.")] = None,
    check: Annotated[bool, typer.Option(help="Verify every plan, which takes longer.")] = False,
    json_path: Annotated[Path, typer.Option("--json", help="Write a line of JSON for each problem here.")],
    against: Annotated[Path | None, typer.Option(help="Lines of other code: compare the same seeds.")] = None,
) -> None:
    """Plan random problems, and compare each plan with its bound.

    Example:

      python -m benchmarks.corpus --random 400 --seed 1000 --json after.jsonl --against before.jsonl
    """
    rows = []
    with json_path.open("w", encoding="utf-8") as lines:
        for number in range(count):
            row = plan_drawn(seed + number, arena, check)
            rows.append(row)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(f"\r{number + 1} of {count} problems", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(
        "| arena | problems | median | 90 % | 95 % | worst | seconds, median |\n|---|---|---|---|---|---|---|"
    )
    for name in sorted({row["arena"] for row in rows}):
        planned = [row for row in rows if row["arena"] == name and row["ratio"] is not None]
        ratios, seconds = [row["ratio"] for row in planned], [row["seconds"] for row in planned]
        figures = " | ".join(f"{quantile(ratios, percent):.4f}" for percent in (50, 90, 95, 100))
        print(f"| {name} | {len(planned)} | {figures} | {quantile(seconds, 50):.2f} |")
    if against:
        print("\n".join(_changes(map(json.loads, against.read_text(encoding="utf-8").splitlines()), rows)))


def _changes(before: Iterable[dict[str, Any]], after: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Predicted and planning time over those of other code, for the seeds that both planned."""
    others = {(row["seed"], row["arena"]): row for row in before}
    pairs = [(row, others[key]) for row in after if (key := (row["seed"], row["arena"])) in others]
    times = sorted((row["predicted_ns"] / other["predicted_ns"], row["seed"]) for row, other in pairs)
    longer = [row["seconds"] / max(1e-3, other["seconds"]) for row, other in pairs]
    faster, slower = sum(ns < 0.99 for ns, _ in times), sum(ns > 1.01 for ns, _ in times)
    yield f"{len(pairs)} problems: {faster} plans are faster by 1 %, {slower} slower."
    yield f"Seconds to plan, times those before: {quantile(longer, 50):.2f} in the median."
    yield from (f"- seed {seed}: {ns:.4f} times the period before" for ns, seed in (*times[:5], *times[-5:]))


if __name__ == "__main__":
    typer.run(main)
