"""The backend "penstock" of torch.compile: Inductor's kernels over weights that stream, piece by piece.

Dynamo hands over a module in as many pieces as its graph breaks leave, and again for new sizes. All pieces of
one offloaded module share one budget, one arena and one streamer, planned anew whenever a piece is added.
Each is a method: whatever order they come in, each begins with what is resident.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from penstock.passes.lowering.emitted import observe_python
from penstock.passes.lowering.inductor import check_options, observed, own_passes, raise_own
from penstock.passes.lowering.post_grad import Placement, ProbePass
from penstock.passes.probes import STREAMER
from penstock.passes.weights import Weights
from penstock.runtime.loading import LoadOptions, StreamedWeights, load_weights
from penstock.runtime.module import Resources, Stats
from penstock.runtime.offload import Home, Offloaded, home_of, with_small
from penstock.runtime.probe_calls import ProbeCalls
from penstock.runtime.program import Program
from penstock.schedule.errors import BudgetError, PassError, StreamError
from penstock.schedule.model import Method, Plan, Trace, Work
from penstock.schedule.payload import Payload, ProbeOrder
from penstock.schedule.sizes import parse_size

_OWN_OPTIONS = ("budget", "resident_below")
_ADVICE = "call penstock.offload(module, checkpoint) first"


def compile_piece(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's: what torch.compile calls for `backend="penstock"`.

    `options` are `budget` (bytes, `8GB`, or `50%` of the parameters), `resident_below` (64KiB), and
    Inductor's own. Raises PassError for parameters that are still in memory, or on the meta device, and
    BudgetError without a budget.
    """
    given = dict(options or {})
    if "budget" not in given:
        raise BudgetError("the backend 'penstock' needs a budget: options={'budget': '8GB'}")
    own = {name: given.pop(name) for name in _OWN_OPTIONS if name in given}
    check_options(given)
    homes = {i: home for i, value in enumerate(example_inputs) if (home := home_of(value))}
    _check_inputs(example_inputs, homes)
    if not homes:
        return _run_inductor(graph_module, list(example_inputs), given, [])
    records = {id(home.offloaded): home.offloaded for home in homes.values()}
    if len(records) > 1:
        raise PassError(
            "the graph reads parameters of modules offloaded apart: offload the module around them"
        )
    session = _session(next(iter(records.values())), own)
    return session.compile(graph_module, list(example_inputs), homes, given)


def _check_inputs(inputs: Sequence[Any], homes: Mapping[int, Home]) -> None:
    for i, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type == "meta":
            raise PassError(f"input {i} is on the meta device and has no values: {_ADVICE}")
        if torch.is_grad_enabled() and value.requires_grad:
            raise PassError(
                "gradients through streamed weights are not supported: call under torch.no_grad(), and make "
                f"the parameters not require grad ({_ADVICE})"
            )
        if isinstance(value, torch.nn.Parameter) and i not in homes:
            raise PassError(f"a parameter of shape {list(value.shape)} is still in memory: {_ADVICE}")


def _session(record: Offloaded, own: Mapping[str, Any]) -> Session:
    """The session of a record: one, with the budget that it was first compiled for."""
    total = sum(storage.nbytes for storage in record.storages)
    budget = parse_size(own["budget"], total=total)
    below = own.get("resident_below", "64KiB")
    smallest = parse_size(below, name="resident_below") if below else 0
    if not record.sessions:
        record.sessions.append(Session(record, budget, smallest))
    session: Session = record.sessions[0]
    if session.budget != budget:
        raise BudgetError(
            f"the module was compiled for a budget of {session.budget} bytes before, got {budget}: "
            "all of its pieces share one; offload it again for another"
        )
    return session


