"""What to try where torch.export refuses a model."""

from __future__ import annotations

from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_BRANCH = "values decide which way it goes: torch.where or torch.cond make both ways part of the program"
_OPERATOR = "the operator does not say what it returns: register a fake of it, or do without"
_PLAIN = "call the model in memory like this: if it runs there, write this line with torch's operators alone"

_BY_TYPE: tuple[tuple[type[BaseException], str], ...] = (
    (GuardOnDataDependentSymNode, _BRANCH),
    (DataDependentOutputException, _BRANCH),
    (DynamicOutputShapeException, "values decide about sizes: give the result a size that its inputs decide"),
    (UnsupportedOperatorException, _OPERATOR),
    (UnsupportedFakeTensorException, _OPERATOR),
    (UserError, "export it for fewer dynamic sizes, or with what it asks for"),
)


def remedy(error: BaseException) -> str:
    """A sentence for an error of an export, by its class or that of what caused it."""
    if "fake impl" in str(error):
        return _OPERATOR
    causes = [error, error.__cause__, error.__context__]
    found = [text for cause in causes for kind, text in _BY_TYPE if isinstance(cause, kind)]
    return next(iter(found), _PLAIN)
