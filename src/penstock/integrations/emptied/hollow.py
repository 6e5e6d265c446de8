"""Frees the memory of a module's parameters, and fills it again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.integrations.called.facts import joined, registered_weights
from penstock.integrations.emptied.absent import AbsentTensor, Emptied, make_absent
from penstock.integrations.kept import KeptWeights, digest_of, names_of
from penstock.passes.weights.subclasses import each_part, plain_tensors
from penstock.runtime.checkpoint.binding import tensor_names
from penstock.runtime.files.tensor_file import TensorFile, open_tensors
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.facts.sizes import format_size


def plain_parts(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors that hold the bytes, by name; the parts of a quantised weight are named `FQN.PART`."""
    return {name: one for fqn, value in named for name, one in plain_tensors(fqn, value).items()}


class Hollow:
    """A module whose parameters have no memory; uses that would need it raise StreamError.

    Memory that a parameter shares with a buffer stays, as the memory of all buffers does. Parameters among
    `trained` stay too, by whose names the module can be saved and loaded then.
    """

    def __init__(
        self,
        module: nn.Module,
        sentence: str,
        device: torch.device,
        trained: Collection[nn.Parameter] = (),
    ) -> None:
        kept = {id(one) for one in trained}
        registered = registered_weights(module)
        emptied = [(joined(path, key), one) for path, _, key, one in registered if id(one) not in kept]
        plain = plain_parts(emptied)
        parameters = {id(value) for value in plain.values()}
        named = [
            *module.named_buffers(),
            *((name, one) for name, one in module.named_parameters() if id(one) in kept),
        ]
        buffers = [one for one in plain_parts(named).values() if id(one) not in parameters]
        self._shared = {one.untyped_storage()._cdata: one.untyped_storage() for one in buffers}
        self._absent: dict[str, Emptied] = {}
        self._undo = ExitStack()
        empty: dict[int, torch.UntypedStorage] = {}
        with ExitStack() as on_error:
            on_error.callback(self._undo.close)
            for name, value in plain.items():
                if isinstance(value, AbsentTensor):  # seen before under another name
                    continue
                data = value.data
                if (storage := data.untyped_storage()._cdata) not in empty:
                    empty[storage] = torch.empty(0, device=device).untyped_storage()
                self._absent[name] = one = Emptied.made_of(value, name, sentence, empty[storage])
                on_error.callback(one.give, data)
            self._put_on(device, module, sentence)
            own = module.extra_repr
            self._undo.callback(
                replace_attribute(
                    module, "extra_repr", lambda: ", ".join(filter(None, (own(), self.description)))
                )
            )
            for path, one in module.named_modules():
                if any(id(held) not in kept for held in one._parameters.values()) or (
                    one is module and plain
                ):
                    _refuse_uses(one, path, sentence, self._undo)
            on_error.pop_all()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that were given back."""
        return sum(one.nbytes for one in self._storages if one.device.type != "meta")

    @property
    def description(self) -> str:
        """What `print` says of the module beside its own facts."""
        return f"{format_size(sum(one.nbytes for one in self._storages))} of parameters streamed by penstock"

    @property
    def _storages(self) -> Iterable[Emptied]:
        """A parameter for each storage that has no memory any more."""
        return {one.storage: one for one in self._absent.values() if one.storage not in self._shared}.values()

    def filling(self, kept: Sequence[KeptWeights]) -> Callable[[], None]:
        """Read the values that files keep; returns a function that gives them to the parameters.

        It takes the refusals away too. Raises SourceError where a value is missing, or is not what it was in
        memory; nothing has changed then.
        """
        values = self._values(kept) if self._absent else {}

        def fill() -> None:
            for name, one in self._absent.items():
                one.give(values[name])
            self._absent.clear()
            self._undo.close()

        return fill

    def _values(self, kept: Sequence[KeptWeights]) -> dict[str, torch.Tensor]:
        """The values of the parameters in new memory, tied as they were."""
        memory, values = dict(self._shared), {}
        digests = {name: digest for one in kept for name, digest in one.digests.items()}
        with ExitStack() as stack:
            where = _opened([file for one in kept for file in one.files], stack)
            for name, one in self._absent.items():
                names = tensor_names(name, names_of(kept))
                if lost := [each for each in names if each not in where]:
                    folder = kept[0].files[0].parent
                    raise SourceError(f"{folder} has no {lost[0]} any more: the model stays as it is")
                if one.storage not in memory:
                    memory[one.storage] = one.memory()
                stored = [where[each][1].get_tensor(each) for each in names]
                values[name] = one.filled(memory[one.storage], stored)
                if digest_of(values[name]) != digests[name]:
                    raise SourceError(
                        f"{where[names[0]][0]} has other bytes for weight {name} than there were in memory: "
                        "put the file back as it was; until then the model stays as it is"
                    )
        return values

    def _put_on(self, device: torch.device, module: nn.Module, sentence: str) -> None:
        """Replace quantised parameters and buffers that are on another device by ones on `device`."""
        names = {id(value): name for name, value in module.named_parameters()}
        others: dict[int, Any] = {}
        for one in module.modules():
            for key, held in one._parameters.items():
                if held is not None and held.device != device:
                    if id(held) not in others:
                        others[id(held)] = absent_copy(held, names[id(held)], sentence, device)
                    self._undo.callback(one._parameters.__setitem__, key, held)
                    one._parameters[key] = others[id(held)]
            for key, buffer in one._buffers.items():
                if buffer is not None and buffer.device != device:
                    if id(buffer) not in others:
                        others[id(buffer)] = buffer.to(device)
                        self._undo.callback(buffer.copy_, others[id(buffer)])
                    self._undo.callback(one._buffers.__setitem__, key, buffer)
                    one._buffers[key] = others[id(buffer)]


def _opened(files: Sequence[Path], stack: ExitStack) -> dict[str, tuple[Path, TensorFile]]:
    """For each tensor in files its file, and what reads it while `stack` is open."""
    where: dict[str, tuple[Path, TensorFile]] = {}
    for file in files:
        try:
            opened = stack.enter_context(open_tensors(file))
        except SourceError as error:
            raise SourceError(f"the weights cannot be read again from {file}: {error}") from error
        where |= {name: (file, opened) for name in opened.entries}
    return where


def absent_copy(parameter: nn.Parameter, name: str, sentence: str, device: torch.device) -> torch.Tensor:
    """A quantised parameter on a device, like the given one, whose parts are absent."""
    other = each_part(
        parameter,
        lambda value: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device),
    )
    for part, value in plain_tensors(name, other).items():
        make_absent(value, part, sentence, torch.empty(0, device=device).untyped_storage())
    return other


_SAVING = {"save_pretrained": "saved", "push_to_hub": "pushed to the hub"}
"""Methods that would change the configuration, or ask the network, before they fail."""


_ADAPTED = "_hf_peft_config_loaded"
"""Set on models of transformers whose `save_pretrained` saves their adapters only."""


def _refuse_uses(module: nn.Module, path: str, sentence: str, undo: ExitStack) -> None:
    """Let uses of a module that need all of its parameters raise StreamError, until `undo` is closed."""
    kind = type(module).__name__
    who = f"{path} ({kind})" if path else f"the {kind}"

    def refuse(done: str) -> Callable[..., NoReturn]:
        def refused(*_: Any, **__: Any) -> NoReturn:
            raise StreamError(f"{who} cannot be {done}, as its parameters are not in memory: {sentence}")

        return refused

    # What is loaded is written to the weights, as anything else between calls.
    undo.callback(replace_attribute(module, "_save_to_state_dict", partial(save_present, module)))
    if not path:
        undo.callback(replace_attribute(module, "__deepcopy__", refuse("copied")))
    undo.callback(replace_attribute(module, "__reduce_ex__", refuse("pickled")))
    undo.callback(replace_attribute(module, "_apply", _unless_done(module, refuse("moved or converted"))))
    for method, done in _SAVING.items():
        if hasattr(module, method):
            saved = _unless_adapted(module, getattr(module, method), refuse(done))
            undo.callback(replace_attribute(module, method, saved))


_REPLACED = "penstock_replaced"
"""The attribute of a module that has what stood in place of its replaced attributes, by name."""


def _unless_adapted(
    module: nn.Module, save: Callable[..., Any], refused: Callable[..., NoReturn]
) -> Callable[..., Any]:
    """Return what saves a module if it has adapters, which are all that is saved then."""

    def saved(*args: Any, **kwargs: Any) -> Any:
        return (save if getattr(module, _ADAPTED, False) else refused)(*args, **kwargs)

    return saved


def copy_part(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a part of a model whose weights stream, with its weights in memory."""
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    state = {**vars(module), **vars(module)[_REPLACED]}
    state = {name: value for name, value in state.items() if value is not _MISSING and name != _REPLACED}
    made.__dict__.update(copy.deepcopy(state, memo))
    return made


