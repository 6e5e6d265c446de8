"""Programs whose weights lost their values: torch.export.save turns fake ones into zeros without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from penstock.passes.weights.lifted import storage_identity
from penstock.schedule.facts.errors import PassError

_PIECE = 1 << 20


def refuse_lost_values(exported: ExportedProgram) -> None:
    """Raises PassError for a program of fake_export that torch.export.save wrote and load read.

    All its weights then begin at the start of one storage of zeros. Parameters of different shapes never do;
    where all have one shape, or there is one only, its example inputs are still fake.
    """
    values = {name: value for name, value in exported.state_dict.items() if _is_real(value)}
    lost = next(_on_top_of_one_another(values), None)
    if lost is None and values and _has_fake_inputs(exported) and all(map(_is_zero, values.values())):
        lost = next(iter(values))
    if lost is not None:
        raise PassError(
            f"the program's weights ({lost}, ...) have no values: fake_export made it, and torch.export.save "
            "does not keep fake weights; compile it where fake_export made it, or export the real model"
        )


def _on_top_of_one_another(values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Parameters in zeros that begin where one of another shape begins; ties of one shape are none."""
    first: dict[tuple[object, ...], torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, torch.nn.Parameter):
            other = first.setdefault((storage_identity(value), value.storage_offset()), value)
            if other.shape != value.shape and _is_zero(value):
                yield name


def _is_real(value: object) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and isinstance(value, torch.Tensor) and value.is_cpu and value.layout is torch.strided


def _has_fake_inputs(exported: ExportedProgram) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(exported.example_inputs))


def _is_zero(value: torch.Tensor) -> bool:
    """Whether the whole storage is, read no further than to the first byte that is not."""
    raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    return not any(bool(raw[start : start + _PIECE].any()) for start in range(0, len(raw), _PIECE))
