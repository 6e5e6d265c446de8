"""How weights are brought into memory, for those who want it otherwise than penstock chooses."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

from penstock.native.library import library
from penstock.runtime.device.opening import check_compiled_for, device_kind
from penstock.runtime.system.threads import READERS
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.payload.codec import Payload

ENGINES = ("auto", "native", "python")
"""What executes a plan on a CPU: the library in C++ if it was built, that library, Python's streamer."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a program or a model is loaded: `load(budget, options=LoadOptions(...))`. No output depends on it.

    Example:
        >>> from penstock import LoadOptions
        >>> LoadOptions(arena="contiguous", check_reads=True).engine
        'auto'

    Attributes:
        engine: What executes a plan on a CPU: `"native"` in C++, `"python"` in Python. `"auto"`, the default,
            is the first where the library was built, and the second with `check_reads`. Choose one to
            compare both, or to debug.
        readers: The number of threads that read weights on a CPU. Fewer leave cores to the calls; more help
            where a disk answers slowly.
        arena: The kind of memory that weights stream into, on a CPU `"mapped"`, `"paged"` or `"contiguous"`
            (`program.arenas()`). None, the default, takes the fastest by what was measured.
            Leave it out where a plan is given, which has decided it.
        page_lock: Weights stream to a device from memory that the system has locked. With False they stream
            from ordinary memory, for systems that refuse to lock it; a thread then waits for each copy.
        activations: What a program that is trained keeps for its backward: `"keep"` everything, or `"layers"`
            what goes from layer to layer, from which the rest is computed again. `"auto"`, the default, takes
            what is predicted to be fastest within `device_memory`, and `"keep"` with a budget. Leave it out
            where a plan is given.
        check_reads: A read of weights that are not in memory ends the process with SIGSEGV, in place of a
            page fault that finds them. For finding faults in a program or in penstock; slower.
        poison: Freed memory of a contiguous arena is overwritten with NaN, so that a read of it shows in
            outputs. For finding faults; slower.
    """

    engine: str = "auto"
    readers: int = READERS
    arena: str | None = None
    page_lock: bool = True
    activations: str = "auto"
    check_reads: bool = False
    poison: bool = False

    def __post_init__(self) -> None:
        """Raise StreamError for an engine that there is not."""
        if self.engine not in ENGINES:
            raise StreamError(
                f"there is no engine {self.engine!r}: choose {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            )


@dataclass(frozen=True, kw_only=True)
class LoadRequest(LoadOptions):
    """The options of a load, the device of its weights, and the folder of its spill file."""

    device: str = "cpu"
    spill: str | PathLike[str] | None = None

    @classmethod
    def of(cls, options: LoadOptions | None, **where: Any) -> LoadRequest:
        """Return a request of these options, or the default ones, in which `where` replaces attributes."""
        if unknown := where.keys() - cls.__dataclass_fields__:
            known = ", ".join(vars(LoadOptions()))
            raise TypeError(f"load takes no {', '.join(sorted(unknown))}: LoadOptions has {known}")
        return cls(**(vars(options or LoadOptions()) | where))

    @property
    def native(self) -> bool:
        """Tells whether the library in C++ executes the plan: if it was built and reads are not checked."""
        chosen = self.engine == "auto" and not self.check_reads and library() is not None
        return chosen or self.engine == "native"

    def check(self, payload: Payload) -> None:
        """Raise StreamError for an engine that is not for the device, and for code of another device."""
        if device_kind(self.device) != "cpu" and self.engine == "native":
            raise StreamError(
                f"the native engine streams on a CPU, not on {self.device}: leave engine='auto'"
            )
        check_compiled_for(payload, self.device)
