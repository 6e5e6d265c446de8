"""The module that is trained: its parameters stay, its weights stream, forward and backward."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.passes.calls.tracers import outside_dynamo
from penstock.passes.lowering.archive import open_programs, read_training
from penstock.passes.training.facts import (
    BACKWARD,
    COPIES,
    EVALUATE,
    PREDICT,
    TRAINABLE,
    Backward,
    Rung,
    Training,
)
from penstock.runtime.capabilities import Kind
from penstock.runtime.files.artifact_files import file_chunks
from penstock.runtime.files.safetensors_file import read_header, reading
from penstock.runtime.files.tensor_file import open_tensors
from penstock.runtime.module import LoadedMethod, Part, StreamedModule, without_grad
from penstock.runtime.stream.loaded import LoadedWeights
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from penstock.schedule.facts.model import Trace
from penstock.schedule.payload.codec import Payload

if TYPE_CHECKING:
    from penstock.runtime.program import Program


PARAMETERS = "trainable.safetensors"


def write_parameters(values: Mapping[str, torch.Tensor], folder: Path) -> str:
    """Writes the values by FQN into a file of an artifact that is being built, and returns its sha256.

    Raises PassError for values whose rows do not lie one behind another, which the file would not keep.
    """
    from safetensors.torch import save_file

    for fqn, value in values.items():
        if not value.is_contiguous():
            raise PassError(f"{fqn} is to be trained and is not contiguous: export it as contiguous()")
    save_file({fqn: value.detach().contiguous() for fqn, value in values.items()}, folder / PARAMETERS)
    return _hash(folder / PARAMETERS)


def read_parameters(folder: Path, names: Sequence[str], sha256: str) -> dict[str, torch.Tensor]:
    """Reads the values of these FQNs that `write_parameters` wrote.

    Raises SourceError for a file that is damaged, is another one, or lacks one of them.
    """
    path = folder / PARAMETERS
    if _hash(path) != sha256:
        raise SourceError(f"{path} has changed since it was compiled: restore it, or compile again")
    with open_tensors(path) as opened:
        for name in names:
            if name not in opened.entries:
                raise SourceError(f"{path} lacks the parameter {name}: compile again")
        return {name: opened.get_tensor(name) for name in names}


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with reading(path):
        for chunk in file_chunks(path, 0, path.stat().st_size):
            digest.update(chunk)
    return digest.hexdigest()


class Trained(Kind):
    """A program that is trained, as one of its rungs: a forward, and backwards that take what it keeps."""

    def __init__(self, folder: Path, training: Training, variant: str | None) -> None:
        self._folder, self.training = folder, training
        self.rung = training.rung(variant or training.rungs[0].name) or training.rungs[0]
        self.variant = self.rung.name
        self.variants = (variant,) if variant else tuple(rung.name for rung in training.rungs)
        self.files = (PARAMETERS,) if training.sha256 else ()

    @classmethod
    def find(cls, folder: Path, payload: Payload, variant: str | None) -> Trained | None:
        """Return the kind of an artifact, None if its program is not trained."""
        if all(method.name != BACKWARD for method in payload.methods):
            return None
        with open_programs(folder, payload) as archive:
            training = read_training(archive)
        return cls(folder, training, variant) if training else None

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of the parameters that are trained, with their gradients, and two moments of AdamW."""
        if not self.training.parameters:
            return 0
        entries = read_header(self._folder / PARAMETERS).entries.values()
        return COPIES * sum(tensor.stop - tensor.start for tensor in entries)

    def payload(self, stored: Payload) -> Payload:
        """Leave out the methods of other rungs, and plans, which are of all methods."""
        other_methods = {name for rung in self.training.rungs if rung != self.rung for name in rung.methods}
        methods = tuple(method for method in stored.methods if method.name not in other_methods)
        graphs = {method.graph for method in methods}
        return replace(
            stored,
            methods=methods,
            traces=tuple(trace for trace in stored.traces if trace.graph in graphs),
            probes=tuple(order for order in stored.probes if order.graph in graphs),
            plans=(),
        )

    def step(self, payload: Payload) -> set[int]:
        return {method.graph for method in payload.methods if method.name in self.rung.methods[:2]}

    def check(self) -> None:
        if self.files:
            read_parameters(self._folder, self.training.parameters, self.training.sha256)

    def module(
        self, payload: Payload, methods: Mapping[str, LoadedMethod], weights: LoadedWeights, name: str
    ) -> TrainingModule:
        """Return the module with its parameters and the buffers that its program writes."""
        written = {s for s, storage in enumerate(payload.storages) if storage.kind == "mutable"}
        return TrainingModule(
            methods,
            weights,
            name,
            self.training,
            self.rung,
            parameters=read_parameters(self._folder, self.training.parameters, self.training.sha256),
            buffers={w.fqn: weights.tensors[w.fqn] for w in payload.tensors if w.parts[0].storage in written},
            places=any(storage.kind == "produced" for storage in payload.storages),
        )


