"""Peaks of intermediate values, on graphs whose peaks are known."""

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from penstock.passes.activations import Activations
from tests.passes.pass_models import Calls

KIB = 1024


def peak(call, *arguments, shapes=None, **tensors):
    """The bytes that a function of tensors takes at once, of inputs with these dynamic shapes."""
    shapes = shapes and {"args": shapes}
    exported = torch.export.export(Calls(call, **tensors), arguments, dynamic_shapes=shapes)
    return Activations.of(exported).peak()


def test_a_chain_keeps_two_values_at_once():
    assert peak(lambda m, x: (x + 1).sin().cos().tan(), torch.zeros(KIB)) == 2 * 4 * KIB


def test_a_residual_is_alive_until_it_is_added():
    assert peak(lambda m, x: (kept := x + 1).sin().cos() + kept, torch.zeros(KIB)) == 3 * 4 * KIB


def test_views_take_nothing_and_keep_their_base():
    found = peak(lambda m, x: (x + 1).view(2, -1).t()[:4].sum() + x.sum(), torch.zeros(KIB))
    assert 4 * KIB < found < 4 * KIB + 64


def test_weights_and_inputs_are_not_counted_and_symbols_have_their_exported_size():
    batch = torch.export.Dim("batch", min=2, max=64)
    found = peak(
        lambda m, x: nn.functional.linear(x, m.w, m.b),
        torch.zeros(8, 16),
        shapes=({0: batch},),
        w=torch.zeros(32, 16),
        b=torch.zeros(32),
    )
    assert found == 8 * 32 * 4


def test_a_product_whose_bias_is_expanded_to_symbolic_sizes_is_propagated():
    def alibi(m, mask, x):
        rows, length = mask.shape
        bias = mask.cumsum(-1)[:, None, None].expand(rows, 2, 1, length).reshape(rows * 2, 1, length)
        heads = x.view(rows, length, 2, -1).transpose(1, 2).reshape(rows * 2, length, -1)
        return bias.baddbmm(heads, heads.transpose(1, 2))

    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    assert peak(alibi, torch.ones(3, 5), torch.zeros(3, 5, 16), shapes=(sizes, sizes)) > 0


def test_a_product_by_slices_without_ends_takes_its_result_alone():
    w, x = (torch.ones(4, size, 32, dtype=torch.bfloat16) for size in (32, 16))
    assert peak(lambda m, x: torch._grouped_mm(x, m.w), x, w=w) == 4 * 16 * 32 * 2


def test_rows_of_an_input_take_their_result_alone_and_those_of_a_weight_as_much_again():
    table, numbers = torch.ones(KIB, 4), torch.arange(KIB // 2)
    result = KIB // 2 * 4 * 4
    assert peak(lambda m, table, numbers: table[numbers], table, numbers) == result
    assert peak(lambda m, numbers: m.w[numbers], numbers, w=table) == 2 * result + 35 * (KIB // 2 + 1)


def test_the_body_of_a_branch_counts_beside_what_is_alive():
    def branch(m, x):
        kept = x + 1
        y = torch.cond(x.sum() > 0, lambda x: (x.sin() + x.cos()).tan(), lambda x: x.clone(), (x,))
        return kept + y

    assert peak(branch, torch.zeros(KIB)) >= 4 * 4 * KIB


def test_sizes_of_a_call_count_as_the_graph_says_and_not_in_proportion():
    rows, scores = (
        torch.export.Dim("rows", min=2, max=4096),
        Calls(lambda m, x: (x @ x.t()).softmax(-1).sum()),
    )
    shapes = {"args": ({0: rows},)}
    exported = torch.export.export(scores, (torch.zeros(4, 16),), dynamic_shapes=shapes)
    (symbol,) = map(str, exported.range_constraints)
    found = Activations.of(exported)
    assert found.peak() == 2 * 4 * 4 * 4
    assert found.peak({symbol: 400}) == 2 * 400 * 400 * 4


def test_a_size_of_one_input_that_another_is_scaled_to_may_be_dynamic():
    def scaled(m, x, like):
        return nn.functional.interpolate(x, size=like.shape[-2:], mode="nearest")

    inputs = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 8, 8)
    sizes = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    assert peak(scaled, *inputs, shapes=(sizes, sizes)) == 8 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_fills_a_mask_of_booleans_into_one_of_numbers(dtype, heads):
    def attention(m, x, mask):
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, mask = torch.zeros(1, 2, 512, 16, dtype=dtype), torch.ones(1, heads, 512, 512, dtype=torch.bool)
    of_booleans, of_numbers = (_taken(Calls(attention), x, one) for one in (mask, mask.to(dtype)))
    length = torch.export.Dim("length", min=2, max=4096)
    sizes = ({2: length}, {2: length, 3: length})
    found = [peak(attention, x, one, shapes=sizes) for one in (mask, mask.to(dtype))]
    assert found[0] - found[1] == of_booleans - of_numbers == mask.numel() * x.element_size()


def _taken(module, *given):
    """The most bytes that torch holds at once for a call, as its profiler counts."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        module(*given)
    events = found.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))
