"""Runs a tuple of passes over one value.

A pass is a function: program in, program out, nothing changed in place. A pipeline is a literal
tuple of them, and is itself a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import fx

from penstock.schedule.facts.errors import PassError, PenstockError

Program = TypeVar("Program")


@dataclass(frozen=True)
class Pipeline(Generic[Program]):
    """Applies `passes` from left to right, to a value of any type.

    Every pass returns a value of the type it was given. An error of the tree keeps its class, and
    every error says which pass it came from and its position, counted from 1.
    """

    passes: tuple[Callable[[Program], Program], ...]

    def __call__(self, program: Program) -> Program:
        for position, run in enumerate(self.passes, start=1):
            program = self._apply(run, program, position)
        return program

    def _apply(self, run: Callable[[Program], Program], program: Program, position: int) -> Program:
        name = getattr(run, "__qualname__", None) or type(run).__name__
        where = f"pass {position} of {len(self.passes)} ({name})"
        try:
            result = run(program)
        except PenstockError as error:
            error.add_note(f"in {where}")
            raise
        except Exception as error:
            raise PassError(f"{where} failed: {type(error).__name__}: {error}") from error
        # Every graph module is of a class of its own.
        expected = fx.GraphModule if isinstance(program, fx.GraphModule) else type(program)
        if not isinstance(result, expected):
            got = "None" if result is None else type(result).__name__
            raise PassError(
                f"{where} returned {got} instead of {expected.__name__}: "
                "let it return the program it was given, changed or not"
            )
        return result
