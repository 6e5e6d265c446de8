"""onnxruntime over memory that penstock fills (penstock.backends.onnx): onnxruntime's own bits."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from examples.onnxruntime_host import Encoder
from penstock import LoadOptions
from penstock.backends import onnx as backend
from penstock.backends.onnx import StreamedModel, cut, plain_options, write_onnx
from penstock.schedule.facts.errors import BudgetError, PassError, PayloadError

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's exporter of itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TOKENS = torch.arange(16).reshape(1, 16) * 7


def export(model, example, folder, **options):
    write_onnx(torch.export.export(model, example), folder, **options)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("container")
    export(Encoder().eval(), (TOKENS,), folder)
    return folder


def alone(folder, *inputs):
    """What onnxruntime gives without penstock, from the same files."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", plain_options())
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, (one.numpy() for one in inputs), strict=True)))


@pytest.mark.parametrize(("budget", "arena"), [("25%", "contiguous"), ("60%", "paged")])
def test_the_bits_are_those_of_onnxruntime_alone(container, budget, arena):
    others = TOKENS.flip(1).contiguous()
    expected = {one: alone(container, one)[0] for one in (TOKENS, others)}
    with StreamedModel(container, budget, options=LoadOptions(arena=arena)) as model:
        for tokens in (TOKENS, others, TOKENS):
            (output,) = model(tokens.numpy())
            assert output.tobytes() == expected[tokens].tobytes()
        stats, plan = model.weights.stats, model.weights.plan
        assert len(model.sessions) == len(plan.traces[0].steps) == 10
        assert stats.misses == 0
        assert stats.bytes_moved >= 3 * plan.streamed_bytes > 0
        assert stats.peak_bytes <= plan.budget


def test_onnxruntime_rounds_otherwise_than_torch(container):
    torch.manual_seed(0)
    expected = Encoder().eval()(TOKENS).detach().numpy()
    np.testing.assert_allclose(alone(container, TOKENS)[0], expected, rtol=1e-3, atol=1e-4)


def test_the_weights_lie_in_one_file_which_the_model_refers_to(container):
    assert sorted(one.name for one in container.iterdir()) == [
        "model.onnx",
        "payload.json",
        "weights.safetensors",
    ]
    model = onnx.load(container / "model.onnx", load_external_data=False)
    assert (container / "model.onnx").stat().st_size < 200_000
    large = [one for one in model.graph.initializer if not one.raw_data]
    assert len(large) == len(model.graph.initializer)
    for one in large:
        assert {entry.value for entry in one.external_data if entry.key == "location"} == {
            "weights.safetensors"
        }


def test_buffers_are_weights_too(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
            self.register_buffer("scale", torch.full((256,), 0.5))

        def forward(self, x):
            return self.down(torch.tanh(self.up(x * self.scale)))

    x = torch.randn(3, 256)
    export(Scaled().eval(), (x,), tmp_path)
    with StreamedModel(tmp_path, "80%", options=LoadOptions(arena="contiguous")) as model:
        for _ in range(2):
            assert model(x.numpy())[0].tobytes() == alone(tmp_path, x)[0].tobytes()


def test_what_onnx_optimises_has_lost_its_names(tmp_path):
    with pytest.raises(
        PassError, match=r"no step reads the weight 'blocks\.0\..*have weights keep their names"
    ):
        export(Encoder().eval(), (TOKENS,), tmp_path, optimize=True)


def test_a_payload_of_another_model_and_a_budget_below_the_floor_are_refused(container, tmp_path):
    export(Encoder(depth=1).eval(), (TOKENS,), tmp_path)
    (tmp_path / "payload.json").write_bytes((container / "payload.json").read_bytes())
    with pytest.raises(PayloadError, match="this payload is of another model"):
        StreamedModel(tmp_path, "50%")
    with pytest.raises(BudgetError, match="below the floor"):
        StreamedModel(container, "64KiB")


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


class Transposed(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=dtype).t())

    def forward(self, x):
        return x @ self.weight.float()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.a, self.b, (x,))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Written(), "the program writes the buffer 'calls', and a session has no state"),
        (Transposed(), r"'weight' is float32 with strides \[1, 4\], which onnxruntime cannot read"),
        (nn.Linear(4, 4, dtype=torch.bfloat16), "'weight' is bfloat16"),
        (Branch(), "the model has control flow"),
    ],
)
def test_what_onnxruntime_could_not_read_is_refused(tmp_path, model, message):
    dtype = next(iter(model.state_dict().values())).dtype if isinstance(model, nn.Linear) else torch.float32
    with pytest.raises(PassError, match=message):
        export(model.eval(), (torch.ones(4, 4, dtype=dtype),), tmp_path)
    assert not (tmp_path / "model.onnx").exists()


def test_pieces_that_are_not_the_payloads_steps_are_refused(container, monkeypatch):
    monkeypatch.setattr(backend, "LARGE", 1 << 20)
    with pytest.raises(PayloadError, match="pieces do not read what the payload's 10 steps hold"):
        StreamedModel(container, "50%")


def test_a_model_without_a_payload_is_refused(container, tmp_path):
    model = onnx.load(container / "model.onnx", load_external_data=False)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(PayloadError, match="names no payload: write it with write_onnx"):
        StreamedModel(tmp_path, "50%")


def test_pieces_begin_at_further_large_reads():
    reads = [["x"], ["a"], ["y", "small"], ["b", "a"], ["z"], ["c"]]
    assert cut(reads, {"a", "b", "c"}) == [slice(0, 3), slice(3, 5), slice(5, 6)]
