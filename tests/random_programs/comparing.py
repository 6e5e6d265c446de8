"""Compiles a random program, runs it in every way that its seed draws, and compares every bit.

The reference is the module itself, called by eager PyTorch under `torch.no_grad()`.
"""

import copy
import random
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import penstock
from benchmarks.zoo.visit import first_line, is_listed
from penstock import LoadOptions
from penstock.schedule.facts.errors import PayloadError, PenstockError
from tests.engines import ENGINES
from tests.random_programs.drawn import DifferentError, copied, difference, draw
from tests.random_programs.gradients import compare_gradients


@dataclass(frozen=True)
class Outcome:
    """What became of a seed: `equal`, `refused`, `wrong` or `not counted`, and why."""

    seed: int
    verdict: str
    why: str = ""
    where: str = ""


@dataclass(frozen=True)
class Answer:
    """What a call leaves: its results, its inputs, and the state of torch's generator."""

    results: list[Any]
    inputs: list[Any]
    generator: Tensor

    def differs(self, expected):
        """What differs from another answer, in words; empty if every bit is equal."""
        for name in ("results", "inputs"):
            ours, theirs = getattr(self, name), getattr(expected, name)
            if len(ours) != len(theirs):
                return f"{len(ours)} {name}, expected {len(theirs)}"
            for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                if told := difference(one, other):
                    return f"{name}[{k}]: {told}"
        return "" if torch.equal(self.generator, expected.generator) else "torch's generator differs"


def check(seed, folder):
    """Draw the program of a seed, and compare it in a new folder."""
    drawn = draw(seed)
    try:
        with warnings.catch_warnings(action="ignore"):
            references = [copy.deepcopy(drawn.module) for _ in range(2)]
            exported = drawn.export()
            calls = _taken(exported, drawn.calls)
            expected, again = ([*_answers(_ByName(one), calls)] for one in references)
    except Exception as error:
        return Outcome(seed, "not counted", first_line(error, folder))
    if told := _first_difference(again, expected):
        return Outcome(seed, "not counted", f"eager PyTorch gives other bits each time: {told}")
    try:
        _compare(drawn, exported, calls, expected, folder)
    except Exception as error:
        why = first_line(error, folder)
        if isinstance(error, PenstockError) and is_listed(why):
            return Outcome(seed, "refused", why)
        with warnings.catch_warnings(action="ignore"):
            if told := _exported_differs(seed, calls, expected):
                return Outcome(seed, "not counted", f"torch's exported program by itself: {told}")
        return Outcome(seed, "wrong", why, traceback.format_exc())
    return Outcome(seed, "equal")


def _compare(drawn, exported, calls, expected, folder):
    chosen = random.Random(f"ways of {drawn.seed}")
    with _undisturbed(drawn.module):
        program = _compiled(exported, folder)
    for options in _ways(program, chosen):
        try:
            _run(program, options, calls, expected)
        except Exception as error:
            error.add_note(f"loaded with {options}")
            raise
    if chosen.random() < 0.3:
        compare_gradients(drawn, folder / "trained.penstock", chosen)


def _compiled(exported, folder):
    """Compile, and open the artifact as a stranger's, or with trust where the graph has no form as data."""
    path = folder / "model.penstock"
    one = exported["forward"] if [*exported] == ["forward"] else exported
    penstock.compile(one, path)
    try:
        return penstock.open(path)
    except PayloadError as error:
        if "trust=True" not in str(error):
            raise
        return penstock.open(path, trust=True)


def _ways(program, chosen):
    """The options of several loads: every share of the weights, two arenas at least, any engine."""
    arenas = program.arenas()
    loads = [(None, 0.0), (None, 0.5), (None, 1.0), ("contiguous", 0.0), ("contiguous", chosen.random())]
    loads.append((chosen.choice(arenas), chosen.random()))
    for arena, share in loads:
        floor = program.floor(arena=arena)
        budget = floor + int((program.largest_budget - floor) * share)
        plan = program.plan(max(floor, budget), arena=arena, hardware="laptop")
        debug = chosen.random() < 0.1
        engine = "python" if debug else chosen.choice(ENGINES)
        readers, poison = chosen.randint(1, 3), arena == "contiguous" or chosen.random() < 0.5
        options = LoadOptions(engine=engine, readers=readers, check_reads=debug, poison=poison)
        yield {"plan": plan, "options": options}
    if chosen.random() < 0.4:
        floor = program.floor("sim")
        budget = floor + int((program.largest_budget - floor) * chosen.choice([0, 0, 0.5]))
        plan = program.plan(max(floor, budget), device="sim", hardware="laptop")
        yield {"plan": plan, "device": "sim", "options": LoadOptions(poison=True)}


