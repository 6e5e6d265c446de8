"""`apply` and `load`: a model or a pipeline whose own Python runs, and whose weights stream under one cap."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from torch import nn

from penstock.integrations.adapters import by_adapter, state_of_adapters
from penstock.integrations.called.component import CalledModule
from penstock.integrations.called.facts import make_facts
from penstock.integrations.called.measuring import buffer_bytes
from penstock.integrations.called.plans import Residency
from penstock.integrations.cap import ANY_TOTAL, Cap, asked_memory
from penstock.integrations.context import context_that_fits
from penstock.integrations.emptied.hollow import ADAPTED, Hollow, parameters_with_views, uninterrupted
from penstock.integrations.folders import Stored, asked_dtype, open_folder
from penstock.integrations.kept import KeptWeights
from penstock.integrations.libraries import (
    add_generation_config,
    closing,
    components_of,
    entries_of,
    owner_of,
)
from penstock.integrations.own_files import keep_weights
from penstock.integrations.saved import save_model, write_folder
from penstock.integrations.training.adapting import Adapting
from penstock.integrations.training.module import TrainedModule, TrainedParameters
from penstock.integrations.weight_files import store, stored_tensors
from penstock.passes.building.refusals import refuse_scripted
from penstock.runtime.cache import Cache
from penstock.runtime.device.opening import target_device
from penstock.runtime.options import LoadOptions, LoadRequest
from penstock.runtime.system.announcing import announced
from penstock.runtime.system.memory import give_back_unused
from penstock.schedule.facts.errors import BudgetError, PassError, PenstockError, StreamError
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size, seconds_since

_log = logging.getLogger(__name__)

_RESTORE = "call the model itself, or restore it first (restore() of what apply returned)"
_LOAD = "call the model itself, or load it with its library instead, as it was never in memory"

_MOVING = ("AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook", "LayerwiseCastingHook", "SequentialHook")
"""Hooks of accelerate that bring and take away the weights of a module."""

_MOVING_OF_DIFFUSERS = ("layerwise_casting", "group_offloading", "lazy_prefetch_group_offloading")
"""Hooks of diffusers that convert weights before each call and back after it, or move them."""


class Applied:
    """A model or a pipeline whose components stream: what `apply` returns, and `load` keeps.

    The end of a `with` statement restores the model, unless it is one of `load`, which was never in memory.

    Example:
        >>> applied = penstock.integrations.apply(torch.nn.Linear(64, 64), memory="64MiB", cache="cache")
        >>> applied.freed_bytes, applied.memory
        (16640, 67108864)
        >>> applied.restore()
        >>> applied.freed_bytes
        0
    """

    def __init__(
        self,
        target: Any,
        memory: int | str | None,
        device: str | torch.device,
        cache: str | PathLike[str] | None,
        options: LoadOptions | None,
        *,
        restores: bool,
        train: bool,
        verbose: bool,
    ) -> None:
        device = str(device)
        target_device(device)  # raises StreamError for one that is not here
        if train and device != "cpu":
            raise PassError(f"train=True computes on a CPU: leave device={device!r} out")
        most = ANY_TOTAL if memory is None else parse_size(memory, total=ANY_TOTAL, name="memory")
        self.target = target
        self.cap = Cap(most, counts_own=device == "cpu")  # until the weights are known: `settle`
        self.cap.verbose = verbose
        self.cache = Cache.at(cache)
        self.components: dict[str, CalledModule] = {}
        self._options, self._restores = LoadRequest.of(options, device=device), restores
        self._hollow: dict[str, Hollow] = {}
        self._training: list[nn.Module] = []  # modules that were in training mode
        self._trained_bytes = 0  # of trained parameters and what comes with them

    def __repr__(self) -> str:
        state = f"streamed within {format_budget(self.cap.nbytes)} on {self._options.device}"
        return f"Applied({type(self.target).__name__}, {state if self._hollow else 'restored'})"

    @property
    def freed_bytes(self) -> int:
        """Bytes of weights that are no longer in memory."""
        return sum(hollow.nbytes for hollow in self._hollow.values())

    @property
    def memory(self) -> int:
        """Bytes that weights and calls may take together. Set it between calls: `applied.memory = "6GB"`.

        It takes what `memory=` of `apply` takes. Raises BudgetError for what is no size, or too little.
        """
        return self.cap.nbytes

    @memory.setter
    def memory(self, memory: int | str | None) -> None:
        with self._between_calls("memory is set"):
            self.idle()
            self.settle(memory)

    def settle(self, memory: int | str | None) -> None:
        """Set the cap, once the weights are known and out of memory. Raises BudgetError."""
        total = sum(component.facts.nbytes for component in self.components.values())
        nbytes = asked_memory(memory, total, self._options.device)
        self._refuse_trained(nbytes)
        self.cap.nbytes = nbytes
        for words in self.contexts if self.cap.verbose else ():  # `convert` shows the log, and makes no text
            _log.info("%s", words)

    @property
    def contexts(self) -> list[str]:
        """A sentence for each component that generates text: how long a context fits in its memory."""
        facts = [(part.module, self.cap.room, part.largest_bytes) for part in self.components.values()]
        return [words for fact in facts if (words := context_that_fits(*fact, self.memory))]

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that calls have brought into memory so far, from the disk or the page cache."""
        return self.cap.bytes_read

    def idle(self) -> None:
        """Give the memory of the weights back until the next call, which loads them again."""
        with self._between_calls("idle() is called"):
            for component in self.components.values():
                component.unload()
            give_back_unused()

    close = idle

    @contextmanager
    def _between_calls(self, use: str) -> Iterator[None]:
        """Wait for the end of calls of other threads. Raises StreamError within a call."""
        for component in self.components.values():
            component.refuse_within(use)
        with self.cap.in_use():
            yield

    @property
    def residency(self) -> dict[str, tuple[Residency, ...]]:
        """How the present plan holds each module's weights, by component; empty before the first plan."""
        return {name: component.residency for name, component in self.components.items()}

    def add(
        self,
        name: str,
        module: nn.Module,
        weight_files: Sequence[KeptWeights],
        trained: TrainedParameters | None = None,
        adapting: Adapting | None = None,
    ) -> Any:
        """Let the weights of a module stream, which `weight_files` holds in files, and free their memory.

        Parameters that are `trained` stay in memory, and those of an adapter that `adapting` puts on the
        module. Returns the model that has it, or the module.
        """
        device = self._options.device
        parameters = list(trained.parameters) if trained else []
        if device == "cpu":  # on others, buffers get memory of their own
            parameters += parameters_with_views(module)
        facts = make_facts(module, weight_files, parameters, aligned=device != "cpu")
        sentence = _RESTORE if self._restores else _LOAD
        model: Any = module
        with uninterrupted() if self._restores else nullcontext(), ExitStack() as on_error:
            hollow = Hollow(module, sentence, target_device(device), parameters)

            @on_error.callback
            def refill() -> None:
                if self._restores:
                    hollow.filling(facts, weight_files)()

            if device != "cpu":  # which had these bytes already
                self.cap.reserved += buffer_bytes(module)
            if adapting is not None:
                model, facts = adapting.put_on(module, name, facts)
                trained = TrainedParameters.of(module, name, model)
                self.reserve(trained)
            make: Any = CalledModule
            if trained is not None:
                make = partial(TrainedModule, trained=trained, folder=self.cache.folder)
            self.components[name] = make(
                name,
                module,
                facts,
                weight_files,
                self.cap,
                entries=entries_of(module),
                keep=partial(store, cache=self.cache, made_for=owner_of(name, module)),
                options=self._options,
            )
            self._hollow[name] = hollow
            on_error.pop_all()
        return model

    def reserve(self, trained: TrainedParameters) -> None:
        """Leave memory to trained parameters and what comes with them. Raises BudgetError for too much."""
        self.cap.reserved = self._trained_bytes = trained.nbytes
        self._refuse_trained(self.cap.nbytes)
        _log.info("%s are for trained parameters, their gradients and AdamW", format_size(trained.nbytes))

    def _refuse_trained(self, memory: int) -> None:
        """Raise BudgetError where trained parameters leave nothing of `memory`."""
        nbytes = self._trained_bytes
        if nbytes >= memory:
            raise BudgetError(
                f"trained parameters, their gradients and two moments of AdamW take {format_size(nbytes)} of "
                f"memory={format_budget(memory)}: train fewer, or give more"
            )

    def evaluate(self, module: nn.Module) -> None:
        """Put a module in eval mode until it is restored."""
        self._training += [child for child in module.modules() if child.training]
        module.eval()

    def restore(self) -> None:
        """Give every component its weights and its own methods again.

        Raises:
            StreamError: `load` made the model, which was never in memory.
            SourceError: The weights cannot be read again; everything is still applied.
        """
        with self._between_calls("restore() is called"):
            if not self._restores:
                raise StreamError(
                    "the model was never in memory: load it with its library where it should be"
                )
            facts = {name: component.save_written() for name, component in self.components.items()}
            self.idle()
            fills = [
                hollow.filling(facts[name], self.components[name].kept)
                for name, hollow in self._hollow.items()
            ]
            with uninterrupted():
                written = [component.let_go() for component in self.components.values()]
                for change in (*fills, *written):
                    change()
                for module in self._training:
                    module.training = True
                self._hollow.clear()
                self._training.clear()

    def save_pretrained(self, folder: str | PathLike[str], max_shard_size: int | str = "5GB") -> None:
        """Save a model of transformers as its own `save_pretrained` does, one weight in memory at a time.

        Merged and written weights are saved as they are now. Of an adapted model, the adapter is saved.

        Args:
            folder: A folder that does not exist, or is empty; it gets all files, or nothing if that fails.
            max_shard_size: Bytes of a file of weights at most.

        Raises:
            SourceError: There is something at `folder`, or it cannot be written.
            PassError: The model is of another library, or quantised.
        """
        most = parse_size(max_shard_size, name="max_shard_size")
        model = self.target
        adapted = hasattr(model, "get_base_model") or getattr(model, ADAPTED, False)

        def build(unfinished: Path) -> None:
            if adapted:
                model.save_pretrained(unfinished, state_dict=state_of_adapters(model))
            else:
                save_model(model, unfinished, most)

        with self._between_calls("save_pretrained() is called"):
            write_folder(folder, build)

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.restore()
        except PenstockError as failure:
            if error is None:
                raise
            error.add_note(f"penstock is still applied, as it could not restore the model: {failure}")


