"""Free the memory of a module's parameters, and fill it again."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.integrations.adapters import state_of_adapters
from penstock.integrations.called.facts import ModuleFacts, joined, registered_weights
from penstock.integrations.called.measuring import OwnMemory
from penstock.integrations.emptied.absent import (
    SAVE_INSTEAD,
    AbsentTensor,
    empty_storage,
    has_memory,
    make_absent,
)
from penstock.integrations.kept import KeptWeights, digest_of
from penstock.passes.weights.lifted import storage_bytes, tensor_in
from penstock.passes.weights.subclasses import each_part, plain_tensors
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.facts.sizes import format_size


def plain_parts(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors that hold the bytes, by name; parts of a quantised weight are called `FQN.PART`."""
    return {name: plain for fqn, value in named for name, plain in plain_tensors(fqn, value).items()}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, which only the main thread gets, wait until the body is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *signalled: pending.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if pending and callable(before):
            before(*pending[0])


def parameters_with_views(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of whose memory a buffer or an attribute of a module has a view.

    Apart from the view, which keeps that memory, they would not see what a forward writes to it.
    """
    weights = {id(value): value for _, _, _, value in registered_weights(module)}
    views = [
        value.untyped_storage()._cdata
        for child in module.modules()
        for value in (*child._buffers.values(), *vars(child).values())
        if id(value) not in weights and has_memory(value)
    ]
    return [
        value
        for value in weights.values()
        if isinstance(value, nn.Parameter)
        and any(part.untyped_storage()._cdata in views for part in plain_tensors("", value).values())
    ]


class _Emptied(NamedTuple):
    """An absent tensor: its former device and storage, and what gives it values again."""

    device: torch.device
    storage: int
    nbytes: int  # of the storage
    is_inference: bool
    give: Callable[[torch.Tensor], None]


class Hollow:
    """A module whose parameters have no memory; uses that would need it raise StreamError.

    Memory that a parameter shares with a buffer stays, as the memory of all buffers does. Parameters among
    `trained` stay too, by whose names the module can be saved and loaded then.
    """

    def __init__(
        self, module: nn.Module, sentence: str, device: torch.device, trained: Collection[nn.Parameter] = ()
    ) -> None:
        stays = {id(parameter) for parameter in trained}
        weights = [(joined(path, key), value) for path, _, key, value in registered_weights(module)]
        plain = plain_parts((fqn, value) for fqn, value in weights if id(value) not in stays)
        emptied = {id(value) for value in plain.values()}
        staying = plain_parts(
            [*module.named_buffers(), *((fqn, value) for fqn, value in weights if id(value) in stays)]
        )
        stay = [value for value in staying.values() if id(value) not in emptied]
        self._shared = {value.untyped_storage()._cdata: storage_bytes(value) for value in stay}
        self._absent: dict[str, _Emptied] = {}
        self._undo = ExitStack()
        empty: dict[int, torch.UntypedStorage] = {}
        with ExitStack() as on_error:
            on_error.callback(self._undo.close)
            for name, value in plain.items():
                if isinstance(value, AbsentTensor):  # seen before under another name
                    continue
                data = value.data
                if (number := data.untyped_storage()._cdata) not in empty:
                    empty[number] = empty_storage(device)
                facts = data.device, number, data.untyped_storage().nbytes(), value.is_inference()
                give = make_absent(value, name, sentence, empty[number])
                self._absent[name] = _Emptied(*facts, give)
                on_error.callback(give, data)
            self._put_on(device, module, sentence)
            describe, freed = module.extra_repr, format_size(sum(tensor.nbytes for tensor in self._freed))
            streamed = f"{freed} of parameters streamed by penstock"
            self._replace(module, "extra_repr", lambda: ", ".join(filter(None, (describe(), streamed))))
            for path, child in module.named_modules():
                weights_go = any(id(value) not in stays for value in child._parameters.values())
                if weights_go or (child is module and plain):
                    self._refuse_uses(child, path, sentence)
            on_error.pop_all()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that were given back."""
        return sum(tensor.nbytes for tensor in self._freed if tensor.device.type != "meta")

    @property
    def _freed(self) -> Iterable[_Emptied]:
        """A parameter for each storage that has no memory any more."""
        return {
            absent.storage: absent for absent in self._absent.values() if absent.storage not in self._shared
        }.values()

    def filling(self, facts: ModuleFacts, weight_files: Iterable[KeptWeights]) -> Callable[[], None]:
        """Read the values of the parameters; returns a function that gives them to the parameters.

        It takes the refusals away too. Raises SourceError where a value cannot be read, or is not what it was
        in memory; nothing has changed then.
        """
        digests = {name: digest for weights in weight_files for name, digest in weights.digests.items()}
        values = self._values(facts) if self._absent else {}
        for name, absent in self._absent.items():
            if absent.storage not in self._shared and digest_of(values[name]) != digests[name]:
                raise SourceError(
                    f"the file of weight {name} has other bytes than there were in memory: put it back as it "
                    "was; until then the model stays as it is"
                )

        def fill() -> None:
            for name, absent in self._absent.items():
                absent.give(values[name])
            self._absent.clear()
            self._undo.close()

        return fill

    def _values(self, facts: ModuleFacts) -> dict[str, torch.Tensor]:
        own_memory, memory = OwnMemory(facts, torch.device("cpu")), dict(self._shared)
        values: dict[str, torch.Tensor] = {}
        for name, absent in self._absent.items():
            part = facts.parts[name]
            if absent.storage not in memory:
                memory[absent.storage] = own_memory.read([part.storage])[part.storage].to(absent.device)
            with torch.inference_mode(absent.is_inference):
                values[name] = tensor_in(memory[absent.storage], part)
        own_memory.close()
        return values

    def _put_on(self, device: torch.device, module: nn.Module, sentence: str) -> None:
        """Replace quantised parameters and buffers that are on another device by ones on `device`."""
        names = {id(value): name for name, value in module.named_parameters()}
        moved: dict[int, Any] = {}
        for child in module.modules():
            for key, value in child._parameters.items():
                if value is not None and value.device != device:
                    if id(value) not in moved:
                        moved[id(value)] = _absent_copy(value, names[id(value)], sentence, device)
                    self._undo.callback(child._parameters.__setitem__, key, value)
                    child._parameters[key] = moved[id(value)]
            for key, buffer in child._buffers.items():
                if buffer is not None and buffer.device != device:
                    if id(buffer) not in moved:
                        moved[id(buffer)] = buffer.to(device)
                        self._undo.callback(buffer.copy_, moved[id(buffer)])
                    self._undo.callback(child._buffers.__setitem__, key, buffer)
                    child._buffers[key] = moved[id(buffer)]

    def _replace(self, module: nn.Module, name: str, value: object) -> None:
        self._undo.callback(replace_attribute(module, name, value))

    def _refuse_uses(self, module: nn.Module, path: str, sentence: str) -> None:
        """Let uses of a module that need all of its parameters raise StreamError meanwhile."""
        kind = type(module).__name__
        who = f"{path} ({kind})" if path else f"the {kind}"

        def refuse(done: str, instead: str = sentence) -> Callable[..., NoReturn]:
            def refused(*_: Any, **__: Any) -> NoReturn:
                raise StreamError(f"{who} cannot be {done}, as its parameters are not in memory: {instead}")

            return refused

        self._replace(module, "_save_to_state_dict", partial(save_present, module))
        if not path:
            self._replace(module, "__deepcopy__", refuse("copied"))
        self._replace(module, "__reduce_ex__", partial(reduce_part, module))
        self._replace(module, "_apply", _unless_done(module, refuse("moved or converted")))
        for method, done in _SAVING.items():
            if hasattr(module, method):
                refused = refuse(done, SAVE_INSTEAD)
                self._replace(module, method, _unless_adapted(module, getattr(module, method), refused))


def _absent_copy(parameter: nn.Parameter, name: str, sentence: str, device: torch.device) -> torch.Tensor:
    """Return a quantised parameter on a device, like the given one, whose parts are absent."""
    copied = each_part(
        parameter,
        lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device),
    )
    for part, value in plain_tensors(name, copied).items():
        make_absent(value, part, sentence, empty_storage(device))
    return copied


