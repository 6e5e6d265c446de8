"""Modules whose own Python runs while their weights stream: bits, state and refusals."""

import copy
import functools
import itertools
import mmap
import os
import pickle
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import _pytree as pytree
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from penstock import LoadOptions
from penstock.integrations.applied import apply
from penstock.schedule.facts.errors import BudgetError, PassError, StreamError
from tests.hunt import nightly_but
from tests.integrations.called import odd_modules
from tests.integrations.called.odd_modules import Blocks, Experts, KeepsView, OneOf, ReadsAnother, inputs

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

POISONED = LoadOptions(arena="contiguous", poison=True)
"""A read of memory that a plan has given to another weight finds other bytes here."""

CASES = list(itertools.product(odd_modules.EQUAL, (0.3, 1.0), ("poisoned", "default")))


def made(kind):
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


def pair(kind):
    return made(kind), made(kind)


def nbytes(model):
    return sum(one.nbytes for one in {id(p): p for p in [*model.parameters(), *model.buffers()]}.values())


def same(first, second):
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def agree(model, reference):
    return same(model(inputs()), reference(inputs()))


def applied(model, share, tmp_path, options=POISONED):
    """Apply with room for this share of the weights; 0 is the least that runs."""
    memory = max(1, int(share * nbytes(model))) if share else 1 << 10
    return apply(model, memory + (96 << 10), cache=tmp_path, options=options)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's, in jvp
@pytest.mark.parametrize(
    ("name", "share", "arena"),
    nightly_but(lambda case: case[1:] in ((0.3, "poisoned"), (1.0, "default")), CASES),
)
def test_it_computes_what_it_computes_in_memory(name, share, arena, tmp_path):
    options = POISONED if arena == "poisoned" else LoadOptions()
    model, reference = made(odd_modules.EQUAL[name]), made(odd_modules.EQUAL[name])
    calls = [inputs(), inputs(), inputs(2), inputs(), inputs(4), inputs()]
    expected = [reference(x) for x in calls]
    with apply(model, int(share * nbytes(model)) + (1 << 20), cache=tmp_path, options=options):
        for x, want in zip(calls, expected, strict=True):
            assert same(model(x), want)
    assert agree(model, reference)  # restored, with all that it remembers
    for one, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("name", ["Blocks", "EndsEarly", "Experts", "Recurrent", "Masked"])
def test_it_runs_at_the_least_memory_that_its_error_names(name, tmp_path):
    model, reference = made(odd_modules.EQUAL[name]), made(odd_modules.EQUAL[name])
    memory = 1 << 10
    for _ in range(8):
        refusal = None
        try:
            with apply(model, memory, cache=tmp_path, options=POISONED):
                for x in (inputs(), inputs(2), inputs()):
                    assert same(model(x), reference(x))
        except BudgetError as error:
            refusal = error
        if refusal is None:
            break
        assert "give at least" in str(refusal)
        assert refusal.floor_bytes > memory
        memory = refusal.floor_bytes
    else:
        pytest.fail("each error names a number that is too small")
    assert memory < 2 * nbytes(model)


class Tagged(Blocks):
    """Its weight has an attribute, which its step reads."""

    def __init__(self):
        super().__init__()
        self.head.weight.scale_of_mine = 3.0
        own = self.head.forward
        self.head.forward = lambda x: own(x) * self.head.weight.scale_of_mine


def reads_another(model):
    results = []
    for flag in (False, False, True, True, False):
        model.flag = flag
        results.append(model(inputs()))
    return results


def reads_between_calls(model):
    return [model.blocks[0].up.weight.sum(), model.head.weight + 1, [*model.state_dict().values()]]


def fails_in_a_step(model):
    results = []
    for rows in (2, 3):
        hook = model.blocks[2].up.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs(rows))
        hook.remove()
        results.append(model(inputs()))
    return results


def gets_hooks_and_parts(model):
    model(inputs())
    if len(model.blocks) == 4:
        model.blocks[1].register_forward_hook(lambda _, __, out: out * 1.5)
        model.blocks[2].up.register_forward_pre_hook(lambda part, args: (args[0] + part.weight.sum(),))
        torch.manual_seed(3)
        model.blocks.append(odd_modules.Block().requires_grad_(False))
    return model(inputs())


