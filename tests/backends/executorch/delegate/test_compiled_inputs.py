"""Inputs of compiled methods: sizes that their code is not for are refused, since it checks none."""

import logging
import shutil
from functools import cache

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from penstock.backends.executorch import read
from tests.backends.executorch.delegate.pte_models import WIDTH, Files, rows, write_files
from tests.backends.executorch.delegate.pte_runs import Call, Program
from tests.backends.executorch.forging import fields, forge
from tests.hunt import sampled

pytestmark = pytest.mark.timeout(300)


class Added(nn.Module):
    """A linear layer of one input, plus another; with `turned`, the second one comes first."""

    def __init__(self, turned):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.turned = nn.Linear(WIDTH, WIDTH), turned

    def forward(self, a, b, unused):
        return self.linear(b) + a if self.turned else self.linear(a) + b


class Paired(nn.Module):
    """Takes rows in pairs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        torch._check(x.shape[0] <= 8)
        return self.linear(x).view(-1, 2, WIDTH)


def added(turned):
    count = Dim("count", min=2, max=8)
    shapes = ({0: count}, {0: count}, None)
    return export(Added(turned).eval(), (rows(4), rows(4), rows(1)), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    @cache
    def made(turned):
        folder = tmp_path_factory.mktemp("added") / "compiled"
        return write_files(folder, {"forward": added(turned)}, kernels="aotinductor")

    return made


@pytest.mark.random
@pytest.mark.parametrize("turned", sampled([True, False], 2))
def test_one_symbol_in_two_inputs(runner, files, turned):
    model, other = Added(turned).eval(), rows(1)
    inputs = [(rows(count), torch.randn(count, WIDTH), other) for count in (4, 8, 2)]
    answers = runner([Program(files(turned))], [Call(one) for one in inputs])
    assert [one.error for one in answers] == ["Error::Ok"] * 3
    for answer, given in zip(answers, inputs, strict=True):
        torch.testing.assert_close(answer.outputs[0], model(*given))


@pytest.mark.random
@pytest.mark.parametrize("turned", sampled([True, False], 2))
def test_two_sizes_of_one_symbol_are_refused(runner, files, turned):
    right, short = (rows(8), rows(8), rows(1)), (rows(8), rows(3), rows(1))
    swapped = (short[1], short[0], short[2])
    answers = runner([Program(files(turned))], [Call(one) for one in (right, short, right, swapped)])
    ok, refused = "Error::Ok", "Error::InvalidArgument"
    assert [one.error for one in answers] == [ok, refused, ok, refused]
    assert torch.equal(answers[0].outputs[0], answers[2].outputs[0])
    last, sizes = ("a", ((3, 8), (8, 3))) if turned else ("b", ((8, 3), (3, 8)))
    assert runner.sentences() == [
        f"input {last}.shape[0]: expected {first}, as in the other inputs, got {second}; "
        "pass what the program was exported for"
        for first, second in sizes
    ]


def test_the_regions_inputs_stand_in_the_file(files):
    exported = read(files(True).pte)
    (region,) = exported.regions
    assert [(one.name, one.dtype, one.shape) for one in region.takes] == [
        ("b", "float32", ("count", WIDTH)),
        ("a", "float32", ("count", WIDTH)),
    ]
    assert [(one.name, one.lower, one.upper) for one in region.symbols] == [("count", 2, 8)]
    assert [one.name for one in exported.payload.methods[0].inputs] == ["a", "b", "unused"]


@pytest.mark.parametrize("dimension", [2 * Dim("pairs", min=1, max=4), Dim.AUTO])
def test_where_sizes_cannot_be_checked_those_of_the_export_are_taken(runner, tmp_path, dimension, caplog):
    program = export(Paired().eval(), (rows(4),), dynamic_shapes=({0: dimension},))
    with caplog.at_level(logging.WARNING, "penstock"):
        written = write_files(tmp_path / "paired", {"forward": program}, kernels="aotinductor")
    assert "method 'forward' runs with the sizes of its export only: the delegate cannot check" in caplog.text
    answers = runner([Program(written)], [Call([rows(4)]), Call([rows(6)])])
    assert [one.error for one in answers] == ["Error::Ok", "Error::InvalidArgument"]
    (said,) = runner.sentences()
    assert "input x.shape[0]: expected 4, a static size, got 6" in said


def test_an_input_of_another_dtype_than_the_code_was_compiled_for(runner, files, tmp_path):
    """ExecuTorch refuses other dtypes than those of the method, so the region's own are changed here."""
    shutil.copytree(files(True).pte.parent, tmp_path / "copy")
    forged = Files(tmp_path / "copy/model.pte", (tmp_path / "copy/weights.ptd",))
    forge(forged.pte, region=fields(lambda one: one["takes"][1].update(dtype="int64")))
    (answer,) = runner([Program(forged)], [Call((rows(4), rows(4), rows(1)))])
    assert answer.error == "Error::InvalidArgument"
    (said,) = runner.sentences()
    assert said == "input a: expected Long, got Float; pass what the program was exported for"


def test_nothing_is_kept_of_the_results_of_a_call(runner, tmp_path):
    count = Dim("count", min=1, max=256)
    program = export(nn.Linear(WIDTH, WIDTH), (rows(4),), dynamic_shapes=({0: count},))
    written = write_files(tmp_path / "long", {"forward": program}, kernels="aotinductor")
    answers = runner([Program(written)], [Call([rows(size)]) for size in (1, 256, 1, 256)])
    assert [one.error for one in answers] == ["Error::Ok"] * 4  # and ExecuTorch renames an input `input`
    assert answers[3].heap_bytes - answers[2].heap_bytes < 256 * WIDTH * 4 // 2
