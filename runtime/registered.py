"""The capabilities that there are. No other module of the core imports a room of one."""

from __future__ import annotations

from penstock.runtime.capabilities import Way
from penstock.runtime.sparse.units import ByUnits
from penstock.schedule.sparse.routes import Routes

__all__ = ["WAYS", "Routes"]

WAYS: tuple[Way, ...] = (Way("whole"), ByUnits("units"), ByUnits("tiles", in_python=True))
"""The ways to read weights."""
