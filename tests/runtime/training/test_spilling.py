"""Values that leave memory between forward and backward: the same gradients, and every byte is counted."""

import os
import resource
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.passes.annotate import annotate_with_values
from penstock.passes.trace import PRESET_CPU
from penstock.passes.training.facts import BACKWARD, FORWARD
from penstock.runtime import planning
from penstock.runtime.device.simulated import RaceError, SimDevice
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.files.direct_file import SpillFile
from penstock.runtime.loading import load_module
from penstock.runtime.machine.figures import Measurement, Subject, this_machine
from penstock.runtime.machine.rates import Leaving
from penstock.runtime.options import LoadRequest
from penstock.runtime.training.module import TrainingModule
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from penstock.schedule.verify.proof import verify_plan
from tests.engines import ENGINES
from tests.hunt import sampled
from tests.runtime.device.cpu_device import CpuDevice
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER, NORMED

MODELS = {"decoder": DECODER, "normed": NORMED}


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def program(trained, spilling):
    return spilling(trained)


@pytest.fixture(scope="module")
def plan(program):
    return spilling_plan(program.payload)


@pytest.fixture(params=ENGINES)
def load(program, plan, tmp_path, request):
    """Loads the program with poisoned memory and a spill file in the test's own folder."""
    opened = []

    def loaded():
        module = load_module(program, plan, LoadRequest(engine=request.param, poison=True, spill=tmp_path))
        assert isinstance(module, TrainingModule)
        opened.append(module)
        return module

    yield loaded
    for module in opened:
        module.close()


def loss_of(trained, module, seed=0):
    torch.manual_seed(seed)
    return trained.loss(module(*trained.inputs()))


def gradients(module):
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    return found


@pytest.fixture(scope="module")
def expected(trained):
    plain = trained.model()
    loss_of(trained, plain).backward()
    return gradients(plain)


def assert_right(module, expected):
    found = gradients(module)
    assert found
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def moved(plan, direction):
    return sum(t.stop - t.start for one in plan.schedules for t in one.transfers if t.direction == direction)


def test_the_plan_is_safe(program, plan):
    verify_plan(program.payload.storages, program.payload.traces, plan)


def produced(program):
    return {s for s, one in enumerate(program.payload.storages) if one.kind == "produced"}


def test_each_place_is_written_once_in_the_forward_and_read_in_the_backward(program):
    traces = {trace.method: trace for trace in program.payload.traces}
    written = [s for step in traces[FORWARD].steps for s in step.writes]
    assert len(written) > 3
    assert sorted(written) == sorted(produced(program))
    assert produced(program) <= {s for step in traces[BACKWARD].steps for s in step.reads}
    assert not any(step.writes for step in traces[BACKWARD].steps)
    assert all(not (step.reads and step.writes) for step in traces[FORWARD].steps)
    storages = program.payload.storages
    assert all(storages[s].nbytes >= 4096 and not storages[s].extents for s in produced(program))
    values = {weight.parts[0].storage for weight in program.payload.weights if weight.role == "value"}
    assert values == produced(program)


def test_no_value_that_has_a_place_is_kept_by_autograd(trained, program):
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with program.load("100%") as module, torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss_of(trained, module)
        given = {one.data_ptr() for one in (*module.parameters(), *module.buffers())}
    assert seen
    kept = {one.data_ptr(): one.nbytes for one in seen if one.data_ptr() not in given}
    assert sum(kept.values()) < sum(program.payload.storages[s].nbytes for s in produced(program)) / 2


BUDGETS = [
    (engine, arena, share)
    for j, engine in enumerate(ENGINES)
    for k, arena in enumerate(("contiguous", "paged"))
    for share in ((0.4, 0.0) if (j + k) % 2 else (0.0, 0.4))
]
"""Every second one has each engine with each arena, and each share with each of both."""


@pytest.mark.random
@pytest.mark.parametrize(("engine", "arena", "share"), [*sampled(BUDGETS, 2), ("auto", "sim", 0.0)])
def test_at_any_budget_gradients_are_those_of_the_model(engine, arena, share, trained, program):
    place = {"device": "sim"} if arena == "sim" else {"arena": arena}
    floor = program.floor(**place)
    budget = floor + int(share * (program.largest_budget - floor))
    plain, rounds = trained.model(), 3
    options = LoadOptions(engine=engine, arena=place.get("arena"), poison=True)
    with program.load(budget, device=place.get("device", "cpu"), options=options) as module:
        for seed in range(rounds):
            loss_of(trained, plain, seed).backward()
            loss_of(trained, module, seed).backward()
            assert_right(module, gradients(plain))
        stats, out = module.stats, moved(module.plan, "out")
    assert out or share
    assert stats.bytes_written == rounds * out
    assert stats.misses == 0
    assert stats.peak_bytes <= budget


