"""The memory that weights may take: of a device beside everything else, of the host behind it, of this host.

What a load takes of this host is compared here with the limits of this process (`check_room`), for every
engine and every device, before a byte is read. `penstock-run` has no Python: for it native/arena.cpp does so.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from penstock.runtime.device.opening import ACCELERATOR, device_kind, open_accelerator
from penstock.runtime.device.weights import LOADED_THROUGH
from penstock.runtime.system.limits import Limit, address_limit, memory_limit, usable_bytes
from penstock.runtime.system.memory import HUGE_PAGE, give_back_unused, supports_populate
from penstock.runtime.system.threads import READERS
from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size
from penstock.schedule.host import host_bytes
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.planning import PlanRequest

_log = logging.getLogger(__name__)

Reserve: TypeAlias = int | str | Callable[[int], int]
"""Memory that a caller keeps for itself: bytes, `2GB`, or bytes as a function of the context length."""

WORKSPACE = 128 << 20
"""Bytes of an accelerator that are left for libraries (matrix products) and for the allocator's rounding."""

LEAST_HOST_BYTES = 16 << 10
"""Two blocks of a disk for each of two halves, through which resident weights pass when they are loaded."""

LOADING = 8 << 20
"""Bytes that a load takes for itself: methods, threads, tables of the engine. For 48 layers it took 1 MiB."""

_PLANNING = 16 << 20
"""Bytes for planning another budget before it is loaded: it left 6 to 10 MiB in the process for 24 layers."""

_PAGE_TABLES = 512
"""The system takes a byte for so many of private memory, to tell where its pages are."""

_UNLIMITED_STACK = 2 << 20  # what glibc then gives a thread on x86-64


def reserved_bytes(reserve: Reserve, context_length: int | None) -> int:
    """Returns the bytes that `reserve` stands for. Raises BudgetError if it is no size."""
    if callable(reserve):
        if context_length is None or context_length < 0:
            raise BudgetError("reserve= is a function of the context length: give context_length= too")
        reserve = reserve(context_length)
    return parse_size(reserve, name="reserve") if reserve else 0


@dataclass(frozen=True)
class MemorySplit:
    """A cap on all of a device's memory, and the parts that are taken from it before weights.

    Attributes:
        total: Bytes of the cap.
        activations: Bytes of intermediate values.
        workspace: Bytes for libraries on an accelerator.
        reserved: Bytes that the caller needs.
        others: Bytes that other processes use.
        trained: Bytes of trained parameters, their gradients and two moments of AdamW.

    Example:
        >>> print(program.split_memory("1GB"))  # doctest: +ELLIPSIS
        of ... device memory: ... for weights
    """

    total: int
    activations: int
    workspace: int = 0
    reserved: int = 0
    others: int = 0
    trained: int = 0

    @classmethod
    def of(
        cls,
        device_memory: int | str,
        device: str,
        *,
        activations: int,
        reserve: Reserve,
        context_length: int | None,
        trained: int,
    ) -> MemorySplit:
        """The division of a cap on a device, of which libraries and other processes take a part."""
        accelerator = open_accelerator(device) if device_kind(device) == ACCELERATOR else None
        return cls(
            total=parse_size(device_memory, name="device_memory"),
            activations=activations,
            workspace=WORKSPACE if accelerator else 0,
            reserved=reserved_bytes(reserve, context_length),
            others=accelerator.held_by_others if accelerator else 0,
            trained=trained,
        )

    @property
    def weights(self) -> int:
        """Bytes that are left for weights; negative if the other parts exceed the cap."""
        return self.total - self.own - self.others

    @property
    def own(self) -> int:
        """Bytes of all parts but weights that this process takes."""
        return self.activations + self.workspace + self.reserved + self.trained

    def budget(self, floor: int) -> int:
        """Return the budget for weights, in bytes.

        Args:
            floor: The smallest budget that can run.

        Raises:
            BudgetError: Less is left than `floor`; the message has all parts.
        """
        if self.weights < floor:
            raise BudgetError(
                f"{self}: weights need at least {format_size(floor, up=True)}, so give at least "
                f"{format_size(self.total - self.weights + floor, up=True)}",
                floor_bytes=floor,
            )
        return self.weights

    def outgrown(self, allocated: int, others_now: int) -> str:
        """Say which part took more than its share, when a device was out of memory.

        Args:
            allocated: Bytes that this process has on the device beside weights.
            others_now: Bytes that other processes use now.
        """
        parts = [("what other processes hold", others_now, self.others)]
        parts.append(("activations, workspace and what the caller keeps", allocated, self.own))
        name, took, share = max(parts, key=lambda part: part[1] - part[2])
        return f"{name} took {format_size(took)} and more, of a share of {format_size(share)}"

    def __str__(self) -> str:
        parts = {
            "activations": self.activations,
            "trained parameters": self.trained,
            "workspace": self.workspace,
            "reserved": self.reserved,
            "held by others": self.others,
        }
        taken = ", ".join(f"{format_size(nbytes)} {title}" for title, nbytes in parts.items() if nbytes)
        left = format_size(max(0, self.weights))
        return f"of {format_budget(self.total)} device memory: {taken or 'nothing'}, {left} for weights"


