"""What the page tables of this process hold, asked of /proc/self/pagemap."""

from array import array
from pathlib import Path

from penstock.runtime.system.memory import PAGE, round_up

_PRESENT = 1 << 63


def flags_at(address):
    """Returns the flags of the mapping at an address (/proc/self/smaps): `hg` asks for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"nothing is mapped at {address:#x}")


def mapped_pages(address, nbytes):
    """For each page of page-aligned memory, whether it is in this process's page tables."""
    return [bool(word & _PRESENT) for word in array("Q", _entries(address, nbytes))]


def mapped_bytes(start, stop):
    """The bytes of page-aligned memory that are in this process's page tables."""
    flags = _entries(start, stop - start)[7::8]  # the highest byte of each entry
    return len(flags.translate(None, bytes(range(128)))) * PAGE


def _entries(address, nbytes):
    """The words of 64 bits that the system keeps of pages; the highest bit says that one is there."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        entries.seek(address // PAGE * 8)
        return entries.read(round_up(nbytes, PAGE) // PAGE * 8)
