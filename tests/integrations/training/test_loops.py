"""What training loops and hooks do with a model beside forward, backward and a step, and what is refused."""

import gc
import logging
import weakref

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from penstock import LoadOptions
from penstock.integrations import apply
from penstock.schedule.facts.errors import BudgetError, PassError, StreamError
from tests.integrations import models
from tests.integrations.training.adapted import MEMORY, adapted, batch, equal, gradients, steps, trained

GIVEN = batch(16)


def pair(cache):
    """A model in memory and one that streams, with equal adapters."""
    model = adapted()
    with apply(model, MEMORY, train=True, cache=cache, options=LoadOptions(arena="contiguous", poison=True)):
        yield adapted(), model


both, hooked = pytest.fixture(scope="module")(pair), pytest.fixture(pair)


def several(model):
    """Backward twice, three forwards before the next one, of which one is dropped; all add up."""
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(**GIVEN).loss
    loss.backward(retain_graph=True)
    loss.backward()
    first, _, second = (model(**batch(length, seed=length)).loss for length in (16, 20, 40))
    (first + 2 * second).backward()
    return [value.grad.clone() for value in trained(model).values()]


def by_autograd(model):
    torch.manual_seed(4)
    return torch.autograd.grad(model(**GIVEN).loss, trained(model).values())


def scaled(model):
    """A step with clipping behind a scaler of losses, and back to the values before it."""
    before = [value.detach().clone() for value in trained(model).values()]
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    torch.manual_seed(4)
    scaler.scale(model(**GIVEN).loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    after = [value.detach().clone() for value in trained(model).values()]
    with torch.no_grad():
        for value, old in zip(trained(model).values(), before, strict=True):
            value.copy_(old)
    return [norm, *after]


def of_logits(model):
    """Gradients of a loss that is computed outside of the model."""
    model.zero_grad()
    torch.manual_seed(4)
    given = {name: value for name, value in GIVEN.items() if name != "labels"}
    model(**given).logits.square().sum().backward()
    return [value.grad.clone() for value in trained(model).values()]


def evaluated(model):
    """What the model says and generates between two steps."""
    model.eval()
    with torch.no_grad():
        found = [model(**GIVEN).loss, model.generate(input_ids=GIVEN["input_ids"][:1, :6], max_new_tokens=3)]
    model.train()
    return [*found, *gradients(model, GIVEN)]


def between(model):
    """Gradients of a forward after which another one is evaluated."""
    model.zero_grad()
    torch.manual_seed(4)
    loss = model(**GIVEN).loss
    with torch.no_grad():
        model(**batch(24))
    loss.backward()
    return [value.grad.clone() for value in trained(model).values()]


def accumulated(model):
    gradients(model, GIVEN)
    for length in (20, 16):
        model(**batch(length)).loss.backward()
    return [value.grad.clone() for value in trained(model).values()]


def converted(model):
    """Gradients of a forward in bfloat16."""
    model.zero_grad()
    torch.manual_seed(4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**GIVEN).loss
    loss.backward()
    return [loss.detach(), *(value.grad.clone() for value in trained(model).values())]


def after_errors(model):
    """Gradients after a forward and a backward that fail."""
    with pytest.raises(ValueError, match="size"):
        model(input_ids=GIVEN["input_ids"], labels=GIVEN["labels"][:, :3])

    def fail(gradient):
        raise KeyError("no")

    hook = list(trained(model).values())[2].register_hook(fail)
    with pytest.raises(KeyError):
        model(**GIVEN).loss.backward()
    hook.remove()
    return gradients(model, GIVEN)


LOOPS = [several, by_autograd, scaled, of_logits, evaluated, between, accumulated, converted, after_errors]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_computes_what_it_does_in_memory(loop, both):
    reference, model = both
    for _ in range(2):
        assert equal(loop(model), loop(reference))


def test_that_all_weights_fit_is_said_once(plans, cache, caplog):
    plans["now"] = 1.0
    model = adapted()
    caplog.set_level(logging.WARNING, "penstock")
    with apply(model, MEMORY, train=True, cache=cache):
        for _ in range(3):
            assert equal(gradients(model, GIVEN), gradients(model, GIVEN))
    assert [record.message for record in caplog.records if "nothing streams" in record.message] == [
        "all weights of LlamaForCausalLM fit into memory, and nothing streams: it trains as fast without "
        "penstock"
    ]


def test_an_input_may_require_grad(both):
    found = []
    for model in both:
        x = torch.ones(1, 4, 64, requires_grad=True)
        torch.manual_seed(4)
        model(inputs_embeds=x).logits.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_memory_may_be_given_back_between_forward_and_backward(cache):
    reference, model = adapted(dropout=0.0), adapted(dropout=0.0)
    gradients(reference, GIVEN)
    with apply(model, MEMORY, train=True, cache=cache) as applied:
        for _ in range(3):
            model.zero_grad()
            loss = model(**GIVEN).loss
            applied.idle()
            loss.backward()
            found = ([value.grad for value in trained(one).values()] for one in (reference, model))
            assert equal(*found)


def test_the_graph_is_freed_without_the_collector(both):
    _, model = both
    gc.collect()
    gc.disable()
    try:
        for derived in (True, False):
            loss = model(**GIVEN).loss
            mark = torch.nn.Module()
            seen = weakref.ref(mark)
            loss.grad_fn.metadata["mark"] = mark
            if derived:
                loss.backward()
            del loss, mark
            assert seen() is None
    finally:
        gc.enable()


def test_the_adapter_is_saved_and_loaded_by_its_library(both, tmp_path):
    reference, model = both
    reference.save_pretrained(tmp_path / "memory")
    model.save_pretrained(tmp_path / "streamed")
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("memory", "streamed")]
    assert saved[0].keys() == saved[1].keys()
    assert equal([*saved[0].values()], [*saved[1].values()])
    read = PeftModel.from_pretrained(models.llama(), tmp_path / "streamed").state_dict()
    assert all(
        torch.equal(read[name.replace(".weight", ".default.weight")], saved[1][name]) for name in saved[1]
    )
    model.load_state_dict({n: v for n, v in reference.state_dict().items() if "lora" in n}, strict=False)
    with pytest.raises(StreamError, match=r"embed_tokens\.weight is not in memory"):
        torch.save(model.state_dict(), tmp_path / "all.pt")
    model.load_state_dict(reference.state_dict())  # the values that it has


