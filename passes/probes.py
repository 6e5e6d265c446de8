"""The operators that mark reads of weights and writes of kept values, and their insertion into a graph.

    penstock::acquire(Tensor(a!)[] weights, int graph, int step) -> ()
    penstock::release(Tensor(a!)[] weights, int graph, int step) -> ()
    penstock::store(Tensor(a!) slot, Tensor value, int graph, int step) -> ()

The last one copies a value that a forward keeps into its place among the weights, and is a whole step. They
return nothing, and their schema says that they mutate the weights. So every compiler keeps
them, and keeps every kernel that reads a weight between the weight's acquire and its release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch
from torch import fx

from penstock.passes.graph.nodes import copy_graph_module, inline_grad_regions, placeholders_of
from penstock.passes.graph.transforms import inline_transforms
from penstock.passes.weights.lifted import weights_among
from penstock.schedule.clock.event_graph import acting_steps
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import Storage, Trace, Weight
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    from penstock.schedule.payload.codec import Payload

_Result = TypeVar("_Result")


class Probes(Protocol):
    """What the operators in a graph with probes call: a streamer, or your own object.

    Example:
        >>> class Printed:
        ...     def acquire(self, graph, step): print("step", step)
        ...     def release(self, graph, step): pass
        >>> graph = penstock.insert_probes(exported.graph_module, penstock.annotate(exported))
        >>> with penstock.streaming(Printed()):
        ...     output = graph(*exported.state_dict.values(), x)
        step 0
        step 1
        step 2
        step 3
    """

    def acquire(self, graph: int, step: int) -> None:
        """Return once the weights that step number `step` of method number `graph` reads are in place."""

    def release(self, graph: int, step: int) -> None:
        """Note that the kernels of step number `step` of method number `graph` have been issued."""


class CompiledCalls:
    """Base of `Probes` for compiled code, in which autograd records nothing.

    The probes then need not mark the weights as written, which would take a quarter of their time.
    """

    def acquire(self, graph: int, step: int) -> None:
        pass

    def release(self, graph: int, step: int) -> None:
        pass

    def enclose(self, run: Callable[[], _Result]) -> _Result:
        """Run a pass, including what it reads before its first probe call and behind its last one."""
        return run()

    def read_by_units(
        self, graph: int, read: int, operator: Callable[..., Any], arguments: Sequence[Any]
    ) -> Any:
        """Call an operator as the method's read number `read` by units; here, all of its weight is there."""
        return operator(*arguments)

    def body(self, name: str) -> fx.GraphModule:
        """What the method computes for each expert, by the name of the body in its graph."""
        raise StreamError(f"compiled code computes experts by {name}, which its program lacks: compile again")


NOTHING_STREAMS = CompiledCalls()
"""The probes of compiled code whose weights all stay: they return at once."""


# A second import of this module keeps the variable, since calls in progress have set it.
STREAMER: ContextVar[Probes | None] = globals().get("STREAMER") or ContextVar(
    "penstock_streamer", default=None
)
"""The streamer of the call in progress."""


@contextmanager
def streaming(probes: Probes | None) -> Iterator[None]:
    """Let the operators in graphs with probes call `probes` on this thread, within a `with` statement.

    Args:
        probes: An object with the methods of `Probes`.
    """
    token = STREAMER.set(probes)
    try:
        yield
    finally:
        STREAMER.reset(token)


@dataclass(frozen=True)
class Site:
    """The place of one step's probes: around the node called `node`, with the placeholders `weights`."""

    node: str
    step: int
    weights: tuple[str, ...]


def insert_probes(
    graph_module: fx.GraphModule, payload: Payload, *, method: str | None = None, plan: Plan | None = None
) -> fx.GraphModule:
    """Return a copy of an annotated graph with an acquire before every step and a release after it.

    Args:
        graph_module: The graph of the program that was annotated, or a copy that still has its placeholders
            and the nodes that read weights.
        payload: What `annotate` returned.
        method: The name of the method. Default: the only one.
        plan: Leave out the probes of steps that this plan never waits for or acts on.

    Raises:
        PassError: The graph is not the one that was annotated, there is no such method, or the plan is of
            another program.
        PayloadError: The weights of the graph are others.

    Example:
        >>> graph = penstock.insert_probes(exported.graph_module, penstock.annotate(exported))
        >>> sum(node.target is torch.ops.penstock.acquire.default for node in graph.graph.nodes)
        4
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise PassError(
            f"expected the graph of an exported program, got {type(graph_module).__name__}: export the "
            "model, annotate the program, and give its graph_module"
        )
    trace = _trace_of(payload, method)
    graph_module = inline_grad_regions(inline_transforms(graph_module))
    names = {node.name for node in graph_module.graph.nodes}
    missing = [step.name for step in trace.steps if step.name not in names]
    if missing:
        raise PassError(
            f"the graph has no node {missing[0]!r}, which the annotation of method {trace.method!r} names: "
            "annotate the program whose graph is passed here"
        )
    weights = weights_among(graph_module, payload, trace.method)
    probed = range(len(trace.steps)) if plan is None else streaming_steps(plan, trace.graph, payload.storages)
    copied = copy_graph_module(graph_module)
    add_sites(copied.graph, trace.graph, _sites(graph_module, trace, weights, probed))
    copied.recompile()
    return copied


def add_sites(target: fx.Graph, graph: int, sites: Iterable[Site]) -> None:
    """Puts probes of graph number `graph` around the given sites, in place."""
    nodes = {node.name: node for node in target.nodes}
    for site in sites:
        arguments = ([nodes[name] for name in site.weights], graph, site.step)
        with target.inserting_before(nodes[site.node]):
            target.call_function(torch.ops.penstock.acquire.default, arguments)
        with target.inserting_after(nodes[site.node]):
            target.call_function(torch.ops.penstock.release.default, arguments)
    target.lint()


def without_probes(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph without its probes, or the graph itself if it has none."""
    if not any(node.target in (ACQUIRE, RELEASE) for node in graph_module.graph.nodes):
        return graph_module
    copied = copy_graph_module(graph_module)
    for node in [node for node in copied.graph.nodes if node.target in (ACQUIRE, RELEASE)]:
        copied.graph.erase_node(node)
    copied.recompile()
    return copied


