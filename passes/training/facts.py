"""What joins the forward of a training program to its backward, as facts that are stored beside both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT
from penstock.schedule.payload.text import decode, encode, parse

FORWARD, BACKWARD = "forward", "backward"
"""The names of the two methods of a step."""

EVALUATE: Final = "evaluate"
PREDICT: Final = "predict"
"""The names of the forward by itself, as it was exported and in eval mode where that is another program."""

TRAINABLE = "trainable"
"""The keyword argument by which the forward takes the parameters that are trained."""


@dataclass(frozen=True)
class Training:
    """How values go between the two methods of a training program.

    The leaves of the forward are those of the program, and behind them `parameters`, by FQN. The forward
    returns the program's results, and a list of values to keep. The backward takes a list of what was kept
    (`kept[k]` is the number of a leaf of the forward, or None for the next value that the forward returned)
    and a list of the gradients of the results `tangents`. It returns the gradients of the leaves `gradients`
    of the forward. `results` are the names of the results, which are empty for constants. Those in `left_out`
    depend on what is trained, and the backward has no gradients from them. `in_eval` is the method that
    computes what the model computes in eval mode, empty if there is none; if it is `evaluate`, the modes do
    not differ. `sha256` is that of the file with the values of the parameters, empty if there is none.
    """

    __pydantic_config__: ClassVar = STRICT
    parameters: tuple[str, ...]
    kept: tuple[int | None, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]
    results: tuple[str, ...]
    left_out: tuple[int, ...] = ()
    in_eval: Literal["", "evaluate", "predict"] = ""
    sha256: str = ""

    def check(self, methods: Mapping[str, int]) -> None:
        """Raises PayloadError where these are not the facts of methods with so many leaves each."""
        needed = {FORWARD, BACKWARD, *filter(None, [self.in_eval])}
        missing = sorted(needed - methods.keys())
        if missing:
            raise PayloadError(
                f"training.json does not fit the program, which lacks {missing[0]}: compile again"
            )
        forward, backward = methods[FORWARD], methods[BACKWARD]
        leaves = [leaf for leaf in (*self.kept, *self.gradients) if leaf is not None]
        fits = all(0 <= leaf < forward for leaf in leaves)
        fits &= all(0 <= result < len(self.results) for result in (*self.tangents, *self.left_out))
        fits &= len(self.parameters) <= forward and len(self.kept) + len(self.tangents) == backward
        if not fits:
            raise PayloadError(
                f"training.json does not fit the program, which takes {forward} and {backward} inputs: "
                "compile again"
            )

    def to_bytes(self) -> bytes:
        """The facts as JSON."""
        return encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Training:
        """Reads what `to_bytes` wrote; raises PayloadError for anything else."""
        text, tree = parse(data, "training.json")
        return decode(Training, text, tree, "training.json")
