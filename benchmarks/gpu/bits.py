"""Whether kernels give the same bits wherever a weight lies, and streamed weights those of resident ones.

Libraries choose kernels by the alignment of what they are given. penstock promises the bits of the resident
module, whose weights lie where torch's allocator puts them, at multiples of 512 bytes.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.target import Report, Target, make_stack, require

ALIGNMENTS = (64, 256, 512)
OWN_ALIGNMENT = 512
"""The alignment of penstock's arenas on devices."""

TOKENS = (1, 512)
WIDTH = 4096


def measure(target: Target, report: Report) -> None:
    """A line for each alignment, with and without bias, for one token and many; then those of whole modules.

    At the alignments below penstock's own, the answer is a finding about the library and no failure.
    """
    width = target.width(WIDTH)
    weight, bias = target.normal(width, width) / width**0.5, target.normal(width)
    for with_bias, tokens, alignment in product((False, True), TOKENS, ALIGNMENTS):
        x = target.normal(tokens, width)
        expected = functional.linear(x, weight, bias if with_bias else None)
        placed = functional.linear(x, place(weight, alignment), place(bias, alignment) if with_bias else None)
        equal = torch.equal(placed, expected)
        report(what="a linear", bias=with_bias, tokens=tokens, alignment=alignment, equal=equal)
        require(equal or alignment != OWN_ALIGNMENT, f"the bits change at an alignment of {alignment} bytes")
    for with_bias, tokens in product((False, True), TOKENS):
        equal = streamed_equal(target, tokens, bias=with_bias)
        report(what="a streamed stack", bias=with_bias, tokens=tokens, equal=equal)
        require(equal, "a streamed stack has not the bits of the resident one")


def place(value: Tensor, alignment: int) -> Tensor:
    """A copy of a tensor at an address that is a multiple of `alignment` and of nothing larger."""
    memory = torch.empty(value.nbytes + 4 * max(ALIGNMENTS), dtype=torch.uint8, device=value.device)
    start = -memory.data_ptr() % (2 * max(ALIGNMENTS)) + alignment
    placed = memory[start : start + value.nbytes].view(value.dtype).view(value.shape)
    assert placed.data_ptr() % (2 * alignment) == alignment
    return placed.copy_(value)


def streamed_equal(target: Target, tokens: int, *, bias: bool) -> bool:
    """Tells whether a stack at the smallest budget gives the bits of the resident one, in two passes."""
    module = target.draw(make_stack(target.width(WIDTH), 8, bias=bias))
    given = target.normal(tokens, target.width(WIDTH))
    program = target.compile(module, {"forward": (given,)}, "bits")
    expected = module(given)
    plan = program.plan(program.floor(target.device), device=target.device, hardware="h200")
    with program.load(plan=plan, device=target.device) as streamed:
        outputs = [streamed(given) for _ in range(2)]
        require(streamed.stats.bytes_moved > 0, "nothing has streamed")
    return all(torch.equal(output, expected) for output in outputs)