@dataclass(frozen=True)
class RungBytes:
    """Bytes of a rung: what is kept, all activations, and the weights that its backward reads, each time."""

    activations: str
    kept_bytes: int
    activation_bytes: int
    backward_read_bytes: int


def rung_bytes(program: Program) -> list[RungBytes]:
    """The bytes of each rung, at the exported sizes; none for a program that is not trained."""
    weights = [0 if storage.kind == "produced" else storage.nbytes for storage in program.payload.storages]
    reports = []
    for name, variant in program.variants.items():
        methods = variant.kind.rung.methods[1:] if isinstance(variant.kind, Trained) else ()
        traces = [trace for trace in variant.payload.traces if trace.method in methods]
        read = max(sum(weights[s] for step in trace.steps for s in step.reads) for trace in traces)
        reports.append(RungBytes(name, variant.kept_bytes, variant.activation_bytes, read))
    return reports


def dynamic_values(program: Program) -> tuple[str, ...]:
    """The values of dynamic size that a forward keeps for its backward although it has places for others."""
    if not isinstance(program.kind, Trained) or not program.value_bytes:
        return ()
    return tuple(
        method.inputs[leaf].name
        for method in program.payload.methods
        for leaf in program.kind.training.made(method.name)
        if any(isinstance(size, str) for size in method.inputs[leaf].shape)
    )


