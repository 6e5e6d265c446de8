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
from penstock.integrations.calls.kept_calls import KeptCalls
from penstock.integrations.calls.kinds import method_of
from penstock.integrations.calls.tiny_calls import PADDED, Example, example_for, make_call, tiny_call
from penstock.integrations.cap import Cap
from penstock.integrations.collector import without_collector
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
    refuse_global_hooks,
    refuse_wrapped,
    without_hooks,
)
from penstock.integrations.own_files import keep_weights
from penstock.integrations.progress import seconds_since
from penstock.integrations.streamed import Component, Where
from penstock.integrations.training.adapting import Adapting, under_new_names
from penstock.integrations.training.parameters import Trained
from penstock.passes.building.fake_export import Built
from penstock.passes.calls.tracers import outside_dynamo
from penstock.runtime.cache import Cache
from penstock.schedule.facts.errors import BudgetError, PassError, PenstockError, StreamError
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size

_log = logging.getLogger(__name__)

_RESTORE = "restore it first (restore() of what apply returned)"
_RESTORE_AND_APPLY = "restore it, and apply penstock to it as it is to be"

_PARTS = "; where the model's own generate does this, apply penstock to the parts that it calls instead"

_LOAD_ELSEWHERE = "load it with its library instead, as it was never in memory"
_LOAD_AND_APPLY = "load it with its library as it is to be, and apply penstock to that"

_LATER = "what it did not reach is exported, and its memory checked, when it is first called"

_OWN_SIZES = " (tried with a tiny call in sizes of the model's own; example= takes a call of yours)"


class Applied:
    """A model or a pipeline whose components stream; returned by `apply`, and kept by what `load` returns.

    As a context manager it restores the model at the end, which only `apply` can: what `load` returns was
    never in memory.
    """

    def __init__(self, target: Any, cap: Cap, where: Where, *, restores: bool) -> None:
        self.target = target
        self.cap = cap
        self._where = where
        self.components: dict[str, Component] = {}
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
    def trains(self) -> bool:
        """Whether calls with grad mode on have gradients."""
        return self.cap.reserved > 0

    @property
    def prepared(self) -> dict[str, tuple[str, ...]]:
        """By component, the kinds of calls that are exported, in words; none where it is not checked yet.

        The memory that another kind of call takes is first checked when it comes.
        """
        return {name: tuple(one.prepared) for name, one in self.components.items()}

    def add(
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
            trained=trained,
        )
        own = trained.parameters if trained else ()
        self.components[name] = component
        self._modules[name] = module
        for entry in entries:
            owner, _, method = entry.rpartition(".")
            part = module.get_submodule(owner)
            call = functools.wraps(getattr(part, method))(functools.partial(component.call, entry))
            self._replaced.append((part, method, vars(part).get(method)))
            part.__dict__[method] = outside_dynamo(call)
        with uninterrupted():
            self._hollow[name] = Hollow(module, self._instead, self._where.target, own)
        component.check = Watch(module, self._again, own).check

    def _key(self, module: nn.Module, entries: Sequence[str]) -> Callable[[], str | None]:
        """Says the key of what is exported of a module; None where nothing can be kept, which is logged."""
        if self._where.lowering != "eager":
            return lambda: None  # an artifact of compiled code is made of programs, and not of their facts
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
        """Export, compile and plan now what the calls of an example need, without computing anything.

        `example` is a tensor, positional arguments, a mapping of names, or a function of the model, in which
        calls of components return zeros. Caches and generators among the arguments are copied first. The
        function must not wait for calls of another thread, because those wait for its end.

        Raises PassError for what cannot be exported, BudgetError for what does not fit.
        """
        self._refuse_restored()
        if isinstance(example, str):
            if example != PADDED:
                raise ValueError(f"there is no example {example!r}: give {PADDED!r}, or inputs")
            self.prepare_tiny_call(padded=True)
            return
        try:
            self._rehearse(example)
        except BaseException:
            for component in self.components.values():
                component.forget_rehearsal()
            raise
        self._plan()

    def prepare_tiny_call(self, *, padded: bool = False) -> None:
        """As `prepare`, with a tiny call of a model of transformers or a pipeline of diffusers.

        With `padded`, a padded call follows.

        Calls that it does not reach are exported when they first come.
        """
        try:
            self._rehearse(tiny_call(self.target, padded=padded))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            how = example_for(self.target)
            _log.warning("a tiny call did not reach its end (%s): %s; %s does so now", reason, _LATER, how)
        try:
            self._plan()
        except BudgetError as error:
            raise BudgetError(f"{error}{_OWN_SIZES}", floor_bytes=error.floor_bytes) from error

    def log_ready(self, begun: float) -> None:
        """Log how long it took since `begun`, and where the weights are that are read from now on."""
        places = [sum(one.read_bytes(cached=c) for one in self.components.values()) for c in (False, True)]
        own, cached = map(format_size, places)
        read = f"{own} of weights are read where they are, {cached} from copies in the cache"
        late = [name for name, calls in self.prepared.items() if not calls]
        if late:
            left = f"no call of {', '.join(late)} is prepared"
            read = left if len(late) == len(self.components) else f"{read}, and {left}"
        _log.info("%s is ready after %s: %s", type(self.target).__name__, seconds_since(begun), read)

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

    def _plan(self) -> None:
        for component in self.components.values():
            component.prepare()

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
                for fill in fills:
                    fill()
                self._give_back()

    def _give_back(self) -> None:
        """Undo what was done to modules; calls that are waiting for their turn then run the own methods."""
        for part, name, before in self._replaced:
            part.__dict__.pop(name, None)
            if before is not None:
                part.__dict__[name] = before
        for one in self._trained:
            one.training = True
        for name, module in self._modules.items():
            self.components[name].own = functools.partial(method_of, module)
            self.components[name].let_go()
        for held in (self._replaced, self._trained, self._hollow, self._modules):
            held.clear()

    def _refuse_lost(self) -> None:
        for name in self._hollow:
            self.components[name].refuse_lost()

    def _refuse_restored(self) -> None:
        if not self._hollow:
            raise StreamError("the model was restored: apply penstock to it again")

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
    with applied.cap.working():
        blank = blank_copy(module, where.target)
    if trained is not None:
        trained.take_out(blank.module)
    applied.add(name, module, lambda: blank, kept, trained)


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
    applied.add(name, module, lambda: blank, renamed(), trained)
    return adapted