class Session:
    """The pieces of one offloaded module, and the memory that their weights stream through."""

    def __init__(self, record: Offloaded, budget: int, resident_below: int) -> None:
        self.budget = budget
        self._payload = Payload(
            lowering="inductor",
            torch=torch.__version__.split("+", maxsplit=1)[0],
            files=record.files,
            storages=with_small(record, resident_below),
            weights=record.weights,
            methods=(),
            traces=(),
        )
        self._numbers = {weight.fqn: i for i, weight in enumerate(record.weights)}
        self._lock = threading.Lock()
        self._loaded: StreamedWeights | None = None
        self._calls: dict[int, ProbeCalls] = {}
        self._finalizer: weakref.finalize[..., Session] | None = None
        self.plan: Plan | None = None

    @property
    def stats(self) -> Stats:
        """What was streamed since the last piece was compiled."""
        return (self._loaded or self._load()).read_stats()

    def compile(
        self,
        graph_module: fx.GraphModule,
        inputs: list[Any],
        homes: Mapping[int, Home],
        options: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """Compile a piece and add it to the plan of all, which is made when one is called next."""
        number = len(self._payload.methods)
        names = _placeholder_names(homes)
        weights = Weights(self._payload.weights, self._payload.storages, self._numbers, ())
        probes = ProbePass(number, weights, names, own_passes(options), inputs=len(inputs))
        code: list[str] = []
        run = _run_inductor(graph_module, inputs, {**options, **_patches(probes)}, code)
        placement = probes.placement or Placement((), Work())
        storages = {
            name: self._payload.weights[self._numbers[homes[i].fqn]].parts[0].storage
            for i, name in probes.input_names.items()
            if i in homes
        }
        streamed = {n: s for n, s in storages.items() if self._payload.storages[s].kind == "streamable"}
        observation = observe_python(code[-1], streamed, number)
        expected = {2 * p + end for p in range(len(placement.steps)) for end in (0, 1)}
        if set(observation.calls) != expected:
            raise PassError("the compiler, or its cache, dropped probes: clear the cache and try again")
        untimed = Trace(f"piece_{number}", number, "", (), 0, 0, "modelled")
        trace, order = observed(untimed, observation, placement)
        self._add(trace, order)
        return _Piece(self, number, run, {i: home.fqn for i, home in homes.items()})

    def run(self, number: int, run: Callable[..., Any], inputs: list[Any], fqns: Mapping[int, str]) -> Any:
        """Run a piece over the weights in the arena."""
        if not self._lock.acquire(blocking=False):
            raise StreamError("another thread is running this module: compile it once per thread")
        try:
            loaded = self._loaded or self._load()
            for i, fqn in fqns.items():
                inputs[i] = loaded.tensors[fqn]
            calls = self._calls[number]
            token = STREAMER.set(calls)
            try:
                return self._stream(loaded, number, lambda: calls.enclose(lambda: run(*inputs)))
            finally:
                STREAMER.reset(token)
        finally:
            self._lock.release()

    def _stream(self, loaded: StreamedWeights, number: int, run: Callable[[], Any]) -> Any:
        streamer = loaded.streamer
        if streamer is None:
            return run()
        try:
            streamer.begin(number)
            output = run()
            streamer.end(number)
        except BaseException:
            streamer.abort()
            raise
        return output

    def _add(self, trace: Trace, order: ProbeOrder) -> None:
        payload = self._payload
        self._payload = replace(
            payload,
            methods=(*payload.methods, Method(trace.method, trace.graph, ())),
            traces=(*payload.traces, trace),
            probes=(*payload.probes, order),
        )
        self.close()

    def _load(self) -> StreamedWeights:
        program = Program(Path(), self._payload)
        self.plan = program.plan(self.budget)
        loaded = load_weights(Path(), self._payload, self.plan, LoadOptions())
        resources = Resources(loaded.streamer, loaded.closers, os.getpid())
        self._finalizer = weakref.finalize(self, resources.close)
        for order in self._payload.probes:
            probed = loaded.streamer.methods[order.graph].probed if loaded.streamer else ()
            self._calls[order.graph] = ProbeCalls(order, probed, loaded.streamer)
        self._loaded = loaded
        return loaded

    def close(self) -> None:
        """Give everything back; the next call takes it again. StreamError while a call runs."""
        if not self._lock.acquire(blocking=False):
            raise StreamError("the module cannot be closed while a call runs in it: wait for that call")
        try:
            if self._finalizer is not None:
                self._finalizer()
            self._loaded, self._finalizer = None, None
        finally:
            self._lock.release()


class _Piece:
    """A compiled piece, called with Dynamo's inputs."""

    def __init__(
        self, session: Session, number: int, run: Callable[..., Any], fqns: Mapping[int, str]
    ) -> None:
        self._session, self._number, self._run, self._fqns = session, number, run, fqns

    def __call__(self, *inputs: Any) -> Any:
        return self._session.run(self._number, self._run, list(inputs), self._fqns)


def _placeholder_names(homes: Mapping[int, Home]) -> Callable[[fx.Node], str | None]:
    """The FQN of a weight among a graph's inputs, which stand in Dynamo's order."""

    def fqn(node: fx.Node) -> str | None:
        if node.op != "placeholder":
            return None
        position = [n for n in node.graph.nodes if n.op == "placeholder"].index(node)
        return homes[position].fqn if position in homes else None

    return fqn


def _patches(probes: ProbePass) -> dict[str, Any]:
    return {"post_grad_custom_post_pass": probes, "force_disable_caches": True}


def _run_inductor(
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
