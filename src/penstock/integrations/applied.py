"""`apply` and `load`: a model or a pipeline whose components stream under one cap."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from time import monotonic
from types import TracebackType
from typing import Any

import torch
from torch import nn

from penstock.integrations.adapters import by_adapter
from penstock.integrations.cached import store, stored_tensors
from penstock.integrations.called.component import CalledModule, Residency
from penstock.integrations.called.facts import make_facts
from penstock.integrations.calls.kept_calls import KeptCalls
from penstock.integrations.calls.kinds import method_of
from penstock.integrations.calls.tiny_calls import Example, make_call
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.hollow import Hollow, blank_copy
from penstock.integrations.emptied.uninterrupted import uninterrupted
from penstock.integrations.emptied.watch import Watch
from penstock.integrations.folders import (
    Stored,
    asked_dtype,
    local_folder,
    open_folder,
)
from penstock.integrations.kept import KeptWeights
from penstock.integrations.keys.module import ModuleKey, unless_unknown
from penstock.integrations.libraries import (
    add_generation_config,
    closing,
    components_of,
    entries_of,
    owner_of,
    refuse_exported_hooks,
    refuse_wrapped,
    without_hooks,
)
from penstock.integrations.own_files import keep_weights
from penstock.integrations.progress import seconds_since
from penstock.integrations.streamed import Component, Where
from penstock.integrations.training.adapting import Adapting, under_new_names
from penstock.integrations.training.parameters import Trained
from penstock.passes.building.fake_export import Built
from penstock.runtime.cache import Cache
from penstock.runtime.loading import LoadOptions
from penstock.runtime.system.own_memory import give_back_unused
from penstock.schedule.facts.errors import BudgetError, PassError, PenstockError, StreamError
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size

_log = logging.getLogger(__name__)

_RESTORE = "restore it first (restore() of what apply returned)"
_RESTORE_AND_APPLY = "restore it, and apply penstock to it as it is to be"

_PARTS = "; where the model's own generate does this, apply penstock to the parts that it calls instead"

_LOAD_ELSEWHERE = "load it with its library instead, as it was never in memory"
_LOAD_AND_APPLY = "load it with its library as it is to be, and apply penstock to that"


class Applied:
    """A model or a pipeline whose components stream; returned by `apply`, and kept by what `load` returns.

    As a context manager it restores the model at the end, which only `apply` can: what `load` returns was
    never in memory.
    """

    def __init__(self, target: Any, cap: Cap, where: Where, options: LoadOptions, *, restores: bool) -> None:
        self.target = target
        self.cap = cap
        self._where, self._options = where, options
        self.components: dict[str, CalledModule | Component] = {}
        self._called: dict[str, CalledModule] = {}
        self._exported: dict[str, Component] = {}
        self._restores = restores
        self._instead = f"call the model itself, or {_RESTORE + _PARTS if restores else _LOAD_ELSEWHERE}"
        self._again = _RESTORE_AND_APPLY if restores else _LOAD_AND_APPLY
        self._modules: dict[str, nn.Module] = {}
        self._hollow: dict[str, Hollow] = {}
        self._replaced: list[tuple[nn.Module, str, Any]] = []
        self._trained: list[nn.Module] = []

    def __repr__(self) -> str:
        state = f"streamed within {format_budget(self.cap.nbytes)} on {self._where.device}"
        return f"Applied({type(self.target).__name__}, {state if self._hollow else 'restored'})"

    @property
    def freed_bytes(self) -> int:
        """Bytes of parameters that are no longer in memory."""
        return sum(hollow.nbytes for hollow in self._hollow.values())

    @property
    def memory(self) -> int:
        """Bytes that weights and calls may take together. It may be set between calls: `applied.memory = "6GB"`."""
        return self.cap.nbytes

    @memory.setter
    def memory(self, memory: int | str) -> None:
        nbytes = parse_size(memory, name="memory")
        with self.cap.lock:
            self.idle()
            self.cap.nbytes = nbytes

    def idle(self) -> None:
        """Give the memory of weights back until the next call, which loads them again."""
        with self.cap.lock:
            for component in self.components.values():
                component.unload()
            give_back_unused()

    @property
    def residency(self) -> dict[str, tuple[Residency, ...]]:
        """By component, what the present plan does with the weights of each module; empty before the first plan."""
        return {name: component.residency for name, component in self._called.items()}

    @property
    def trains(self) -> bool:
        """Whether calls with grad mode on have gradients."""
        return self.cap.reserved > 0

    def add(self, name: str, module: nn.Module, kept: Sequence[KeptWeights]) -> None:
        """Let the weights of a module, which `kept` holds in files, stream, and free the memory of its parameters."""
        facts = make_facts(module, kept)
        entries = [entry for entry in entries_of(module) if entry.rpartition(".")[2] != "forward"]
        with uninterrupted():
            self._hollow[name] = Hollow(module, self._instead, self._where.target, called=True)
            self._modules[name] = module
            options = replace(self._options, device=self._where.device)
            self._called[name] = CalledModule(
                name, module, facts, kept, self.cap, entries=entries, options=options
            )
            self.components[name] = self._called[name]

    def add_trained(
        self,
        name: str,
        module: nn.Module,
        blank: Callable[[], Built],
        weights: Sequence[KeptWeights],
        trained: Trained | None = None,
    ) -> None:
        """Let a module be called through a new component of its name, and free the memory of its parameters.

        `blank`, `weights` and `trained` are those of `Component`.
        """
        named = module.named_parameters(remove_duplicate=False)
        with_grad = [fqn for fqn, value in named if value.requires_grad]
        entries = entries_of(module)
        component = Component(
            name,
            functools.partial(_with_grad, blank, with_grad),
            weights,
            self._where,
            self.cap,
            calls=KeptCalls(self._where.cache, self._key(module, entries), name),
            methods={entry: inspect.signature(method_of(module, entry)) for entry in entries},
            made_for=owner_of(name, module),
            with_grad=with_grad,
            trained=trained,
        )
        own = trained.parameters if trained else ()
        self.components[name] = self._exported[name] = component
        self._modules[name] = module
        for entry in entries:
            owner, _, method = entry.rpartition(".")
            part = module.get_submodule(owner)
            call = functools.wraps(getattr(part, method))(functools.partial(component.call, entry))
            self._replaced.append((part, method, vars(part).get(method)))
            not_compiled: Any = torch.compiler.disable  # torch.compile leaves the call as it is
            part.__dict__[method] = not_compiled(call)
        with uninterrupted():
            self._hollow[name] = Hollow(module, self._instead, self._where.target, own)
        component.check = Watch(module, self._again, own).check

    def _key(self, module: nn.Module, entries: Sequence[str]) -> Callable[[], str | None]:
        """Says the key of what is exported of a module; None where nothing can be kept, which is logged."""
        kind = type(module).__name__
        with self.cap.working():
            made = unless_unknown(kind, lambda: ModuleKey(module, entries, self._where.target))
        return lambda: None if made is None else unless_unknown(kind, made.now)

    def reserve(self, nbytes: int) -> None:
        """Leave memory to trained parameters and what comes with them. Raises BudgetError for too much."""
        if nbytes >= self.cap.nbytes:
            raise BudgetError(
                f"trained parameters, their gradients and two moments of AdamW take {format_size(nbytes)} of "
                f"memory={format_budget(self.cap.nbytes)}: train fewer, or give more"
            )
        self.cap.reserved = nbytes
        _log.info("%s are for trained parameters, their gradients and AdamW", format_size(nbytes))

    def evaluate(self, module: nn.Module) -> None:
        """Put a module in eval mode until it is restored."""
        self._trained += [one for one in module.modules() if one.training]
        module.eval()

    def prepare(self, example: Example) -> None:
        """Export, compile and plan now what the calls of an example need, for a model that is trained."""
        try:
            self._rehearse(example)
        except BaseException:
            for component in self._exported.values():
                component.forget_rehearsal()
            raise
        for component in self._exported.values():
            component.prepare()

    def log_ready(self, begun: float) -> None:
        """Log how long it took since `begun`."""
        _log.info("%s is ready after %s", type(self.target).__name__, seconds_since(begun))

    def _rehearse(self, example: Example) -> None:
        with self.cap.lock, ExitStack() as hooks:
            before = self.cap.rehearsing
            for module in self._modules.values():
                hooks.enter_context(without_hooks(module))
            try:
                self.cap.rehearsing = True
                make_call(self.target, example)
            finally:
                self.cap.rehearsing = before

    def close(self) -> None:
        """Stop the readers and free the arena's memory; the next call loads again."""
        with self.cap.lock:
            for component in self.components.values():
                component.unload()

    def restore(self) -> None:
        """Close, and give every component its parameters and its own methods again.

        Raises StreamError for what `load` made, which was never in memory, and SourceError where the weights
        cannot be read again. Everything is still applied then, and where files are missing, what is loaded
        stays loaded.
        """
        with self.cap.lock:
            if not self._restores:
                raise StreamError(
                    "the model was never in memory: load it with its library where it should be"
                )
            self._refuse_lost()
            self.close()
            fills = [hollow.filling(self.components[name].kept) for name, hollow in self._hollow.items()]
            with uninterrupted():
                written = [component.let_go() for component in self._called.values()]
                for fill in fills:
                    fill()
                for values in written:
                    values()
                self._give_back()

    def _give_back(self) -> None:
        """Undo what was done to modules; calls that are waiting for their turn then run the own methods."""
        for part, name, before in self._replaced:
            part.__dict__.pop(name, None)
            if before is not None:
                part.__dict__[name] = before
        for one in self._trained:
            one.training = True
        for name, component in self._exported.items():
            component.own = functools.partial(method_of, self._modules[name])
            component.let_go()
        for held in (self._replaced, self._trained, self._hollow, self._modules):
            held.clear()

    def _refuse_lost(self) -> None:
        for name in self._hollow:
            self.components[name].refuse_lost()

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


