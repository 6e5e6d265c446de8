"""Programs that take or return one tensor in several places, and norms of turned operands."""

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


def two_inputs():
    one = ids()
    return Loss(), (one, one), [((ids(), ids()), {}), ((one, one), {})]


def in_collections():
    x, (a, b, c) = torch.randn(2, 4), torch.randn(3, 2, 4)
    example = {"pair": {"one": x, "list": [x]}, "other": x}
    return Nested(), example, [((), {"pair": {"one": a, "list": [b]}, "other": c})]


def its_own_weight():
    model = OwnWeight()
    return model, (model.layer.weight,), [((torch.randn(4, 4),), {})]


@pytest.mark.parametrize("make", [two_inputs, in_collections, its_own_weight])
def test_a_module_is_exported_with_an_input_for_each(make, tmp_path):
    model, example, calls = make()
    program = penstock.compile_training(model, tmp_path / "p", example=example, trainable=["*"])
    with program.load("100%") as trained:
        for given, named in calls:
            assert torch.equal(trained(*given, **named), model(*given, **named))


def test_each_of_them_has_its_own_gradient(tmp_path):
    model, x = Writes(), torch.randn(2, 4, requires_grad=True)
    program = penstock.compile_training(model, tmp_path / "p", example=(x, x), trainable=["layer*"])
    given = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    again = copy.deepcopy(given)
    with program.load("100%") as trained:
        trained(*given).backward()
    model(*again).backward()
    assert [torch.equal(a.grad, b.grad) for a, b in zip(given, again, strict=True)] == [True, True]  # type: ignore[arg-type]


def test_fake_export_keeps_them_apart(tmp_path):
    model, one = Loss(), ids()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    exported = penstock.bind(penstock.fake_export(Loss, (one, one)), tmp_path / "w.pt")
    given = ids(), ids()
    with torch.no_grad(), penstock.compile(exported, tmp_path / "p").load("100%") as streamed:
        assert torch.equal(streamed(*given), model(*given))


def executorch(exported, _):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
        pytest.importorskip("executorch.exir")
        from penstock.backends.executorch import PenstockPartitioner
    PenstockPartitioner().transform_for_pre_decomposition(exported)


def from_a_file(exported, _):
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    penstock.annotate(torch.export.load(file))


TAKES_A_PROGRAM = {
    "executorch": executorch,
    "from a file": from_a_file,
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


class Repeating(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.outer(self.inner(x))
        return {"logits": y, "again": (y, [y]), "turned": y.t()}


LOSSES = {
    "of the first": lambda found: (found["logits"] ** 2).sum() + found["turned"].sum(),
    "of all": lambda found: (
        (found["logits"] * found["again"][0] * found["again"][1][0]).sum() + (found["turned"] * 3).sum()
    ),
    "of the last": lambda found: found["again"][1][0].sum() + found["turned"].exp().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_autograd(name, tmp_path):
    torch.manual_seed(0)
    model, x = Repeating(), torch.randn(3, 8)
    reference, expected = copy.deepcopy(model), LOSSES[name]
    program = penstock.compile_training(model, tmp_path / "m.penstock", trainable=["inner.*"], example=(x,))
    with program.load(program.floor_bytes) as module:
        for one in (reference, module):
            found = one(x)
            assert found["logits"] is found["again"][0] is found["again"][1][0]
            expected(found).backward()
        gradients = {fqn: value.grad for fqn, value in module.named_parameters()}
    assert set(gradients) == {"inner.weight", "inner.bias"}
    for fqn, gradient in gradients.items():
        assert torch.equal(gradient, reference.get_parameter(fqn).grad)


WIDTH = 16


class Turned(nn.Module):
    """A norm of channels that lie last, between two linears."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        order = [0, x.dim() - 1, *range(1, x.dim() - 1)]
        back = [0, *range(2, x.dim()), 1]
        return self.after(self.norm(self.before(x).permute(order)).permute(back))


class Rows(Turned):
    """A norm over the columns of a transposed matrix."""

    def forward(self, x):
        return self.after(self.norm(self.before(x[0]).t()).t())


MEMBERS = {
    "sequences": (lambda: Turned(nn.BatchNorm1d(WIDTH)), (2, 7, WIDTH)),
    "no statistics": (lambda: Turned(nn.BatchNorm1d(WIDTH, track_running_stats=False)), (2, 7, WIDTH)),
    "no weights": (lambda: Turned(nn.BatchNorm1d(WIDTH, affine=False)), (2, 7, WIDTH)),
    "images": (lambda: Turned(nn.BatchNorm2d(WIDTH)), (2, 3, 5, WIDTH)),
    "volumes": (lambda: Turned(nn.BatchNorm3d(WIDTH)), (2, 3, 2, 5, WIDTH)),
    "rows": (lambda: Rows(nn.BatchNorm1d(7)), (2, 7, WIDTH)),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MEMBERS)
def test_a_step_has_the_bits_of_autograd(name, train, tmp_path):
    make, shape = MEMBERS[name]
    model, x = make().train(train), torch.randn(shape)
    trainable = ["before.weight", "after.bias"]
    reference = copy.deepcopy(model).requires_grad_(False)
    for fqn in trainable:
        reference.get_parameter(fqn).requires_grad_(True)
    program = penstock.compile_training(
        model,
        tmp_path / "m.penstock",
        trainable=trainable,
        example=(x,),
        activations=["keep"],
        evaluate=False,
    )
    with program.load(program.floor_bytes) as module:
        for one in (reference, module):
            (one(x) ** 2).sum().backward()
        trained = dict(module.named_parameters())
        assert torch.equal(module(x), reference(x))
    for fqn in trainable:
        assert torch.equal(trained[fqn].grad, reference.get_parameter(fqn).grad), fqn