def streaming_steps(plan: Plan, graph: int, storages: Sequence[Storage]) -> list[int]:
    """Returns the steps at which a plan waits for a transfer, starts one, or drops a range.

    All other steps read and write only bytes that never leave the device. Raises PassError if the plan has no
    schedule for method number `graph`.
    """
    known = {trace.graph for trace in plan.traces} & {schedule.graph for schedule in plan.schedules}
    if graph not in known:
        raise PassError(f"the plan has no schedule for graph {graph}: make a plan for this program")
    return list(acting_steps(plan, graph, [storage.nbytes for storage in storages]))


def _trace_of(payload: Payload, method: str | None) -> Trace:
    names = [trace.method for trace in payload.traces]
    chosen = [trace for trace in payload.traces if method in (None, trace.method)]
    if not chosen or (method is None and len(set(names)) > 1):
        raise PassError(f"the payload has the methods {names}, got method={method!r}: name one of them")
    return chosen[0]


def _sites(
    graph_module: fx.GraphModule, trace: Trace, weight_of: Mapping[str, Weight], probed: Iterable[int]
) -> Iterator[Site]:
    """Yields the site of each step, with all inputs that hold what it reads and that the graph uses."""
    used = {node.name for node in placeholders_of(graph_module.graph) if node.users}
    owners: dict[int, list[str]] = {}
    for name in sorted(weight_of.keys() & used):
        owners.setdefault(weight_of[name].parts[0].storage, []).append(name)
    for k in probed:
        weights = sorted(name for read in trace.steps[k].reads for name in owners.get(read, ()))
        yield Site(trace.steps[k].name, k, tuple(weights))


def _no_streamer() -> NoReturn:
    raise StreamError(
        "a graph with probes ran outside a streamed module: call it through `program.load(...)`"
    )


def _acquire(weights: list[torch.Tensor], graph: int, step: int) -> None:
    streamer = STREAMER.get() or _no_streamer()
    if streamer is NOTHING_STREAMS:
        return
    streamer.acquire(graph, step)
    if not isinstance(streamer, CompiledCalls):
        _bump(weights)


def _release(weights: list[torch.Tensor], graph: int, step: int) -> None:
    streamer = STREAMER.get() or _no_streamer()
    if streamer is NOTHING_STREAMS:
        return
    streamer.release(graph, step)
    if not isinstance(streamer, CompiledCalls):
        _bump(weights)


def _store(slot: torch.Tensor, value: torch.Tensor, graph: int, step: int) -> None:
    streamer = (STREAMER.get() or _no_streamer()) if step >= 0 else NOTHING_STREAMS
    streamer.acquire(graph, step)
    slot.copy_(value)
    streamer.release(graph, step)


def _bump(weights: list[torch.Tensor]) -> None:
    """Marks the weights as written, so that an autograd graph over one of them fails loudly.

    One call marks a whole list. Inference tensors have no version, so a list with one of them is refused and
    marked again without it; asking every tensor beforehand would release the interpreter once for each
    weight.
    """
    try:
        torch.autograd.graph.increment_version(weights)
    except RuntimeError:
        torch.autograd.graph.increment_version([w for w in weights if not w.is_inference()])


def _do_nothing(*arguments: object) -> None:
    """The kernel of all operators for fake tensors."""


def _register() -> Any:
    """Declares the operators once a process, however often this module is imported.

    This uses `Library` and not `custom_op`: the latter marks writes by itself, but takes 20 us a call and not
    3.
    """
    if hasattr(torch.ops.penstock, "store"):
        return None
    library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
    marked, stored = "Tensor(a!)[] weights", "Tensor(a!) slot, Tensor value"
    for name, kernel, tensors in (
        ("acquire", _acquire, marked),
        ("release", _release, marked),
        ("store", _store, stored),
    ):
        library.define(f"{name}({tensors}, int graph, int step) -> ()")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"penstock::{name}", _do_nothing, lib=library)
    return library


# The operators exist only as long as their library, so it is kept alive; a second import must not drop it.
_LIBRARY = _register() or globals().get("_LIBRARY")

ACQUIRE, RELEASE = torch.ops.penstock.acquire.default, torch.ops.penstock.release.default
STORE = torch.ops.penstock.store.default