def apply(
    model: Any,
    memory: int | str,
    *,
    device: str = "cpu",
    example: Example | None = None,
    lowering: str = "eager",
    cache: str | PathLike[str] | None = None,
    train: bool = False,
) -> Applied:
    """Let a module, a transformers model or a diffusers pipeline run in `memory` bytes, as it is.

    The weights of each component stay in the safetensors files that it was loaded from, where these hold the
    same bytes; others are written to `cache` (`~/.cache/penstock`), equal ones once. Its parameters give
    their memory back. Its `forward` is replaced by one that exports the module when a kind of call first
    comes, and streams the weights from then on. `memory` counts weights, activations, inputs and caches. The
    model is in eval mode until it is restored.

    Without `train`, results have the bits of the model's call under `torch.no_grad()`, in whatever mode it is
    called; with grad mode on, torch itself takes another kernel for an LSTM.

    The kinds of calls that `example` makes (see `Applied.prepare`) are exported and planned now. Without an
    example those of a tiny call are, where the model is of transformers or diffusers; with `"padded"` also
    those of a padded one, whose export otherwise takes seconds when it first comes.

    With `train`, parameters of a model that require grad now stay in memory, and calls with grad mode on give
    them the gradients of the model in memory, bit for bit. The model stays in the mode that it is in, and may
    change it. `memory` also counts trained parameters four times, with their gradients and two moments of
    AdamW, and all values that a forward saves for its backward. Nothing is exported before the first call
    without an example.

    Raises PassError for what cannot be exported and BudgetError for a cap below what a call needs; the model
    is then as it was. Later calls may raise them too.
    """
    begun, nbytes = monotonic(), parse_size(memory, name="memory")
    parts = components_of(model)
    if train and not isinstance(model, nn.Module):
        raise PassError(f"train=True takes a model, and this {type(model).__name__} is a pipeline of several")
    _refuse_compiled(lowering, train=train)
    for name, module in parts.items():
        refuse_wrapped(module, name)
    where = Where(Cache.at(cache), device, lowering)
    applied = Applied(model, Cap(nbytes, counts_own=device == "cpu"), where, restores=True)
    with ExitStack() as on_error:
        on_error.push(applied)
        for name, module in parts.items():
            _stream(applied, name, module, where, train=train)
        _log.info("%s of parameters given back", format_size(applied.freed_bytes))
        if example is not None:
            applied.prepare(example)
        elif not train:
            applied.prepare_tiny_call()
        applied.log_ready(begun)
        on_error.pop_all()
    return applied


