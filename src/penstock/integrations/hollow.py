"""Gives the memory of a module's parameters back, and takes it again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import nn

from penstock.integrations.absent import AbsentParameter, make_absent
from penstock.passes.fake_export import Built
from penstock.passes.graphs import dtype_name
from penstock.passes.parts import each_part, plain_tensors
from penstock.runtime.atomic import write_artifact
from penstock.runtime.pack import PackEntry, pack, storage_bytes, tensor_chunks
from penstock.schedule.errors import PassError, SourceError, StreamError

WEIGHTS = "weights.safetensors"

_ATTEMPTS = 5
"""Times that a folder is begun where another process writes the same one."""


def stored_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of the module holds, by FQN, tied tensors once. PassError for what has no values."""
    lost = {
        f"{name}.{key}" if name else key
        for name, child in module.named_modules()
        for key in child._non_persistent_buffers_set
    }
    found = _plain(module.named_parameters())
    found |= _plain((name, value) for name, value in module.named_buffers() if name not in lost)
    for name, value in found.items():
        if isinstance(value, AbsentParameter):
            raise PassError(
                "penstock is applied to this module, or to a part of it, already: restore() that first"
            )
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise PassError(
                f"weight {name} is a {type(value).__name__}, which does not say what tensors it is made of: "
                "quantise with torchao, or load the model without quantisation (docs/quantised.md)"
            )
        if value.device.type == "meta" or value.untyped_storage().nbytes() < value.nbytes:
            raise PassError(
                f"weight {name} has no values: load the model first, or give its folder to "
                "penstock.integrations.load"
            )
        if not value.is_contiguous():
            raise PassError(f"weight {name} has strides {list(value.stride())}: make it contiguous first")
    return found