class TrainingModule(StreamedModule):
    """A streamed module whose parameters stay in memory and are trained like those of any module.

    `parameters()` and `state_dict()` have the parameters that the program was compiled to train, under their
    FQNs, and the buffers that it writes to, such as the statistics of batch norms. Frozen weights stream
    through the forward, and again through the backward. Under `torch.no_grad()` the forward runs by itself
    and keeps nothing. After `eval()`, a call computes what the model computes in eval mode; where that is
    another program, it has no backward. `train()` is the mode in which the model was exported.

    With `places`, the values that a forward keeps have places among the weights, one for each value: a
    forward is refused while another waits for its backward.
    """

    def __init__(
        self,
        methods: Mapping[str, LoadedMethod],
        weights: LoadedWeights,
        name: str,
        training: Training,
        rung: Rung,
        *,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        places: bool = False,
    ) -> None:
        super().__init__(methods, weights, name)
        self.training = True
        training.check(rung, {name: len(loaded.program.convention.names) for name, loaded in methods.items()})
        self._facts, self._rung, self._has_places = training, rung, places
        self._kept: Callable[[], TrainingCall | None] = lambda: None  # the last call whose values were kept
        self._places = [_holder(self, fqn) for fqn in training.parameters]
        for (holder, leaf), fqn in zip(self._places, training.parameters, strict=True):
            holder._parameters[leaf] = nn.Parameter(parameters[fqn])
        self._written = [(*_holder(self, fqn), buffer) for fqn, buffer in buffers.items()]
        for holder, leaf, buffer in self._written:
            holder._buffers[leaf] = buffer

    @property
    def activations(self) -> str:
        """What a forward keeps for its backward: `"keep"`, `"layers"` or `"segments"`."""
        return self._rung.name

    @outside_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. Its backward gives gradients to the parameters, and to inputs exported with grad.

        Args:
            args, kwargs: Those of the exported model.

        Raises:
            StreamError: Autocast is on; an input requires grad and was exported without; with `spill=True`,
                another forward waits for its backward; or as for `StreamedModule`.
        """
        if torch.is_autocast_enabled("cpu"):
            raise StreamError(
                "autocast is on, and the program computes in the dtypes in which it was exported: call it "
                "outside of torch.autocast"
            )
        trained = [getattr(holder, leaf) for holder, leaf in self._places]
        other = not self.training and self._facts.in_eval == PREDICT
        convention = self._method(PREDICT if other else self._rung.forward).program.convention
        leaves = convention.flatten(args, {**kwargs, TRAINABLE: trained})
        self._refuse_other_buffers()
        wants = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and wants:
            if other:
                with without_grad():
                    result = self.run(PREDICT, _detached(leaves))
                return _without_backward(result, wants)
            self._refuse_lost_gradients(leaves, convention.names)
            call = TrainingCall(self._facts, self._rung, self.run, once=self._has_places)
            result = call.result(leaves)
            self._kept = weakref.ref(call)
            return result
        with without_grad():
            if not other and EVALUATE not in self._methods:
                return self.run(self._rung.forward, as_exported(leaves, self._facts))[0]
            return self.run(PREDICT if other else EVALUATE, leaves)

    def run(self, method: str, leaves: Sequence[Any]) -> Any:
        if method not in {backward.method for backward in self._rung.backwards}:
            self._refuse_pending()
        return super().run(method, leaves)

    def measure_call(self, method: str, /, *args: Any, **kwargs: Any) -> Trace:
        self._refuse_pending()
        return super().measure_call(method, *args, **kwargs)

    def _refuse_pending(self) -> None:
        pending = self._kept()
        if self._has_places and pending is not None and not pending.spent:
            raise StreamError(
                "another call waits for its backward, whose values this one would overwrite: call backward() "
                "or drop the result of that call first, or compile with spill=False"
            )

    def train(self, mode: bool = True) -> TrainingModule:
        if not mode and not self._facts.in_eval:
            raise StreamError(
                "eval() is not possible on this program, which was compiled in the mode in which it was "
                "exported: give compile_training the module, which it exports in eval mode too, and leave "
                "out evaluate=False; or call this one under torch.no_grad() in the mode that it has"
            )
        nn.Module.train(self, mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> TrainingModule:
        nn.Module.requires_grad_(self, requires_grad)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            raise StreamError("assign=True would replace parameters: leave it out, and values are copied")
        return nn.Module.load_state_dict(self, state_dict, strict)

    def _refuse_other_buffers(self) -> None:
        for holder, leaf, buffer in self._written:
            now = getattr(holder, leaf)
            if now is not buffer and not now.is_set_to(buffer):
                raise StreamError(
                    f"another tensor is in the place of the buffer {leaf}, and the program writes to the one "
                    "from its load: copy values into that, and give functional_call the module's own buffers"
                )

    def _refuse_lost_gradients(self, leaves: Sequence[Any], names: Sequence[str]) -> None:
        trained = {leaf for backward in self._rung.backwards for leaf in backward.gradients}
        trained |= {*range(len(leaves) - len(self._places), len(leaves))}
        for k, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if k not in trained and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise StreamError(
                    f"input {name} requires grad, and the program was compiled without a gradient for it: "
                    "detach it, or compile with an example that requires grad"
                )


class TrainingCall:
    """One call of a training program: the facts, and the structure of its result.

    `run` runs a method on leaves, and `rung` says which methods these are. With `once`, what the forward
    keeps is there for one backward only.
    """

    spec: pytree.TreeSpec

    def __init__(
        self, facts: Training, rung: Rung, run: Callable[[str, Sequence[Any]], Any], *, once: bool = False
    ) -> None:
        self.facts, self.rung = facts, rung
        self.spent, self._once = False, once
        self._run = run

    def result(self, leaves: Sequence[Any]) -> Any:
        """Run the forward on leaves; the result has a `grad_fn`, which gives leaves their gradients."""
        flat = _Pass.apply(self, *leaves)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(flat), self.spec)

    def forward(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results, flat, and what backwards need, as `rung.kept` has it: tensors, and sizes."""
        leaves = as_exported(leaves, self.facts)
        # Some kernels keep what a backward needs by the grad mode alone; a graph of their own has no use.
        with torch.enable_grad():
            result, values = self._run(self.rung.forward, _detached(leaves))
        flat, self.spec = pytree.tree_flatten(result)
        return flat, [values[-1 - leaf] if leaf < 0 else leaves[leaf] for leaf in self.rung.kept]

    def backward(self, chosen: Backward, values: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Run a backward, which returns the gradients of the leaves `chosen.gradients`."""
        if self.spent:
            raise StreamError(
                "the values that this call kept have left memory with its first backward: call the module "
                "again, or compile with spill=False"
            )
        self.spent = self._once  # also if it fails on the way
        value_of = dict(zip(self.rung.kept, values, strict=True))
        gradients: Sequence[Any] = self._run(
            chosen.method, [*(value_of[leaf] for leaf in chosen.kept), *tangents]
        )
        return gradients


class _Pass(torch.autograd.Function):
    """The forward and the backward of a training program, as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: TrainingCall, *leaves: Any) -> tuple[Any, ...]:
        flat, values = call.forward(leaves)
        ctx.call, ctx.leaves = call, len(leaves)
        ctx.numbers = [None if isinstance(value, torch.Tensor) else value for value in values]
        ctx.save_for_backward(*(value for value in values if isinstance(value, torch.Tensor)))
        ctx.layouts = {k: _layout(flat[k]) for k in call.rung.tangents}
        last = {id(value): k for k, value in enumerate(flat)}
        ctx.last = {k: last[id(flat[k])] for k in call.rung.tangents}
        ctx.set_materialize_grads(False)
        # A gradient that reaches a result which is left out is refused, so that it is not lost.
        seen = {*call.rung.tangents, *call.facts.left_out}
        constants = [
            value for k, value in enumerate(flat) if k not in seen and isinstance(value, torch.Tensor)
        ]
        ctx.mark_non_differentiable(*constants)
        return tuple(flat)

    @staticmethod
    @outside_dynamo
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise StreamError(
                "gradients of gradients through streamed weights are not supported: call backward without "
                "create_graph=True"
            )
        grads = tuple(_of_repeated(ctx.last, grads, k) for k in range(len(grads)))
        chosen = _backward_for(ctx.call, grads)
        tangents = [_laid_out(grads[k], ctx.layouts[k]) for k in chosen.tangents]
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if number is None else number for number in ctx.numbers]
        with torch.autocast("cpu", enabled=False):
            gradients = ctx.call.backward(chosen, values, tangents)
        results: list[Any] = [None] * ctx.leaves
        for leaf, gradient in zip(chosen.gradients, gradients, strict=True):
            results[leaf] = gradient
        return (None, *results)


