"""Mixtures and large tables, quantised too: calls read what tokens ask for, with the library's bits."""

import copy
import itertools

import pytest
import torch
from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, quantize_

from penstock.integrations import apply, load
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.sparse import pool
from tests.hunt import sampled
from tests.integrations import expert_models, models
from tests.integrations.models import frozen
from tests.integrations.test_quantised_models import called_at_the_floor

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.tensor([[5, 17, 99, 3, 400, 77, 12, 40]])
DTYPES = (torch.bfloat16, torch.float32)
CASES = list(itertools.product(expert_models.FAMILIES, DTYPES, ("apply", "load")))

WHOLE = ("llama4",)
"""Families whose experts are all read, by each token."""

COPIES = ("olmoe_that_gathers",)
"""Families of which a call takes more memory than their experts have."""


def outputs(model):
    """What a model says behind a prompt, greedily, and behind one that asks for all of its experts."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    said = model.generate(IDS, max_new_tokens=4, **options)
    more = model.generate(IDS.repeat(1, 4), max_new_tokens=1, **options)
    return [said.sequences, *said.logits, *more.logits]


def same(got, want):
    return len(got) == len(want) and all(torch.equal(*pair) for pair in zip(got, want, strict=True))


class Runs:
    """A model under caps, by `apply` or by `load` from a folder, and what the library's own computes."""

    def __init__(self, family, dtype, way, folder):
        self.model = expert_models.FAMILIES[family](dtype)
        self.tables = expert_models.table_bytes(self.model)
        self.nbytes = sum(value.nbytes for value in self.model.parameters())
        self._way, self._folder, self._dtype = way, folder, dtype
        if way == "load":
            self.model.save_pretrained(folder / "model")
            own = models.frozen(type(self.model).from_pretrained(folder / "model", dtype=dtype))
        else:
            own = models.twin(self.model)
        self.expected = outputs(own)

    def within(self, memory):
        """The model under a cap, and what applied it."""
        options = {"cache": self._folder / "cache"}
        if self._way == "load":
            model = load(self._folder / "model", memory, dtype=self._dtype, **options)
            return model, model.penstock_applied
        return self.model, apply(self.model, memory, **options)

    def least(self):
        """About the least memory that the model streams in."""
        memory = 64_000
        while True:
            model, applied = self.within(memory)
            try:
                for _ in range(2):
                    outputs(model)
                (component,) = applied.components.values()
                if component.stats is not None:
                    return memory
                more = memory + memory // 8  # it ran one module at a time
            except BudgetError as error:
                more = error.floor_bytes
            finally:
                applied.restore() if self._way == "apply" else applied.close()
            assert more > memory
            memory = more

    def bytes_of_last_token(self, model, component):
        """Bytes that are read for the last token of several."""
        moved = []
        hook = model.register_forward_hook(lambda *_: moved.append(component.stats.bytes_moved))
        model.generate(IDS, max_new_tokens=4, do_sample=False)
        hook.remove()
        return moved[-1] - moved[-2]


@pytest.mark.random
@pytest.mark.parametrize(("family", "dtype", "way"), sampled(CASES, 18))
def test_a_family_has_its_bits_in_little_memory_and_reads_what_its_tokens_ask_for(
    family, dtype, way, tmp_path, monkeypatch
):
    if family == "gpt_oss":  # so that biases, too, are read by units
        monkeypatch.setattr(pool, "LEAST", 8 << 10)
    runs = Runs(family, dtype, way, tmp_path)
    least = runs.least()
    whole = family in WHOLE
    assert whole or family in COPIES or least < runs.tables
    for memory in (least, least + runs.tables // 2, 2 * least + 2 * runs.nbytes):
        model, applied = runs.within(memory)
        (component,) = applied.components.values()
        for _ in range(2):
            assert same(outputs(model), runs.expected)
        assert component.stats.peak_bytes <= component.stats.budget
        if memory == least:
            assert ("a pool of" in component.plan.residency) != whole
            read = runs.bytes_of_last_token(model, component)
            assert whole or read <= runs.nbytes - runs.tables + runs.tables // 3
        applied.restore() if way == "apply" else applied.close()


def test_experts_that_values_choose_one_after_another_are_read_by_units(tmp_path):
    model = expert_models.olmoe(torch.bfloat16, experts_implementation="eager")
    expected = outputs(copy.deepcopy(model))
    with apply(model, expert_models.table_bytes(model) * 2 // 3, cache=tmp_path) as applied:
        for _ in range(2):
            assert same(outputs(model), expected)
        (component,) = applied.components.values()
        assert "a pool of" in component.plan.residency


EXPERTS = r"re:.*experts\.(gate_up|down)_proj"
OF_FLOAT8 = ("olmoe", "qwen3_moe", "deepseek_v3")
CASES_OF_FLOAT8 = [(family, dtype) for family in OF_FLOAT8 for dtype in (torch.bfloat16, torch.float32)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small_units(monkeypatch):
    """Units of small models count."""
    monkeypatch.setattr(pool, "LEAST", 256 << 10)


def float8(family, dtype):
    model = expert_models.FAMILIES[family](dtype)
    quantize_(model, FqnToConfig({EXPERTS: Float8WeightOnlyConfig()}), filter_fn=None)
    return model


@pytest.mark.random
@pytest.mark.parametrize(("family", "dtype"), sampled(CASES_OF_FLOAT8, 3))
@pytest.mark.usefixtures("small_units")
def test_quantised_experts_have_their_bits_in_any_memory(family, dtype, tmp_path):
    model = float8(family, dtype)
    expected = outputs(model)
    stacks = [one for name, one in model.named_parameters() if ".experts." in name]
    assert {one.qdata.dtype for one in stacks} == {torch.float8_e4m3fn}
    largest = max(one.qdata.nbytes for one in stacks)
    with apply(model, "64KB", cache=tmp_path) as applied:
        called_at_the_floor(applied, lambda: outputs(model))
        least = applied.memory
        for memory in (least, least + largest // 2, 4 * least + 8 * largest):
            applied.memory = memory
            for _ in range(2):
                assert all(torch.equal(*both) for both in zip(outputs(model), expected, strict=True))
            (component,) = applied.components.values()
            assert component.stats.peak_bytes <= component.stats.budget


@pytest.mark.usefixtures("small_units")
def test_a_folder_of_quantised_experts_runs_in_little_memory(tmp_path):
    from transformers import OlmoeForCausalLM, TorchAoConfig

    expert_models.olmoe(torch.bfloat16).save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(FqnToConfig({EXPERTS: Float8WeightOnlyConfig()}))
    model = OlmoeForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "float8")
    expected = outputs(frozen(model))
    loaded = load(tmp_path / "float8", "64KB", cache=tmp_path / "cache")
    called_at_the_floor(loaded.penstock_applied, lambda: outputs(loaded))
    assert all(torch.equal(*both) for both in zip(outputs(loaded), expected, strict=True))
    loaded.penstock_applied.close()
