"""Stored graphs that use weights in other ways than their payload says: refused before a byte is read."""

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime import loading
from tests.trust.hostile import X, change_code, change_payload, make_artifact, use

WEIGHT = {"node": "p_second_weight"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("uses") / "model.penstock")


def call(name, target, *args, **kwargs):
    return ["call_function", name, target, list(args), kwargs]


def node(name):
    return {"node": name}


def before_the_result(*nodes):
    def change(stored):
        stored["graph"]["nodes"][-1:-1] = nodes

    return change


def as_result(*nodes):
    """The last of the nodes is the result."""

    def change(stored):
        before_the_result(*nodes)(stored)
        stored["graph"]["nodes"][-1][3] = [{"tuple": [node(nodes[-1][1])]}]

    return change


def refused(copy, words, monkeypatch):
    monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(penstock.PayloadError, match=words):
        use(copy)


ALIKE = (
    call("made", "aten.zeros.default", [96, 96]),
    call("turned", "aten.t.default", node("made")),  # of the same sizes as the weight
)


@pytest.mark.parametrize(
    "nodes",
    [
        [call("late", "aten.relu.default", WEIGHT)],
        [call("view", "aten.t.default", WEIGHT), call("late", "aten.relu.default", node("view"))],
        [*ALIKE, call("view", "aten.t.default", WEIGHT), call("late", "aten.relu.default", node("view"))],
        [
            call("view", "aten.dropout.default", WEIGHT, 0.5, False),  # an alias that no schema declares
            call("late", "aten.relu.default", node("view")),
        ],
        [
            call("parts", "aten.chunk.default", WEIGHT, 2),
            call("part", "_operator:getitem", node("parts"), 1),
            call("late", "aten.sum.default", node("part")),
        ],
        [call("late", "aten.dropout.default", WEIGHT, 0.5, True)],
    ],
    ids=["itself", "view", "view like another", "undeclared alias", "chunk", "dropout that draws"],
)
def test_a_read_that_no_step_has(copy, nodes, monkeypatch):
    change_code(copy, before_the_result(*nodes))
    refused(copy, r"weight 'second\.weight' of method 'forward' is read by late, and no step", monkeypatch)


def test_a_view_of_a_weight_needs_no_step(copy):
    nodes = (
        *ALIKE,
        call("view", "aten.t.default", WEIGHT),
        call("other", "aten.relu.default", node("turned")),
    )
    change_code(copy, before_the_result(*nodes))
    assert list(use(copy)) == ["out"]


BATCH = (call("batch", "aten.ones.default", [4, 96]), call("row", "aten.select.int", WEIGHT, 0, 0))
NORM = (node("batch"), None, None, node("row"), node("row"))


def test_a_step_of_another_node(copy, monkeypatch):
    def change(payload):
        steps = payload["traces"][0]["steps"]
        names = [step["name"] for step in steps]
        steps[names.index("linear_1")]["name"] = "relu"

    change_payload(copy, change)
    refused(copy, r"weight 'second\.\w+' of .* is read by linear_1, and no step", monkeypatch)


@pytest.mark.parametrize(
    "nodes",
    [
        [call("written", "aten.add_.Tensor", WEIGHT, 1)],
        [call("view", "aten.t.default", WEIGHT), call("written", "aten.zero_.default", node("view"))],
        [
            call("view", "aten.select.int", WEIGHT, 0, 0),
            call("written", "aten.add.out", node("view"), node("view"), out=node("view")),
        ],
        [*BATCH, call("written", "aten.batch_norm.default", *NORM, True, 0.1, 1e-5, False)],
        [*BATCH, call("written", "aten.batch_norm.default", *NORM, 1, 0.1, 1e-5, False)],
        [
            *BATCH,
            call("flag", "_operator:eq", 3, 3),
            call("written", "aten.batch_norm.default", *NORM, node("flag"), 0.1, 1e-5, False),
        ],
    ],
    ids=["in place", "view", "out=", "statistics", "flag that is a number", "computed flag"],
)
def test_a_write_to_a_weight_that_may_be_mapped(copy, nodes, monkeypatch):
    def with_step(payload):
        """A step of the name of the node, so that the read is all right."""
        steps = payload["traces"][0]["steps"]
        (step,) = (one for one in steps if one["name"] == "linear_1")
        steps.append(step | {"name": "written"})

    change_code(copy, before_the_result(*nodes))
    change_payload(copy, with_step)
    refused(copy, r"weight 'second\.weight' of method 'forward' is written", monkeypatch)


