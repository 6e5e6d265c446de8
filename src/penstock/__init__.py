"""Runs exported PyTorch programs that are bigger than the memory they run in.

Everything public is here. A name is imported when it is first used, so that `import penstock`
is quick and does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if not sys.platform.startswith("linux") or sys.version_info < (3, 11):
    raise ImportError(
        f"penstock runs on Linux with Python 3.11 or later, and this is {sys.platform} with Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}: use it in a container or a virtual machine of Linux"
    )

from penstock._logging import set_up
from penstock._version import __version__

if TYPE_CHECKING:
    from penstock.models.packed_gguf import unpack_gguf
    from penstock.passes.annotate import annotate
    from penstock.passes.building.deferred import deferred_init
    from penstock.passes.building.fake_export import fake_export
    from penstock.passes.pipeline import Pipeline, declare
    from penstock.passes.probes import insert_probes, streaming
    from penstock.runtime.artifact import compile
    from penstock.runtime.checkpoint.binding import bind
    from penstock.runtime.dynamo.backend import offload
    from penstock.runtime.options import LoadOptions
    from penstock.runtime.program import open
    from penstock.runtime.training.artifact import compile_training
    from penstock.schedule.facts.errors import (
        BudgetError,
        MissingExtraError,
        PassError,
        PayloadError,
        PenstockError,
        PlanError,
        SourceError,
        StreamError,
    )
    from penstock.schedule.payload.codec import Payload

__all__ = [
    "BudgetError",
    "LoadOptions",
    "MissingExtraError",
    "PassError",
    "Payload",
    "PayloadError",
    "PenstockError",
    "Pipeline",
    "PlanError",
    "SourceError",
    "StreamError",
    "__version__",
    "annotate",
    "bind",
    "compile",
    "compile_training",
    "declare",
    "deferred_init",
    "fake_export",
    "insert_probes",
    "offload",
    "open",
    "streaming",
    "unpack_gguf",
]

_HOMES = {
    "LoadOptions": "penstock.runtime.options",
    "Payload": "penstock.schedule.payload.codec",
    "Pipeline": "penstock.passes.pipeline",
    "annotate": "penstock.passes.annotate",
    "bind": "penstock.runtime.checkpoint.binding",
    "compile": "penstock.runtime.artifact",
    "compile_training": "penstock.runtime.training.artifact",
    "declare": "penstock.passes.pipeline",
    "deferred_init": "penstock.passes.building.deferred",
    "fake_export": "penstock.passes.building.fake_export",
    "insert_probes": "penstock.passes.probes",
    "offload": "penstock.runtime.dynamo.backend",
    "open": "penstock.runtime.program",
    "streaming": "penstock.passes.probes",
    "unpack_gguf": "penstock.models.packed_gguf",
}

_PACKAGES = ("backends", "integrations")
"""Packages whose names are public, and which are imported when one of them is asked for."""


set_up()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "penstock.schedule.facts.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
