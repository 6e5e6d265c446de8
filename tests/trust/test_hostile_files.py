"""Files of strangers, byte by byte: each is refused in a sentence, at once, and before anything is read."""

import io
import json
import os
import pickle
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

import penstock
from penstock.integrations.folders import open_pipeline
from penstock.models.configuration import model_class
from penstock.runtime import loading
from penstock.runtime.checkpoint.opening import open_checkpoint
from tests.trust.fuzz import outcome
from tests.trust.fuzz_targets import NAMES, make_target
from tests.trust.hostile import change_code, change_payload, make_artifact, use


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("files") / "model.penstock")


# Files that are none.


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["payload.json", "payload.json.sha256", "program.zip", "weights.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_not_read(copy, name, kind):
    (copy / name).unlink()
    if kind == "pipe":
        os.mkfifo(copy / name)
    else:
        (copy / name).symlink_to("/dev/zero")
    with pytest.raises(penstock.SourceError, match=rf"{name} is a pipe or a device, expected a file"):
        use(copy)


# Payloads.


def part(payload, fqn):
    return next(weight for weight in payload["weights"] if weight["fqn"] == fqn)["parts"][0]


def huge(payload):
    payload["storages"][0]["nbytes"] = 1 << 40


def no_extents(payload):
    payload["storages"][1]["extents"] = []


def short_extents(payload):
    """The last bytes are in no file, and no part has them."""
    storage = payload["storages"][0]
    storage["nbytes"] += 64
    payload["storages"][0] = storage


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32", "quint4x2", "quint2x4", "load", "float", ""])
def test_a_dtype_that_no_weight_can_have(copy, dtype):
    change_payload(copy, lambda payload: part(payload, "first.weight").update(dtype=dtype))
    with pytest.raises(penstock.PayloadError, match=r"expected the name of a torch dtype, got"):
        penstock.open(copy)


@pytest.mark.parametrize("change", [huge, no_extents, short_extents])
def test_bytes_that_no_file_has(copy, change):
    change_payload(copy, change)
    with pytest.raises(
        penstock.PayloadError, match=r"storages\[\d\].extents: expected all \d+ bytes, .* got no byte"
    ):
        penstock.open(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int32"},
        {"shape": [96, 4], "stride": [8, 1]},
        {"shape": [8, 96], "stride": [96, 1]},
        {"stride": [1, 96]},
        {"shape": [768], "stride": [1]},
        {"dtype": "bcomplex32"},
    ],
)
def test_a_weight_that_the_graph_was_not_made_for(copy, change, monkeypatch):
    change_payload(copy, lambda payload: part(payload, "first.weight").update(change))
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        penstock.PayloadError, match=r"weight 'first\.weight' of method 'forward' is .*compile again"
    ):
        use(copy)


def test_a_weight_that_no_step_reads(copy, monkeypatch):
    """It would be memory that nothing fills, as the plan need not hold it."""

    def change(payload):
        s = part(payload, "second.weight")["storage"]
        for step in payload["traces"][0]["steps"]:
            step["reads"] = [one for one in step["reads"] if one != s]
        payload["plans"] = []

    change_payload(copy, change)
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        penstock.PayloadError, match=r"second\.weight. of .* is read by linear_1, and no step"
    ):
        use(copy)


def test_a_weight_whose_sizes_alone_are_used_needs_no_step(copy):
    def change(payload):
        s = part(payload, "second.weight")["storage"]
        payload["traces"][0]["steps"] = [
            one for one in payload["traces"][0]["steps"] if s not in one["reads"]
        ]

    def code(stored):
        nodes = stored["graph"]["nodes"]
        k = next(k for k, node in enumerate(nodes) if {"node": "p_second_weight"} in node[3])
        nodes[k][2:] = ["aten.relu.default", [{"node": "relu"}], {}]
        view = ["call_function", "turned", "aten.t.default", [{"node": "p_second_weight"}], {}]
        sized = ["call_function", "size", "aten.sym_size.int", [{"node": "turned"}, 0], {}]
        nodes[k:k] = [view, sized]

    change_code(copy, code)
    change_payload(copy, change)
    assert list(use(copy)) == ["out"]


