"""What the page tables of this process hold, asked of /proc/self/pagemap."""

from __future__ import annotations

from array import array
from pathlib import Path

from penstock.runtime.system.memory import PAGE, round_up

_PRESENT = 1 << 63


def mapped_pages(address: int, nbytes: int) -> list[bool]:
    """For each page of page-aligned memory, whether it is in this process's page tables."""
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(address // PAGE * 8)
        words = array("Q", entries.read(round_up(nbytes, PAGE) // PAGE * 8))
    return [bool(word & _PRESENT) for word in words]
