"""The pieces of an offloaded module: compiled apart, planned together, streamed through one arena.

A lowering turns a piece into code with probes. `lower_by_inductor` is that of the backend "penstock";
`penstock.backends.beside` has another, which leaves regions to another library's compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import fx

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.lowering.emitted import observe_python
from penstock.passes.lowering.inductor import mark_small, observed, own_passes, raise_own
from penstock.passes.lowering.post_grad import ProbePass
from penstock.passes.probes import CompiledCalls
from penstock.passes.weights.lifted import Weights
from penstock.runtime.choice import PlanRequest, decide
from penstock.runtime.dynamo.offload import Home, Offloaded, home_of
from penstock.runtime.loading import LoadOptions, load_on_accelerator, load_weights
from penstock.runtime.stream.interface import Stats
from penstock.runtime.stream.passes import Gate, LoadedWeights
from penstock.runtime.stream.probe_calls import probe_calls
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import Method, Step, Trace, Work
from penstock.schedule.payload.codec import Payload, ProbeOrder
from penstock.schedule.plan import Plan


@dataclass(frozen=True)
class Piece:
    """A graph of Dynamo's that becomes method number `number`; `homes` are its inputs', by position."""

    number: int
    graph_module: fx.GraphModule
    inputs: list[Any]
    homes: Mapping[int, Home]
    weights: Weights


Lowering = Callable[[Piece], tuple[Callable[..., Any], Trace, ProbeOrder]]
"""Returns the code of a piece, with probes, the order in which it reads weights, and that of its calls."""


class Session:
    """The pieces of one offloaded module, and the memory that their weights stream through."""

    def __init__(self, record: Offloaded, budget: int, resident_below: int) -> None:
        self.budget, self.resident_below = budget, resident_below
        self._record = record
        self._payload = Payload(
            lowering="inductor",
            torch=torch.__version__.split("+", maxsplit=1)[0],
            files=record.files,
            storages=mark_small(record.storages, resident_below),
            weights=record.weights,
            methods=(),
            traces=(),
        )
        self._weights = Weights({weight.fqn: weight for weight in record.weights}, self._payload.storages)
        self._passes = 0  # of any piece, since they were loaded
        self._gate = Gate("an offloaded module", "load and compile the module")
        self._loaded: LoadedWeights | None = None
        self._calls: dict[int, CompiledCalls] = {}
        self.plan: Plan | None = None

    @property
    def stats(self) -> Stats | None:
        """Counters of streaming since the last piece was compiled; None before the first call after that."""
        return self._loaded.stats(self._passes) if self._loaded else None

    def compile(
        self, graph_module: fx.GraphModule, inputs: list[Any], homes: Mapping[int, Home], lower: Lowering
    ) -> Callable[..., Any]:
        """Lower a piece and add it to the others; the next call of a piece makes a plan for all of them."""
        with self._gate.changing():
            number = len(self._payload.methods)
            run, trace, order = lower(Piece(number, graph_module, inputs, homes, self._weights))
            fqns = {i: home.fqn for i, home in homes.items()}
            self._add(trace, order)
        return _CompiledPiece(self, trace, order, run, fqns)

    def variant(
        self, trace: Trace, order: ProbeOrder, fqns: Mapping[int, str], now: Mapping[int, str]
    ) -> int:
        """Returns the number of a piece run over other weights than those it was compiled for.

        Equal layers share code. Raises StreamError where their storages do not correspond.
        """
        storages: dict[int, int] = {}
        for i, fqn in fqns.items():
            before, after = self._storage(fqn), self._storage(now[i])
            kinds = [self._payload.storages[s].kind for s in (before, after)]
            if storages.setdefault(before, after) != after or kinds[0] != kinds[1]:
                raise StreamError(
                    f"a graph compiled for weight {fqn} is called with {now[i]}, which is tied to others "
                    "than it: compile the layers apart (torch.compile each of them)"
                )
        with self._gate.changing():
            number = len(self._payload.methods)
            steps = tuple(
                replace(step, reads=tuple(sorted({storages[s] for s in step.reads}))) for step in trace.steps
            )
            self._add(
                replace(trace, method=f"piece_{number}", graph=number, steps=steps),
                replace(order, graph=number),
            )
        return number

    def run(self, number: int, run: Callable[..., Any], inputs: list[Any], fqns: Mapping[int, str]) -> Any:
        """Run a piece over the weights in the arena."""
        with self._gate.call():
            loaded = self._loaded or self._load()
            for i, fqn in fqns.items():
                inputs[i] = loaded.tensors[fqn]
            calls = self._calls[number]
            output = loaded.run(number, calls, lambda: calls.enclose(lambda: run(*inputs)))
            self._passes += 1
            return output

    def home(self, value: Any) -> str:
        """Returns the FQN of a weight that a piece is called with.

        Raises StreamError for a weight of another module.
        """
        home = home_of(value)
        if home is None or home.offloaded is not self._record:
            raise StreamError("a graph is called with a parameter that was not offloaded with its module")
        return home.fqn

    def _storage(self, fqn: str) -> int:
        return self._weights.storage_of(fqn)

    def _add(self, trace: Trace, order: ProbeOrder) -> None:
        self.close()
        payload = self._payload
        self._payload = replace(
            payload,
            methods=(*payload.methods, Method(trace.method, trace.graph, ())),
            traces=(*payload.traces, trace),
            probes=(*payload.probes, order),
        )

    def _load(self) -> LoadedWeights:
        device = self._record.device
        self.plan = decide(Path(), self._payload, PlanRequest(self.budget, device=device))
        if device == "cpu":
            loaded = load_weights(Path(), self._payload, self.plan, LoadOptions())
        else:
            loaded = load_on_accelerator(Path(), self._payload, self.plan, device)
        loaded.wait()
        for order in self._payload.probes:
            probed = loaded.probed(order.graph)
            self._calls[order.graph] = probe_calls(order, probed, loaded.streamer)
        self._loaded, self._passes = loaded, 0
        return loaded

    def close(self) -> None:
        """Give everything back; the next call takes it again. StreamError while a call runs."""
        with self._gate.closing():
            if self._loaded is not None:
                self._loaded.close()
            self._loaded = None


class _CompiledPiece:
    """A compiled piece, called with Dynamo's inputs.

    Dynamo guards the shapes of parameters and not their identities, so one piece serves all equal
    layers: each choice of weights that it is called with is a method of its own.
    """

    def __init__(
        self,
        session: Session,
        trace: Trace,
        order: ProbeOrder,
        run: Callable[..., Any],
        fqns: Mapping[int, str],
    ) -> None:
        self._session, self._trace, self._order, self._run, self._fqns = session, trace, order, run, fqns
        self._numbers = {tuple(fqns.values()): trace.graph}

    def __call__(self, *inputs: Any) -> Any:
        now = {i: self._session.home(inputs[i]) for i in self._fqns}
        chosen = tuple(now.values())
        if chosen not in self._numbers:
            number = self._session.variant(self._trace, self._order, self._fqns, now)
            self._numbers[chosen] = number
        return self._session.run(self._numbers[chosen], self._run, list(inputs), now)


def lower_by_inductor(
    piece: Piece, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Trace, ProbeOrder]:
    """Compiles a piece by Inductor with `options`, and observes the order of reads in the code it emits."""
    names = placeholder_names(piece.homes, piece.weights)
    probes = ProbePass(piece.number, piece.weights, names, own_passes(options), inputs=len(piece.inputs))
    code: list[str] = []
    patches = {**options, "post_grad_custom_post_pass": probes, "force_disable_caches": True}
    run = run_inductor(piece.graph_module, piece.inputs, patches, code)
    return run, *_observe(piece, probes, code)


def _observe(piece: Piece, probes: ProbePass, code: Sequence[str]) -> tuple[Trace, ProbeOrder]:
    written = [text for text in code if "def call(self, args)" in text]
    if probes.placed is None or not written:
        refuse_other_inputs()
    homes, weights = piece.homes, piece.weights
    storages = {n: weights.storage_of(homes[i].fqn) for i, n in probes.input_names.items() if i in homes}
    streamed = {n: s for n, s in storages.items() if weights.storages[s].kind == "streamable"}
    observation = observe_python(written[-1], streamed, piece.number)
    return observed(untimed(piece.number), observation, probes.placed)


def untimed(number: int, steps: tuple[Step, ...] = (), tail: Work = Work()) -> Trace:  # noqa: B008
    """The trace of piece `number`, in which no time is known."""
    return Trace(f"piece_{number}", number, "", steps, 0, 0, "modelled", tail)


def refuse_other_inputs() -> NoReturn:
    """Raises PassError for a graph whose inputs a compiler was not given as Dynamo gave them."""
    raise PassError(
        "the compiler was given other inputs than Dynamo's (a buffer is written through views, or an input "
        "is a tensor subclass): this graph cannot be streamed"
    )


def placeholder_names(homes: Mapping[int, Home], weights: Weights) -> Callable[[fx.Node], str | None]:
    """Returns the FQN of a weight among a graph's inputs, which stand in Dynamo's order."""

    def fqn(node: fx.Node) -> str | None:
        if node.op != "placeholder":
            return None
        position = placeholders_of(node.graph).index(node)
        if position not in homes:
            return None
        part, value = weights.held[homes[position].fqn].parts[0], node.meta.get("val")
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != part.shape:
            raise PassError(
                f"input {position} of the graph is not weight {homes[position].fqn!r}: the compiler was "
                "given other inputs than Dynamo's, and this graph cannot be streamed"
            )
        return homes[position].fqn

    return fqn


def run_inductor(
    graph_module: fx.GraphModule, inputs: list[Any], patches: dict[str, Any], code: list[str]
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    try:
        with patch.object(GraphLowering, "save_output_code", code.append):
            compiled: Any = compile_fx(graph_module, inputs, config_patches=patches)
            return compiled  # type: ignore[no-any-return]
    except Exception as error:
        raise_own(error)
        raise
