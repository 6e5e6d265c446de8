"""Programs that transform functions run with equal bits, and torch is as it was whatever is refused."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch._C import _functorch
from torch._functorch import predispatch
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import penstock
from penstock.backends.fx import lower

# torch's own, when it first differentiates forwards.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


class Model(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.several = nn.Parameter(torch.randn(3, 8, 8))
        self.register_buffer("sum", torch.zeros(4, 8))

    def forward(self, x):
        return self.compute(self, x)


def jvp(model, x):
    value, tangent = torch.func.jvp(lambda v: torch.sin(model.layer(v)) @ model.weight, (x,), (x.cos(),))
    return value + tangent


def flex(model, x):
    query, key = model.layer(x).reshape(1, 2, 4, 4), (x @ model.weight).reshape(1, 2, 4, 4)
    score = lambda score, *_: score * 2  # noqa: E731
    return flex_attention(query, key, query, score_mod=score)


def masked(model, x):
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 4, 4, device="cpu")
    query = model.layer(x).reshape(1, 2, 4, 4)
    return flex_attention(query, query, query, block_mask=mask)


def scan(model, x):
    return associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]),
        (model.layer(x), x @ model.weight),
        0,
        combine_mode="generic",
    )


def without_grad(model, x):
    with torch.no_grad():
        return torch.vmap(lambda row: torch.tanh(row @ model.weight))(model.layer(x))


def writes(model, x):
    model.sum.add_(torch.vmap(lambda row: row @ model.weight)(x))
    return model.sum * 2


COMPUTE = {
    "vmap": lambda model, x: torch.vmap(lambda row: row @ model.weight)(model.layer(x)),
    "vmap within vmap": lambda model, x: torch.vmap(torch.vmap(lambda v: v * 2 + 1))(x @ model.weight),
    "vmap over weights": lambda model, x: torch.vmap(lambda w: torch.softmax(x @ w, -1))(model.several),
    "vmap of a layer": lambda model, x: torch.vmap(model.layer)(x) + torch.vmap(torch.cos)(x),
    "vmap with random numbers": lambda model, x: torch.vmap(
        lambda row: nn.functional.dropout(row @ model.weight, 0.5, True), randomness="different"
    )(x),
    "vmap with a result that is an input": lambda model, x: torch.vmap(lambda row: (row, row * 2))(
        model.layer(x)
    ),
    "vmap without gradients": without_grad,
    "vmap, and a state": writes,
    "jvp": jvp,
    "flex_attention": flex,
    "flex_attention with a mask": masked,
    "associative_scan": scan,
}


def equal(one, other):
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def state():
    return {
        "depth": _functorch.get_dynamic_layer_stack_depth(),
        "modes": (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "torch": torch.get_rng_state().tolist(),
        "Python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
    }


def assert_torch_works():
    assert torch.randn(3).shape == (3,)
    assert torch.vmap(lambda v: v * 2)(torch.ones(3)).tolist() == [2, 2, 2]
    assert torch.func.jvp(lambda v: v * 3, (torch.ones(1),), (torch.ones(1),))[1].tolist() == [3]
    assert torch.func.grad(lambda v: v * v)(torch.ones(())).item() == 2


@pytest.mark.parametrize("name", COMPUTE)
def test_programs_that_transform_functions_run(name, tmp_path):
    model = Model(COMPUTE[name]).eval().requires_grad_(False)
    x = torch.randn(4, 8)
    exported = torch.export.export(model, (x,))
    before = state()
    program = penstock.compile(exported, tmp_path / "p")
    assert state() == before
    with torch.no_grad(), program.load("100%") as streamed:
        for given in (x, torch.randn(4, 8)):
            torch.manual_seed(0)
            got = streamed(given)
            torch.manual_seed(0)
            assert equal(got, model(given))
    assert_torch_works()


def test_one_of_another_size_runs(tmp_path):
    model, x = Model(COMPUTE["vmap"]).eval(), torch.randn(4, 8)
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    with torch.no_grad(), penstock.compile(exported, tmp_path / "p").load("100%") as streamed:
        for given in (x, torch.randn(7, 8)):
            assert equal(streamed(given), model(given))


def test_one_whose_weights_stream_runs(tmp_path):
    model, x = Model(COMPUTE["vmap"]).eval(), torch.randn(4, 8)
    program = penstock.compile(torch.export.export(model, (x,)), tmp_path / "p")
    assert {storage.kind for storage in program.payload.storages if storage.nbytes == 256} == {"streamable"}
    assert sum(len(trace.steps) for trace in program.payload.traces) > 0


class Listener:
    def acquire(self, graph, step): ...

    def release(self, graph, step): ...


@pytest.mark.parametrize("name", ["vmap", "vmap without gradients", "jvp", "flex_attention"])
def test_the_graph_of_one_gets_probes(name):
    model, x = Model(COMPUTE[name]).eval().requires_grad_(False), torch.randn(4, 8)
    exported = torch.export.export(model, (x,))
    payload = penstock.annotate(exported)
    lowered, again = lower(exported.graph_module, payload)
    assert [trace.steps for trace in again.traces] == [trace.steps for trace in payload.traces]
    values = (*exported.state_dict.values(), x)
    for probed in (penstock.insert_probes(exported.graph_module, payload), lowered):
        with torch.no_grad(), penstock.streaming(Listener()):
            assert equal(probed(*values), model(x))


def test_one_is_trained(tmp_path):
    compute = lambda model, x: torch.vmap(lambda row: row @ model.weight)(model.layer(x)).mean()  # noqa: E731
    model, x = Model(compute), torch.randn(4, 8)
    program = penstock.compile_training(model, tmp_path / "p", example=(x,), trainable=["layer*"])
    with program.load("100%") as trained:
        loss = trained(x)
        loss.backward()
        expected = model(x)
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(dict(trained.named_parameters())["layer.weight"].grad, model.layer.weight.grad)


@pytest.mark.parametrize("name", ["vmap", "jvp", "flex_attention", "associative_scan"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_torch_is_as_it_was_after_an_error_in_between(name, kind, monkeypatch):
    x = torch.randn(4, 8)
    exported = torch.export.export(Model(COMPUTE[name]).eval().requires_grad_(False), (x,))
    run = torch.fx.Interpreter.run_node

    def fail(self, n):
        result = run(self, n)
        if str(n.target).endswith(("mul.Tensor", "matmul.default")) or n.name.startswith("_unpack_dual"):
            torch.set_default_dtype(torch.float64)
            random.random()
            raise kind("in between")
        return result

    before = state()
    monkeypatch.setattr(torch.fx.Interpreter, "run_node", fail)
    with pytest.raises((penstock.PassError, kind)):
        penstock.annotate(exported)
    monkeypatch.undo()
    assert state() == before
    assert_torch_works()


def test_a_transform_that_export_breaks_is_refused_by_name():
    branch = lambda model, x: torch.cond(  # noqa: E731
        x.sum() > 0, torch.vmap(lambda row: row @ model.weight), lambda v: v @ model.weight, (x,)
    )
    exported = torch.export.export(Model(branch), (torch.randn(4, 8),))
    with pytest.raises(penstock.PassError, match=r"_add_batch_dim.* inside of torch\.func\.grad, or of vmap"):
        penstock.annotate(exported)
    assert_torch_works()


class FunctionMode(torch.overrides.TorchFunctionMode):
    pass


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def leave_everything():
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch._C._set_grad_enabled(False)
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    FunctionMode().__enter__()
    DispatchMode().__enter__()
    predispatch._vmap_increment_nesting(2, "error")
    predispatch._jvp_increment_nesting()
    predispatch._enter_dual_level()
    raise KeyboardInterrupt


def test_everything_that_a_run_may_leave_is_taken_back():
    from penstock.passes.graph.torch_state import kept_torch_state

    before = state()
    with pytest.raises(KeyboardInterrupt):
        kept_torch_state()(leave_everything)()
    assert state() == before
    assert_torch_works()


def leave_a_level(model, x):
    torch.set_default_dtype(torch.float64)
    predispatch._vmap_increment_nesting(2, "error")
    raise ValueError("in the middle")


@pytest.mark.parametrize("entry", ["compile_training", "fake_export"])
def test_a_model_that_leaves_something_does_not(entry, tmp_path):
    model, example = Model(leave_a_level), (torch.ones(4, 8),)
    before = state()
    export = {
        "fake_export": lambda: penstock.fake_export(lambda: model, example),
        "compile_training": lambda: penstock.compile_training(
            model, tmp_path / "p", example=example, trainable=["*"]
        ),
    }
    with pytest.raises(penstock.PassError, match="in the middle"):
        export[entry]()
    assert state() == before
    assert_torch_works()
