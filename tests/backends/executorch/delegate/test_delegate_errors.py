"""What the delegate refuses: one sentence that says what to do, and an error code."""

from dataclasses import replace

import pytest
from torch import nn
from torch.export import export

import penstock
from penstock.backends.executorch import read
from penstock.schedule.payload.codec import VERSION
from tests.backends.executorch.delegate.pte_models import PROMPT, WIDTH, Mlp, rows, write_files
from tests.backends.executorch.delegate.pte_runs import Call, Program
from tests.backends.executorch.forging import FORGERIES, deep, fields, forge

CALL = Call([rows()])

_NEWEST = f'"version": {VERSION}'.encode()


def _refused(runner, program, error, sentence):
    (answer,) = runner([program], [CALL])
    assert answer.error == f"Error::{error}"
    (said,) = runner.sentences()
    assert sentence in said
    assert said.count(". ") == 0
    assert answer.programs == 0


def _changed(path, old, new):
    """Writes other bytes of the same number to the first place where the old ones are."""
    data = path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "1KiB"}, "below the lowest plan of the program, which takes {floor}: give at least that"),
        ({"budget": "lots"}, "the budget 'lots' is not a size: write bytes, '32MiB', '8GB' or '50%'"),
        ({"budget": 4096}, 'the load option "budget" has another type: give text, such as "32MiB"'),
        ({"bugdet": "1MiB"}, 'there is no load option "bugdet": give budget, weights or readers'),
        ({"readers": 0}, 'the load option "readers" is 0: give one thread or more'),
    ],
)
def test_wrong_options(runner, files, options, sentence):
    floor = read(files.pte).payload.plans[0].budget
    _refused(runner, Program(files, options), "InvalidArgument", sentence.format(floor=floor))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"budget": "90%"}, "loaded with the budget '50%', and another one with '90%': give all methods the"),
        ({"budget": "50%", "readers": 2}, "loaded with the readers '3', and another one with '2': give all"),
        ({"budget": "50%", "weights": "w.ptd"}, "the weights '', and another one with 'w.ptd': give all"),
    ],
)
def test_other_options_for_another_method(runner, exported, other, sentence):
    files, _ = exported("decoder")
    calls = [Call(PROMPT, "prefill"), Call(PROMPT, "decode", options=other)]
    answers = runner([Program(files, {"budget": "50%"})], calls)
    assert [one.error for one in answers] == ["Error::Ok", "Error::InvalidArgument"]
    (said,) = runner.sentences()
    assert sentence in said


def test_no_data_file(runner, files):
    sentence = "weights lie in weights.ptd, which was not loaded: give the module that file, or its path"
    _refused(runner, Program(replace(files, data=())), "InvalidExternalData", sentence)


