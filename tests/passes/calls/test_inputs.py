"""Calls that the exported program would run wrongly, or not at all, are refused before they run."""

import io
from dataclasses import dataclass

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.value_ranges import ValueRanges

from penstock.passes.annotate import annotate_with_values
from penstock.passes.calls.inputs import describe_method, guards_of
from penstock.passes.calls.signature import CallingConvention, signature_of
from penstock.schedule.facts.errors import PassError, StreamError
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export, stored

CPU = torch.device("cpu")


def convention_of(exported):
    return CallingConvention(signature_of(exported), CPU)


@pytest.fixture(scope="module")
def dynamic():
    return convention_of(export(CASES["Dynamic"])[1])


def sized(batch, length, again=None):
    return torch.randn(batch, length, 8), torch.randn(length if again is None else again, 8)


def test_leaves_come_in_the_graphs_order(dynamic):
    args = sized(3, 7)
    assert dynamic.flatten(args, {}) == list(args)
    nested = convention_of(export(CASES["Nested"])[1])
    x, extra = CASES["Nested"].args()
    scale = torch.randn(3, 1)
    leaves = nested.flatten((x, extra), {"nothing": None, "mode": "relu", "scale": scale})
    assert leaves[3:] == [True, scale, "relu", None]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (sized(65, 7), r"input x.shape\[0\]: expected 1 to 64, got 65"),
        (sized(3, 1), r"input x.shape\[1\]: expected 2 to any size, got 1"),
        (sized(3, 7, 6), r"input y.shape\[0\]: expected 7, which is length as in the other inputs, got 6"),
        ((torch.randn(3, 7, 9), torch.randn(7, 8)), r"input x.shape\[2\]: expected 8, a static size, got 9"),
        ((torch.randn(3, 7), torch.randn(7, 8)), r"input x: expected 3 dimensions, got shape \(3, 7\)"),
        ((torch.randn(3, 7, 8).double(), torch.randn(7, 8)), "input x: expected float32, got float64"),
        (
            (torch.randn(3, 7, 8), torch.randn(7, 8, device="meta")),
            "expected a tensor on cpu, got one on meta",
        ),
        ((torch.randn(3, 7, 8), 4), "input y: expected a tensor, got int"),
        ((), r"does not fit the program: x is missing; y is missing. It takes \(x, y\), as it was exported"),
        ((torch.randn(3, 7, 8),), "does not fit the program: y is missing. It"),
        (([torch.randn(3, 7, 8)], torch.randn(7, 8)), "x is a list of 1, expected one value. It"),
        ((*sized(3, 7), 1), "3 positional arguments are given, and it takes 2. It"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(dynamic, args, words):
    with pytest.raises(StreamError, match=words):
        dynamic.flatten(args, {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_name(dynamic, layout):
    nested = torch.nested.nested_tensor([torch.randn(7, 8)] * 3, layout=layout)
    with pytest.raises(StreamError, match="input x: expected a tensor with a shape, got a nested one"):
        dynamic.flatten((nested, torch.randn(7, 8)), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "tanh"}, "input mode: expected the exported value 'relu', got 'tanh'"),
        ({"nothing": 0}, "input nothing: expected the exported value None, got 0"),
        (
            {"more": 1},
            r"program: more is no argument of it. It takes \(x, extra, \*, scale, mode, nothing\), as it was",
        ),
        ({"x": torch.randn(3, 8)}, "program: x is given twice. It"),
        ({"mode": ["relu"]}, "program: mode is a list of 1, expected one value. It"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change, words):
    nested = convention_of(export(CASES["Nested"])[1])
    with pytest.raises(StreamError, match=words):
        nested.flatten(CASES["Nested"].args(), {**CASES["Nested"].kwargs(), **change})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x, extra, given: ((x, extra), {k: v for k, v in given.items() if k != "mode"}),
            "mode is missing",
        ),
        (
            lambda x, extra, given: ((x,), given | {"extra": extra}),
            "extra is given by keyword, and is positional",
        ),
        (
            lambda x, extra, given: ((x, {"pair": extra["pair"]}), given),
            "extra is a dict of 'pair', expected a dict of 'pair', 'flag'",
        ),
        (
            lambda x, extra, given: ((x, extra | {"pair": (*extra["pair"], 3)}), given),
            r"extra\['pair'\] is a tuple of 3, expected a list of 2",
        ),
        (
            lambda x, extra, given: ((), {}),
            "x is missing; extra is missing; scale is missing; mode is missing",
        ),
    ],
)
def test_a_call_of_another_form_is_refused_in_words(call, words):
    nested = convention_of(export(CASES["Nested"])[1])
    args, kwargs = call(*CASES["Nested"].args(), CASES["Nested"].kwargs())
    with pytest.raises(StreamError, match=f"the call does not fit the program: {words}") as caught:
        nested.flatten(args, kwargs)
    assert "TreeSpec" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_that_the_user_did_not_name_are_called_by_the_input_that_has_them(tmp_path):
    _, exported = export(CASES["Dynamic"])
    assert [one.name for one in describe_method(exported, "forward", 0).symbols] == ["batch", "length"]
    torch.export.save(exported, tmp_path / "model.pt2")  # which loses the names
    loaded = torch.export.load(tmp_path / "model.pt2")
    names = [one.name for one in describe_method(loaded, "forward", 0).symbols]
    assert names == ["x.shape[0]", "x.shape[1]"]
    with pytest.raises(StreamError, match=r"expected 7, which is x.shape\[1\] as in the other inputs, got 6"):
        convention_of(loaded).flatten(sized(3, 7, 6), {})


