"""Code is loaded for who is trusted only, no stored string runs, and a digest is of all of an artifact."""

import hashlib
import json
import random
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.passes.lowering import compiled
from penstock.runtime.artifact import relink
from tests.trust.hostile import X, change_code, change_payload, make_artifact, use

ROOT = Path(__file__).parents[2]
ASKS = r"open it with trust=True \(--trust\) if you trust whoever made it"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("trust") / "model.penstock")


class Turned(nn.Module):
    """Multiplies by a complex number, which has no form as data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.mul(torch.complex(self.linear(x), x), 1 + 2j)


def test_a_stored_export_is_not_even_read(tmp_path, monkeypatch):
    model, path = Turned(), tmp_path / "turned.penstock"
    made = penstock.compile(torch.export.export(model, (X,)), path)
    with zipfile.ZipFile(path / "program.zip") as archive:
        assert archive.namelist() == ["forward.pt2"]
    with made.load("100%") as module:  # this process has made it
        expected = module(X)
    with penstock.open(path, trust=True).load("100%") as module:
        assert torch.equal(torch.view_as_real(module(X)), torch.view_as_real(expected))
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("it was read"))
    stranger = penstock.open(path)
    assert stranger.plan("100%").budget == stranger.weight_bytes  # which is of facts alone
    for run in (lambda: stranger.load("100%"), lambda: stranger.split_memory("1GiB")):
        with pytest.raises(penstock.PayloadError, match=f"may run code: {ASKS}"):
            run()


def test_machine_code_is_not_even_read(copy, monkeypatch):
    change_payload(copy, lambda payload: payload.update(lowering="inductor"))
    monkeypatch.setattr(compiled, "open_programs", lambda *_: pytest.fail("it was read"))
    program = penstock.open(copy)
    assert program.floor_bytes > 0
    with pytest.raises(penstock.PayloadError, match=f"holds machine code .*: {ASKS}"):
        program.load("100%")


@pytest.fixture
def twice():
    library = torch.library.Library("penstock_of_a_user", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("penstock_of_a_user::twice", torch.empty_like, lib=library)
    yield torch.ops.penstock_of_a_user.twice
    library._destroy()


def test_an_operator_of_the_user_runs_where_the_user_says_so(twice, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return twice(self.linear(x))

    path = tmp_path / "own.penstock"
    made = penstock.compile(torch.export.export(Model(), (X,)), path)
    with made.load("100%") as module, penstock.open(path, trust=True).load("100%") as other:
        assert torch.equal(module(X), other(X))
    words = r"calls penstock_of_a_user\.twice\.default, which is none of the operators that run for anybody"
    with pytest.raises(penstock.PayloadError, match=f"{words}: {ASKS}"):
        penstock.open(path).load("100%")


def test_trust_goes_where_a_program_goes(copy):
    assert penstock.open(copy).trust is False
    assert penstock.open(copy, trust=True).write_ladder().trust is True
    assert penstock.open(copy).write_ladder().trust is False
    with pytest.raises(penstock.SourceError, match="nothing to relink"):
        relink(copy, trust=True)
    with pytest.raises(TypeError):
        penstock.open(copy, True)  # it is asked for by name


@pytest.mark.parametrize("version", [4, 6, "5", None, 5.0, True])
def test_other_versions_say_what_to_do(copy, version):
    change_code(copy, lambda stored: stored.update(version=version))
    with pytest.raises(penstock.PayloadError, match=r"expected JSON of version 5, got .*: compile again"):
        use(copy)


def test_no_library_is_ever_told_to_run_the_code_of_a_model():
    files = [
        path for name in ("src", "passes", "runtime", "schedule") for path in (ROOT / name).rglob("*.py")
    ]
    said = [line for path in files for line in path.read_text().splitlines() if "trust_remote_code" in line]
    assert said
    assert all("False" in line or "=True" not in re.sub(r'"[^"]*"', "", line) for line in said), said
    loads = [line for path in files for line in path.read_text().splitlines() if "torch.load(" in line]
    assert loads
    assert all("weights_only=True" in line for line in loads), loads


def test_a_copy_has_the_digest_and_runs_by_it(artifact, copy):
    digest = penstock.open(artifact).digest
    assert digest == hashlib.sha256((copy / "payload.json").read_bytes()).hexdigest()
    program = penstock.open(copy)
    assert program.verify(strict=True, digest=digest) == program.weight_bytes
    assert program.verify(digest=f"sha256:{digest}") == program.weight_bytes
    with program.load("100%", digest=digest.upper()) as module, program.load("100%") as other:
        assert torch.equal(module(X, torch.ones(5))["out"], other(X, torch.ones(5))["out"])


def test_any_byte_that_is_changed_is_found(copy):
    """In whichever file it is, and with the hashes made right again where a stranger can."""
    files = sorted(path for path in copy.iterdir())
    assert len(files) == 4
    chosen, digest = random.Random(3), penstock.open(copy).digest
    for path in files:
        data = path.read_bytes()
        for place in (0, len(data) - 1, *(chosen.randrange(len(data)) for _ in range(30))):
            path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
            with pytest.raises(penstock.PenstockError):
                penstock.open(copy).load("100%", digest=digest)
        path.write_bytes(data)
    penstock.open(copy).load("100%", digest=digest).close()


@pytest.mark.parametrize(
    "change",
    [
        lambda copy: change_code(
            copy, lambda stored: stored["graph"]["nodes"][9].__setitem__(2, "aten.abs.default")
        ),
        lambda copy: change_payload(
            copy, lambda payload: payload["methods"][0]["symbols"][0].update(example=7)
        ),
    ],
    ids=["code", "payload"],
)
def test_another_artifact_whose_hashes_are_right_has_another_digest(copy, change):
    digest = penstock.open(copy).digest
    change(copy)
    program = penstock.open(copy)
    program.verify(strict=True)  # it is whole, and another one
    assert program.digest != digest
    with pytest.raises(
        penstock.SourceError, match=rf"is not the artifact of the digest {digest}: its own is"
    ):
        program.load("100%", digest=digest)


@pytest.mark.parametrize("digest", ["", "0" * 64, "x", "9" * 500, "sha256:", "sha256:" + "0" * 64])
def test_what_is_no_digest_of_it(copy, digest):
    with pytest.raises(penstock.SourceError, match="is not the artifact of the digest"):
        penstock.open(copy).verify(digest=digest)


def between(copy):
    """A byte of the weights' file that no storage has."""
    payload = json.loads((copy / "payload.json").read_bytes())
    data = (copy / "weights.safetensors").read_bytes()
    used = {
        byte
        for storage in payload["storages"]
        for extent in storage["extents"]
        for byte in range(extent["file_offset"], extent["file_offset"] + extent["nbytes"])
    }
    header = 8 + int.from_bytes(data[:8], "little")
    return next(place for place in range(header, len(data)) if place not in used)


