"""The weights of a payload under a budget, and the programs of any compiler that run over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes.calls.tracers import outside_dynamo, refuse_tracers
from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, size_hint, use_aten_operators
from penstock.passes.graph.propagation import storages_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.probes import ACQUIRE, RELEASE, CompiledCalls
from penstock.passes.weights.lifted import tensor_in, weights_among
from penstock.passes.weights.usage import is_view
from penstock.runtime.loading import load_weights
from penstock.runtime.module import without_grad
from penstock.runtime.options import LoadOptions, LoadRequest
from penstock.runtime.planning import PlanRequest, find_plan
from penstock.runtime.stream.engine import Stats
from penstock.runtime.stream.loaded import Gate, probe_calls
from penstock.schedule.facts.errors import PassError, PayloadError, StreamError
from penstock.schedule.facts.model import Input, Method, Trace, Weight
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.payload.codec import Payload, ProbeOrder

_UNKNOWN = object()
"""The value of a node that cannot be run on fake tensors, because it calls compiled code or needs data."""


def check_probes(
    graph_module: fx.GraphModule, payload: Payload, trace: Trace, weights: Mapping[str, Weight]
) -> None:
    """Raise PayloadError unless the graph's probes are the trace's; `weights` go by names of inputs."""
    probed = {
        int(node.args[2]): {weights[operand.name].parts[0].storage for operand in node.args[0]}
        for node in graph_module.graph.nodes
        if node.target is ACQUIRE
    }
    names = payload.storage_names()
    for k, step in enumerate(trace.steps):
        if not probed.get(k, set()).issuperset(step.reads):
            raise PayloadError(
                f"step {k} of method {trace.method!r} reads {', '.join(names[s] for s in step.reads)}, and "
                f"the graph holds {', '.join(names[s] for s in probed.get(k, ())) or 'nothing'} there: lower "
                "the graph, and load the payload that was written after that"
            )


def check_reads(
    graph_module: fx.GraphModule, payload: Payload, trace: Trace, weights: Mapping[str, Weight]
) -> None:
    """Raises PayloadError for a node that reads a streamed weight, or a view of it, outside of its probes.

    Compiled code counts as reading all weights and views that it is given. What it returns is not followed.
    """
    method = next(known for known in payload.methods if known.name == trace.method)
    followed, aliases = _followed(graph_module, payload, method, weights)
    streamed = {
        s for s, storage in enumerate(payload.storages) if storage.kind == "streamable" and storage.nbytes
    }
    there: dict[int, set[int]] = {}
    for node in followed.graph.nodes:
        if node.target in (ACQUIRE, RELEASE):
            step = int(node.args[2])
            read = step < len(trace.steps) and node.target is ACQUIRE
            there[step] = set(trace.steps[step].reads) if read else set()
        elif node.op == "output" or not is_view(node):
            values = [operand.meta["val"] for operand in node.all_input_nodes]
            reads = {aliases[name] for name in storages_of(values) if name in aliases} & streamed
            late = reads.difference(*there.values())
            if late:
                raise PayloadError(
                    f"node {node.name!r} of method {trace.method!r} reads the weight "
                    f"{payload.storage_names()[min(late)]!r} outside of its acquire and release, where the "
                    "weight may have left: a pass has added or moved it, so lower the graph again, and load "
                    "the payload that was written after that"
                )


@kept_torch_state()
def _followed(
    graph_module: fx.GraphModule, payload: Payload, method: Method, weights: Mapping[str, Weight]
) -> tuple[fx.GraphModule, dict[int, int]]:
    """Returns a copy of the graph that was run on fake values, and the storages of weights by fake ones."""
    copied = copy_graph_module(graph_module)
    use_aten_operators(copied)
    described = iter(method.inputs)
    bases: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs: list[Any] = []
        for node in placeholders_of(copied.graph):
            if weight := weights.get(node.name):
                s = weight.parts[0].storage
                if s not in bases:
                    nbytes = payload.storages[s].nbytes
                    bases[s] = torch.empty(nbytes, dtype=torch.uint8, device=weight.device)
                inputs.append(tensor_in(bases[s], weight.parts[0]))
            else:
                inputs.append(_example(node.meta.get("val"), next(described, None), method))
        _Following(copied).run(*inputs)
    return copied, {storages_of(base)[0]: s for s, base in bases.items()}


class _Following(fx.Interpreter):
    """Notes the value of each node in its `meta["val"]`; those that cannot be known are `_UNKNOWN`."""

    def run_node(self, n: fx.Node) -> Any:
        computable = not any(self.env[operand] is _UNKNOWN for operand in n.all_input_nodes)
        if n.op == "call_module":
            computable = computable and isinstance(self.module.get_submodule(str(n.target)), fx.GraphModule)
        n.meta["val"] = _UNKNOWN
        if n.op == "output":
            return None
        if computable and n.target not in (ACQUIRE, RELEASE):
            try:
                n.meta["val"] = super().run_node(n)
            except Exception:  # what an operator raises on values that it has to see is up to the operator
                return _UNKNOWN
        return n.meta["val"]


def _example(recorded: object, described: Input | None, method: Method) -> object:
    """A fake value of the sizes that an input was exported with, as its node or the payload has them."""
    if isinstance(recorded, torch.Tensor):
        shape = [size_hint(size) for size in recorded.shape]
        return torch.empty(shape, dtype=recorded.dtype, device=recorded.device)
    if isinstance(recorded, torch.SymInt):
        return size_hint(recorded)
    if isinstance(recorded, int | float | str):
        return recorded
    dtype = getattr(torch, described.dtype, None) if described else None
    if recorded is not None or described is None or not isinstance(dtype, torch.dtype):
        return _UNKNOWN
    examples = {symbol.name: symbol.example for symbol in method.symbols}
    shape = [size if isinstance(size, int) else examples[size] for size in described.shape]
    return torch.empty(shape, dtype=dtype, device=described.device)


_Result = TypeVar("_Result")

Reading = Callable[[int], AbstractContextManager[None]]
"""Holds the weights of a step in place: `with reading(step): ...`."""


def payload_key(data: bytes) -> str:
    """The name under which a container keeps a payload: it is that of these bytes and of no others."""
    return f"penstock-{sha256(data).hexdigest()}"


def load_payload(
    payload: tuple[str, bytes],
    budget: int | str,
    folder: Path,
    *,
    keep: tuple[str, ...] = (),
    options: LoadOptions | None = None,
) -> LoadedPayload:
    """Do what `FxBackend.load` does; `folder` has the weight files."""
    key, data = payload
    if payload_key(data) != key:
        raise PayloadError(
            f"the container names the payload {key} and got {payload_key(data)}: this payload is of another "
            "model, or damaged; load the one that was written with this program"
        )
    return LoadedPayload(Payload.from_bytes(data, source=key), budget, folder, keep=keep, options=options)


class LoadedPayload:
    """Weights that stream within a budget, for a program that a compiler made. A `with` statement closes it.

    One pass runs at a time.

    Attributes:
        payload: The facts of the program.
        plan: The plan that it runs.

    Example:
        >>> import pathlib, tempfile
        >>> backend = penstock.backends.fx.FxBackend(pathlib.Path(tempfile.mkdtemp()))
        >>> graph = backend.lower(backend.annotate(exported)["forward"])
        >>> with backend.load(backend.payload(), "50%") as weights:
        ...     output = weights.bind(graph)(x)
        >>> weights.stats.passes, weights.plan.budget
        (1, 33280)
    """

    def __init__(
        self,
        payload: Payload,
        budget: int | str,
        folder: Path,
        *,
        keep: tuple[str, ...],
        options: LoadOptions | None,
    ) -> None:
        self.payload, run = payload, LoadRequest.of(options)
        nbytes = parse_size(budget, total=sum(storage.nbytes for storage in payload.storages))
        request = PlanRequest(nbytes, keep=keep, arena=run.arena, ways=("whole",))
        self.plan = find_plan(folder, payload, request)
        self._weights = load_weights(folder, payload, self.plan, run)
        self._gate = Gate("a loaded payload", "load the payload")
        self._passes = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the weights by FQN, at addresses that never change.

        Read a view while a step that reads it is held, or at any time if the plan never moves it.
        """
        return self._weights.tensors

    @property
    def stats(self) -> Stats:
        """Bytes moved, stalls, misses and peaks since the payload was loaded."""
        return self._weights.stats(self._passes)

    def bind(self, graph_module: fx.GraphModule, method: str = "forward") -> Callable[..., Any]:
        """Return a function that runs a lowered graph on the inputs of its method, over these weights.

        Args:
            graph_module: A graph that `FxBackend.lower` returned.
            method: The name of its method.

        Returns:
            A function that returns what the graph returns. It raises StreamError for another number of
            inputs, and for one that requires grad while grad mode is on.

        Raises:
            PayloadError: Graph and payload do not belong together, or the graph reads a weight outside of its
                probes.
        """
        trace = trace_of(self.payload, method)
        weights = weights_among(graph_module, self.payload, method)
        check_probes(graph_module, self.payload, trace, weights)
        check_reads(graph_module, self.payload, trace, weights)
        nodes = placeholders_of(graph_module.graph)
        views = [self._view(node, weights[node.name]) if node.name in weights else None for node in nodes]
        names = [node.name for node in nodes if node.name not in weights]

        @outside_dynamo
        def call(*inputs: Any) -> Any:
            if len(inputs) != len(names):
                raise StreamError(
                    f"method {method!r} takes {len(names)} inputs ({', '.join(names) or 'none'}), got "
                    f"{len(inputs)}: give it a value for each, and leave weights to the payload"
                )
            refuse_tracers(inputs)
            if torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in inputs):
                raise StreamError(
                    "an input requires grad and grad mode is on: gradients through streamed weights are not "
                    "supported, so call under torch.no_grad() or detach the input"
                )
            remaining = iter(inputs)
            values = [next(remaining) if view is None else view for view in views]
            with without_grad():
                return self._pass(trace, lambda probes: graph_module.forward(*values))

        return call

    @outside_dynamo
    def stream(self, run: Callable[[Reading], _Result], method: str = "forward") -> _Result:
        """Run one pass of a program that is no graph.

            weights.stream(lambda reading: [session_of_step(k, reading) for k in steps])

        Steps in the order of the trace were prefetched. A step out of that order is loaded on demand and
        counts as a miss: slower, and never wrong. One step is held at a time, and a step that fails ends the
        pass.

        Args:
            run: A function of `reading`, which computes step k within `with reading(k):`.
            method: The name of the method.

        Returns:
            What `run` returns.

        Raises:
            StreamError: Another step is held, or there is no step of that number.
        """
        trace = trace_of(self.payload, method)

        def with_steps(probes: CompiledCalls) -> _Result:
            open_steps: list[int] = []

            @contextmanager
            def reading(step: int) -> Iterator[None]:
                if open_steps:
                    raise StreamError(
                        f"step {open_steps[0]} of method {method!r} is held, or failed, and step {step} "
                        "would take its memory: read one step after another, and end the pass when one fails"
                    )
                if not 0 <= step < len(trace.steps):
                    raise StreamError(
                        f"method {method!r} has {len(trace.steps)} steps and none with number {step}"
                    )
                open_steps.append(step)
                probes.acquire(trace.graph, step)
                yield
                probes.release(trace.graph, step)
                open_steps.clear()

            return run(reading)

        return self._pass(trace, with_steps)

    def _view(self, node: fx.Node, weight: Weight) -> torch.Tensor:
        """The weight of a graph's input, which requires grad as it did when the graph was exported."""
        view, value = self.tensors[weight.fqn], node.meta.get("val")
        return view.detach().requires_grad_() if getattr(value, "requires_grad", False) else view

    def close(self) -> None:
        """Stop the readers and give all memory back."""
        with self._gate.closing():
            self._weights.close()

    def __enter__(self) -> LoadedPayload:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _pass(self, trace: Trace, run: Callable[[CompiledCalls], _Result]) -> _Result:
        if self._weights.resources.closed:
            raise StreamError("the payload is closed: load it again")
        with self._gate.call():
            self._weights.wait()
            steps = range(len(trace.steps))
            order = ProbeOrder(trace.graph, tuple(2 * k for k in steps), tuple(2 * k + 1 for k in steps))
            probes = probe_calls(order, self._weights.probed(trace.graph), self._weights.streamer)
            result: _Result = self._weights.run(trace.graph, probes, lambda: run(probes))
            self._passes += 1
            return result


def trace_of(payload: Payload, method: str) -> Trace:
    """The trace of a method. Raises PassError for a method that the payload does not have."""
    for trace in payload.traces:
        if trace.method == method:
            return trace
    raise PassError(f"there is no method {method!r}: the payload has {[t.method for t in payload.traces]}")
