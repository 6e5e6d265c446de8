"""One line of code on the devices that stream, simulated ones and those of the machine."""

import pytest
import torch

from penstock.integrations import apply
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42]])


@pytest.fixture(params=["sim:rtx4090", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here: `make gpu` runs this where there is one")
    return request.param


def test_what_is_generated_on_a_device_is_what_its_library_generates_there(device, tmp_path):
    where = "cuda" if device == "cuda" else "cpu"
    model = models.llama().to(where)
    reference = models.twin(model)
    ids = IDS.to(where)
    with apply(model, "300KB", device=device, cache=tmp_path) as applied:
        assert {p.device for p in model.parameters()} == {p.device for p in reference.parameters()}
        got = model.generate(ids, max_new_tokens=4, do_sample=False)
        stats = applied.components["LlamaForCausalLM"].stats
        assert stats.bytes_moved > 0
        assert stats.peak_bytes <= stats.budget < 300_000
    assert torch.equal(got, reference.generate(ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(model(ids).logits, reference(ids).logits)