def test_bytes_between_weights_are_zeros(copy):
    place, path = between(copy), copy / "weights.safetensors"
    data = path.read_bytes()
    assert data[place] == 0
    path.write_bytes(data[:place] + b"x" + data[place + 1 :])
    # The file is small enough for a sampled block to have it: make that right again, as a stranger would.
    from penstock.runtime.files.artifact_files import stamp_file

    stamp = stamp_file(path, recorded_path="weights.safetensors").sampled_sha256
    change_payload(copy, lambda payload: payload["files"][0].update(sampled_sha256=stamp))
    program = penstock.open(copy)
    program.verify()
    with pytest.raises(penstock.SourceError, match=r"holds bytes from .* that belong to no weight"):
        program.verify(strict=True)


@pytest.mark.parametrize("name", ["more.py", ".hidden", "folder", "link", "folder/inner"])
def test_a_file_that_is_no_part_of_it(copy, name):
    path = copy / name
    if name == "link":
        path.symlink_to("payload.json")
    elif name == "folder":
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    program = penstock.open(copy)
    program.verify()
    with pytest.raises(
        penstock.SourceError, match=rf"holds {name.partition('/')[0]}.*, which is no part of it"
    ):
        program.verify(strict=True)


def test_a_weight_file_that_is_a_link(copy, tmp_path):
    shutil.move(copy / "weights.safetensors", tmp_path / "w")
    (copy / "weights.safetensors").symlink_to(tmp_path / "w")
    with pytest.raises(penstock.SourceError, match=r"holds weights\.safetensors, which is no part of it"):
        penstock.open(copy).verify(strict=True)


def test_strict_reads_the_code(copy):
    change_code(copy, lambda stored: stored["weights"][0].__setitem__(2, "float64"))
    program = penstock.open(copy)
    program.verify()
    with pytest.raises(penstock.PayloadError, match=r"weight 'first\.weight' of method 'forward' is"):
        program.verify(strict=True)


