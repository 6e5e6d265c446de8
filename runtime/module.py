"""The streamed module: an `nn.Module` that is called like the exported one, and refuses what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from penstock.passes.calls.tracers import outside_dynamo, refuse_tracer
from penstock.passes.lowering.compiled import CompiledMethod
from penstock.passes.lowering.eager import EagerMethod
from penstock.passes.probes import CompiledCalls
from penstock.runtime.device.accelerator import out_of_memory
from penstock.runtime.machine.calibrate import Sightings
from penstock.runtime.stream.engine import Stats
from penstock.runtime.stream.loaded import Bodies, Gate, LoadedWeights, ProbeCalls, Stopwatch, probe_calls
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Trace
from penstock.schedule.payload.codec import ProbeOrder

MethodProgram = EagerMethod | CompiledMethod
"""A method with its weights, in any lowering."""


@dataclass(frozen=True)
class LoadedMethod:
    """A method of a loaded program, with probes at the steps `probed`, where its plan acts.

    `probe_all` makes the program with probes at every step. It is None for compiled code, which always has
    all probes; `order` then has the code's probe calls that enclose each step, `pooled` by number the reads
    that a pool serves, and `bodies` by name what is computed for each expert.
    """

    trace: Trace
    probed: tuple[int, ...]
    program: MethodProgram
    probe_all: Callable[[], MethodProgram] | None = None
    order: ProbeOrder | None = None
    pooled: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    bodies: Bodies = field(default_factory=dict)


class Part(torch.nn.Module):
    """Stands for a module of the exported model. Its weights, called `fqns`, are no attributes of it."""

    def __init__(self, fqns: Iterable[str]) -> None:
        super().__init__()
        self._fqns = tuple(fqns)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            start, fqns = f"{name}.", self.__dict__.get("_fqns", ())
            within = [fqn.removeprefix(start) for fqn in fqns if fqn.startswith(start)]
            if not within:
                raise
            return Part(within)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and name not in self._parameters:
            _refuse_change(
                f"setting {name}, as functional_call does,", "compile the program again with the new weights"
            )
        super().__setattr__(name, value)


class StreamedModule(Part):
    """Runs an exported program whose weights stream. `Program.load` returns it.

    Call it like the exported module. Where the artifact has several methods, call them by name
    (`module.decode(...)`). The end of a `with` statement closes it. One thread calls it at a time.

    Attributes:
        plan: The plan that it runs.

    Example:
        >>> with program.load("50%") as module, torch.no_grad():
        ...     torch.equal(module(x), model(x)), module.stats.passes
        (True, 1)
    """

    def __init__(
        self,
        methods: Mapping[str, LoadedMethod],
        weights: LoadedWeights,
        name: str,
        sightings: Sightings | None = None,
    ) -> None:
        super().__init__(weights.tensors)
        self._name = name
        self.training = False
        self.plan = weights.plan
        self._methods = dict(methods)
        self._weights = weights
        self._sightings = sightings
        self._gate = Gate("a streamed module", "load the program")
        self._calls = {
            name: probe_calls(method.order, method.probed, weights.streamer, method.pooled, method.bodies)
            for name, method in methods.items()
            if method.order
        }
        self._passes = 0

    @outside_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the only method, or the one named `forward`.

        Args:
            args, kwargs: Those of the exported module, in shapes that it was exported for.

        Raises:
            StreamError: The module is closed, another thread runs it, it is called in a forked child, or an
                input requires grad while grad mode is on; an input is not what was exported; or the device is
                out of memory.
            SourceError: Weights cannot be read; the next call starts over.
        """
        return self.call(self._only_method(), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_methods", ()):
            return partial(self.call, name)
        return super().__getattr__(name)

    @outside_dynamo
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method by its name: `module.call("decode", ...)` is `module.decode(...)`.

        Args:
            method: The name.
            args, kwargs: As for `forward`, which raises the same.

        Example:
            >>> with program.load("50%") as module:
            ...     module.call("forward", x).shape
            torch.Size([2, 64])
        """
        leaves = _checked(self._method(method).program, args, kwargs)
        with without_grad():
            return self.run(method, leaves)

    @outside_dynamo
    def run(self, method: str, leaves: Sequence[Any]) -> Any:
        """Run a method on inputs that its program has checked, whatever autograd may want of them.

        Args:
            method: The name.
            leaves: The inputs in pytree order.

        Raises:
            StreamError, SourceError: As for `forward`.
        """
        loaded = self._method(method)
        with self._call_gate():
            calls, graph = self._calls.get(method), loaded.trace.graph
            run = _running(loaded.program, leaves, calls)
            self._weights.wait()
            try:
                with self._sightings.watching(graph, leaves) if self._sightings else nullcontext():
                    output = self._weights.run(graph, calls or self._weights.streamer, run)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                raise StreamError(
                    f"the device is out of memory in a pass: {self._weights.out_of_memory()}; lower the "
                    "budget, or give device_memory= and a larger reserve="
                ) from error
            self._passes += 1
            return output

    def extra_repr(self) -> str:
        """Return what `print(module)` shows: how many bytes of weights stay and stream."""
        closed = ", closed" if self._weights.resources.closed else ""
        return f"{self._name}, {self.plan.residency}{closed}"

    @property
    def stats(self) -> Stats:
        """Bytes moved, stalls, misses and peaks since the program was loaded."""
        return self._weights.stats(self._passes)

    def close(self) -> None:
        """Stop the readers and give all memory back. It may be called again."""
        with self._gate.closing():
            self._weights.close()

    def __enter__(self) -> StreamedModule:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def measure(self, *args: Any, **kwargs: Any) -> Trace:
        """Run one pass with every step timed, and return a trace with these times.

        `Program.plan(..., traces=[trace])` plans with it. The time of a step holds the overhead of two
        probes, some microseconds. Where there are several methods, the one named `forward` is measured.

        Args:
            args, kwargs: As for `forward`, which raises the same.

        Example:
            >>> with program.load("100%") as module:
            ...     module.measure(x).times
            'measured'
        """
        return self.measure_call(self._only_method("measure_call(NAME, ...)"), *args, **kwargs)

    @outside_dynamo
    def measure_call(self, method: str, /, *args: Any, **kwargs: Any) -> Trace:
        """Do what `measure` does, for one of several methods. A plan takes a trace of each of them.

        Args:
            method: The name.
            args, kwargs: As for `forward`, which raises the same.
        """
        loaded = self._method(method)
        steps = len(loaded.trace.steps)
        with self._call_gate():
            self._weights.wait()
            timed = loaded.probe_all() if loaded.probe_all else loaded.program
            leaves = _checked(timed, args, kwargs)
            stopwatch = Stopwatch(
                self._weights.streamer,
                loaded.probed,
                steps,
                clock=self._weights.clock,
                waited_ns=lambda: self._weights.unit_wait_ns,
            )
            calls = None
            if loaded.order is not None:
                calls = ProbeCalls(loaded.order, range(steps), stopwatch, loaded.pooled, loaded.bodies)
            run = _running(timed, leaves, calls)
            with without_grad():
                self._weights.run(loaded.trace.graph, calls or stopwatch, lambda: stopwatch.time(run))
            self._passes += 1
            return stopwatch.trace(loaded.trace)

    def record_routes(self) -> Any:
        """Return a recorder of the units that calls ask for: rows of tables, experts of mixtures.

        Calls within `with module.record_routes() as recorder:` are recorded, and `recorder.save(path)` writes
        the file that `penstock replay` takes.

        Raises:
            StreamError: The plan reads all weights whole.
        """
        if self._weights.pooled is None:
            raise StreamError(
                "there are no routes to record, as this plan reads every weight whole: load an "
                "artifact whose model looks up rows or experts of weights of 1 MiB or more, on a CPU, "
                "within a budget smaller than all weights"
            )
        return self._weights.pooled.open_recorder()

    def arguments(self, leaves: Sequence[Any], method: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of a method.

        Args:
            leaves: The inputs in pytree order.
            method: The name of the method.

        Example:
            >>> with program.load("50%") as module:
            ...     args, kwargs = module.arguments([x], "forward")
            >>> len(args), kwargs
            (1, {})
        """
        return self._method(method).program.convention.unflatten(leaves)

    def _method(self, name: str) -> LoadedMethod:
        if name not in self._methods:
            raise StreamError(f"there is no method {name!r}: call one of {', '.join(self._methods)}")
        return self._methods[name]

    def _only_method(self, instead: str = "one of them by name") -> str:
        if len(self._methods) == 1:
            return next(iter(self._methods))
        if "forward" in self._methods:
            return "forward"
        raise StreamError(f"this module has several methods, {', '.join(self._methods)}: call {instead}")

    def _call_gate(self) -> AbstractContextManager[None]:
        if self._weights.resources.closed:
            raise StreamError("the module is closed: load the program again")
        return self._gate.call()

    # The methods of an nn.Module that a streamed module cannot have.

    def train(self, mode: bool = True) -> StreamedModule:
        if mode:
            _refuse_change("train()", "penstock streams frozen weights")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        _refuse_change("moving or casting", "load the program for the device you want")

    def requires_grad_(self, requires_grad: bool = True) -> StreamedModule:
        if requires_grad:
            _refuse_change("requires_grad_()", "penstock streams frozen weights")
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_change("load_state_dict()", "compile the program again with the new weights")

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_tracer("torch.jit.script")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_change("deepcopy", "load the program again")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_change("pickling", "pass the artifact's path and load it there")


def _refuse_change(change: str, instead: str) -> NoReturn:
    raise StreamError(f"{change} is not possible on a streamed module: {instead}")


@contextmanager
def without_grad() -> Iterator[None]:
    """Have passes run as under `torch.no_grad()`, and autocast keep no casts of weights that require grad."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


def _running(program: MethodProgram, leaves: Sequence[Any], calls: CompiledCalls | None) -> Callable[[], Any]:
    """Returns the pass as a function; in compiled code, reads outside of all probe calls are enclosed too."""
    run = partial(program.run, list(leaves))
    return run if calls is None else partial(calls.enclose, run)


def _checked(program: MethodProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the call's leaves. Raises an error for wrong leaves before anything streams."""
    leaves = program.convention.flatten(args, kwargs)
    if torch.is_grad_enabled():
        for name, leaf in zip(program.convention.names, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise StreamError(
                    f"input {name} requires grad and grad mode is on: gradients through streamed weights are "
                    "not supported, so call under torch.no_grad() or detach the input"
                )
    return leaves
