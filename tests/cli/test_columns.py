"""What commands print fits the terminal, and graphs are read by whoever reads DOT and node-link JSON."""

import json
import re

import networkx
import pytest
import torch
from torch import nn
from torch.export import export

import penstock as library
from penstock.cli.terminal import console
from penstock.schedule.report.graphs import to_dot

FACTORY = """
import torch
def build():
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    return torch.nn.Sequential(*layers), (torch.zeros(1, 512),)
"""


class Deep(nn.Module):
    """Weights with the names of a transformers model."""

    def __init__(self):
        super().__init__()
        layer = {
            name: nn.Linear(512, 512) for name in ("self_attention_query_projection", "output_projection")
        }
        self.model = nn.ModuleDict({"decoder_layers": nn.ModuleList(nn.ModuleDict(layer) for _ in range(1))})

    def forward(self, hidden_states, position_embeddings):
        for layer in self.model["decoder_layers"]:
            for part in layer.values():
                hidden_states = part(hidden_states) + position_embeddings
        return hidden_states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    batch = torch.export.Dim("batch", min=2, max=64)
    sizes = ({0: batch}, {0: batch})
    exported = torch.export.export(Deep(), (torch.randn(4, 512), torch.randn(4, 512)), dynamic_shapes=sizes)
    library.compile(exported, folder / "model.penstock")
    (folder / "factory_of_columns.py").write_text(FACTORY)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "plan model.penstock --budget 60% --hardware rtx4090 --sweep --compare",
        "inspect model.penstock",
        "simulate model.penstock --budget 60% --hardware t4",
        "preflight factory_of_columns:build --hardware h200 --hardware rtx4090 --budget 50% --budget 1KiB",
        "doctor factory_of_columns:build",
        "run model.penstock --budget 60%",
        "verify model.penstock",
        "hardware",
    ],
)
def test_no_line_is_longer_and_no_value_is_broken(folder, penstock, monkeypatch, tmp_path, command):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where other tests' long paths are not remembered
    monkeypatch.setenv("COLUMNS", "80")
    done = penstock(*command.split())
    assert done.out, done.err
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    for line in lines:  # a line that begins with a unit was broken behind its number
        assert not re.match(r"\W*(?:[KMGT]iB|B|ms|us|ns|s)\b", line), done.out
    if "--sweep" in command:  # rich would break the words of headings
        words = done.out.split("Seconds a pass by budget")[1].split()
        assert {"everything", "recently", "demand"} <= set(words), done.out


def test_names_break_at_dots_and_numbers_stay_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    name = "model.layers.0.self_attention.query_projection.weight"
    console.print_table("A title that is longer than the table", ("weight", "bytes"), [[name, "16.00 MiB"]])
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[3:] if line.strip()] == [
        "model.layers.0.self_attention.",
        "query_projection.weight",
    ]
    assert "16.00 MiB" in text
    assert "A title that is longer than the table" in text


QUOTED = r'"(?:[^"\\\n]|\\.)*"'
LIST = rf"\[{QUOTED}={QUOTED}(?:, {QUOTED}={QUOTED})*\]"
NODE, EDGE = re.compile(rf"  (n\d+) ({LIST});"), re.compile(rf"  (n\d+) -> (n\d+) ({LIST});")


def parse(dot):
    """The graph of DOT as penstock writes it: a line for a node or an edge, every attribute quoted."""
    first, *lines, last, end = dot.split("\n")
    assert (first, last, end) == ("digraph penstock {", "}", "")
    graph = networkx.DiGraph()
    for line in lines:
        if edge := EDGE.fullmatch(line):
            graph.add_edge(edge[1], edge[2], **attributes(edge[3]))
        else:
            node = NODE.fullmatch(line)
            assert node, line
            graph.add_node(node[1], **attributes(node[2]))
    return graph


def attributes(text):
    strings = [unquoted(one) for one in re.findall(QUOTED, text)]
    return dict(zip(strings[::2], strings[1::2], strict=True))


def unquoted(text):
    return re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], text[1:-1])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Two methods over the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    programs = {name: export(model, (torch.randn(rows, 256),)) for name, rows in (("one", 1), ("two", 2))}
    return library.compile(programs, tmp_path_factory.mktemp("graphs") / "a.penstock").path


def shape(graph):
    names = networkx.get_node_attributes(graph, "name")
    return sorted((names[a], names[b]) for a, b in graph.edges)


def test_the_reads_of_a_program(penstock, artifact):
    expected = library.open(artifact).read_graph()
    done = penstock("inspect", artifact, "--graph", "json")
    assert (done.status, done.err) == (0, "")
    assert networkx.utils.graphs_equal(networkx.node_link_graph(json.loads(done.out)), expected)
    drawn = parse(penstock("inspect", artifact, "--graph", "dot").out)
    assert shape(drawn) == shape(expected)
    assert [facts["why"] for *_, facts in drawn.edges(data=True)].count("reads") > 0


def test_the_events_of_a_plan(penstock, artifact):
    arguments = ("inspect", artifact, "--budget", "70%", "--method", "two", "--graph")
    found = networkx.node_link_graph(json.loads(penstock(*arguments, "json").out))
    assert {facts["kind"] for _, facts in found.nodes(data=True)} >= {"step", "transfer"}
    assert {facts["method"] for _, facts in found.nodes(data=True)} == {"two"}
    drawn = parse(penstock(*arguments, "dot").out)
    assert (len(drawn), drawn.number_of_edges()) == (len(found), found.number_of_edges())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--graph", "dot", "--json"], "give one of them"),
        (["--budget", "50%"], "give --graph dot or --graph json too"),
        (["--graph", "dot", "--method", "one"], "give --budget too"),
        (["--graph", "dot", "--budget", "70%"], "no method is named: the plan has one, two"),
        (["--graph", "dot", "--budget", "70%", "--method", "three"], "there is no method 'three'"),
        (["--graph", "json", "--budget", "1"], "below the floor"),
    ],
)
def test_what_does_not_go_together(penstock, artifact, arguments, words):
    done = penstock("inspect", artifact, *arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err.splitlines()[-1]


def test_names_with_quotes_and_newlines_stay_whole():
    names = ['a "quoted" name', "two\nlines", "back\\slash", 'all\\"\n', "\\n", "]; n0 [", ""]
    graph = networkx.DiGraph()
    for number, name in enumerate(names):
        graph.add_node(("storage", number), name=name, kind="storage")
        graph.add_edge(("storage", 0), ("storage", number), why=name)
    drawn = parse(to_dot(graph))
    assert [facts["name"] for _, facts in drawn.nodes(data=True)] == names
    assert [facts["why"] for *_, facts in drawn.edges(data=True)] == names