def _run(program, options, calls, expected):
    """Load once and make all calls. Raises DifferentError for other bits, and for promises of the plan."""
    plan = options["plan"]
    with program.load(**options) as module:
        moved = []
        for k, answer in enumerate(_answers(module, calls)):
            if told := answer.differs(expected[k]):
                raise DifferentError(f"call {k} of {calls[k][0]}: {told}")
            moved.append(module.stats.bytes_moved)
        stats = module.stats
    if stats.misses or stats.passes != len(calls) or stats.peak_bytes > plan.budget:
        raise DifferentError(f"{stats} with a budget of {plan.budget} bytes and {len(calls)} calls")
    if plan.arena_bytes > plan.budget:
        raise DifferentError(f"an arena of {plan.arena_bytes} bytes within a budget of {plan.budget}")
    planned, ahead = _planned(plan, [name for name, _ in calls])
    if plan.pool is None and abs(moved[-1] - moved[0] - planned) > ahead:
        raise DifferentError(f"{moved} bytes moved, the plan says {planned} after the first call +- {ahead}")


def _planned(plan, called):
    """The bytes that calls move after the first one, and how many of them may come before or after.

    A method may have weights of its own between its calls, which are brought where another was called before.
    """
    numbers = [[one.method for one in plan.traces].index(name) for name in called]
    between = [sum(one.nbytes for one in plan.boundary_of(schedule)) for schedule in plan.schedules]
    planned = sum(plan.schedules[k].moved_bytes("in") for k in numbers[1:])
    return planned, max(between) + sum(between[b] for a, b in pairwise(numbers) if a != b)


def _answers(module, calls):
    """What a module answers to calls, one after another."""
    for k, (name, given) in enumerate(calls):
        args, kwargs = copied(given)
        torch.manual_seed(k)
        with torch.no_grad():
            results = module.call(name, *args, **kwargs)
        leaves = [one.clone() if isinstance(one, Tensor) else one for one in pytree.tree_leaves(results)]
        yield Answer(leaves, pytree.tree_leaves((args, kwargs)), torch.get_rng_state())


class _ByName:
    """A module whose methods are all its forward."""

    def __init__(self, module):
        self._module = module

    def call(self, _, *args, **kwargs):
        return self._module(*args, **kwargs)


class _Exported:
    """Exported programs as torch runs them, all over the weights of one module."""

    def __init__(self, exported):
        self._modules = {name: one.module() for name, one in exported.items()}

    def call(self, name, *args, **kwargs):
        return self._modules[name](*args, **kwargs)


def _taken(exported, calls):
    """The calls whose sizes the programs take: torch makes some sizes fixed that were to be dynamic."""
    given = {name: _shapes(one.example_inputs) for name, one in exported.items()}
    found = []
    for name, arguments in calls:
        if _shapes(arguments) != given[name]:
            try:
                _Exported({name: copy.deepcopy(exported[name])}).call(
                    name, *copied(arguments)[0], **arguments[1]
                )
            except Exception:
                continue
        found.append((name, arguments))
    return found


def _shapes(arguments):
    return [getattr(one, "shape", one) for one in pytree.tree_leaves(arguments)]


def _exported_differs(seed, calls, expected):
    """How the exported programs by themselves differ from the module; empty if they do not."""
    try:
        return _first_difference([*_answers(_Exported(draw(seed).export()), calls)], expected)
    except Exception as error:
        return str(error)


def _first_difference(ours, expected):
    for k, (one, other) in enumerate(zip(ours, expected, strict=True)):
        if told := one.differs(other):
            return f"call {k}: {told}"
    return ""


@contextmanager
def _undisturbed(module):
    """The body leaves torch and the user's module as they were, also where it raises an error."""
    before, parts = _torch_now(), _parts_of(module)
    try:
        yield
    finally:
        after, now = _torch_now(), _parts_of(module)
        _leave_transforms()
        if after != before:
            raise DifferentError(f"torch was left with {after}, and had {before}")
        if now != parts:
            changed = [name for name in {*parts, *now} if parts.get(name) != now.get(name)]
            raise DifferentError(f"the module was changed: {sorted(changed)}")


def _torch_now():
    stack = torch._C._functorch.peek_interpreter_stack()
    return {
        "functorch": None if stack is None else stack.level(),
        "dual level": forward_ad._current_level,
        "modes": len(_get_current_dispatch_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "generator": hash(torch.get_rng_state().numpy().tobytes()),
    }


def _leave_transforms():
    """What functorch was left in stays out of the programs that come next."""
    while torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch.pop_dynamic_layer_stack()
    while forward_ad._current_level >= 0:
        forward_ad.exit_dual_level()


def _parts_of(module):
    """By name, what a module holds: its tensors and attributes, by identity and version."""
    found = {}
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            if isinstance(value, dict):
                found |= {f"{name}.{key}.{inner}": _told(one) for inner, one in value.items()}
            else:
                found[f"{name}.{key}"] = _told(value)
    return found


def _told(value):
    if isinstance(value, Tensor):
        return id(value), value._version, value.requires_grad, value.data_ptr()
    return id(value)