def _with_grad(blank: Callable[[], Built], names: Collection[str]) -> Built:
    """A blank copy whose parameters of these names require grad, as a model may ask."""
    made = blank()
    for fqn, value in made.module.named_parameters(remove_duplicate=False):
        value.requires_grad_(fqn in names)
    return made


def _stream(applied: Applied, name: str, module: nn.Module, where: Where, *, train: bool) -> None:
    """Keep the weights of a module in files, and let it stream them."""
    trained = Trained.of(module, name, where.target) if train else None
    held = stored_tensors(module)
    if trained is None:
        applied.evaluate(module)
    else:
        applied.reserve(trained.nbytes)
        held = trained.frozen(held)
    own, *adapters = by_adapter(module, held)
    made_for = owner_of(name, module)
    kept = keep_weights(module, own, where.cache, made_for)
    kept += [store(tensors, where.cache, made_for) for tensors in adapters]
    if trained is None:
        applied.add(name, module, kept)
        return
    with applied.cap.working():
        blank = blank_copy(module, where.target)
    trained.take_out(blank.module)
    applied.add_trained(name, module, lambda: blank, kept, trained)


def _stream_adapted(
    applied: Applied, name: str, module: nn.Module, kept: Sequence[KeptWeights], adapting: Adapting
) -> Any:
    """Let a module that is not in memory stream below an adapter that is; returns it with that."""
    renamed, device = under_new_names(module, kept), applied._where.target
    adapted = adapting.put_on(module, name, device)
    trained = Trained.of(module, name, device)
    applied.reserve(trained.nbytes)
    with applied.cap.working():
        blank = blank_copy(module, device)
    trained.take_out(blank.module)
    applied.add_trained(name, module, lambda: blank, renamed(), trained)
    return adapted


