"""The time and memory of a pipeline's images within each cap, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

WHOLE = "whole components"
REST = "rest on the host"
BEST = "the best of these for each component"
WAYS = {
    WHOLE: "whole components, moved one at a time (diffusers' model offloading)",
    "on demand": "on demand (accelerate's hooks, diffusers' sequential offloading)",
    "one block ahead": "one block ahead (diffusers' group offloading)",
    "some of every group": "some of every group (vLLM's offloader)",
    "least recently used": "least recently used",
    REST: "rest computed on the host, a server of 64 cores (llama.cpp's layers)",
    BEST: BEST,
}


@dataclass(frozen=True)
class Turn:
    """One component's part of an image: bytes, and seconds of its plan, its bound and the baselines.

    `steady_seconds` is one more call, after many.
    """

    component: str
    calls: int
    weight_bytes: int
    beside_bytes: int
    held_bytes: int
    copied_bytes: int
    seconds: float
    bound_seconds: float
    compute_seconds: float
    steady_seconds: float
    baselines: dict[str, float]


@dataclass(frozen=True)
class Image:
    """What one image takes within a cap; `failure` says why it cannot be made, where it cannot."""

    cap: int
    turns: tuple[Turn, ...] = ()
    failure: str = ""

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def bound_seconds(self) -> float:
        return sum(turn.bound_seconds for turn in self.turns)

    @property
    def peak_bytes(self) -> int:
        """The most that one component holds, weights and what is beside them."""
        return max(turn.held_bytes + turn.beside_bytes for turn in self.turns)

    @property
    def copied_bytes(self) -> int:
        return sum(turn.copied_bytes for turn in self.turns)

    @property
    def baselines(self) -> dict[str, float | None]:
        """Seconds of every policy for all components; None where one of them does not fit."""
        found: dict[str, float | None] = {}
        for name in WAYS:
            seconds = [turn.baselines.get(name) for turn in self.turns]
            fits = [one for one in seconds if one is not None]
            found[name] = sum(fits) if len(fits) == len(seconds) else None
        return found

    def facts(self) -> dict[str, object]:
        """The image's figures as JSON."""
        if self.failure:
            return {"cap_bytes": self.cap, "failure": self.failure}
        return {
            "cap_bytes": self.cap,
            "peak_bytes": self.peak_bytes,
            "copied_bytes_per_image": self.copied_bytes,
            "seconds_per_image": self.seconds,
            "bound_seconds": self.bound_seconds,
            "baselines": {
                name: {"seconds": seconds, "ratio": seconds and seconds / self.seconds}
                for name, seconds in self.baselines.items()
            },
            "components": [asdict(turn) for turn in self.turns],
        }


def render(images: Sequence[Image]) -> str:
    """The tables of all caps, as Markdown."""
    return "\n\n".join("\n".join(make(images)) for make in (_images, _ways, _turns))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f}"


def _images(images: Sequence[Image]) -> Iterator[str]:
    yield "| cap, GB | held at most, GB | copied per image, GB | **s per image** | bound, s | over bound |"
    yield "|---|---|---|---|---|---|"
    for image in images:
        if image.failure:
            yield f"| {_gb(image.cap)} | does not run: {image.failure} | | | | |"
            continue
        yield (
            f"| {_gb(image.cap)} | {_gb(image.peak_bytes)} | {_gb(image.copied_bytes)} "
            f"| **{image.seconds:.2f}** | {image.bound_seconds:.2f} "
            f"| {image.seconds / image.bound_seconds:.3f} |"
        )


def _ways(images: Sequence[Image]) -> Iterator[str]:
    """Every way in a row, and every cap in a column: seconds, and times those of the plan."""
    shown = [image for image in images if not image.failure]
    yield f"| s per image (times penstock's) | {' | '.join(_gb(image.cap) + ' GB' for image in shown)} |"
    yield "|---" * (1 + len(shown)) + "|"
    yield f"| penstock | {' | '.join(f'{image.seconds:.2f}' for image in shown)} |"
    for name, title in WAYS.items():
        cells = []
        for image in shown:
            seconds = image.baselines[name]
            if seconds is None:
                cells.append("does not fit")
            else:
                cells.append(f"{seconds:.2f} ({seconds / image.seconds:.2f})")
        yield f"| {title} | {' | '.join(cells)} |"


def _turns(images: Sequence[Image]) -> Iterator[str]:
    yield (
        "| cap, GB | component | calls | weights, GB | beside, GB | held, GB | copied, GB | s | bound, s "
        "| compute, s | a call, s |"
    )
    yield "|---" * 11 + "|"
    for image in images:
        for turn in image.turns:
            sizes = (turn.weight_bytes, turn.beside_bytes, turn.held_bytes, turn.copied_bytes)
            times = (turn.seconds, turn.bound_seconds, turn.compute_seconds, turn.steady_seconds)
            cells = [_gb(image.cap), turn.component, str(turn.calls), *map(_gb, sizes)]
            yield f"| {' | '.join([*cells, *(f'{seconds:.3f}' for seconds in times)])} |"
