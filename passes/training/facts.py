"""What joins the forward of a training program to its backward, as facts that are stored beside both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT
from penstock.schedule.payload.text import decode, encode, parse

FORWARD, BACKWARD = "forward", "backward"
"""The names of the methods of a step; further backwards are `backward_1`, `backward_2`, and so on."""

EVALUATE: Final = "evaluate"
PREDICT: Final = "predict"
"""The names of the forward by itself, as it was exported and in eval mode where that is another program."""

TRAINABLE = "trainable"
"""The keyword argument by which the forward takes the parameters that are trained."""


@dataclass(frozen=True)
class Backward:
    """A backward of a training program: it takes the gradients of one set of results.

    `method` is its name. It takes a list of what was kept (`kept[k]` is the number of a leaf of the forward,
    or -1 - n for value n of those that the forward returned behind its results) and a list of the gradients
    of the results `tangents`. It returns the gradients of the leaves `gradients` of the forward.
    """

    __pydantic_config__: ClassVar = STRICT
    method: str
    kept: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class Training:
    """How values go between the methods of a training program.

    The leaves of the forward are those of the program, and behind them `parameters`, by FQN. The forward
    returns the program's results, and a list of values to keep. There is one of `backwards` for each set of
    results that gradients may come from. `results` are the names of the results, which are empty for
    constants. Those in `left_out` depend on what is trained, and no backward has gradients from them.
    `in_eval` is the method that computes what the model computes in eval mode, empty if there is none; if it
    is `evaluate`, the modes do not differ. `sha256` is that of the file with the values of the parameters,
    empty if there is none.
    """

    __pydantic_config__: ClassVar = STRICT
    parameters: tuple[str, ...]
    backwards: tuple[Backward, ...]
    results: tuple[str, ...]
    left_out: tuple[int, ...] = ()
    in_eval: Literal["", "evaluate", "predict"] = ""
    sha256: str = ""

    @property
    def kept(self) -> tuple[int, ...]:
        """All that a backward may take of what was kept, each once."""
        return tuple(dict.fromkeys(one for backward in self.backwards for one in backward.kept))

    @property
    def tangents(self) -> tuple[int, ...]:
        """The results that some backward takes gradients of."""
        return tuple(sorted({result for backward in self.backwards for result in backward.tangents}))

    @property
    def sets(self) -> str:
        """The sets of results that gradients may come from, in words."""
        named = (" and ".join(self.results[k] for k in one.tangents) for one in self.backwards)
        return ", or ".join(named)

    def check(self, methods: Mapping[str, int]) -> None:
        """Raises PayloadError where these are not the facts of methods with so many leaves each."""
        needed = {FORWARD, *(one.method for one in self.backwards), *filter(None, [self.in_eval])}
        missing = sorted(needed - methods.keys())
        if missing or not self.backwards:
            lacks = [*missing, BACKWARD][0]
            raise PayloadError(f"training.json does not fit the program, which lacks {lacks}: compile again")
        leaves, values = methods[FORWARD], len([one for one in self.kept if one < 0])
        fits = len(self.parameters) <= leaves
        fits &= all(0 <= result < len(self.results) for result in (*self.tangents, *self.left_out))
        for one in self.backwards:
            fits &= all(-values <= leaf < leaves for leaf in one.kept)
            fits &= all(0 <= leaf < leaves for leaf in one.gradients)
            fits &= len(one.kept) + len(one.tangents) == methods[one.method]
        if not fits:
            raise PayloadError(
                f"training.json does not fit the program, whose methods take {dict(methods)} inputs: "
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
