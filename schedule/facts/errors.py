"""Every error that penstock raises on purpose.

    PenstockError
      +-- BudgetError         the byte budget cannot run this program
      +-- PayloadError        payload.json is not what docs/payload.md specifies
      +-- PlanError           a plan is not safe, or does not belong to this program
      +-- PassError           an exported program that a pass cannot take
      +-- SourceError         weight files: missing, changed, truncated, unreadable
      +-- StreamError         a streamed module used in a way that cannot be right
      +-- MissingExtraError   a library that is not installed; an ImportError as well

A message says what, which, expected and got, and what to do, in one sentence.
"""

from __future__ import annotations

TRUST = "open it with trust=True (--trust) if you trust whoever made it"
"""What to do about a file that would run code."""


class PenstockError(Exception):
    """The root of the tree; catch it to catch everything that penstock raises on purpose."""


class BudgetError(PenstockError):
    """The budget is below the floor, or not a budget at all.

    Attributes:
        floor_bytes: The smallest budget that can run; None if the budget was refused before that was known.
        step: The name of the step that sets it, or None.
        weights: The FQNs of the weights that this step reads; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        floor_bytes: int | None = None,
        step: str | None = None,
        weights: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.step = step
        self.weights = weights


class PayloadError(PenstockError):
    """A payload that is truncated, of an unknown version, or holds what its format forbids."""


class PlanError(PenstockError):
    """A plan that the verifier refuses, or that was made for another program."""


class PassError(PenstockError):
    """An exported program that a pass cannot take."""


class SourceError(PenstockError):
    """A weight file that is missing, unreadable, truncated, malformed or not the one compiled."""


class StreamError(PenstockError):
    """A call on a streamed module that cannot be right, or that failed on the way."""


class MissingExtraError(PenstockError, ImportError):
    """A library is not installed; the message names the extra of penstock that installs it."""
