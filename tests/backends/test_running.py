"""Payloads from a container: loaded with one number, run as graphs or as a program of the compiler's own."""

import copy
import warnings

import pytest
import torch
from safetensors.torch import save_file

from penstock import LoadOptions
from penstock.backends.fx import FxBackend
from penstock.backends.running import payload_key
from penstock.passes.graph.nodes import copy_graph_module
from penstock.schedule.facts.errors import (
    BudgetError,
    PassError,
    PayloadError,
    PlanError,
    SourceError,
    StreamError,
)
from tests.backends.backend_models import PROMPT, TOKEN, Layers, decoder, layers


@pytest.fixture
def packed(tmp_path):
    """A backend whose container is written, the lowered graph, and what it should compute."""
    model, exported, x = layers()
    backend = FxBackend(tmp_path)
    lowered = backend.lower(backend.annotate(exported)["forward"])
    return backend, lowered, backend.payload(), model, x


def test_the_backend_is_the_protocol(tmp_path):
    backend = FxBackend(tmp_path)
    _, exported, _ = layers()
    backend.lower(backend.annotate(exported)["forward"])
    key, data = backend.payload()
    assert key == payload_key(data)
    assert backend.payload() == (key, data)  # and nothing is written again


@pytest.mark.parametrize("arena", ["contiguous", "paged"])
def test_one_number_chooses_what_streams(packed, arena):
    backend, lowered, payload, model, x = packed
    streamed = {}
    for budget in ("25%", "50%", "100%"):
        with backend.load(payload, budget, options=LoadOptions(arena=arena)) as weights:
            run = weights.bind(lowered)
            for _ in range(3):
                assert torch.equal(run(x)[0], model(x))
            streamed[budget] = weights.plan.streamed_bytes
            assert weights.stats.bytes_moved >= 2 * weights.plan.streamed_bytes
            assert weights.stats.misses == 0
            assert weights.stats.peak_bytes <= weights.plan.budget
    assert streamed["25%"] > streamed["50%"] > streamed["100%"] == 0


def test_a_budget_below_the_floor_is_refused_with_the_floor(packed):
    backend, _, payload, _, _ = packed
    with pytest.raises(BudgetError, match="below the floor") as refused:
        backend.load(payload, "1KiB")
    floor = refused.value.floor_bytes
    assert floor is not None
    backend.load(payload, floor).close()


def test_methods_share_weights_cache_and_budget(tmp_path):
    model, programs = decoder()
    expected = copy.deepcopy(model)
    backend = FxBackend(tmp_path)
    graphs = {name: backend.lower(graph, name) for name, graph in backend.annotate(programs).items()}
    payload = backend.payload()
    (weight_file,) = tmp_path.iterdir()
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert weight_file.stat().st_size < 1.2 * parameters + 8192  # a storage is written once
    kinds = {w.fqn: backend.facts.storages[w.parts[0].storage].kind for w in backend.facts.weights}
    assert kinds["cache"] == "mutable"
    with backend.load(payload, "60%", options=LoadOptions(arena="contiguous")) as weights, torch.no_grad():
        prefill, decode = (weights.bind(graphs[name], name) for name in ("prefill", "decode"))
        cache = weights.plan.outside
        for _ in range(2):
            assert torch.equal(prefill(*PROMPT)[0], expected(*PROMPT))
            assert torch.equal(decode(*TOKEN)[0], expected(*TOKEN))  # sees what prefill wrote
        assert torch.equal(weights.tensors["cache"], expected.cache)
        assert weights.stats.misses == 0
        assert weights.stats.bytes_moved > 0
        assert weights.stats.peak_bytes <= weights.plan.budget
        assert (
            backend.facts.weights[[w.fqn for w in backend.facts.weights].index("cache")].parts[0].storage
            in cache
        )


def test_pinned_names_never_leave_memory(packed):
    backend, lowered, payload, model, x = packed
    with backend.load(
        payload, "75%", keep=("layers.0.*", "layers.5.weight"), options=LoadOptions(arena="paged")
    ) as weights:
        names = weights.payload.storage_names()
        assert {names[s] for s in weights.plan.outside} | resident(weights) >= {
            "layers.0.weight",
            "layers.0.bias",
            "layers.5.weight",
        }
        for _ in range(2):
            assert torch.equal(weights.bind(lowered)(x)[0], model(x))
    with pytest.raises(PlanError, match="matches no weight"):
        backend.load(payload, "50%", keep=("embed.*",))


def resident(weights):
    """Names of the storages of which every byte is resident."""
    names, layout = weights.payload.storage_names(), weights.plan.arena.layout
    ranges = [(one.start, one.stop) for one in weights.plan.resident]
    return {
        names[s]
        for s, storage in enumerate(weights.payload.storages)
        if any(start <= layout[s] and layout[s] + storage.nbytes <= stop for start, stop in ranges)
    }