_SAVING = {"save_pretrained": "saved", "push_to_hub": "pushed to the hub"}
"""Methods that would change the configuration, or ask the network, before they fail."""

ADAPTED = "_hf_peft_config_loaded"
"""Set on models of transformers whose `save_pretrained` saves their adapters only."""

REPLACED = "penstock_replaced"
"""The attribute of a module that has what stood in place of its replaced attributes, by name."""


def _unless_adapted(
    module: nn.Module, save: Callable[..., Any], refused: Callable[..., NoReturn]
) -> Callable[..., Any]:
    """Return what saves a module if it has adapters, which are all that is saved then."""

    def saved(*args: Any, **kwargs: Any) -> Any:
        if not getattr(module, ADAPTED, False):
            refused()
        return save(*args, **{"state_dict": state_of_adapters(module), **kwargs})

    return saved


def copy_part(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a part of a model whose weights stream, with its weights in memory."""
    # In a cycle the part comes here again, and needs the same object.
    return copy.deepcopy(memo.setdefault(-id(module), _unchanged(module)), memo)


def reduce_part(module: nn.Module, protocol: Any) -> Any:
    """Return what `copy.copy` makes a module of that shares its parameters; pickle refuses absent ones."""
    return _unchanged(module).__reduce_ex__(protocol)


def _unchanged(module: nn.Module) -> nn.Module:
    """Return a module with the attributes that this one has without penstock."""
    unchanged = module.__class__.__new__(module.__class__)
    state = vars(module) | vars(module)[REPLACED]
    vars(unchanged).update({n: v for n, v in state.items() if v is not _MISSING and n != REPLACED})
    return unchanged


_MISSING = object()


def save_present(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """As `nn.Module._save_to_state_dict`, with absent parameters as they are: who reads them learns of it."""
    lost = module._non_persistent_buffers_set
    saved = {**module._parameters, **{n: value for n, value in module._buffers.items() if n not in lost}}
    for name, value in saved.items():
        if value is not None:
            as_it_is = keep_vars or isinstance(value, AbsentTensor)
            destination[prefix + name] = value if as_it_is else value.detach()


def _unless_done(module: nn.Module, refused: Callable[[], NoReturn]) -> Callable[..., nn.Module]:
    """A module's `_apply` that is refused unless it would leave all devices and dtypes as they are."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        tensors = plain_parts([*module.named_parameters(), *module.named_buffers()]).values()
        return module if all(_stays(value, function) for value in tensors) else refused()

    return apply


def _stays(value: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Tell whether a function returns the very tensor that it is given, found out with a fake one."""
    with FakeTensorMode(), suppress(Exception):
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return function(like) is like
    return False


def replace_attribute(module: nn.Module, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of the instance; returns a function that undoes it."""
    before = vars(module).get(name, _MISSING)
    replaced = module.__dict__.setdefault(REPLACED, {})
    replaced.setdefault(name, before)
    module.__dict__[name] = value

    def undo() -> None:
        if replaced.get(name) is before:
            del replaced[name]
        if not replaced:
            module.__dict__.pop(REPLACED, None)
        if vars(module).get(name) is value:
            del module.__dict__[name]
            if before is not _MISSING:
                module.__dict__[name] = before

    return undo
