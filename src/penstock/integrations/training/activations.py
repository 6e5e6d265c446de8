"""What autograd keeps of forwards for backwards: weights as names, activations in memory or in a file."""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from penstock.integrations.called.measuring import (
    ROOM,
    CallArguments,
    CallSizes,
    LiveBytes,
    plain_tensors_only,
    use_count,
)
from penstock.integrations.called.places import Values
from penstock.integrations.emptied.absent import has_memory
from penstock.passes.weights.subclasses import each_part, has_parts, plain_tensors
from penstock.runtime.files.direct_file import open_scratch
from penstock.runtime.system.memory import PAGE, round_up

_LEAST = 16 << 10
"""Memory of fewer bytes is not worth a write."""

_AHEAD = 8 << 20
"""Bytes that are read before a backward asks for them."""

_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {then} instead. Hint: enable anomaly detection "
    "to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True)."
)
"""What torch says, which does not compare the versions of saved tensors itself where there are hooks."""


class _File:
    """A file without a name, whose blocks the system frees when nothing refers to it."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_scratch(folder, 0, needed=nbytes, elsewhere="name another folder with cache=")
        weakref.finalize(self, self._file.close)

    def write(self, address: int, nbytes: int) -> int:
        """Write memory, and return its place: in whole pages past the page cache where that is possible."""
        place = round_up(self._file.nbytes, PAGE) + address % PAGE
        self._file.write_from(place, address, nbytes)
        self._file = replace(self._file, nbytes=place + nbytes)
        return place

    def read(self, place: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a place in new memory, which begins at the same offset in a page as before."""
        with plain_tensors_only():
            memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
            start = (place - memory.data_ptr()) % PAGE
            self._file.read_into(place, memory.data_ptr() + start, nbytes)
            return memory[start : start + nbytes]


@dataclass(eq=False)
class _Memory:
    """The memory of saved tensors, which leaves and comes back as a whole."""

    activations: Activations
    key: int  # of the storage, while it is in memory for the first time
    nbytes: int
    turn: int  # the forward that made it
    last: int = 0  # the number of the tensor that was saved last
    saved: list[weakref.ref[SavedTensor]] = field(default_factory=list)
    is_alone: bool = False  # nothing else had the storage at the last look
    file: _File | None = None
    place: int = 0
    reading: Future[torch.Tensor] | None = None
    is_ahead: bool = False  # read before a backward asked for it
    unread: set[int] = field(default_factory=set)  # for which the present backward has not asked

    def __del__(self) -> None:
        self.activations.forget(self)

    @property
    def tensors(self) -> list[SavedTensor]:
        """The tensors that autograd has not let go."""
        return [tensor for reference in self.saved if (tensor := reference()) is not None]

    def look(self) -> bool:
        """Tell whether nothing but saved tensors has this memory."""
        values = [saved.value for saved in self.tensors if saved.value is not None]
        self.is_alone = (
            bool(values)
            and use_count(values[0]) == 1 + len(values)  # one for the look itself
            and values[0].untyped_storage().nbytes() == self.nbytes
        )
        return self.is_alone

    def leave(self, file: _File) -> None:
        """Write the memory to a file, and give it up."""
        saved = self.tensors
        value = saved[0].value
        assert value is not None
        self.place = file.write(value.untyped_storage().data_ptr(), self.nbytes)
        self.file, self.unread = file, {tensor.number for tensor in saved}
        for tensor in saved:
            tensor.leave()


