"""Programs that several tests of training run, each compiled once."""

from functools import cache, partial

import pytest
import torch
from torch.export import Dim

import penstock
from tests.training_models import DECODER

DTYPES = (torch.float32, torch.bfloat16)


class OfEachDtype(dict):
    """By dtype, what a function makes of it when it is first asked for."""

    def __init__(self, make):
        super().__init__()
        self._make = make

    def __missing__(self, dtype):
        self[dtype] = self._make(dtype)
        return self[dtype]


@pytest.fixture(scope="session")
def decoders(tmp_path_factory):
    """The decoder with dropout, compiled for batches of any length, of an example of 40 tokens."""
    folder, length = tmp_path_factory.mktemp("decoders"), Dim("length", min=2, max=64)
    return OfEachDtype(
        lambda dtype: penstock.compile_training(
            DECODER.model(dtype),
            folder / f"{dtype}.penstock",
            example=tuple(torch.zeros(2, 40, dtype=torch.long) for _ in DECODER.inputs()),
            dynamic_shapes=({1: length}, {1: length}),
            trainable=DECODER.patterns,
        )
    )


@pytest.fixture(scope="session")
def program_of(tmp_path_factory):
    """By a model and options of `compile_training`, the program of the model for inputs of its own sizes."""

    @cache
    def compiled(trained, **options):
        return penstock.compile_training(
            trained.model(),
            tmp_path_factory.mktemp("trained") / "trained.penstock",
            example=trained.inputs(),
            trainable=trained.patterns,
            **options,
        )

    return compiled


@pytest.fixture(scope="session")
def spilling(program_of):
    """By a model, the program whose kept values may leave memory, without one for evaluation."""
    return partial(program_of, spill=True, evaluate=False)
