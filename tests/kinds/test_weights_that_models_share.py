"""A weight that two models share, of which one streams: the other is called, written to and applied."""

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError
from tests.hunt import nightly_but
from tests.integrations import models

IDS = torch.tensor([[5, 9, 11]])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def pair():
    """Make a model, and a smaller one that has its table."""
    main, assistant = models.llama(), models.llama(num_hidden_layers=1)
    assistant.model.embed_tokens.weight = main.model.embed_tokens.weight
    return main, assistant


@pytest.mark.parametrize("memory", nightly_but(["200KB"], ["200KB", "4MB"]))
def test_the_other_model_is_called(memory, tmp_path):
    main, assistant = pair()
    want = assistant(IDS).logits
    with apply(main, memory, cache=tmp_path):
        for _ in range(2):
            assert torch.equal(assistant(IDS).logits, want)
            main(IDS)
    assert torch.equal(assistant(IDS).logits, want)
    assert assistant.model.embed_tokens.weight is main.model.embed_tokens.weight


def test_the_other_model_is_refused_by_the_name_of_the_weight(tmp_path):
    main, assistant = pair()
    want = assistant(IDS).logits
    with apply(main, "300KB", cache=tmp_path):
        with pytest.raises(PassError, match=r"another model that shares model\.embed_tokens\.weight"):
            apply(assistant, "300KB", cache=tmp_path)
        assert torch.equal(assistant(IDS).logits, want)
    with apply(assistant, "300KB", cache=tmp_path):
        assert torch.equal(assistant(IDS).logits, want)


def test_what_the_other_model_writes_counts_for_both(tmp_path):
    main, assistant = pair()
    with apply(main, "300KB", cache=tmp_path):
        main(IDS)
        assistant.model.embed_tokens.weight[9] = 0.5
        got = main(IDS).logits, assistant(IDS).logits
    assert torch.equal(main(IDS).logits, got[0])
    assert torch.equal(assistant(IDS).logits, got[1])
    assert bool((main.model.embed_tokens.weight[9] == 0.5).all())


def layer(first, second):
    second[0] = first[0]


def weight_alone(first, second):
    second[2].weight = first[0].weight


def view(first, second):
    second[2].weight = nn.Parameter(first[0].weight[:64].detach(), requires_grad=False)


def large_buffer(first, second):
    first.register_buffer("table", torch.randn(64, 1024))
    second.register_buffer("table", first.table)
    second[1].register_forward_hook(lambda _, __, out: out + second.table.sum(1))


@pytest.mark.parametrize("share", [layer, weight_alone, view, large_buffer])
def test_what_two_modules_share(share, tmp_path):
    torch.manual_seed(0)
    first, second = (
        models.frozen(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))) for _ in range(2)
    )
    share(first, second)
    x = torch.linspace(-1, 1, 64)[None]
    want = first(x), second(x)
    with apply(first, "60KB", cache=tmp_path):
        for _ in range(2):
            assert torch.equal(first(x), want[0])
            assert torch.equal(second(x), want[1])
    assert torch.equal(second(x), want[1])