def writes_strided(model):
    model.conv.weight.mul_(0.5)
    return model(inputs())


def reads_what_calls_write(model):
    shift = vars(model).setdefault("kept", model.parts[1].shift)
    return [model(inputs()), shift.mul_(2.0).clone()]


def views_one_after_another(model):
    results = []
    for block in model.blocks:
        view = block.up.weight.data, block.down.weight.data
        results += [model(inputs()), view[0].sum()]
    return results


USES = {
    "a parameter is kept that calls write": (lambda: OneOf(odd_modules.Writes), reads_what_calls_write),
    "weights are viewed one after another": (Blocks, views_one_after_another),
    "a layer begins to read another weight": (ReadsAnother, reads_another),
    "weights are read between calls": (Blocks, reads_between_calls),
    "a step fails": (Blocks, fails_in_a_step),
    "a copy is called": (Blocks, lambda model: copy.copy(model)(inputs())),
    "strided weights are written": (odd_modules.Strided, writes_strided),
    "hooks and parts come later": (Blocks, gets_hooks_and_parts),
    "a weight has an attribute": (Tagged, lambda model: model(inputs())),
}


@pytest.mark.parametrize("name", USES)
def test_uses_give_what_they_give_in_memory(name, tmp_path):
    kind, use = USES[name]
    model, reference = pair(kind)
    with applied(model, 0.4, tmp_path):
        for _ in range(2):
            assert same(use(model), use(reference))
            assert agree(model, reference)


def test_orders_drawn_anew_in_each_call_are_right_and_stay_within_the_budget(tmp_path):
    class Shuffled(Blocks):
        order = range(4)

        def forward(self, x):
            for k in self.order:
                x = self.blocks[k](x)
            return x

    model, reference = pair(lambda: Shuffled(8))
    drawn = random.Random(5)
    with applied(model, 0.4, tmp_path) as held:
        for _ in range(12):
            model.order = reference.order = drawn.sample(range(8), drawn.randrange(3, 9))
            assert agree(model, reference)
        (component,) = held.components.values()
        model(inputs())
        assert component.stats.peak_bytes <= component.plan.budget
        assert len(component.orders) <= 4


def test_a_view_that_a_later_call_keeps_is_refused_while_it_lives(tmp_path):
    model, reference = (made(lambda s=since: OneOf(lambda: KeepsView(s), 12)) for since in (3, 99))
    with applied(model, 0.4, tmp_path):
        for _ in range(2):
            assert agree(model, reference)
        for _ in range(2):
            with pytest.raises(StreamError, match=r"keeps a view of parts\.0\.weight"):
                model(inputs())
        for part in model.parts:
            part.kept = None
        assert agree(model, reference)


def test_uses_between_calls_are_refused_by_name(tmp_path):
    model = made(Blocks)
    before = model.head.weight
    with applied(model, 0.4, tmp_path):
        model(inputs())
        for use, words in (
            (
                lambda: copy.deepcopy(model),
                "^the Blocks cannot be copied.*, as its parameters are not in memory",
            ),
            (
                lambda: pickle.dumps(model),
                r"^the parameter blocks\.0\.norm\.weight is not in memory: call the model itself",
            ),
            (lambda: model.to(torch.float64), "^the Blocks cannot be moved or converted.*: call the model"),
            (lambda: torch.vmap(lambda row: row * 2)(before), "not in memory"),
        ):
            with pytest.raises(StreamError, match=words):
                use()
    assert before is model.head.weight
    assert before.sum().isfinite()


def test_threads_take_turns(tmp_path):
    model, reference = pair(Blocks)
    with applied(model, 0.4, tmp_path), ThreadPoolExecutor(4) as pool:
        assert same([*pool.map(model, [inputs()] * 4)], [reference(inputs())] * 4)


