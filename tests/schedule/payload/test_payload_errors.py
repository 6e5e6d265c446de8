"""What docs/payload.md forbids, sentence by sentence, and what the errors say."""

import json
from dataclasses import replace

import pytest

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.payload.codec import Payload, ProgramFile, plan_from_json
from tests.schedule.payload.payload_example import BYTES, PAYLOAD, PLAN

# Text that is no payload.


def refuse(data, *sentences):
    with pytest.raises(PayloadError) as caught:
        Payload.from_bytes(data, source="x/payload.json")
    assert str(caught.value).startswith("x/payload.json: ")
    for sentence in sentences:
        assert sentence in str(caught.value)


def spoiled(old, new):
    text = BYTES.decode()
    assert old in text
    return text.replace(old, new, 1).encode()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "expected one whole JSON object"),
        (BYTES[:-3], "is the file cut off?"),
        (BYTES + b"{}", "expected one whole JSON object (Extra data"),
        (b"[]", "$.format: expected 'penstock', got []"),
        (b"\xff" + BYTES, "expected UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (spoiled('"version": 12', '"version": 11'), "this penstock reads version 12, got 11; compile again"),
        (spoiled('"version": 12', '"version": true'), "reads version 12, got true"),
        (spoiled('"version": 12', '"version": 12.0'), "$.version: expected a valid integer, got 12.0"),
        (spoiled('"format": "penstock"', '"format": "turbine"'), "$.format: expected 'penstock', got \"turb"),
        (spoiled('"torch"', '"touch": 1, "torch"'), "$.touch is not a field of the format"),
        (spoiled('"torch": "2.13.0",', ""), "$.torch is missing"),
        (spoiled('"torch": "2.13.0"', '"torch": 2.13'), "$.torch: expected a valid string, got 2.13"),
        (spoiled('"torch"', '"lowering"'), "$ has the key 'lowering' twice"),
        (spoiled('"granule": 4096', '"granule": 4096, "granule": 1'), "$.plans[0].arena has the key 'granul"),
        (spoiled('"granule": 4096', '"granule": NaN'), "$.plans[0].arena.granule: expected a finite number,"),
        (spoiled("1200000000.0", "1e999"), "$.hardware.link_bytes_per_s: expected a finite number, got inf"),
        (spoiled('"granule": 4096', '"granule": 1' + "0" * 30), "expected an integer from -2^63 to 2^64 - 1"),
        (spoiled('"granule": 4096', '"granule": 1' + "0" * 5000), "expected one whole JSON object"),
        (spoiled('"batch", 16', '"batch", 1.5'), "$.methods[0].inputs[0].shape[1]: expected a valid integer"),
        (spoiled('"paged"', '"pagoda"'), "$.plans[0].arena.kind: expected 'contiguous' or 'paged', got \"pa"),
    ],
)  # fmt: skip
def test_text_that_is_no_payload(data, sentence):
    refuse(data, sentence)


def changed(path, value):
    """The golden payload with one value replaced: `storages.0.nbytes`."""
    tree = json.loads(BYTES)
    inner = tree
    *places, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for place in places:
        inner = inner[place]
    inner[last] = value
    return json.dumps(tree).encode()


