"""The Inductor lowering: a shared object for each method, compiled ahead of time, its weights outside."""

from __future__ import annotations

import json
import mmap
import re
import tempfile
import warnings
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from penstock.passes.annotate import Annotated, numbered_reads, with_operators
from penstock.passes.building.refusals import sentence
from penstock.passes.calls.inputs import user_placeholders
from penstock.passes.graph.nodes import indexed, nested_modules, placeholders_of, size_hint, tensors_of
from penstock.passes.graph.propagation import fake_mode_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.lowering.archive import PACKAGE, PROGRAM, write_programs
from penstock.passes.lowering.emitted import Observation, observe_cpp
from penstock.passes.lowering.post_grad import (
    INLINED,
    GraphPass,
    NamedLiterals,
    OldValues,
    PlacedProbes,
    ProbePass,
    options_for,
)
from penstock.passes.pipeline import Pipeline, declare
from penstock.passes.trace import PRESET_CPU, sum_of
from penstock.passes.weights.lifted import Weights, has_values, tensor_in, with_values
from penstock.schedule.facts.errors import PassError, PenstockError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Method, SparseRead, Step, Storage, Trace, Weight, Work
from penstock.schedule.facts.parts import read_together
from penstock.schedule.payload.codec import Payload, ProbeOrder

AHEAD = ("cpu", "cuda", "xpu", "mps")
"""Where code of AOTInductor runs: `parse_device_str` of torch's aoti_runtime/model_base.h knows no other."""

_INSTEAD = "penstock.compile it with lowering='eager', which runs on every device that torch knows"

Placed = Iterable[tuple[str, torch.device]]
"""Tensors by what they are called in messages, and where they lie."""


def values_of(graph_module: fx.GraphModule) -> Placed:
    """Yields the tensors of an exported graph, and of the bodies of its control flow."""
    for module in nested_modules(graph_module):
        for node in module.graph.nodes:
            for tensor in tensors_of(node.meta.get("val")):
                yield f"value {node.name!r}", tensor.device


def only_device(placed: Placed, title: str) -> torch.device:
    """Return the device of all tensors, or the CPU if there are none. Raises PassError if they lie on two."""
    tensors: dict[torch.device, str] = {}
    for name, device in placed:
        tensors.setdefault(indexed(device), name)
    if len(tensors) > 1:
        (device, name), (other_device, other_name) = list(tensors.items())[:2]
        accelerator = other_device if device.type == "cpu" else device
        raise PassError(
            f"{title} has tensors on two devices, {name} on {device} and {other_name} on {other_device}, and "
            f"Inductor compiles for one: make all of them on {accelerator}, or {_INSTEAD}"
        )
    return next(iter(tensors), torch.device("cpu"))


def check_ahead(device: torch.device, title: str) -> None:
    """Raises PassError unless AOTInductor compiles for the device on this machine."""
    if device.type not in AHEAD:
        raise PassError(
            f"{title} is for {device}, and code of AOTInductor runs on {', '.join(AHEAD)} only: {_INSTEAD}"
        )
    if device.type != "cpu":
        _check_here(device, title)
    check_generator(device, title)


def check_generator(device: torch.device, title: str) -> None:
    """Raises PassError where this torch has no code generator of Inductor for a device."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device(device.type) is None:
        raise PassError(
            f"{title} is for {device}, for which Inductor has no code generator in torch "
            f"{torch.__version__}: {_INSTEAD}"
        )


def _check_here(device: torch.device, title: str) -> None:
    """Raises PassError without the device: its kernels are chosen and compiled on it."""
    here = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if here and here.type == device.type else 0
    if (device.index or 0) >= count:
        raise PassError(
            f"{title} is for {device}, whose kernels Inductor compiles where that device is, and this "
            f"machine has {count or 'none'} of that kind: compile it on a machine that has it, or {_INSTEAD}"
        )


STEP = 512
"""The alignment in bytes of stand-ins on a device, that of torch's allocators."""

COPIED = 4096
"""The most bytes of a tensor whose values the compiler gets, since it copies small values into the code."""


def shared_memory(weights: Weights, device: torch.device) -> torch.Tensor | None:
    """Returns memory of a device in which stand-ins for all weights have room, each at an address of its own.

    It is a little larger than the largest weight. On a CPU, where address space costs nothing, it is None.
    """
    if device.type == "cpu":
        return None
    largest = max((storage.nbytes for storage in weights.storages), default=0)
    return torch.empty(largest + STEP * len(weights.storages), dtype=torch.uint8, device=device)


