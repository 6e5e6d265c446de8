"""What a user gives penstock stays as it was: after a call, after a refusal, and after Ctrl-C in between."""

import random
import warnings
from contextlib import suppress

import numpy
import pytest
import torch
from torch import nn

import penstock
from penstock.backends.fx import FxBackend
from penstock.backends.onnx import write_onnx
from penstock.models.doctor import examine
from penstock.models.preflight import read_model
from penstock.passes.building.deferred import deferred_init

X = torch.ones(2, 8)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.memo = {}
        self.log = [{}]
        self.kept = None
        self.register_buffer("lazy", None)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        if self.kept is None:
            places = torch.arange(8, device=x.device)
            self.kept, self.lazy = places / 7, places / 3
            self.memo["kept"] = places / 9
        return self.layer(self.norm(x)) + self.kept + self.lazy + self.memo["kept"]


class Model(nn.Module):
    """`ends` is what a call ends with, behind all that it changes: nothing, or an error."""

    def __init__(self, ends=None):
        super().__init__()
        self.inner, self.head, self.ends = Inner(), nn.Linear(8, 8), ends
        self.own = torch.ones(8)  # a tensor that is no buffer

    def forward(self, x):
        y = self.head(self.inner(x)) + self.own
        if self.ends is not None:
            self.inner.log.append(y)
            self.inner.count = self.inner.count + 1
            self.inner.training = not self.inner.training
            raise self.ends
        return y.square().mean()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle."""


def picture(value, seen=None):
    """All that a module holds: the objects, the values of tensors, and what containers and parts hold."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else value.grad.tolist()
        return id(value), type(value), value.requires_grad, value.detach().tolist(), grad
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, dict):
        return id(value), [(key, picture(one, seen)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return id(value), [picture(one, seen) for one in value]
    if isinstance(value, nn.Module):
        return id(value), type(value), picture(vars(value), seen)
    return value if isinstance(value, int | float | str) else id(value)


def of_process():
    """The generators, and hooks that all modules have."""
    hooks = [vars(nn.modules.module)[name] for name in vars(nn.modules.module) if name.startswith("_global_")]
    numbers = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    return numbers, [picture(one) for one in hooks], nn.Module.register_buffer, torch.Tensor.__deepcopy__


def model(ends=None):
    made = Model(ends).train()
    made.inner.layer.requires_grad_(False)
    made.head.weight.grad = torch.ones(8, 8)
    made.head.register_forward_hook(lambda *_: None)
    made.inner.norm.eval()
    return made


def exported_of(made):
    return torch.export.export(made, (X,))


def executorch(made, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExecuTorch's own
        pytest.importorskip("executorch.exir")
        from executorch.exir import to_edge_transform_and_lower

        from penstock.backends.executorch import PenstockPartitioner

        return to_edge_transform_and_lower(exported_of(made), partitioner=[PenstockPartitioner(least=64)])


def onnx(made, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return write_onnx(exported_of(made), folder)


def pipeline(made, folder):
    exported = exported_of(made)
    payload = penstock.annotate(exported)
    mark = penstock.declare(ensures=("probes",))(lambda graph: penstock.insert_probes(graph, payload))
    return penstock.Pipeline((mark,))(exported.graph_module)


MODELS = {}


def given():
    """What `penstock doctor` and `penstock preflight` are told to call: its model is built already."""
    return MODELS["given"], (X,)


def named(take):
    def call(made, folder):
        MODELS["given"] = made
        return take(f"{__name__}:given")

    return call


def bound(made, folder):
    torch.save(made.state_dict(), folder / "w.pt")
    return penstock.bind(exported_of(made), folder / "w.pt")


MODULES = {
    "compile_training": lambda made, folder: penstock.compile_training(
        made, folder / "p", example=(X,), trainable=["head*"]
    ),
    "fake_export": lambda made, folder: penstock.fake_export(lambda: made, (X,)),
    "fake_export of a part": lambda made, folder: penstock.fake_export(lambda: nn.Sequential(made), (X,)),
    "deferred_init": lambda made, folder: deferred_init(lambda: made),
    "doctor": named(examine),
    "preflight": named(read_model),
}

PROGRAMS = {
    "annotate": lambda made, folder: penstock.annotate(exported_of(made)),
    "compile": lambda made, folder: penstock.compile(exported_of(made), folder / "p").load("100%"),
    "bind": bound,
    "fx": lambda made, folder: FxBackend(folder).annotate(exported_of(made)),
    "a pipeline": pipeline,
    "executorch": executorch,
    "onnx": onnx,
    "training of a program": lambda made, folder: penstock.compile_training(
        exported_of(made), folder / "p", trainable=["head*"]
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_as_it_was_after_a_call(name, tmp_path):
    made = model()
    before, process = picture(made), of_process()
    MODULES[name](made, tmp_path)
    assert picture(made) == before
    assert of_process() == process
    made(X).backward()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("ends", [ValueError("no"), KeyboardInterrupt()])
def test_a_module_is_as_it_was_after_an_error_in_its_forward(name, ends, tmp_path):
    made = model(ends)
    before, process = picture(made), of_process()
    try:
        MODULES[name](made, tmp_path)
    except (penstock.PassError, KeyboardInterrupt):
        pass
    else:
        assert name in ("doctor", "deferred_init")  # one reports it, the other calls nothing
    assert picture(made) == before
    assert of_process() == process
    assert not (tmp_path / "p").exists()


def interrupt(monkeypatch, where, calls):
    """Raise Interrupted at the n-th call of a function of torch."""
    owner, name = {
        "a node": (torch.fx.Interpreter, "run_node"),
        "a new node": (torch.fx.Graph, "create_node"),
        "a new graph": (torch.fx.GraphModule, "recompile"),
    }[where]
    known, left = getattr(owner, name), [calls]

    def count(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return known(*args, **kwargs)

    monkeypatch.setattr(owner, name, count)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("where", "calls"), [("a new node", 2), ("a new node", 30), ("a new graph", 1)])
def test_a_module_is_as_it_was_after_an_interrupt(name, where, calls, tmp_path, monkeypatch):
    made = model()
    before, process = picture(made), of_process()
    interrupt(monkeypatch, where, calls)
    with suppress(Interrupted):
        MODULES[name](made, tmp_path)
    monkeypatch.undo()
    assert picture(made) == before
    assert of_process() == process


@pytest.mark.parametrize("calls", [None, 0, 5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_module_whose_program_is_given_is_as_it_was(name, calls, tmp_path, monkeypatch):
    made = model()
    made(X)  # makes what its first call makes, which torch.export would leave here as fakes
    exported = exported_of(made)
    before, process = picture(made), of_process()
    monkeypatch.setitem(globals(), "exported_of", lambda _: exported)
    if calls is not None:
        interrupt(monkeypatch, "a node", calls)
    with suppress(Interrupted):
        PROGRAMS[name](made, tmp_path)
    monkeypatch.undo()
    assert picture(made) == before
    assert of_process() == process


@pytest.mark.parametrize("ends", ["a refusal", "an interrupt"])
def test_a_module_that_could_not_be_offloaded_is_as_it_was(ends, tmp_path, monkeypatch):
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTM(8, 8)).requires_grad_(False)
    state = made.state_dict() if ends == "an interrupt" else {"0.weight": torch.ones(8, 8)}
    torch.save(state, tmp_path / "w.pt")
    from safetensors.torch import save_file

    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "w.safetensors")
    before, process = picture(made), of_process()
    calls = iter([None])

    def stop(*_):
        if next(calls, Interrupted) is Interrupted:
            raise Interrupted

    if ends == "an interrupt":
        monkeypatch.setattr("penstock.runtime.dynamo.backend._refuse_eager", stop)
    with pytest.raises((Interrupted, penstock.PenstockError)):
        penstock.offload(made, tmp_path / "w.safetensors")
    assert picture(made) == before
    assert of_process() == process
    made(torch.ones(2, 8))
