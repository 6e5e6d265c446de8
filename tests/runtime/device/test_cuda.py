"""What only CUDA has: graphs, registered host memory, its own streams and its allocator.

No kernel here computes: copies and fills are enough, so that `make cuda-dry` runs this without a GPU.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.device import accelerator
from penstock.runtime.device.accelerator import PAGE, CudaDevice, EventClock
from penstock.runtime.device.opening import accelerators
from penstock.runtime.device.protocol import Move, aligned_bytes
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from tests.rig.rig_runs import RigRun
from tests.runtime.device.device_runs import cases, disk_cases
from tests.runtime.models import broken

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="there is no GPU here: `make gpu` runs this where there is one, `make cuda-dry` without",
)

MANY, ONE = torch.arange(5.0), torch.arange(1.0)


class Weights(nn.Module):
    """Copies its input and its weights: all of them for many inputs, and every second one for one input."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3000 + 137 * k) for k in range(12))

    def forward(self, x):
        return [one.clone() for one in (x, *(self.weights if len(x) > 1 else self.weights[::2]))]


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Weights().requires_grad_(False)


@pytest.fixture(scope="module")
def program(module, tmp_path_factory):
    methods = {"many": export(module, (MANY,)), "one": export(module, (ONE,))}
    return penstock.compile(methods, tmp_path_factory.mktemp("weights") / "weights.penstock")


def load(program, share, wrap="overlap", device="cuda"):
    budget = program.floor(device) if share == "floor" else share
    plan = program.plan(budget, device=device, hardware="h200", wrap=wrap)
    return load_module(program, plan, LoadRequest(device=device, poison=True))


def equal(found, expected):
    return all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", [*cases(), *disk_cases()], ids=lambda case: case.name)
def test_plans_run_while_the_host_goes_on(case):
    RigRun(case, name="cuda", blocked=lambda: 0).go()


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
@pytest.mark.parametrize("share", ["floor", "50%", "100%"])
def test_methods_find_their_weights_on_every_device(program, module, share, wrap):
    for device in accelerators():
        with load(program, share, wrap, device) as streamed:
            many, one = MANY.to(device), ONE.to(device)
            found = [
                (streamed.many(many), module(MANY)) if turn % 3 else (streamed.one(one), module(ONE))
                for turn in range(8)
            ]
            assert all(equal(*pair) for pair in found)
            assert streamed.stats.misses == 0


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_passes_on_streams_in_turn_see_each_others_weights(program, module, wrap):
    streams = [torch.cuda.Stream() for _ in range(2)]
    many, found = MANY.to("cuda"), []
    with load(program, "50%", wrap) as streamed:
        for turn in range(6):
            with torch.cuda.stream(streams[turn % 2]):
                found.append(streamed.many(many))
    for turn, outputs in enumerate(found):
        with torch.cuda.stream(streams[turn % 2]):
            assert equal(outputs, module(MANY))


def captured(call, value):
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(torch.cuda.current_stream()):  # torch stays on its own where a capture fails
        try:
            with torch.cuda.graph(graph, pool):
                outputs = call(value)
        except torch.AcceleratorError:  # of the end
            if torch.__version__.startswith("2.11."):  # or it gives no memory back to the driver any more
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
    return graph, outputs


def replayed(graph, outputs):
    """What a replay writes into outputs that were other bytes before."""
    for one in outputs:
        one.fill_(-1.0)
    graph.replay()
    return [one.clone() for one in outputs]


@pytest.mark.parametrize("share", ["floor", "50%", "80%"])
def test_one_method_is_replayed_and_the_other_is_called(program, module, share):
    many, one = MANY.to("cuda"), ONE.to("cuda")
    with load(program, share, "barrier") as streamed:
        found = [(streamed.one(one), module(ONE)), (streamed.many(many), module(MANY))]
        graph = captured(streamed.one, one)
        for turn in range(3):
            found += [(replayed(*graph), module(ONE)) for _ in range(2)]
            found.append((streamed.many(many), module(MANY)))
            if turn:
                found.append((streamed.one(one), module(ONE)))
        other = captured(streamed.many, many)
        for _ in range(2):
            found += [(replayed(*graph), module(ONE)), (replayed(*other), module(MANY))]
        assert [equal(*pair) for pair in found] == [True] * len(found)
        assert streamed.stats.misses == 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # and so it should be
