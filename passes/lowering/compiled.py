"""Methods that Inductor compiled: loaded from an artifact, bound to weights in memory, and called."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad

from penstock.passes.calls.inputs import failed_check
from penstock.passes.calls.signature import CallingConvention, CallSignature
from penstock.passes.lowering.archive import OTHERS, PACKAGE, check_ranks, open_programs, read_code
from penstock.passes.lowering.eager import checked_weight
from penstock.passes.weights.lifted import same_bytes
from penstock.schedule.facts.errors import TRUST, PayloadError, StreamError
from penstock.schedule.facts.model import IN_ARENA, Method
from penstock.schedule.payload.codec import Payload

_INSTRUCTIONS = {"AVX512_VNNI": "_is_vnni_supported", "AMX_TILE": "_is_amx_tile_supported"}
_LEVELS = {"DEFAULT": 0, "AVX2": 1, "AVX512": 2}


@dataclass(frozen=True)
class LoadedPackage:
    """The code in an artifact: the runner of each method, its call signature, and its graph's bodies."""

    payload: Payload
    runners: Mapping[str, Any]
    signatures: Mapping[str, CallSignature]
    bodies: Mapping[str, Mapping[str, fx.GraphModule]]


def device_of(payload: Payload) -> str:
    """Returns the type of the device that a payload's code was compiled for, such as `cpu` or `cuda`."""
    machine = payload.program.machine if payload.program else ""
    return machine.partition(" ")[0] or "cpu"


def load(folder: Path, payload: Payload, *, trust: bool, index: int = -1) -> LoadedPackage:
    """Reads the file that `inductor.save` wrote. It is machine code, and is loaded with `trust` only.

    `index` is that of the device among those of its type, and -1 for the current one.

    Raises SourceError if the file cannot be read. Raises PayloadError without trust, and if it is not the
    payload's, or was compiled by another version of torch, or for a processor with instructions that this one
    lacks, or for another kind of GPU. It is not the payload's if a weight that streams stands in the code and
    in no step of the trace.
    """
    if not trust:
        raise PayloadError(
            f"{folder} holds machine code (lowering 'inductor'), which runs with your rights: {TRUST}, or "
            "compile the model with lowering='eager'"
        )
    _check_machine(payload, index)
    check_ranks(folder, payload)
    with open_programs(folder, payload) as archive, tempfile.TemporaryDirectory() as temporary:
        package = archive.extract(PACKAGE, temporary)
        codes = {m.name: read_code(archive, m.name, trust=trust) for m in payload.methods}
        load_runner = torch._C._aoti.AOTIModelPackageLoader
        runners = {m.name: load_runner(package, m.name, False, 1, index) for m in payload.methods}
    for method in payload.methods:
        _check_brought(payload, method, runners[method.name].get_constant_fqns())
    signatures = {name: code.signature for name, code in codes.items()}
    computed = {t.method for t in payload.traces for s in t.steps if any(read.computed for read in s.sparse)}
    bodies = {name: code.graph().bodies if name in computed else {} for name, code in codes.items()}
    return LoadedPackage(payload, runners, signatures, bodies)


