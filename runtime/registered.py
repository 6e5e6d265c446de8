"""The capabilities that there are. No other module of the core imports a room of one."""

from __future__ import annotations

from pathlib import Path

from penstock.runtime.capabilities import Kind, Way
from penstock.runtime.sparse.trust import reads_units_only
from penstock.runtime.sparse.units import ByUnits, read_routes
from penstock.runtime.training.module import Trained, write_parameters
from penstock.schedule.payload.codec import Payload
from penstock.schedule.sparse.routes import Routes

__all__ = ["WAYS", "Routes", "kind_of", "read_routes", "reads_units_only", "write_parameters"]

WAYS: tuple[Way, ...] = (Way("whole"), ByUnits("units"), ByUnits("tiles", in_python=True))
"""The ways to read weights."""


def kind_of(folder: Path, payload: Payload, variant: str | None) -> Kind:
    """Return the kind of the program in an artifact: the variant of that name, by default the first."""
    return Trained.find(folder, payload, variant) or Kind()