def test_what_replays_would_not_do_is_not_captured(program, module):
    many = MANY.to("cuda")
    overlapping = program.plan("50%", device="cuda", hardware="h200")
    third = program.weight_bytes // 3
    read = program.plan("50%", device="cuda", hardware="h200", wrap="barrier", host_memory=third)
    for plan, why in ((overlapping, "wrap='barrier'"), (read, "more host_memory=")):
        with load_module(program, plan, LoadRequest(device="cuda", poison=True)) as streamed:
            for _ in range(2):
                assert equal(streamed.many(many), module(MANY))
                with pytest.raises(penstock.StreamError, match=f"cannot be captured .*{why}"):
                    captured(streamed.many, many)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("share", ["floor", "50%"])
def test_copies_from_ordinary_memory_are_not_captured_and_go_on_behind(program, module, share):
    many, one = MANY.to("cuda"), ONE.to("cuda")
    budget = program.floor("cuda") if share == "floor" else share
    plan = program.plan(budget, device="cuda", hardware="h200", wrap="barrier")
    with load_module(program, plan, LoadRequest(device="cuda", page_lock=False, poison=True)) as streamed:
        for _ in range(3):
            assert equal(streamed.many(many), module(MANY))
            with pytest.raises(penstock.StreamError, match="a graph cannot copy from ordinary memory"):
                captured(streamed.many, many)
            assert equal(streamed.one(one), module(ONE))


@pytest.mark.parametrize("share", ["floor", "50%", "80%"])
def test_an_exception_in_a_capture_leaves_later_calls_as_they_were(program, module, share):
    many, one = MANY.to("cuda"), ONE.to("cuda")
    with load(program, share, "barrier") as streamed:
        streamed.many(many)
        with broken(streamed, 2, InterruptedError, RuntimeError):
            captured(streamed.many, many)
        for _ in range(2):
            assert equal(streamed.one(one), module(ONE))
            assert equal(streamed.many(many), module(MANY))
        assert equal(replayed(*captured(streamed.one, one)), module(ONE))


@pytest.mark.parametrize("share", ["floor", "50%", "80%"])
def test_what_a_capture_would_load_is_not_taken_for_loaded(program, module, share):
    many = MANY.to("cuda")
    with load(program, share, "barrier") as streamed:
        streamed.many(many)
        with broken(streamed, 2, InterruptedError, RuntimeError):
            streamed.many(many)
        graph = captured(streamed.many, many)
        for _ in range(2):
            assert equal(streamed.many(many), module(MANY))
            assert equal(replayed(*graph), module(MANY))


