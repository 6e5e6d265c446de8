"""payload.json: golden bytes, round trips, and bytes gone bad."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.facts import model
from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.model import ITEM_SIZES, Computed, Method, Part, Step, Storage, Weight
from penstock.schedule.payload.codec import Payload, ProgramFile, plan_from_json, verify_payload
from tests.schedule.payload.payload_example import BYTES, HARDWARE, PAYLOAD, PLAN, TRACE
from tests.schedule.verify.random_plans import random_case

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "data" / "payload.json"


def test_golden_bytes():
    # Changed on purpose? Then docs/payload.md and the version too: write PAYLOAD.to_bytes() to the file.
    assert PAYLOAD.to_bytes() == GOLDEN.read_bytes()
    assert Payload.from_bytes(GOLDEN.read_bytes()) == PAYLOAD
    verify_payload(PAYLOAD)


def test_what_a_machine_or_an_operator_may_add_is_kept():
    (step, *others) = TRACE.steps
    read = replace(step.sparse[0], computed=Computed("float32", (64, 8, 4), (32, 1, 8)))
    trace = replace(TRACE, steps=(replace(step, sparse=(read,)), *others))
    computes = replace(PAYLOAD, traces=(trace,), plans=())
    launches = replace(PAYLOAD, hardware=replace(HARDWARE, host_step_ns=5_800))
    for payload in (computes, launches):
        assert Payload.from_bytes(payload.to_bytes()) == payload


def produced_example():
    """Storage 3 is written by a forward, and read by its backward."""
    forward = replace(TRACE, steps=(*TRACE.steps, Step("keep", (), 5, 6, writes=(3,))), follows=1)
    last = Step("back", (1, 3), 0, 900)
    backward = replace(TRACE, method="backward", graph=1, steps=(TRACE.steps[0], last), follows=0)
    return (*PAYLOAD.storages, Storage(640, "produced")), (forward, backward)


def produced_payload(storages, traces):
    kept = Weight("kept.0", "value", "cpu", (Part("", "float32", (160,), (1,), 3, 0),))
    methods = tuple(replace(PAYLOAD.methods[0], name=t.method, graph=t.graph) for t in traces)
    return replace(
        PAYLOAD,
        lowering="eager",
        storages=storages,
        weights=(*PAYLOAD.weights, kept),
        methods=methods,
        traces=traces,
        probes=(),
        plans=(),
    )


def test_produced_storages():
    payload = produced_payload(*produced_example())
    assert Payload.from_bytes(payload.to_bytes()) == payload
    edges = payload.read_graph().edges(data="why")
    found = [(a, b) for a, b, why in edges if ("storage", 3) in (a, b) and why in ("reads", "writes")]
    assert sorted(found) == [(("step", 0, 3), ("storage", 3)), (("storage", 3), ("step", 1, 1))]


@pytest.mark.parametrize(
    ("storage", "forward", "backward", "sentence"),
    [
        ({"phase": 8}, {}, {}, "storages[3]: expected no extents, no sha256 and phase 0"),
        ({"kind": "streamable"}, {}, {}, "expected produced storages, got storage 3, which is streamable"),
        ({}, {"writes": ()}, {}, "steps[3].reads: expected one storage or more, ascending, got []"),
        ({}, {"writes": (4,)}, {}, "steps[3].writes: expected indices of 4 storages, got [4]"),
        (
            {},
            {"writes": (3,), "reads": (3,)},
            {},
            "writes: expected none of the storages [3] that the step r",
        ),
        ({}, {"writes": (), "reads": (1,)}, {}, "traces[1].steps[1].reads: expected produced storages that "),
        ({}, {"writes": (), "reads": (3,)}, {"writes": (3,), "reads": ()}, "traces[0].steps[3].reads: expec"),
        ({}, {}, {"writes": (3,), "reads": ()}, "expected storages that no other step writes, got 3 again"),
    ],
)
def test_produced_storages_are_written_once_and_then_read(storage, forward, backward, sentence):
    storages, (first, second) = produced_example()
    storages = (*storages[:3], replace(storages[3], **storage))
    first = replace(first, steps=(*first.steps[:3], replace(first.steps[3], **forward)))
    second = replace(second, steps=(second.steps[0], replace(second.steps[1], **backward)))
    with pytest.raises(PayloadError, match=re.escape(sentence)):
        produced_payload(storages, (first, second)).to_bytes()


TITLES = {"Payload": "## The top level", "ProgramFile": "### Program", "Decisions": "### Plan"}


def test_every_field_is_specified():
    page = (ROOT / "docs" / "payload.md").read_text()
    classes = {c for c in vars(model).values() if isinstance(c, type) and is_dataclass(c)}
    classes -= {model.Confidence}  # it is worked out from a plan, and never written
    for cls in (*classes, Payload, ProgramFile):
        title = TITLES.get(cls.__name__, f"### {cls.__name__}")
        section = page.split(f"\n{title}\n", 1)[1].split("\n## ")[0].split("\n### ")[0]
        named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)))
        assert set(named) == {f.name for f in fields(cls)}, cls.__name__


def test_item_sizes_are_those_of_torch():
    dtypes = {
        str(d).removeprefix("torch."): d.itemsize for d in vars(torch).values() if isinstance(d, torch.dtype)
    }
    quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    assert {name: ITEM_SIZES.get(name) for name in dtypes.keys() - quantised} == {
        name: nbytes for name, nbytes in dtypes.items() if name not in quantised
    }
    assert not quantised & ITEM_SIZES.keys()


def test_lookups():
    assert PAYLOAD.storage_names() == ("embedding.weight", "projection.weight.data", "gr\u00f6\u00dfe")
    assert replace(PAYLOAD, weights=()).storage_names() == ("storage 0", "storage 1", "storage 2")
    assert PAYLOAD.trace_for(0) is TRACE
    with pytest.raises(PayloadError, match="no trace of graph 7"):
        PAYLOAD.trace_for(7)


def test_importing_the_payload_is_quick():
    slow = "{'torch', 'pydantic', 'numpy', 'scipy', 'networkx'}"
    code = f"import sys, penstock.schedule.payload.codec; assert not {slow} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


@pytest.mark.parametrize("seed", range(30))
def test_round_trip(seed):
    case = random_case(Random(seed))
    methods = tuple(Method(t.method, t.graph, ()) for t in case.traces)
    payload = Payload(
        lowering="none",
        torch="2.11.0",
        storages=case.storages,
        weights=(),
        methods=methods,
        traces=case.traces,
        plans=(case.plan,),
    )
    data = payload.to_bytes()
    assert Payload.from_bytes(data) == payload
    assert Payload.from_bytes(data).to_bytes() == data
    assert plan_from_json(case.plan.to_json()) == case.plan


def test_whole_rates_are_written_as_they_are_read():
    whole = replace(PAYLOAD, hardware=replace(HARDWARE, flops_per_s=10**12))
    assert whole.to_bytes() == PAYLOAD.to_bytes()


def test_an_unsafe_plan_is_named():
    bad = replace(PAYLOAD, plans=(PLAN, replace(PLAN, arena_bytes=8_191)))
    with pytest.raises(PlanError, match=r"plan 1 of the payload is not safe: .* 8191"):
        verify_payload(bad)


# Bytes gone bad: an error of the tree or a valid payload, never anything else.


def survives(data):
    try:
        payload = Payload.from_bytes(data)
    except PayloadError:
        return
    assert Payload.from_bytes(payload.to_bytes()) == payload
    try:
        verify_payload(payload)
    except PlanError:
        return


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(BYTES) - 1), st.integers(0, 255)), max_size=3))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    data = bytearray(BYTES)
    for at, byte in flips:
        data[at] = byte
    survives(bytes(data))


@settings(max_examples=60)
@given(st.integers(0, len(BYTES) - 2))
def test_cut_files(length: int) -> None:
    with pytest.raises(PayloadError):
        Payload.from_bytes(BYTES[:length])


def places(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [p for key, value in items for p in places(value, (*path, key))]


PLACES = places(json.loads(BYTES))
STRANGE = [None, True, -1, 0, 1, 3, 2**40, 2**62, 2**64 - 1, 1.5, "", "x", [], {}, [0], [[]], [-1, 2**63]]


@settings(max_examples=500)
@given(st.sampled_from(PLACES), st.one_of(st.just(...), st.sampled_from(STRANGE)))
def test_fields_deleted_or_replaced(path: tuple[Any, ...], value: Any) -> None:
    tree = json.loads(BYTES)
    inner = tree
    for place in path[:-1]:
        inner = inner[place]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    survives(json.dumps(tree).encode())