def test_a_result_that_is_a_weight(copy, monkeypatch):
    change_code(copy, as_result(call("view", "aten.t.default", WEIGHT)))
    refused(copy, r"weight 'second\.weight' .* is in memory that a result shares", monkeypatch)


@pytest.mark.parametrize(
    "nodes",
    [
        [call("late", "aten.linear.default", node("x"), WEIGHT)],
        [call("late", "aten.view.default", node("x"), [7, 7])],
        [call("late", "aten.zeros.default", [1 << 40, 1 << 40])],
        [call("late", "aten.index_select.default", node("x"), 9, node("x"))],
        [call("late", "aten.sum.default", node("x"), nothing=1)],
        [call("late", "_operator:getitem", node("x"), "x")],
        [call("late", "_operator:mul", [1], 1 << 40)],
        [call("late", "_operator:mod", "%1000000000000d", 1)],
        [call("late", "_operator:pow", 9, 1 << 40)],
        [call("late", "builtins:round", 9, -1 << 40)],
        [call("late", "_operator:mul", 1 << 200, 1 << 200)],
    ],
    ids=[
        *("shapes", "view", "too large", "dimension", "argument", "item"),
        *("list", "text", "power", "round", "product"),
    ],
)
def test_a_node_that_cannot_run(copy, nodes, monkeypatch):
    change_code(copy, before_the_result(*nodes))
    refused(copy, r"cannot be followed without running it: node late cannot run .*compile again", monkeypatch)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("aten.unbind.int", ()),
        ("aten.unbind_copy.int", ()),
        ("aten.split_copy.Tensor", (1,)),
        ("aten.unsafe_chunk.default", (1 << 29,)),
    ],
)
def test_lists_of_more_tensors_than_there_is_time_for(copy, target, arguments, monkeypatch):
    nodes = (
        call("large", "aten.empty.memory_format", [1 << 30, 1]),
        call("late", target, node("large"), *arguments),
    )
    change_code(copy, before_the_result(*nodes))
    refused(copy, r"node late cannot run .* is called, or makes parts, so often", monkeypatch)


def test_a_list_of_a_few_parts_of_a_large_tensor(copy):
    nodes = (
        call("large", "aten.new_empty.default", node("x"), [1 << 20]),
        call("halves", "aten.split_copy.Tensor", node("large"), 1 << 19),
        call("eighths", "aten.unsafe_chunk.default", node("large"), 8),
    )
    change_code(copy, before_the_result(*nodes))
    assert list(use(copy)) == ["out"]


def produced(steps, storages, writer):
    """Say that the weight is a value that `writer` makes, and that the next layer reads: it is in no file."""
    storages[2] |= {"kind": "produced", "extents": [], "sha256": None}
    layer = [step["name"] for step in steps].index("linear_1")
    if writer == "linear_1":
        steps[layer] |= {"writes": [2], "reads": [3]}
    else:
        steps.insert(layer, steps[layer] | {"name": writer, "writes": [2], "reads": []})


@pytest.mark.parametrize(
    ("writer", "slot", "words"),
    [
        ("linear_1", None, "is written by the step linear_1, which is no node that fills it"),
        ("written", ["aten.alias.default"], "is read by linear_1, before it is written"),
        ("written", ["aten.select.int", 0, 0], "is written by the step written, which is no node that"),
        ("written", None, "is written by the step written, which is no node that fills it"),
    ],
    ids=["a node that reads", "written later", "a part", "by itself"],
)
def test_a_weight_that_is_said_to_be_written(copy, writer, slot, words, monkeypatch):
    store = "penstock.store.default"
    if slot is not None:
        nodes = (
            call("slot", slot[0], WEIGHT, *slot[1:]),
            call("value", "aten.ones_like.default", node("slot")),
            call("written", store, node("slot"), node("value"), 0, 0),
        )
    else:
        nodes = (call("written", store, WEIGHT, WEIGHT, 0, 0),)
    if writer == "written":
        change_code(copy, before_the_result(*nodes))
    change_payload(copy, lambda payload: produced(payload["traces"][0]["steps"], payload["storages"], writer))
    refused(copy, rf"weight 'second\.weight' of method 'forward' {words}", monkeypatch)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(1024, 1024))

    def forward(self, index):
        return torch.index_select(self.table, 0, index) * 2


