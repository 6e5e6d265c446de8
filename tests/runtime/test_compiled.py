"""Programs that Inductor compiled: any budget, the same bits, and reads where the emitted code has them."""

import itertools
import json
import re
import textwrap
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock import LoadOptions
from penstock.passes.lowering.emitted import observe_cpp
from penstock.runtime.program import Program
from tests.forked import run_forked
from tests.hunt import nightly_but
from tests.runtime.compiled_models import as_mapping, decoder, decoder_arguments, export, odd_arguments

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
pytestmark = pytest.mark.timeout(300)


def budget(program, share, arena=None):
    lowest = program.floor(arena=arena)
    return lowest + int((program.weight_bytes - lowest) * share)


@pytest.mark.parametrize(
    ("share", "arena"),
    nightly_but(
        {(0.0, "contiguous"), (0.0, "paged"), (0.5, None), (1.0, None)},
        [*itertools.product(SHARES[:-1], ("contiguous", "paged", None)), (1.0, None)],
    ),
)
def test_outputs_are_those_of_plain_aotinductor_at_every_budget(compiled, share, arena):
    """Two methods over one arena, called twice in turn, with freed bytes overwritten."""
    program = compiled["decoder"].program
    nbytes = budget(program, share, arena)
    with program.load(nbytes, options=LoadOptions(arena=arena, poison=True)) as module:
        for _ in range(2):
            outputs = [module.prefill(*decoder_arguments(5)), module.decode(*decoder_arguments(1))]
            for output, expected in zip(outputs, compiled["decoder"].expected, strict=True):
                assert torch.equal(output, expected)
        assert module.stats.misses == 0
        assert module.stats.peak_bytes <= nbytes


@pytest.mark.parametrize(
    ("share", "arena"),
    nightly_but(
        {(0.0, "contiguous"), (0.5, "paged")}, itertools.product(SHARES[:-1], ("contiguous", "paged"))
    ),
)
def test_reads_through_views_control_flow_and_several_kernels(compiled, share, arena):
    program, expected = compiled["odd"].program, compiled["odd"].expected
    with program.load(budget(program, share, arena), options=LoadOptions(arena=arena, poison=True)) as module:
        for _ in range(3):
            output = module(*odd_arguments())
            assert output.keys() == expected.keys()
            assert all(torch.equal(output[key], expected[key]) for key in expected)
        assert module.stats.misses == 0


def test_a_cache_is_resident_and_lives_from_call_to_call(compiled):
    program = compiled["decoder"].program
    reference = decoder()
    with program.load(program.floor_bytes) as module, torch.no_grad():
        module.prefill(*decoder_arguments(5))
        reference(*decoder_arguments(5))
        for first in range(5, 9):
            arguments = decoder_arguments(1, first)
            torch.testing.assert_close(module.decode(*arguments), reference(*arguments))
    kinds = {w.fqn: program.payload.storages[w.parts[0].storage].kind for w in program.payload.weights}
    assert kinds["layers.0.keys"] == "mutable"
    assert kinds["scale"] == "inlined"
    assert kinds["layers.0.norm.weight"] == "small"
    assert kinds["embedding.weight"] == kinds["layers.2.down.weight"] == "streamable"


def test_a_compiled_program_runs_on_the_simulated_device_too(compiled):
    program, expected = compiled["odd"].program, compiled["odd"].expected
    budget = program.floor("sim")
    with torch.no_grad(), program.load(budget, device="sim:t4") as module:
        for _ in range(2):
            assert torch.equal(module(*odd_arguments())["mixed"], expected["mixed"])
        assert module.stats.bytes_moved > 0


def test_two_modules_of_one_artifact_do_not_disturb_each_other(compiled):
    program, expected = compiled["odd"].program, compiled["odd"].expected
    with (
        program.load(budget(program, 0.0), options=LoadOptions(poison=True)) as small,
        program.load(budget(program, 0.5), options=LoadOptions(poison=True)) as large,
    ):
        for module in (small, large, small, large):
            assert torch.equal(module(*odd_arguments())["mixed"], expected["mixed"])