def test_what_has_no_gradient_is_refused_by_name(both):
    _, model = both
    model.config._attn_implementation = "eager"  # torch has no second derivatives of the other kernel
    for _ in range(2):
        loss = model(**GIVEN).loss
        with pytest.raises(StreamError, match="gradients of gradients"):
            torch.autograd.grad(loss, trained(model).values(), create_graph=True)
    model.config._attn_implementation = "sdpa"
    loss = model(**GIVEN).loss
    with torch.no_grad():
        for value in trained(model).values():
            value.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    frozen = model.get_base_model().lm_head.weight
    frozen.requires_grad_(True)
    with pytest.raises(StreamError, match=r"lm_head\.weight requires grad now, and it streams"):
        model(**GIVEN)
    frozen.requires_grad_(False)


def test_what_cannot_be_trained_is_refused_and_the_model_is_as_it_was(cache):
    plain = models.llama()
    with pytest.raises(PassError, match="no parameter that requires grad"):
        apply(plain, MEMORY, train=True, cache=cache)
    with pytest.raises(PassError, match="no parameter that is frozen and would stream"):
        apply(models.llama().requires_grad_(), MEMORY, train=True, cache=cache)
    with pytest.raises(PassError, match="got a str: folders and names are for penstock"):
        apply("llama", MEMORY, train=True)
    plain.lm_head.weight = torch.nn.Parameter(plain.model.embed_tokens.weight.detach())
    with pytest.raises(
        PassError, match=r"lm_head\.weight requires grad and shares its memory with model\.embed_tokens"
    ):
        apply(plain, MEMORY, train=True, cache=cache)

    class Pipeline:
        def __init__(self):
            self.components = {"encoder": plain}

    with pytest.raises(PassError, match="train=True takes a model"):
        apply(Pipeline(), MEMORY, train=True, cache=cache)
    model = adapted()
    with pytest.raises(BudgetError, match=r"two moments of AdamW take 52\.00 KiB"):
        apply(model, "50KB", train=True, cache=cache)
    assert equal(gradients(model, GIVEN), gradients(adapted(), GIVEN))


def test_memory_counts_what_a_forward_saves(plans, cache):
    plans["now"] = None
    model = adapted()
    with apply(model, "1MB", train=True, cache=cache):
        gradients(model, GIVEN)
        with pytest.raises(BudgetError, match=r"beside weights, and .* at once; give at least"):
            model(**batch(300))
        loss = model(**GIVEN).loss
    with pytest.raises(StreamError, match="restored between forward and backward"):
        loss.backward()
    assert equal(steps(model, [GIVEN]), steps(adapted(), [GIVEN]))


def doubled(module, given, *made):
    return tuple(None if one is None else one * 2 for one in given)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_on_gradients_are_called(kind, hooked):
    for model in hooked:
        getattr(model.get_base_model().model.layers[0].mlp, kind)(doubled)
        model.register_full_backward_pre_hook(lambda module, given: None)
        next(iter(trained(model).values())).register_hook(lambda gradient: gradient * 3)
    for _ in range(2):
        assert equal(*(gradients(model, GIVEN) for model in hooked))


def moved(model):
    """Gradients of a forward whose saved tensors hooks take elsewhere, around the model and within it."""
    places = {}

    def pack(value):
        places[len(places)] = value.detach().clone()
        return len(places) - 1

    def forward(*args, **kwargs):
        with saved_tensors_hooks(pack, places.__getitem__):
            return own(*args, **kwargs)

    layer = model.get_base_model().model.layers[1]
    own, layer.forward = layer.forward, forward
    try:
        model.zero_grad()
        torch.manual_seed(4)
        with save_on_cpu():
            loss = model(**GIVEN).loss
        loss.backward()
    finally:
        layer.forward = own
    return [*(value.grad.clone() for value in trained(model).values())], places


def test_hooks_on_saved_tensors_get_what_is_no_weight(hooked):
    frozen = [value for value in hooked[0].parameters() if not value.requires_grad and value.dim() > 1]
    for _ in range(2):
        (expected, of_plain), (found, of_streamed) = (moved(model) for model in hooked)
        assert equal(found, expected)
        shapes = [{tuple(one.shape) for one in places.values()} for places in (of_plain, of_streamed)]
        assert shapes[1] < shapes[0]
        assert {tuple(one.t().shape) for one in frozen} & (shapes[0] - shapes[1])


def test_what_a_node_has_saved_can_be_looked_at(hooked):
    found = []
    for model in hooked:
        node = model(input_ids=GIVEN["input_ids"]).logits.grad_fn
        while not hasattr(node, "_saved_mat2"):
            node = node.next_functions[0][0]
        found.append(node._saved_mat2)
    assert torch.equal(*found)
