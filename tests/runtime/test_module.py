"""A streamed module at its edges: closing that is interrupted or late, methods, modes of the caller."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock import LoadOptions
from penstock.schedule.facts.errors import StreamError
from tests.engines import ENGINES
from tests.runtime.models import Counter


def left_behind():
    """Readers and mappings of weights that this process still has."""
    readers = [t.name for t in threading.enumerate() if t.name.startswith("penstock")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return readers + [line for line in maps if "weights.safetensors" in line]


def test_a_close_that_was_interrupted_can_be_finished(stack, monkeypatch):
    module = stack.open().load("50%", options=LoadOptions(arena="mapped"))
    module(stack.tokens)
    streamer = module._weights.resources.streamer
    assert streamer is not None

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streamer, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            module.close()
    with pytest.raises(penstock.StreamError, match="closed"):
        module(stack.tokens)
    module.close()
    assert not left_behind()


def test_a_module_collected_on_one_of_its_readers_is_closed(stack):
    """The garbage collector runs on whatever thread allocates, Python's readers included."""
    module = stack.open().load("50%", options=LoadOptions(arena="mapped", engine="python"))
    module(stack.tokens)
    resources = module._weights.resources
    assert resources.streamer is not None
    finished = threading.Event()

    def collect(*_):
        resources.close()
        finished.set()
        return 0

    resources.streamer._arena.fill = collect  # type: ignore[method-assign]
    resources.streamer.abort()  # loads the boundary again
    assert finished.wait(60)
    deadline = time.monotonic() + 60
    while left_behind() and time.monotonic() < deadline:  # every reader that collects starts a closer
        time.sleep(0.01)
    assert not left_behind()


@pytest.mark.parametrize("mode", ["inference", "device"])
def test_the_mode_in_which_a_program_is_loaded_does_not_matter(tmp_path, mode):
    model = Counter()
    x = torch.randn(2, 256)
    program = penstock.compile(export(model, (x,)), tmp_path / "counter.penstock")
    context = torch.inference_mode() if mode == "inference" else torch.device("meta")
    with context:
        module = program.load("100%")
    with module, torch.no_grad():
        for _ in range(2):
            assert torch.equal(module(x), model(x))


@pytest.mark.parametrize("readers", [0, -1])
def test_somebody_has_to_read(stack, readers):
    with pytest.raises(penstock.StreamError, match="one reader or more"):
        stack.open().load("50%", options=LoadOptions(readers=readers))


# Several methods.


class Cached(nn.Module):
    """Two entries, one state: prefill writes what decode goes on with."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(640, 640) for _ in range(6)])
        self.head = nn.Linear(640, 640)
        self.register_buffer("state", torch.zeros(1, 640))

    def prefill(self, x):
        self.state.copy_(self.layers(x).sum(0, keepdim=True))
        return self.head(self.state)

    def decode(self, x):
        self.state.add_(self.layers[:3](x))
        return self.head(self.state)


@pytest.fixture(scope="module")
def methods(tmp_path_factory):
    torch.manual_seed(0)
    model = Cached().eval()
    exported = {}
    for name, rows in (("prefill", 5), ("decode", 1)):
        model.forward = getattr(model, name)
        exported[name] = export(model, (torch.randn(rows, 640),))
    path = tmp_path_factory.mktemp("methods") / "cached.penstock"
    penstock.compile(exported, path)
    return penstock.open(path), model


@pytest.mark.parametrize("budget", ["floor", "80%"])
@pytest.mark.parametrize("arena", ["mapped", "contiguous", "paged"])
def test_methods_share_weights_and_state(methods, arena, budget):
    program, model = methods
    size = program.floor(arena=arena) if budget == "floor" else budget
    with torch.no_grad(), program.load(size, options=LoadOptions(arena=arena, poison=True)) as module:
        for name, rows in [("prefill", 5), ("decode", 1), ("decode", 1), ("prefill", 5), ("decode", 1)]:
            x = torch.randn(rows, 640)
            assert torch.equal(getattr(module, name)(x), getattr(model, name)(x)), name
        assert module.stats.misses == 0
        assert module.stats.peak_bytes <= module.stats.budget
        with pytest.raises(penstock.StreamError, match="prefill, decode"):
            module(x)
        for unknown in (module.call, module.arguments):
            with pytest.raises(penstock.StreamError, match="there is no method"):
                unknown(*(["train"] if unknown == module.call else [[], "train"]))


def test_descriptors_and_threads_do_not_grow(stack):
    program = stack.open()
    gc.collect()  # what other tests left is not counted, nor given back meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for arena in ("mapped", "contiguous", "paged"):
        with program.load("50%", options=LoadOptions(arena=arena)) as module:
            module(stack.tokens)
        with pytest.raises(penstock.BudgetError):
            program.load(1, options=LoadOptions(arena=arena))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not left_behind()


@pytest.mark.parametrize("budget", ["50%", "100%", 1])
def test_without_weights_any_budget_is_enough(tmp_path, budget):
    x = torch.randn(3)
    program = penstock.compile(export(nn.Tanh(), (x,)), tmp_path / "tanh.penstock")
    assert program.weight_bytes == program.floor_bytes == 0
    with program.load(budget) as module:
        assert torch.equal(module(x), x.tanh())
    with pytest.raises(penstock.BudgetError, match="not positive"):
        program.load("0%")


def test_one_pattern_is_not_a_list(stack):
    with pytest.raises(penstock.PlanError, match=r"takes a list of patterns, got 'blocks\.\*'"):
        stack.open().plan("50%", keep="blocks.*")


class Outlives(nn.Module):
    """Hands out a weight, views of one, and a buffer that it writes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        self.table = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("state", torch.zeros(64))

    def forward(self, x):
        self.state.add_(1)
        return self.layers(x), self.state, self.state[2:5], self.table, self.table[3:].t()


