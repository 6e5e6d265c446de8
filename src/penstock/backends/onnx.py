"""ONNX models whose weights stream under onnxruntime, in memory that penstock fills.

A folder holds `model.onnx`, the payload and the weights. The model refers to penstock's weight file as its
external data, so onnxruntime also runs it alone. To stream, it is cut into sessions, each of which is a step,
because a session does not say when it reads what; their initializers are views of the arena.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock._extras import require
from penstock.backends.fx import FxBackend
from penstock.backends.running import LoadedPayload, Reading
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.options import LoadOptions
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import PassError, PayloadError
from penstock.schedule.facts.model import Weight

MODEL, PAYLOAD = "model.onnx", "payload.json"
LARGE = 64 << 10
"""Bytes of a weight that begins a step. Smaller ones are read in the step that is open."""

_KEY = "penstock"  # of the payload's key in the model's metadata
_DTYPES = ("float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")


@kept_torch_state()
def write_onnx(exported: ExportedProgram, folder: Path, *, optimize: bool = False) -> None:
    """Write a program as an ONNX model with penstock's payload and its weights.

    Args:
        exported: A program.
        folder: A folder that exists.
        optimize: As for `torch.onnx.export`; it folds or merges weights of most models.

    Raises:
        PassError: Weights have lost their names or are not as ONNX has tensors, the program writes a buffer,
            or it has control flow.
        MissingExtraError: onnx, onnxruntime or onnxscript is not installed.
    """
    require("onnx", "onnxruntime", "onnxscript", purpose="writing an ONNX model")
    import onnx_ir

    backend = FxBackend(folder)
    backend.annotate(exported)
    _check_weights(backend)
    program: Any = torch.onnx.export(exported, dynamo=True, optimize=optimize, verbose=False)
    nodes, initializers = list(program.model.graph), program.model.graph.initializers
    kinds = (attribute.type for node in nodes for attribute in node.attributes.values())
    if {onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS}.intersection(kinds):
        raise PassError(
            "the model has control flow, whose bodies cannot be cut into sessions: export it without"
        )
    weights = {weight.fqn: weight for weight in backend.facts.tensors}
    large = {name for name, value in initializers.items() if value.const_value.nbytes >= LARGE}
    reads = [[value.name for value in node.inputs if value is not None] for node in nodes]
    backend.observe([weights.keys() & chain(*reads[piece]) for piece in cut(reads, large)])
    key, payload = backend.payload()
    program.model.metadata_props[_KEY] = key
    for name, value in initializers.items():
        if name in weights:
            value.const_value = _external(value, weights[name], backend, folder)
    (folder / PAYLOAD).write_bytes(payload)
    onnx_ir.save(program.model, folder / MODEL)


def _check_weights(backend: FxBackend) -> None:
    for weight in backend.facts.tensors:
        part = weight.parts[0]
        if backend.facts.storages[part.storage].kind == "mutable":
            raise PassError(
                f"the program writes the buffer {weight.fqn!r}, and a session has no state: hand it in as an "
                "input, and out as an output"
            )
        dense = torch.empty(part.shape, device="meta").stride()
        if part.dtype not in _DTYPES or part.stride != dense:
            raise PassError(
                f"weight {weight.fqn!r} is {part.dtype} with strides {list(part.stride)}, which onnxruntime "
                "cannot read where it lies: make it contiguous, in a dtype of numpy's"
            )


def _external(value: Any, weight: Weight, backend: FxBackend, folder: Path) -> Any:
    """The place of a weight in penstock's file, whose tensors are bytes at offsets, as ONNX wants them."""
    import onnx_ir

    part, facts = weight.parts[0], backend.facts
    extents = facts.storages[part.storage].extents
    if not extents:  # without bytes
        return value.const_value
    return onnx_ir.ExternalTensor(
        facts.files[extents[0].file].path,
        extents[0].file_offset + part.offset,
        value.const_value.nbytes,
        value.const_value.dtype,
        shape=value.const_value.shape,
        name=value.name,
        base_dir=str(folder),
    )


def cut(reads: Sequence[Collection[str]], large: Collection[str]) -> list[slice]:
    """Cuts nodes, given by what they read, into pieces: before each that reads a further large weight."""
    begins, there = [0], False
    for k, names in enumerate(reads):
        if not set(large).isdisjoint(names):
            begins += [k] if there else []
            there = True
    return [slice(start, stop) for start, stop in zip(begins, [*begins[1:], len(reads)], strict=True)]