def parse_host_memory(host_memory: int | str | None, weight_bytes: int) -> int | None:
    """Return the bytes of `host_memory`. Raises BudgetError for fewer than weights pass through."""
    if host_memory is None:
        return None
    nbytes = parse_size(host_memory, total=weight_bytes or 100, name="host_memory")
    if nbytes < LEAST_HOST_BYTES:
        raise BudgetError(
            f"host memory of {format_budget(nbytes)} is too little: weights pass through it when they are "
            f"loaded, so give at least {LEAST_HOST_BYTES} bytes",
            floor_bytes=LEAST_HOST_BYTES,
        )
    return nbytes


def host_limit(device: str, budget: int, beside: int) -> int | None:
    """Returns the bytes of weights that the host behind a device may hold unasked; None if nobody knows.

    A simulated device takes its memory of the host's: its `budget`, and `beside` bytes of activations.
    """
    usable, limit = usable_bytes(), memory_limit()
    if usable is None or limit is None or device_kind(device) != "sim":
        return usable
    return max(0, min(usable, limit.left - LOADING - budget - beside))


def fits_host(plan: Plan, limit: int | None) -> bool:
    """Tells whether a plan takes `limit` bytes of the host at most (None: any), or has its own limit."""
    return plan.host is not None or limit is None or host_bytes(plan) <= limit


def check_host(plan: Plan, device: str, beside: int) -> None:
    """Raise BudgetError for a plan that keeps more behind a device than its host may hold.

    A budget that leaves the host nothing is for `check_room` to refuse.
    """
    limit = None if plan.host else host_limit(device, plan.budget, beside)
    if limit is not None and limit >= LEAST_HOST_BYTES and not fits_host(plan, limit):
        raise BudgetError(
            f"the plan keeps {format_size(host_bytes(plan))} of weights in the host's memory, of which "
            f"{format_size(limit)} may be taken: plan with host_memory={limit}"
        )


@dataclass(frozen=True)
class HostUse:
    """The bytes that a loaded plan takes of this host's memory, none of which the system can take back.

    `weights` are those of an arena in private memory, of weights outside of it and of units; `copies` are in
    the host behind a device; `beside` are activations, and what is trained. `reserved` are bytes of address
    space for the weights, which a paged arena has for the whole layout.
    """

    budget: int
    weights: int
    copies: int
    beside: int
    reserved: int
    paged: bool = False

    @classmethod
    def of(cls, plan: Plan, payload: Payload, device: str, beside: int, *, private: bool = True) -> HostUse:
        """What a plan takes on a device. Without `private`, an arena that maps files has no other memory."""
        sizes = [storage.nbytes for storage in payload.storages]
        outside, kind = sum(sizes[s] for s in plan.outside), device_kind(device)
        if kind != "cpu":
            copies = host_bytes(plan)
            if copies < LOADED_THROUGH:
                copies = min(copies + LOADED_THROUGH, plan.host.nbytes if plan.host else sys.maxsize)
            weights, beside = (plan.arena_bytes + outside, beside) if kind == "sim" else (0, 0)
            return cls(plan.budget, weights, copies, beside, weights + copies)
        arena, paged = plan.arena_bytes, plan.arena.kind == "paged" and plan.arena_bytes > 0
        layout = plan.arena.segments[-1].stop if paged else 0
        reserved = layout
        if not paged or plan.arena.granule % HUGE_PAGE == 0:  # spare granules, or one buffer
            reserved += arena
        if maps_files(plan) and private:
            reserved += layout  # by which the page cache is asked
        elif maps_files(plan):
            # What readers are mapping is all that cannot be taken back.
            arena, reserved = min(arena, READERS * plan.arena.granule), layout
        units = plan.pool.nbytes if plan.pool else 0
        places = plan.pool.layout if plan.pool else ()
        reserved += max((place + n for place, n in zip(places, sizes, strict=False) if place >= 0), default=0)
        weights = arena + outside + units
        return cls(plan.budget, weights, 0, beside, reserved + outside, paged or plan.pool is not None)

    @property
    def loading(self) -> int:
        """What loading takes for itself: a program, threads and tables, and page tables of the system."""
        return LOADING + (self.weights + self.copies) // _PAGE_TABLES

    def lacking(self, floor: Callable[[str | None], int]) -> str:
        """Say what does not fit into what is left, and which budget does; an empty text if all fits.

        `floor` returns the smallest budget in an arena of that name, or in the best of them.
        """
        memory, address = memory_limit(), address_limit()
        parts = {
            "weights": self.weights,
            "copies of weights in the host": self.copies,
            "activations and what is trained": self.beside,
            "loading itself": self.loading,
        }
        if memory is not None and sum(parts.values()) > memory.left:
            through = LOADED_THROUGH if self.copies else 0
            room = memory.left - self.beside - LOADING - _PLANNING - through
            largest = (room * _PAGE_TABLES - through) // (_PAGE_TABLES + 1)
            return self._said(parts, memory, largest, floor(None))
        if address is None:
            return ""
        parts |= {"weights": self.reserved, "copies of weights in the host": 0, "stacks": READERS * _stack()}
        if sum(parts.values()) <= address.left:
            return ""
        largest = address.left - sum(parts.values()) + self.reserved - _PLANNING
        arena = "contiguous" if self.paged else None
        return self._said(parts, address, largest, floor(arena), arena)

    def _said(
        self, parts: Mapping[str, int], limit: Limit, largest: int, least: int, arena: str | None = None
    ) -> str:
        listed = ", ".join(f"{format_size(nbytes)} for {name}" for name, nbytes in parts.items() if nbytes)
        needs = (
            f"a budget of {format_budget(self.budget)} takes {format_size(sum(parts.values()), up=True)} of "
            f"{limit.of} here ({listed}), and {limit.name} leaves {format_size(limit.left)}"
        )
        arena_words = f" with arena={arena!r}, which reserves no more than its budget," if arena else ""
        if largest >= least:
            return f"{needs}: give{arena_words} a budget of at most {largest} bytes ({format_size(largest)})"
        more = format_size(least - largest, up=True)
        return (
            f"{needs}: no budget fits{arena_words.removesuffix(',')}, since the least is {least} bytes "
            f"({format_size(least, up=True)}): free {more} more, or raise that limit"
        )


