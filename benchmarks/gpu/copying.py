"""How fast weights come to the device: page-locking, copies by the size of their pieces, kinds of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.slabs import measure_slabs
from benchmarks.gpu.target import Report, Target, require

PIECES_MIB = (1, 4, 16, 32, 64, 256)
"""Sizes of the pieces in which a transfer is copied; penstock's own are those of accelerator.PIECE."""

TRANSFER = 1 << 30
"""Bytes of a transfer, and of the host memory that is locked."""

Work = tuple[torch.Stream, Callable[[], object]]
"""A stream, and what enqueues something on it."""

PRODUCTS = 16
"""Products of two matrices of 8,192 by 8,192, which keep a large GPU busy for as long as a transfer takes."""


def measure(target: Target, report: Report) -> None:
    """Report a line for page-locking, one for each size of pieces, and one for each kind of slab."""
    device, nbytes = target.open(), target.nbytes(TRANSFER)
    memory: list[torch.Tensor] = []
    seconds = target.seconds(lambda: memory.append(device.allocate_host(nbytes)))
    report(what="page-locking", nbytes=nbytes, seconds=seconds, seconds_a_gib=seconds * 2**30 / nbytes)
    host, arena = memory[0], device.allocate(nbytes, "a transfer")
    host.copy_(torch.arange(251, dtype=torch.uint8).repeat(nbytes // 251 + 1)[:nbytes])
    copies: Any = device.open_stream("copies")  # one of torch's, as memory is page-locked
    kernels = device.current_stream()
    matrix = target.normal(target.width(8192), target.width(8192))
    product = torch.empty_like(matrix)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=product)

    multiply()
    alone = target.event_seconds(kernels, multiply)
    for mib in PIECES_MIB:
        piece = target.nbytes(mib << 20, least=4096)
        arena.zero_()
        copies.wait_stream(kernels)
        transfer = partial(copy_in_pieces, copies, arena, host, piece)
        free = target.event_seconds(copies, transfer)
        equal = torch.equal(arena.cpu(), host)
        busy, slowed = beside(target, (copies, transfer), (kernels, multiply))
        report(
            what="copies",
            piece_bytes=piece,
            pieces=-(-nbytes // piece),
            bytes_per_s=nbytes / free,
            bytes_per_s_under_products=nbytes / busy,
            products_s=alone,
            products_under_copies_s=slowed,
            equal=equal,
        )
        require(equal, f"a transfer in pieces of {piece} bytes arrived with other bytes")
    pci = device.pci_address
    device.close()
    measure_slabs(target, report, nbytes, pci)


def beside(target: Target, first: Work, second: Work) -> tuple[float, float]:
    """Seconds of the work of each of two streams that work at the same time.

    The host waits when the last event of both is recorded: one that it records later would count the wait.
    """
    stops = [target.timed(*second), target.timed(*first)]
    seconds, found = (stop() for stop in stops)
    return found, seconds


def copy_in_pieces(stream: torch.Stream, arena: torch.Tensor, host: torch.Tensor, piece: int) -> None:
    with stream:
        for at in range(0, host.numel(), piece):
            arena[at : at + piece].copy_(host[at : at + piece], non_blocking=True)
