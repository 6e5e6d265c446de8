"""What joins the forward of a training program to its backward, as facts that are stored beside both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.schedule.facts.model import STRICT
from penstock.schedule.payload.text import decode, encode, parse

FORWARD, BACKWARD = "forward", "backward"
"""The names of the two methods."""

TRAINABLE = "trainable"
"""The keyword argument by which the forward takes the parameters that are trained."""


@dataclass(frozen=True)
class Training:
    """How values go between the two methods of a training program.

    The leaves of the forward are those of the program, and behind them `parameters`, by FQN. The forward
    returns the program's results, and a list of values to keep. The backward takes a list of what was kept
    (`kept[k]` is the number of a leaf of the forward, or None for the next value that the forward returned)
    and a list of the gradients of results: result k of those that are no constants, for each k in `tangents`.
    It returns the gradients of the leaves `gradients` of the forward. `results` are the names of the results.
    """

    __pydantic_config__: ClassVar = STRICT
    parameters: tuple[str, ...]
    kept: tuple[int | None, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    results: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """The facts as JSON."""
        return encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Training:
        """Reads what `to_bytes` wrote; raises PayloadError for anything else."""
        text, tree = parse(data, "training.json")
        return decode(Training, text, tree, "training.json")