def test_a_weight_that_is_written_and_may_not_be(copy):
    def code(stored):
        stored["graph"]["nodes"][-1][3][0]["tuple"].insert(0, {"node": "p_first_weight"})
        stored["signature"]["to_weight"] = {"dict": [[0, "first.weight"]]}

    change_code(copy, code)
    with pytest.raises(penstock.PayloadError, match=r"writes 'first\.weight', which is no mutable weight"):
        use(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["weights"].pop(), "the graph has 8 inputs, and the method 5 weights and 2 inputs"),
        (lambda s: s["weights"].reverse(), "the graph has 8 inputs, and the method 6 weights and 2 inputs"),
        (lambda s: s["signature"]["leaves"]["tuple"].pop(), "does not fit the structures"),
        (lambda s: s["signature"].update(results=2), "does not fit the structures"),
        (
            lambda s: s["signature"]["to_leaf"].update(dict=[[0, 9]]),
            "the graph has 1 outputs, and the method",
        ),
        (lambda s: s["signature"].pop("guards"), "is no signature of a call"),
        (lambda s: s.pop("graph"), "a part of the method is missing"),
        (lambda s: s.update(weights=[["x"]]), "is no weight"),
        (lambda s: s["weights"][0].__setitem__(3, ["8"]), "is no weight of static size"),
        (lambda s: s.update(activations=7), "is no account of activations"),
        (lambda s: s["activations"].__setitem__(1, 7), "is no moments of a Activations"),
        (
            lambda s: s["signature"].update(
                in_spec={"tree": '[1, {"type": "builtins.list", "context": "null", "children_spec": []}]'}
            ),
            "does not fit the structures",
        ),
    ],
)
def test_code_that_contradicts_itself(copy, change, words):
    change_code(copy, change)
    with pytest.raises(penstock.PayloadError, match=words):
        use(copy)


@pytest.mark.parametrize("data", [b"", b"{", b"7", b"[" * 100_000, b"\xff", b'"x"'])
def test_code_that_is_no_json(copy, data):
    from tests.trust.hostile import write_program

    write_program(copy, {"forward.json": data})
    with pytest.raises(penstock.PayloadError, match=r"is no JSON|expected JSON of version"):
        use(copy)


def test_code_that_is_compressed_or_there_twice(copy):
    program = copy / "program.zip"
    with zipfile.ZipFile(program) as archive:
        stored = archive.read("forward.json")
    with zipfile.ZipFile(program, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("forward.json", stored)
    _right(copy)
    with pytest.raises(penstock.PayloadError, match="is compressed, or there twice"):
        use(copy)
    with warnings.catch_warnings(), zipfile.ZipFile(program, "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("forward.json", stored)
        archive.writestr("forward.json", stored)
    _right(copy)
    with pytest.raises(penstock.PayloadError, match="is compressed, or there twice"):
        use(copy)


def _right(copy):
    import hashlib

    digest = hashlib.sha256((copy / "program.zip").read_bytes()).hexdigest()
    change_payload(copy, lambda payload: payload["program"].update(sha256=digest))


# Pickles.


def doubled(levels, make=pickle.TUPLE2):
    """A pickle of a pair of the same pair of the same pair, and so on, as a key of a dictionary."""
    data = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.NONE
    for level in range(levels):
        data += pickle.BINPUT + bytes([level]) + pickle.BINGET + bytes([level]) + make
    return data + pickle.NONE + pickle.SETITEM + pickle.STOP


def lists(levels):
    """Lists in lists, each twice, as the name of a tensor's place."""
    data = pickle.PROTO + b"\x02" + pickle.EMPTY_LIST
    for level in range(levels):
        got = pickle.BINPUT + bytes([level]) + pickle.POP
        data += got + pickle.EMPTY_LIST + (pickle.BINGET + bytes([level]) + pickle.APPEND) * 2
    return data + pickle.STOP


@pytest.mark.parametrize(
    "data",
    [
        doubled(40),
        doubled(250),
        doubled(12),
        lists(150),
        pickle.PROTO + b"\x02" + pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff" + pickle.STOP,
        pickle.PROTO + b"\x04" + pickle.FRAME + b"\xff" * 8,
        pickle.PROTO + b"\x04" + pickle.BINBYTES8 + b"\xff" * 7 + b"\x0f" + pickle.STOP,
        pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + b"\x00\x00\x00\x00\x04\x00\x00\x00" + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.EXT1 + b"\x01" + pickle.STOP,
        pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.PERSID + b"x\n" + pickle.STOP,
        b"cos\nsystem\n(S'touch mark'\ntR.",
        b"",
    ],
    ids=range(12),
)
@pytest.mark.timeout(20)
def test_a_pickle_that_would_take_for_ever(tmp_path, data):
    assert len(data) < 2000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "saved"))
    (tmp_path / "saved" / ".metadata").write_bytes(data)
    with pytest.raises(
        penstock.SourceError, match=r"\.metadata is not part of a checkpoint that can be trusted"
    ):
        open_checkpoint(tmp_path / "saved")
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", data)
        archive.writestr("model/version", b"3\n")
    with pytest.raises(penstock.SourceError):
        open_checkpoint(path)