def test_true_is_not_one():
    nested = convention_of(export(CASES["Nested"])[1])
    x, extra = CASES["Nested"].args()
    with pytest.raises(StreamError, match="input extra_flag: expected the exported value True, got 1"):
        nested.flatten((x, {**extra, "flag": 1}), CASES["Nested"].kwargs())


def exported_with(forward, args, dynamic_shapes):
    class Model(nn.Module):
        def forward(self, *args):
            return forward(*args)

    return torch.export.export(Model(), args, dynamic_shapes={"args": dynamic_shapes})


def test_a_size_that_is_a_multiple_must_be_one():
    half = torch.export.Dim("half", min=2, max=50)
    exported = exported_with(
        lambda x, y: x.view(-1, 2) + y[:, None], (torch.randn(8), torch.randn(4)), ({0: 2 * half}, {0: half})
    )
    convention = convention_of(exported)
    assert len(convention.flatten((torch.randn(6), torch.randn(3)), {})) == 2
    with pytest.raises(StreamError, match=r"shape\[0\]: expected \d+, which is 2\*half"):
        convention.flatten((torch.randn(7), torch.randn(3)), {})
    with pytest.raises(StreamError, match="as in the other inputs, got 4"):
        convention.flatten((torch.randn(6), torch.randn(4)), {})
    (symbol, _) = describe_method(exported, "forward", 0).symbols
    assert (symbol.name, symbol.lower, symbol.upper, symbol.example) == ("2*half", 4, 100, 8)


def small_or_large(x, y):
    return x.sum() + y.sum() if x.shape[0] * y.shape[0] > 100 else x.sum() - y.sum()


def test_guards_hold_on_every_call():
    automatic = torch.export.Dim.AUTO

    exported = exported_with(
        small_or_large, (torch.randn(4), torch.randn(5)), ({0: automatic}, {0: automatic})
    )
    convention = convention_of(exported)
    convention.flatten((torch.randn(10), torch.randn(10)), {})
    with pytest.raises(StreamError, match=r"the sizes .* break .*<= 100, which held at export"):
        convention.flatten((torch.randn(10), torch.randn(11)), {})


def test_guards_that_follow_from_sizes_are_left_out():
    def paired(x, y):
        return x.view(-1, 2, 3).sum() + (x[1:] + y).sum()

    half = torch.export.Dim("half", min=2, max=50)
    shapes = ({0: 2 * half}, {0: 2 * half - 1})
    exported = exported_with(paired, (torch.randn(8, 3), torch.randn(7, 3)), shapes)
    assert len(exported._guards_code) > 1
    assert guards_of(exported) == ()
    convention = convention_of(exported)
    convention.flatten((torch.randn(6, 3), torch.randn(5, 3)), {})
    for rows in ((6, 7), (7, 6)):
        with pytest.raises(StreamError, match=r"as in the other inputs|which is"):
            convention.flatten(tuple(torch.randn(size, 3) for size in rows), {})


def test_what_guards_follow_from_is_worked_out_once_for_sizes_and_ranges(monkeypatch):
    automatic = torch.export.Dim.AUTO
    exported = exported_with(
        small_or_large, (torch.randn(3), torch.randn(5)), ({0: automatic}, {0: automatic})
    )
    (guard,) = guards_of(exported)
    with monkeypatch.context() as patch:
        patch.setattr(sympy, "simplify", None)
        assert guards_of(exported) == (guard,)
    for symbol in exported.range_constraints:
        exported.range_constraints[symbol] = ValueRanges(0, 10)
    assert guards_of(exported) == ()