def without_values(
    exported: ExportedProgram, weights: Weights, shared: torch.Tensor | None = None
) -> ExportedProgram:
    """Returns a copy of the program in which memory that was never written stands in for its weights.

    `weights` holds them by FQN. Tensors of up to COPIED bytes keep their values, in memory of their own. All
    others overlap in `shared` where it is given, which must be kept as long as the copy.
    """
    memory: dict[int, torch.Tensor] = {}

    def reserve(s: int) -> torch.Tensor:
        nbytes = weights.storages[s].nbytes
        if shared is None:
            return _reserve(nbytes)
        empty = torch.empty(0, dtype=torch.uint8, device=shared.device)
        if nbytes <= COPIED:
            return empty.new_empty(nbytes)
        # To Inductor, tensors of one storage and shape are one constant.
        place = shared.data_ptr() + STEP * s
        storage = torch._C._construct_storage_from_data_pointer(place, shared.device, nbytes)
        return empty.set_(storage)

    def empty(name: str, old: Any) -> Any:
        if name not in weights.held:
            return old
        part = weights.held[name].parts[0]
        if part.storage not in memory:
            memory[part.storage] = reserve(part.storage)
        value = tensor_in(memory[part.storage], part)
        if old.numel() * old.itemsize <= COPIED and has_values(old):
            value.copy_(old)
        return value

    return with_values(exported, empty)


def _reserve(nbytes: int) -> torch.Tensor:
    """Returns a tensor over address space for which the system reserves no memory, however large it is."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def example_arguments(exported: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the exported sizes, of zeros. Raises PassError for a number that each call chooses."""
    constants = {
        spec.arg.name: spec.arg.value
        for spec in exported.graph_signature.input_specs
        if isinstance(spec.arg, ConstantArgument)
    }
    leaves: list[Any] = []
    for node in user_placeholders(exported):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape = [size_hint(size) for size in value.shape]
            leaves.append(torch.zeros(shape, dtype=value.dtype, device=value.device))
        elif node.name in constants:
            leaves.append(constants[node.name])
        else:
            raise PassError(
                f"input {node.name!r} is a number that each call chooses, which AOTInductor does not take: "
                "export with a tensor in its place, or a fixed value"
            )
    args, kwargs = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return args, kwargs


aten = torch.ops.aten

FIXED = {"aot_inductor.package": True, "aot_inductor.package_constants_in_so": False}
_DEFEATS_STREAMING = {
    "aot_inductor.package_constants_in_so": "puts the weights into the shared object",
    "aot_inductor.use_runtime_constant_folding": "computes with weights once, before the program runs",
    "freezing": "folds weights into constants",
}


@dataclass(frozen=True)
class Emitted:
    """The files that Inductor wrote for one method, and the probes that went into its graph."""

    files: Sequence[Any]
    placed: PlacedProbes

    def read(self, ending: str) -> str:
        """Returns the text of the file whose name has this ending; an empty string if there is none."""
        matching = (file for file in self.files if isinstance(file, str) and file.endswith(ending))
        return next((Path(file).read_text() for file in matching), "")


@dataclass(frozen=True)
class Compiled:
    """The programs that are being compiled, and the results of the passes so far.

    `payload` has the facts of the annotated programs, and in the end those of the compiled ones. `emitted`
    has the emitted files by method. `bound` are the FQNs of the weights that the compiled code asks for when
    it is loaded. Storages of less than `resident_below` bytes get no probes. With `by_units`, the code can do
    the reads by units that the traces have.
    """

    payload: Payload
    programs: Mapping[str, ExportedProgram]
    options: Mapping[str, Any]
    resident_below: int
    by_units: bool = False
    emitted: Mapping[str, Emitted] = field(default_factory=dict)
    bound: frozenset[str] = frozenset()

    @property
    def machine(self) -> str:
        """The device and processor that the code was compiled for."""
        keys = ("AOTI_DEVICE_KEY", "AOTI_PLATFORM", "AOTI_MACHINE", "AOTI_CPU_ISA", "AOTI_COMPUTE_CAPABILITY")
        last = self.emitted[self.payload.methods[-1].name]
        metadata: Mapping[str, str] = json.loads(last.read(".wrapper_metadata.json") or "{}")
        return re.sub(r"\s+", " ", " ".join(metadata.get(key, "") for key in keys)).strip()

    def reads_by_units(self, graph: int) -> list[tuple[str, SparseRead]]:
        """The reads of a method that its code can do by units, in the order of their numbers, by node."""
        return numbered_reads(self.payload.trace_for(graph), self.payload.storages) if self.by_units else []

    @property
    def streamed(self) -> dict[str, int]:
        """The storage of every tensor that streams, by FQN."""
        storages = {weight.fqn: weight.parts[0].storage for weight in self.payload.tensors}
        return {fqn: s for fqn, s in storages.items() if self.payload.storages[s].kind == "streamable"}


