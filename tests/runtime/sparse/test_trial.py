"""The trial of operators: those that read units only are trusted, and one that reads more is not."""

from dataclasses import replace

import pytest
import torch

from penstock.passes.sparse.contracts import CONTRACTS, Contract
from penstock.runtime.sparse import trust
from penstock.runtime.sparse.trust import check_trusted, reads_units_only, trusted
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Computed, Part, Pool, SparseRead, Step, Trace
from tests.schedule.payload.payload_example import POOLED

ROWS = SparseRead(Part("", "float32", (512, 700), (700, 1), 3, 4096 * 7 + 64), "aten.embedding.default", 0, 4)
STACK = SparseRead(
    Part("", "bfloat16", (16, 64, 96), (64 * 96, 96, 1), 0, 0), "aten._grouped_mm.default", 0, 4
)


@pytest.fixture(autouse=True)
def forgotten():
    """Every trial is made anew."""
    trust._tried.cache_clear()
    yield
    trust._tried.cache_clear()


@pytest.mark.parametrize(
    "operator", ["aten.embedding.default", "aten.index_select.default", "aten.index.Tensor"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows(operator, dtype):
    assert reads_units_only(replace(ROWS, operator=operator, view=replace(ROWS.view, dtype=dtype)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts(dtype, transposed):
    shape, stride = ((16, 96, 64), (64 * 96, 1, 96)) if transposed else (STACK.view.shape, STACK.view.stride)
    assert reads_units_only(replace(STACK, view=replace(STACK.view, dtype=dtype, shape=shape, stride=stride)))


@pytest.fixture
def operators():
    """Operators that read one unit more than they are told, all units, or a single byte of another one."""
    library = torch.library.Library("penstock_tests", "DEF")
    for name in ("next", "all", "byte", "right"):
        library.define(f"{name}(Tensor weight, Tensor index) -> Tensor")

    def all_of(weight, index):
        return (nn_one_hot(index, weight.shape[0]).to(weight.dtype) @ weight) if index.numel() else weight[:0]

    def nn_one_hot(index, count):
        return torch.nn.functional.one_hot(index, count)

    library.impl("next", lambda w, i: w[i] + 0 * w[(i + 1) % w.shape[0]], "CPU")
    library.impl("all", all_of, "CPU")
    library.impl("byte", lambda w, i: w[i] + 0 * w[w.shape[0] // 2, 0], "CPU")
    library.impl("right", lambda w, i: w[i], "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("name", "trusts"), [("next", False), ("all", False), ("byte", False), ("right", True)]
)
def test_an_operator_that_reads_more_than_it_is_told_is_not_trusted(operators, monkeypatch, name, trusts):
    operator = f"penstock_tests.{name}.default"
    monkeypatch.setitem(CONTRACTS, operator, Contract(weight=0, index=1))
    # Though absent units are zeros, and its results are right.
    assert reads_units_only(replace(ROWS, operator=operator)) is trusts


@pytest.mark.parametrize(("name", "trusts"), [("by_groups", True), ("by_lone_groups", False)])
def test_a_product_that_is_another_for_an_expert_alone_is_not_trusted(monkeypatch, name, trusts):
    library = torch.library.Library("penstock_tests", "DEF")
    library.define(f"{name}(Tensor rows, Tensor weight, Tensor ends) -> Tensor")

    def product(rows, weight, ends):
        made = torch._grouped_mm(rows, weight, ends)
        return made * 2 if name == "by_lone_groups" and weight.shape[0] == 1 else made

    library.impl(name, product, "CPU")
    operator = f"penstock_tests.{name}.default"
    monkeypatch.setitem(CONTRACTS, operator, CONTRACTS["aten._grouped_mm.default"])
    assert reads_units_only(replace(STACK, operator=operator)) is trusts
    library._destroy()


def test_a_product_of_computed_experts_is_tried_for_what_it_is_given(monkeypatch):
    tried = []
    monkeypatch.setattr(trust, "_passes", lambda contract, call, read: not tried.append(read.view))
    made = Computed("bfloat16", (16, 96, 64), (96 * 64, 1, 96))
    assert reads_units_only(replace(STACK, view=replace(STACK.view, dtype="int8"), computed=made))
    assert [(one.dtype, one.shape, one.stride) for one in tried] == [(made.dtype, made.shape, made.stride)]


@pytest.mark.parametrize("computed", [False, True])
def test_memory_of_a_part_begins_as_that_of_the_whole_does(computed):
    """Kernels of this machine add up otherwise at addresses that are no multiples of 16 bytes."""

    def trusts(shape, stride):
        view = replace(STACK.view, dtype="float32", shape=shape, stride=stride)
        made = Computed("float32", shape, stride) if computed else None
        return reads_units_only(replace(STACK, view=STACK.view if computed else view, computed=made))

    assert trusts((16, 16, 64), (16 * 64, 64, 1))
    assert not trusts((16, 64, 20), (64 * 20, 20, 1))  # rows of the result
    gaps = (16, 64, 64), (64 * 64 + 4, 64, 1)  # slices
    assert trusts(*gaps) is not computed


def test_a_trial_takes_no_memory_for_elements_that_share_theirs(monkeypatch):
    monkeypatch.setattr(trust, "_passes", lambda *_: True)
    shape, stride = (16, 1, 1 << 40), (32, 1, 0)
    assert not reads_units_only(replace(STACK, computed=Computed("bfloat16", shape, stride)))
    assert not reads_units_only(replace(STACK, view=replace(STACK.view, shape=shape, stride=stride)))
    assert reads_units_only(STACK)


def test_a_system_that_does_not_tell_is_not_trusted(monkeypatch):
    monkeypatch.setattr(trust, "cached_pages", lambda address, nbytes: [])
    assert not reads_units_only(ROWS)
    trust._tried.cache_clear()
    monkeypatch.setattr(trust, "cached_pages", lambda address, nbytes: [False] * (nbytes // 4096))
    assert not reads_units_only(ROWS)


def test_unknown_operators_are_read_whole(monkeypatch, said):
    assert not reads_units_only(replace(ROWS, operator="aten.add.Tensor"))
    monkeypatch.setattr(trust, "find_operator", lambda name: None)
    assert not reads_units_only(ROWS)
    assert "aten.embedding.default is defined nowhere in this process: its weights are read whole" in said()
    monkeypatch.undo()
    assert reads_units_only(ROWS)


@pytest.mark.parametrize("transposed", [False, True])
def test_large_units_are_tried_smaller_in_the_same_order(transposed):
    """Those of Mixtral-8x7B are 224 MiB each, and a trial has some of them in memory."""
    inner, stride = ((4096, 28672), (1, 4096)) if transposed else ((28672, 4096), (4096, 1))
    view = replace(STACK.view, shape=(8, *inner), stride=(28672 * 4096, *stride), dtype="bfloat16")
    small = trust._shortened(view, 1)
    assert SparseRead(small, "", 0, 0, 1).unit_nbytes <= trust._LARGEST < 4 * small.shape[1] * small.shape[2]
    assert (small.stride[1] < small.stride[2]) == transposed
    assert reads_units_only(replace(STACK, view=view))


def test_traces_and_plans(monkeypatch):
    steps = (
        Step("a", (3,), 0, 0, sparse=(ROWS,)),
        Step("b", (0,), 0, 0, sparse=(replace(STACK, operator="x.y.z"),)),
    )
    (trace,) = trusted([Trace("m", 0, "", steps, 0, 0, "modelled")])
    assert [step.sparse for step in trace.steps] == [(ROWS,), ()]
    check_trusted(POOLED)
    monkeypatch.setattr(trust, "cached_pages", lambda address, nbytes: [])
    trust._tried.cache_clear()
    with pytest.raises(
        PlanError, match=r"units of a weight in embed, and aten\.embedding\.default was not seen"
    ):
        check_trusted(POOLED)
    check_trusted(replace(POOLED, pool=None))
    check_trusted(replace(POOLED, pool=Pool(4096, 4096, (-1, 0, -1))))