class SavedTensor:
    """A tensor that autograd has saved, which is no weight that streams.

    Args:
        value: The tensor.
        memory: Its memory, None if that stays.
        number: Tensors are counted in the order in which they are saved.
    """

    def __init__(self, value: torch.Tensor, memory: _Memory | None = None, number: int = 0) -> None:
        self.value: torch.Tensor | None = value
        self.memory, self.number = memory, number
        self._kind, self._dtype = "", value.dtype
        self._geometry: tuple[int, Sequence[int], Sequence[int]] = (0, (), ())
        self._then = self._now = value._version

    def leave(self) -> None:
        """Let the memory go."""
        value, self.value = self.value, None
        assert value is not None
        start = value.storage_offset() * value.itemsize
        self._geometry = int(start), tuple(value.shape), value.stride()
        self._kind, self._now = value.type(), value._version

    def check_version(self) -> None:
        """Raise RuntimeError, as torch does, if the tensor has been written since it was saved."""
        value = self.value
        now = self._now if value is None else value._version
        if now != self._then:
            kind, shape = (self._kind, self._geometry[1]) if value is None else (value.type(), value.shape)
            raise RuntimeError(_WRITTEN.format(kind=kind, shape=list(shape), now=now, then=self._then))

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bytes of its memory."""
        start, shape, stride = self._geometry
        offset = (memory.storage_offset() + start) // self._dtype.itemsize
        with plain_tensors_only():
            return torch.empty(0, dtype=self._dtype).set_(memory.untyped_storage(), offset, shape, stride)


class Activations:
    """Keeps what autograd saves in forwards.

    Args:
        folder: Where files are made.
        trained: Parameters, which stay in memory.

    Attributes:
        nbytes: Bytes that are kept in memory.
        earlier: Bytes of these that forwards before the present one have saved.
        alone: Bytes of these that nothing else had when they were looked at last.
        bytes_written, bytes_read: What has left memory, and come back, so far.
        left: Bytes that have left since the present forward began.
    """

    def __init__(self, folder: Path, trained: Sequence[torch.Tensor]) -> None:
        self.nbytes = self.earlier = self.alone = 0
        self.bytes_written = self.bytes_read = self.left = 0
        self._folder = folder
        self._stays = {value.untyped_storage()._cdata for value in trained}
        self._lock = RLock()  # the last reference to a graph may go in any thread
        self._turn = self._number = self._ahead = self._most = 0
        self._too_much: Callable[[], int] = int
        self._kept: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._others_have: list[weakref.ref[_Memory]] = []
        self._may_leave: list[tuple[int, weakref.ref[_Memory]]] = []  # a heap; the first was saved first
        self._have_left: weakref.WeakSet[_Memory] = weakref.WeakSet()
        self._come_next: deque[weakref.ref[_Memory]] = deque()
        self._come_of = 0  # the forward of these
        self._node: object = None  # that asked for a tensor last
        self._read_last: list[weakref.ref[_Memory]] = []  # of which it was the last to ask
        self._file: weakref.ref[_File] | None = None
        self._reader: ThreadPoolExecutor | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Keep what autograd saves in the body; hooks that are there already, such as a user's, go first."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            yield
            return
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    @contextmanager
    def forward(self, too_much: Callable[[], int]) -> Iterator[None]:
        """Keep what a forward saves; `too_much` says how many bytes have to leave when a tensor is saved."""
        self._turn, self.earlier, self.left, self._file = self._turn + 1, self.nbytes, 0, None
        self._too_much = too_much
        try:
            with self.hooks():
                yield
        finally:
            self._too_much = int

    def pack(self, value: torch.Tensor) -> SavedTensor:
        """Return what autograd keeps of a tensor."""
        if not has_memory(value) or value.device.type != "cpu" or value.is_conj() or value.is_neg():
            return SavedTensor(value)
        value = value.detach()  # has the same version, and keeps no graph alive
        storage = value.untyped_storage()
        if storage._cdata in self._stays or storage.data_ptr() % 16:
            return SavedTensor(value)
        self._number += 1
        memory = self._kept.get(storage._cdata)
        if memory is None:
            memory = _Memory(self, storage._cdata, storage.nbytes(), self._turn)
            self._kept[memory.key] = memory
            self._count(memory, memory.nbytes)
            if memory.nbytes >= _LEAST:
                self._others_have.append(weakref.ref(memory))
        saved = SavedTensor(value, memory, self._number)
        memory.saved.append(weakref.ref(saved))
        memory.last = self._number
        over = self._too_much()
        if over > 0:
            self.leave(over)
        return saved

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Return a tensor that was packed."""
        saved.check_version()
        node: object = torch._C._current_autograd_node()
        if saved.memory is not None and node is not None and self._have_left:
            self._end_node(node)
            self._read_ahead(saved.memory, saved.number)
        if saved.value is not None:
            return saved.value
        memory = saved.memory
        assert memory is not None
        if memory.reading is None:
            self._read(memory)
        self._is_read(memory)
        assert memory.reading is not None
        value = saved.over(memory.reading.result())
        memory.unread.discard(saved.number)
        if node is None:  # somebody looks at what a node has saved
            self._let_go(memory)
        elif not memory.unread:
            self._read_last.append(weakref.ref(memory))
        return value

    def look(self) -> int:
        """Return the bytes in memory that nothing but saved tensors has."""
        before, self._others_have = self._others_have, []
        for reference in before:
            memory = reference()
            if memory is not None and memory.look():
                heapq.heappush(self._may_leave, (memory.last, reference))
                self.alone += memory.nbytes
            elif memory is not None:
                self._others_have.append(reference)
        return self.alone

    def leave(self, nbytes: int) -> int:
        """Have at least so many bytes leave memory, if there are as many; returns how many have left."""
        self.look()
        left = 0
        while left < nbytes and self._may_leave:
            memory = heapq.heappop(self._may_leave)[1]()
            if memory is None:
                continue
            if not memory.look():  # somebody has looked at what a node has saved
                self.alone -= memory.nbytes
                self._others_have.append(weakref.ref(memory))
                continue
            file = self._file() if self._file is not None else None
            if file is None:
                file = _File(self._folder, memory.nbytes)
                self._file = weakref.ref(file)
            memory.leave(file)
            self._kept.pop(memory.key)
            self._have_left.add(memory)
            memory.is_alone = False
            self.alone -= memory.nbytes
            self._count(memory, -memory.nbytes)
            left += memory.nbytes
        self.left += left
        self.bytes_written += left
        return left

    def beyond(self, room: int) -> int:
        """Return the bytes that could leave, as far as they are more than `room`."""
        return self.look() - room if self.nbytes > room else 0

    def forget(self, memory: _Memory) -> None:
        """Stop counting memory that autograd has let go."""
        if memory.file is None:
            self.alone -= memory.nbytes * memory.is_alone
            self._count(memory, -memory.nbytes)
        else:
            self._let_go(memory)

    def begin_backward(self) -> None:
        """Read ahead anew."""
        self._come_of, self._most = 0, self.nbytes

    def end_backward(self) -> None:
        """Give back what has been read again and may be needed once more."""
        for memory in list(self._have_left):
            self._let_go(memory)
        self._come_next.clear()
        self._end_node(None)

    def _count(self, memory: _Memory, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            if memory.turn < self._turn:
                self.earlier += nbytes

    def _let_go(self, memory: _Memory) -> None:
        """Give back memory that has been read again."""
        if memory.reading is not None:
            self._is_read(memory)
            memory.reading, memory.unread = None, {tensor.number for tensor in memory.tensors}
            self._count(memory, -memory.nbytes)

    def _is_read(self, memory: _Memory) -> None:
        if memory.is_ahead:
            memory.is_ahead = False
            self._ahead -= memory.nbytes

    def _end_node(self, node: object) -> None:
        """Give back what another node was the last to ask for; a node may ask for a tensor twice."""
        if self._node is not node:
            self._node, before, self._read_last = node, self._read_last, []
            for reference in before:
                if (memory := reference()) is not None:
                    self._let_go(memory)

    def _read(self, memory: _Memory) -> None:
        assert memory.file is not None
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, "penstock-activations")
        self.bytes_read += memory.nbytes
        self._count(memory, memory.nbytes)
        memory.reading = self._reader.submit(memory.file.read, memory.place, memory.nbytes)

    def _read_ahead(self, asked: _Memory, number: int) -> None:
        """Read what was saved before a tensor, the latest first, while there is room for it."""
        if self._come_of != asked.turn:
            self._come_of = asked.turn
            earlier = [
                memory for memory in self._have_left if memory.turn == asked.turn and memory.last <= number
            ]
            earlier.sort(key=lambda memory: memory.last, reverse=True)
            self._come_next = deque(map(weakref.ref, earlier))
        while self._come_next:
            memory = self._come_next[0]()
            if memory is not None and memory.reading is None and memory is not asked:
                if self._ahead + memory.nbytes > _AHEAD or self.nbytes + memory.nbytes > self._most:
                    return
                self._ahead += memory.nbytes
                self._read(memory)
                memory.is_ahead = True
            self._come_next.popleft()


