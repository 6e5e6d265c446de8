"""Trainers of transformers and TRL as they are, on a model that streams."""

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from penstock.integrations import apply
from tests.integrations.training.adapted import MEMORY, adapted, equal, trained

pytestmark = pytest.mark.nightly


def rows(count, seed):
    """Texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 30, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 128, (length,), generator=generator)} for length in lengths]


def padded(chosen):
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in chosen], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def trainer(model, folder):
    arguments = TrainingArguments(str(folder), **ARGUMENTS)
    data = {"train_dataset": rows(16, 1), "eval_dataset": rows(4, 2)}
    return Trainer(model, arguments, data_collator=padded, **data)


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{k}": k for k in range(3, 128)}
    vocabulary = Tokenizer(WordLevel(words, unk_token="<unk>"))
    vocabulary.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, **names)


def fine_tuner(model, folder):
    """TRL's trainer over token numbers, with its own loss in chunks and gradient checkpointing on."""
    data = {
        f"{name}_dataset": Dataset.from_list([{"input_ids": one["input_ids"].tolist()} for one in chosen])
        for name, chosen in (("train", rows(16, 1)), ("eval", rows(4, 2)))
    }
    arguments = SFTConfig(str(folder), bf16=False, **ARGUMENTS)
    return SFTTrainer(model, arguments, processing_class=tokenizer(), **data)


def logged(made):
    """Losses and norms of gradients, without times."""
    return [
        {k: v for k, v in one.items() if k in ("loss", "grad_norm", "eval_loss")}
        for one in made.state.log_history
    ]


def preferring(model, folder):
    """TRL's trainer of preferences, whose reference is the model without its adapter."""
    generator = torch.Generator().manual_seed(1)

    def text(length):
        return " ".join(f"w{k}" for k in torch.randint(3, 128, (length,), generator=generator).tolist())

    data = [{"prompt": text(5), "chosen": text(7), "rejected": text(6)} for _ in range(8)]
    few = {name: ARGUMENTS[name] for name in ("per_device_train_batch_size", "logging_steps", "report_to")}
    few |= {"use_cpu": True, "disable_tqdm": True, "max_steps": 3, "save_strategy": "no"}
    arguments = DPOConfig(str(folder), bf16=False, **few)
    given = {"processing_class": tokenizer(), "train_dataset": Dataset.from_list(data)}
    return DPOTrainer(model, args=arguments, **given)


@pytest.mark.parametrize("make", [fine_tuner, preferring])
def test_the_trainers_of_trl_give_the_weights_that_they_give_in_memory(make, cache, tmp_path):
    reference = make(adapted(layers=1), tmp_path / "memory")
    reference.train()
    model = adapted(layers=1)
    with apply(model.get_base_model().model, MEMORY, train=True, cache=cache) as applied:
        made = make(model, tmp_path / "streamed")
        made.train()
        assert equal([*trained(model).values()], [*trained(reference.model).values()])
        assert logged(made) == logged(reference)
        (component,) = applied.components.values()
        if make is fine_tuner:  # the other's last call runs one module at a time
            assert component.stats.misses == 0
            assert component.stats.bytes_moved > 0


def test_a_trainer_gives_the_weights_that_it_gives_in_memory(cache, tmp_path):
    reference = trainer(adapted(layers=1), tmp_path / "memory")
    reference.train()
    expected = [*trained(reference.model).values()]

    model = adapted(layers=1)
    with apply(model, MEMORY, train=True, cache=cache):
        made = trainer(model, tmp_path / "streamed")
        made.train()
        assert equal([*trained(model).values()], expected)
        assert logged(made) == logged(reference)
    for step in (2, 4):
        saved = [
            load_file(tmp_path / name / f"checkpoint-{step}" / "adapter_model.safetensors")
            for name in ("memory", "streamed")
        ]
        assert saved[0].keys() == saved[1].keys()
        assert equal([*saved[0].values()], [*saved[1].values()])

    resumed = adapted(layers=1)
    with apply(resumed, MEMORY, train=True, cache=cache):
        trainer(resumed, tmp_path / "streamed").train(
            resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-2")
        )
        assert equal([*trained(resumed).values()], expected)