def maps_files(plan: Plan) -> bool:
    """Tells whether a plan's arena on a CPU maps the weight files, whose pages the system can take back."""
    paged = plan.arena.kind == "paged" and plan.arena.backing == "mapped"
    return paged and plan.arena_bytes > 0 and supports_populate()


def check_room(
    plan: Plan, payload: Payload, floor: Callable[[str | None], int], *, device: str = "cpu", beside: int = 0
) -> bool:
    """Raise BudgetError, before a byte is read, for a plan that the limits of this process leave no room for.

    `beside` are bytes of activations and of what is trained. Returns whether there is room for private memory
    beside mapped files. If there is none, they are only mapped: the system then takes back what does not fit,
    and reads it again, where it would have killed the process.

    What planning took (some 31 MiB at its peak) is no part of this: it is over, and the process does not hold
    it together with weights. What it has left behind counts among what the process has already, and is given
    back here where it is in the way. To make a plan, a process needs that much at least.
    """
    whole = HostUse.of(plan, payload, device, beside)
    if whole.lacking(lambda _: 0):
        give_back_unused()
    lacking = whole.lacking(floor)
    if not lacking:
        return True
    if device_kind(device) == "cpu" and maps_files(plan):
        refused = HostUse.of(plan, payload, device, beside, private=False).lacking(floor)
        if not refused:
            _log.warning("%s; until then weights are read again that the system has taken back", lacking)
            return False
        lacking = refused
    raise BudgetError(lacking, floor_bytes=floor(None))


def _stack() -> int:
    nbytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _UNLIMITED_STACK if nbytes == resource.RLIM_INFINITY else nbytes


def check_load(
    asked: PlanRequest,
    budget: int | str | None,
    plan: Plan | None,
    device_memory: int | str | None,
    *,
    activations: bool,
    reserve: Reserve,
) -> None:
    """Raise BudgetError or PlanError unless one of the three is given, and the rest of a request fits it.

    `activations` tells whether a way to keep them is asked for.
    """
    if sum(choice is not None for choice in (budget, plan, device_memory)) != 1:
        raise BudgetError(
            "load needs a budget, a plan or device_memory, and one of them only: load(budget='50%'), "
            "load(plan=plan) or load(device_memory='12GB')"
        )
    if device_kind(asked.device) == "cpu" and asked.host_memory is not None:
        raise BudgetError("a CPU has no host behind it: host_memory= is for accelerators and sim")
    if plan is not None and (asked.keep or asked.arena or asked.host_memory is not None):
        raise PlanError("keep=, arena= and host_memory= are decided by the plan: give them to plan()")
    if plan is not None and activations:
        raise PlanError("activations= is decided by the plan: give it to plan()")
    if reserve and device_memory is None:
        raise BudgetError("reserve= is taken from device_memory=: give that, not a budget or a plan")
