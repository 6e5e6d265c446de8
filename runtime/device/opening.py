"""Devices by the names that users give them: `cpu`, `sim`, `sim:h200`, and accelerators such as `cuda:1`."""

from __future__ import annotations

import torch

from penstock.runtime.device.accelerator import AcceleratorDevice, find_accelerator
from penstock.runtime.device.cuda import CudaDevice
from penstock.runtime.device.protocol import Device
from penstock.runtime.device.simulated import SimDevice
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Hardware
from penstock.schedule.plan import Plan

ACCELERATOR = "accelerator"

_SPECIAL: dict[str, type[AcceleratorDevice]] = {"cuda": CudaDevice}
"""Accelerators for which torch's common interface is not enough."""


_LAST = 127
"""The largest index of a device: torch takes an index modulo 256, so that 256 would be the first device."""


def device_kind(name: str) -> str:
    """Returns `cpu`, `sim` or `accelerator` for a device's name. Raises StreamError for any other name.

    An accelerator is what torch calls a device, whether there is one here or not.
    """
    kind, _, detail = name.partition(":")
    if kind == "sim" or name == "cpu":
        return kind
    try:
        if torch.device(kind).type not in ("cpu", "meta"):
            if ":" in name and not (detail.isascii() and detail.isdecimal() and int(detail) <= _LAST):
                raise StreamError(f"expected a number of at most {_LAST} behind '{kind}:', got {name!r}")
            return ACCELERATOR
    except RuntimeError:
        pass
    raise StreamError(
        f"there is no device {name!r}: choose 'cpu', 'cuda', 'cuda:1' or another accelerator of torch's, "
        "'sim', or 'sim:h200' (any preset)"
    )


def hardware_of(name: str) -> Hardware | None:
    """Returns the preset in a simulated device's name. Raises PlanError, with the nearest, for no preset."""
    kind, _, detail = name.partition(":")
    return find_hardware(detail) if kind == "sim" and detail else None


def target_device(name: str) -> torch.device:
    """Return the device of the tensors of a device's name; those of a simulated device are on the CPU.

    Raises StreamError for an accelerator that is not here, PlanError for an unknown preset.
    """
    hardware_of(name)
    return find_accelerator(name) if device_kind(name) == ACCELERATOR else torch.device("cpu")


def open_accelerator(name: str, *, page_lock: bool = True) -> AcceleratorDevice:
    """Opens the accelerator of that name. Raises StreamError where torch finds none."""
    special = _SPECIAL.get(torch.device(name).type, AcceleratorDevice)
    return special(name, page_lock=page_lock)


def accelerators() -> tuple[str, ...]:
    """Returns the names of all accelerators that this process sees, such as `cuda:0` and `cuda:1`."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return tuple(f"{here.type}:{index}" for index in range(torch.accelerator.device_count())) if here else ()


def open_device(name: str, plan: Plan, *, page_lock: bool = True) -> Device:
    """Opens the device of that name. A simulated one without a preset runs on the hardware of the plan."""
    if device_kind(name) == ACCELERATOR:
        return open_accelerator(name, page_lock=page_lock)
    return SimDevice(hardware_of(name) or plan.hardware, name=name)