def apply(
    model: Any,
    memory: int | str | None = None,
    *,
    device: str | torch.device = "cpu",
    example: Any = None,
    cache: str | PathLike[str] | None = None,
    train: bool = False,
    verbose: bool = False,
    options: LoadOptions | None = None,
) -> Applied:
    """Let a module, a transformers model or a diffusers pipeline run in `memory` bytes, as it is.

    The weights of each component stay in the safetensors files that it was loaded from, where these hold the
    same bytes; others are written to `cache`, equal ones once. Its parameters give their memory back. The
    model's own Python runs: what changes is that weights are in memory while the module that reads them is
    called. The first call of a kind runs one module at a time; later ones stream by a plan.

    Args:
        model: A module, a model of transformers, or a pipeline of diffusers. It is in eval mode until it is
            restored.
        memory: Bytes for weights, activations, inputs and caches together: `"8GB"`, a number, or `"50%"` of
            all weights. On a GPU these are the GPU's. Default: what the system, or a control group, has free
            once the weights are out of memory, less a fifth, and less 64 MiB at least.
        device: Where the model computes: `"cpu"`, `"cuda"`, `"cuda:1"`, another accelerator of torch's, or a
            simulated one (`"sim:rtx4090"`). Its parameters and buffers are on that device until it is
            restored.
        example: Not needed, and ignored: the first call of a kind shows what later ones need.
        cache: The folder for weights that no file of the model holds. Default: `~/.cache/penstock`.
        train: Calls with grad mode on give the parameters of a model that require grad now the gradients of
            the model in memory, bit for bit. These parameters stay in memory, and the model in its mode.
            `memory` counts them four times, with their gradients and two moments of AdamW, and what a forward
            saves for its backward. Gradients of gradients are refused.
        verbose: Print what the log says of this model to stderr; PENSTOCK_LOG=info prints all of the log.
        options: How weights are brought into memory; `activations` is for exported programs alone.

    Returns:
        An object that restores the model, by `restore()` or at the end of a `with` statement.

    Raises:
        PassError: The model cannot stream as it is; the message says why. It is as it was then.
        BudgetError: `memory` is no size, or trained parameters leave nothing of it.
        StreamError: There is no such device.

    Example:
        >>> with penstock.integrations.apply(model, "50MB") as applied:
        ...     model(x).shape, applied.freed_bytes
        (torch.Size([2, 64]), 66560)
    """
    begun, parts = monotonic(), components_of(model)
    if train and not isinstance(model, nn.Module):
        raise PassError(f"train=True takes a model, and this {type(model).__name__} is a pipeline of several")
    for name, module in parts.items():
        refuse_scripted(module, name)
        _refuse_moved(module, name)
    applied = Applied(model, memory, device, cache, options, restores=True, train=train, verbose=verbose)
    with (
        applied.cap.in_use(),
        ExitStack() as on_error,
        announced(f"applying penstock to {type(model).__name__}"),
    ):
        on_error.push(applied)
        for name, module in parts.items():
            _empty(applied, name, module, train=train)
        applied.settle(memory)
        freed = format_size(applied.freed_bytes)
        kind, since = type(model).__name__, seconds_since(begun)
        _log.info("%s is ready after %s: %s of weights given back", kind, since, freed)
        on_error.pop_all()
    return applied