def _plain(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors that hold the bytes: a quantised one's parts are `FQN.PART`."""
    return {name: one for fqn, value in named for name, one in plain_tensors(fqn, value).items()}


def store(tensors: Mapping[str, torch.Tensor], cache: Path) -> Path:
    """The file in `cache` that holds these tensors: one that is there from before, or written now.

    Its folder is named by the sha256 of names, dtypes, shapes and bytes.
    """
    digest = hashlib.sha256()
    for name, value in tensors.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        for chunk in tensor_chunks(_bytes_of(value)):
            digest.update(chunk)
    folder = cache / digest.hexdigest()[:32]

    def write() -> None:
        entries = [_entry(name, value) for name, value in tensors.items()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_artifact(folder, force=False, build=lambda made: _ignore(pack(made / WEIGHTS, entries)))

    if folder.exists():
        _refuse_damaged(folder / WEIGHTS, tensors)
    write_once(folder, write)
    return folder / WEIGHTS


def _refuse_damaged(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise SourceError where a file from before does not hold these tensors any more."""
    try:
        with safe_open(file, framework="pt") as opened:
            whole = opened.keys() and all(
                torch.equal(_bytes_of(opened.get_tensor(name)), _bytes_of(value).cpu())
                for name, value in tensors.items()
            )
    except Exception:
        whole = False
    if tensors and not whole:
        raise SourceError(f"{file} is damaged: delete its folder, and it is written again")


def write_once(folder: Path, write: Callable[[], object]) -> None:
    """Write what is not there. Another process may be at it, and be first: what it wrote is the same."""
    for attempt in range(_ATTEMPTS):
        if folder.exists():
            return
        try:
            write()
        except SourceError:
            if attempt == _ATTEMPTS - 1 and not folder.exists():
                raise


def _ignore(_: object) -> None:
    """What a builder of an artifact returns."""


def _entry(name: str, value: torch.Tensor) -> PackEntry:
    flat = _bytes_of(value)
    return PackEntry(
        name, dtype_name(value.dtype), tuple(value.shape), value.nbytes, lambda: tensor_chunks(flat)
    )


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    start = int(value.storage_offset()) * value.itemsize
    return storage_bytes(value.detach())[start : start + value.nbytes]


def blank_copy(module: nn.Module, device: torch.device) -> Built:
    """The module with fake parameters and buffers on a device; the module itself stays as it is."""
    try:
        return Built.of(module, device)
    except PassError:
        raise
    except Exception as error:
        raise PassError(
            f"the {type(module).__name__} cannot be copied without its values: {error}"
        ) from error


class Hollow:
    """A module whose parameters have shapes, a device and no memory; `nbytes` of it were given back.

    What would touch them says so, where torch itself would end the process.
    """

    def __init__(self, module: nn.Module, sentence: str, device: torch.device) -> None:
        self._trained = {name: value.requires_grad for name, value in module.named_parameters()}
        plain = _plain(module.named_parameters())
        storages: dict[int, list[torch.Tensor]] = {}
        for value in {id(value): value for value in plain.values()}.values():
            storages.setdefault(value.untyped_storage()._cdata, []).append(value)
        self._bytes = {name: value.untyped_storage().nbytes() for name, value in plain.items()}
        firsts = [views[0].untyped_storage() for views in storages.values()]
        self.nbytes = sum(storage.nbytes() for storage in firsts if storage.device.type != "meta")
        with _unchanged_on_error(module, plain.values()):
            empty = {id(old): new for views in storages.values() for old, new in _emptied(views, device)}
            for one in module.modules():
                for key, held in one._parameters.items():
                    if held is not None:
                        one._parameters[key] = _made_of(held, empty).requires_grad_(False)
                for key, buffer in one._buffers.items():
                    one._buffers[key] = None if buffer is None else buffer.to(device)
        self._parameters = dict(module.named_parameters())
        self._plain = _plain(self._parameters.items())
        self._storages = {value.untyped_storage()._cdata for value in self._plain.values()}
        self._undo = [
            make_absent(value, name, sentence)
            for name, value in self._parameters.items()
            if type(value) is nn.Parameter
        ]
        self._undo += [undo for one in module.modules() if one._parameters for undo in _refuse(one, sentence)]

    def fill(self, files: Sequence[Path]) -> None:
        """Give the parameters memory again, with the values in `files`, and take the refusals away.

        Raises SourceError where the files do not have them all: nothing has changed then.
        """
        with ExitStack() as stack:
            try:
                opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
            except Exception as error:
                raise SourceError(
                    f"the weights cannot be read again from {files[0].parent}: {error}"
                ) from error
            where = {name: one for one in opened for name in one.keys()}  # noqa: SIM118
            if lost := sorted(self._plain.keys() - where.keys()):
                raise SourceError(f"{files[0].parent} has no {lost[0]} any more: the model stays as it is")
            with torch._C.DisableTorchFunctionSubclass():
                for name, value in self._plain.items():
                    self._fill(name, value, where[name].get_tensor(name))
        for undo in self._undo:
            undo()
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(self._trained[name])

    def _fill(self, name: str, value: torch.Tensor, stored: torch.Tensor) -> None:
        storage = value.untyped_storage()
        if storage._cdata not in self._storages:  # somebody has given it another
            value.data = stored.to(value.device)
            return
        if storage.nbytes() == 0:
            storage.resize_(self._bytes[name])  # views of one storage stay that
        value.data.copy_(stored)


@contextmanager
def _unchanged_on_error(module: nn.Module, plain: Iterable[torch.Tensor]) -> Iterator[None]:
    """What raises leaves the module with the parameters, values and buffers that it had."""
    values = [(value, value.data) for value in plain]
    held = [(one, dict(one._parameters), dict(one._buffers)) for one in module.modules()]
    try:
        yield
    except BaseException:
        for value, data in values:
            value.data = data
        for one, parameters, buffers in held:
            one._parameters.update(parameters)
            one._buffers.update(buffers)
        raise


def _made_of(parameter: nn.Parameter, empty: Mapping[int, torch.Tensor]) -> Any:
    """The parameter itself where its tensors are, else one of those in their place."""
    stays = all(empty[id(value)] is value for value in plain_tensors("", parameter).values())
    return parameter if stays else each_part(parameter, lambda value: empty[id(value)])


def _emptied(
    views: Sequence[torch.Tensor], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each tensor of one storage itself without memory, or where it was elsewhere one in its place."""
    storage = torch.empty(views[0].untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    for value in views:
        view = torch.empty(0, dtype=value.dtype, device=device).set_(
            storage.untyped_storage(), value.storage_offset(), tuple(value.shape), value.stride()
        )
        if value.device == view.device:
            value.requires_grad_(False)
            value.data = view
            yield value, value
        else:
            yield value, nn.Parameter(view, requires_grad=False) if isinstance(value, nn.Parameter) else view
    storage.untyped_storage().resize_(0)


def _refuse(module: nn.Module, sentence: str) -> Iterator[Any]:
    """Make uses of a module that would touch its parameters say why they cannot; yields what undoes it."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StreamError(f"the parameters of this {type(module).__name__} are not in memory: {sentence}")

    yield module.register_state_dict_pre_hook(refuse).remove  # type: ignore[no-untyped-call]
    yield module.register_load_state_dict_pre_hook(refuse).remove  # type: ignore[no-untyped-call]
    if "forward" not in vars(module):
        yield module.register_forward_pre_hook(refuse).remove
    for name in ("__deepcopy__", "__reduce_ex__", "_apply"):
        yield _replace(module, name, refuse)


def _replace(module: nn.Module, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of the instance; returns what puts back the one that it had, or none."""
    had, before = name in vars(module), vars(module).get(name)
    module.__dict__[name] = value

    def undo() -> None:
        module.__dict__.pop(name, None)
        if had:
            module.__dict__[name] = before

    return undo
