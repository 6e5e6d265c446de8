"""Read weights into memory of their own, outside of any plan: in first calls, and for unplanned reads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from penstock.integrations.called.facts import NO_FOLDER, ModuleFacts
from penstock.integrations.emptied.absent import CLASS
from penstock.passes.weights.lifted import tensor_in
from penstock.passes.weights.subclasses import each_part, has_parts, plain_tensors
from penstock.runtime.files.source import HeldStorages, Source, open_source
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