def _of_repeated(
    last: Mapping[int, int], grads: Sequence[torch.Tensor | None], k: int
) -> torch.Tensor | None:
    """The gradient of result k, or negative zeros, which change no sum, for a tensor that is returned again.

    Autograd gives the whole gradient of such a tensor to the last of its results.
    """
    whole = grads[last.get(k, k)]
    return grads[k] if grads[k] is not None or whole is None else torch.full_like(whole, -0.0)


def _backward_for(call: TrainingCall, grads: Sequence[torch.Tensor | None]) -> Backward:
    """The backward for the results that gradients have come to."""
    facts, rung = call.facts, call.rung
    came = tuple(k for k in sorted({*rung.tangents, *facts.left_out}) if grads[k] is not None)
    chosen = next((backward for backward in rung.backwards if backward.tangents == came), None)
    if chosen is None:
        results = " and ".join(facts.results[k] for k in came) or "no result"
        raise StreamError(
            f"gradients have come to {results}, and the program was compiled for gradients from {facts.sets}"
            ": compile it with losses= naming all results that the loss is computed of, or each set of them"
        )
    return chosen


class _WithoutBackward(torch.autograd.Function):
    """Results that depend on what is trained, in a mode in which no backward was compiled."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Any], *wants: torch.Tensor) -> tuple[Any, ...]:
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        raise StreamError(
            "the module was called in eval mode, in which there are no gradients, as its backward was "
            "compiled in the mode in which the model was: call train() before, or compile the model in eval()"
        )


def _without_backward(result: Any, wants: Sequence[torch.Tensor]) -> Any:
    """A result of a call, which requires grad, and whose backward says why there is none."""
    flat, spec = pytree.tree_flatten(result)
    return pytree.tree_unflatten(_WithoutBackward.apply(flat, *wants), spec)  # type: ignore[no-untyped-call]


def _detached(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def as_exported(leaves: Sequence[Any], facts: Training) -> list[Any]:
    """The leaves of a call as they lay in memory when the program was exported.

    Raises StreamError for one that does not lie so, and of which a copy might give other bits.
    """
    laid_out = list(leaves)
    for k, layout in enumerate(facts.layouts):
        if (
            layout is None
            or not isinstance(laid_out[k], torch.Tensor)
            or laid_out[k].dim() != len(layout.order)
        ):
            continue  # what is no such tensor is refused when it is called
        turned = laid_out[k].permute(layout.order)
        if turned.is_contiguous():
            continue
        if not layout.whole:
            lay = "was contiguous" if layout.order == tuple(sorted(layout.order)) else "lay in another order"
            raise StreamError(
                f"input {layout.name} has the strides {laid_out[k].stride()}, and {lay} when the program was "
                "exported: call contiguous() on it, or compile with an example that lies as it does"
            )
        order = [layout.order.index(dimension) for dimension in range(len(layout.order))]
        laid_out[k] = turned.contiguous().permute(order)
    return laid_out


def _layout(result: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]] | None:
    """The shape and the strides of a result whose elements lie close together, None for any other."""
    same = torch.empty_like(result, device="meta").stride() == result.stride()
    return (result.shape, result.stride()) if same else None


def _laid_out(
    gradient: torch.Tensor | None, layout: tuple[torch.Size, tuple[int, ...]] | None
) -> torch.Tensor:
    """A gradient in the layout of its result, in which the backward was traced."""
    assert gradient is not None
    if layout is None:
        return gradient.contiguous()
    shape, stride = layout
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _holder(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module, which is made if need be, that holds a weight by its FQN, and the last word of that."""
    *path, name = fqn.split(".")
    for part in path:
        if part not in module._modules:
            module._modules[part] = getattr(module, part, None) or Part(())
        module = module.get_submodule(part)
    return module, name
