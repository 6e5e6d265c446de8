"""`penstock inspect --graph`: what is printed is read by whoever reads DOT and node-link JSON."""

import json
import re

import networkx
import pytest
import torch
from torch import nn
from torch.export import export

import penstock as library
from penstock.schedule.report.graphs import to_dot
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

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