def apply(
    model: Any,
    memory: int | str,
    *,
    device: str = "cpu",
    example: Example | None = None,
    cache: str | PathLike[str] | None = None,
    train: bool = False,
    options: LoadOptions = LoadOptions(),
) -> Applied:
    """Let a module, a transformers model or a diffusers pipeline run in `memory` bytes, as it is.

    The weights of each component stay in the safetensors files that it was loaded from, where these hold the
    same bytes; others are written to `cache`, equal ones once. Its parameters give their memory back. The model's own
    Python runs: what changes is that weights are in memory while the module that reads them is called. The first call
    of a kind runs one module at a time; later ones stream by a plan.

    Args:
        model: A module, a model of transformers, or a pipeline of diffusers. It is in eval mode until it is restored.
        memory: Bytes for weights, activations, inputs and caches together: `"8GB"`, or a number.
        device: `"cpu"`, `"cuda:1"`, `"sim:h200"`.
        example: Inputs whose calls are prepared now, with `train` only.
        cache: The folder for weights that no file of the model holds. Default: `~/.cache/penstock`.
        train: Give parameters that require grad now the gradients of the model in memory, bit for bit. They stay in
            memory; `memory` counts them four times, with their gradients and two moments of AdamW, and the values
            that a forward saves for its backward. The model stays in the mode that it is in.
        options: How weights are loaded, for measurements and debugging.

    Returns:
        What restores the model, at the end of a `with` statement too.

    Raises:
        BudgetError: `memory` is less than a step needs. Later calls raise it for more than they can have.
        PassError: The model cannot stream as it is; the message says why. It is as it was then.
    """
    begun, nbytes = monotonic(), parse_size(memory, name="memory")
    parts = components_of(model)
    if train and not isinstance(model, nn.Module):
        raise PassError(f"train=True takes a model, and this {type(model).__name__} is a pipeline of several")
    for name, module in parts.items():
        refuse_wrapped(module, name)
        if train:
            refuse_exported_hooks(module, name)
    where = Where(Cache.at(cache), device)
    applied = Applied(model, Cap(nbytes, counts_own=device == "cpu"), where, options, restores=True)
    with ExitStack() as on_error:
        on_error.push(applied)
        for name, module in parts.items():
            _stream(applied, name, module, where, train=train)
        _log.info("%s of parameters given back", format_size(applied.freed_bytes))
        if example is not None and train:
            applied.prepare(example)
        applied.log_ready(begun)
        on_error.pop_all()
    return applied


