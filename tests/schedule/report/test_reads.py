"""The graph of reads says of a payload which step reads which storage, and what both are."""

import networkx

from penstock.schedule.facts.model import Method, Part, Step, Storage, Trace, Weight, Work
from penstock.schedule.payload.codec import Payload


def weight(fqn, storage):
    return Weight(fqn, "parameter", "cpu", (Part("", "float32", (4, 8), (8, 1), storage, 0),))


def quantised(fqn, storages):
    data = Part("qdata", "int8", (4, 8), (8, 1), storages[0], 0)
    scale = Part("scale", "float32", (4,), (1,), storages[1], 0)
    return Weight(fqn, "parameter", "cpu", (data, scale))


STEPS = (
    Step("embedding", (0,), 5, 70, Work(1, 2), Work(3, 4)),
    Step("linear", (1, 2), 0, 30, Work(), Work(640, 160)),
    Step("head", (0,), 7, 9),
)
PAYLOAD = Payload(
    lowering="eager",
    torch="2.13.0",
    storages=(
        Storage(128, "streamable"),
        Storage(32, "streamable"),
        Storage(16, "streamable"),
        Storage(128, "mutable"),
    ),
    weights=(
        weight("embed.weight", 0),
        weight("head.weight", 0),
        quantised("a.weight", (1, 2)),
        weight("cache", 3),
    ),
    methods=(Method("prefill", 0, ()), Method("decode", 1, ())),
    traces=(
        Trace("prefill", 0, "batch=2", STEPS, 11, 0, "modelled"),
        Trace("decode", 1, "", STEPS[1:2], 0, 13, "measured"),
    ),
)


def test_every_read_and_every_step_in_its_order_is_an_edge():
    graph = PAYLOAD.read_graph()
    reads = {edge for edge in graph.edges if graph.edges[edge]["why"] == "reads"}
    assert reads == {
        (("storage", s), ("step", trace.graph, k))
        for trace in PAYLOAD.traces
        for k, step in enumerate(trace.steps)
        for s in step.reads
    }
    order = [edge for edge in graph.edges if graph.edges[edge]["why"] == "order"]
    assert order == [(("step", 0, 0), ("step", 0, 1)), (("step", 0, 1), ("step", 0, 2))]
    assert not graph.degree[("storage", 3)]
    assert networkx.is_directed_acyclic_graph(graph)


def test_nodes_say_what_they_are():
    graph = PAYLOAD.read_graph()
    assert graph.nodes["step", 0, 1] == {
        "kind": "step",
        "name": "linear",
        "method": "prefill",
        "index": 1,
        "bytes": 48,
        "lead_ns": 0,
        "lead_flops": 0,
        "lead_bytes": 0,
        "read_ns": 30,
        "read_flops": 640,
        "read_bytes": 160,
    }
    assert graph.nodes["storage", 0] == {
        "kind": "storage",
        "name": "embed.weight",
        "bytes": 128,
        "storage_kind": "streamable",
        "fqns": ["embed.weight", "head.weight"],
        "dtypes": ["float32", "float32"],
        "shapes": [[4, 8], [4, 8]],
    }
    assert graph.nodes["storage", 2]["fqns"] == ["a.weight.scale"]
    assert graph.nodes["storage", 3]["storage_kind"] == "mutable"
    assert graph.graph["methods"]["decode"] == {"shape": "", "tail_ns": 0, "gap_ns": 13, "times": "measured"}