@pytest.mark.parametrize("change", ["dimension", "operator"])
def test_a_read_by_units_that_needs_all_of_a_weight(tmp_path, change, monkeypatch):
    path = tmp_path / "model.penstock"
    penstock.compile(torch.export.export(Rows(), (torch.arange(3),)), path)
    with penstock.open(path).load("100%"):
        pass

    def otherwise(stored):
        (row,) = (row for row in stored["graph"]["nodes"] if row[2] == "aten.index_select.default")
        row[2:4] = {
            "dimension": [row[2], [row[3][0], 1, row[3][2]]],
            "operator": ["aten.relu.default", row[3][:1]],
        }[change]

    change_code(path, otherwise)
    refused(path, "weight 'table' .* is read by units by index_select, which needs all of it", monkeypatch)


def test_what_is_trusted_is_not_followed(copy):
    change_code(copy, before_the_result(call("late", "aten.relu.default", WEIGHT)))
    with penstock.open(copy, trust=True).load("100%") as module:
        assert list(module(X, torch.ones(5))) == ["out"]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.cond(x.sum() > 0, self.one, self.other, (x,))
        return y


def test_a_body_that_stores(tmp_path, monkeypatch):
    path = tmp_path / "model.penstock"
    penstock.compile(torch.export.export(Branching(), (X,)), path)

    def storing(stored):
        made = call("made", "aten.zeros.default", [3])
        body = stored["graph"]["bodies"]["false_graph_0"]["nodes"]
        body[-1:-1] = [made, call("late", "penstock.store.default", node("made"), node("made"), 0, 0)]

    change_code(path, storing)
    refused(path, "a body in method 'forward' stores a value, which no step says", monkeypatch)


def test_a_body_of_control_flow(tmp_path, monkeypatch):
    path = tmp_path / "model.penstock"
    penstock.compile(torch.export.export(Branching(), (X,)), path)
    with penstock.open(path).load("100%") as module:
        assert torch.equal(module(X), module(X))

    def in_place(stored):
        body = stored["graph"]["bodies"]["false_graph_0"]["nodes"]
        names = [row[1] for row in body if row[0] == "placeholder"]
        body[-1:-1] = [call(f"written_{name}", "aten.mul_.Tensor", node(name), 2) for name in names]

    change_code(path, in_place)
    refused(path, r"weight '(one|other)\.\w+' of method 'forward' is written", monkeypatch)


@pytest.mark.timeout(60)
def test_bodies_that_call_bodies_for_ever(tmp_path):
    """Each body calls the next one eight times, which a file of a few kilobytes says."""
    path = tmp_path / "model.penstock"
    penstock.compile(torch.export.export(Branching(), (X,)), path)

    def nested(stored):
        graph = stored["graph"]
        (cond,) = (row for row in graph["nodes"] if row[2] == "higher_order.cond")
        inner = graph["bodies"]["true_graph_0"]
        operands = [row[1] for row in inner["nodes"] if row[0] == "placeholder"]
        for _ in range(12):
            ready = [row for row in inner["nodes"] if row[0] == "placeholder"]
            asked = [
                ["get_attr", "body", "body", [], {}],
                call("some", "aten.any.default", node(operands[0])),
                *(
                    call(
                        f"cond_{k}", "higher_order.cond", node("some"), node("body"), node("body"), cond[3][3]
                    )
                    for k in range(8)
                ),
            ]
            inner = {"nodes": [*ready, *asked, inner["nodes"][-1]], "bodies": {"body": inner}}
            inner["nodes"][-1] = ["output", "output", "output", [{"tuple": [node("cond_0")]}], {}]
        graph["bodies"]["true_graph_0"] = inner

    change_code(path, nested)
    with pytest.raises(penstock.PayloadError, match="call bodies that call bodies, so often"):
        use(path)
