"""The rig as a device of torch's, `rig`, and what tests ask of it.

Once it is loaded, the process has it as its accelerator: tensors go there by `.to("rig")`, and `rig:1` is a
second device. Its kernels run on threads of streams, in one of `ORDERS`:

- soon: at once;
- late: only what somebody waits for, and only then;
- random: as `seed` draws, and what somebody waits for;
- lagging: as soon, but default streams (seed 0), or all others (seed 1), wait until nothing else can run,
  and the host waits, so that nothing else is about to be enqueued.
"""

import atexit
import ctypes
import os
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from tests.rig.building import build

ORDERS = (("soon", 0), ("late", 0), ("random", 1), ("lagging", 0), ("lagging", 1))

MEMORY = 1 << 30
"""Bytes of each device, unless a test gives it another size."""


@cache
def load():
    """Make the rig this process's accelerator, and build it first where that was not done."""
    import torch._meta_registrations

    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend("rig")
    module = ModuleType("torch.rig")
    vars(module).update(
        is_available=lambda: True,
        _lazy_init=lambda: (
            None
        ),  # without it torch 2.11 never takes the device for initialised, nor waits for it
        device_count=lambda: 2,
        current_device=torch.accelerator.current_device_index,
        current_stream=torch.accelerator.current_stream,
        stream=lambda stream: stream,  # which is a context of its own
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed_all=lambda seed: torch.ops.rig.set_random_state(seed % (1 << 63), 0),
        get_rng_state=lambda device=None: torch.tensor(torch.ops.rig.random_state()),
        set_rng_state=lambda state, device=None: torch.ops.rig.set_random_state(*state.tolist()),
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module("rig", module)
    atexit.register(torch.ops.rig.restart)  # so that no thread runs a kernel while the process ends


@contextmanager
def ordered(order="soon", seed=0, *, memory=MEMORY):
    """Have streams run in an order, on devices with so many bytes. At the end all runs, and errors go."""
    load()
    torch.accelerator.empty_cache()
    torch.ops.rig.restart()
    torch.ops.rig.set_memory(memory)
    torch.ops.rig.set_policy(order, seed)
    try:
        yield
    finally:
        torch.ops.rig.set_policy("soon", 0)
        torch.ops.rig.restart()


def blocked():
    """How often the host has waited for the device so far, by what for."""
    return dict(torch.ops.rig.blocked())


def readable(address):
    """Tells whether the host may read the byte at an address. The system is asked, so nothing faults."""
    reader, writer = os.pipe()
    try:
        return ctypes.CDLL(None).write(writer, ctypes.c_void_p(address), 1) == 1
    finally:
        os.close(reader)
        os.close(writer)
