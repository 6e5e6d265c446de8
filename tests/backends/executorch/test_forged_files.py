"""Files with right hashes that contradict themselves, as only an author writes them: a sentence for each."""

import os
import struct
from hashlib import sha256

import pytest

import penstock
from penstock.backends.executorch import read
from penstock.backends.executorch.files import PAYLOAD, PROGRAM
from tests.backends.executorch.forging import FORGERIES, deep, fields, forge
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401


def test_nothing_is_changed_without_a_forgery(files, lowered_mlp):
    forge(files)
    found = read(files)
    assert (found.payload, found.regions) == (lowered_mlp.exported.payload, lowered_mlp.exported.regions)


@pytest.mark.parametrize("name", FORGERIES)
def test_regions_that_contradict_their_payload(files, penstock, name):
    change, field = FORGERIES[name]
    forge(files, region=fields(change))
    shown = penstock("inspect", files)
    assert shown.status == 2
    assert f"region 0 of graph {7 if field == 'graph' else 0}: $.{field}: expected " in shown.err
    assert shown.err.endswith("; export again\n")


def test_a_list_that_is_too_short(files):
    forge(files, region=fields(lambda one: one.update(steps=[0])))
    with pytest.raises(penstock.PayloadError, match=r"a delegate of 'forward': \$\.steps\[1\] is missing"):
        read(files)


def test_a_region_that_is_there_twice(files):
    forge(files, region=fields(lambda one: one.update(region=1)))
    with pytest.raises(
        penstock.PayloadError, match=r"\$\.region and \$\.regions: expected 0 of the 2 regions"
    ):
        read(files)


@pytest.mark.parametrize(("lost", "what"), [(PROGRAM, "lacks 'penstock.program."), (PAYLOAD, "no payloads")])
def test_named_data_that_is_missing(files, lost, what):
    forge(files, lost=lost)
    with pytest.raises(penstock.PayloadError, match=what):
        read(files)


def test_a_region_of_another_payload(files):
    other = PAYLOAD + sha256(b"other").hexdigest()
    forge(files, region=fields(lambda one: one.update(payload=other)))
    with pytest.raises(penstock.PayloadError, match=f"lacks '{other}', which a delegate of it names"):
        read(files)


def test_a_program_without_plans(files, penstock):
    forge(files, payload=fields(lambda one: one.update(plans=[])))
    assert "Regions" in penstock("inspect", files).out
    shown = penstock("inspect", files, "--graph", "json", "--budget", "90%")
    assert (shown.status, "has no plans, so no budget can be chosen for it" in shown.err) == (2, True)


@pytest.mark.parametrize("which", ["region", "payload"])
def test_lists_in_lists_in_lists(files, which):
    forge(files, **{which: deep})
    with pytest.raises(penstock.PayloadError, match="nested too deeply for any payload"):
        read(files)


@pytest.mark.parametrize("place", [16, 24, 32])  # of the head, of its size, of the segments
def test_sizes_in_the_data_file_that_no_file_has(files, place):
    path = files.parent / "weights.ptd"
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, place, (1 << 62) + 64)
    path.write_bytes(data)
    with pytest.raises(penstock.SourceError, match=rf"it is cut off: it has {len(data)} bytes, and 4611686"):
        read(files)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.pte", "weights.ptd"])
def test_a_pipe_is_not_read(files, name):
    (files.parent / name).unlink()
    os.mkfifo(files.parent / name)
    with pytest.raises(penstock.SourceError, match=rf"{name} is a pipe or a device, expected a file"):
        read(files)


def test_entries_of_another_size_than_the_payload_says(files):
    def larger(tree):
        tree["files"][0]["nbytes"] += 4096

    forge(files, payload=fields(larger))
    with pytest.raises(
        penstock.SourceError, match=r"weights\.ptd has \d+ bytes as .*, expected \d+: put the"
    ):
        read(files)
