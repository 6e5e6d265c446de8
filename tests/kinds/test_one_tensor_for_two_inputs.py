"""One tensor object in two places of an example: two inputs of the program, or a refusal that names both."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import penstock
from penstock.backends.fx import FxBackend


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair, *, other):
        shown = self.first(pair["one"]) + self.second(pair["list"][0]).sin() + self.third(other).cos()
        return shown.square().mean()


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y):
        return (self.layer(x) * y.cos()).mean()


class OwnWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).square().mean()


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, unused):
        return self.layer(x)


def ids():
    return torch.randint(16, (2, 3))


def loss():
    one = ids()
    return torch.export.export(Loss(), (one, one))


def test_a_module_is_exported_with_an_input_for_each(tmp_path):
    model, one = Loss(), ids()
    program = penstock.compile_training(model, tmp_path / "p", example=(one, one), trainable=["head*"])
    with program.load("100%") as trained:
        for given in ((ids(), ids()), (one, one)):
            assert torch.equal(trained(*given), model(*given))


def test_inputs_in_collections_and_by_name_are_kept_apart(tmp_path):
    model, x = Nested(), torch.randn(2, 4)
    example = {"pair": {"one": x, "list": [x]}, "other": x}
    program = penstock.compile_training(model, tmp_path / "p", example=example, trainable=["*"])
    a, b, c = torch.randn(3, 2, 4)
    given = {"pair": {"one": a, "list": [b]}, "other": c}
    with program.load("100%") as trained:
        assert torch.equal(trained(**given), model(**given))


def test_each_of_them_has_its_own_gradient(tmp_path):
    model, x = Writes(), torch.randn(2, 4, requires_grad=True)
    program = penstock.compile_training(model, tmp_path / "p", example=(x, x), trainable=["layer*"])
    given = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    again = copy.deepcopy(given)
    with program.load("100%") as trained:
        trained(*given).backward()
    model(*again).backward()
    assert [torch.equal(a.grad, b.grad) for a, b in zip(given, again, strict=True)] == [True, True]  # type: ignore[arg-type]


def test_a_tensor_of_the_module_may_be_its_example(tmp_path):
    model, x = OwnWeight(), torch.randn(4, 4)
    example = (model.layer.weight,)
    program = penstock.compile_training(model, tmp_path / "p", example=example, trainable=["*"])
    with program.load("100%") as trained:
        assert torch.equal(trained(x), model(x))


def test_fake_export_keeps_them_apart(tmp_path):
    model, one = Loss(), ids()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    exported = penstock.bind(penstock.fake_export(Loss, (one, one)), tmp_path / "w.pt")
    given = ids(), ids()
    with torch.no_grad(), penstock.compile(exported, tmp_path / "p").load("100%") as streamed:
        assert torch.equal(streamed(*given), model(*given))


TAKES_A_PROGRAM = {
    "annotate": lambda exported, folder: penstock.annotate(exported),
    "compile": lambda exported, folder: penstock.compile(exported, folder / "p"),
    "a method": lambda exported, folder: penstock.compile({"prefill": exported}, folder / "p"),
    "compile_training": lambda exported, folder: penstock.compile_training(
        exported, folder / "p", trainable=["head*"]
    ),
    "fx": lambda exported, folder: FxBackend(folder).annotate(exported),
}

NAMES = "one tensor for input 'ids' and input 'labels', and reads the latter for both: export it again"


@pytest.mark.parametrize("name", TAKES_A_PROGRAM)
def test_a_program_that_reads_one_for_both_is_refused(name, tmp_path):
    with pytest.raises(penstock.PassError, match=NAMES):
        TAKES_A_PROGRAM[name](loss(), tmp_path)
    assert not list(tmp_path.glob("p*"))


def test_executorch_is_refused_it_too():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
        pytest.importorskip("executorch.exir")
        from penstock.backends.executorch import PenstockPartitioner
    with pytest.raises(penstock.PassError, match=NAMES):
        PenstockPartitioner().transform_for_pre_decomposition(loss())


def test_a_program_from_a_file_is_refused_too():
    file = io.BytesIO()
    torch.export.save(loss(), file)
    file.seek(0)
    with pytest.raises(penstock.PassError, match=NAMES):
        penstock.annotate(torch.export.load(file))


def test_a_program_whose_example_is_its_own_weight_is_refused():
    model = OwnWeight()
    with pytest.raises(penstock.PassError, match=r"its parameter 'layer\.weight' and input 'x'"):
        penstock.annotate(torch.export.export(model, (model.layer.weight,)))


@pytest.mark.parametrize("again", ["view_as", "clone", "another"])
def test_an_input_that_is_really_unused_compiles(again, tmp_path):
    model, x = Unused(), torch.randn(2, 4)
    other = {"view_as": x.view_as(x), "clone": x.clone(), "another": torch.randn(3)}[again]
    exported = torch.export.export(model, (x, other))
    with torch.no_grad(), penstock.compile(exported, tmp_path / "p").load("100%") as streamed:
        assert torch.equal(streamed(x, other), model(x, other))