class LeastSizes(CallSizes):
    """The memory of measured calls without the activations that can leave, which have all other room."""

    def room(self, cap: int) -> int:
        return cap

    def taken_by(self, call: CallArguments) -> int:
        """Return the bytes that a known call takes at most."""
        return int(ROOM * self.most(call))


class LiveActivations(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes, and what they would be if all left memory that can, or nothing did.

    Attributes:
        least: The most bytes at once that cannot leave.
        most: The most bytes at once if none had left.
    """

    def __init__(self, activations: Activations, device: torch.device) -> None:
        super().__init__(device)
        self.least = self.most = 0
        self._activations = activations

    @property
    def beside(self) -> int:
        """Bytes that are live, those of earlier forwards included."""
        return self.now + self._activations.earlier

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.least = max(self.least, self.beside - self._activations.look())
        self.most = max(self.most, self.now + self._activations.left)
        return result


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A saved tensor that lies in a weight, without its memory.

    Attributes:
        owner: The pass that has saved it, which is kept alive by this.
        twin: The id of the weight's twin.
        part: The name of the plain tensor in which it lies, None for a quantised weight as a whole.
        start: Where it begins, in bytes from the start of that plain tensor.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides.
    """

    owner: object
    twin: int
    part: str | None
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor, owner: object, twin: int, part: str | None, start: int) -> PackedWeight:
        """Pack a tensor."""
        return cls(owner, twin, part, start, value.dtype, tuple(value.shape), value.stride())

    def over(self, plain: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor in the memory of `plain`, which has the values of its plain tensor."""
        start = plain.storage_offset() * plain.itemsize + self.start
        empty = torch.empty(0, dtype=self.dtype)
        memory = plain.untyped_storage()
        return empty.set_(memory, start // self.dtype.itemsize, self.shape, self.stride)


@contextmanager
def packing(
    owner: object,
    values: Values,
    names: Mapping[int, str],
    unpack: Callable[[PackedWeight], torch.Tensor],
    activations: Activations,
) -> Iterator[None]:
    """Pack the weights that autograd saves in the body, which is the call of one module.

    Args:
        owner: The pass.
        values: The weights that are in memory for the call, by twin.
        names: The FQNs of twins.
        unpack: Returns the tensor of a packed weight.
        activations: Keeps what is no weight, if no hooks are there already.
    """
    packer = _Packer(owner, values, names, unpack, activations)
    try:
        with saved_tensors_hooks(packer.pack, packer.unpack):
            yield
    finally:
        packer.spans.clear()  # autograd keeps `packer.pack`, which must not keep the weights


@dataclass(frozen=True)
class _Span:
    """Where a plain tensor of a weight is in memory."""

    start: int
    stop: int
    twin: int
    part: str
    plain: torch.Tensor

    @classmethod
    def of(cls, twin: int, part: str, plain: torch.Tensor) -> _Span:
        last = sum((n - 1) * stride for n, stride in zip(plain.shape, plain.stride(), strict=True))
        start = plain.data_ptr()
        return cls(start, start + (last + 1) * plain.itemsize, twin, part, plain)


class _Packer:
    """Packs weights, and hands the rest to the hooks that were there: autograd calls the innermost alone."""

    def __init__(
        self,
        owner: object,
        values: Values,
        names: Mapping[int, str],
        unpack: Callable[[PackedWeight], torch.Tensor],
        activations: Activations,
    ) -> None:
        self.spans = [
            _Span.of(twin, part, plain)
            for twin, value in values.items()
            for part, plain in plain_tensors(names[twin], value).items()
        ]
        self._owner, self._unpack_weight = owner, unpack
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._others: tuple[Callable[[Any], Any], Callable[[Any], torch.Tensor]] = outer or (
            activations.pack,
            activations.unpack,
        )

    def pack(self, value: torch.Tensor) -> object:
        """Return what autograd keeps of a tensor."""
        packed = self._whole(value) if has_parts(value) else self._plain(value)
        return self._others[0](value) if packed is None else packed

    def unpack(self, packed: Any) -> Any:
        """Return the tensor that was packed."""
        if isinstance(packed, PackedWeight):
            return self._unpack_weight(packed)
        if isinstance(packed, _Copy):
            return packed.value
        return self._others[1](packed)

    def _plain(self, value: torch.Tensor) -> object | None:
        if not has_memory(value) or not value.numel():
            return None
        span = next(
            (candidate for candidate in self.spans if candidate.start <= value.data_ptr() < candidate.stop),
            None,
        )
        if span is None:
            return None
        if value.is_conj() or value.is_neg():
            return _Copy(value.clone())
        return PackedWeight.of(value, self._owner, span.twin, span.part, value.data_ptr() - span.start)

    def _whole(self, value: torch.Tensor) -> object | None:
        """Pack a quantised tensor: a weight by its name; another one that shares its memory is copied."""
        parts = [plain for plain in plain_tensors("", value).values() if has_memory(plain)]
        spans = [span for part in parts for span in self.spans if span.start <= part.data_ptr() < span.stop]
        if not spans:
            return None
        weight = [span for span in self.spans if span.twin == spans[0].twin]
        if [_place(part) for part in parts] == [_place(span.plain) for span in weight]:
            return PackedWeight.of(value, self._owner, spans[0].twin, None, 0)
        return _Copy(each_part(value, torch.clone))


@dataclass(frozen=True)
class _Copy:
    """A copy of a tensor in a weight's memory that has no name."""

    value: torch.Tensor


def _place(plain: torch.Tensor) -> object:
    return plain.data_ptr(), plain.shape, plain.stride()