def test_data_files_that_are_missing_or_cut(runner, files, tmp_path):
    cut = tmp_path / "cut.ptd"
    cut.write_bytes(files.weights.read_bytes()[:50])
    missing = {"weights": str(tmp_path / "none.ptd")}
    _refused(runner, Program(files, missing), "InvalidExternalData", "none.ptd cannot be opened (No")
    _refused(runner, Program(files, {"weights": str(cut)}), "InvalidExternalData", "cut.ptd is no .ptd file")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The files of another model of the same shapes."""
    methods = {"forward": export(Mlp(seed=50).eval(), (rows(),))}
    return write_files(tmp_path_factory.mktemp("other") / "files", methods)


@pytest.mark.parametrize("way", ["data", "option"])
def test_data_file_of_another_model_of_the_same_shapes(runner, files, other, way):
    options = {"weights": str(other.weights)} if way == "option" else {}
    program = Program(replace(files, data=() if options else other.data), options)
    _refused(runner, program, "InvalidExternalData", "it belongs to another model; load weights.ptd")


def test_data_file_without_alignment(runner, tmp_path):
    methods = {"forward": export(Mlp().eval(), (rows(),))}
    files = write_files(tmp_path / "narrow", methods, alignment=128)
    sentence = "no multiple of 4096: export with ExecutorchBackendConfig(segment_alignment=4096)"
    _refused(runner, Program(files), "InvalidExternalData", sentence)


def test_a_loader_that_would_bring_all_weights_into_memory(runner, files):
    sentence = 'LoadMode::Mmap, or give the path of weights.ptd as the load option "weights"'
    _refused(runner, Program(files, {"budget": "50%"}, mode="file"), "InvalidExternalData", sentence)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (_NEWEST, b'"version": 99', "{payload} is damaged: its sha256 differs; copy the"),
        (b'"storage": 0', b'"storage": 4', "a delegate's bytes are damaged: their sha256 differs"),
        (b'"regions": 6', b'"regions" 66', "a delegate's bytes are damaged: their sha256 differs"),
        (b"aten::linear", b"aten::lineal", "is damaged: its sha256 differs"),
    ],
)
def test_damaged_programs(runner, files, old, new, sentence):
    key = read(files.pte).regions[0].payload
    _changed(files.pte, old, new)
    _refused(runner, Program(files), "InvalidProgram", sentence.format(payload=key.rpartition(".")[2]))


@pytest.mark.parametrize("name", FORGERIES)
def test_regions_that_contradict_their_payload(runner, files, name):
    change, field = FORGERIES[name]
    forge(files.pte, region=fields(change))
    sentence = f"region 0 of graph {7 if field == 'graph' else 0}: $.{field}: expected "
    _refused(runner, Program(files, {"budget": "50%"}), "InvalidProgram", sentence)


def test_a_region_of_another_version(runner, files):
    forge(files.pte, region=fields(lambda one: one.update(version=1, payload="penstock.payload.unknown")))
    sentence = "a delegate's bytes are not those of version 2: export the program again"
    _refused(runner, Program(files), "InvalidProgram", sentence)


def test_a_plan_with_a_pool(runner, files):
    def pool(payload):
        layout = [0, *[-1] * (len(payload["storages"]) - 1)]
        payload["plans"][-1]["pool"] = {"nbytes": 4096, "granule": 4096, "layout": layout}

    budget = read(files.pte).payload.plans[-1].budget
    forge(files.pte, payload=fields(pool))
    sentence = f"the plan of {budget} bytes of the program has a pool, and nothing here brings the units"
    _refused(runner, Program(files), "InvalidArgument", sentence)
    (answer,) = runner([Program(files, {"budget": "50%"})], [CALL])  # another plan, which has none
    assert answer.error == "Error::Ok"


def test_a_payload_of_a_version_to_come(runner, files):
    forge(files.pte, payload=fields(lambda one: one.update(version=99)))
    sentence = (
        f"the program's payload has version 99, and this delegate reads version {VERSION}: export it again"
    )
    _refused(runner, Program(files), "InvalidProgram", sentence)


@pytest.mark.parametrize("which", ["region", "payload"])
def test_lists_in_lists_in_lists(runner, files, which):
    forge(files.pte, **{which: deep})
    _refused(runner, Program(files), "InvalidProgram", "lists or objects nested in more than 100 others")


def test_weights_that_have_no_values(runner, tmp_path):
    program = penstock.fake_export(lambda: nn.Linear(WIDTH, WIDTH), (rows(),))
    files = write_files(tmp_path / "fake", {"forward": program})
    _refused(runner, Program(files), "InvalidArgument", "exported without the values of its weights")


def test_a_library_that_is_not_loaded(runner, files):
    (answer,) = runner([Program(files)], [CALL], with_library=False)
    assert answer.error == "Error::NotFound"
    assert any("Backend PenstockBackend is not registered" in line for line in runner.said)


def test_weights_that_change_while_they_are_used(runner, files):
    shrink = Call(shell=f"truncate --size=8192 {files.weights}")
    answers = runner([Program(files, {"budget": "40%"})], [CALL, shrink, CALL, CALL])
    assert [one.error for one in answers] == ["Error::Ok", "Error::Ok", *["Error::InvalidExternalData"] * 2]
    assert all("has been truncated while in use" in said for said in runner.sentences())