def plain_options() -> Any:
    """Options with which a session reads initializers where they are, and keeps no other form of them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


class StreamedModel:
    """Runs what `write_onnx` wrote. The end of a `with` statement closes it.

        It is called with numpy arrays in the order of the model's inputs, and returns a list of arrays.

    Args:
        folder: The folder that `write_onnx` wrote to.
        budget: Bytes of weights in memory at most: a number, `"8GB"`, or `"50%"` of the weights.
        keep: FQN patterns of weights that never leave memory.
        options: How weights come into memory.

    Raises:
        PayloadError: The payload is of another model.
        BudgetError: The budget is below the floor.
        SourceError: A file is missing or has changed.
        MissingExtraError: onnx or onnxruntime is not installed.
    """

    def __init__(
        self,
        folder: Path,
        budget: int | str,
        *,
        keep: tuple[str, ...] = (),
        options: LoadOptions | None = None,
    ) -> None:
        require("onnx", "onnxruntime", purpose="running an ONNX model")
        import onnx

        with reading(folder):
            stored = read_bounded(folder / MODEL, "an ONNX model without weights")
        try:
            model = onnx.load_model_from_string(stored)
        except Exception as error:  # of protobuf, which penstock does not import
            raise PayloadError(f"{folder / MODEL} is no ONNX model ({error}): get an intact copy") from error
        keys = [prop.value for prop in model.metadata_props if prop.key == _KEY]
        if not keys:
            raise PayloadError(f"{folder / MODEL} names no payload: write it with write_onnx")
        with reading(folder):
            data = read_bounded(folder / PAYLOAD, "a payload")
        self.weights = FxBackend(folder).load((keys[0], data), budget, keep=keep, options=options)
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = [value.name for value in model.graph.output]
        self._views: dict[str, Any] = {}  # which sessions do not keep alive
        try:
            pieces = _pieces(model)
            _check_reads(pieces, self.weights)
            self.sessions = [self._session(piece, folder) for piece in pieces]
        except BaseException:
            self.weights.close()
            raise

    def __call__(self, *inputs: Any) -> list[Any]:
        values = dict(zip(self._inputs, inputs, strict=True))

        def run(reading: Reading) -> list[Any]:
            for step, session in enumerate(self.sessions):
                names = [output.name for output in session.get_outputs()]
                feeds = {feed.name: values[feed.name] for feed in session.get_inputs()}
                with reading(step):
                    values.update(zip(names, session.run(names, feeds), strict=True))
            return [values[name] for name in self._outputs]

        return self.weights.stream(run)

    def close(self) -> None:
        """Give back the sessions, and then the memory that they read."""
        self.sessions.clear()
        self._views.clear()
        self.weights.close()

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _session(self, piece: Any, folder: Path) -> Any:
        import onnxruntime

        options = plain_options()
        # A piece has no path to find the file by, whose bytes the initializers below stand for.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        for name in _streamed(piece):
            if name not in self._views:
                memory = self.weights.tensors[name].detach().numpy()
                self._views[name] = onnxruntime.OrtValue.ortvalue_from_numpy(memory)
            options.add_initializer(name, self._views[name])
        return onnxruntime.InferenceSession(piece.SerializeToString(), options)


def _streamed(model: Any) -> list[str]:
    return [tensor.name for tensor in model.graph.initializer if tensor.external_data]


def _check_reads(pieces: Sequence[Any], weights: LoadedPayload) -> None:
    payload = weights.payload
    storages = {weight.fqn: weight.parts[0].storage for weight in payload.tensors}
    steps = payload.traces[0].steps
    fits = len(pieces) == len(steps)
    for piece, step in zip(pieces, steps, strict=False):
        moving = {
            s for name in _streamed(piece) if payload.storages[s := storages[name]].kind == "streamable"
        }
        fits = fits and moving <= set(step.reads)
    if not fits:
        raise PayloadError(
            f"the model's {len(pieces)} pieces do not read what the payload's {len(steps)} steps hold: write "
            "both together, with write_onnx"
        )


def _pieces(model: Any) -> list[Any]:
    """Returns a model for each step, which takes and gives the values that cross its edges."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    sizes = {name: int(e.value) for name, w in weights.items() for e in w.external_data if e.key == "length"}
    large = {name for name, nbytes in sizes.items() if nbytes >= LARGE}
    nodes = list(graph.node)
    result: list[Any] = []
    for piece in cut([node.input for node in nodes], large):
        outputs = {name for node in nodes[piece] for name in node.output}
        read = dict.fromkeys(name for node in nodes[piece] for name in node.input if name)
        later = {name for node in nodes[piece.stop :] for name in node.input} | {v.name for v in graph.output}
        part = onnx.helper.make_graph(
            nodes[piece],
            f"step_{len(result)}",
            [types[name] for name in read if name not in outputs and name not in weights],
            [types[name] for name in sorted(outputs & later)],
            [weights[name] for name in read if name in weights],
        )
        versions = {"opset_imports": model.opset_import, "ir_version": model.ir_version}
        result.append(onnx.helper.make_model(part, functions=model.functions, **versions))
    return result
