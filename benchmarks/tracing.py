"""Builds traces without times: weights in the order in which they are read, and the work of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.schedule.facts.model import Step, Storage, Trace, Work


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
