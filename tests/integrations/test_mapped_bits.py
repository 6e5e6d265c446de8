"""Models computed where files are mapped: on some processors the last bits tell where weights lie."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from penstock.integrations import apply, load
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in shards whose tensors begin at 8, 24 or 40 modulo 64."""
    path = tmp_path_factory.mktemp("phases") / "llama"
    models.llama(num_hidden_layers=1).save_pretrained(path, max_shard_size="100KB")
    for number, file in enumerate(sorted(path.glob("*.safetensors"))):
        shifted(file, (8, 24, 40)[number])
    return path


def shifted(file, phase):
    """Lengthen the header of a file by blanks, so that its tensors begin at `phase` modulo 64."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end] + b" " * ((phase - end) % 64)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def library_model(folder):
    return models.frozen(LlamaForCausalLM.from_pretrained(folder))


def answer(model):
    """The logits of two tokens behind a prompt: each is one row."""
    made = model.generate(
        IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return torch.cat(made.logits)


def test_a_model_has_the_bits_of_the_one_that_its_library_maps(folder, tmp_path):
    expected = answer(library_model(folder))
    for memory in ("1.2MB", "60MB"):
        with load(folder, memory, cache=tmp_path) as model:
            assert torch.equal(answer(model), expected)
        model = library_model(folder)
        with apply(model, memory, cache=tmp_path):
            assert torch.equal(answer(model), expected)
        assert torch.equal(answer(model), expected)  # restored


def test_a_copy_of_a_model_keeps_its_own_bits(folder, tmp_path):
    model = copy.deepcopy(library_model(folder))
    expected = answer(model)
    with apply(model, "60MB", cache=tmp_path) as applied:
        assert set(applied.components["LlamaForCausalLM"].weights) == set(folder.glob("*.safetensors"))
        assert torch.equal(answer(model), expected)