def test_spilling_is_for_the_eager_lowering(tmp_path):
    with pytest.raises(PassError, match="lowering='eager'"):
        penstock.compile_training(
            DECODER.model(),
            tmp_path / "x.penstock",
            example=DECODER.inputs(),
            trainable=DECODER.patterns,
            spill=True,
            lowering="inductor",
        )


def test_other_programs_have_no_places():
    exported = torch.export.export(torch.nn.Linear(64, 64), (torch.randn(64, 64),))
    payload = annotate_with_values(exported).payload
    assert all(one.kind == "streamable" for one in payload.storages)
    assert all(not step.writes for trace in payload.traces for step in trace.steps)


def test_values_that_left_come_back(trained, plan, load, expected):
    assert moved(plan, "out") == moved(plan, "in") > 20_000
    resident = sum(one.nbytes for one in plan.resident)
    module, forward = load(), plan.traces[0]
    places = {one.start: one.nbytes for one in plan.arena.segments}
    taken = [sum(places[plan.arena.layout[s]] for s in one.writes) for one in forward.steps]
    for step in range(1, 4):
        loss = loss_of(trained, module)
        assert module.stats.bytes_written == step * moved(plan, "out")
        # Each value is there until the end of the step behind the one that writes it.
        assert module.stats.peak_bytes >= resident + max(map(sum, pairwise(taken)))
        loss.backward()
        if step == 1:  # later ones begin with other statistics of batch norms
            assert_right(module, expected)
    after = module.stats
    assert after.bytes_moved == 3 * moved(plan, "in") + resident
    assert after.misses == 0
    assert after.peak_bytes <= plan.budget


@pytest.mark.parametrize("kind", ["sim", "threads"])
def test_on_a_device_values_leave_for_the_host(kind, trained, program, plan, expected):
    device = SimDevice(PRESET_CPU) if kind == "sim" else CpuDevice()
    module = load_module(program, plan, LoadRequest(device="sim", poison=True), device=device)
    with module:
        assert isinstance(module, TrainingModule)
        for step in range(1, 4):
            loss = loss_of(trained, module)
            loss.backward()
            if step == 1:
                assert_right(module, expected)
            assert module.stats.bytes_written == step * moved(plan, "out")
        stats = module.stats
        assert stats.bytes_moved == 3 * moved(plan, "in")
        assert stats.misses == 0
        assert stats.peak_bytes <= plan.budget
        assert stats.pinned_bytes >= moved(plan, "out")
    if isinstance(device, SimDevice):
        assert device.copied_ns > 0


@pytest.mark.parametrize("fault", ["wait_out", "order"])
def test_the_simulated_device_finds_what_leaves_too_late(fault, trained, program, plan, monkeypatch):
    """Without the wait for a copy out, or with one that begins too early, kernels and copies race."""
    if fault == "wait_out":
        monkeypatch.setattr(DeviceStreamer, "_wait_out", lambda self, step: self._issue())
    else:
        freed = DeviceStreamer._freed
        monkeypatch.setattr(
            DeviceStreamer,
            "_freed",
            lambda self, piece: self._device.record(self._copies) if piece.out else freed(self, piece),
        )
    module = load_module(program, plan, LoadRequest(device="sim"), device=SimDevice(PRESET_CPU))
    with module, pytest.raises(RaceError, match="nothing orders"):
        loss_of(trained, module).backward()


def test_the_file_has_no_name_and_ends_with_the_module(trained, load, tmp_path):
    module = load()
    loss = loss_of(trained, module)
    assert not list(tmp_path.iterdir())
    assert open_files(tmp_path)
    loss.backward()
    module.close()
    assert not open_files(tmp_path)


def test_a_folder_that_only_has_files_with_names(program, plan, trained, tmp_path, monkeypatch):
    """So that nothing is left where the process is killed, the name is gone at once."""
    monkeypatch.delattr(os, "O_TMPFILE")
    with load_module(program, plan, LoadRequest(engine="python", spill=tmp_path)) as module:
        assert not list(tmp_path.iterdir())
        (name,) = {one for one in open_files(tmp_path)}
        assert name.endswith("(deleted)")
        loss_of(trained, module).backward()
        assert gradients(module)