def test_the_commands(penstock, copy, tmp_path):
    digest = hashlib.sha256((copy / "payload.json").read_bytes()).hexdigest()
    found = json.loads(penstock("verify", copy, "--strict", "--json").out)
    assert (found["digest"], found["verified_bytes"]) == (
        digest,
        4 * (8 * 96 + 96 + 96 * 96 + 96 + 96 * 8 + 8),
    )
    assert f"digest {digest}" in penstock("verify", copy).out
    assert penstock("verify", copy, "--digest", digest).status == 0
    assert penstock("run", copy, "--budget", "100%", "--digest", digest).status == 0
    for command in (("verify", copy), ("run", copy, "--budget", "100%")):
        done = penstock(*command, "--digest", "0" * 64)
        assert done.status == 2
        assert f"is not the artifact of the digest {'0' * 64}: its own is {digest}" in done.err


MODULE = "module_of_a_stranger"


def call(target, *args, name="evil", kwargs=None):
    return ["call_function", name, target, list(args), kwargs or {}]


def insert(stored, *nodes):
    behind = sum(node[0] == "placeholder" for node in stored["graph"]["nodes"])
    stored["graph"]["nodes"][behind:behind] = nodes


def tree(stored, kind, context):
    """Replace the structure of the results, which is a dictionary of one value."""
    leaf = {"type": None, "context": None, "children_spec": []}
    stored["signature"]["out_spec"] = {
        "tree": json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])
    }


def guard(stored, run):
    stored["signature"]["guards"] = {"tuple": [{"tuple": ["x.shape[0] > 0", run]}]}


def size(stored, run):
    stored["activations"][0]["tuple"][0]["Dimension"][-2:] = [{"tuple": []}, run]


def size_of_an_input(stored, run):
    stored["signature"]["leaves"]["tuple"][1]["TensorLeaf"][3]["tuple"][0]["Dimension"][-3:] = [
        *(None, {"tuple": ["s77"]}, run)
    ]


def body(stored, run):
    name = 'training"), exec("' + run.replace(".", r"\x2e") + '"), ("'
    inner = {"nodes": [["output", "output", "output", [None], {}]], "bodies": {}}
    stored["graph"]["bodies"][name] = inner
    insert(stored, ["get_attr", "evil", name, [], {}])


ATTACKS = {
    "a guard": guard,
    "a guard behind one that holds": lambda s, run: guard(s, f"leaves[0].size()[0] > 0 and not {run}"),
    "a guard through an attribute": lambda s, run: guard(
        s, f"[c for c in ().__class__.__mro__[1].__subclasses__()] and not {run}"
    ),
    "a size of a value": size,
    "a size of an input": size_of_an_input,
    "exec": lambda s, run: insert(s, call("builtins:exec", run)),
    "a module's function": lambda s, run: insert(s, call("builtins:eval", run)),
    "an attribute of a module": lambda s, run: insert(
        s, call("torch:os.system", run.partition("system('")[2].removesuffix("')"))
    ),
    "attributes in turn": lambda s, run: insert(
        s,
        call("builtins:__import__", "os", name="module"),
        call("builtins:getattr", {"node": "module"}, "system", name="function"),
        call("_operator:call", {"node": "function"}, run.partition("system('")[2].removesuffix("')")),
    ),
    "a function as a value": lambda s, run: insert(
        s, call("_operator:call", {"operator": "builtins:eval"}, run)
    ),
    "a function as a dtype": lambda s, run: insert(
        s, call("_operator:call", {"dtype": "os"}, run), call("_operator:getitem", [1], 0, name="more")
    ),
    "a body that the operator calls": lambda s, run: insert(
        s,
        call("higher_order.cond", True, {"operator": "builtins:eval"}, {"operator": "builtins:eval"}, [run]),
    ),
    "the name of an argument": lambda s, run: insert(
        s, call("aten.relu.default", {"node": "x"}, kwargs={f"out = {run}, other": None})
    ),
    "the name of an input": lambda s, run: s["graph"]["nodes"][7].__setitem__(2, f"y={run}"),
    "the name of a body": body,
    "a module in the keys of results": lambda s, run: tree(
        s, "builtins.dict", json.dumps([{"__enum__": True, "fqn": f"{MODULE}:A", "name": "b"}])
    ),
    "a module in a default of results": lambda s, run: tree(
        s,
        "collections.defaultdict",
        {"default_factory_module": MODULE, "default_factory_name": "a", "dict_context": ["out"]},
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_stored_string_runs_or_imports_anything(copy, tmp_path, monkeypatch, name):
    mark = tmp_path / "mark"
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    change_code(copy, lambda stored: ATTACKS[name](stored, f"__import__('os').system('touch {mark}')"))
    caught = None
    try:
        use(copy)
    except Exception as error:
        caught = error
    assert not mark.exists()
    assert isinstance(caught, penstock.PenstockError)


def test_the_artifact_that_is_changed_runs_as_it_is(copy):
    assert list(use(copy)) == ["out"]
