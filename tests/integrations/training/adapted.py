"""Tiny models with adapters that are trained, in memory and streamed, and what steps do to them."""

import torch
from peft import LoraConfig, get_peft_model

from tests.integrations import models

MEMORY = "40MB"


def adapted(dtype=torch.float32, attention="sdpa", dropout=0.1, layers=2):
    """A Llama in training mode, of which LoRA trains some products."""
    model = models.llama(attn_implementation=attention, num_hidden_layers=layers).to(dtype)
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "gate_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=dropout)
    return get_peft_model(model, config).train()


def batch(length, *, padded=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 128, (2, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[1, : length // 3], labels[1, : length // 3] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def gradients(model, given, **options):
    """The loss and the gradients of one call."""
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(**given, **options).loss
    loss.backward()
    return [loss.detach(), *(value.grad.clone() for value in trained(model).values())]


def steps(model, batches):
    """The losses and gradients of steps of AdamW, and the adapter behind them."""
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    torch.manual_seed(5)
    found = []
    for given in batches:
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        found += [loss.detach(), *(value.grad.clone() for value in trained(model).values())]
        optimizer.step()
    return [*found, *(value.detach().clone() for value in trained(model).values())]


def equal(one, other):
    """Whether two lists of tensors are bit-equal."""
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def check_streamed(applied):
    """Weights were moved, and none came late."""
    (component,) = applied.components.values()
    assert component.stats.misses == 0
    assert component.stats.bytes_moved > 0


def checkpointed(model, how):
    """Have layers computed again in the backward: by the newer way, the older one, or not."""
    if how is not None:
        model.enable_input_require_grads()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    return model