def test_a_read_out_of_order_is_a_miss_and_finds_the_right_bytes(packed):
    backend, _, payload, model, _ = packed
    with backend.load(payload, "25%", options=LoadOptions(arena="contiguous")) as weights:
        steps = range(len(weights.payload.traces[0].steps))

        def sums(reading, order):
            found = {}
            for k in order:
                with reading(k):
                    found[k] = weights.tensors[f"layers.{k}.weight"].clone()
            return found

        planned = weights.stream(lambda reading: sums(reading, steps))
        assert weights.stats.misses == 0
        backwards = weights.stream(lambda reading: sums(reading, reversed(steps)))
        assert weights.stats.misses > 0
        missed = weights.stats.misses
        again = weights.stream(lambda reading: sums(reading, steps))
        assert weights.stats.misses == missed  # the next pass is as planned
        for found in (planned, backwards, again):
            assert all(torch.equal(found[k], model.layers[k].weight) for k in steps)


def test_two_steps_are_never_held_at_once(packed):
    """The second would drop what the first holds."""
    backend, _, payload, model, _ = packed
    with backend.load(payload, "25%", options=LoadOptions(arena="contiguous")) as weights:

        def nested(reading):
            with reading(0), reading(1):
                pass

        with pytest.raises(StreamError, match="step 0 of method 'forward' is held, or failed, and step 1"):
            weights.stream(nested)

        def after_a_failure(reading):
            try:
                with reading(0):
                    raise ValueError
            except ValueError:
                with reading(1):
                    pass

        with pytest.raises(StreamError, match="is held, or failed"):
            weights.stream(after_a_failure)

        def first(reading):
            with reading(0):
                return weights.tensors["layers.0.weight"].clone()

        assert torch.equal(weights.stream(first), model.layers[0].weight)


def test_a_pass_that_fails_leaves_the_next_one_right(packed):
    backend, lowered, payload, model, x = packed
    with backend.load(payload, "25%", options=LoadOptions(arena="contiguous")) as weights:

        def broken(reading):
            with reading(0):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            weights.stream(broken)
        with pytest.raises(StreamError, match="6 steps and none with number 6"):
            weights.stream(lambda reading: reading(6).__enter__())
        assert torch.equal(weights.bind(lowered)(x)[0], model(x))


def test_what_does_not_belong_together_is_refused(packed, tmp_path):
    backend, lowered, (key, data), _, x = packed
    with pytest.raises(PlanError, match="matches no weight"):
        backend.load((key, data), "50%", keep=("embed.*",))
    with pytest.raises(PayloadError, match="of another model, or damaged"):
        backend.load((key, data.replace(b"layers.0", b"layers.9")), "50%")
    with backend.load((key, data), "50%") as weights:
        unlowered = backend.annotate(layers()[1])["forward"]
        with pytest.raises(
            PayloadError, match=r"step 0 of method 'forward' reads layers\.0\.weight.*lower the graph"
        ):
            weights.bind(unlowered)
        with pytest.raises(PassError, match="there is no method 'decode'"):
            weights.bind(lowered, "decode")
        with pytest.raises(StreamError, match="requires grad"):
            weights.bind(lowered)(x.requires_grad_())
    with pytest.raises(StreamError, match="closed"):
        weights.stream(lambda reading: None)
    (tmp_path / "weights.safetensors").write_bytes(b"0" * 4096)
    with pytest.raises(SourceError):
        backend.load((key, data), "50%")


def with_late_read(graph, how):
    """The graph, behind which a pass has added a read of the first layer's weight."""
    changed = copy_graph_module(graph)
    nodes = {node.name: node for node in changed.graph.nodes}
    first, weight = nodes["linear"], nodes["p_layers_0_weight"]
    if how == "view":  # made where it may be made, and read where the weight may have left
        with changed.graph.inserting_before(first):
            weight = changed.graph.call_function(torch.ops.aten.t.default, (weight,))
    output = changed.graph.output_node()
    with changed.graph.inserting_before(output):
        if how == "compiled":
            changed.add_submodule("late", torch.compile(torch.nn.Linear(1, 1), backend="eager"))
            late = changed.graph.call_module("late", (first, weight))
        elif how == "returned":
            late = weight
        else:
            late = changed.graph.call_function(torch.ops.aten.mm.default, (first, weight))
    output.args = ((late,),)
    changed.recompile()
    return changed


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("how", ["direct", "view", "compiled", "returned"])
def test_a_read_that_a_pass_has_added_behind_the_lowering_is_refused(packed, how, recorded):
    backend, lowered, payload, model, x = packed
    changed = with_late_read(lowered, how)
    for node in changed.graph.nodes if not recorded else ():
        node.meta.pop("val", None)  # which a graph loses that is made from code
    reader = {"compiled": "late", "returned": "output"}.get(how, "mm_default")
    with backend.load(payload, "25%", options=LoadOptions(arena="contiguous")) as weights:
        with pytest.raises(
            PayloadError,
            match=rf"node '{reader}' of method 'forward' reads the weight 'layers\.0\.weight' outside of its",
        ):
            weights.bind(changed)
        assert torch.equal(weights.bind(lowered)(x)[0], model(x))


