"""The backend "penstock" of torch.compile: Inductor's kernels over weights that stream, piece by piece."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
from torch import fx
from torch._guards import CompileContext

from penstock.passes.building.module_state import ModuleState
from penstock.passes.building.refusals import refuse_scripted
from penstock.passes.graph.nodes import placeholders_of, tensors_of
from penstock.passes.lowering.emitted import observe_python
from penstock.passes.lowering.inductor import (
    check_generator,
    check_options,
    mark_small,
    observed,
    only_device,
    own_passes,
    raise_own,
)
from penstock.passes.lowering.post_grad import ProbePass
from penstock.passes.probes import CompiledCalls
from penstock.passes.weights.lifted import Weights, part_of, storage_bytes, storage_identity, tensor_in
from penstock.runtime.checkpoint.binding import Found, Rename, Rules, find_values
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.device.accelerator import find_accelerator, out_of_memory
from penstock.runtime.device.opening import ACCELERATOR, device_kind
from penstock.runtime.files.artifact_files import stamp_file
from penstock.runtime.files.safetensors_file import index_files, own_place
from penstock.runtime.loading import load_on_accelerator, load_weights
from penstock.runtime.options import LoadRequest
from penstock.runtime.planning import PlanRequest, decide
from penstock.runtime.stream.engine import Stats
from penstock.runtime.stream.loaded import Gate, LoadedWeights, probe_calls
from penstock.schedule.facts.errors import BudgetError, PassError, SourceError, StreamError
from penstock.schedule.facts.model import Method, Step, Storage, Trace, Weight, WeightFile, Work
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.payload.codec import Payload, ProbeOrder
from penstock.schedule.plan import Plan

T = TypeVar("T")

_log = logging.getLogger(__name__)

HOME = "penstock_home"
"""The attribute of an offloaded parameter with its Home: the record of its module, and its FQN."""


@dataclass(frozen=True)
class Offloaded:
    """The record of a module whose parameters are in files only.

    Attributes:
        weights, storages, files: Where the bytes of the parameters lie, and the tensors in them.
        nbytes: Bytes of memory that the module gave back.
        device: The device that runs the module.
        sessions: What streams the parameters, once the module has been compiled.
    """

    weights: tuple[Weight, ...]
    storages: tuple[Storage, ...]
    files: tuple[WeightFile, ...]
    nbytes: int
    device: str = "cpu"
    sessions: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def stats(self) -> Any:
        """Bytes moved, stalls, misses and peaks since the last piece was compiled; None before the first."""
        return self.sessions[0].stats if self.sessions else None

    def close(self) -> None:
        """Stop the readers and give the arena's memory back; a later call takes it again."""
        for session in self.sessions:
            session.close()


@dataclass(frozen=True)
class Home:
    """The home of an offloaded parameter: its module's record, and its FQN there."""

    offloaded: Offloaded
    fqn: str


def offload(
    module: torch.nn.Module,
    checkpoint: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    rename: Rename = None,
    device: str = "cpu",
) -> Offloaded:
    """Replace a module's parameters by parameters without memory, whose bytes lie in safetensors files.

    Run the module through `torch.compile(module, backend="penstock", options={"budget": "8GB"})`. Buffers
    stay, and so do recurrent layers, which Dynamo leaves to Python. The bytes that were given back are
    logged.

    Args:
        module: The module. It is changed, unless an error is raised.
        checkpoint: A file, an index, a folder or a list of files. They are used in place, and must hold the
            values that the module has; parameters on the meta device have none, and take those of the files.
        rename: The name of a tensor for an FQN, as for `bind`.
        device: `"cpu"` or an accelerator of torch's. Buffers and recurrent layers go there now, and weights
            as they are needed.

    Raises:
        SourceError: The files are not the module's.
        PassError: A parameter cannot leave memory, or Inductor has no code for the device.
        StreamError: There is no such device, or it has no memory for what goes there.

    Example:
        >>> from safetensors.torch import save_file
        >>> linear = torch.nn.Linear(64, 64)
        >>> save_file(linear.state_dict(), "linear.safetensors")
        >>> penstock.offload(linear, "linear.safetensors").nbytes
        16640
    """
    refuse_scripted(module)
    where = _place(device)
    _check_kept(module, where)
    paths = [checkpoint] if isinstance(checkpoint, str | PathLike) else list(checkpoint)
    files = tuple(own_place(path) for path in index_files([Path(path) for path in paths]))
    parameters = _streamable(module)
    weights, storages = _catalog(parameters, where)
    if isinstance(rename, Mapping):  # which may tell of buffers, too
        rename = {fqn: names for fqn, names in rename.items() if fqn in parameters}
    stored = find_values(weights, open_checkpoint(files), Rules(rename))
    _check_values(weights, parameters, stored)
    stamps = tuple(stamp_file(path, recorded_path=str(path)) for path in files)
    identities = {storage_identity(p): p for p in parameters.values() if p.device.type != "meta"}
    nbytes = sum(p.untyped_storage().nbytes() for p in identities.values())
    record = Offloaded(weights, stored.placed(storages), stamps, nbytes, str(where))
    _replace(module, _hollow(parameters, record, where), where)
    _log.info("%s of parameters given back", format_size(nbytes))
    return record