class Deep(nn.Module):
    def forward(self, x, pair, *rest, d, n, z):
        sizes = pair[1].shape[0] + d["k"][0].shape[0] + n + rest[1].shape[0] + z.shape[0]
        return x.sum() + n if x.shape[0] * 2 > sizes + 1 else x.sum() - n


@pytest.mark.parametrize("strict", [False, True])
def test_guards_of_a_stored_program_hold_wherever_the_inputs_are(strict):
    auto = torch.export.Dim.AUTO

    def call(rows):
        args = (torch.randn(rows), (torch.randn(3), torch.randn(4)), torch.randn(2), torch.randn(2))
        return args, {"d": {"k": [torch.randn(5)]}, "n": 2, "z": torch.randn(3)}

    one = {0: auto}
    shapes = {"x": one, "pair": (None, one), "rest": (None, one)}
    shapes |= {"d": {"k": [one]}, "n": auto, "z": one}
    exported = torch.export.export(Deep(), *call(40), dynamic_shapes=shapes, strict=strict)
    code = stored(annotate_with_values(exported)).methods["forward"]
    for signature in (signature_of(exported), code.signature):
        convention = CallingConvention(signature, CPU)
        args, kwargs = call(9)
        assert len(convention.flatten(args, kwargs)) == 8
        args, kwargs = call(8)
        with pytest.raises(StreamError, match="which held at export"):
            convention.flatten(args, kwargs)


@dataclass
class Pair:
    """An input of a class of its own."""

    first: torch.Tensor
    second: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="penstock.tests.Pair")


def test_guards_reach_into_registered_classes():
    class Model(nn.Module):
        def forward(self, x, pair):
            return x.sum() + pair.second.sum() if x.shape[0] > 2 * pair.second.shape[0] else x.sum()

    one = {0: torch.export.Dim.AUTO}
    args = (torch.randn(9), Pair(torch.randn(2), torch.randn(3)))
    exported = torch.export.export(Model(), args, dynamic_shapes=(one, [{}, one]))
    convention = convention_of(exported)
    convention.flatten((torch.randn(11), Pair(torch.randn(2), torch.randn(5))), {})
    with pytest.raises(StreamError, match="which held at export"):
        convention.flatten((torch.randn(10), Pair(torch.randn(2), torch.randn(5))), {})


def test_a_guard_on_an_input_nobody_can_find_is_refused():
    exported = exported_with(lambda x: x + 1, (torch.randn(4),), ({0: torch.export.Dim.AUTO},))
    exported._guards_code = ["L['cache'].keys.size()[0] > 1"]
    with pytest.raises(PassError, match="names an input that cannot be found"):
        annotate_with_values(exported)


def test_a_tensor_for_a_constant_is_refused():
    exported = exported_with(lambda x, n: x * n, (torch.randn(4), 2.0), (None, None))
    with pytest.raises(StreamError, match=r"the exported value 2\.0, got a tensor"):
        convention_of(exported).flatten((torch.randn(4), torch.randn(4)), {})


def test_dynamic_numbers():
    automatic = torch.export.Dim.AUTO
    exported = exported_with(lambda x, n: x[:n].sum() * n, (torch.randn(8), 4), ({0: automatic}, automatic))
    convention = convention_of(exported)
    assert describe_method(exported, "forward", 0).inputs[1].dtype == "int"
    assert convention.flatten((torch.randn(9), 5), {})[1] == 5
    with pytest.raises(StreamError, match="expected a value of type int, got float"):
        convention.flatten((torch.randn(9), 5.0), {})


class Table(torch.nn.Module):
    """Hands out a slice of a weight that is a copy, except where the slice is all of it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(8, 64))

    def forward(self, x, named, *rest, flag=None):
        rows = x.shape[1] + named["k"].shape[0] - rest[0].shape[0]
        return self.table[:, :rows].contiguous(), flag.sum()


def test_guards_hold_after_saving():
    automatic = torch.export.Dim.AUTO
    args = (torch.randn(3, 33), {"k": torch.randn(5)}, torch.randn(5))
    sizes = {"x": {1: automatic}, "named": {"k": {0: automatic}}, "rest": ({0: automatic},), "flag": None}
    exported = torch.export.export(Table(), args, {"flag": torch.ones(2)}, dynamic_shapes=sizes)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    convention = convention_of(torch.export.load(stored))
    flag = {"flag": torch.ones(2)}
    convention.flatten((torch.randn(3, 63), *args[1:]), flag)
    with pytest.raises(StreamError, match=r"break .*!= 64, which held at export"):
        convention.flatten((torch.randn(3, 64), *args[1:]), flag)