def test_compiled_code_between_probes_is_trusted(packed):
    """Nobody can see what it reads beside what it is given."""
    backend, lowered, payload, model, x = packed
    changed = copy_graph_module(lowered)
    (node,) = (one for one in changed.graph.nodes if one.name == "linear_2")
    changed.add_submodule("region", torch.compile(Linear(), backend="eager"))
    with changed.graph.inserting_before(node):
        node.replace_all_uses_with(changed.graph.call_module("region", node.args))
    changed.graph.erase_node(node)
    changed.recompile()
    with backend.load(payload, "25%", options=LoadOptions(arena="contiguous")) as weights:
        assert torch.equal(weights.bind(changed)(x)[0], model(x))


class Linear(torch.nn.Module):
    def forward(self, *inputs):
        return torch.nn.functional.linear(*inputs)


def test_other_numbers_of_inputs_are_refused(packed):
    backend, lowered, payload, _, x = packed
    with backend.load(payload, "50%") as weights:
        run = weights.bind(lowered)
        for inputs in ((), (x, x)):
            with pytest.raises(
                StreamError, match=rf"'forward' takes 1 inputs \(x\), got {len(inputs)}: give it"
            ):
                run(*inputs)


def test_the_files_of_a_checkpoint_are_used_in_place(tmp_path):
    model, exported, x = layers()
    save_file(model.state_dict(), tmp_path / "checkpoint.safetensors")
    with torch.device("meta"):
        empty = Layers().eval()
    exported = torch.export.export(empty, (x.to("meta"),))
    folder = tmp_path / "container"
    folder.mkdir()
    backend = FxBackend(folder, tmp_path / "checkpoint.safetensors")
    backend.annotate(exported)
    payload = backend.payload()
    assert not any(folder.iterdir())
    with backend.load(payload, "50%", options=LoadOptions(arena="contiguous")) as weights:
        for _ in range(2):
            found = weights.stream(lambda reading: one_by_one(reading, weights))
            assert all(torch.equal(got, one.weight) for got, one in zip(found, model.layers, strict=True))


def one_by_one(reading, weights):
    found = []
    for k in range(6):
        with reading(k):
            found.append(weights.tensors[f"layers.{k}.weight"].clone())
    return found


def test_quantised_weights_stream_by_their_parts(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))).eval(), torch.randn(2, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, Int8WeightOnlyConfig())
        exported = torch.export.export(model, (x,))
    backend = FxBackend(tmp_path)
    lowered = backend.lower(backend.annotate(exported)["forward"])
    with backend.load(backend.payload(), "60%", options=LoadOptions(arena="paged")) as weights:
        run = weights.bind(lowered)
        for _ in range(3):
            assert torch.equal(run(x)[0], model(x))
        assert weights.stats.bytes_moved > 0
        assert weights.stats.misses == 0


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [["layers.0.weight"], ["layers.1.weight.t"]],
            r"step 1 reads 'layers\.1\.weight\.t', which is no weight",
        ),
        ([[]], "step 0 of 1 reads no weight that streams"),
        ([["layers.0.weight"]], r"no step reads the weight 'layers\.0\.bias'"),
    ],
)
def test_an_order_that_is_not_the_programs_is_refused(tmp_path, order, message):
    backend = FxBackend(tmp_path)
    backend.annotate(layers()[1])
    with pytest.raises(PassError, match=message):
        backend.observe(order)


def test_a_program_that_is_no_graph_says_its_own_order(tmp_path):
    _, exported, _ = layers()
    backend = FxBackend(tmp_path)
    backend.annotate(exported)
    before = backend.facts.traces[0]
    pairs = [
        [f"layers.{k}.{part}" for k in (2 * n, 2 * n + 1) for part in ("weight", "bias")] for n in range(3)
    ]
    backend.observe(pairs)
    steps = backend.facts.traces[0].steps
    assert [len(step.reads) for step in steps] == [4, 4, 4]
    assert sum(s.read_work.flops for s in steps) == sum(s.read_work.flops for s in before.steps)
