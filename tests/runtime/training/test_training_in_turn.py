"""Forward and backward in turn: the bytes that a step moves, and calls that come in another order."""

import pytest
import torch

from penstock import LoadOptions
from penstock.passes.training.facts import BACKWARD, FORWARD
from tests import oracle
from tests.engines import ENGINES
from tests.training_models import DECODER


@pytest.fixture(scope="module")
def program(program_of):
    return program_of(DECODER, evaluate=False)


@pytest.fixture(params=["floor", "25%", "60%"])
def budget(program, request):
    return program.floor(arena="contiguous") if request.param == "floor" else str(request.param)


@pytest.fixture(params=[*((engine, "keep") for engine in ENGINES), (ENGINES[-1], "layers")])
def module(program, budget, request):
    """The decoder with readers of its own and poisoned memory, in which nothing comes without a copy."""
    engine, rung = request.param
    options = LoadOptions(engine=engine, activations=rung, poison=True, arena="contiguous")
    with program.load(budget, options=options) as loaded:
        yield loaded


def moved(transfers):
    return sum(one.stop - one.start for one in transfers)


def forward(module):
    torch.manual_seed(0)
    loss = module(*DECODER.inputs())[0]
    assert isinstance(loss, torch.Tensor)
    return loss


def gradients(module):
    found = [one.grad for one in module.parameters() if one.requires_grad]
    assert all(one is not None and one.any() for one in found)
    module.zero_grad()
    return [one for one in found if one is not None]


@pytest.fixture(scope="module")
def expected():
    plain = DECODER.model()
    torch.manual_seed(0)
    plain(*DECODER.inputs())[0].backward()
    return gradients(plain)


def assert_right(module, expected):
    assert all(torch.equal(*pair) for pair in zip(gradients(module), expected, strict=True))


def test_a_step_copies_less_than_two_methods_by_themselves(program):
    in_turn = program.plan("25%", arena="contiguous", hardware="server")
    alone = program.plan("25%", arena="contiguous", hardware="server", wrap="barrier")
    assert [trace.follows for trace in alone.traces] == [None, None]
    forward, backward = sorted(in_turn.traces, key=lambda trace: trace.method != FORWARD)
    assert (forward.follows, backward.follows) == (backward.graph, forward.graph)
    assert in_turn.streamed_bytes < alone.streamed_bytes
    assert in_turn.predicted_ns < alone.predicted_ns


def test_a_steady_step_moves_what_is_planned(program, module, expected):
    facts = program.variants[module.activations].payload
    oracle.check_plan(facts.storages, facts.traces, module.plan)
    first, second = module.plan.schedules
    # What the forward of a later step still brings for its backward, and the backward for the next forward.
    early = moved(tuple(t for one in (first, second) for t in one.transfers if t.after < 0))
    planned = moved(first.transfers) + moved(second.transfers)
    boundary = sum(item.nbytes for item in first.boundary or ())
    cold = boundary + moved(tuple(t for t in first.transfers if t.after >= 0)) + moved(second.transfers)
    for step in range(6):
        forward(module).backward()
        assert_right(module, expected)
        least = cold + step * planned
        assert least <= module.stats.bytes_moved <= least + early
    assert module.stats.misses == 0


def test_calls_out_of_turn(module, expected):
    for _ in range(2):
        forward(module)  # without a backward
        losses = [forward(module), forward(module)]
        with torch.no_grad():
            forward(module)
        for loss in reversed(losses):
            loss.backward()
            assert_right(module, expected)
    assert module.stats.misses == 0


@pytest.mark.parametrize("method", [FORWARD, BACKWARD])
def test_an_exception_in_a_call_and_then_a_step(module, expected, method, monkeypatch):
    """The call fails behind its fourth operator, with copies under way."""
    forward(module).backward()
    assert_right(module, expected)
    loss = None if method == FORWARD else forward(module)
    left = [4]
    acquire = module._weights.streamer.acquire  # type: ignore[union-attr]

    def failing(graph, step):
        acquire(graph, step)
        left[0] -= 1
        if not left[0]:
            raise MemoryError("a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(module._weights.streamer, "acquire", failing)
        with pytest.raises((MemoryError, RuntimeError), match="a kernel"):
            forward(module) if loss is None else loss.backward()
    module.zero_grad()
    for _ in range(2):
        forward(module).backward()
        assert_right(module, expected)
    assert module.stats.misses == 0
