"""How much memory a call takes beside weights, and weights in memory of their own."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import inf, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from penstock.integrations.called.facts import NO_FOLDER, ModuleFacts
from penstock.integrations.emptied.absent import CLASS, AbsentTensor, has_memory
from penstock.passes.weights.lifted import tensor_in
from penstock.passes.weights.subclasses import each_part, has_parts, plain_tensors
from penstock.runtime.device.opening import target_device
from penstock.runtime.files.source import HeldStorages, Source, open_source
from penstock.runtime.system.memory import round_up
from penstock.runtime.system.threads import READERS
from penstock.schedule.facts.model import WeightFile


def use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors refer to the memory behind a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def like(value: torch.Tensor, fqn: str, tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return an object like the parameter `value` over other memory.

    Args:
        value: A parameter, whose values need not be in memory.
        fqn: Its name.
        tensor_of: Returns a plain tensor by its name, `fqn` or `FQN.PART`.
    """
    if has_parts(value):
        parts = iter([tensor_of(name) for name in plain_tensors(fqn, value)])
        weight = each_part(value, lambda _: next(parts))
    elif CLASS in vars(value):
        weight = torch.Tensor._make_subclass(vars(value)[CLASS], tensor_of(fqn), value.requires_grad)
    elif isinstance(value, nn.Parameter):
        weight = nn.Parameter(tensor_of(fqn), requires_grad=value.requires_grad)
    else:
        weight = tensor_of(fqn)
    attributes = vars(weight)  # a quantised tensor has its parts there
    for key, attribute in vars(value).items():
        if not key.startswith("penstock_"):
            attributes.setdefault(key, attribute)
    return weight


@contextmanager
def plain_tensors_only() -> Iterator[None]:
    """Make the body's new tensors plain ones on the CPU, whatever modes and transforms a call runs in."""
    if not _is_in_modes():  # a backward comes here for each weight that it reads
        with torch.no_grad():
            yield
        return
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.device("cpu"))
        yield