def load(
    source: str | PathLike[str],
    memory: int | str,
    *,
    device: str = "cpu",
    example: Example | None = None,
    variant: str | None = None,
    dtype: torch.dtype | str | None = None,
    cache: str | PathLike[str] | None = None,
    train: bool = False,
    adapter: Any = None,
    options: LoadOptions = LoadOptions(),
) -> Any:
    """Return a transformers model or a diffusers pipeline of a folder, which runs in `memory` bytes.

    The model is never in memory: its weights are read from its safetensors files, in place, when it is called. What is
    returned is the library's own object, in eval mode. Its `penstock_applied` is what `apply` would return. In a `with`
    statement it stops its readers and frees its memory at the end.

    Args:
        source: A folder, or the name of a model in the local cache of the hub; nothing is downloaded.
        memory: As for `apply`.
        device: As for `apply`.
        example: As for `apply`.
        variant: The variant of the weights (`"fp16"`), for components that have it.
        dtype: What `from_pretrained` takes (`torch.bfloat16`, `"bfloat16"`, `"auto"`). Weights that the files have in
            another dtype than the library gives them are converted once, to the same bits, into `cache`; how many
            bytes that writes is logged before.
        cache: As for `apply`.
        train: Make an adapter and train it as by `apply`.
        adapter: With `train`, a configuration of peft, the folder of a saved adapter, or a function such as
            `lambda model: get_peft_model(model, config)`, whose result is returned. Its first values are drawn from
            torch's generator as it is.
        options: As for `apply`.

    Raises:
        SourceError: The folder holds no model.
        BudgetError, PassError: As for `apply`.
    """
    begun, adapting = monotonic(), Adapting.asked(adapter, train=train)
    folder, asked = local_folder(source), asked_dtype(dtype)
    nbytes, where = parse_size(memory, name="memory"), Where(Cache.at(cache), device)
    found = open_folder(folder, variant, asked, train=train)
    applied = Applied(None, Cap(nbytes, counts_own=device == "cpu"), where, options, restores=False)

    def stream(stored: Stored) -> Any:
        module, names = stored.make()
        kept = stored.kept(module, names, where.cache)
        if adapting is not None:
            return _stream_adapted(applied, stored.name, module, kept, adapting)
        applied.add(stored.name, module, kept)
        return module

    if isinstance(found, tuple):
        parts, assemble = found
        applied.target = assemble({name: stream(replace(one, name=name)) for name, one in parts.items()})
    else:
        applied.target = stream(found)
        add_generation_config(next(iter(components_of(applied.target).values())), folder)
    applied.target.penstock_applied = applied
    if example is not None and train:
        applied.prepare(example)
    applied.log_ready(begun)
    return closing(applied.target)
