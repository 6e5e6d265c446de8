"""Modules stream to simulated devices through `apply` and `load`: bits, memory, restored values, refusals."""

import pytest
import torch
from torch import nn

from penstock.integrations import apply, load
from penstock.schedule.facts.errors import BudgetError, PlanError, StreamError
from tests.hunt import nightly_but
from tests.integrations import models
from tests.integrations.called import odd_modules
from tests.integrations.called.odd_modules import Blocks, Convolving, Experts, KeepsView, Recurrent, Writes
from tests.integrations.called.within import tokens

IDS = torch.tensor([[5, 17, 99, 23, 42]])


class Tied(nn.Module):
    """Its head is the table, which its own forward reads too."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(500, odd_modules.WIDTH), Blocks()
        self.head = nn.Linear(odd_modules.WIDTH, 500, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.blocks(self.table(x))) + self.table.weight.sum()


class Strided(nn.Module):
    """Its layers read their weights from where these begin, by their offset in memory."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(odd_modules.WIDTH, odd_modules.WIDTH) / 8)

        def forward(self, x):
            return x @ self.weight.as_strided(self.weight.shape, (1, odd_modules.WIDTH), 0)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(20))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def generated(model):
    return [model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)]


CASES = {
    "llama": (models.llama, generated),
    "bart": (models.bart, generated),
    "unet": (Convolving, lambda model: [model(torch.ones(n, 8, 16, 16)) for n in (1, 1, 2, 1)]),
    "lstm": (Recurrent, lambda model: [model(odd_modules.inputs(n)) for n in (1, 1, 2, 1)]),
    "tied": (Tied, lambda model: [model(tokens(1, n, most=500)) for n in (4, 4, 9, 4)]),
    "strided": (Strided, lambda model: [model(odd_modules.inputs(n)) for n in (1, 1, 2, 1)]),
    "experts": (Experts, lambda model: [model(odd_modules.inputs(n)) for n in (1, 1, 2, 1)]),
    "viewed": (KeepsView, lambda model: [model(odd_modules.inputs(n)) for n in (1, 1, 2, 1)]),
    "written": (Writes, lambda model: [model(odd_modules.inputs(n)) for n in (1, 1, 2, 1)]),
}


def made(kind):
    torch.manual_seed(0)
    return models.frozen(kind())


def nbytes(model):
    return sum(one.nbytes for one in model.parameters())


def same(first, second):
    return all(torch.equal(*both) for both in zip(first, second, strict=True))


@pytest.mark.parametrize("name", nightly_but(["llama", "tied", "viewed", "written"], CASES))
def test_results_are_those_of_the_module_at_the_floor_in_the_middle_and_with_all(name, tmp_path):
    """Bytes that have left memory are overwritten on every simulated device."""
    kind, run = CASES[name]
    reference = made(kind)
    expected, state = run(reference), reference.state_dict().values()

    def runs(memory):
        model = made(kind)
        before = dict(model.named_parameters())
        least = memory
        try:
            with apply(model, memory, device="sim:t4", cache=tmp_path):
                assert same(run(model), expected)
            assert same(model.state_dict().values(), state)
        except BudgetError as error:
            least = error.floor_bytes
        assert all(one is before[fqn] for fqn, one in model.named_parameters())
        return least

    memory, least = 0, nbytes(reference) // 16
    while memory < least:
        memory, least = least, runs(least)
    assert memory == least
    for memory in (nbytes(reference) * 2 // 3 + (1 << 16), 2 * nbytes(reference) + (1 << 20)):
        assert runs(memory) == memory


def test_a_table_is_read_whole_as_no_device_waits_for_rows(tmp_path):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(9000, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.out(self.table(x))

    model, reference = made(Table), made(Table)
    with apply(model, "3MB", device="sim:t4", cache=tmp_path) as applied:
        for seed in range(3):
            ids = tokens(1, 8, most=9000, seed=seed)
            assert torch.equal(model(ids), reference(ids))
        assert {one.how for one in applied.residency["Table"]} <= {"streams", "stays"}
    with (
        apply(made(Table), "1MB", device="sim:t4", cache=tmp_path) as applied,
        pytest.raises(BudgetError, match="table reads"),
    ):
        applied.target(ids)


def test_quantised_weights_stream_in_their_parts(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def quantised():
        model = made(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))))
        quantize_(model, Int8WeightOnlyConfig())
        return model

    model, reference, x = quantised(), quantised(), torch.randn(3, 128)
    with apply(model, "140KB", device="sim:t4", cache=tmp_path) as applied:
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
        (component,) = applied.components.values()
        assert component.stats.bytes_moved > 0
    assert torch.equal(model(x), reference(x))


def test_a_new_order_misses_and_is_planned_then(tmp_path):
    class InTurn(Blocks):
        def forward(self, x, turns):
            for turn in turns:
                x = self.blocks[turn](x)
            return self.head(x)

    model, reference, x = made(InTurn), made(InTurn), odd_modules.inputs()
    turns = [(0, 1, 2, 3), (3, 1, 0), (2, 2, 1, 0, 3), (0, 1, 2, 3), (3, 1, 0), (1,), (3, 2, 1, 0), (0, 3)]
    with apply(model, nbytes(model) * 2 // 3, device="sim:t4", cache=tmp_path) as applied:
        (component,) = applied.components.values()
        missed = []
        for one in (*turns, turns[0], turns[0]):
            assert torch.equal(model(x, one), reference(x, one))
            missed.append(component.stats.misses if component.stats else 0)
        assert max(missed) > 0
        assert missed[-1] == missed[-2]


def test_a_folder_is_loaded_for_a_device(tmp_path):
    reference = models.llama()
    reference.save_pretrained(tmp_path / "saved")
    with load(tmp_path / "saved", "300KB", device="sim:t4", cache=tmp_path / "cache") as model:
        assert same(generated(model), generated(reference))
        (component,) = model.penstock_applied.components.values()
        assert component.stats.bytes_moved > 0
        assert "sim:t4" in repr(model.penstock_applied)


def test_what_is_generated_on_a_gpu_is_what_its_library_generates_there(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here: `make gpu` runs this where there is one")
    model, ids = models.llama().to("cuda"), IDS.to("cuda")
    reference = models.twin(model)
    with apply(model, "300KB", device="cuda", cache=tmp_path) as applied:
        assert {p.device for p in model.parameters()} == {p.device for p in reference.parameters()}
        got = model.generate(ids, max_new_tokens=4, do_sample=False)
        stats = applied.components["LlamaForCausalLM"].stats
        assert stats.bytes_moved > 0
        assert stats.peak_bytes <= stats.budget < 300_000
    assert torch.equal(got, reference.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(
    ("device", "error", "sentence"),
    [("sim:t44", PlanError, "t4"), ("gpu", StreamError, "no device 'gpu'"), ("xpu", StreamError, "xpu")],
)
def test_a_device_that_is_not_here_is_refused_and_the_model_is_as_it_was(device, error, sentence, tmp_path):
    model, reference = made(Blocks), made(Blocks)
    with pytest.raises(error, match=sentence):
        apply(model, "1MB", device=device, cache=tmp_path)
    assert torch.equal(model(odd_modules.inputs()), reference(odd_modules.inputs()))