def _is_in_modes() -> bool:
    """Tell whether a mode, a transform of functorch or another default device is there."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or _len_torch_dispatch_stack_pre_dispatch() > 0  # type: ignore[no-untyped-call]
    )


class OwnMemory:
    """Reads weights of a module from its files into new memory, past the page cache where it is cold.

    Files are closed when no thread reads. `count` is told the bytes of each read.

    Reading through a cold page cache would leave small folios in it, which slow every later call that maps
    the files (27 ms to 66 ms for a token of a Llama of 469 MiB).
    """

    def __init__(
        self, facts: ModuleFacts, device: torch.device, count: Callable[[int], object] = int
    ) -> None:
        self.facts, self._device, self._count = facts, device, count
        self._source: Source | None = None
        self._lock = threading.RLock()

    @property
    def on_cpu(self) -> bool:
        """Whether weights come into the memory of the host."""
        return self._device.type == "cpu"

    def read(self, storages: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the bytes of storages on the device; on a CPU, each at its phase.

        The allocator of an accelerator gives memory that is freed to later work of the same stream alone. So
        kernels that are still to run may read what has been given back.

        Raises SourceError for files that have changed.
        """
        with plain_tensors_only():
            with self._lock:
                reads = HeldStorages(self.facts.storages, tuple(storages), self._opened(), READERS)
                reads.wait()
                self._count(reads.nbytes)
            if self._device.type == "cpu":
                return reads.buffers
            return {s: memory.to(self._device) for s, memory in reads.buffers.items()}

    def read_span(self, storage: int, start: int, stop: int, address: int) -> None:
        """Read bytes `start` to `stop` of a storage at `address`. Raises SourceError as `read` does."""
        for extent in self.facts.storages[storage].extents:
            first = max(start, extent.storage_offset)
            end = min(stop, extent.storage_offset + extent.nbytes)
            if first < end:
                offset = extent.file_offset + first - extent.storage_offset
                with self._lock:
                    self._opened().read_into(extent.file, offset, address + first, end - first)
                    self._count(end - first)

    def _opened(self) -> Source:
        if self._source is None:
            self._source = open_source(self.facts.files, NO_FOLDER, storages=self.facts.storages)
            weakref.finalize(self, self._source.close)
        return self._source

    def tensor(self, name: str, memory: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the plain tensor of a name in `memory`, which gets its storage if it lacks it."""
        part = self.facts.parts[name]
        if part.storage not in memory:
            memory |= self.read([part.storage])
        return tensor_in(memory[part.storage], part)

    def weight(self, value: torch.Tensor, fqn: str, memory: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return an object like a parameter of a name, over `memory`, which this completes."""
        with plain_tensors_only():
            return like(value, fqn, lambda name: self.tensor(name, memory))

    def restamp(self, files: tuple[WeightFile, ...]) -> None:
        """Take up other stamps of the same files."""
        self.facts = replace(self.facts, files=files)
        self.close()

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        with self._lock:
            source, self._source = self._source, None
            if source is not None:
                source.close()


_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
_RESET_PEAK = b"5"

ROOM = 1.25
"""A plan leaves room for calls that take so much more memory than any that was observed."""

_ALIKE = 1.1
"""Calls whose arguments are larger than any before by at most this factor are not measured."""

_ADDED = 1.5
"""A tensor that the measured call was not given, such as a mask or labels, counts this many times."""

_REMEMBERED = 64
"""The number of measured calls that are remembered."""

_FAR = 2
"""A call is not measured if it is at most this many times as large as a measured one, and needs at most one
over this of the room."""

_ALLOCATED = 512
"""Allocators of accelerators give out multiples of these bytes."""

_SLACK = 16 << 20, 8
"""A plan leaves at least this for calls that grow, or this part of the cap if that is less."""


class CallArguments(NamedTuple):
    """The tensors in the arguments of a call, as far as they are on one device.

    Attributes:
        kind: The method that is called, and arguments by which calls of equal sizes take other memory.
        allocated: The bytes that the device's allocator has given them.
        tensors: The shapes of arguments that are tensors, by position or name.
        objects: The bytes of tensors in other arguments, such as caches, by position or name.
    """

    kind: object
    allocated: int
    tensors: Mapping[int | str, tuple[int, ...]]
    objects: Mapping[int | str, int]

    @classmethod
    def of(
        cls, device: torch.device, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallArguments:
        """Return the sizes of the arguments of a call, in caches and objects too."""
        named: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)
        tensors = {
            name: tuple(value.shape)
            for name, value in named.items()
            if isinstance(value, torch.Tensor) and value.device == device
        }
        within = {name: list(_tensors_in(value, device)) for name, value in named.items()}
        granule = 1 if device.type == "cpu" else _ALLOCATED
        each = {id(tensor): tensor for inside in within.values() for tensor in inside}
        allocated = sum(round_up(tensor.nbytes, granule) for tensor in each.values())
        flags = {name: flag for name, value in named.items() if (flag := _flag(value)) is not None}
        objects = {
            name: nbytes
            for name, inside in within.items()
            if name not in tensors and (nbytes := sum(tensor.nbytes for tensor in inside))
        }
        return cls((method, flags), allocated, tensors, objects)


def _flag(value: object) -> object:
    """Return what an argument that has no tensors says of a call's memory: zero may stand for "all"."""
    return value if isinstance(value, bool | str) else value == 0 if isinstance(value, int) else None


def _tensors_in(value: object, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the tensors on a device that a value has, each once."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device == device:
                yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            left += vars(value).values()


def _has_within(value: object, memory: torch.UntypedStorage) -> bool:
    """Tell whether a tensor among an operator's arguments has this memory."""
    if isinstance(value, torch.Tensor):
        return has_memory(value) and value.untyped_storage() is memory
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_has_within(each, memory) for each in values)


class MeasuredCall(NamedTuple):
    """What one call took beside weights, in bytes, with its arguments as they were, and are `after` it."""

    arguments: CallArguments
    after: CallArguments
    beside: int

    def growth_to(self, call: CallArguments) -> float:
        """Return the factor by which the arguments of another call are larger.

        A mask, or labels, may double what attention or the loss takes. A call that filled a cache stands for
        one that has the cache already. Its tokens attend to those of the cache and to each other, so that the
        factors of both add up.
        """
        if call.kind != self.arguments.kind:
            return inf
        known = self.arguments.tensors
        tensors = max(
            (_growth(known[name], n) for name, n in call.tensors.items() if name in known), default=0
        )
        added = max((prod(n) for name, n in call.tensors.items() if name not in known), default=0)
        if added:
            largest = max(map(prod, known.values()), default=0)
            tensors += _ADDED * added / largest if largest else inf
        before, after = (
            max((_growth((of.get(k, 0),), (n,)) for k, n in call.objects.items()), default=0)
            for of in (self.arguments.objects, self.after.objects)
        )
        return min(max(tensors, before), tensors + after)


def _growth(before: Sequence[int], now: Sequence[int]) -> float:
    """Return the product of the factors by which the dimensions of a shape are larger."""
    if len(before) != len(now):
        return inf
    return prod(max(1.0, n / b) if b else (inf if n else 1.0) for b, n in zip(before, now, strict=True))


class CallSizes:
    """The memory of measured calls."""

    def __init__(self, beside: int = 0) -> None:
        self.beside = beside
        """The most bytes that a call has taken beside weights."""
        self._measured: deque[MeasuredCall] = deque(maxlen=_REMEMBERED)
        self._latest: tuple[object, list[tuple[float, int]]] = None, []

    def __bool__(self) -> bool:
        return bool(self._measured)

    def add(self, arguments: CallArguments, after: CallArguments, beside: int) -> None:
        """Remember what a call took; of equal calls, the most."""
        self.beside = max(self.beside, beside)
        equal = [call for call in self._measured if call.arguments == arguments]
        for call in equal:
            self._measured.remove(call)
        self._latest = None, []
        self._measured.append(MeasuredCall(arguments, after, max([beside, *(call.beside for call in equal)])))

    def room(self, cap: int) -> int:
        """Return the bytes that a plan leaves for calls, of `cap` bytes for weights and calls."""
        slack = min(_SLACK[0], cap // _SLACK[1])
        return max(int(ROOM * self.beside), self.beside + slack)

    def is_known(self, call: CallArguments, room: int) -> bool:
        """Tell whether a call need not be measured, as one with as large arguments was.

        Nor need one that is far from filling its room and at most twice as large: a context that grows by a
        token a call is measured when it has doubled, and not in every third call.
        """
        return any(
            f <= _ALIKE or (f <= _FAR and beside * f**2 * _FAR <= room) for f, beside in self._factors(call)
        )

    def most(self, call: CallArguments) -> float:
        """The most bytes that a call takes beside weights; attention may take the square of the tokens."""
        return min((beside * (f**2 if f > _ALIKE else 1) for f, beside in self._factors(call)), default=inf)

    def _factors(self, call: CallArguments) -> list[tuple[float, int]]:
        """The growth of each measured call to `call`, which is asked for several times, and what it took."""
        if self._latest[0] is not call:
            factors = [(measured.growth_to(call), measured.beside) for measured in self._measured]
            self._latest = call, factors
        return self._latest[1]


def buffer_bytes(module: nn.Module) -> int:
    """Return the bytes of buffers that stay in a device's memory, as its allocator rounds them."""
    return sum(round_up(b.nbytes, _ALLOCATED) for b in module.buffers() if not isinstance(b, AbsentTensor))


def run_uncounted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a compiled function without `LiveBytes`, as the compiler does nothing while a mode is on."""
    modes = _get_current_dispatch_mode_stack()
    counts = modes and all(isinstance(mode, LiveBytes) for mode in modes)
    with _disable_current_modes() if counts else nullcontext():
        return function(*args, **kwargs)


def compiled_graphs() -> int:
    """Return how many graphs the compiler has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operators make on a device in this mode, as long as something refers to them."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch compile what it compiles by itself, such as flex_attention, while this mode is on."""
        return True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.now = self.recent = 0  # the highest, the present, and the highest since a look
        self._device = device
        self._autocast: torch._C.DispatchKey | None = None
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = self._run(func, args, kwargs or {})
        tensors = (result,) if isinstance(result, torch.Tensor) else _tensors_in(result, self._device)
        for tensor in tensors:
            if has_memory(tensor) and tensor.device == self._device:
                memory = tensor.untyped_storage()
                if id(memory) not in self._known and not _has_within((args, kwargs), memory):
                    self._known.add(id(memory))
                    self.now += memory.nbytes()
                    weakref.finalize(memory, self._free, id(memory), memory.nbytes())
        self.peak, self.recent = max(self.peak, self.now), max(self.recent, self.now)
        return result

    def note_autocast(self) -> None:
        """Remember whether autocast is on; operators in a mode cannot ask that."""
        kind = self._device.type
        name = f"Autocast{kind.upper()}" if torch.is_autocast_enabled(kind) else ""
        self._autocast = getattr(torch._C.DispatchKey, name, None)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator with the kernels that it has without this mode.

        A mode turns autocast off for what the kernel of an operator calls itself, as that of
        `_transformer_encoder_layer_fwd` does. For operators that autocast converts for it is off anyway.
        """
        key = self._autocast
        if (
            key is None
            or not isinstance(func, torch._ops.OpOverload)
            or torch._C._dispatch_has_kernel_for_dispatch_key(func._name, key)
        ):
            return func(*args, **kwargs)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)

    def _free(self, memory: int, nbytes: int) -> None:
        self._known.discard(memory)
        self.now -= nbytes


class Running:
    """Counts the passes that run in this process, and those that have begun."""

    def __init__(self) -> None:
        self.now = self.begun = 0
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self._lock:
            self.now, self.begun = self.now + 1, self.begun + 1
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1


RUNNING = Running()


class Meter:
    """Measures the most memory that a call takes beyond what there was before it.

    Attributes:
        peak: The highest peak of all looks.
        recent: The peak between the last look and the one before.
        now: What was taken at the last look.
        trimmed: What was taken when free pages of the heap last went back.
    """

    peak = recent = now = trimmed = 0

    def look(self, own_bytes: int = 0) -> int:
        """Return the highest peak of all looks; the present look leaves out `own_bytes` bytes."""
        return self.peak

    def restart(self) -> None:
        """Forget the peak since the last look, which had memory that has been given back since."""

    def forget(self) -> None:
        """Take all that there is now for granted."""

    def stays(self, live: LiveBytes) -> int:
        """Return the bytes beside tensors that a call has left at the last look."""
        return max(0, self.now - live.now)


def meters_of(device: str, *, beside_arena: bool = False) -> tuple[LiveBytes, Meter]:
    """Return what counts the tensors of a call on a device, and a meter that sees kernels' own memory too.

    Kernels of a simulated device have none. On a CPU, what they take cannot be told from memory that an arena
    is given while the call runs (`beside_arena`). There the meter returns what the tensors take.
    """
    target = target_device(device)
    live = LiveBytes(target)
    if target.type != "cpu":
        return live, AllocatorMeter(target)
    return live, PeakMeter() if device == "cpu" and not beside_arena else LiveMeter(live)


def taken_by(live: LiveBytes, meter: Meter, allowed: int) -> int:
    """Return the bytes that an observed call took: what operators made, or more where kernels took more.

    `allowed` are those of kernels' own memory that do not count, and what stays beside tensors does not
    either: code of modules that were imported in the call.
    """
    return max(live.peak, meter.look() - meter.stays(live) - allowed)


class LiveMeter(Meter):
    """Measures what operators make."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def look(self, own_bytes: int = 0) -> int:
        self.peak, self.recent, self.now = self._live.peak, self._live.recent, self._live.now
        self._live.recent = self.now
        return self.peak


class AllocatorMeter(Meter):
    """Measures what torch's allocator gives out on an accelerator: tensors, and workspace of kernels.

    It resets the allocator's peak at each look.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def look(self, own_bytes: int = 0) -> int:
        before = self._base + own_bytes
        self.recent = torch.accelerator.max_memory_allocated(self._device) - before
        self.now = torch.accelerator.memory_allocated(self._device) - before
        self.peak = max(self.peak, self.recent)
        self.restart()
        return self.peak

    def restart(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)

    def forget(self) -> None:
        self._base = torch.accelerator.memory_allocated(self._device)
        self.restart()

    def stays(self, live: LiveBytes) -> int:
        """Return 0: the allocator rounds what tensors take up, and keeps nothing of a call."""
        return 0


def highest_resident() -> int:
    """The most bytes resident since PeakMeter last looked; 0 where the system does not say."""
    try:
        return max(PeakMeter.highest, _resident_sizes()["VmHWM"])
    except OSError:
        return 0


def _resident_sizes() -> dict[str, int]:
    """Return the resident size of this process, its peak since a reset, and the bytes of files in it."""
    facts = Counter[str]()
    with open(_STATUS, "rb") as status:
        for line in status:
            name, _, value = line.partition(b":")
            if name in (b"VmHWM", b"VmRSS", b"RssFile", b"RssShmem"):
                facts[name.decode()] = int(value.split()[0]) << 10
    return facts


class PeakMeter(Meter):
    """Measures the most memory that this process takes beyond what it has now, kernels' own memory included.

    Made within a pass; where another pass runs at the same time, nothing can be said, and it measures none.

    The kernel keeps the highest resident size of a process (`VmHWM`); it is reset at each look. Pages of
    files, such as those of libraries that run for the first time, are left out. A look takes 12 us.
    """

    highest: ClassVar[int] = 0
    """The highest peak of this process that a look of any meter has seen."""

    def __init__(self) -> None:
        self._can_reset, self._begun, self._alone = True, RUNNING.begun, RUNNING.now <= 1
        self.forget()

    def look(self, own_bytes: int = 0) -> int:
        peak, resident, file = self._look()
        self._alone = self._alone and RUNNING.begun == self._begun
        if not self._alone:
            self.peak = self.recent = self.now = 0
            return 0
        before = self._base + max(0, file - self._file) + own_bytes
        self.now = max(0, resident - before)
        self.recent = max((peak if self._can_reset else resident) - before, self.now)
        self.peak = max(self.peak, self.recent)
        return self.peak

    def restart(self) -> None:
        self._look()

    def forget(self) -> None:
        _, self._base, self._file = self._look()

    def _look(self) -> tuple[int, int, int]:
        """Return the peak, the resident size and the bytes of it that files hold; and reset the peak."""
        facts = _resident_sizes()
        PeakMeter.highest = max(PeakMeter.highest, facts["VmHWM"])
        if self._can_reset:
            try:
                with open(_CLEAR, "wb", buffering=0) as clear:
                    clear.write(_RESET_PEAK)
            except OSError:  # a container may forbid it: peaks between two looks are then not seen
                self._can_reset = False
        return facts["VmHWM"], facts["VmRSS"], facts["RssFile"] + facts["RssShmem"]