SYMBOL = {"name": "b", "lower": 1, "upper": 4, "example": 5}
SPARSE = json.loads(BYTES)["traces"][0]["steps"][0]["sparse"][0]
MADE = {"dtype": "float32", "shape": [64, 4], "stride": [4, 1]}
READ, POOL = "traces.0.steps.0.sparse.0", "plans.1.pool"
HERE = "$.traces[0].steps[0].sparse[0]"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("lowering", "none", "$.program: expected null, as $.lowering is 'none'"),
        ("lowering", "executorch", "$.program.path: expected 'penstock.compiled."),
        ("probes.0.graph", 7, "$.probes[0].graph: expected the graph of a trace, one of [0], got 7"),
        ("probes.0.opens", [0, 2], "$.probes[0].opens: expected a call for each of 3 steps, got 2"),
        ("probes.0.closes", [3, 3, -1], "$.probes[0].closes: expected different calls, each -1 or more"),
        ("probes.0.units", [-1], "$.probes[0].units: expected once each of the steps [0] of $.traces[0]"),
        ("probes.0.units", [0, 0], "$.probes[0].units: expected once each of the steps [0] of $.traces[0]"),
        ("probes.0.units", [0, 2], "$.probes[0].units: expected once each of the steps [0] of $.traces[0]"),
        ("probes.0.closes", [3, 5, -2], "$.probes[0].closes: expected different calls, each -1 or more"),
        ("program.path", "/etc/passwd", "$.program.path: expected a path relative to the artifact's folder"),
        ("program.path", "C:\\program", "$.program.path: expected a path relative"),
        ("program.sha256", "AB" * 32, "$.program.sha256: expected 64 lower-case hexadecimal digits"),
        ("files.0.path", "../weights.safetensors", "$.files[0].path: expected a path inside the artifact's"),
        ("files.0.path", "a\\..\\..\\b", "$.files[0].path: expected a path inside"),
        ("files.0.path", "", "$.files[0].path: expected the path of a file"),
        ("files.0.nbytes", 2**51, "$.files[0].nbytes: expected 0 to 1125899906842624"),
        ("files.0.nbytes", 4_288 + 4_095, "$.storages[1].extents[0].file_offset: expected 0 to 4287, got 42"),
        ("files.0.sampled_sha256", "23" * 31, "$.files[0].sampled_sha256"),
        ("files.0.key", "weights", "$.files[0].key: expected an empty text, as 'weights.safeten"),
        ("files.1.key", "", "$.files[1].key: expected the key of named data, got an empty text"),
        ("files.1.path", "/data/weights.ptd", "$.files[1].path: expected a path relative to the artifact's"),
        ("files.1.path", "data/weights.ptd", "$.files[1].path: expected the name of a file without a folder"),
        ("files.1.sampled_sha256", "23" * 32, "$.files[1].sampled_sha256: expected none, as 'penstock.stora"),
        ("traces.0.follows", 0, "$.traces[0].follows: expected the graph of another trace, one of [0]"),
        ("plans.0.traces.0.follows", 3, "$.plans[0].traces[0].follows: expected the graph of another trace"),
        ("storages.0.kind", "mutable", "$.traces[0].steps[0].reads: expected streamable storages, got stora"),
        ("storages.0.phase", 64, "$.storages[0].phase: expected 0 to 63, got 64"),
        ("storages.0.nbytes", 4095, "$.storages[0].extents[1].storage_offset"),
        ("storages.0.extents.0.file", 2, "$.storages[0].extents[0].file: expected the index of one of 2 fil"),
        ("storages.0.extents.0.nbytes", 0, "$.storages[0].extents[0].nbytes: expected 1"),
        ("storages.0.extents.1.storage_offset", 1023, "$.storages[0].extents[1].storage_offset: expected 10"),
        ("storages.0.extents.0.nbytes", 1000, "got no byte 1000"),
        ("storages.0.extents.1.nbytes", 3071, "$.weights[0].parts[0] of 'embedding.weight' reads, got no by"),
        ("weights.1.fqn", "embedding.weight", "$.weights[1]: expected an FQN that no other has"),
        ("weights.0.parts", [], "$.weights[0].parts: expected one part or more"),
        ("weights.2.parts.1.name", "data", "$.weights[2].parts[1]: expected a name that no other has"),
        ("weights.0.parts.0.dtype", "bfloat8", "$.weights[0].parts[0].dtype: expected the name of a torch d"),
        ("weights.0.parts.0.stride", [1], "$.weights[0].parts[0].stride: expected 2 strides"),
        ("weights.0.parts.0.stride", [32, -1], "$.weights[0].parts[0].stride[1]: expected 0 to"),
        ("weights.0.parts.0.shape", [65, 32], "$.weights[0].parts[0].offset: expected 4160 bytes inside the"),
        ("weights.0.parts.0.offset", 1, "$.weights[0].parts[0].offset: expected a multiple of the 2 bytes"),
        ("weights.0.parts.0.storage", 3, "$.weights[0].parts[0].storage: expected the index of one of 3 sto"),
        ("methods.0.name", "backward", "$.traces: expected one of 'backward', graph 0, which is in $.method"),
        ("methods.0.symbols.0.name", "b", "$.methods[0].inputs[0].shape[0]: expected a size or one of the s"),
        ("methods.0.symbols.0", SYMBOL, "$.methods[0].symbols[0].example: expected 1 to 4, got 5"),
        ("traces", [], "$.traces: expected one of 'forward', graph 0"),
        ("traces.0.steps.1.reads", [], "$.traces[0].steps[1].reads: expected one storage or more"),
        ("traces.0.steps.0.reads", [1, 0], "$.traces[0].steps[0].reads: expected one storage or more, ascen"),
        ("traces.0.steps.0.reads", [0, 3], "$.traces[0].steps[0].reads: expected indices of 3 storages"),
        ("traces.0.steps.1.lead_ns", -1, "$.traces[0].steps[1].lead_ns: expected 0 or more, got -1"),
        ("hardware.host_step_ns", -1, "$.hardware.host_step_ns: expected 0 or more, got -1"),
        ("hardware.host_step_ns", 5.8, "$.hardware.host_step_ns: expected a valid integer, got 5.8"),
        ("hardware.flops_per_s", 0, "$.hardware.flops_per_s: expected a rate above 0"),
        ("plans.0.arena.layout", [0], "$.plans[0].arena.layout: expected 3 offsets, got 1"),
        ("plans.0.addresses", [0], "$.plans[0].addresses: expected 0 offsets, got 1"),
        ("plans.0.outside", [3], "$.plans[0].outside[0]: expected 0 to 2, got 3"),
        ("plans.0.resident.0.stop", 4096, "$.plans[0].resident[0].stop: expected 4097"),
        ("plans.0.schedules.0.drops.0.start", -1, "$.plans[0].schedules[0].drops[0].start: expected 0"),
        ("plans.0.traces.0.steps.0.reads", [9], "$.plans[0].traces[0].steps[0].reads: expected indices of 3"),
        (f"{READ}.view.storage", 3, f"{HERE}.view.storage: expected 0 to 2, got 3"),
        (f"{READ}.view.storage", 1, "$.traces[0].steps[0].sparse: expected units of streamable storages"),
        (f"{READ}.view.dtype", "bfloat8", f"{HERE}.view: expected a tensor of a torch dtype"),
        (f"{READ}.view.shape", [64], f"{HERE}.view: expected a tensor of a torch dtype, with dimensions"),
        (f"{READ}.view.shape", [64, 0], f"{HERE}.view.shape: expected 1 to"),
        (f"{READ}.view.stride", [32, -1], f"{HERE}.view.stride: expected 0 to"),
        (f"{READ}.view.stride", [31, 1], f"{HERE}.view: expected slices on dimension 0 that do not overlap"),
        (f"{READ}.view.stride", [0, 1], f"{HERE}.view: expected slices on dimension 0 that do not overlap"),
        (f"{READ}.view.offset", -2, f"{HERE}.view.offset: expected 0 to"),
        (f"{READ}.view.offset", 1, f"{HERE}.view: expected no name, and whole items as offset"),
        (f"{READ}.view.name", "data", f"{HERE}.view: expected no name, and whole items as offset"),
        (f"{READ}.view.shape", [65, 32], "within their bytes, got storage 0 up to byte 4160"),
        (f"{READ}.view.offset", 2, "within their bytes, got storage 0 up to byte 4098"),
        (f"{READ}.route", -1, f"{HERE}.route: expected 0 or more, got -1"),
        (f"{READ}.asked", 65, f"{HERE}.asked: expected 0 to 64, got 65"),
        (f"{READ}.operator", 7, f"{HERE}.operator: expected a valid string, got 7"),
        (f"{READ}.computed", MADE | {"dtype": "int9"}, f"{HERE}.computed: expected a tensor of a torch"),
        (f"{READ}.computed", MADE | {"stride": [1]}, f"{HERE}.computed: expected a tensor of a torch dtype"),
        (f"{READ}.computed", MADE | {"shape": [64, 0]}, f"{HERE}.computed.shape: expected 1 to"),
        (f"{READ}.computed", MADE | {"stride": [4, -1]}, f"{HERE}.computed.stride: expected 0 to"),
        (f"{READ}.computed", MADE | {"shape": [63, 4]}, f"{HERE}.computed: expected a slice for each of 64"),
        (f"{READ}.computed", MADE | {"offset": 0}, f"{HERE}.computed.offset is not a field of the format"),
        ("traces.0.steps.0.sparse", 2 * (SPARSE,), "sparse[1]: expected a storage that no other has, got 0"),
        (f"{POOL}.nbytes", 0, "$.plans[1].pool.nbytes: expected 1 to"),
        (f"{POOL}.granule", 0, "$.plans[1].pool.granule: expected 1 to"),
        (f"{POOL}.layout", [0], "$.plans[1].pool.layout: expected 3 offsets, got 1"),
        (f"{POOL}.layout", [-2, 0, -1], "$.plans[1].pool.layout[0]: expected -1 to"),
        (f"{POOL}.layout", [-1, -1, -1], "$.plans[1].pool.layout: expected the place of one storage"),
        (f"{POOL}.expected_ns", [1, 2], "$.plans[1].pool: expected a time of both kinds for each of 1 trac"),
        (f"{POOL}.worst_ns", [], "$.plans[1].pool: expected a time of both kinds for each of 1 traces"),
        (f"{POOL}.worst_ns", [-1], "$.plans[1].pool.worst_ns[0]: expected 0 to"),
        (f"{POOL}.expected_ns", [640_001], "$.plans[1].pool.expected_ns[0]: expected 0 to 640000, got 6"),
        (f"{POOL}.limit", 1, "$.plans[1].pool.limit is not a field of the format"),
    ],
)  # fmt: skip
def test_contradictions(path, value, sentence):
    refuse(changed(path, value), sentence)


def test_what_cannot_be_read_is_not_written():
    with pytest.raises(PayloadError, match=r"the payload to be written: \$\.program\.path"):
        replace(PAYLOAD, program=ProgramFile("../program", "ab" * 32)).to_bytes()
    with pytest.raises(PayloadError, match="not Unicode"):
        replace(PAYLOAD, torch="\ud800").to_bytes()


def test_files_may_be_absolute_or_in_folders():
    for path in ("/data/model.safetensors", "shards/model-1.safetensors", "..model"):
        Payload.from_bytes(changed("files.0.path", path))


@pytest.mark.parametrize("data", ["{", "[]", "{}", PLAN.to_json()[:-9], '{"budget": 1, "budget": 2}'])
def test_bad_plans(data):
    with pytest.raises(PayloadError, match=r"^plan\.json: "):
        plan_from_json(data)