@pytest.mark.parametrize("arena", ["mapped", "contiguous", "paged"])
def test_what_a_program_hands_out_outlives_the_module(tmp_path, arena):
    model, x = Outlives().eval(), torch.randn(2, 256)
    program = penstock.compile(export(model, (x,)), tmp_path / "outlives.penstock")
    with torch.no_grad():
        with program.load(
            program.floor(arena=arena), options=LoadOptions(arena=arena, poison=True)
        ) as module:
            outputs = module(x)
        assert not left_behind()
        for got, expected in zip(outputs, model(x), strict=True):
            assert torch.equal(got, expected)


def test_a_system_without_populate_moves_and_direct_reads(stack, monkeypatch):
    from penstock.runtime import planning
    from penstock.runtime.arena import kinds
    from penstock.runtime.files import direct_file

    for module in (kinds, kinds, planning):
        for name in ("supports_populate", "supports_move"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.delattr(direct_file.os, "O_DIRECT")
    (stack.path / "weights.safetensors").read_bytes()  # what the page cache holds is read through it
    program = stack.open()
    assert set(program.arenas()) == {"contiguous", "paged"}
    with program.load("50%") as module:
        for _ in range(2):
            assert torch.equal(module(stack.tokens), stack.expected)
        assert "buffered reads" in module.stats.arena
        assert "cannot populate" in module.stats.arena


@pytest.fixture(scope="module")
def planned(stack):
    program = stack.open()
    return program, program.plan("50%", arena="contiguous")


PHASES = ["begin", "acquire", "release", "end"]


@pytest.mark.parametrize("when", [0, 5])
@pytest.mark.parametrize(
    ("engine", "where"),
    [
        (engine, where)
        for engine in ENGINES
        for where in (*PHASES, *(("_done",) if engine == "native" else ("_wait", "_drain", "_restart")))
    ],
)
def test_an_interrupt_in_any_phase_leaves_a_module_that_works(request, monkeypatch, engine, where, when):
    stack = request.getfixturevalue("stack")
    program, plan = request.getfixturevalue("planned")
    with program.load(plan=plan, options=LoadOptions(poison=True, engine=engine)) as module:
        streamer = module._weights.resources.streamer
        assert streamer is not None
        real, calls = getattr(streamer, where), []

        def interrupted(*arguments):
            calls.append(arguments)
            if len(calls) == when + 1:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(streamer, where, interrupted)
            for _ in range(when + 1):
                try:
                    assert torch.equal(module(stack.tokens), stack.expected)
                    if where in ("_drain", "_restart"):
                        streamer.abort()
                except KeyboardInterrupt:
                    break
            assert len(calls) >= when + 1
        for _ in range(2):
            assert torch.equal(module(stack.tokens), stack.expected)
    assert not left_behind()


def test_the_computing_team_sleeps_only_while_readers_bring_weights(stack):
    def parked(module):
        team = module._weights.team
        assert team is not None
        return team._thread is not None

    weights = stack.path / "weights.safetensors"
    weights.read_bytes()
    program, several = stack.open(), torch.get_num_threads() > 1
    with program.load("50%", options=LoadOptions(arena="mapped")) as module:
        for _ in range(50):  # until nothing is read again that the cache holds page by page
            assert torch.equal(module(stack.tokens), stack.expected)
            if not parked(module):
                break
        assert not parked(module)
    with program.load("50%", options=LoadOptions(arena="contiguous")) as module:
        for _ in range(3):
            assert torch.equal(module(stack.tokens), stack.expected)
        assert parked(module) == several


def test_a_team_that_the_system_refuses_after_a_pass_costs_no_output(stack, monkeypatch):
    with stack.open().load("50%", options=LoadOptions(arena="contiguous")) as module:
        team = module._weights.team
        assert team is not None
        team.wake()

        def refuse():
            raise StreamError("the system refused a thread")

        monkeypatch.setattr(team, "park", refuse)
        assert torch.equal(module(stack.tokens), stack.expected)
