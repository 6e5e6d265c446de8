"""Tensor subclasses that hold a weight in int8 with scales, in the ways that libraries write them."""

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Packed(torch.Tensor):
    """`data` (rows, columns) int8 and `scale` (rows, 1), which is plain or a subclass again."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data, scale, dtype):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data_"], inner["scale"], context["dtype"])

    def dense(self):
        return self.data_.to(self.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default):
            copy = cls(args[0].data_, args[0].scale, args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, copy)
        dense = [one.dense() if isinstance(one, Packed) else one for one in args]
        return func(*dense, **(kwargs or {}))


class Hidden(Packed):
    """Computes below the level at which a program is exported: the graph shows the weight as one."""


class Shown(Packed):
    """Computes on its parts while a program is exported, as torchao's classes do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return _linear(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Opaque(torch.Tensor):
    """Does not say what it is made of."""

    @staticmethod
    def __new__(cls, dense):
        return torch.Tensor._make_subclass(cls, dense)


def _linear(x, weight, bias=None):
    scale = weight.scale
    if isinstance(scale, Packed):
        scale = scale.data_.to(weight.dtype) * scale.scale
    y = (x @ weight.data_.to(x.dtype).t()) * scale.reshape(-1)
    return y if bias is None else y + bias


def pack(dense, kind):
    """Rows of int8, and what a step of each is worth."""
    scale = dense.abs().amax(1, keepdim=True) / 127
    return kind((dense / scale).round().to(torch.int8), scale, dense.dtype)


def quantise(module, kind, *, nested=False):
    """The module itself, whose linears hold packed weights; with `nested`, of packed scales."""
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            weight = pack(linear.weight.detach(), kind)
            if nested:
                weight = kind(weight.data_, pack(weight.scale, kind), weight.dtype)
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return module


def linears(width=256, layers=4, seed=0):
    """Linears of `width` to twice that and back, with a ReLU between, and values that depend on `seed`."""
    generator = torch.Generator().manual_seed(seed)
    modules = []
    for layer in range(layers):
        sizes = (width, 2 * width) if layer % 2 == 0 else (2 * width, width)
        modules += [nn.Linear(*sizes), nn.ReLU()]
    for parameter in (module := nn.Sequential(*modules)).parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / width**0.5
    return module.eval()