def _empty(applied: Applied, name: str, module: nn.Module, *, train: bool) -> None:
    """Keep the weights of a module in files, and let it stream them."""
    trained = TrainedParameters.of(module, name, applied.target) if train else None
    tensors = stored_tensors(module)
    if trained is None:
        applied.evaluate(module)
    else:
        applied.reserve(trained)
        tensors = trained.without(tensors)
    base, *adapters = by_adapter(module, tensors)
    made_for = owner_of(name, module)
    files = keep_weights(module, base, applied.cache, made_for)
    files += [store(adapter, applied.cache, made_for) for adapter in adapters]
    applied.add(name, module, files, trained)


def load(
    source: str | PathLike[str],
    memory: int | str | None = None,
    *,
    device: str | torch.device = "cpu",
    example: Any = None,
    variant: str | None = None,
    dtype: torch.dtype | str | None = None,
    cache: str | PathLike[str] | None = None,
    train: bool = False,
    adapter: Any = None,
    verbose: bool = False,
    options: LoadOptions | None = None,
    **unknown: Any,
) -> Any:
    """Return a transformers model or a diffusers pipeline of a folder, which runs in `memory` bytes.

    The model is never in memory: its weights are read from its safetensors files, in place, when it is
    called.

    Args:
        source: A folder, or the name of a model in the local cache of the hub; nothing is downloaded.
        memory, device, example, cache, verbose, options: As for `apply`.
        variant: The variant of the weights (`"fp16"`), for components that have it.
        dtype: What `from_pretrained` takes (`torch.bfloat16`, `"bfloat16"`, `"auto"`). Weights that the files
            have in another dtype are converted once, to the same bits, into `cache`.
        train: As for `apply`, for the parameters that `adapter` adds.
        adapter: What is trained: a configuration of peft, the folder of a saved adapter, or a function of the
            model that returns it adapted (`lambda model: get_peft_model(model, config)`). Its first values
            are drawn from torch's generator as it is.
        unknown: Refused; `from_pretrained` takes them.

    Returns:
        The library's own object, in eval mode. Its `penstock_applied` is what `apply` would return. At the
        end of a `with` statement it stops its readers and frees its memory.

    Raises:
        SourceError: The folder holds no model, or a file of it cannot be read.
        PassError: `train` and `adapter` are not given together; or as for `apply`.
        BudgetError, StreamError: As for `apply`.
        TypeError: There is no such option.

    Example:
        What the library can do with its object stays:

            model = load("Qwen/Qwen3-8B", memory="8GB")
            model.generate(**inputs)
    """
    for name in unknown:
        raise TypeError(
            f"penstock.integrations.load has no {name}=: memory=, device= and dtype= say how weights are "
            f"loaded, and what from_pretrained(..., {name}=...) returns is for penstock.integrations.apply"
        )
    adapting = Adapting.asked(adapter, train=train)
    applied = Applied(None, memory, device, cache, options, restores=False, train=train, verbose=verbose)
    opened = open_folder(source, variant, asked_dtype(dtype), train=train)

    def stream(stored: Stored) -> Any:
        module, names = stored.make()
        files = stored.kept(module, names, applied.cache)
        return applied.add(stored.name, module, files, adapting=adapting)

    with applied.cap.in_use(), announced(f"loading {source}"):
        if isinstance(opened, tuple):
            parts, assemble = opened
            streamed = {name: stream(replace(part, name=name)) for name, part in parts.items()}
            applied.target = assemble(streamed)
        else:
            applied.target = stream(opened)
            add_generation_config(next(iter(components_of(applied.target).values())), opened.folder)
        applied.settle(memory)
    applied.target.penstock_applied = applied
    return closing(applied.target)


def _refuse_moved(module: nn.Module, name: str) -> None:
    """Raise PassError if a module is on several devices, or another tool moves or converts its weights."""
    for child in module.modules():
        if hasattr(child, "quantization_scheme"):
            raise PassError(
                f"{name} was quantised with compressed-tensors, whose layers move and unpack their weights: "
                "give its folder to penstock.integrations.load"
            )
        if type(getattr(child, "_hf_hook", None)).__name__ in _MOVING:
            raise PassError(
                f"{name} was wrapped by accelerate: remove its hooks first "
                "(accelerate.hooks.remove_hook_from_module(model, recurse=True)), or load it without "
                "device_map"
            )
        for hook in getattr(getattr(child, "_diffusers_hook", None), "hooks", None) or ():
            if hook in _MOVING_OF_DIFFUSERS:
                raise PassError(
                    f"{name} has a hook of diffusers that moves or converts its weights ({hook}): "
                    "load it without"
                )
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) > 1:
        raise PassError(f"{name} lies on several devices, {', '.join(devices)}: move it to one")
