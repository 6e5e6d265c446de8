"""The file of routes: golden bytes, round trips, and what is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.sparse import routes as codec
from penstock.schedule.sparse.routes import profile_of, routes_from_bytes, routes_to_bytes
from tests.schedule.sparse.recordings import PAGE, recording, recordings

PROFILE = recording([(8, PAGE, 0), (4, 256, 1)], [[(0, [1, 5]), (1, [3])], [(0, [])], []])
BYTES = b"""\
{"format":"penstock-routes","version":1,"reads":[\
{"method":"forward","graph":0,"step":0,"name":"look.up.0","weight":"table.0","count":8,"unit_nbytes":4096},\
{"method":"forward","graph":0,"step":1,"name":"look.up.1","weight":"table.1","count":4,"unit_nbytes":256}\
],"calls":3}
[[0,1,5],[1,3]]
[[0]]
[]
"""
NAMES = ["table.0", "table.1"]


def test_routes_have_these_bytes():
    assert routes_to_bytes(PROFILE.routes) == BYTES
    assert routes_from_bytes(BYTES) == PROFILE.routes


@given(recordings())
def test_routes_come_back(profile):
    assert routes_from_bytes(routes_to_bytes(profile.routes)) == profile.routes


def changed(**fields):
    header, _, rest = BYTES.partition(b"\n")
    return json.dumps(json.loads(header) | fields).encode() + b"\n" + rest


def call(line):
    return BYTES.replace(b"[[0]]", line.encode())


READS = json.loads(BYTES.partition(b"\n")[0])["reads"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "line 1: expected one whole JSON object"),
        (b"\xff\n", "line 1: expected UTF-8"),
        (b"[]\n", "expected the format 'penstock-routes', version 1"),
        (changed(version=2), "expected the format 'penstock-routes', version 1"),
        (changed(calls=True), r"\$\.calls: expected a valid integer"),
        (changed(more=1), r"\$\.more is not a field of the format, got 1; see docs/sparse.md"),
        (changed(reads=[{**READS[0], "count": 0}]), r"\$\.reads\[0\]\.count: expected a number from 1 on"),
        (changed(reads=[READS[0], READS[0]]), "expected each step of a graph once"),
        (BYTES[:-3], "expected a line for each of 3 calls, and got 2; is the file cut off"),
        (BYTES[:-1], "is the file cut off"),
        (BYTES + b"[]\n", "expected a line for each of 3 calls, and got 4"),
        (call("[[0,1.0]]"), r"line 3: \$\[0\]\[1\]: expected a valid integer, got 1.0"),
        (call("[[0,true]]"), r"line 3: \$\[0\]\[1\]: expected a valid integer, got true"),
        (call("[[]]"), "line 3: expected a read at the start of each list"),
        (call("[[0,1"), "line 3: expected one whole JSON object"),
        (call("[[2,1]]"), "call 1: expected one of 2 reads, got 2"),
        (call("[[0,8]]"), "call 1: expected different units of read 0 in ascending order, from 0 to 7"),
        (call("[[0,-1]]"), "from 0 to 7, got"),
        (call("[[0,3,3]]"), "different units"),
        (call("[[0,3,1]]"), "ascending"),
        (call("[" * 9999), "nested too deeply|expected one whole JSON"),
    ],
)
def test_other_bytes_are_refused(data, said):
    with pytest.raises(PayloadError, match=said):
        routes_from_bytes(data)


def test_too_many_bytes_are_neither_written_nor_read(monkeypatch):
    monkeypatch.setattr(codec, "MOST_BYTES", len(BYTES) - 1)
    with pytest.raises(PayloadError, match="record fewer calls"):
        routes_to_bytes(PROFILE.routes)
    with pytest.raises(PayloadError, match="at most"):
        routes_from_bytes(BYTES)


@pytest.mark.parametrize("field", ["method", "name", "weight", "step", "graph", "count", "unit_nbytes"])
def test_routes_of_another_program_are_refused(field):
    first, *others = PROFILE.routes.reads
    value = getattr(first, field)
    other = replace(first, **{field: value + 9 if isinstance(value, int) else "other"})
    routes = replace(PROFILE.routes, reads=(other, *others))
    with pytest.raises(PayloadError, match="the routes are of another program: step"):
        profile_of(routes, PROFILE.storages, PROFILE.traces, NAMES)


def test_a_profile_has_the_recorded_reads_alone():
    calls = (PROFILE.routes.calls[1], PROFILE.routes.calls[0][:1])
    routes = replace(PROFILE.routes, reads=PROFILE.routes.reads[:1], calls=calls)
    profile = profile_of(routes, PROFILE.storages, PROFILE.traces, NAMES)
    assert [len(step.sparse) for step in profile.traces[0].steps] == [1, 0]
    assert profile.pool(1).layout[1] == -1
    assert repr(profile.routes) == "Routes(2 calls of 1 reads by units)"
