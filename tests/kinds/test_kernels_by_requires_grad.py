"""Torch chooses kernels by whether a weight requires grad, under no_grad too: weights keep their flag."""

import copy
import json
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import export
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock import LoadOptions
from penstock.backends.fx import FxBackend
from penstock.integrations import apply
from penstock.passes.lowering.method_code import VERSION, decode_method
from penstock.schedule.facts.errors import PassError, StreamError
from tests.engines import ENGINES
from tests.hunt import nightly_but

# torch's own, of the weights that a recurrent layer has twice
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")


def numbers(*shape):
    torch.manual_seed(sum(shape))
    return torch.randn(*shape)


class Calls(nn.Module):
    """Calls a function on the input and weights of these shapes, of which some may be frozen."""

    def __init__(self, function, *shapes, frozen=()):
        super().__init__()
        self.function, self.weights = (
            function,
            nn.ParameterList(nn.Parameter(numbers(*one)) for one in shapes),
        )
        for k in frozen:
            self.weights[k].requires_grad_(False)

    def forward(self, x):
        return self.function(x, *self.weights)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = kind(96, 96, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Tied(nn.Module):
    """A frozen table tied to a head, between them attention that requires grad; and the other way round."""

    def __init__(self, frozen):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
        self.head.weight, self.attention = self.table.weight, nn.MultiheadAttention(64, 4, batch_first=True)
        (self.table if frozen == "table" else self.attention).requires_grad_(False)

    def forward(self, x):
        tokens = (x[..., 0] * 96).long() % 96
        x = self.table(tokens)
        return self.head(self.attention(x, x * 1, x)[0].transpose(1, 2).contiguous().transpose(1, 2))


class Viewed(nn.Module):
    """Products with views of one parameter and of a buffer that requires grad."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Parameter(numbers(192, 64))
        self.register_buffer("table", numbers(64, 96).requires_grad_())

    def forward(self, x):
        query, key, value = self.packed.chunk(3)
        mixed = functional.linear(x.transpose(1, 2), query) @ key.t()
        return torch.matmul(functional.linear(mixed.transpose(0, 1), value).transpose(0, 1), self.table)


def attention(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(64, 4, batch_first=True, **options)


WIDE, TURNED = (numbers(3, 5, 96),), (numbers(2, 64, 7),)
MODELS = {
    "MultiheadAttention": (attention, (numbers(2, 5, 64), numbers(2, 7, 64), numbers(2, 7, 64))),
    "MultiheadAttention of other widths": (
        lambda: attention(kdim=32, vdim=48),
        (numbers(2, 5, 64), numbers(2, 7, 32), numbers(2, 7, 48)),
    ),
    "RNN": (lambda: Recurrent(nn.RNN), WIDE),
    "GRU": (lambda: Recurrent(nn.GRU), WIDE),
    "LSTM": (lambda: Recurrent(nn.LSTM), WIDE),
    "linear": (lambda: Calls(lambda x, w, b: functional.linear(x.mT, w, b), (96, 64), (96,)), TURNED),
    "matmul": (lambda: Calls(lambda x, w: torch.matmul(x.mT, w), (64, 96)), TURNED),
    "matmul from the left": (lambda: Calls(lambda x, w: torch.matmul(w, x), (96, 64)), TURNED),
    "of a vector": (lambda: Calls(lambda x, w: torch.matmul(x.mT, w), (64,)), TURNED),
    "bmm": (lambda: Calls(torch.bmm, (2, 7, 9)), TURNED),
    "einsum": (lambda: Calls(lambda x, w: torch.einsum("bij,ik->bjk", x, w), (64, 96)), TURNED),
    "addmm": (lambda: Calls(lambda x, w, b: torch.addmm(b, x[0].t(), w), (64, 96), (96,)), TURNED),
    "partly frozen": (
        lambda: Calls(
            lambda x, w, v: functional.linear(functional.linear(x.mT, w).transpose(0, 1), v),
            (96, 64),
            (64, 96),
            frozen=(0,),
        ),
        TURNED,
    ),
    "views, a buffer": (Viewed, TURNED),
    "a frozen table tied to a head": (lambda: Tied("table"), (numbers(2, 6, 64).abs(),)),
    "a table tied to a head": (lambda: Tied("attention"), (numbers(2, 6, 64).abs(),)),
}
DIFFER = ("MultiheadAttention", "linear", "RNN")
"""Models whose bits are others when all weights are frozen, at these sizes."""


def result(model, given):
    with torch.no_grad():
        output = model(*given)
    return output[0] if isinstance(output, tuple) else output


def budget(program, device="cpu"):
    return max(program.floor(), program.floor(device), program.weight_bytes // 2)


@pytest.mark.parametrize("name", DIFFER)
def test_the_flag_matters(name):
    make, given = MODELS[name]
    model = make().eval()
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert not torch.equal(result(model, given), result(frozen, given))


CASES = [(name, how) for name in MODELS for how in (*ENGINES, "sim")]
SAMPLE = [("linear", how) for how in (*ENGINES, "sim")] + [(name, ENGINES[-1]) for name in MODELS]


@pytest.mark.parametrize(("name", "how"), nightly_but(SAMPLE, CASES))
def test_a_streamed_module_has_the_bits_of_the_module(tmp_path, name, how):
    make, given = MODELS[name]
    model = make().eval()
    expected = result(model, given)
    program = penstock.compile(export(model, given), tmp_path / "m.penstock")
    device, engine = ("sim", "auto") if how == "sim" else ("cpu", how)
    given_budget, options = budget(program, device), LoadOptions(engine=engine)
    with penstock.open(program.path).load(given_budget, device=device, options=options) as streamed:
        assert torch.equal(result(streamed, given), expected)
        with torch.inference_mode():
            assert torch.equal(result(streamed, given), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(result(streamed, given), result(model, given))
        with torch.enable_grad():  # the promise is that of the call under no_grad
            output = streamed(*given)
        assert torch.equal(output[0] if isinstance(output, tuple) else output, expected)
        assert streamed.stats.misses == 0


@pytest.mark.parametrize("name", DIFFER)
def test_frozen_weights_stay_frozen(tmp_path, name):
    make, given = MODELS[name]
    model = make().eval().requires_grad_(False)
    with penstock.compile(export(model, given), tmp_path / "m.penstock").load("100%") as streamed:
        assert torch.equal(result(streamed, given), result(model, given))


@pytest.mark.parametrize("name", [*DIFFER, "partly frozen"])
def test_values_from_files_keep_the_flag_of_the_program(tmp_path, name):
    make, given = MODELS[name]
    model = make().eval()
    expected = result(model, given)
    save_file({fqn: value.detach() for fqn, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    exported = penstock.fake_export(make, given)
    places = {"packed": True, "placed": False}
    for folder, pack in places.items():
        program = penstock.compile(
            exported, tmp_path / f"{folder}.penstock", weights=tmp_path / "w.safetensors", pack=pack
        )
        with program.load(budget(program)) as streamed:
            assert torch.equal(result(streamed, given), expected), folder
    bound = penstock.bind(exported, tmp_path / "w.safetensors")
    assert torch.equal(result(bound.module(), given), expected)
    with penstock.compile(bound, tmp_path / "bound.penstock").load("100%") as streamed:
        assert torch.equal(result(streamed, given), expected)


@pytest.mark.parametrize("name", nightly_but(["linear"], DIFFER))
def test_apply_keeps_the_flag_in_every_process(tmp_path, name):
    make, given = MODELS[name]
    for frozen in (False, True, False):  # the last one is found in the cache
        model = make().eval().requires_grad_(not frozen)
        expected = result(model, given)
        with apply(model, "4MB", cache=tmp_path):
            assert torch.equal(result(model, given), expected)


@pytest.fixture(scope="module")
def bits_of_inductor(compiler):
    """What Inductor computes of the linear module in memory; frozen, it computes others."""
    make, given = MODELS["linear"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, frozen = (
            result(torch.compile(model), given)
            for model in (make().eval(), make().eval().requires_grad_(False))
        )
        torch._dynamo.reset()
    assert not torch.equal(found, frozen)
    return found


def test_compiled_code_has_the_bits_of_the_modules_own(tmp_path, bits_of_inductor):
    make, given = MODELS["linear"]
    program = penstock.compile(
        export(make().eval(), given), tmp_path / "m.penstock", lowering="inductor", resident_below="1KiB"
    )
    with program.load("100%") as streamed:
        assert torch.equal(result(streamed, given), bits_of_inductor)


def test_an_offloaded_module_has_the_bits_of_torch_compile(tmp_path, bits_of_inductor):
    make, given = MODELS["linear"]
    model = make().eval()
    save_file({fqn: value.detach() for fqn, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    record = penstock.offload(model, tmp_path / "w.safetensors")
    assert all(value.requires_grad for value in model.parameters())
    options = {"budget": "100%", "resident_below": "1KiB"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="penstock", options=options)
        assert torch.equal(result(compiled, given), bits_of_inductor)
        with torch.enable_grad():
            output = compiled(*given)
    assert torch.equal(output, bits_of_inductor)
    assert not output.requires_grad
    record.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["MultiheadAttention", "linear", "views, a buffer"])
def test_a_graph_of_another_compiler_keeps_the_flag(tmp_path, name):
    make, given = MODELS[name]
    model, backend = make().eval(), FxBackend(tmp_path)
    lowered = backend.lower(backend.annotate(export(model, given))["forward"])
    key, payload = backend.payload()
    (tmp_path / key).write_bytes(payload)
    with backend.load((key, payload), "100%") as weights:
        run = weights.bind(lowered)
        assert torch.equal(run(*given)[0], result(model, given))
        assert torch.equal(
            torch.compile(lambda *given: run(*given)[0] * 1, backend="aot_eager")(*given), run(*given)[0]
        )
        for refused in (
            lambda: torch.jit.trace(run, given),
            lambda: torch.vmap(run)(*(x[None] for x in given)),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(StreamError, match="streamed module"):
                    refused()
    torch._dynamo.reset()


def test_evaluation_of_what_is_trained_keeps_the_flag(tmp_path):
    """Frozen by a pattern, and not by the flag, as a model comes before adapters are put into it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.head = attention(), nn.Linear(64, 8)

        def forward(self, x):
            return self.head(self.attention(x.mT, x.mT, x.mT, need_weights=False)[0])

    model, (x,) = Model(), TURNED
    program = penstock.compile_training(model, tmp_path / "t.penstock", trainable=["head.*"], example=(x,))
    with program.load("100%") as module:
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(result(module, (x,)), result(model, (x,)))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        module(x).sum().backward()
        assert all(value.grad is not None for value in module.parameters())


def test_an_input_that_requires_grad_is_refused_as_ever(tmp_path):
    make, given = MODELS["linear"]
    program = penstock.compile(export(make().eval(), given), tmp_path / "m.penstock")
    with program.load("100%") as streamed:
        with pytest.raises(StreamError, match=r"requires grad and grad mode is on"):
            streamed(given[0].clone().requires_grad_())
        assert not streamed(*given).requires_grad


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and tuple(args[0].shape) == self.shape
        return function(*args, **(kwargs or {}))


def test_autocast_keeps_no_casts_of_streamed_weights(tmp_path):
    """It would keep one of each weight that requires grad until its context ends, beyond any budget."""
    make, given = MODELS["linear"]
    program = penstock.compile(export(make().eval(), given), tmp_path / "m.penstock")
    with program.load("100%") as streamed, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with Casts((96, 64)) as casts:
                streamed(*given)
            assert casts.count == 1
        assert torch.is_autocast_cache_enabled()


def test_a_stored_method_says_which_weights_require_grad(tmp_path):
    make, given = MODELS["partly frozen"]
    program = penstock.compile(export(make().eval(), given), tmp_path / "m.penstock")
    with zipfile.ZipFile(program.path / "program.zip") as archive:
        stored = json.loads(archive.read("forward.json"))
    assert stored["version"] == VERSION == 5
    assert {fqn: grad for _, fqn, *_, grad in stored["weights"]} == {"weights.0": False, "weights.1": True}
    assert decode_method(json.dumps(stored).encode()).with_grad == {"weights.1"}
    for row, wrong in ((2, "int64"), (2, "nothing"), (5, 1), (5, "True"), (5, None)):
        stored["weights"][1][row] = wrong
        with pytest.raises(PassError):
            decode_method(json.dumps(stored).encode())
        stored["weights"][1][2], stored["weights"][1][5] = "float32", True
