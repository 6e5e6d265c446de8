"""Models whose parameters are initialised only when they are asked for, one part at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.passes.building.placement import OnCpu
from penstock.passes.building.refusals import caller, own_sentence, refuse_scripted, sentence, where
from penstock.passes.weights.subclasses import has_parts
from penstock.schedule.facts.errors import PassError, PenstockError

_META = torch.device("meta")
_SCALARS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item")
"""Operators that return a Python number, for which values are needed."""

LARGE = 1 << 20
"""The bytes from which on a tensor that the constructor really allocates is reported."""

_SAMPLING = "_no_grad_trunc_normal_"
"""The function that `nn.init.trunc_normal_` calls, however a model has imported the latter."""

_CHUNK = 1 << 22
"""How many random numbers are drawn at a time if not all of them are kept; a multiple of 16."""

_aten = torch.ops.aten
_FILLS = (_aten.uniform_.default, _aten.normal_.default)
_IN_PLACE = (*_FILLS, _aten.fill_.Scalar, _aten.zero_.default)
"""Operators that change values alone: without memory there is nothing to do."""

_FACTORIES = (_aten.empty.memory_format, _aten.zeros.default, _aten.ones.default, _aten.full.default)
_EXACT = (
    _aten._to_copy.default,
    _aten.detach.default,
    _aten.fill_.Scalar,
    _aten.mul.Tensor,
    _aten.mul_.Tensor,
    _aten.zero_.default,
)
"""Operators that give an element the same bits however many other elements are computed in the call."""


@dataclass(frozen=True)
class Spec:
    """A tensor as a view of storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Operation:
    """A recorded call of `function`, in whose arguments Specs stand for tensors; `outputs` are its results.

    `draws` is the position of the operation among those that draw random numbers, None if it draws none.
    `default_dtype` is torch's default when the operation was recorded; `torch.ones(4)` depends on it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Spec, ...]
    draws: int | None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def run(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function on other arguments of the same dtypes, with the recorded default dtype."""
        before = torch.get_default_dtype()
        if self.default_dtype == before:
            return self.function(*args, **kwargs)
        torch.set_default_dtype(self.default_dtype)
        try:
            return self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    @property
    def storages(self) -> set[int]:
        """The storages that the operation reads or writes."""
        leaves = [*pytree.tree_leaves((self.args, dict(self.kwargs))), *self.outputs]
        return {leaf.storage for leaf in leaves if isinstance(leaf, Spec)}


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a constructor while it is active as a context manager, on one thread.

    `allocated` has the bytes of tensors that came with memory of their own, and the lines that made them: of
    large tensors, and of all that come from NumPy.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Operation] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address: number, storage
        self._of_real: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        self.allocated: list[tuple[int, str]] = []
        self._draws = _Draws()
        self._also = ExitStack()

    def __enter__(self) -> Recording:
        # Rejection sampling is a loop over values, so all of it is recorded as one operation.
        sample = getattr(nn.init, _SAMPLING, None)
        if sample is not None:
            self._also.enter_context(patch.object(nn.init, _SAMPLING, partial(self._record_sampling, sample)))
        self._also.enter_context(patch.object(torch, "from_numpy", partial(self._note, torch.from_numpy)))
        self._also.enter_context(_Pretending(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._also.close()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():  # a legacy constructor (torch.FloatTensor) leaves modes active
            return self._recorded(func, args, dict(kwargs or {}))

    def _recorded(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, options = pytree.tree_map(self._without_memory, (args, kwargs))
        if func._schema.name in _SCALARS:
            return func(
                *pytree.tree_map(lambda x: self.values(x) if isinstance(x, torch.Tensor) else x, args)
            )
        recorded = pytree.tree_map(self._spec, (args, options))
        result = args[0] if func in _IN_PLACE else self._result(func, args, options)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        draws = self._draws.count(options.get("generator")) if seeded else None
        outputs = tuple(
            self._spec(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
        )
        self._operations.append(Operation(func, recorded[0], _on_cpu(recorded[1]), outputs, draws))
        return result

    @staticmethod
    def _result(func: OpOverload, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """What an operator returns, without memory."""
        placed = {
            name: _META if isinstance(value, torch.device) else value for name, value in options.items()
        }
        moved = tuple(_META if isinstance(value, torch.device) else value for value in args)
        if any(a.name == "device" for a in func._schema.arguments):
            placed["device"] = _META
        return func(*moved, **placed)

    def _record_sampling(
        self, sample: Callable[..., Any], tensor: torch.Tensor, *bounds: float, generator: Any = None
    ) -> torch.Tensor:
        spec = self._spec(tensor)
        operation = Operation(sample, (spec, *bounds), {}, (spec,), self._draws.count(generator))
        self._operations.append(operation)
        return tensor

    def _note(self, from_numpy: Callable[[Any], torch.Tensor], array: Any) -> torch.Tensor:
        tensor = from_numpy(array)
        if tensor.nbytes < LARGE:  # a large array is reported where it is used
            self.allocated.append((tensor.nbytes, caller()))
        return tensor

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the values that a recorded one would have. Raises PassError for any other."""
        if tensor.device != _META:
            return tensor
        spec = self._spec(tensor)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            value = self._run(self._needed(spec.storage), spec)
        return value

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's memory would have been made in this recording."""
        return tensor.untyped_storage()._cdata in self._storages

    def run_of_rows(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor | None:
        """Rows `start` to `stop` of a tensor, in memory of their own, made without memory for the other rows.

        None unless the tensor is made only by filling, scaling and converting whole contiguous tensors.
        """
        if tensor.device != _META or not tensor.dim():
            return None
        spec = self._spec(tensor)
        operations = self._needed(spec.storage)
        if not all(_is_by_element(operation, spec) for operation in operations):
            return None
        width = math.prod(spec.shape[1:])
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            rows = self._run_on(range(start * width, stop * width), operations)[spec.storage]
        return rows.view(stop - start, *spec.shape[1:])

    def _run_on(self, elements: range, operations: Sequence[Operation]) -> dict[int, torch.Tensor]:
        """Run operations on some elements of flat tensors, and return the results by storage."""
        memory: dict[int, torch.Tensor] = {}
        for operation in operations:
            args, kwargs = pytree.tree_map(
                lambda leaf: memory[leaf.storage] if isinstance(leaf, Spec) else leaf,
                (operation.args, dict(operation.kwargs)),
            )
            if operation.function in _FACTORIES:
                args = ([len(elements)], *args[1:])
            if operation.draws is None:
                memory.setdefault(operation.outputs[0].storage, operation.run(args, kwargs))
                continue
            position = 0
            with self._draws.at(operation, self._operations):
                for piece in _drawn(operation):
                    low = max(elements.start, position)
                    high = min(elements.stop, position + len(piece))
                    if low < high:
                        target = args[0][low - elements.start : high - elements.start]
                        target.copy_(piece[low - position : high - position])
                    position += len(piece)
        return memory

    def _needed(self, storage: int) -> list[Operation]:
        """Returns the operations that the values of a storage depend on, in order."""
        wanted, chosen = {storage}, []
        for operation in reversed(self._operations):
            if wanted & {spec.storage for spec in _written(operation)}:
                chosen.append(operation)
                wanted |= operation.storages
        return chosen[::-1]

    def _run(self, operations: Sequence[Operation], spec: Spec) -> torch.Tensor:
        memory: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Spec):
                return leaf
            if leaf.storage not in memory:
                raise PassError("a tensor that the constructor uses was made before it: make it inside")
            empty = torch.empty(0, dtype=leaf.dtype)
            return empty.set_(memory[leaf.storage], leaf.offset, leaf.shape, leaf.stride)

        for operation in operations:
            args, kwargs = pytree.tree_map(real, (operation.args, dict(operation.kwargs)))
            with self._draws.at(operation, self._operations):
                result = operation.run(args, kwargs)
            leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for leaf, output in zip(leaves, operation.outputs, strict=True):
                if output.storage not in memory:
                    memory[output.storage] = _laid_out(leaf, output).untyped_storage()
        tensor: torch.Tensor = real(spec)
        return tensor

    def _without_memory(self, leaf: Any) -> Any:
        """Returns a twin on the meta device for a tensor that has values; the values are kept."""
        if not isinstance(leaf, torch.Tensor) or leaf.device == _META:
            return leaf
        if has_parts(leaf):
            raise PassError(
                f"the constructor quantises{caller()}: it makes a {type(leaf).__name__}, which takes values; "
                "quantise the model in memory, or give penstock.integrations.load the folder it was saved to"
            )
        storage = leaf.untyped_storage()
        if storage._cdata not in self._of_real:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage).clone()
            twin = torch.empty(flat.numel(), dtype=torch.uint8, device=_META)
            if storage.nbytes() >= LARGE:
                self.allocated.append((storage.nbytes(), caller()))
            self._of_real[storage._cdata] = twin, storage
            self._operations.append(Operation(flat.clone, (), {}, (self._spec(twin),), None))
        twin = self._of_real[storage._cdata][0]
        empty = torch.empty(0, dtype=leaf.dtype, device=_META)
        return empty.set_(twin.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

    def _spec(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = leaf.untyped_storage()
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        return Spec(number, leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))


class _Pretending(TorchFunctionMode):
    """Lets tensors on the meta device say that they are on the CPU, and give values where they are needed."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._values = recording.values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            args = (self._values(args[0]), *args[1:])
        result = func(*args, **(kwargs or {}))
        return torch.device("cpu") if func == torch.Tensor.device.__get__ and result == _META else result


class _Draws:
    """The known states of torch's default generator before operations that draw random numbers."""

    def __init__(self) -> None:
        self._seen = torch.get_rng_state()
        self._known = {0: self._seen}
        self._count = 0

    def count(self, generator: torch.Generator | None) -> int:
        """Returns the number of the next operation that draws random numbers."""
        if generator is not None:
            raise PassError(
                "the constructor draws from a generator of its own, which cannot be recorded: draw from "
                "torch's default one (torch.manual_seed)"
            )
        now = torch.get_rng_state()
        if not torch.equal(now, self._seen):  # the constructor has seeded the generator since
            self._seen = self._known[self._count] = now
        self._count += 1
        return self._count - 1

    @contextmanager
    def at(self, operation: Operation, operations: Sequence[Operation]) -> Iterator[None]:
        """Puts the generator into the state that it would have before `operation`; restores it at the end."""
        if operation.draws is None:
            yield
            return
        with torch.random.fork_rng(devices=()):
            first = max(number for number in self._known if number <= operation.draws)
            torch.set_rng_state(self._known[first])
            for earlier in operations:
                if earlier.draws is not None and first <= earlier.draws < operation.draws:
                    for _ in _drawn(earlier):
                        pass
                    self._known.setdefault(earlier.draws + 1, torch.get_rng_state())
            torch.set_rng_state(self._known[operation.draws])
            yield
            self._known.setdefault(operation.draws + 1, torch.get_rng_state())


def _drawn(operation: Operation) -> Iterator[torch.Tensor]:
    """Draws the random numbers of an operation; yields them flat, in pieces valid until the next piece."""
    target = operation.args[0] if operation.function in _FILLS else None
    if isinstance(target, Spec) and _elements(target) > 2 * _CHUNK and _is_contiguous(target):
        # Both functions draw element by element, normal numbers 16 at a time, so that pieces draw the same
        # numbers. The last piece is the longest.
        count = _elements(target)
        scratch = torch.empty(_CHUNK + count % _CHUNK, dtype=target.dtype)
        for piece in [*[scratch[:_CHUNK]] * (count // _CHUNK - 1), scratch]:
            operation.run((piece, *operation.args[1:]), operation.kwargs)
            yield piece
        return

    def scratch_like(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Spec) else leaf

    args, kwargs = pytree.tree_map(scratch_like, (operation.args, dict(operation.kwargs)))
    result = operation.run(args, kwargs)
    yield result.flatten() if isinstance(result, torch.Tensor) else torch.empty(0)


def _is_by_element(operation: Operation, whole: Spec) -> bool:
    """Tell whether an operation on contiguous tensors of the shape of `whole` computes element by element."""
    leaves = [*pytree.tree_leaves((operation.args, dict(operation.kwargs))), *operation.outputs]
    specs = [leaf for leaf in leaves if isinstance(leaf, Spec)]
    known = operation.function in (*_FILLS, *_FACTORIES, *_EXACT)
    return known and all(
        (spec.shape, spec.offset) == (whole.shape, 0) and _is_contiguous(spec) for spec in specs
    )


def _laid_out(value: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns the value with the strides of its spec: some operators use other strides on the meta device."""
    if (value.stride(), value.storage_offset()) == (spec.stride, spec.offset):
        return value
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    return whole.copy_(value) if not spec.offset else value


def _written(operation: Operation) -> Iterator[Spec]:
    yield from operation.outputs
    if isinstance(operation.function, OpOverload):
        for argument, value in zip(operation.function._schema.arguments, operation.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Spec))


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    cpu = torch.device("cpu")
    return {name: cpu if isinstance(value, torch.device) else value for name, value in kwargs.items()}


def _elements(spec: Spec) -> int:
    return math.prod(spec.shape)


def _is_contiguous(spec: Spec) -> bool:
    return torch.empty_strided(spec.shape, spec.stride, device=_META).is_contiguous()


def deferred_init(build: Callable[[], nn.Module]) -> Deferred:
    """Run a constructor without memory for its tensors, and record how it initialises each of them.

    Values that are materialised later are those that the constructor would have given with the present state
    of torch's default CPU generator, which does not change. To make the values of one parameter, all numbers
    before them are drawn and forgotten: that takes the time of the whole model, and the memory of that
    parameter.

    Args:
        build: A function that returns the module.

    Raises:
        PassError: The constructor cannot run without memory, or draws from another generator. The message
            names the line of the model.

    Example:
        >>> deferred = penstock.deferred_init(lambda: torch.nn.Linear(64, 64))
        >>> deferred.module.weight.is_meta, deferred.materialize().weight.is_meta
        (True, False)
    """
    with OnCpu():
        return record(build)


def record(build: Callable[[], nn.Module]) -> Deferred:
    """Does what `deferred_init` does; the caller's function mode handles the devices that are asked for."""
    refuse_scripted(build)
    if isinstance(build, nn.Module):
        raise PassError(
            f"expected a function that builds the model, got a {type(build).__name__} that is built: give "
            "lambda: Model(...), or export the module itself with torch.export.export"
        )
    recording = Recording()
    try:
        with recording, torch.no_grad():
            module = build()
    except PenstockError:
        raise
    except Exception as error:
        raise PassError(
            f"the model cannot be built without memory{where(error)}: {own_sentence(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise PassError(f"expected a function that returns a module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):  # a scripted part of another module can be materialised
        refuse_scripted(module)
    module = _own(module)
    hold_attributes(module)
    return Deferred(module, recording)


def _own(module: nn.Module) -> nn.Module:
    """The module that a function has built, or a copy of the same tensors of one that was there before."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tensors = [tensor for part in parts for tensor in (*part.parameters(False), *part.buffers(False))]
    if all(tensor.is_meta for tensor in tensors):
        return module
    with ExitStack() as entered:
        for kind in (torch.Tensor, nn.Parameter):
            entered.enter_context(patch.object(kind, "__deepcopy__", lambda tensor, _: tensor))
        try:
            return copy.deepcopy(module)
        except Exception as error:
            raise PassError(
                f"the function returns a {type(module).__name__} that is built already and cannot be copied "
                f"({type(error).__name__}: {sentence(error)}): build the model in the function"
            ) from error


class Deferred:
    """A model that was built without memory.

    Attributes:
        module: The module; its tensors have shapes only, until they are materialised.
        allocated: The bytes, and the line of code, of each large tensor that the constructor really made.

    Example:
        >>> deferred = penstock.deferred_init(lambda: torch.nn.Linear(64, 64))
        >>> rows = deferred.materialize_slice("weight", slice(0, 8))
        >>> torch.equal(rows, deferred.materialize().weight[:8])
        True
    """

    def __init__(self, module: nn.Module, recording: Recording) -> None:
        self.module = module
        self.allocated = recording.allocated
        self._recording = recording
        self._made: dict[int, torch.Tensor] = {}

    def materialize(self, name: str = "") -> nn.Module:
        """Give a submodule real parameters and buffers, and return it.

        Parts that are real stay as they are, so parts may be asked for in any order, and again. Tied
        parameters stay tied.

        Args:
            name: The submodule. Default: the whole module.

        Raises:
            PassError: There is no such submodule.
        """
        try:
            part = self.module.get_submodule(name)
        except AttributeError as error:
            raise PassError(f"there is no submodule {name!r}: {error}") from error
        for child in part.modules():
            places: Any
            for places in (child._parameters, child._buffers):
                for key, tensor in places.items():
                    if tensor is not None and tensor.is_meta:
                        places[key] = self._real(tensor)
        return part

    def materialize_slice(self, fqn: str, rows: slice) -> torch.Tensor:
        """Return some rows of one parameter or buffer, in memory of their own; the module stays as it is.

        Only these rows are made if the constructor fills, scales and converts the parameter as a whole
        (`nn.init.uniform_`, `normal_`, `constant_` and functions built on them). Otherwise the whole
        parameter is in memory for a moment.

        Args:
            fqn: The name of the parameter or buffer.
            rows: A slice of dimension 0.

        Raises:
            PassError: There is no such parameter or buffer.
        """
        owner, _, key = fqn.rpartition(".")
        try:
            tensor = getattr(self.module.get_submodule(owner), key)
        except AttributeError as error:
            raise PassError(f"there is no parameter or buffer {fqn!r}: {error}") from error
        if not isinstance(tensor, torch.Tensor):
            whole = f"; materialize({fqn!r}) gives a whole module" if isinstance(tensor, nn.Module) else ""
            raise PassError(
                f"{fqn!r} is a {type(tensor).__name__}, expected the name of a parameter or buffer{whole}"
            )
        start, stop, step = rows.indices(len(tensor) if tensor.dim() else 0)
        run = self._recording.run_of_rows(tensor, start, max(start, stop)) if step > 0 else None
        return (self.values(tensor)[rows] if run is None else run[::step]).clone()

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the values of one of the module, which stays as it is.

        Args:
            tensor: A parameter or buffer of the module.
        """
        return self._recording.values(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether the constructor made a tensor.

        Args:
            tensor: A parameter or buffer of the module, or another tensor.
        """
        return self._recording.has(tensor)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            values = self.values(tensor)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = values
        return self._made[id(tensor)]


def join(module: str, key: str) -> str:
    """The FQN of the tensor `key` of the submodule `module`, whose name is empty for the root."""
    return f"{module}.{key}" if module else key


def hold_attributes(module: nn.Module) -> None:
    """Make buffers of the tensors that a module keeps as plain attributes, so that they are found by name."""
    for child in module.modules():
        for key, value in list(vars(child).items()):
            if isinstance(value, torch.Tensor):
                delattr(child, key)
                child.register_buffer(key, value, persistent=False)