def _place(device: str) -> torch.device:
    """The device of that name. Raises StreamError without it, PassError if Inductor has no code for it."""
    if device == "cpu":
        return torch.device("cpu")
    if device_kind(device) != ACCELERATOR:
        raise StreamError(f"torch.compile runs on devices of torch's, and not on {device!r}")
    accelerator = find_accelerator(device)
    check_generator(accelerator, "the module")
    return accelerator


def _check_kept(module: torch.nn.Module, where: torch.device) -> None:
    """Raises PassError for a tensor that is to lie in the memory of a device and has no values."""
    moved = [] if where.type == "cpu" else [*module.named_buffers()]
    staying = {f"buffer {name!r}": buffer for name, buffer in moved}
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.nn.RNNBase):
            staying |= {f"parameter {fqn!r}": value for fqn, value in submodule.named_parameters(name)}
    for title, value in staying.items():
        if value.device.type == "meta":
            raise PassError(f"{title} is on the meta device and has no values for {where}: make it real")


def _streamable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    staying = {id(p) for recurrent in _recurrent(module) for p in recurrent.parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {fqn: value for fqn, value in named if id(value) not in staying}


def _recurrent(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [submodule for submodule in module.modules() if isinstance(submodule, torch.nn.RNNBase)]


def home_of(value: object) -> Home | None:
    """Returns the home of a tensor that is an offloaded parameter; None for any other."""
    home = getattr(value, HOME, None) if isinstance(value, torch.nn.Parameter) else None
    return home if isinstance(home, Home) else None


def _catalog(
    parameters: dict[str, torch.nn.Parameter], where: torch.device
) -> tuple[tuple[Weight, ...], tuple[Storage, ...]]:
    numbers: dict[tuple[str, int], int] = {}
    weights: list[Weight] = []
    sizes: dict[int, int] = {}
    for fqn, value in parameters.items():
        if home_of(value):
            raise PassError(f"parameter {fqn!r} was offloaded before: compile the module, or load it again")
        if type(value) is not torch.nn.Parameter or value.device.type not in ("cpu", "meta"):
            raise PassError(
                f"parameter {fqn!r} is a {type(value).__name__} on {value.device}, "
                "expected a plain one in memory: export a module of other ones and penstock.compile it"
            )
        number = numbers.setdefault(storage_identity(value), len(numbers))
        sizes[number] = max(sizes.get(number, 0), value.untyped_storage().nbytes())
        weights.append(Weight(fqn, "parameter", str(where), (part_of(value, number),)))
    return tuple(weights), tuple(Storage(nbytes, "streamable") for nbytes in sizes.values())


def _check_values(
    weights: Sequence[Weight], parameters: dict[str, torch.nn.Parameter], stored: Found
) -> None:
    """Compares the module's bytes with those of the files, which take their place."""
    checked: set[int] = set()
    for weight in weights:
        s, value = weight.parts[0].storage, parameters[weight.fqn]
        if s in checked or value.device.type == "meta":
            continue
        checked.add(s)
        flat = storage_bytes(value.detach())
        for start, chunk in stored.chunks(s):
            here = flat[start : start + len(chunk)]
            if not torch.equal(here, torch.frombuffer(bytearray(chunk), dtype=torch.uint8)):
                raise SourceError(
                    f"the files hold other values for parameter {weight.fqn} than the module: "
                    "load the checkpoint into the module, or save the module and offload it to that"
                )


def _hollow(
    parameters: Mapping[str, torch.nn.Parameter], record: Offloaded, where: torch.device
) -> dict[int, torch.nn.Parameter]:
    """Returns a parameter without memory for each, by the id of that; tied ones stay tied."""
    weights_of: dict[int, list[Weight]] = defaultdict(list)
    for weight in record.weights:
        weights_of[weight.parts[0].storage].append(weight)
    new: dict[int, torch.nn.Parameter] = {}
    for s, weights in weights_of.items():
        nbytes = record.storages[s].nbytes
        title = f"parameter {weights[0].fqn!r}, {format_size(nbytes)} that are given back at once,"
        memory = _make(partial(torch.empty, nbytes, dtype=torch.uint8, device=where), where, title)
        for weight in weights:
            old = parameters[weight.fqn]
            if id(old) not in new:
                tensor = tensor_in(memory, weight.parts[0])
                new[id(old)] = torch.nn.Parameter(tensor, old.requires_grad)
                setattr(new[id(old)], HOME, Home(record, weight.fqn))
        memory.untyped_storage().resize_(0)
    return new


def _replace(module: torch.nn.Module, new: Mapping[int, torch.nn.Parameter], where: torch.device) -> None:
    """Put parameters without memory in the place of others, and what keeps its memory on the device."""
    with _undone_on_failure(module):
        buffers = _make(partial(_move, module, where), where, "the module's buffers and recurrent layers")
        for submodule in module.modules():
            for name, buffer in list(submodule.named_buffers(recurse=False)):
                setattr(submodule, name, buffers[buffer])
            parameters = dict(submodule.named_parameters(recurse=False, remove_duplicate=False))
            replaced = {name: new[id(value)] for name, value in parameters.items() if id(value) in new}
            for name, value in replaced.items():
                setattr(submodule, name, value)  # also where a module keeps lists of its own
            if replaced:
                _refuse_eager(submodule)


@contextmanager
def _undone_on_failure(module: torch.nn.Module) -> Iterator[None]:
    """A module is changed within; if that fails, it gets back what it had, in the memory that that had."""
    before = ModuleState(module)
    parameters = [value for recurrent in _recurrent(module) for value in recurrent.parameters()]
    memory = [(value, value.data) for p in parameters for value in (p, p.grad) if value is not None]
    try:
        yield
    except BaseException:
        before.restore()
        for value, data in memory:
            value.data = data
        raise


def _move(module: torch.nn.Module, where: torch.device) -> dict[torch.Tensor, torch.Tensor]:
    """Move the recurrent layers of a module. Returns its buffers, each with what shall be in its place."""
    for recurrent in _recurrent(module):
        recurrent.to(where)
    return {buffer: buffer if where.type == "cpu" else buffer.to(where) for buffer in module.buffers()}


def _make(make: Callable[[], T], where: torch.device, title: str) -> T:
    """Returns what is made on a device. Raises StreamError, which says what, where that has no memory."""
    try:
        return make()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        free, total = torch.accelerator.get_memory_info(where)
        raise StreamError(
            f"{where} is out of memory: {title} do not fit, with {format_size(free)} free of "
            f"{format_size(total)}: free more of it, and offload the module again, which is as it was"
        ) from error.with_traceback(None)  # whose frames would keep what is there already


def _refuse_eager(module: torch.nn.Module) -> None:
    """Have uses of memory that is gone raise StreamError; torch itself may crash."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StreamError(
            f"the parameters of this {type(module).__name__} are offloaded: call the module through "
            "torch.compile(module, backend='penstock', ...), which Dynamo has left here (a graph break in "
            "torch's own code, or too many recompilations), and neither copy, move nor save it"
        )

    def refuse_unless_compiling(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            refuse()

    module.register_forward_pre_hook(refuse_unless_compiling)
    module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
    module.__dict__["__reduce_ex__"] = refuse
    module.__dict__["__deepcopy__"] = refuse
    module.__dict__["_apply"] = refuse


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
            reads = (tuple(sorted({storages[s] for s in step.reads})) for step in trace.steps)
            steps = tuple(replace(step, reads=r) for step, r in zip(trace.steps, reads, strict=True))
            named = replace(trace, method=f"piece_{number}", graph=number, steps=steps)
            self._add(named, replace(order, graph=number))
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
        """The FQN of a weight that a piece is called with. Raises StreamError for another module's."""
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
            loaded = load_weights(Path(), self._payload, self.plan, LoadRequest())
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
    """A compiled piece. Dynamo guards shapes, not identities: equal layers are methods of one piece."""

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


_OWN_OPTIONS = ("budget", "resident_below")
_ADVICE = "call penstock.offload(module, checkpoint) first"


def compile_piece(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo. `torch.compile(backend="penstock")` calls this.

    Args:
        graph_module: The graph.
        example_inputs: Its inputs, of the module's parameters too.
        options: `budget` (bytes, `"8GB"`, or `"50%"` of the parameters), `resident_below` (default: 64 KiB),
            and Inductor's own.

    Returns:
        A function of the graph's inputs.

    Raises:
        PassError: Parameters are still in memory, or on the meta device.
        BudgetError: There is no budget.
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