def test_a_call_after_close_is_refused_and_harmless(compiled):
    program = compiled["odd"].program
    module = program.load(budget(program, 0.5))
    module(*odd_arguments())
    module.close()
    with pytest.raises(penstock.StreamError, match="the module is closed"):
        module(*odd_arguments())


def test_measured_steps_are_those_of_the_trace(compiled):
    program = compiled["odd"].program
    with program.load("50%") as module:
        trace = module.measure(*odd_arguments())
        plan = program.plan("50%", traces=[trace])
    assert [step.reads for step in trace.steps] == [s.reads for s in program.payload.traces[0].steps]
    assert trace.times == "measured"
    assert sum(step.read_ns for step in trace.steps) > 0
    assert plan.traces == (trace,)


# What the emitted source says.


@pytest.mark.parametrize(
    ("name", "method"), [("decoder", "prefill"), ("decoder", "decode"), ("odd", "forward")]
)
def test_every_line_that_names_a_streamed_weight_lies_in_a_step_that_reads_it(compiled, name, method):
    """Read here line by line, with nothing of the code that made the trace; and each probe is called once."""
    payload = compiled[name].program.payload
    graph = next(m.graph for m in payload.methods if m.name == method)
    order = next(o for o in payload.probes if o.graph == graph)
    steps = payload.trace_for(graph).steps
    source, nodes = compiled[name].wrappers[method]
    streamed = {
        w.fqn: w.parts[0].storage
        for w in payload.weights
        if payload.storages[w.parts[0].storage].kind == "streamable"
    }
    fqns = dict(re.findall(r'constants_info_\[(\d+)\]\.original_fqn = "(.*)";', source))
    probes = [node["node"] for node in json.loads(nodes)["nodes"]]
    body = source[source.rindex("::run_impl(") - 1000 :].split("kernels_.get());", 1)[1]
    names = {c: fqns[i] for c, i in re.findall(r"auto& (\w+) = constants_->at\((\d+)\)", source)}
    last, seen, read = -1, [], set()
    for line in body.splitlines():
        if found := re.search(r"call_function\(proxy_executor, (\d+), 2, ", line):
            node = probes[int(found[1])]
            step = node["inputs"][2]["arg"]["as_int"]
            last = 2 * step + (node["target"] == "penstock::release")
            seen.append(last)
        elif "reset()" not in line and "assign_tensors_out" not in line:
            for word in set(re.findall(r"\w+", line)) & names.keys():
                if names[word] in streamed:
                    k = order.opens.index(last)
                    assert streamed[names[word]] in steps[k].reads, line
                    read.add(streamed[names[word]])
    assert len(seen) == len(set(seen)) == sum(p["target"].startswith("penstock::") for p in probes)
    assert {s for step in steps for s in step.reads} >= read
    assert len(read) > 3


def test_weights_that_are_one_storage_are_one_read(compiled):
    """`both`, its chunks, and `lower`, which views it; the embedding, read by gather and by product."""
    payload = compiled["odd"].program.payload
    storage = {weight.fqn: weight.parts[0].storage for weight in payload.weights}
    assert storage["both"] == storage["lower"]
    assert sum(storage["both"] in step.reads for step in payload.traces[0].steps) >= 2
    tied = compiled["decoder"].program.payload
    names = {weight.fqn: weight.parts[0].storage for weight in tied.weights}
    assert names["embedding.weight"] == names["head.weight"]
    reads = [names["head.weight"] in step.reads for step in tied.traces[0].steps]
    assert reads[0]
    assert reads[-1]


def test_a_read_moved_out_of_its_probes_is_seen_where_it_happens(compiled):
    """The last call of a release moved before the kernel that it follows."""
    payload = compiled["decoder"].program.payload
    source, nodes = compiled["decoder"].wrappers["decode"]
    streamed = {
        w.fqn: w.parts[0].storage
        for w in payload.weights
        if payload.storages[w.parts[0].storage].kind == "streamable"
    }
    graph = next(m.graph for m in payload.methods if m.name == "decode")
    before = observe_cpp(source, nodes, streamed, graph)
    assert tuple(s.reads for s in before.steps) == tuple(s.reads for s in payload.trace_for(graph).steps)
    lines = source.splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if "call_function(proxy_executor" in line)
    kernel = max(i for i, line in enumerate(lines[:last]) if "mm_out(" in line)
    lines.insert(kernel, lines.pop(last))
    after = observe_cpp("".join(lines), nodes, streamed, graph)
    assert after.steps[-1].reads == before.steps[-1].reads
    assert after.steps[-1].closes == -1


