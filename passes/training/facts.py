"""What joins the forward of a training program to its backward, as facts that are stored beside both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT
from penstock.schedule.payload.text import decode, encode, parse

FORWARD, BACKWARD = "forward", "backward"
"""The names of the methods of the first rung; those of others, such as `forward_layers`, begin with them."""

EVALUATE: Final = "evaluate"
PREDICT: Final = "predict"
"""The names of the forward by itself, as it was exported and in eval mode where that is another program."""

TRAINABLE = "trainable"
"""The keyword argument by which the forward takes the parameters that are trained."""

COPIES = 4
"""What is counted for each trained parameter: itself, its gradient, and the two moments of AdamW."""

Keeping = Literal["keep", "layers", "segments"]
"""What becomes of values that the backward needs: kept, kept between layers only.

The last one is the only rung of a program whose backward runs autograd on one segment after another.
"""

SEGMENTS: Final = "segments"

RUNGS: tuple[Keeping, ...] = ("keep", "layers")
"""The rungs of a ladder: each keeps fewer bytes than the one before, and computes more."""


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
class Rung:
    """A forward and its backwards, between which a part of the values is kept: `name` says which.

    The method `forward` returns the program's results, and a list of values to keep.
    """

    __pydantic_config__: ClassVar = STRICT
    name: Keeping
    forward: str
    backwards: tuple[Backward, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods."""
        return (self.forward, *(backward.method for backward in self.backwards))

    def made(self, method: str) -> tuple[int, ...]:
        """The leaves of a method that the forward made for it."""
        backwards = (backward for backward in self.backwards if backward.method == method)
        return tuple(k for backward in backwards for k, leaf in enumerate(backward.kept) if leaf < 0)

    @property
    def kept(self) -> tuple[int, ...]:
        """All that a backward may take of what was kept, each once."""
        return tuple(dict.fromkeys(leaf for backward in self.backwards for leaf in backward.kept))

    @property
    def tangents(self) -> tuple[int, ...]:
        """The results that some backward takes gradients of."""
        return tuple(sorted({result for backward in self.backwards for result in backward.tangents}))


@dataclass(frozen=True)
class Layout:
    """How an input lay in memory when the program was exported: its dimensions, the outermost first.

    One that is `whole` numbers, which no layout rounds differently, may be copied so that it lies like that.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    order: tuple[int, ...]
    whole: bool = False


@dataclass(frozen=True)
class Training:
    """How values go between the methods of a training program.

    The leaves of a forward are those of the program, and behind them `parameters`, by FQN. Each of `rungs`
    has a forward, and a backward for each set of results that gradients may come from. `results` are the
    names of the results, which are empty for constants. Those in `left_out` depend on what is trained, and no
    backward has gradients from them. `in_eval` is the method that computes what the model computes in eval
    mode, empty if there is none; if it is `evaluate`, the modes do not differ. `sha256` is that of the file
    with the values of the parameters, empty if there is none. `layouts` are those of the first leaves, None
    where any will do.
    """

    __pydantic_config__: ClassVar = STRICT
    parameters: tuple[str, ...]
    rungs: tuple[Rung, ...]
    results: tuple[str, ...]
    left_out: tuple[int, ...] = ()
    in_eval: Literal["", "evaluate", "predict"] = ""
    sha256: str = ""
    layouts: tuple[Layout | None, ...] = ()

    def rung(self, name: str) -> Rung | None:
        """The rung of a name; None if there is none."""
        return next((rung for rung in self.rungs if rung.name == name), None)

    def made(self, method: str) -> tuple[int, ...]:
        """The leaves of a method that another one made for it: what a backward takes of what was kept."""
        return tuple(leaf for rung in self.rungs for leaf in rung.made(method))

    @property
    def sets(self) -> str:
        """The sets of results that gradients may come from, in words."""
        backwards = self.rungs[0].backwards
        return ", or ".join(
            " and ".join(self.results[k] for k in backward.tangents) for backward in backwards
        )

    def check(self, rung: Rung, methods: Mapping[str, int]) -> None:
        """Raises PayloadError where these are not the facts of methods with so many leaves each."""
        missing = sorted({*rung.methods, *filter(None, [self.in_eval])} - methods.keys())
        if missing or not rung.backwards:
            lacks = [*missing, BACKWARD][0]
            raise PayloadError(f"training.json does not fit the program, which lacks {lacks}: compile again")
        leaves, values = methods[rung.forward], len([leaf for leaf in rung.kept if leaf < 0])
        fits = len(self.parameters) <= leaves
        fits &= all(0 <= result < len(self.results) for result in (*rung.tangents, *self.left_out))
        for backward in rung.backwards:
            fits &= all(-values <= leaf < leaves for leaf in backward.kept)
            fits &= all(0 <= leaf < leaves for leaf in backward.gradients)
            fits &= len(backward.kept) + len(backward.tangents) == methods[backward.method]
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
        facts = decode(Training, text, tree, "training.json")
        if not facts.rungs:
            raise PayloadError("training.json has no rungs: compile again")
        return facts
