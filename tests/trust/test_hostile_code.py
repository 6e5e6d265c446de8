"""An artifact of a stranger is data: nothing that is stored in its graph runs, or imports, what it names."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.trust.hostile import change_code, make_artifact, use

Stored = dict[str, Any]

MODULE = "module_of_a_stranger"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("hostile") / "model.penstock")


@pytest.fixture
def copy(artifact, tmp_path):
    return Path(shutil.copytree(artifact, tmp_path / "model.penstock"))


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