@without_collector()
def load(
    source: str | PathLike[str],
    memory: int | str,
    *,
    device: str = "cpu",
    example: Example | None = None,
    variant: str | None = None,
    dtype: torch.dtype | str | None = None,
    lowering: str = "eager",
    cache: str | PathLike[str] | None = None,
    train: bool = False,
    adapter: Any = None,
) -> Any:
    """A transformers model or a diffusers pipeline of a folder, which runs in `memory` bytes.

    `source` is a folder, or the name of a model in the local cache; nothing is downloaded. The model is never
    in memory: its weights are read from its safetensors files, in place, when it is called. Returned is the
    library's own object, in eval mode, whose `penstock_applied` is what `apply` would return. `example` is as
    for `apply`. With `variant` (`fp16`), components that have that variant of their weights use it.
    Without `train`, results have the bits of the call of the library's own model under `torch.no_grad()`, in
    whatever mode the object is called; with grad mode on, torch itself takes another kernel for an LSTM.

    `dtype` is what `from_pretrained` takes (`torch.bfloat16`, `"bfloat16"`, `"auto"`). Weights that the files
    have in another dtype than the library gives them are converted once, to the same bits, into `cache`; how
    many bytes that writes is logged before.
    With `train`, an adapter is made on a model and trained as by `apply`. `adapter` is a configuration of
    peft, the folder of a saved adapter, or a function such as `lambda model: get_peft_model(model, config)`,
    whose result is returned. Its first values are drawn from torch's generator as it is.
    As a context manager the object stops its readers and frees its memory. Raises SourceError for a folder
    without a model, PassError and BudgetError as `apply`.
    """
    begun, adapting = monotonic(), Adapting.asked(adapter, train=train)
    refuse_global_hooks()
    _refuse_compiled(lowering, train=train)
    folder, asked = local_folder(source), asked_dtype(dtype)
    nbytes, where = parse_size(memory, name="memory"), Where(Cache.at(cache), device, lowering)
    found = open_folder(folder, variant, asked, train=train)
    applied = Applied(None, Cap(nbytes, counts_own=device == "cpu"), where, restores=False)

    def stream(stored: Stored) -> Any:
        module, names = stored.make()
        kept = stored.kept(module, names, where.cache)
        if adapting is not None:
            return _stream_adapted(applied, stored.name, module, kept, adapting)
        applied.add(stored.name, module, functools.partial(Built.by, stored.build, str(where.target)), kept)
        return module

    if isinstance(found, tuple):
        parts, assemble = found
        applied.target = assemble({name: stream(replace(one, name=name)) for name, one in parts.items()})
    else:
        applied.target = stream(found)
        add_generation_config(next(iter(components_of(applied.target).values())), folder)
    applied.target.penstock_applied = applied
    if example is not None:
        applied.prepare(example)
    elif not train:
        applied.prepare_tiny_call()
    applied.log_ready(begun)
    return closing(applied.target)


def _refuse_compiled(lowering: str, *, train: bool) -> None:
    if train and lowering != "eager":
        raise PassError(f'train=True computes what eager PyTorch does: leave lowering="{lowering}" out')
