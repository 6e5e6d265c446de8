"""What every device does alike: cpu, sim and the rig in all orders, and cuda where there is one."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from penstock.runtime.device.accelerator import AcceleratorDevice, CudaDevice
from penstock.runtime.device.protocol import Move
from penstock.schedule.facts.errors import StreamError
from tests.rig import machine
from tests.runtime.device.cpu_device import CpuDevice
from tests.runtime.device.device_runs import HARDWARE
from tests.runtime.device.device_suite import CHECKS, FAULTS, a_copy_of_wrong_bytes_is_found
from tests.runtime.device.simulated.faults import Fault
from tests.runtime.device.simulated.ordered_device import OrderedDevice

DEVICES = {
    "cpu": CpuDevice,
    "sim, earliest": lambda: OrderedDevice(HARDWARE, policy="earliest"),
    "sim, latest": lambda: OrderedDevice(HARDWARE, policy="latest"),
    "sim, lagging": lambda: OrderedDevice(HARDWARE, policy="lagging"),
    "sim, random": lambda: OrderedDevice(HARDWARE, policy="random", seed=3),
    "cuda": partial(CudaDevice, "cuda"),
    **{f"rig, {order}, {seed}": partial(AcceleratorDevice, "rig") for order, seed in machine.ORDERS},
    **{
        f"rig, {order}, {seed}, ordinary memory": partial(AcceleratorDevice, "rig", page_lock=False)
        for order, seed in machine.ORDERS[1:4]
    },
}


@pytest.fixture
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here: `make gpu` runs this where there is one")
    order = request.param.split(", ")[1:]
    with machine.ordered(order[0], int(order[1])) if request.param.startswith("rig") else nullcontext():
        opened = DEVICES[request.param]()
        yield opened
        opened.finish()  # kernels, for which closing does not wait
        opened.close()
        opened.close()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("name", CHECKS)
def test_every_device(device, name):
    CHECKS[name](device)


@pytest.mark.parametrize("device", ["cpu", "cuda", "rig, late, 0"], indirect=True)
@pytest.mark.parametrize("name", FAULTS)
def test_copies_of_wrong_bytes_are_found_on_real_devices(device, name):
    FAULTS[name](device)


def test_the_check_of_a_fault_fails_where_nothing_is_wrong():
    device = CpuDevice()
    with pytest.raises(AssertionError, match="no step has found wrong bytes"):
        a_copy_of_wrong_bytes_is_found(Fault("bits"), device)
    device.close()


def test_an_error_of_a_copy_reaches_who_waits_for_it():
    device = CpuDevice()
    copies = device.open_stream("copies")
    device.copy(copies, device.allocate(1, "a test"), [Move(device.allocate_host(4), 0, 0, 4)], "too long")
    with pytest.raises(RuntimeError):
        device.synchronize(device.record(copies))
    device.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused_by_name():
    with pytest.raises(StreamError, match=r"there is no device 'cuda' here .*the device sim:h200 runs plans"):
        CudaDevice("cuda")
