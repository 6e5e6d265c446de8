"""Which nodes read by units, which units, and how calls that name many of them run in parts."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.passes.annotate import annotate
from penstock.passes.sparse import contracts
from penstock.passes.sparse.calls import Rounds, run_in_rounds
from penstock.passes.sparse.contracts import CONTRACTS
from tests.passes.pass_models import Calls

IDS = torch.tensor([3, 1, 3])
EMBEDDING = "aten.embedding.default"
INDEX = "aten.index.Tensor"
SELECT = "aten.index_select.default"
GROUPED = "aten._grouped_mm.default"


def table(rows=16, *width):
    return torch.randn(rows, *(width or (32,)))


def payload_of(call, *args, dynamic=None, **tensors):
    return annotate(torch.export.export(Calls(call, **tensors), args or (IDS,), dynamic_shapes=dynamic))


def found(call, *args, **tensors):
    payload = payload_of(call, *args, **tensors)
    return [one for step in payload.traces[0].steps for one in step.sparse]


def geometry(read):
    return read.operator, read.view.shape, read.view.stride, read.view.offset


def test_an_embedding():
    payload = payload_of(lambda m, x: nn.functional.embedding(x, m.w, padding_idx=1), w=table())
    (step,) = payload.traces[0].steps
    (read,) = step.sparse
    assert geometry(read) == (EMBEDDING, (16, 32), (32, 1), 0)
    assert (read.route, read.asked, read.count, read.unit_nbytes) == (0, 3, 16, 128)
    assert read.storage in step.reads


def test_an_index_of_dimension_0():
    assert [geometry(one) for one in found(lambda m, x: m.w[x], w=table(16, 4, 8))] == [
        (INDEX, (16, 4, 8), (32, 8, 1), 0)
    ]
    assert [geometry(one) for one in found(lambda m, x: m.w[x - 4], w=table())] == [
        (INDEX, (16, 32), (32, 1), 0)
    ]
    assert [
        one.asked for one in found(lambda m, x: m.w[x], torch.zeros(5, 7, dtype=torch.int64), w=table())
    ] == [16]


def test_an_index_select_of_dimension_0_only():
    assert [one.operator for one in found(lambda m, x: m.w.index_select(0, x), w=table())] == [SELECT]
    assert found(lambda m, x: m.w.index_select(1, x), w=table()) == []
    assert found(lambda m, x: m.w.index_select(-1, x), w=table()) == []


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_of_experts(transposed):
    experts = torch.randn(8, 16, 32, dtype=torch.bfloat16)
    rows, ends = (
        torch.randn(6, 32 if transposed else 16, dtype=torch.bfloat16),
        torch.tensor([0, 2, 2, 3, 3, 6, 6, 6]),
    )

    def call(m, rows, ends):
        return torch._grouped_mm(rows, m.w.transpose(1, 2) if transposed else m.w, offs=ends)

    (read,) = found(call, rows, ends.to(torch.int32), w=experts)
    shape, stride = ((8, 32, 16), (512, 1, 32)) if transposed else ((8, 16, 32), (512, 32, 1))
    assert geometry(read) == (GROUPED, shape, stride, 0)
    assert (read.asked, read.unit_nbytes, read.unit_stride) == (6, 1024, 1024)
    assert CONTRACTS[GROUPED].units(ends, 8) == [1, 3, 5]


def test_views_that_keep_dimension_0_outermost():
    assert [geometry(one) for one in found(lambda m, x: m.w.view(16, 4, 8)[x], w=table())] == [
        (INDEX, (16, 4, 8), (32, 8, 1), 0)
    ]
    assert [geometry(one) for one in found(lambda m, x: m.w[2:10][x], w=table())] == [
        (INDEX, (8, 32), (32, 1), 256)
    ]
    assert [geometry(one) for one in found(lambda m, x: m.w[:, 8:16][x], w=table())] == [
        (INDEX, (16, 8), (32, 1), 32)
    ]
    assert [geometry(one) for one in found(lambda m, x: m.w[::2][x], w=table())] == [
        (INDEX, (8, 32), (64, 1), 0)
    ]
    assert found(lambda m, x: m.w.t()[x], w=table()) == []
    assert found(lambda m, x: m.w.unsqueeze(0)[x - x], w=table()) == []  # a single unit
    assert found(lambda m, x: m.w[0].expand(9, 32)[x], w=table()) == []  # all units are one


def test_a_weight_that_is_a_view_into_a_larger_storage():
    base = torch.randn(24, 32)
    (read,) = found(lambda m, x: m.w[x], w=base[4:20])
    assert geometry(read) == (INDEX, (16, 32), (32, 1), 4 * 128)
    (read,) = found(lambda m, x: m.w[2:][x], w=base[4:20])
    assert geometry(read) == (INDEX, (14, 32), (32, 1), 6 * 128)


def test_a_tied_table_is_read_by_units_in_one_step_and_whole_in_another():
    payload = payload_of(lambda m, x: m.w[x] @ m.head.t(), w=(shared := table()), head=shared)
    steps = payload.traces[0].steps
    assert [len(step.sparse) for step in steps] == [1, 0]
    assert steps[0].reads == steps[1].reads == (steps[0].sparse[0].storage,)


def test_reads_with_the_same_operand_are_of_one_route():
    def call(m, x, y):
        return m.a[x] + m.b[y] + m.c[x] + nn.functional.embedding(x, m.d)

    reads = found(call, IDS, IDS + 1, a=table(), b=table(), c=table(), d=table())
    assert [one.route for one in reads] == [0, 1, 0, 0]


def test_other_units_of_one_storage():
    def call(m, x):
        return m.w[x].sum() + m.w.view(8, 64)[x].sum()

    assert found(call, w=table()) == []
    assert len(found(lambda m, x: m.w[x].sum() + m.w.view(16, 4, 8)[x].sum(), w=table())) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m.w[(x > 1).repeat(16)[:16]].sum(),  # a mask
        lambda m, x: m.w[x, x],  # two indices
        lambda m, x: m.w[:, x],
        lambda m, x: torch.gather(m.w, 0, x[:, None].expand(3, 32)),
        lambda m, x: torch.take(m.w, x),
        lambda m, x: (m.w * 2)[x],  # no weight any more
        lambda m, x: nn.functional.embedding(x, m.w.clone()),
    ],
)
def test_what_is_not_read_by_units(call):
    payload = payload_of(call, w=table())
    assert payload.traces[0].steps
    assert all(step.sparse == () for step in payload.traces[0].steps)


def test_an_argument_of_the_same_storage_is_read_whole():
    ids = torch.arange(64, dtype=torch.int64).view(16, 4) % 16
    assert found(lambda m, x: m.w[m.w[:, 0]] + x.sum(), w=ids) == []
    assert found(lambda m, x: m.w[m.w] + x.sum(), w=ids) == []
    assert len(found(lambda m, x: m.w[m.other[:, 0]] + x.sum(), w=ids, other=ids.clone())) == 1


def test_a_product_with_another_argument_of_the_same_storage_is_not_by_tiles(monkeypatch):
    monkeypatch.setattr(contracts, "LEAST", 0)
    w, other, linear = table(48, 64), table(1, 64), nn.functional.linear
    (read,) = found(lambda m, x: linear(m.other * x.sum(), m.w), w=w, other=other)
    assert read.tiles
    for call in (
        lambda m, x: linear(m.w, m.w) + x.sum(),
        lambda m, x: linear(m.w[:1], m.w) + x.sum(),
        lambda m, x: linear(m.other * x.sum(), m.w, m.w[:, 0]),
    ):
        assert found(call, w=w, other=other) == []


def test_a_written_weight_is_not_read_by_units():
    def call(m, x):
        m.w.add_(1)
        return m.w[x]

    assert found(call, w=table()) == []


def test_a_returned_weight_is_not_read_by_units():
    assert found(lambda m, x: (m.w[x], m.w), w=table()) == []


def test_a_conjugate_is_not_read_by_units():
    assert found(lambda m, x: m.w.conj()[x], w=torch.randn(16, 32, dtype=torch.complex64)) == []
    assert len(found(lambda m, x: m.w[x], w=torch.randn(16, 32, dtype=torch.complex64))) == 1


def test_dynamic_sizes():
    sizes = {"args": ({0: torch.export.Dim("n", min=2, max=64)},)}
    (read,) = found(lambda m, x: m.w[x], IDS, dynamic=sizes, w=table())
    assert read.asked == 3
    # A view whose sizes depend on the call has no units that a plan could know.
    assert found(lambda m, x: m.w[: x.shape[0]][x - x], IDS, dynamic=sizes, w=table(64)) == []


# How indices name units, and calls in parts.


@pytest.mark.parametrize(
    ("operator", "index", "units"),
    [
        (EMBEDDING, [[3, 1], [3, 0]], [0, 1, 3]),
        (EMBEDDING, [-1, 2, 9, 10], [2, 9]),  # the operator refuses what is out of range
        (INDEX, [-1, 2, -10, 2, 10, -11], [0, 2, 9]),
        (SELECT, [], []),
        (GROUPED, [0, 0, 5, 5, 5, 6, 6, 6, 6, 6], [2, 5]),
        (GROUPED, [4, 4, 4, 4, 4, 4, 4, 4, 4, 9], [0, 9]),
        (GROUPED, [0] * 10, []),
    ],
)
def test_units_that_an_index_names(operator, index, units):
    assert CONTRACTS[operator].units(torch.tensor(index, dtype=torch.int32), 10) == units


@contextmanager
def held(tensor, whole, part):
    """Has the units of a part in `tensor`, and something else in all others."""
    tensor.fill_(float("nan"))
    tensor[part] = whole[part]
    yield
    tensor.fill_(float("nan"))


def in_parts(operator, call, whole, arguments, parts):
    tensor = torch.full_like(whole, float("nan"))
    contract = CONTRACTS[operator]
    _, index = contract.operands(arguments)
    given = contract.replaced(arguments, tensor, index)
    return run_in_rounds(contract, call, given, Rounds(parts, lambda part: held(tensor, whole, part)))


@pytest.mark.parametrize("parts", [[[0, 1], [3], [9]], [[0], [1, 3, 9]], [[0, 1, 3], [9]]])
@pytest.mark.parametrize(
    ("operator", "make"),
    [
        (EMBEDDING, lambda w, i: (w, i.abs())),
        (SELECT, lambda w, i: (w, 0, i.abs().view(-1))),
        (INDEX, lambda w, i: (w, [i])),
    ],
)
def test_parts_by_numbers_are_the_call(operator, make, parts):
    call = getattr(getattr(torch.ops.aten, operator.split(".")[1]), operator.split(".")[2])
    whole, index = torch.randn(10, 4, 3), torch.tensor([[3, 1, 9], [0, 3, 0]])
    if operator == INDEX:
        index[0, 2] = -1
    if operator == EMBEDDING:
        whole = whole.view(10, 12)
    arguments = make(whole, index)
    assert torch.equal(in_parts(operator, call, whole, arguments, parts), call(*arguments))


@pytest.mark.parametrize("wrong", [10, -11])
def test_parts_refuse_an_index_that_is_out_of_range(wrong):
    whole = torch.randn(10, 4)
    index = torch.tensor([0, wrong, 9])
    with pytest.raises(IndexError, match="out of"):
        in_parts(INDEX, torch.ops.aten.index.Tensor, whole, (whole, [index]), [[0], [9]])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        in_parts(EMBEDDING, torch.ops.aten.embedding.default, whole, (whole, index), [[0], [9]])


def test_parts_refuse_a_negative_index_where_the_operator_does():
    whole = torch.randn(10, 4)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        torch.ops.aten.embedding.default(whole, torch.tensor([-1]))
    index = torch.tensor([0, -1, 9])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        in_parts(EMBEDDING, torch.ops.aten.embedding.default, whole, (whole, index), [[0], [9]])


@pytest.mark.parametrize("parts", [[[1, 3], [4], [9]], [[1], [3], [4, 9]], [[1, 3, 4], [9]]])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_by_ends_are_the_call(parts, transposed):
    whole = torch.randn(10, 16, 32).to(torch.bfloat16)
    if transposed:
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
    counts = torch.tensor([0, 3, 0, 1, 2, 0, 0, 0, 0, 4])
    ends = counts.cumsum(0, dtype=torch.int32)
    arguments = (torch.randn(10, 16).to(torch.bfloat16), whole, ends)
    call = torch.ops.aten._grouped_mm.default
    assert CONTRACTS[GROUPED].units(ends, 10) == [1, 3, 4, 9]
    assert torch.equal(in_parts(GROUPED, call, whole, arguments, parts), call(*arguments))


def test_the_contract_of_a_read_leaves_other_facts_alone():
    payload = payload_of(lambda m, x: m.w[x] @ m.v, w=table(), v=table(32, 8))
    plain = [replace(step, sparse=()) for step in payload.traces[0].steps]
    assert [step.sparse == () for step in payload.traces[0].steps] == [False, True]
    assert [step.reads for step in plain] == [step.reads for step in payload.traces[0].steps]
