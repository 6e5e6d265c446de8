"""Inductor for the rig: every operator is a call, so no Triton and no kernel of its own is needed.

torch lets a device outside of its tree register a scheduling, a wrapper and what Dynamo asks of a device. By
the option `fallback_by_default`, which torch has for its lite mode, no node needs generated code. What this
shows is what penstock does around Inductor: probes, the order of reads in the emitted wrapper, weights on a
device.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._inductor import scheduler
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.utils._ordered_set import OrderedSet

from tests.rig import machine

OPTIONS = {"fallback_by_default": True}
"""Options of Inductor with which it calls every operator."""


class Interface(DeviceInterface):
    """What Dynamo and Inductor ask of a device."""

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return torch.accelerator.device_count()

    @staticmethod
    def current_device():
        return torch.accelerator.current_device_index()

    @staticmethod
    def current_stream(device=None):
        return torch.accelerator.current_stream()

    @staticmethod
    def synchronize(device=None):
        torch.accelerator.synchronize()

    @staticmethod
    def is_bf16_supported(including_emulation=False):
        return True

    class Worker:
        @staticmethod
        def current_device():
            return torch.accelerator.current_device_index()

        @staticmethod
        def get_device_properties(device=None):
            return {}


class Lines(common.DeviceOpOverrides):
    """The lines of a wrapper that name a device."""

    def import_get_raw_stream_as(self, name):
        return f"def {name}(index): return 0"

    def set_device(self, device_idx):
        return f"torch.accelerator.set_device_index({device_idx})"

    def synchronize(self):
        return "torch.accelerator.synchronize()"

    def device_guard(self, device_idx):
        return f"torch.accelerator.device_index({device_idx})"


class Scheduling(CppScheduling):
    """A scheduling that is given calls only."""

    def get_backend_features(self, device):
        return OrderedSet()


@contextmanager
def registered(*, guarded):
    """Has Inductor compile for the rig, with the options that are yielded.

    `guarded` wrappers run within a guard of the device, as CUDA's do.
    """
    machine.load()
    common.init_backend_registration()
    register_interface_for_device("rig", Interface)
    common.register_device_op_overrides("rig", Lines())
    needs = scheduler.device_need_guard
    with (
        patch.dict(common.device_codegens),
        patch.object(scheduler, "device_need_guard", lambda kind: (kind == "rig" and guarded) or needs(kind)),
    ):
        common.register_backend_for_device("rig", Scheduling, PythonWrapperCodegen, CppWrapperCpu)
        yield dict(OPTIONS)
