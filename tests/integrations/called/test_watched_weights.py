"""Ways in which a watched weight could give other bytes: each gives its own, or is refused."""

import random
import warnings
from cmath import isnan
from numbers import Complex

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock import LoadOptions
from penstock.schedule.facts.errors import StreamError
from tests.hunt import nightly_but
from tests.integrations.called.within import CHECKED, agrees, pair


class Runs(nn.Module):
    """It runs a function on an expert of a stack."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.Parameter(torch.randn(16, 128, 256))
        self.square = nn.Parameter(torch.randn(16, 128, 128))

    def forward(self, run):
        return run(self.stack, self.square)


def outcome(model, run):
    torch.manual_seed(0)
    try:
        return model(run)
    except StreamError:
        return StreamError
    except Exception as error:
        return type(error)


def _cast(w, s):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(torch.ones(3, 128), s[3]) @ w[2]


ENDS = torch.arange(1, 17, dtype=torch.int32) // 4

TRAPS = {
    "set_itself": lambda w, _: setattr(w, "data", w) or w[3],
    "set": lambda w, _: setattr(part := w[3], "data", torch.zeros(128, 256)) or part,
    "grad_of": lambda w, _: setattr(w, "grad", None) or w[3],
    "vmap": lambda w, _: torch.vmap(lambda one: one.sum(0))(w[2:5]),
    "grad": lambda w, _: torch.func.grad(lambda x: (x @ w[3]).sum())(torch.ones(128)),
    "to_same": lambda w, _: w[3].to("cpu").to(torch.float32) + 1,
    "contiguous": lambda w, _: w[3].t().contiguous().view(-1)[:9] * 2,
    "numpy": lambda w, _: torch.from_numpy(w[3].numpy()) + 1,
    "dlpack": lambda w, _: torch.from_dlpack(w[3]) + 1,
    "two_slices": lambda w, s: torch.stack([w[1], w[9], w[14]]).sum(0),
    "two_stacks": lambda w, s: s[4] @ w[11],
    "square": lambda w, s: (
        functional.linear(torch.ones(3, 128), s[3])
        + functional.linear(torch.ones(3, 128), s.transpose(1, 2)[3])
    ),
    "square_grouped": lambda w, s: (
        functional.grouped_mm(torch.ones(4, 128), s.mT, offs=ENDS)
        + functional.grouped_mm(torch.ones(4, 128), s, offs=ENDS)
    ),
    "around": lambda w, _: torch.as_strided_copy(w[3], (4, 4), (1, 4), 128 * 256 * 7),
    "as_strided": lambda w, _: torch.as_strided(w[3], (4, 4), (1, 4), 128 * 256 * 7) + 1,
    "numbers": lambda w, _: w[[3, 5]].sum() + w[torch.tensor([True] * 2 + [False] * 14)].sum(),
    "scalar": lambda w, _: w[torch.tensor(3), 1:5, ::2].sum() + w[-1].sum() + float(w[2, 3, 4]),
    "complex": lambda w, _: torch.view_as_complex(w[3].view(128, 128, 2)).conj().sum(),
    "bytes": lambda w, _: w[3].view(torch.int32).sum(),
    "iterated": lambda w, _: sum(one.sum() for one in w),
    "scripted": lambda w, _: _scripted(w[3]),
    "autocast": _cast,
    "whole": lambda w, s: w.sum() + s.mean(),
    "out": lambda w, _: torch.add(w[3], 1, out=torch.empty(128, 256)),
    "returned": lambda w, _: w[3, :4],
}


def _doubled(x):
    return x.sum(0) * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(_doubled)


class TestTraps:
    @pytest.mark.parametrize("options", [CHECKED, LoadOptions()], ids=["checked", "native"])
    def test_a_slice_has_its_own_bytes_or_is_refused(self, called, options):
        model, reference = pair(Runs())
        called(model, 0.8, options)

        for name, run in [*TRAPS.items(), *TRAPS.items()]:
            assert torch.equal(
                model(lambda w, s: w[5] + s[2, 0, 0]), reference(lambda w, s: w[5] + s[2, 0, 0])
            )
            made = outcome(model, run)
            assert made is StreamError or torch.equal(made, outcome(reference, run)), name

    def test_a_view_that_is_kept_reads_its_units_again(self, called):
        model, reference = pair(Runs())
        called(model, 0.5)
        views = []

        for number in range(6):
            for one in (model, reference):
                one(lambda w, s: views.append(w[3][:2]))
                one(lambda w, s, number=number: w[number] + 1)
            made, expected = (
                one(lambda w, s, k=k: views[k] + 1) for k, one in ((-2, model), (-1, reference))
            )
            assert torch.equal(made, expected)
        with pytest.raises(StreamError, match="stack is not in memory"):
            views[0] + 1

    @pytest.mark.parametrize(
        "write",
        [lambda w, s: w[3].mul_(2.0).sum(), lambda w, s: w.__setitem__(3, 1.0) or w.sum()],
        ids=["mul", "set"],
    )
    def test_what_is_written_stays_in_memory(self, called, write):
        model, reference = pair(Runs())
        called(model, 0.9)

        for run in (lambda w, s: w[3].sum(), write, lambda w, s: w[3].sum(), write, lambda w, s: w.sum()):
            assert torch.equal(model(run), reference(run))

    def test_only_what_is_read_by_units_stays_watched(self, called):
        class Dense(Runs):
            def forward(self, x):
                return torch.einsum("ab,ebc->ac", x, self.square) @ self.stack[3]

        model, reference = pair(Dense())
        streamed = called(model, 0.9)
        assert agrees(model, reference, *torch.ones(3, 2, 128))
        assert [root.part.shape for root in streamed._units.roots.values()] == [(16, 128, 256)]
        asked = torch.overrides.has_torch_function
        assert not asked([model.stack, model.square])

    @pytest.mark.parametrize("part", nightly_but([1], range(2)))
    def test_operators_of_torch_are_right_on_a_slice(self, called, part):
        common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
        skipped = (
            "empty",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "normal",
            "uniform",
            "multi_head",
        )
        model, reference = pair(Runs())
        called(model, 0.8)
        drawn = random.Random(part)
        warnings.simplefilter("ignore")
        every = [one for one in common.op_db if not any(name in one.name for name in skipped)]
        for op in drawn.sample([one for one in every if torch.float32 in one.dtypes], 40):
            samples = [one for one, _ in zip(op.sample_inputs("cpu", torch.float32), range(2), strict=False)]
            for sample in samples:
                if isinstance(sample.input, torch.Tensor) and sample.input.numel() <= 128 * 256:

                    def run(w, s, op=op, sample=sample):
                        own = w[3].view(-1)[: sample.input.numel()].view(sample.input.shape)
                        return op.op(own, *sample.args, **sample.kwargs)

                    made, expected = outcome(model, run), outcome(reference, run)
                    assert made is StreamError or same(made, expected), op.name


def same(made, expected):
    if not isinstance(made, torch.Tensor):
        if isinstance(made, tuple | list):
            return len(made) == len(expected) and all(
                same(*both) for both in zip(made, expected, strict=True)
            )
        return bool(made == expected) or (isinstance(made, Complex) and isnan(made))
    if not isinstance(expected, torch.Tensor) or (made.dtype, made.shape, made.layout) != (
        expected.dtype,
        expected.shape,
        expected.layout,
    ):
        return False
    made, expected = (one.to_dense() if one.layout != torch.strided else one for one in (made, expected))
    return torch.allclose(
        made.to(torch.complex128), expected.to(torch.complex128), rtol=0, atol=0, equal_nan=True
    )
