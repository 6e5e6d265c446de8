from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from penstock.passes.annotate import annotate
from penstock.passes.trace import with_measured
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Hardware, Work
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export

MACHINE = Hardware("test", flops_per_s=1e8, memory_bytes_per_s=1e8, link_bytes_per_s=1e9, link_latency_ns=0)
"""So slow that a kernel takes longer than its launch: 10 ns for an operation or a byte."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 16)
        self.q = nn.Linear(16, 16)
        self.conv = nn.Conv1d(5, 4, 1, bias=False)

    def forward(self, ids):
        x = self.q(torch.relu(self.embed(ids)))
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return torch.tanh(self.conv(x)) * 2


def trace_of(**options):
    exported = torch.export.export(Block(), (torch.zeros(2, 5, dtype=torch.int64),), **options)
    return annotate(exported, hardware=MACHINE).traces[0]


def test_work_of_each_step():
    trace = trace_of()
    assert [step.name for step in trace.steps] == ["embedding", "linear", "conv1d"]
    embedding, linear, conv = trace.steps
    rows = 2 * 5 * 16 * 4
    # An embedding reads as many rows as it returns, and its indices.
    assert (embedding.lead_work, embedding.read_work) == (Work(), Work(0, rows + rows + 2 * 5 * 8))
    assert linear.lead_work == Work(0, 2 * rows)
    assert linear.read_work == Work(2 * 10 * 16 * 16, 2 * rows + 17 * 16 * 4)
    # Attention: two products of 5 by 5 by 16 in each of two rows; its three inputs are one tensor.
    assert conv.lead_work.flops == 2 * 2 * 2 * 5 * 5 * 16
    assert conv.read_work.flops == 2 * (2 * 4 * 16) * 5
    assert trace.tail_work == Work(0, 4 * (2 * 4 * 16 * 4))


def test_times_follow_the_roofline():
    trace = trace_of()
    linear = trace.steps[1]
    assert linear.read_work.flops > linear.read_work.nbytes
    assert linear.read_ns == 10 * linear.read_work.flops
    assert linear.lead_ns == 10 * linear.lead_work.nbytes
    assert trace.times == "modelled"
    slow_memory = with_times(trace, Hardware("slow", 1e12, 1e7, 1e9, 0))
    assert slow_memory.steps[1].read_ns == 100 * linear.read_work.nbytes
    assert slow_memory.tail_ns == 10 * trace.tail_ns
    assert with_times(slow_memory, MACHINE) == trace


def test_a_kernel_takes_a_least_time_however_small_it_is():
    fast = Hardware("fast", 1e15, 1e15, 1e9, 0)
    for hardware, least in ((fast, 2100), (replace(fast, disk_bytes_per_s=1e9), 3400)):
        embedding, linear, _ = with_times(trace_of(), hardware).steps
        assert (embedding.lead_ns, embedding.read_ns) == (0, least)  # nothing comes before
        assert (linear.lead_ns, linear.read_ns) == (least, least)


def test_dynamic_sizes_count_as_exported():
    batch = torch.export.Dim("batch", min=1, max=64)
    static, dynamic = trace_of(), trace_of(dynamic_shapes=({0: batch},))
    assert [step.read_work for step in dynamic.steps] == [step.read_work for step in static.steps]
    assert dynamic.shape.endswith("=2")
    assert static.shape == ""


def test_measured_times_replace_modelled_ones():
    trace = trace_of()
    measured = with_measured(trace, [1, 2, 3], [4, 5, 6], 7)
    assert [(step.lead_ns, step.read_ns) for step in measured.steps] == [(1, 4), (2, 5), (3, 6)]
    assert (measured.tail_ns, measured.gap_ns, measured.times) == (7, 0, "measured")
    assert measured.compute_ns == 1 + 2 + 3 + 4 + 5 + 6 + 7
    with pytest.raises(PassError, match="2 lead times and 3 read times, expected 3 of each"):
        with_measured(trace, [1, 2], [4, 5, 6], 7)


@pytest.mark.parametrize("name", ["Branches", "Loop", "Scan", "WithoutGrad"])
def test_control_flow_costs_what_its_bodies_cost(name):
    _, exported = export(CASES[name])
    trace = annotate(exported, hardware=MACHINE).traces[0]
    products = 2 if name == "Branches" else 1
    assert max(step.read_work.flops for step in trace.steps) == products * 2 * 3 * 8 * 8


def test_recurrent_and_convolution_flops_are_found():
    _, exported = export(CASES["Recurrent"])
    recurrent = annotate(exported, hardware=MACHINE).traces[0]
    sizes = 2 * (4 * 8 * 6 + 4 * 8 * 8) + 2 * (4 * 8 * 16 + 4 * 8 * 8)
    assert recurrent.steps[0].read_work.flops == 2 * 2 * 5 * sizes
    _, exported = export(CASES["Convolution"])
    convolution = annotate(exported, hardware=MACHINE).traces[0]
    assert convolution.steps[0].read_work.flops == 2 * (2 * 4 * 9 * 9) * (3 * 3 * 3)


def test_a_program_without_weights_is_all_tail():
    _, exported = export(CASES["NoWeights"])
    trace = annotate(exported, hardware=MACHINE).traces[0]
    assert trace.steps == ()
    assert trace.tail_ns == 10 * 4 * 3 * 8 * 4
