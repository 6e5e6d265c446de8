"""The corpus' steps of training: what their backwards read, and the work that they take."""

import pytest

from benchmarks.corpus import list_programs

UNREAD = {
    "llama-3.1-8b, train-lora": {"embed_tokens", "layers.0.q", "layers.0.k", "layers.0.v"},
    "vit-h-14, train-full": {"patches"},
}


def halves(program):
    late = [step for step in program.trace.steps if step.name.endswith(".backward")]
    return [step for step in program.trace.steps if step not in late], late


@pytest.mark.parametrize("name", UNREAD)
def test_a_backward_reads_the_forward_in_reverse_but_for_what_needs_no_gradient(name):
    forward, backward = halves(list_programs()[name]())
    expected = [step for step in reversed(forward) if step.name not in UNREAD[name]]
    assert len(forward) - len(expected) == len(UNREAD[name])
    assert [step.name.removesuffix(".backward") for step in backward] == [step.name for step in expected]
    assert [step.reads for step in backward] == [step.reads for step in expected]


@pytest.mark.parametrize(
    ("name", "times"), [("llama-3.1-8b, train-lora", 1.04), ("vit-h-14, train-full", 2.0)]
)
def test_a_backward_takes_its_multiple_of_the_forwards_work(name, times):
    program = list_programs()[name]()
    forward, backward = halves(program)
    early = sum(step.lead_work.flops + step.read_work.flops for step in forward)
    late = (
        sum(step.lead_work.flops + step.read_work.flops for step in backward) + program.trace.tail_work.flops
    )
    assert times * 0.99 < late / early <= times
    # The attention of a layer comes behind the product that reads its output, and not before.
    attention = next(step for step in backward if step.name.endswith(".v.backward"))
    assert attention.lead_work.flops > 0
