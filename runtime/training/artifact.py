"""Compiles a program for training: a forward and a backward method, and the parameters that are trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.export import ExportedProgram, export

from penstock.passes.annotate import annotate_with_values
from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.building.followed import export_as_called, in_eval
from penstock.passes.building.refusals import sentence
from penstock.passes.calls.inputs import refuse_shared_inputs, separate_inputs
from penstock.passes.graph.transforms import without_transforms
from penstock.passes.pipeline import Pipeline
from penstock.passes.training.facts import EVALUATE, PREDICT, RUNGS, SEGMENTS, Keeping, Training
from penstock.passes.training.halves import alone, divide, is_same
from penstock.passes.training.joint import refuse_hooks, refused_own_gradients
from penstock.passes.weights.lifted import refuse_lost_values
from penstock.passes.weights.subclasses import with_plain_parts
from penstock.runtime.artifact import compile
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Trace

if TYPE_CHECKING:
    from penstock.runtime.program import Program

_log = logging.getLogger(__name__)

_PLAIN: Pipeline[ExportedProgram] = Pipeline(
    (refuse_lost_values, refuse_shared_inputs, with_computed_buffers, with_plain_parts, without_transforms)
)
"""What a program goes through before it is differentiated."""

_NOTHING_LEAVES = (
    "spill=True has no effect: nothing that the forward keeps has a fixed size of 4,096 bytes or more"
)


def compile_training(
    model: ExportedProgram | nn.Module,
    path: str | PathLike[str],
    *,
    trainable: Sequence[str],
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    losses: Sequence[str] | Sequence[Sequence[str]] | None = None,
    evaluate: bool = True,
    spill: bool = False,
    activations: Sequence[Keeping] | None = None,
    backward: Literal["joint", "segments"] = "joint",
    **options: Any,
) -> Program:
    """Compile a model into an artifact whose module computes the gradients that the model computes.

    Trainable parameters are inputs of the compiled methods and parameters of the module that `load` returns.
    They stay in memory. All other weights are frozen, and stream. A module is exported in its mode, `train()`
    or `eval()`.

    Args:
        model: A module, or an exported program.
        path: The folder of the artifact.
        trainable: FQN patterns of the parameters to train (`["*.lora_*"]`).
        example: The arguments with which a module is exported: a sequence of positional ones, or a mapping of
            keyword arguments. Those that require grad get gradients too.
        dynamic_shapes: As for `torch.export.export`, for a module.
        losses: Names of the results that gradients may come from. Default: floating-point numbers of no
            dimension, or all floating-point tensors if there is none. A list of lists makes a backward for
            each list; it runs when gradients come from exactly these results, and everything is kept for it.
        evaluate: Compile the forward by itself too, for calls without gradients, and once more as in `eval()`
            where that is another program. False: such calls run the forward of training, `eval()` is refused,
            and plans serve steps of training alone.
        spill: Count the values that a forward keeps in the budget, like weights; they may leave memory for a
            file (docs/training.md).
        activations: The values of `activations=` that `Program.load` can choose from; each adds two methods.
            Default: all, but `["keep"]` with `spill` and with Inductor, whose code need not compute the same
            bits twice.
        backward: `"joint"` traces it. `"segments"` lets autograd compute one segment of the forward after
            another again, from its inputs, and take its gradients.
        options: Those of `compile`.

    Returns:
        The program, whose `load` returns a `TrainingModule`.

    Raises:
        PassError: The module cannot be exported, its call changes what later calls read, its gradients cannot
            be traced, a pattern matches no parameter, or arguments contradict each other; or as for
            `compile`.
        SourceError: As for `compile`.

    Example:
        >>> program = penstock.compile_training(model, "train.penstock", trainable=["3.*"], example=(x,))
        >>> with program.load("50%") as module:
        ...     module(x).sum().backward()
        ...     [name for name, parameter in module.named_parameters() if parameter.grad is not None]
        ['3.weight', '3.bias']
    """
    rungs = _rungs(activations, backward, options.get("lowering", "eager"), spill=spill)
    exported, in_eval = _exported(model, example, dynamic_shapes, trainable, evaluate=evaluate)
    exported = _PLAIN(exported)
    halves = divide(exported, _chosen(exported, trainable), losses, rungs=rungs, spill=spill)
    training, parameters, programs = halves.training, halves.training.parameters, dict(halves.programs)
    if evaluate:
        programs[EVALUATE] = alone(exported, parameters)
    if in_eval is not None:
        same = is_same(exported, in_eval := _PLAIN(in_eval))
        training = replace(training, in_eval=EVALUATE if same else PREDICT)
        if not same:
            programs[PREDICT] = alone(in_eval, parameters)
    annotated = annotate_with_values(programs, propagated=halves.propagated)
    payload = replace(annotated.payload, traces=_in_turn(annotated.payload.traces, training))
    values = {fqn: exported.state_dict[fqn] for fqn in parameters}
    if spill and all(storage.kind != "produced" for storage in payload.storages):
        _log.warning(_NOTHING_LEAVES)
    return compile(replace(annotated, payload=payload, training=training, trained=values), path, **options)


def _rungs(
    asked: Sequence[Keeping] | None, backward: str, lowering: str, *, spill: bool
) -> Sequence[Keeping]:
    """The rungs to compile, the one that keeps most first."""
    if spill and lowering != "eager":
        raise PassError("spill=True is for lowering='eager': leave one of the two out")
    if backward != "joint":
        return _segments(backward, asked, lowering)
    if asked is None:
        return RUNGS if lowering == "eager" and not spill else RUNGS[:1]
    if isinstance(asked, str) or not asked or not {*asked} <= {*RUNGS}:
        raise PassError(f"activations={asked!r}: expected a list of {', '.join(map(repr, RUNGS))}")
    if lowering != "eager" and {*asked} != {RUNGS[0]}:
        raise PassError(
            f"activations={asked!r} with lowering={lowering!r}: compiled code need not compute the same bits "
            f"twice, so only {[RUNGS[0]]} is possible"
        )
    if spill and {*asked} != {RUNGS[0]}:
        raise PassError(f"activations={asked!r} with spill=True, by which everything is kept: leave one out")
    return [rung for rung in RUNGS if rung in asked]


def _segments(backward: str, activations: Sequence[Keeping] | None, lowering: str) -> Sequence[Keeping]:
    """The rungs of a backward that is not traced."""
    if backward != SEGMENTS:
        raise PassError(f"backward={backward!r}: expected 'joint' or 'segments'")
    if activations is not None or lowering != "eager":
        raise PassError(
            "backward='segments' keeps what enters each segment, and runs as eager PyTorch does: leave out "
            "activations= and lowering="
        )
    return [SEGMENTS]


def _in_turn(traces: Sequence[Trace], training: Training) -> tuple[Trace, ...]:
    """The traces, in which forward and backward of each rung follow each other where both read weights."""
    trace_of = {trace.method: trace for trace in traces}
    for rung in training.rungs:
        forward, backward = (trace_of[name] for name in rung.methods[:2])
        if forward.steps and backward.steps:
            trace_of[forward.method] = replace(forward, follows=backward.graph)
            trace_of[backward.method] = replace(backward, follows=forward.graph)
    return tuple(trace_of.values())


def _exported(
    model: Any, example: Any, dynamic_shapes: Any, trainable: Sequence[str], *, evaluate: bool
) -> tuple[ExportedProgram, ExportedProgram | None]:
    """The program, and that of the model in eval mode, None where there is none."""
    if isinstance(model, ExportedProgram):
        if example is not None or dynamic_shapes is not None:
            raise PassError(
                "an exported program has its example inputs: leave out example= and dynamic_shapes="
            )
        return model, None
    if not isinstance(model, nn.Module):
        raise PassError(f"expected an exported program or a module, got {type(model).__name__}")
    if example is None:
        raise PassError("a module is exported with the arguments of a call: give example=(x,)")
    refuse_hooks(model, trainable)
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    args, kwargs = separate_inputs(model, (args, kwargs))
    make = partial(export, model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    with refused_own_gradients():
        exported = export_as_called(model, make)
    if not evaluate or not any(part.training for part in model.modules()):
        return exported, exported if evaluate else None
    with in_eval(model):
        try:
            return exported, export_as_called(model, make)
        except Exception as error:
            _log.warning(
                "the model cannot be exported in eval mode, so eval() is refused (%s: %s)",
                type(error).__name__,
                sentence(error),
            )
            return exported, None


def _chosen(exported: ExportedProgram, patterns: Sequence[str]) -> list[str]:
    """The FQNs of the parameters that match a pattern."""
    if isinstance(patterns, str):
        raise PassError(f"trainable= takes a list of patterns, got {patterns!r}: give [{patterns!r}]")
    parameters = list(exported.graph_signature.parameters)
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in parameters):
            raise PassError(
                f"trainable={pattern!r} matches no parameter; the first of them is "
                f"{next(iter(parameters), None)!r}"
            )
    return [fqn for fqn in parameters if any(fnmatchcase(fqn, pattern) for pattern in patterns)]