def test_probes_moved_before_their_kernel_are_shown_by_the_poison(compiled):
    """Each step in turn that drops what it read is declared over at the call that should begin it."""
    program, expected = compiled["odd"].program, compiled["odd"].expected
    order = program.payload.probes[0]
    plan = program.plan(program.floor(arena="contiguous"), arena="contiguous")
    dropping = {drop.step for drop in plan.schedules[0].drops}
    moved = [
        k
        for k in range(1, len(order.opens))
        if k in dropping and order.closes[k - 1] not in order.opens and order.opens[k] not in order.closes
    ]
    assert moved
    for k in moved:
        opens, closes = list(order.opens), list(order.closes)
        opens[k], closes[k] = closes[k - 1], opens[k]
        wrong = replace(program.payload, probes=(replace(order, opens=tuple(opens), closes=tuple(closes)),))
        with Program(program.path, wrong, trust=True).load(
            plan=plan, options=LoadOptions(poison=True)
        ) as module:
            output = module(*odd_arguments())
        assert any(not torch.equal(output[key], expected[key]) for key in expected)


# A fresh process, other weights, other options.


def test_a_fresh_process_needs_neither_the_class_nor_the_source(compiled, tmp_path):
    torch.save((odd_arguments(), compiled["odd"].expected["mixed"]), tmp_path / "case.pt")
    script = textwrap.dedent(
        f"""
        import penstock, torch
        arguments, expected = torch.load({str(tmp_path / "case.pt")!r})
        program = penstock.open({str(compiled["odd"].program.path)!r}, trust=True)
        with program.load("75%", options=penstock.LoadOptions(poison=True)) as module:
            assert torch.equal(module(*arguments)["mixed"], expected)
        """
    )
    empty = str(tmp_path / "none")
    done = run_forked(script, folder=tmp_path, warnings="ignore", TORCHINDUCTOR_CACHE_DIR=empty)
    assert done.status == 0, done.err


def test_the_floor_does_not_grow_with_the_layers(compiled, tmp_path):
    """But for the small weights and caches, which stay in memory."""
    shallow = penstock.compile(
        as_mapping(decoder(1), {"decode": 1}),
        tmp_path / "shallow.penstock",
        lowering="inductor",
        resident_below="1KiB",
    )
    floors = []
    for program in (shallow, compiled["decoder"].program):
        resident = sum(s.nbytes for s in program.payload.storages if s.kind != "streamable")
        floors.append(program.floor(arena="contiguous") - resident)
    assert floors[0] == floors[1] < 40_000


@pytest.mark.usefixtures("compiler")
def test_fake_weights_compile_and_bind_to_a_checkpoint(tmp_path):
    """A program with a dynamic size whose weights are fake tensors, and files that come later."""
    torch.manual_seed(3)
    real = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).eval()
    shift = {"!first": torch.zeros(2)}  # behind it tensors are off 16 bytes, where compiled code may not look
    save_file({**shift, **real.state_dict()}, tmp_path / "model.safetensors")
    with FakeTensorMode(allow_non_fake_inputs=True):
        empty = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).eval()
        batch = torch.export.Dim("batch", min=2, max=64)
        exported = export(empty, (torch.randn(4, 32),), dynamic_shapes=({0: batch},))
    program = penstock.compile(
        exported,
        tmp_path / "m.penstock",
        lowering="inductor",
        weights=tmp_path / "model.safetensors",
        pack=False,
        resident_below=0,
    )
    storages = program.payload.storages
    assert any(extent.file_offset % 16 for storage in storages for extent in storage.extents)
    assert not any(storage.phase for storage in storages)
    assert "mapped" not in program.arenas()
    with program.load(program.floor_bytes) as module, torch.no_grad():
        for rows in (2, 4, 33):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(module(x), real(x))