def open_files(folder):
    """The open files of this process that were made in a folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the folder's own descriptor
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


def test_nothing_is_made_where_nothing_leaves(program, trained, tmp_path):
    with program.load("100%", spill=tmp_path, options=LoadOptions(engine="python")) as module:
        loss_of(trained, module).backward()
        assert not open_files(tmp_path)
        assert module.stats.bytes_written == 0


def test_calls_out_of_turn(trained, load, expected):
    module = load()
    loss = loss_of(trained, module)
    with pytest.raises(StreamError, match=r"waits for its backward.*spill=False"):
        loss_of(trained, module)
    with torch.no_grad(), pytest.raises(StreamError, match="waits for its backward"):
        loss_of(trained, module)
    loss.backward(retain_graph=True)
    assert_right(module, expected)
    with pytest.raises(StreamError, match=r"first backward.*spill=False"):
        loss.backward()
    del loss
    with torch.no_grad():  # its values are written, and thrown away by the next call
        loss_of(trained, module)
    dropped = loss_of(trained, module)
    del dropped
    loss_of(trained, module).backward()
    assert gradients(module)
    assert module.stats.misses == 0


def test_a_backward_whose_values_are_gone_is_refused(trained, load):
    module = load()
    loss = loss_of(trained, module)
    weights = module._weights
    assert weights.streamer is not None
    weights.streamer.abort()
    with pytest.raises(StreamError, match="not in memory any more"):
        loss.backward()
    del loss
    loss_of(trained, module).backward()
    assert gradients(module)


def test_a_forward_that_fails_in_the_middle(trained, load, expected, monkeypatch):
    module = load()
    streamer = module._weights.streamer
    assert streamer is not None
    release, left = streamer.release, [5]

    def interrupted(graph, step):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        release(graph, step)

    with monkeypatch.context() as patched:
        patched.setattr(streamer, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss_of(trained, module)
        loss = loss_of(trained, module)
        left[0] = 4
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
    with pytest.raises(StreamError, match="first backward"):
        loss.backward()
    del loss
    module.zero_grad()
    if trained is DECODER:
        loss_of(trained, module).backward()
        assert_right(module, expected)


@pytest.mark.parametrize("error", [28, 5], ids=["no space", "failing disk"])
def test_an_error_in_writing_names_the_folder(error, trained, program, plan, tmp_path):
    def refused(*arguments):
        raise OSError(error, os.strerror(error))

    with load_module(program, plan, LoadRequest(engine="python", spill=tmp_path)) as module:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwritev", refused)
            with pytest.raises(SourceError, match=f"{tmp_path}.*{os.strerror(error)}.*spill="):
                loss_of(trained, module)
        loss_of(trained, module).backward()
        assert gradients(module)
        assert module.stats.misses == 0


@contextmanager
def limited_files(nbytes):
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_the_size_of_files(program, plan, trained, tmp_path):
    refused = pytest.raises(SourceError, match=f"no file of .* can be made in {tmp_path}.*File too large")
    with limited_files(4096), refused:
        load_module(program, plan, LoadRequest(engine="python", spill=tmp_path))
    assert not open_files(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room(program, plan, tmp_path, monkeypatch):
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:4], 1, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(SourceError, match=f"{tmp_path}.*bytes free, and .* may be written"):
        load_module(program, plan, LoadRequest(engine="python", spill=tmp_path))


def test_closing_while_values_leave(trained, program, plan, monkeypatch, tmp_path):
    """A write that hangs keeps memory and file until it has ended."""
    begun, go_on = threading.Event(), threading.Event()
    write = SpillFile.write_from

    def slow(self, offset, address, nbytes):
        begun.set()
        assert go_on.wait(20)
        write(self, offset, address, nbytes)

    monkeypatch.setattr(SpillFile, "write_from", slow)
    module = load_module(program, plan, LoadRequest(engine="python", spill=tmp_path))
    errors = []

    def call():
        try:
            loss_of(trained, module)
        except StreamError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(20)
    closer = threading.Thread(target=module._weights.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    assert open_files(tmp_path)
    go_on.set()
    for thread in (caller, closer):
        thread.join(20)
        assert not thread.is_alive()
    assert len(errors) == 1
    assert "closed" in str(errors[0])
    assert not open_files(tmp_path)


def test_plans_know_the_rate_of_the_folder(program, tmp_path, monkeypatch):
    asked = []

    def found(folder):
        asked.append(folder)
        names = ("writes", "both ways")
        rates = [Measurement(Subject(one, this_machine()), 1.7, 0.0, 0.0, 3, 0) for one in names]
        return Leaving(replace(rates[0], median=3e8), rates[1])

    monkeypatch.setattr(planning, "leaving", found)
    budget = program.floor(arena="contiguous")
    assert program.plan(budget).hardware.write_bytes_per_s == 3e8
    with program.load(budget, spill=tmp_path) as module:
        assert module.plan.hardware.write_bytes_per_s == 3e8
        assert not module.plan.hardware.duplex
    assert program.plan(budget, hardware="laptop").hardware.write_bytes_per_s is None
    assert asked == [None, str(tmp_path)]