def test_replays_after_closing_read_memory_that_is_still_theirs(program, module):
    one = ONE.to("cuda")
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    streamed = load(program, "50%", "barrier")
    streamed.one(one)
    graph = captured(streamed.one, one)
    replayed(*graph)
    streamed.close()
    taken = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda").fill_(7) for _ in range(4)]
    assert equal(replayed(*graph), module(ONE))
    del graph, streamed, taken
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("share", ["50%", "100%"])
def test_closing_waits_for_kernels_and_gives_all_memory_back(program, module, share):
    many, stream = MANY.to("cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    streamed = load(program, share)
    assert torch.cuda.memory_allocated() >= before + streamed.stats.held_bytes > before
    with torch.cuda.stream(stream):
        outputs = streamed.many(many)
    streamed.close()
    del streamed  # and what lies outside the arena, which a call may have returned
    gc.collect()
    taken = [torch.empty(20000, dtype=torch.uint8, device="cuda").fill_(7) for _ in range(16)]
    torch.cuda.current_stream().synchronize()  # now what was given back is overwritten
    with torch.cuda.stream(stream):
        assert equal(outputs, module(MANY))
    del outputs, taken
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def test_host_memory_is_registered_by_its_size_until_it_is_given_back():
    device = CudaDevice("cuda")
    memory = [device.allocate_host(nbytes) for nbytes in (1, 5000, 1 << 20)]
    assert [one.data_ptr() % PAGE for one in memory] == [0, 0, 0]
    assert [one.is_pinned() for one in memory] == [True, True, True]
    assert not CudaDevice("cuda", page_lock=False).allocate_host(5000).is_pinned()
    device.free_host(memory[1])
    assert [one.is_pinned() for one in memory] == [True, False, True]
    device.close()
    assert [one.is_pinned() for one in memory] == [False, False, False]
    dropped = CudaDevice("cuda")
    kept = dropped.allocate_host(5000)
    assert kept.is_pinned()
    del dropped
    gc.collect()
    assert not kept.is_pinned()


def test_memory_that_cannot_be_registered_is_refused_and_leaves_no_error(monkeypatch):
    device, other = CudaDevice("cuda"), CudaDevice("cuda")
    memory = device.allocate_host(5000)
    monkeypatch.setattr(accelerator, "aligned_bytes", lambda nbytes, alignment: memory)
    with pytest.raises(penstock.StreamError, match=r"page-locked \(CUDA error 712\): .* \(page_lock=False\)"):
        other.allocate_host(5000)  # it is registered already
    assert torch.zeros(3, device="cuda").tolist() == [0, 0, 0]
    other.close()
    assert memory.is_pinned()
    device.close()
    assert not memory.is_pinned()


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister"])
def test_an_interrupt_at_a_call_leaves_nothing_registered_and_no_error(monkeypatch, call, behind):
    runtime, device, given = torch.cuda.cudart(), CudaDevice("cuda"), list[torch.Tensor]()
    calls = {name: getattr(runtime, name) for name in ("cudaHostRegister", "cudaHostUnregister")}

    def interrupted(*args):
        monkeypatch.undo()
        if behind:  # what the call has returned is lost
            calls[call](*args)
        raise KeyboardInterrupt

    def aligned(nbytes, alignment):
        given.append(aligned_bytes(nbytes, alignment))
        return given[-1]

    monkeypatch.setattr(accelerator, "aligned_bytes", aligned)
    monkeypatch.setattr(accelerator, "_runtime", lambda: SimpleNamespace(**{**calls, call: interrupted}))
    with pytest.raises(KeyboardInterrupt):
        device.free_host(device.allocate_host(9000))
    device.close()
    assert torch.zeros(3, device="cuda").tolist() == [0, 0, 0]
    assert [one.is_pinned() for one in given] == [False]


def test_too_much_memory_is_refused_by_what_it_is_for():
    device, total = CudaDevice("cuda"), torch.cuda.mem_get_info()[1]
    with pytest.raises(penstock.StreamError, match=r"cuda:0 is out of memory: .* for the arena do not fit"):
        device.allocate(total + 1, "the arena")
    assert device.allocate(1 << 20, "a test").fill_(3)[-1:].tolist() == [3]
    device.close()


def test_the_stream_of_copies_is_none_that_the_caller_can_get():
    device = CudaDevice("cuda")
    copies = device.open_stream("copies")
    mine = {torch.cuda.Stream().cuda_stream for _ in range(100)}
    assert copies.cuda_stream not in mine | {torch.cuda.current_stream().cuda_stream}
    assert copies.priority < 0
    device.close()


def test_copies_go_both_ways_in_pieces_and_are_timed(monkeypatch):
    monkeypatch.setattr("penstock.runtime.device.accelerator.PIECE", 64)
    device = CudaDevice("cuda")
    clock, copies, there = EventClock(device), device.open_stream("copies"), device.allocate(300, "a test")
    source, back = device.allocate_host(250), device.allocate_host(300)
    source.copy_(torch.arange(250, dtype=torch.uint8))
    start = clock.now()
    device.fill(copies, there, 0, 300, 9)
    device.copy(copies, there, [Move(source, 3, 50, 200)], "a copy")
    device.copy_out(copies, there, [Move(back, 50, 50, 250)], "a copy back")
    device.wait(device.current_stream(), device.record(copies))
    assert clock.ns_between(start, clock.now()) > 0
    assert back[50:].tolist() == [*range(3, 203), *[9] * 50]
    device.close()
