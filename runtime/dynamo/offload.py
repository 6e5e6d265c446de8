"""Takes a module's parameters out of memory; the parameters that replace them have a shape, but no memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from penstock.passes.building.module_state import ModuleState
from penstock.passes.building.refusals import refuse_scripted
from penstock.passes.lowering.targets import check_generator
from penstock.passes.weights.values import part_of, storage_bytes, storage_identity, tensor_in
from penstock.runtime.checkpoint.binding import Found, Rename, Rules, find_values
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.device.accelerator import find_accelerator, out_of_memory
from penstock.runtime.device.opening import ACCELERATOR, device_kind
from penstock.runtime.files.safetensors_file import index_files, own_place
from penstock.runtime.files.stamp import stamp_file
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from penstock.schedule.facts.model import Storage, Weight, WeightFile
from penstock.schedule.facts.sizes import format_size

T = TypeVar("T")

_log = logging.getLogger(__name__)

HOME = "penstock_home"
"""The attribute of an offloaded parameter with its Home: the record of its module, and its FQN."""


@dataclass(frozen=True)
class Offloaded:
    """The parameters of a module that are now in files only, which gave `nbytes` of memory back.

    They are streamed to `device`. `sessions` has what streams them, once the module has been compiled.
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
        """Stop the readers and give the arena's memory back; a later call takes them again."""
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
    """Replace a module's parameters by ones without memory, whose bytes lie in safetensors files.

    `checkpoint` is a file, an index, a folder or a list of files, which are used in place and must hold the
    values that the module has (parameters on the meta device have none, and take the files'). `rename`
    maps an FQN to a tensor's name. Buffers stay, and so do recurrent layers, which Dynamo leaves to
    Python. Run the module through `torch.compile(module, backend="penstock", options={"budget": ...})`.
    The bytes that were given back are logged. On a `device` other than the CPU, such as `cuda`, buffers and
    recurrent layers go there, and weights as they are needed.

    Raises SourceError for files that are not the module's, PassError for parameters that cannot leave
    memory, or for a device that Inductor does not compile for; StreamError where there is no such device, or
    where it has no memory for what goes there. The module is then as it was, and the device too.
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
    staying = (
        {} if where.type == "cpu" else {f"buffer {name!r}": buffer for name, buffer in module.named_buffers()}
    )
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