def lower(
    payload: Payload,
    programs: Mapping[str, ExportedProgram],
    *,
    options: Mapping[str, Any] | None = None,
    resident_below: int = 0,
    by_units: bool = False,
) -> Compiled:
    """Compiles every method; the result's payload has the observed traces and the kinds of inlined storages.

    `options` are options of Inductor, as `torch.compile` takes them. Storages of less than `resident_below`
    bytes get no probes and stay in memory. With `by_units`, operators that can read by units remain calls,
    which whoever runs the code must know (`passes/sparse/calls.py`). Raises PassError for options that
    defeat streaming, and for a program that Inductor cannot compile or whose code cannot be followed.
    """
    check_options(options or {})
    return Pipeline(PASSES)(Compiled(payload, programs, dict(options or {}), resident_below, by_units))


@declare(ensures=("small storages",))
def tell_small(compiled: Compiled) -> Compiled:
    """Marks the storages that are too small to be worth a probe."""
    payload = compiled.payload
    storages = mark_small(payload.storages, compiled.resident_below)
    return replace(compiled, payload=replace(payload, storages=storages))


@declare(requires=("small storages",), ensures=("code",))
def compile_methods(compiled: Compiled) -> Compiled:
    """Compiles every method, with probes around each read of a storage that streams."""
    emitted = {method.name: _compile(compiled, method) for method in compiled.payload.methods}
    return replace(compiled, emitted=emitted)


@declare(requires=("code",), ensures=("order of reads",))
def observe_code(compiled: Compiled) -> Compiled:
    """Finds the order in which every method reads its weights, in the code that was emitted."""
    payload, streamed = compiled.payload, compiled.streamed
    traces, orders, bound = [], [], set(compiled.bound)
    for method in payload.methods:
        emitted = compiled.emitted[method.name]
        source, nodes = emitted.read(".wrapper.cpp"), emitted.read(".wrapper.json")
        observation = observe_cpp(source, nodes, streamed, method.graph)
        reads = compiled.reads_by_units(method.graph)
        trace, order = observed(payload.trace_for(method.graph), observation, emitted.placed, reads)
        traces.append(read_together(trace, payload.weights))
        orders.append(order)
        bound |= set(observation.bound)
    payload = replace(payload, traces=tuple(traces), probes=tuple(orders))
    return replace(compiled, payload=payload, bound=frozenset(bound))


def mark_small(storages: Sequence[Storage], resident_below: int) -> tuple[Storage, ...]:
    """Returns the storages; streamable ones of less than `resident_below` bytes have the kind `small`."""
    return tuple(
        replace(s, kind="small") if s.kind == "streamable" and s.nbytes < resident_below else s
        for s in storages
    )


def save(compiled: Compiled, annotated: Annotated, folder: Path) -> str:
    """Writes the package of all methods, and their programs without weights, as one zip.

    Returns the file's name in `folder`. The programs are needed for the methods' call signatures.
    """
    with (
        zipfile.ZipFile(folder / PROGRAM, "w", zipfile.ZIP_STORED) as archive,
        tempfile.TemporaryDirectory() as temporary,
    ):
        package = Path(temporary) / PACKAGE
        write_package(compiled, package)
        archive.write(package, PACKAGE)
        write_programs(archive, annotated)
    return PROGRAM


def write_package(compiled: Compiled, path: Path) -> None:
    """Writes the package of AOTInductor with a model for each method, by the method's name."""
    from torch._inductor.package.package import package_aoti

    package_aoti(str(path), {name: list(emitted.files) for name, emitted in compiled.emitted.items()})


