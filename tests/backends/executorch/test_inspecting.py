"""`penstock inspect model.pte`: what it shows, without ExecuTorch and without torch."""

import json
import os
import subprocess
import sys

import pytest

from penstock.backends.executorch.plans import floor_of
from penstock.schedule.payload.codec import VERSION
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401


def test_facts_as_json(penstock, lowered_decoder):
    shown = json.loads(penstock("inspect", lowered_decoder.path, "--json").out)
    exported = lowered_decoder.exported
    assert (shown["version"], shown["lowering"]) == (VERSION, "executorch")
    assert [w["fqn"] for w in shown["weights"]] == [w.fqn for w in exported.payload.weights]
    assert shown["weights"][0]["parts"][0]["dtype"] == "float32"
    assert len(shown["regions"]) == len(exported.regions)
    assert [plan["budget"] for plan in shown["plans"]] == [plan.budget for plan in exported.payload.plans]
    key = exported.payload.files[0].key
    assert shown["places"][key] == {"file": str(exported.places[key][0]), "offset": exported.places[key][1]}
    assert set(shown["floors"]) == {"contiguous"}


def test_floors_are_those_with_what_the_export_keeps(lowered_decoder):
    exported = lowered_decoder.exported
    lowest = min(plan.budget for plan in exported.payload.plans)
    assert exported.floor(arena="contiguous") == lowest
    assert floor_of(exported.payload).upper_bytes < lowest


def test_tables(penstock, lowered_decoder):
    shown = penstock("inspect", lowered_decoder.path).out
    for word in (
        "embed.weight",
        "head.weight",
        "weights.ptd",
        "mutable",
        "prefill",
        "decode",
        "Regions",
        "Plans",
    ):
        assert word in shown, word
    place = lowered_decoder.exported.place_of(lowered_decoder.exported.payload.weights[2].parts[0])
    assert place is not None
    assert str(place[1]) in shown


def test_graphs(penstock, lowered_decoder):
    assert "embed.weight" in penstock("inspect", lowered_decoder.path, "--graph", "dot").out
    events = penstock(
        "inspect", lowered_decoder.path, "--graph", "json", "--budget", "90%", "--method", "decode"
    )
    assert json.loads(events.out)["nodes"]
    low = penstock("inspect", lowered_decoder.path, "--graph", "json", "--budget", "4KiB")
    assert (low.status != 0, "below that of the lowest plan" in low.err) == (True, True)


@pytest.mark.parametrize("name", ["missing.pte", "other.pte"])
def test_what_is_no_export_is_refused(penstock, tmp_path, name):
    (tmp_path / "other.pte").write_bytes(b"something else")
    done = penstock("inspect", tmp_path / name)
    assert done.status != 0
    assert done.err.startswith("penstock: ")


def test_neither_torch_nor_executorch_is_needed(lowered_mlp):
    code = (
        "import sys; from penstock.backends.executorch import read; read(sys.argv[1]);"
        "assert not {'torch', 'executorch'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(lowered_mlp.path)], check=True, env=environment)
