"""States that a program writes by index, and attention that is written by hand, in ExecuTorch."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.export import export

pytest.importorskip("executorch", reason="executorch is not installed: pip install '.[executorch]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
    from tests.backends.executorch.delegate.pte_models import WIDTH, write_files
    from tests.backends.executorch.delegate.pte_runs import Call, Program, Runner, outputs_of
from tests.engines import built
from tests.hunt import nightly_but

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]  # ExecuTorch's own

ONE, TWO, GRID = torch.tensor([3]), torch.tensor([3, 5]), torch.tensor([[3, 5], [6, 1]])


class Written(nn.Module):
    """A linear layer, and a state that `write(state, values, at)` writes from its results."""

    def __init__(self, write, state):
        super().__init__()
        self.write, self.linear = write, nn.Linear(64, 64)
        self.register_buffer("kept", state)

    def forward(self, x, at):
        y = self.linear(x)
        other = self.write(self.kept, y, at)
        return y + self.kept.sum() + (0 if other is None else other)


def put(state, y, at):
    state[at] = y


def put_by_columns(state, y, at):
    state[:, at] = y


def add_twice(state, y, at):
    state[at] = y[:, :8]
    state[at] += y.mean()


def old_and_new(state, y, at):
    changed = torch.index_put(state, (at,), y[:, 8:16])  # of the state as it was, which is written below
    state[at] = y[:, :8]
    return changed.sum()


def in_a_slice(state, y, at):
    state[2:6, at] = y[:, :4].view(4, 1)


def in_a_copy(state, y, at):
    copied = state * 2
    copied[at] = y[:, :8]
    state.copy_(torch.relu(copied) + 1)
    return copied.sum()


def in_place(call):
    def write(state, y, at):
        call(state, y, at)

    return write


CASES = {
    "a number": (lambda s, y, at: put(s, y.mean(), at), (16,), ONE),
    "one value": (lambda s, y, at: put(s, y.mean(1), at), (16,), ONE),
    "a row of a number": (lambda s, y, at: put(s, y.mean(), at), (16, 8), ONE),
    "a row": (lambda s, y, at: put(s, y[:, :8], at), (16, 8), ONE),
    "two rows": (lambda s, y, at: put(s, y[:, :16].view(2, 8), at), (16, 8), TWO),
    "two rows of one": (lambda s, y, at: put(s, y[:, :8], at), (16, 8), TWO),
    "rows from the end": (lambda s, y, at: put(s, y[:, :8], at - 9), (16, 8), TWO),
    "a 32-bit index": (lambda s, y, at: put(s, y[:, :8], at.int()), (16, 8), ONE),
    "a grid of indices": (lambda s, y, at: put(s, y[0, :8], at), (16, 8), GRID),
    "a mask": (lambda s, y, at: put(s, y.mean(), torch.arange(16) == at), (16, 8), ONE),
    "columns": (lambda s, y, at: put_by_columns(s, y[:, :8], at), (4, 16, 8), TWO),
    "columns of a number": (lambda s, y, at: put_by_columns(s, y.mean(), at), (4, 16, 8), ONE),
    "two indices": (in_place(lambda s, y, at: s.index_put_((at, at), y.mean())), (16, 16), TWO),
    "added": (in_place(lambda s, y, at: s.index_put_((at,), y.mean(), accumulate=True)), (16,), ONE),
    "added twice": (in_place(lambda s, y, at: s.index_add_(0, at * 0, y[0, :2])), (16,), TWO),
    "whole numbers": (lambda s, y, at: put(s, 7, at), (16,), ONE),
    "a copy of rows": (in_place(lambda s, y, at: s.index_copy_(0, at, y[:, :8])), (16, 8), ONE),
    "scattered": (in_place(lambda s, y, at: s.scatter_(0, at, y[0, :2])), (16,), TWO),
    "a constant index": (lambda s, y, at: put(s, y.mean(), -1), (16, 8), ONE),
    "written twice": (add_twice, (16, 8), ONE),
    "beside another value": (old_and_new, (16, 8), ONE),
    "rows of a slice": (in_a_slice, (16, 8), ONE),
    "rows of a copy": (in_a_copy, (16, 8), ONE),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = built("executorch/run_pte", "build-delegate").parent
    return Runner(folder / "run_pte", folder / "libpenstock_executorch.so", tmp_path_factory.mktemp("runs"))


def exported(write, shape, at, dtype=torch.float32):
    torch.manual_seed(0)
    model = Written(write, torch.zeros(shape, dtype=dtype)).eval()
    inputs = [[torch.randn(1, 64), at + k] for k in range(3)]
    return {"forward": torch.export.export(model, tuple(inputs[0]))}, inputs


def outputs(runner, files, inputs):
    return outputs_of(runner([Program(files)], [Call(one) for one in inputs]))


SAMPLE = ("a row of a number", "two rows", "a mask", "added", "rows of a slice", "rows of a copy")


@pytest.mark.parametrize("case", nightly_but(SAMPLE, CASES))
def test_a_state_has_the_values_that_executorch_gives_it(runner, tmp_path, case):
    write, shape, at = CASES[case]
    dtype = torch.int64 if case == "whole numbers" else torch.float32
    programs, inputs = exported(write, shape, at, dtype)
    expected = outputs(runner, write_files(tmp_path / "plain", programs, delegated=False), inputs)
    found = outputs(runner, write_files(tmp_path / "delegated", programs), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_rows_of_any_number_are_written_without_a_copy_of_the_state(runner, tmp_path):
    class Cache(nn.Module):
        """Rows of a batch of one: torch drops their leading dimension from the values."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("keys", torch.zeros(1, 4, 16, 16))

        def forward(self, x, at):
            y = self.linear(x)
            self.keys[:, :, at] = y.view(1, -1, 4, 16).transpose(1, 2)
            return y + self.keys.sum()

    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=8)
    inputs = [[torch.randn(n, 64), torch.arange(n) + n] for n in (3, 2, 5)]
    shapes = ({0: rows}, {0: rows})
    programs = {"forward": torch.export.export(Cache().eval(), tuple(inputs[0]), dynamic_shapes=shapes)}
    expected = outputs(runner, write_files(tmp_path / "plain", programs, delegated=False), inputs)
    files = write_files(tmp_path / "delegated", programs)
    found = outputs(runner, files, inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert b"aten::index_put_\0" in files.pte.read_bytes()


HEADS = 4


class Attention(nn.Module):
    dtype = torch.float32

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, dtype=self.dtype) for _ in range(3))

    def forward(self, x, mask):
        x, mask = x.to(self.dtype), mask.to(self.dtype)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        values = self.weights(q @ k.transpose(-1, -2), mask) @ v
        return values.transpose(1, 2).flatten(2).float()

    def weights(self, scores, mask):
        return (scores / math.sqrt(WIDTH // HEADS) + mask).softmax(-1)


class Shifted(Attention):
    def weights(self, scores, mask):
        return ((scores - 0.5) * 0.3 + 1.5 * mask).softmax(-1)


class Kept(Attention):
    """Divides by a tensor that it keeps."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))

    def weights(self, scores, mask):
        return (scores / self.scale + mask).softmax(-1)


class Computed(Attention):
    """Divides by a tensor that it computes."""

    def weights(self, scores, mask):
        return (scores / torch.sqrt(torch.tensor(16.0)) + mask).softmax(-1)


class PerHead(Kept):
    """Divides by a tensor with an element for each head."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, HEADS + 1).view(HEADS, 1, 1))


class Half(Attention):
    """Divides numbers of 16 bits, and keeps the weights in 32."""

    dtype = torch.bfloat16

    def weights(self, scores, mask):
        scores = scores / math.sqrt(WIDTH // HEADS) + mask
        return scores.float().softmax(-1).to(self.dtype)


KINDS = [Attention, Shifted, Kept, Computed, PerHead, Half]


@pytest.mark.parametrize("kind", nightly_but([Attention, PerHead], KINDS))
def test_its_outputs_are_those_of_the_model(runner, tmp_path, kind):
    model = kind().eval()
    given = torch.randn(1, 6, WIDTH), torch.randn(6, 6)
    files = write_files(tmp_path / "attention", {"forward": export(model, given)}, kernels="aotinductor")
    (answer,) = runner([Program(files)], [Call(given)])
    assert answer.error == "Error::Ok"
    close = {} if kind.dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(answer.outputs[0], model(*given), **close)