def test_a_tensor_in_thousands_of_overlapping_chunks(tmp_path):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "saved"))
    metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    held = metadata.state_dict_metadata["a"]
    size = torch.Size([2, 5000])
    chunks = [ChunkStorageMetadata(torch.Size([0, k]), torch.Size([2, 1])) for k in range(5000)]
    metadata.state_dict_metadata["a"] = TensorStorageMetadata(held.properties, size, chunks)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(penstock.SourceError, match="has 5000 chunks beside one another"):
        open_checkpoint(tmp_path / "saved")


def _saved():
    data = io.BytesIO()
    torch.save({"a": torch.ones(3)}, data)
    return data.getvalue()


def _renamed(data):
    """The name of a member is no text any more."""
    at = data.rindex(b"version")
    flags = data.rindex(b"PK\x01\x02", 0, at) + 8
    changed = bytearray(data[:at] + b"\xff\xfe\xff\xfe\xff\xfe\xff" + data[at + 7 :])
    changed[flags + 1] |= 8  # it says that names are UTF-8
    return bytes(changed)


def _on_disks(data):
    """The zip says that it spans two disks."""
    at = data.rindex(b"PK\x06\x07") + 16
    return data[:at] + b"\x02" + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        _renamed(_saved()),
        _on_disks(_saved()),
        pickle.dumps({"a": 1}) + _saved(),
        _saved()[:-30],
        b"PK\x03\x04",
    ],
    ids=["no text", "several disks", "a pickle in front", "cut", "empty"],
)
def test_a_damaged_zip_is_refused(tmp_path, data):
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with pytest.raises(penstock.SourceError):
        open_checkpoint(path)


# Configurations.


@pytest.mark.parametrize(
    "names", [True, 7, [7], "LlamaForCausalLM", ["pipeline"], ["utils"], ["AutoConfig"], [""]]
)
def test_an_architecture_is_a_class_of_models(names):
    class Config:
        architectures = names

    with pytest.raises(penstock.SourceError, match="of which this transformers has none"):
        model_class(Config(), "it")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("../../scheduler", ["diffusers", "DDPMScheduler"]),
        ("/etc", ["diffusers", "DDPMScheduler"]),
        ("scheduler", ["os", "system"]),
        ("scheduler", ["diffusers", "utils"]),
        ("scheduler", ["diffusers", "logging.os"]),
        ("scheduler", ["diffusers", 7]),
        ("scheduler", ["diffusers"]),
        ("scheduler", [["diffusers"], "DDPMScheduler"]),
        ("scheduler", ["transformers", "pipeline"]),
    ],
)
def test_a_pipeline_names_parts_of_its_folder_and_classes_of_its_libraries(tmp_path, name, value):
    index = {"_class_name": "DDPMPipeline", name: value}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(penstock.SourceError, match=r"get an intact copy|which is not a class of"):
        open_pipeline(tmp_path)


# Changed files, as `make fuzz` makes them for as long as one likes.


@pytest.mark.parametrize("name", NAMES)
def test_valid_files_are_fine(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = make_target(name, tmp_path)
        assert [outcome(target.use, seed) for seed in target.seeds] == ["fine"] * len(target.seeds)


@pytest.mark.random
@pytest.mark.parametrize("name", NAMES)
def test_changed_files_are_fine_or_refused(name, tmp_path):
    count = 40 if name in ("artifact", "graph", "configuration", "pipeline", "pte", "ptd") else 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = make_target(name, tmp_path)
        found = [outcome(target.use, target.case(29, number)) for number in range(count)]
    assert [one for one in found if one not in ("fine", "refused")] == []
    assert found.count("refused") > count // 4


def test_a_fault_would_be_seen():
    def broken(data):
        raise KeyError(data)

    assert outcome(broken, b"x").startswith("fault: KeyError at test_hostile_files.py")