def _compile(compiled: Compiled, method: Method) -> Emitted:
    exported = compiled.programs[method.name]
    title = f"method {method.name!r}"
    device = only_device(values_of(exported.graph_module), title)
    check_ahead(device, title)
    weights = Weights({weight.fqn: weight for weight in compiled.payload.tensors}, compiled.payload.storages)
    shared = shared_memory(weights, device)  # kept until all is compiled
    hollow = without_values(exported, weights, shared)
    before: list[GraphPass] = [*own_passes(compiled.options), NamedLiterals(hollow), OldValues(weights)]
    probes = ProbePass(method.graph, weights, _fqn_among(compiled.streamed), before)
    patches = {
        **compiled.options,
        **options_for(compiled.payload),
        **FIXED,
        "post_grad_custom_post_pass": probes,
    }
    reads = compiled.reads_by_units(method.graph)
    files = _run_inductor(with_operators(hollow, method.graph, reads), method.name, patches)
    return Emitted(files, probes.placed or PlacedProbes((), Work()))


@kept_torch_state()
def _run_inductor(hollow: ExportedProgram, method: str, patches: Mapping[str, Any]) -> Sequence[Any]:
    from torch._inductor import aot_compile

    args, kwargs = example_arguments(hollow)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch warns about its own code
            module = _of_contiguous(_with_tensor_scales(hollow.module(check_guards=False)))
            files = aot_compile(module, args, kwargs, options=dict(patches))
    except Exception as error:
        raise_own(error)
        raise PassError(
            f"Inductor cannot compile method {method!r} ({type(error).__name__}: {sentence(error)}): "
            "torch._inductor.aoti_compile_and_package must accept the program"
        ) from error
    assert isinstance(files, list)
    return files


def _with_tensor_scales(module: Any) -> Any:
    """Replace divisions by a tensor, which Inductor takes for a number in attention, so that it fails."""
    for nested in nested_modules(module):
        for node in nested.graph.nodes:
            if node.target is not aten.div.Tensor or not isinstance(node.args[1], fx.Node):
                continue
            product = node.args[0]
            while isinstance(product, fx.Node) and product.target in _RESHAPES:
                product = product.args[0]
            if isinstance(product, fx.Node) and product.target in _PRODUCTS:
                node.target, node.kwargs = aten.div.Tensor_mode, {"rounding_mode": None}
        nested.recompile()
    return module


_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._to_copy.default)


def _of_contiguous(module: Any) -> Any:
    """A module whose inputs are recorded as contiguous: a compiled method is called with such tensors."""
    for node in placeholders_of(module.graph):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            with fake_mode_of([value]):
                node.meta = {
                    **node.meta,
                    "val": torch.empty(value.shape, dtype=value.dtype, device=value.device),
                }
    return module


def observed(
    modelled: Trace,
    observation: Observation,
    placed: PlacedProbes,
    by_units: Sequence[tuple[str, SparseRead]] = (),
) -> tuple[Trace, ProbeOrder]:
    """The trace of a compiled method, and its probe calls: each observed step has the work of its probes.

    `by_units` are the numbered reads by units, with the modelled steps' names. Where Inductor reads a weight
    once more, the work of that read is not counted, as it is not known. Raises PassError if some of the
    probes that were placed are not called.
    """
    expected = {2 * probe + end for probe in range(len(placed.steps)) for end in (0, 1)}
    if set(observation.calls) != expected:
        raise PassError(
            f"the compiled method {modelled.method!r} calls {len(observation.calls)} probes, expected "
            f"{len(expected)}: the compiler, or its cache, dropped some; clear the cache and try again"
        )
    position = {call: index for index, call in enumerate(observation.calls)}
    opened = [position.get(step.opens, -1) for step in observation.steps]
    leads = [Work()] * (len(opened) + 1)
    reads = [Work()] * (len(opened) + 1)
    names = [""] * len(opened)
    for probe, step in enumerate(placed.steps):
        # The step that begins with the acquire of this probe, or the next step after that call.
        k = bisect_left(opened, position[2 * probe])
        leads[k], reads[k] = sum_of(leads[k], step.lead_work), sum_of(reads[k], step.read_work)
        if k < len(names) and not names[k]:
            names[k] = step.name
    tail = sum_of(leads[-1], reads[-1], placed.tail)
    steps = [
        Step(name or f"{step.label}_{k}", step.reads, 0, 0, lead, read)
        for k, (step, name, lead, read) in enumerate(
            zip(observation.steps, names, leads, reads, strict=False)
        )
    ]
    units = [-1] * len(by_units)
    works = {step.name: step.read_work for step in modelled.steps}
    for k, seen in enumerate(observation.steps):
        for number in seen.by_units:
            name, read = by_units[number]
            if read.storage in seen.reads:
                units[number] = k
                steps[k] = replace(steps[k], sparse=(read,), read_work=works[name])
    trace = with_times(replace(modelled, steps=tuple(steps), tail_work=tail), PRESET_CPU)
    opens, closes = (tuple(getattr(step, end) for step in observation.steps) for end in ("opens", "closes"))
    return trace, ProbeOrder(modelled.graph, opens, closes, tuple(units))


