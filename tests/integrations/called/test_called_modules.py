"""Modules whose own Python runs while their weights stream: bits, state and refusals."""

import copy
import itertools
import mmap
import os
import pickle
import random
import threading

import pytest
import torch
from torch.utils import _pytree as pytree

from penstock import LoadOptions
from penstock.integrations.applied import apply
from penstock.schedule.facts.errors import BudgetError, StreamError
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


def nbytes(model):
    return sum(one.nbytes for one in {id(p): p for p in [*model.parameters(), *model.buffers()]}.values())


def same(first, second):
    pairs = zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def applied(model, share, tmp_path, options=POISONED):
    """Apply with room for this share of the weights; 0 is the least that runs."""
    memory = max(1, int(share * nbytes(model))) if share else 1 << 10
    return apply(model, memory + (96 << 10), cache=tmp_path, options=options)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own, in jvp
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
    assert same(model(inputs()), reference(inputs()))  # restored, with all that it remembers
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


USES = {
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
    model, reference = made(kind), made(kind)
    with applied(model, 0.4, tmp_path):
        for _ in range(2):
            assert same(use(model), use(reference))
            assert same(model(inputs()), reference(inputs()))


def test_orders_drawn_anew_in_each_call_are_right_and_stay_within_the_budget(tmp_path):
    class Shuffled(Blocks):
        order = range(4)

        def forward(self, x):
            for k in self.order:
                x = self.blocks[k](x)
            return x

    model, reference = made(lambda: Shuffled(8)), made(lambda: Shuffled(8))
    drawn = random.Random(5)
    with applied(model, 0.4, tmp_path) as held:
        for _ in range(12):
            model.order = reference.order = drawn.sample(range(8), drawn.randrange(3, 9))
            assert same(model(inputs()), reference(inputs()))
        (component,) = held.components.values()
        model(inputs())
        assert component.stats.peak_bytes <= component.plan.budget
        assert len(component.orders) <= 4


def test_a_view_that_a_later_call_keeps_is_refused_while_it_lives(tmp_path):
    model, reference = (
        made(lambda: OneOf(lambda: KeepsView(since=3), 12)),
        made(lambda: OneOf(lambda: KeepsView(since=99), 12)),
    )
    with applied(model, 0.4, tmp_path):
        for _ in range(2):
            assert same(model(inputs()), reference(inputs()))
        for _ in range(2):
            with pytest.raises(StreamError, match=r"keeps a view of parts\.0\.weight"):
                model(inputs())
        for part in model.parts:
            part.kept = None
        assert same(model(inputs()), reference(inputs()))


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
    model, reference = made(Blocks), made(Blocks)
    expected, found = reference(inputs()), []

    def call():
        with torch.no_grad():
            found.append(same(model(inputs()), expected))

    with applied(model, 0.4, tmp_path):
        threads = [threading.Thread(target=call) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert found == [True] * 4


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
    model, reference = made(odd_modules.Scripted), made(odd_modules.Scripted)
    with applied(model, 0.4, tmp_path):
        refusal = None
        try:
            assert same(model(inputs()), reference(inputs()))
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
    model, reference = made(Blocks), made(Blocks)
    with applied(model, 1.0, tmp_path) as held:
        (component,) = held.components.values()
        streamed = []
        for memory in ("1MB", "400KB", "1MB"):
            held.memory = memory
            for _ in range(2):
                assert same(model(inputs()), reference(inputs()))
            streamed.append(component.plan.streamed_bytes)
            assert {one.how for one in held.residency["Blocks"]} <= {"stays", "streams"}
        assert streamed[0] == streamed[2] < streamed[1]
        held.idle()
        assert component.stats is None
        assert same(model(inputs()), reference(inputs()))


def test_torch_is_as_it_was_once_nothing_is_applied(tmp_path):
    asked = torch.overrides.has_torch_function
    own = getattr(asked, "penstock_original", asked)  # models of other tests may still be loaded
    with applied(made(Blocks), 0.4, tmp_path):
        with applied(made(Experts), 0.4, tmp_path):
            assert torch.overrides.has_torch_function is not own
        assert torch.overrides.has_torch_function is not own
    assert torch.overrides.has_torch_function is asked


class LookedAt(torch.nn.Linear):
    """While it runs, somebody in another thread looks at the weights of others."""

    def forward(self, x):
        thread = threading.Thread(target=self.look)
        thread.start()
        thread.join()
        return super().forward(x)

    def look(self):
        self.seen = [layer.weight.clone() for layer in self.others()]


def test_what_another_thread_reads_is_no_part_of_the_call(tmp_path):
    """It was taken for what the call reads, which then had no room: the model could be called no more."""
    torch.manual_seed(0)
    layers = [(LookedAt if k == 2 else torch.nn.Linear)(256, 256) for k in range(8)]
    model = torch.nn.Sequential(*layers).eval().requires_grad_(False)
    others = [*layers[:2], *layers[3:]]
    layers[2].others = lambda: others
    x = torch.randn(2, 256)
    expected, weights = model(x), [layer.weight.clone() for layer in others]
    with apply(model, "1400KB", cache=tmp_path, options=POISONED) as applied:
        for _ in range(5):
            assert torch.equal(model(x), expected)
            assert pytree.tree_map(torch.equal, layers[2].seen, weights) == [True] * 7
        (component,) = applied.components.values()
        assert component.stats.passes >= 3
        assert component.stats.misses == 0


def test_a_thread_that_reads_weights_harms_no_call(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).eval().requires_grad_(False)
    x = torch.randn(2, 256)
    expected, ended, failed, refused = model(x), threading.Event(), [], set()

    def read():
        while not ended.is_set():
            for layer in model:
                try:
                    layer.weight.sum().item()
                except Exception as error:
                    failed.append(str(error))

    with apply(model, "2MB", cache=tmp_path, options=POISONED):
        thread = threading.Thread(target=read)
        thread.start()
        try:
            for _ in range(60):
                try:
                    assert torch.equal(model(x), expected)
                except StreamError as error:  # the thread has what a step of the call had
                    refused.add(str(error).partition(" of ")[0])
        finally:
            ended.set()
            thread.join()
        assert not failed
        assert refused <= {"something keeps a view"}
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


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
    model, reference = made(Picks), made(Picks)
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