def test_modules_of_two_models_may_call_each_other(tmp_path):
    class Pair:
        def __init__(self):
            self.components = {"first": made(Blocks), "second": made(Blocks)}

    pair, reference = Pair(), Pair()
    for one in (pair, reference):
        first, second = one.components.values()
        first.blocks[1].register_forward_hook(lambda _, __, out, second=second: out + second(out))
    with apply(pair, nbytes(pair.components["first"]) + (1 << 20), cache=tmp_path, options=POISONED):
        for _ in range(3):
            for name in ("first", "second"):
                assert same(pair.components[name](inputs()), reference.components[name](inputs()))


def test_a_scripted_function_gets_no_other_bytes(tmp_path):
    model, reference = pair(odd_modules.Scripted)
    with applied(model, 0.4, tmp_path):
        refusal = None
        try:
            assert agree(model, reference)
        except StreamError as error:
            refusal = str(error)
    assert refusal is None or "not in memory" in refusal


def test_an_input_that_requires_grad_is_refused(tmp_path):
    model = made(Blocks)
    with (
        applied(model, 0.4, tmp_path),
        torch.enable_grad(),
        pytest.raises(StreamError, match="requires grad"),
    ):
        model(inputs().requires_grad_())


def test_a_forked_child_is_told_to_load_again(tmp_path):
    model = made(Blocks)
    with applied(model, 0.4, tmp_path):
        model(inputs())
        child = os.fork()
        if not child:
            try:
                model(inputs())
            except StreamError as error:
                os._exit(7 if "forked child" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_memory_may_change_between_calls(tmp_path):
    model, reference = pair(Blocks)
    with applied(model, 1.0, tmp_path) as held:
        (component,) = held.components.values()
        streamed = []
        for memory in ("1MB", "400KB", "1MB"):
            held.memory = memory
            for _ in range(2):
                assert agree(model, reference)
            streamed.append(component.plan.streamed_bytes)
            assert {one.how for one in held.residency["Blocks"]} <= {"stays", "streams"}
        assert streamed[0] == streamed[2] < streamed[1]
        held.idle()
        assert component.stats is None
        assert agree(model, reference)


def test_torch_is_as_it_was_once_nothing_is_applied(tmp_path):
    asked = torch.overrides.has_torch_function
    own = getattr(asked, "penstock_original", asked)  # models of other tests may still be loaded
    with applied(made(Blocks), 0.4, tmp_path):
        with applied(made(Experts), 0.4, tmp_path):
            assert torch.overrides.has_torch_function is not own
        assert torch.overrides.has_torch_function is not own
    assert torch.overrides.has_torch_function is asked


def test_what_another_thread_reads_is_no_part_of_the_call(tmp_path):
    """It was taken for what the call reads, which then had no room: the model could be called no more."""
    model, reference = pair(Blocks)
    layers = [layer for block in model.blocks for layer in (block.up, block.down)]
    weights = [layer.weight.clone() for layer in layers]
    own = model.head.forward
    with ThreadPoolExecutor(1) as pool:
        look = functools.partial(pool.submit, lambda: [layer.weight.clone() for layer in layers])
        model.head.forward = lambda x: [own(x), same(look().result(), weights) or 1 / 0][0]
        with applied(model, 0.4, tmp_path) as held:
            assert [agree(model, reference) for _ in range(5)] == [True] * 5
            (component,) = held.components.values()
            assert component.stats.passes >= 3
            assert component.stats.misses == 0


def part_of_quantised(model):
    part = model.parts[1].weight.qdata
    return part if type(part) is torch.Tensor else part[:]  # once it stays, the part itself is there


def ties():
    model = Blocks()
    model.blocks[2].up.weight = model.blocks[1].up.weight
    return model


VIEWED = {
    "tied": (ties, lambda model: model.blocks[2].up.weight.data),
    "in a list": (odd_modules.Recurrent, lambda model: model.parts[0].weight_hh_l0.data),
    "a part": (lambda: OneOf(lambda: torch.nn.Linear(64, 64)), part_of_quantised),
}


@pytest.mark.parametrize("name", VIEWED)
def test_a_weight_is_in_memory_as_long_as_something_keeps_a_view_of_it(name, tmp_path):
    make, view = VIEWED[name]
    model, reference = pair(make)
    for quantised in (model, reference) if name == "a part" else ():
        quantize_(quantised, Int8WeightOnlyConfig(version=2))
    with applied(model, 0.8, tmp_path):
        for use in (torch.abs, torch.neg_, torch.abs):
            for _ in range(2):
                views = view(model), view(reference)
                memory = weakref.ref(views[0].untyped_storage())
                assert agree(model, reference)
            assert same(*map(use, views))
            assert agree(model, reference)
            del views
            assert agree(model, reference)
            assert memory() is None
    assert agree(model, reference)


def test_a_view_of_memory_that_weights_share_is_not_written(tmp_path):
    model, reference = made(Blocks), made(ties)
    model.blocks[2].up.weight = torch.nn.Parameter(model.blocks[1].up.weight.data, requires_grad=False)
    with applied(model, 0.4, tmp_path):
        view = model.blocks[1].up.weight.data
        assert agree(model, reference)
        view.neg_()
        with pytest.raises(StreamError, match=r"blocks\.1\.up\.weight shares its memory with blocks\.2"):
            model(inputs())
        assert agree(model, reference)


def test_what_waits_for_the_end_of_a_call_is_refused_within_it(tmp_path):
    (model, reference), asks = pair(Blocks), []
    part = model.blocks[1].up
    part.forward = lambda x, own=part.forward: [*[ask() for ask in asks], own(x)][-1]
    with applied(model, 0.4, tmp_path) as held, ThreadPoolExecutor(1) as pool:
        for use in (
            held.idle,
            held.restore,
            lambda: setattr(held, "memory", "1MB"),
            lambda: held.save_pretrained("nowhere"),
            lambda: apply(part, "1MB"),
        ):
            for ask in (use, lambda: pool.submit(lambda: [model.head(inputs()), use()]).result()):  # noqa: B023
                asks.append(ask)
                with pytest.raises((StreamError, PassError), match=r"in a call of the|streams already"):
                    model(inputs())
                asks.clear()
                assert agree(model, reference)
        asks.append(lambda: asks.append(pool.submit(held.idle)) or asks.pop(0))
        assert agree(model, reference)
        asks.pop().result()
        model.register_forward_hook(lambda *_: held.idle())
        assert agree(model, reference)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


class Noted(torch.nn.Linear):
    """Notes what the process has of memory while it runs."""

    seen = 0

    def forward(self, x):
        y = super().forward(x)
        Noted.seen = max(Noted.seen, resident_bytes())
        return y


class Picks(torch.nn.Module):
    """Calls the layers that it is told."""

    picked = 0, 1, 2

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Noted(3000, 3000) for _ in range(6))

    def forward(self, x):
        for number in self.picked:
            x = self.layers[number](x)
        return x


