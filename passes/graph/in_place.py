"""In-place operators as functions whose result lies in memory as what eager PyTorch writes to.

A functional graph has `bernoulli(x)` where the program says `x.bernoulli_()`. Where x is not contiguous, the
function may lay its result out in another way, and then the numbers are other ones: random ones are drawn in
the order of memory, and kernels compute the last bits of a row's end by other instructions. The operators in
the namespace `penstock_in_place` copy x as it lies, and call the in-place operator on the copy. Each is
declared when it is first asked for, here or by a stored graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from penstock.schedule.facts.errors import PassError

NAMESPACE = "penstock_in_place"

_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def as_function(operator: OpOverload) -> OpOverload:
    """The function of an in-place operator of aten, of which `is_in_place` is true."""
    name, overload = str(operator._opname), operator._overloadname
    packet = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if packet is None or overload not in packet.overloads():
        _declare(operator)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
    named_operator: OpOverload = getattr(packet, overload)
    return named_operator


def named(name: str, overload: str) -> OpOverload | None:
    """The function of the in-place operator of a name; None where aten has none."""
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return as_function(operator) if operator is not None and is_in_place(operator) else None


def is_in_place(operator: Any) -> bool:
    """Tells whether an operator of aten writes to its first argument alone, and returns it as large."""
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return False
    schema = operator._schema
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    ]
    returned = [
        returned.alias_info is not None and returned.alias_info.is_write for returned in schema.returns
    ]
    moved = torch.Tag.inplace_view in operator.tags or operator._opname in ("set_", "resize_", "resize_as_")
    return bool(written) and written[0] and sum(written) == 1 and returned == [True] and not moved


def is_dense(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of static size has its elements close together, in any order."""
    if not _is_static(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _declare(operator: OpOverload) -> None:
    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = self.new_empty_strided(self.size(), self.stride()).copy_(self)
        result: torch.Tensor = operator(copied, *args, **kwargs)
        return result

    def fake(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.new_empty_strided(self.size(), self.stride())

    name = operator._schema.name.removeprefix("aten::")
    arguments = str(operator._schema).partition("(")[2].replace("(a!)", "")
    full = f"{name}.{operator._overloadname}" if operator._overloadname != "default" else name
    tags = [tag for tag in (torch.Tag.nondeterministic_seeded, torch.Tag.pointwise) if tag in operator.tags]
    _LIBRARY.define(f"{full}({arguments}", tags=tags)
    _LIBRARY.impl(full, kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(full, kernel, "Autograd")  # so that autograd goes through what it calls
    torch.library.register_fake(f"{NAMESPACE}::{full}", fake, lib=_LIBRARY)


_OTHER_GRADIENTS = (torch.ops.aten.elu_.default, torch.ops.aten.copy_.default)
"""Operators whose functions in aten have another formula of the gradient, or none."""


@contextmanager
def layouts_kept(*, differentiated: bool = False) -> Iterator[None]:
    """Has torch make functional graphs in which what is written in place keeps its layout.

    With `differentiated`, autograd goes through what the graphs call, and finds the gradients of what the
    program calls. Raises PassError within for an operator that would change it. Only one thread may be in
    here.
    """
    dispatch: Any = FunctionalTensorMode.__torch_dispatch__

    def run_or_keep(
        self: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        other = differentiated and func in _OTHER_GRADIENTS
        if _writes(func, args) and (other or not _is_kept(func, args, kwargs)):
            functional = dispatch(self, as_function(_with_numbers(func, args)), types, args, kwargs)
            args[0].replace_(functional.from_functional())
            args[0].commit_update()
            args[0].sync()
            return args[0]
        result = dispatch(self, func, types, args, kwargs)
        _check(func, args, kwargs or {})
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", run_or_keep):
        yield


def _writes(operator: Any, args: Any) -> bool:
    return is_in_place(operator) and isinstance(args[0], FunctionalTensor)


def _with_numbers(operator: OpOverload, args: Any) -> OpOverload:
    """The overload that takes numbers where one for tensors is given them, as PyTorch allows of its own."""
    pairs = zip(operator._schema.arguments, args, strict=False)
    if any(isinstance(value, int | float | complex) and str(a.type) == "Tensor" for a, value in pairs):
        name = operator._overloadname.replace("Tensor", "Scalar")
        overload: OpOverload = getattr(operator.overloadpacket, name, operator)
        return overload
    return operator


def _is_kept(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """Tells whether the function of aten lays its result out as the in-place operator does."""
    written = args[0]
    if operator is torch.ops.aten.copy_.default or is_contiguous_or_false(written):
        return True
    if torch.Tag.pointwise not in operator.tags or not is_dense(written):
        return False
    tensors = [value for value in (*args[1:], *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
    return all(
        not tensor.dim() or (_is_static(tensor) and _layout(tensor) == _layout(written)) for tensor in tensors
    )


def _is_static(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride())


def _check(operator: Any, args: Any, kwargs: Any) -> None:
    """Raises PassError where a tensor that an operator writes to does not lie as it lay before."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable or torch.Tag.inplace_view in operator.tags:
        return
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        value = arguments.get(argument.name)
        if argument.alias_info is None or not isinstance(value, FunctionalTensor):
            continue
        now = torch._from_functional_tensor(value.elem)
        if _is_static(now) and _is_static(value) and _strides(now) != _strides(value):
            raise PassError(
                f"{operator} writes to a tensor of the strides {value.stride()}, which in a graph without "
                f"writes has {now.stride()}, so that gradients may differ in their bits: give it a "
                "contiguous() tensor, or use the operator that returns a new one"
            )


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
