"""The zip with an artifact's programs, and what a stored graph does with weights, found before it runs."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.passes.activations import Activations
from penstock.passes.annotate import Annotated, Training, readers_by_units
from penstock.passes.building.refusals import sentence
from penstock.passes.calls.inputs import ConstantLeaf, Dimension, Leaf, TensorLeaf
from penstock.passes.calls.ranks import Ranks, is_collective
from penstock.passes.calls.stored_graph import operator_of, operators_in
from penstock.passes.calls.stored_program import load_stored, with_types
from penstock.passes.graph.dry_run import dry_run, is_dense
from penstock.passes.graph.nodes import indexed, move_graph, nested_modules, subgraphs_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.lowering.method_code import MethodCode, decode_method, encode_method, method_code
from penstock.passes.probes import STORE
from penstock.passes.weights.lifted import tensor_in, with_values
from penstock.passes.weights.usage import Flow, follow
from penstock.schedule.bounded_file import open_bounded, open_zip, read_member
from penstock.schedule.facts.errors import TRUST, PassError, PayloadError, PenstockError, SourceError
from penstock.schedule.facts.model import IN_ARENA, Method
from penstock.schedule.payload.codec import Payload

OTHERS = "payload and program are not of one compilation, compile again"


def check_uses(payload: Payload, method: Method, code: MethodCode) -> None:
    """Raises PayloadError unless a method's graph reads each weight in the steps of its trace that say so.

    Weights that it writes are mutable, and those that a result shares memory with never stream. Raises it
    also for a node that cannot run at the sizes that the program was exported for. All this is found on fake
    tensors, for which no memory is taken.
    """
    try:
        flow, graph, numbers = _followed(payload, code)
    except Exception as error:  # of torch, for a graph that is none
        raise PayloadError(
            f"method {method.name!r} cannot be followed without running it: {sentence(error)}; "
            f"compile again, or {TRUST}"
        ) from error
    stores = _checked_stores(payload, method, graph, numbers)
    sized = {s: storage.kind for s, storage in enumerate(payload.storages) if storage.nbytes}
    streams = {s for s, kind in sized.items() if kind in IN_ARENA}
    _check_units(payload, method, graph, numbers)
    unwritten = set().union(*stores.values())
    brought: dict[str, set[int]] = {}
    for step in payload.trace_for(method.graph).steps:
        brought.setdefault(step.name, set()).update(step.reads, step.writes)
    for node, storages in flow.reads.items():  # in the order in which they run
        unwritten -= stores.get(node, set())
        for s in unwritten.intersection(storages):
            _refuse(payload, method, s, f"is read by {node}, before it is written")
        for s in streams.intersection(storages) - brought.get(node, set()):
            _refuse(payload, method, s, f"is read by {node}, and no step of that name in its trace says so")
    for s in flow.written:
        if sized.get(s, "mutable") not in ("mutable", "produced"):
            _refuse(payload, method, s, "is written, and is no mutable weight")
    for s in streams & flow.escaping:
        _refuse(payload, method, s, "is in memory that a result shares, and streams")


def _check_units(payload: Payload, method: Method, graph: fx.Graph, numbers: dict[int, int]) -> None:
    """Raises PayloadError unless nodes that read by units, by the trace, need no more of the weight."""
    readers, reason = readers_by_units(graph), "is read by units by {}, which needs all of it"
    for step in payload.trace_for(method.graph).steps:
        for read in step.sparse:
            if numbers.get(readers.get(step.name, 0)) != read.storage:
                _refuse(payload, method, read.storage, reason.format(step.name))


def _checked_stores(
    payload: Payload, method: Method, graph: fx.Graph, numbers: dict[int, int]
) -> dict[str, set[int]]:
    """The storages that steps of a method write, by node. `numbers` has them by those of fake tensors.

    Raises PayloadError unless each is a node that fills all of its storage. Only nodes of a method itself are
    steps, so that no body may store.
    """
    filled: dict[str, set[int]] = {}
    for node in (node for node in graph.nodes if node.target is STORE):
        slot, value = (operand.meta["val"] for operand in node.args[:2])
        (place,) = storages_of(slot)
        s, nbytes = numbers.get(place), slot.numel() * slot.itemsize
        if s is not None and place not in storages_of(value) and is_dense(slot):
            filled[node.name] = {s} if nbytes == payload.storages[s].nbytes else set()
    stores = {step.name: set(step.writes) for step in payload.trace_for(method.graph).steps if step.writes}
    for name, storages in stores.items():
        for s in storages - filled.get(name, set()):
            _refuse(payload, method, s, f"is written by the step {name}, which is no node that fills it")
    bodies = [
        body for node in graph.nodes for holder in subgraphs_of(node) for body in nested_modules(holder)
    ]
    if any(node.target is STORE for body in bodies for node in body.graph.nodes):
        raise PayloadError(f"a body in method {method.name!r} stores a value, which no step says: {OTHERS}")
    return stores


def _refuse(payload: Payload, method: Method, storage: int, reason: str) -> NoReturn:
    name = payload.storage_names()[storage]
    raise PayloadError(f"weight {name!r} of method {method.name!r} {reason}: {OTHERS}")


def _followed(payload: Payload, code: MethodCode) -> tuple[Flow, fx.Graph, dict[int, int]]:
    """Run a method's graph on fake CPU tensors; return flow, graph, and the payload's storages by fakes."""
    graph, device = code.graph(), code.signature.device
    bodies = [module for body in graph.bodies.values() for module in nested_modules(body)]
    move_graph(graph.graph, bodies, device, "cpu")
    owner: Any = nn.Module()  # no GraphModule, which would write the graph as Python
    for name, body in graph.bodies.items():
        setattr(owner, name, body)
    graph.graph.owning_module = owner
    weights = {weight.fqn: weight for weight in payload.tensors}
    stored = [weights[fqn] for _, fqn in code.weights]
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(shape_env=ShapeEnv()):
        bases: dict[int, torch.Tensor] = {}
        for weight in stored:
            s = weight.parts[0].storage
            where = "cpu" if indexed(torch.device(weight.device)) == indexed(device) else weight.device
            if s not in bases:
                bases[s] = torch.empty(payload.storages[s].nbytes, dtype=torch.uint8, device=where)
        inputs: list[object] = [
            tensor_in(bases[weight.parts[0].storage], weight.parts[0]) for weight in stored
        ]
        inputs += [
            _example(leaf, device, code.strides.get(k)) for k, leaf in enumerate(code.signature.leaves)
        ]
        numbers = {storages_of(base)[0]: s for s, base in bases.items()}
        dry_run(graph.graph, inputs, frozenset(numbers))
        return follow(graph.graph, numbers, _run_body), graph.graph, numbers


def _run_body(body: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule:
    dry_run(body.graph, inputs, frozenset(s for value in inputs for s in storages_of(value)))
    return body


def _example(leaf: Leaf, device: torch.device, stride: tuple[int, ...] | None) -> object:
    """A leaf as it was when the program was exported, without values."""
    if isinstance(leaf, ConstantLeaf):
        return leaf.value
    if isinstance(leaf, TensorLeaf):
        sizes = [size.example if isinstance(size, Dimension) else size for size in leaf.sizes]
        where = "cpu" if leaf.device == device.type else leaf.device
        if stride is not None:
            return torch.empty_strided(sizes, stride, dtype=leaf.dtype, device=where)
        return torch.empty(sizes, dtype=leaf.dtype, device=where)
    return leaf.type(1) if leaf.dimension is None else leaf.dimension.example


PROGRAM, PACKAGE, TRAINING, RANKS = "program.zip", "compiled.pt2", "training.json", "ranks.json"


def write_programs(archive: zipfile.ZipFile, annotated: Annotated) -> None:
    """Adds a file for each method: `METHOD.json`, or `METHOD.pt2` if the method has no form in JSON.

    Neither has weights. Raises PassError for a program that has no form in JSON and that torch cannot save.
    """
    for name, code in encoded_methods(annotated).items():
        if isinstance(code, bytes):
            archive.writestr(f"{name}.json", code)
        else:
            archive.writestr(f"{name}.pt2", _saved(code, name))
    if annotated.training is not None:
        archive.writestr(TRAINING, annotated.training.to_bytes())
    if (ranks := Ranks.of(_graphs(annotated))) is not None:
        archive.writestr(RANKS, ranks.to_bytes())


def _graphs(annotated: Annotated) -> Iterator[fx.Graph]:
    """The graphs of all methods that may have collectives, and those of the bodies in them."""
    modules = [exported.graph_module for exported in annotated.programs.values()]
    for code in annotated.codes.values():
        names = operators_in(json.loads(code)["graph"])
        if any(is_collective(operator_of(name, trust=True)) for name in names):
            graph = decode_method(code, trust=True).graph()
            yield graph.graph
            modules += graph.bodies.values()
    for module in modules:
        yield from (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))


def encoded_methods(annotated: Annotated) -> dict[str, bytes | ExportedProgram]:
    """The code of each method as JSON, or its exported program if it has no form in JSON."""
    codes: dict[str, bytes | ExportedProgram] = dict(annotated.codes)
    for name, exported in annotated.programs.items():
        values_kept = annotated.training.made(name) if annotated.training else ()
        activations = Activations.of(exported, annotated.propagated[name], values_kept)
        codes[name] = encode_method(exported, activations) or exported
    return codes


def _saved(exported: ExportedProgram, name: str) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.export.save(strip_weights(exported), buffer)
    except Exception as error:
        raise PassError(
            f"method {name!r} cannot be saved ({type(error).__name__}: {sentence(error)}): "
            "torch.export.save must accept the program"
        ) from error
    return buffer.getvalue()


def strip_weights(exported: ExportedProgram) -> ExportedProgram:
    """Returns a copy of the program whose weights are on the meta device and hold no bytes.

    The weights are not fake, because `torch.export.save` silently turns fake weights into zeros. Ties
    are lost here; the payload keeps them.
    """
    stripped = with_values(exported, _emptied)
    stripped._example_inputs = None
    return stripped


@contextmanager
def open_programs(folder: Path, payload: Payload) -> Iterator[zipfile.ZipFile]:
    """Yields the artifact's zip, which is closed at the end.

    Raises SourceError if the zip cannot be read, and PayloadError if a program in it cannot be loaded.
    """
    path = folder / (payload.program.path if payload.program else PROGRAM)
    try:
        with open_bounded(path, "a lowered program") as file, open_zip(file, path) as archive:
            yield archive
    except OSError as error:
        raise SourceError(f"the lowered program {path} cannot be read: {error.strerror or error}") from error
    except PenstockError as error:
        raise PayloadError(f"the lowered program {path} cannot be loaded: {error}") from error
    except Exception as error:
        raise PayloadError(
            f"the lowered program {path} cannot be loaded ({type(error).__name__}: {sentence(error)}): "
            "import the library that registers its operators and types first, or compile it again"
        ) from error


def check_ranks(folder: Path, payload: Payload) -> None:
    """Raises PayloadError for a program with collectives that another rank has compiled."""
    with open_programs(folder, payload) as archive:
        ranks = (
            Ranks.from_bytes(read_member(archive, RANKS, "a configuration"))
            if RANKS in archive.namelist()
            else None
        )
    if ranks is not None:
        ranks.check_here(str(folder))


def read_code(archive: zipfile.ZipFile, method: str, *, trust: bool) -> MethodCode:
    """Returns the code of a method.

    Without `trust` it is data: operators that may run for anybody, and no module is imported that it names.
    Raises PassError for a method that was stored as an exported program, whose reading runs code, or that
    calls other operators.
    """
    stored = f"{method}.json"
    if stored in archive.namelist():
        data = read_member(archive, stored, "a method's code")
        return with_types(lambda: decode_method(data, trust=trust), trust=trust)
    if not trust:
        raise PassError(
            f"method {method!r} has no form as data, and torch.export.load, which reads it, may run code: "
            f"{TRUST}"
        )
    training = read_training(archive)
    values_kept = training.made(method) if training else ()
    return method_code(load_stored(read_member(archive, f"{method}.pt2", "a lowered program")), values_kept)


def check_fits(payload: Payload, method: Method, code: MethodCode, *, trust: bool) -> None:
    """Raises PayloadError unless a method's code is for the weights and the steps that the payload has.

    Weights have the dtype, shape and strides that the graph was made for. Without `trust`, the graph is
    followed, and has to use them as the payload says (`check_uses`).
    """
    weights = {weight.fqn: weight.parts[0] for weight in payload.tensors}
    like = code.like or [None] * len(code.weights)
    for (_, fqn), expected in zip(code.weights, like, strict=True):
        part = weights.get(fqn)
        got = part and (part.dtype, part.shape, part.stride)
        if got is None or (expected is not None and got != expected):
            raise PayloadError(
                f"weight {fqn!r} of method {method.name!r} is {got}, expected {expected or 'one'}: {OTHERS}"
            )
    missing = set(code.signature.to_weight.values()) - {
        fqn for fqn, part in weights.items() if payload.storages[part.storage].kind == "mutable"
    }
    if missing:
        raise PayloadError(
            f"method {method.name!r} writes {min(missing)!r}, which is no mutable weight: {OTHERS}"
        )
    if not trust:
        check_uses(payload, method, code)


def read_training(archive: zipfile.ZipFile) -> Training | None:
    """Returns what joins forward and backward, None for a program that is not trained."""
    stored = TRAINING in archive.namelist()
    return Training.from_bytes(read_member(archive, TRAINING, "a payload")) if stored else None


def _emptied(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
