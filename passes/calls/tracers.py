"""Keeps torch's tracers off a program whose weights stream.

A tracer records operators, or runs them on tensors without values, and what it makes of them runs without
the streamer that brings the weights. So Dynamo runs such a program as plain Python, and other tracers are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import fx
from torch._C import _TorchDispatchModeKey as Mode
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor

from penstock.schedule.facts.errors import StreamError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MODES = {Mode.PROXY: "make_fx", Mode.FUNCTIONAL: "AOTAutograd", Mode.FAKE: "FakeTensorMode"}
_LEAVES = {fx.Proxy: "torch.fx.symbolic_trace", FakeTensor: "FakeTensorMode"}
_TRANSFORMS = {"Vmap": "vmap", "Grad": "grad", "Jvp": "jvp", "Functionalize": "functionalize"}


def outside_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have Dynamo run a function, and all that it calls, as plain Python.

    `torch.compiler.disable` does that too, but it imports Dynamo, which takes a second, and `torch.compile`
    of the function itself undoes it.
    """
    frames: Any = torch._C._dynamo.eval_frame

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        compiling = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(compiling)

    marked: Any = call
    marked._torchdynamo_disable = True  # ends the graph of what calls it
    marked._torchdynamo_disable_msg = (
        "its weights come and go while it runs, so it cannot be part of a graph: leave out fullgraph=True"
    )
    # Dynamo warns about `set_eval_frame`, so it must not look into this frame either.
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(marked.__code__, skip)
    return call


def refuse_tracers(leaves: Iterable[Any]) -> None:
    """Raise StreamError for a call within a tracer, or with leaves that a tracer or a transform made."""
    if tracer := tracer_of(leaves := list(leaves)):
        refuse_tracer(tracer)
    functorch: Any = torch._C._functorch
    level = functorch.peek_interpreter_stack()
    for leaf in leaves:
        if (
            level is not None
            and isinstance(leaf, torch.Tensor)
            and functorch.is_functorch_wrapped_tensor(leaf)
        ):
            name = _TRANSFORMS.get(level.key().name, "this")
            raise StreamError(
                f"torch.func's {name} cannot transform a streamed module, whose weights come and go while it "
                "runs: call the module outside of the transform, or transform the model itself"
            )


def tracer_of(leaves: Iterable[Any]) -> str:
    """Return the name of the tracer in which a call with such leaves runs, "" if it runs in none."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    exports = torch.compiler.is_exporting()
    before: Any = _get_dispatch_mode_pre_dispatch
    if before(Mode.PROXY) is not None:
        return "torch.export" if exports else "make_fx"
    for key, name in _MODES.items() if torch._C._len_torch_dispatch_stack() else ():
        if torch._C._get_dispatch_mode(key) is not None:
            return "torch.export" if exports else name
    return next((_LEAVES[type(leaf)] for leaf in leaves if type(leaf) in _LEAVES), "")


def refuse_tracer(name: str) -> NoReturn:
    """Raise StreamError for a tracer of torch's."""
    raise StreamError(
        f"{name} cannot record a streamed module, whose weights come and go while it runs: give {name} the "
        "model itself"
    )
