"""Families of models besides Llama: gradients, adapters and losses of steps are those in memory."""

import pytest
import torch

from penstock.integrations import apply, load
from tests.hunt import sampled
from tests.integrations.training.adapted import MEMORY, equal, steps, trained
from tests.integrations.training.families import FAMILIES, family, lora, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient.checkpointing.*")


def adapted(name, model):
    torch.manual_seed(1)
    model.add_adapter(lora(name))
    return model.train()


BOTH = [(name, way) for name in FAMILIES for way in ("apply", "load")]
"""Each family by each way. Five is odd, so that the sample takes the two ways in turns."""


@pytest.mark.random
@pytest.mark.parametrize(("name", "way"), sampled(BOTH, 5))
def test_a_family_learns_as_in_memory(name, way, cache, tmp_path):
    batches = [rows(name, 12, seed=0), rows(name, 20, seed=1)]
    family(name).save_pretrained(tmp_path)
    kind = type(family(name))
    reference = adapted(name, kind.from_pretrained(tmp_path))
    expected = steps(reference, batches)
    if way == "apply":
        model = adapted(name, kind.from_pretrained(tmp_path))
        with apply(model, MEMORY, train=True, cache=cache) as applied:
            assert equal(steps(model, batches), expected)
            (component,) = applied.components.values()
            assert component.stats.misses == 0
            assert component.stats.bytes_moved > 0
        return
    torch.manual_seed(1)
    with load(tmp_path, MEMORY, train=True, adapter=lora(name), cache=cache) as model:
        assert equal(steps(model.train(), batches), expected)
        assert trained(model).keys() == trained(reference).keys()
