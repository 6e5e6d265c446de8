"""The weights of a payload under a budget, and the programs of any compiler that run over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from penstock.backends.reads import check_probes, check_reads
from penstock.passes.calls.tracers import outside_dynamo, refuse_tracers
from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.probes import CompiledCalls
from penstock.passes.weights.lifted import weights_among
from penstock.runtime.loading import LoadOptions, load_weights
from penstock.runtime.module import without_grad
from penstock.runtime.planning import PlanRequest, find_plan
from penstock.runtime.stream.engine import Stats
from penstock.runtime.stream.loaded import Gate, probe_calls
from penstock.schedule.facts.errors import PassError, PayloadError, StreamError
from penstock.schedule.facts.model import Trace, Weight
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.payload.codec import Payload, ProbeOrder

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
    arena: str | None = None,
) -> LoadedPayload:
    """Plan the payload of a container for `budget` (bytes, `8GB`, `50%`), and start to load its weights.

    `folder` holds the weight files that lie beside the container. Weights whose FQNs match a pattern of
    `keep` never leave memory; `arena` asks for a kind of arena. Raises PayloadError for bytes that are not
    those of the key, BudgetError for a budget below the floor, SourceError for other weight files.
    """
    key, data = payload
    if payload_key(data) != key:
        raise PayloadError(
            f"the container names the payload {key} and got {payload_key(data)}: this payload is of another "
            "model, or damaged; load the one that was written with this program"
        )
    return LoadedPayload(Payload.from_bytes(data, source=key), budget, folder, keep=keep, arena=arena)


class LoadedPayload:
    """Weights that stream within a budget, for programs that a compiler made; a context manager.

    One pass runs at a time. `tensors` are views of the weights by FQN, at addresses that never change. A
    view may be read while a step that reads it is held, or at any time if the plan never moves it.
    """

    def __init__(
        self, payload: Payload, budget: int | str, folder: Path, *, keep: tuple[str, ...], arena: str | None
    ) -> None:
        self.payload = payload
        nbytes = parse_size(budget, total=sum(storage.nbytes for storage in payload.storages))
        self.plan = find_plan(folder, payload, PlanRequest(nbytes, keep=keep, arena=arena, by_units=False))
        self._weights = load_weights(folder, payload, self.plan, LoadOptions())
        self._gate = Gate("a loaded payload", "load the payload")
        self._passes = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._weights.tensors

    @property
    def stats(self) -> Stats:
        """Bytes moved, stalls, misses and peaks so far."""
        return self._weights.stats(self._passes)

    def bind(self, graph_module: fx.GraphModule, method: str = "forward") -> Callable[..., Any]:
        """Returns a function that runs a lowered graph on the inputs of its method, over these weights.

        It returns what the graph returns. Raises PayloadError if graph and payload do not belong together,
        and for a graph that reads a weight outside of the weight's probes; the function raises StreamError
        for more or fewer inputs than the method has.
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
        """Run one pass of a program that is no graph: `run` holds each step while it reads its weights.

            weights.stream(lambda reading: [session_of_step(k, reading) for k in steps])

        Steps in the order of the trace were prefetched. A step out of that order is loaded on demand and
        counts as a miss: slower, and never wrong. One step is held at a time, and a step that fails ends the
        pass. Raises StreamError where another step is held, or none of that number is.
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
