"""Compiles a random program for training, and compares its steps with those of autograd over the module."""

import copy
import inspect
import warnings
from collections import Counter

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import penstock
from penstock import LoadOptions
from tests.engines import ENGINES
from tests.random_programs.drawn import DifferentError, difference, draw


def compare_gradients(drawn, path, chosen):
    """Train some parameters of a program's module for two steps; raises DifferentError for other bits.

    Returns False where autograd by itself has no gradient for them. The reference is drawn again: a copy of
    an expanded parameter has other strides.
    """
    module, reference = draw(drawn.seed).module, draw(drawn.seed).module
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    storages = Counter(one.untyped_storage().data_ptr() for _, one in every)
    names = sorted(
        name
        for name, one in module.named_parameters()
        if one.is_floating_point() and one.is_contiguous() and storages[one.untyped_storage().data_ptr()] == 1
    )
    names = chosen.sample(names, min(len(names), chosen.randint(1, 3)))
    for name, one in (*module.named_parameters(), *reference.named_parameters()):
        one.requires_grad_(name in names)
    args, kwargs = next(iter(drawn.methods.values())).arguments
    given = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    try:
        with warnings.catch_warnings(action="ignore"):
            expected = [_step(reference, given, names) for _ in range(2)]
    except RuntimeError:
        return False
    program = penstock.compile_training(module, path, trainable=names, example=copy.deepcopy(given))
    budget = program.floor(arena="contiguous")
    plan = program.plan(budget, arena="contiguous", hardware="laptop", activations="keep")
    with program.load(plan=plan, options=LoadOptions(engine=chosen.choice(ENGINES), poison=True)) as streamed:
        for number, step in enumerate(expected):
            for name, value in _step(streamed, given, names).items():
                if told := difference(value, step[name]):
                    raise DifferentError(f"step {number} of training {names}: {name}: {told}")
        if streamed.stats.misses:
            raise DifferentError(f"{streamed.stats} in training")
    return True


def _step(module, given, names):
    """The results of a call, and the gradients of their squares."""
    torch.manual_seed(1)
    module.zero_grad()
    leaves = pytree.tree_leaves(module(**copy.deepcopy(given)))
    results = [one for one in leaves if isinstance(one, Tensor)]
    floats = [one for one in results if one.is_floating_point()]
    wanted = [one for one in floats if not one.dim()] or floats
    sums = [one.float().square().sum() for one in wanted if one.requires_grad]
    torch.stack(sums).sum().backward()
    found = {f"results[{k}]": one.detach().clone() for k, one in enumerate(results)}
    gradients = {name: one.grad for name, one in module.named_parameters() if name in names}
    return found | gradients