def test_layers_that_the_plan_does_not_have_stay_within_the_cap(tmp_path):
    model, reference = pair(Picks)
    x, memory = torch.randn(2, 3000), 128_000_000
    with torch.no_grad(), apply(model, memory, cache=tmp_path, options=LoadOptions(arena="contiguous")):
        before = resident_bytes()
        for picked in ((0, 1, 2), (0, 1, 2), (0, 4, 5), (3, 1, 4), (0, 1, 2)):
            model.picked = reference.picked = picked
            Noted.seen = 0
            output = model(x)
            assert Noted.seen - before < memory + (8 << 20)  # what oneDNN and the heap take
            assert torch.equal(output, reference(x))


class ReadsLarge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.large = torch.nn.Linear(64, 64), torch.nn.Linear(4096, 64)

    def forward(self, x):
        return self.first(x).repeat(1, 64) @ self.large.weight.T


class HasBilinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Bilinear(64, 64, 64)

    def forward(self, x):
        return self.last(self.first(x), x)


@pytest.mark.parametrize("kind", [ReadsLarge, HasBilinear])
def test_a_weight_that_an_operator_reads_whole_is_refused_before_it_passes_the_cap(kind, tmp_path):
    model = made(kind)
    with torch.no_grad(), apply(model, 850_000, cache=tmp_path):
        for _ in range(2):
            with pytest.raises(BudgetError, match=r"1\.00 MiB .*at once; give at least"):
                model(torch.randn(6, 64))
