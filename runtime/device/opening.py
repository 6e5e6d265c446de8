"""Devices by the names that users give them: `cpu`, `cuda`, `cuda:1`, `sim`, `sim:h200`."""

from __future__ import annotations

from penstock.runtime.device.cuda import CudaDevice
from penstock.runtime.device.protocol import Device
from penstock.runtime.sim.device import SimDevice
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Hardware
from penstock.schedule.plan import Plan


def device_kind(name: str) -> str:
    """Returns `cpu`, `sim` or `cuda` for a device's name. Raises StreamError for any other name."""
    kind, _, detail = name.partition(":")
    if kind in ("cpu", "sim", "cuda") and not (kind == "cpu" and detail):
        if kind == "cuda" and detail and not detail.isdecimal():
            raise StreamError(f"expected a number behind 'cuda:', got {name!r}")
        return kind
    raise StreamError(
        f"there is no device {name!r}: choose 'cpu', 'cuda', 'cuda:1', 'sim', or 'sim:h200' (any preset)"
    )


def hardware_of(name: str) -> Hardware | None:
    """Returns the preset in a simulated device's name. Raises PlanError, with the nearest, for no preset."""
    kind, _, detail = name.partition(":")
    return find_hardware(detail) if kind == "sim" and detail else None


def open_device(name: str, plan: Plan, *, page_lock: bool = True) -> Device:
    """Opens the device of that name. A simulated one without a preset runs on the hardware of the plan."""
    if device_kind(name) == "cuda":
        return CudaDevice.of(name, page_lock=page_lock)
    return SimDevice(hardware_of(name) or plan.hardware, name=name)
