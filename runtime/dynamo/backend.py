"""The backend "penstock" of torch.compile: Inductor's kernels over weights that stream, piece by piece.

Dynamo hands over a module in as many pieces as its graph breaks leave, and again for new sizes. All pieces of
one offloaded module share one budget, one arena and one streamer, planned anew whenever a piece is added.
Each piece is a method, so that pieces may run in any order; each begins with the resident ranges only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext

from penstock.passes.graph.nodes import tensors_of
from penstock.passes.lowering.inductor import check_options
from penstock.passes.lowering.targets import only_device
from penstock.runtime.dynamo.offload import Home, Offloaded, home_of
from penstock.runtime.dynamo.session import Lowering, Session, lower_by_inductor, run_inductor
from penstock.schedule.facts.errors import BudgetError, PassError, StreamError
from penstock.schedule.facts.sizes import parse_size

_OWN_OPTIONS = ("budget", "resident_below")
_ADVICE = "call penstock.offload(module, checkpoint) first"


def compile_piece(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo. torch.compile calls this for `backend="penstock"`.

    `options` are `budget` (bytes, `8GB`, or `50%` of the parameters), `resident_below` (64KiB), and
    Inductor's own. Raises PassError for parameters that are still in memory, or on the meta device, and
    BudgetError without a budget.
    """
    own_part, rest_options = own_options(options, "penstock")
    check_options(rest_options)

    def alone(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return run_inductor(graph, inputs, rest_options, [])

    return compile_for(
        partial(lower_by_inductor, options=rest_options), alone, graph_module, list(example_inputs), own_part
    )


def own_options(options: Mapping[str, Any] | None, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns penstock's own options, and those of the compiler. Raises BudgetError without a budget."""
    if options is not None and not isinstance(options, Mapping):
        raise BudgetError(f"the backend {backend!r} takes options={{'budget': '8GB'}}, got {options!r}")
    options_given = dict(options or {})
    if "budget" not in options_given:
        raise BudgetError(f"the backend {backend!r} needs a budget: options={{'budget': '8GB'}}")
    return {name: options_given.pop(name) for name in _OWN_OPTIONS if name in options_given}, options_given


def compile_for(
    lower: Lowering,
    alone: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    graph_module: fx.GraphModule,
    inputs: list[Any],
    own_part: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile one graph of Dynamo by a lowering, or by `alone` if it reads no offloaded parameter."""
    homes = {i: home for i, value in enumerate(inputs) if (home := home_of(value))}
    _check_inputs(inputs, homes)
    _check_attributes(graph_module)
    if homes:
        only_device(_placed(graph_module, inputs), "the graph")
    if not homes:
        return alone(graph_module, inputs)
    records = {id(home.offloaded): home.offloaded for home in homes.values()}
    if len(records) > 1:
        raise PassError(
            "the graph reads parameters of modules offloaded apart: offload the module around them"
        )
    _check_recompilations()
    session = _session(next(iter(records.values())), own_part)
    with torch.no_grad():  # offloaded parameters may require grad: torch chooses kernels by that
        return session.compile(graph_module, inputs, homes, lower)


def _placed(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[tuple[str, torch.device]]:
    """The tensors of a graph of Dynamo's, and where they lie: its inputs first."""
    for i, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            home = home_of(value)
            yield f"weight {home.fqn!r}" if home else f"input {i}", value.device
    for node in graph_module.graph.nodes:
        for value in tensors_of(node.meta.get("example_value")):
            yield f"value {node.name!r}", value.device


def _check_attributes(graph_module: fx.GraphModule) -> None:
    for name, value in graph_module.named_parameters():
        if home_of(value):
            raise PassError(
                f"Dynamo holds the offloaded parameter {name!r} inside its graph, where it has no memory: "
                "set torch._dynamo.config.inline_inbuilt_nn_modules = True, which OpenVINO's backend turns "
                "off when it is imported"
            )


def _check_recompilations() -> None:
    """Refuses a frame's last allowed compilation, after which Dynamo would run it without its weights."""
    now = CompileContext.current_compile_id()
    limit: int = torch._dynamo.config.recompile_limit
    if now is not None and (now.frame_compile_id or 0) + 1 >= limit:
        raise StreamError(
            f"one frame was compiled {limit} times for other modules or sizes, after which Dynamo leaves it "
            "to Python: raise torch._dynamo.config.recompile_limit, or take the graph break out of the loop "
            "that calls it"
        )


def _check_inputs(inputs: Sequence[Any], homes: Mapping[int, Home]) -> None:
    for i, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type == "meta":
            raise PassError(f"input {i} is on the meta device and has no values: {_ADVICE}")
        if torch.is_grad_enabled() and value.requires_grad and i not in homes:
            raise PassError(
                "gradients through streamed weights are not supported: call under torch.no_grad(), and make "
                f"the parameters not require grad ({_ADVICE})"
            )
        if isinstance(value, torch.nn.Parameter) and i not in homes:
            raise PassError(f"a parameter of shape {list(value.shape)} is still in memory: {_ADVICE}")
        if i not in homes and value.numel() and not value.untyped_storage().nbytes():
            raise PassError(
                f"input {i} of shape {list(value.shape)} is a view of an offloaded parameter, made outside "
                "the graph: make it inside what is compiled"
            )


def _session(record: Offloaded, own_part: Mapping[str, Any]) -> Session:
    """Returns the only session of a record, which has the budget that the module was first compiled for."""
    total = sum(storage.nbytes for storage in record.storages)
    budget = parse_size(own_part["budget"], total=total)
    below = own_part.get("resident_below", "64KiB")
    smallest = parse_size(below, name="resident_below") if below else 0
    if not record.sessions:
        record.sessions.append(Session(record, budget, smallest))
    session: Session = record.sessions[0]
    if session.budget != budget:
        raise BudgetError(
            f"the module was compiled for a budget of {session.budget} bytes before, got {budget}: "
            "all of its pieces share one; load and offload the module again for another"
        )
    if session.resident_below != smallest:
        raise BudgetError(
            f"the module was compiled with resident_below={session.resident_below} before, got {smallest}: "
            "all of its pieces share one"
        )
    return session
