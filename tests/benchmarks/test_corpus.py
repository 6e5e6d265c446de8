"""The corpus' steps of training: what their backwards read, and what work they take; and random problems."""

import json

import pytest

from benchmarks.corpus import list_programs, main

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


def planned(path, against=None):
    main(count=2, seed=1283, arena="contiguous", check=True, json_path=path, against=against)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return rows


def test_the_same_seeds_give_the_same_plans(tmp_path, capsys):
    first = planned(tmp_path / "first")
    assert planned(tmp_path / "second", tmp_path / "first") == first
    assert [row["seed"] for row in first] == [1283, 1284]
    assert "2 problems: 0 plans are faster by 1 %, 0 slower." in capsys.readouterr().out
