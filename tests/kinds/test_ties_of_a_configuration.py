"""Weights that a configuration ties: files may hold both, with equal values or with different ones."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

from penstock.integrations import apply, load
from tests.hunt import nightly_but
from tests.integrations import models

IDS = torch.tensor([[5, 9, 1, 3]])


def saved(model, folder, **tensors):
    """Save a model, with other tensors beside its own."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def check(library, folder, tmp_path, call, *, tied):
    head = library.get_output_embeddings().weight
    assert (head is library.get_input_embeddings().weight) == tied
    models.frozen(library)
    with torch.no_grad():
        want = call(library)
        with apply(library, "4MB", cache=tmp_path / "cache"):
            assert torch.equal(call(library), want)
        for memory in ("300KB", "4MB"):
            with load(folder, memory, cache=tmp_path / "cache") as loaded:
                for _ in range(2):
                    assert torch.equal(call(loaded), want)
                own = loaded.get_output_embeddings().weight
                assert (own is loaded.get_input_embeddings().weight) == tied


def logits(model):
    return model(IDS).logits


def test_files_with_another_head_untie_it(tmp_path):
    saved(models.llama(tie_word_embeddings=True), tmp_path / "m", **{"lm_head.weight": torch.randn(128, 64)})
    check(LlamaForCausalLM.from_pretrained(tmp_path / "m"), tmp_path / "m", tmp_path, logits, tied=False)


@pytest.mark.parametrize("both", nightly_but([True], [True, False]))
def test_files_with_an_equal_head_or_none_leave_it_tied(both, tmp_path):
    model = models.llama(tie_word_embeddings=True)
    head = {"lm_head.weight": model.lm_head.weight.clone()} if both else {}
    saved(model, tmp_path / "m", **head)
    check(LlamaForCausalLM.from_pretrained(tmp_path / "m"), tmp_path / "m", tmp_path, logits, tied=True)


def both(model):
    return model(input_ids=IDS, decoder_input_ids=IDS).logits


OTHERS = {
    "T5": (models.t5, T5ForConditionalGeneration, {"lm_head.weight": (128, 32)}, both),
    "Bart": (models.bart, BartForConditionalGeneration, {"lm_head.weight": (128, 32)}, both),
    "Bert": (
        lambda: BertForMaskedLM(BertConfig(**models.SIZES)),
        BertForMaskedLM,
        {"cls.predictions.decoder.weight": (128, 64)},
        logits,
    ),
}


@pytest.mark.parametrize("name", nightly_but(["T5"], OTHERS))
def test_files_of_other_families_with_another_head(name, tmp_path):
    make, family, shapes, call = OTHERS[name]
    saved(make(), tmp_path / "m", **{head: torch.randn(*shape) for head, shape in shapes.items()})
    library = family.from_pretrained(tmp_path / "m").eval()
    head, table = library.get_output_embeddings().weight, library.get_input_embeddings().weight
    check(library, tmp_path / "m", tmp_path, call, tied=head is table)