@declare(requires=("order of reads",), ensures=("inlined storages",))
def tell_inlined(compiled: Compiled) -> Compiled:
    """Marks the storages whose values the compiler copied into the code.

    Raises PassError for a tensor that was copied into the code and had no values, and for a constant that the
    compiler made from weights, to which nothing could be bound.
    """
    payload, programs, bound = compiled.payload, compiled.programs, compiled.bound
    used: set[str] = set()
    for program in programs.values():
        named = {node.name for node in placeholders_of(program.graph) if node.users}
        specs = (spec for spec in program.graph_signature.input_specs if spec.arg.name in named)
        used.update(str(spec.target) for spec in specs if spec.kind is not InputKind.USER_INPUT)
    for name in sorted(bound - {weight.fqn for weight in payload.tensors}):
        raise PassError(
            f"the compiler made a constant {name!r} of its own from the program's weights: "
            "clone small views of large weights in the model"
        )
    entered = {w.parts[0].storage for w in payload.tensors if w.fqn in bound}
    storages = list(payload.storages)
    for weight in payload.tensors:
        s = weight.parts[0].storage
        if weight.fqn in bound or weight.fqn not in used or not storages[s].nbytes:
            continue
        if prod(weight.parts[0].shape) > INLINED:
            continue  # no step reads this weight
        _check_values(weight, programs)
        if s not in entered and storages[s].kind != "mutable":
            storages[s] = replace(storages[s], kind="inlined")
    return replace(compiled, payload=replace(payload, storages=tuple(storages)))


PASSES: tuple[Callable[[Compiled], Compiled], ...] = (tell_small, compile_methods, observe_code, tell_inlined)
"""The passes of `lower`."""


def _check_values(weight: Weight, programs: Mapping[str, ExportedProgram]) -> None:
    for program in programs.values():
        value = {**program.state_dict, **program.constants}.get(weight.fqn)
        if isinstance(value, torch.Tensor) and not has_values(value):
            raise PassError(
                f"the compiler copied weight {weight.fqn!r} into the code, but it has no values: give this "
                "tensor real ones before compiling"
            )


def _fqn_among(streamed: Mapping[str, int]) -> Callable[[fx.Node], str | None]:
    def fqn(node: fx.Node) -> str | None:
        return str(node.target) if node.op == "get_attr" and node.target in streamed else None

    return fqn


def own_passes(options: Mapping[str, Any]) -> tuple[GraphPass, ...]:
    """Returns the user's own passes at the place where probes are inserted, by these options or torch's."""
    from torch._inductor import config

    passes_given = options.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    return (
        tuple(passes_given)
        if isinstance(passes_given, list | tuple)
        else (passes_given,)
        if passes_given
        else ()
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raises PassError for options of Inductor, or settings of torch, that defeat streaming."""
    from torch._inductor import config

    for name in options:
        if not hasattr(_nested(config, name), name.rpartition(".")[2]):
            raise PassError(f"Inductor has no option {name!r}: see torch._inductor.list_options()")
    for name, reason in _DEFEATS_STREAMING.items():
        default = False if name in FIXED else getattr(_nested(config, name), name.rpartition(".")[2], False)
        if options.get(name, default):
            raise PassError(f"the option {name!r} {reason}, so that nothing is left to stream: turn it off")


def _nested(config: Any, name: str) -> Any:
    for part in name.split(".")[:-1]:
        config = getattr(config, part, None)
    return config


def raise_own(error: BaseException) -> None:
    """Raises the PenstockError that torch has wrapped into another error, if there is one."""
    for cause in _causes(error):
        if isinstance(cause, PenstockError):
            raise cause from None


def _causes(error: BaseException) -> Sequence[BaseException]:
    errors: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        candidate = waiting.pop()
        if candidate is not None and candidate not in errors:
            errors.append(candidate)
            waiting += [
                candidate.__cause__,
                candidate.__context__,
                getattr(candidate, "inner_exception", None),
            ]
    return errors