class CompiledMethod:
    """A compiled method with its weights, called on leaves that `convention.flatten` has checked.

    It holds the weights' tensors, and the runner that reads them, until `close`.
    """

    def __init__(
        self,
        package: LoadedPackage,
        tensors: Mapping[str, torch.Tensor],
        method: Method,
        device: torch.device,
    ) -> None:
        self._signature = package.signatures[method.name]
        self.convention = CallingConvention(self._signature, device)
        self._runner = package.runners[method.name]
        weights = {weight.fqn: weight for weight in package.payload.tensors}
        names = self._runner.get_constant_fqns()
        self._tensors = {name: checked_weight(weights, name, tensors) for name in names}
        # The runner reads these tensors where they are, without a copy, and takes no reference to them.
        self._runner.load_constants(self._tensors, False, True, True)

    def run(self, leaves: list[Any]) -> Any:
        """Runs on checked leaves, and returns the result in the caller's structure."""
        if self._runner is None:
            raise StreamError("the module is closed: load the program again")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        unpack: Any = forward_ad.unpack_dual
        if any(unpack(leaf).tangent is not None for leaf in tensors):
            raise StreamError(
                "an input has a tangent, and compiled code computes none: call the module outside of "
                "torch.autograd.forward_ad.dual_level(), or compile the program with lowering='eager'"
            )
        for name, leaf in zip(self.convention.names, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.numel() and not _has_memory(leaf):
                raise StreamError(
                    f"input {name}: expected a dense tensor with memory of its own, got {_described(leaf)}: "
                    "pass a dense one, which compiled code can read, or compile with lowering='eager'"
                )
        dense = [leaf.contiguous() for leaf in tensors]  # compiled code takes contiguous tensors only
        try:
            values = iter(self._runner.boxed_run(list(dense)))
        except RuntimeError as error:
            raise _without_dump(error) from None
        for before, after in zip(tensors, dense, strict=True):
            # The program has written this input if its bytes changed; values would not do, as NaN is not NaN.
            if after is not before and not same_bytes(before.contiguous(), after):
                before.copy_(after)
        known = self._signature.constants
        results = [known[k] if k in known else next(values) for k in range(self._signature.results)]
        return self.convention.unflatten_results(results)

    def close(self) -> None:
        """Destroys the runner, before the memory that it reads."""
        self._runner = None
        self._tensors = {}


def _has_memory(leaf: torch.Tensor) -> bool:
    try:
        return bool(leaf.data_ptr())
    except RuntimeError:  # a sparse one
        return False


def _described(leaf: torch.Tensor) -> str:
    if leaf.layout is not torch.strided:
        return f"a tensor of layout {leaf.layout}"
    kind = type(leaf).__name__
    return "one whose memory was freed" if type(leaf) in _OF_TORCH else f"a {kind}, which has none"


_OF_TORCH = (torch.Tensor, torch.nn.Parameter)


def _without_dump(error: RuntimeError) -> Exception:
    """The error that compiled code raised, without the C++ calls that it lists."""
    message, dump, _ = str(error).partition("\nException raised from ")
    if dump or _CALL_FAILED in message or "out of memory" in message:
        return RuntimeError(message)
    return failed_check(message)


_CALL_FAILED = "API call failed at"
"""What AOTInductor says where it does not know more."""


def _check_brought(payload: Payload, method: Method, names: Iterable[str]) -> None:
    """Raises PayloadError for a weight of the code that streams and that no step of the trace reads."""
    storages = {weight.fqn: weight.parts[0].storage for weight in payload.tensors}
    brought = {s for step in payload.trace_for(method.graph).steps for s in step.reads}
    for name in sorted(storages.keys() & set(names)):
        storage = payload.storages[storages[name]]
        if storage.kind in IN_ARENA and storage.nbytes and storages[name] not in brought:
            raise PayloadError(
                f"the code of method {method.name!r} reads {name!r}, and no step of its trace does: {OTHERS}"
            )


def _check_machine(payload: Payload, index: int) -> None:
    here = torch.__version__.split("+", maxsplit=1)[0]
    if payload.torch != here:
        raise PayloadError(
            f"the program was compiled by torch {payload.torch}, and this is torch {here}: compile it again, "
            "or install that version"
        )
    machine = payload.program.machine if payload.program else ""
    if not machine:
        return
    device, system, processor, *instructions = machine.split(" ")
    built_for_here = f"{platform.system().lower()} {platform.machine()}"
    if f"{system} {processor}" != built_for_here:
        raise PayloadError(
            f"the program was compiled for {system} {processor}, and this is {built_for_here}: compile "
            "it here"
        )
    missing = [name for name in instructions if not _has(name)]
    if device == "cpu" and missing:
        raise PayloadError(
            f"the program was compiled for a processor with {' '.join(missing)}, which this one lacks: "
            "compile it here, or there for less (ATEN_CPU_CAPABILITY=avx2)"
        )
    if device == "cuda" and instructions:
        _check_gpu(instructions[-1], index)


def _check_gpu(there: str, index: int) -> None:
    """Raises PayloadError for kernels of another kind of GPU, which would fail when they are called."""
    from torch._dynamo.device_interface import get_interface_for_device

    here = str(get_interface_for_device("cuda").get_compute_capability(None if index < 0 else index))
    if here != there:
        raise PayloadError(
            f"the program was compiled for a GPU of compute capability {there}, and this one has {here}: "
            "compile it here"
        )


def _has(instructions: str) -> bool:
    if instructions in _LEVELS:
        return _LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0) >= _LEVELS[instructions]
    test = getattr(torch.cpu, _INSTRUCTIONS.get(instructions, ""), None)
    return test is not None and bool(test())