_MISSING = object()


def save_present(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """As `nn.Module._save_to_state_dict`, with absent parameters as they are: who reads them learns of it."""
    lost = module._non_persistent_buffers_set
    held = {**module._parameters, **{n: one for n, one in module._buffers.items() if n not in lost}}
    for name, value in held.items():
        if value is not None:
            whole = keep_vars or isinstance(value, AbsentTensor)
            destination[prefix + name] = value if whole else value.detach()


def _unless_done(module: nn.Module, refused: Callable[[], NoReturn]) -> Callable[..., nn.Module]:
    """A module's `_apply` that is refused unless it would leave all devices and dtypes as they are."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        held = plain_parts([*module.named_parameters(), *module.named_buffers()]).values()
        return module if all(_is_kept(one, function) for one in held) else refused()

    return apply


def _is_kept(value: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a function returns the very tensor that it is given, found out with a fake one."""
    with FakeTensorMode(), suppress(Exception):
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return function(like) is like
    return False


def replace_attribute(module: nn.Module, name: str, value: object) -> Callable[[], None]:
    """Set an attribute of the instance; returns a function that undoes it."""
    before = vars(module).get(name, _MISSING)
    replaced = module.__dict__.setdefault(_REPLACED, {})
    replaced.setdefault(name, before)
    module.__dict__[name] = value

    def undo() -> None:
        if replaced.get(name) is before:
            del replaced[name]
        if not replaced:
            module.__dict__.pop(_REPLACED, None)
        if vars(module).get(name) is value:
            del module.__dict__[name]
            if before is not _MISSING:
                module.__dict__[name] = before

    return undo
