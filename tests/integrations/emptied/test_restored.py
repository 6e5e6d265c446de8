"""What a model was before apply, it is again after restore."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.schedule.facts.errors import SourceError
from tests.integrations import models


class Tied(nn.Module):
    """Two parameters in one storage."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = nn.Parameter(self.first.weight.detach())

    def forward(self, x):
        return self.second(self.first(x))


def test_ties_training_and_grad_are_as_they_were(tmp_path):
    model = Tied()
    model.second.eval()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with apply(model, "1MB", cache=tmp_path):
        assert not model.training
        model(torch.ones(2, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(value.requires_grad for value in model.parameters())
    assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
    assert [one.training for one in (model, model.first, model.second)] == [True, True, False]


def test_a_damaged_file_in_the_cache_is_written_again_from_the_model(tmp_path, said):
    model = models.frozen(Tied())
    given = torch.ones(2, 8)
    expected = model(given)
    apply(model, "1MB", cache=tmp_path).restore()
    (file,) = tmp_path.glob("weights/*/weights.safetensors")
    whole = file.read_bytes()
    held = bytearray(whole)
    where = held.find(model.first.weight.numpy().tobytes()[:16])
    held[where : where + 4] = bytes(4)
    for damaged in (held, held[:-8], b""):
        file.write_bytes(damaged)
        said()
        with apply(model, "1MB", cache=tmp_path):
            assert torch.equal(model(given), expected)
        assert f"{file.parent} was damaged, and is written again" in said()
        assert file.read_bytes() == whole


class Pair:
    """Two components, as a pipeline has them."""

    def __init__(self):
        self.components = {name: models.frozen(nn.Linear(size, size)) for name, size in (("a", 8), ("b", 4))}


def test_no_component_is_restored_where_one_cannot_be(tmp_path):
    pair = Pair()
    inputs = {"a": torch.ones(2, 8), "b": torch.ones(2, 4)}
    expected = {name: one(inputs[name]) for name, one in pair.components.items()}
    applied = apply(pair, "1MB", cache=tmp_path)
    file = applied.components["b"].weights[0]
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="is gone, and it held"):
        applied.restore()
    file.write_bytes(b"no weights")
    with pytest.raises(SourceError, match=f"{file} is not a safetensors file"):
        applied.restore()
    assert torch.equal(pair.components["a"](inputs["a"]), expected["a"])  # streams as before
    (tmp_path / "elsewhere").replace(file)
    applied.restore()
    for name, one in pair.components.items():
        assert torch.equal(one(inputs[name]), expected[name])
        assert "forward" not in vars(one)


def test_an_error_of_the_body_is_not_hidden_by_one_of_the_restore(tmp_path):
    model = models.frozen(nn.Linear(8, 8))

    def lose_the_file_and_fail():
        with apply(model, "1MB", cache=tmp_path) as applied:
            applied.components["Linear"].weights[0].unlink()
            raise KeyError("of the body")

    with pytest.raises(KeyError) as caught:
        lose_the_file_and_fail()
    assert "penstock is still applied" in caught.value.__notes__[0]


def test_calls_that_wait_while_a_model_is_restored_run_the_model_itself(tmp_path):
    model = models.frozen(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    expected = model(torch.ones(2, 64))
    applied = apply(model, "1MB", cache=tmp_path)
    component, call = applied.components["Sequential"], model.forward  # as a thread holds it
    with ThreadPoolExecutor(1) as pool, applied.cap.lock:
        waiting = pool.submit(call, torch.ones(2, 64))
        applied.restore()
    assert torch.equal(waiting.result(), expected)
    assert component.stats is None


def test_ctrl_c_waits_for_the_end_of_a_restore(tmp_path, monkeypatch):
    model = models.frozen(nn.Linear(8, 8))
    expected = model(torch.ones(2, 8))
    applied = apply(model, "1MB", cache=tmp_path)
    component = applied.components["Linear"]
    let_go = component.let_go

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return let_go()

    monkeypatch.setattr(component, "let_go", interrupted)
    with pytest.raises(KeyboardInterrupt):
        applied.restore()
    assert "forward" not in vars(model)
    assert torch.equal(model(torch.ones(2, 8)), expected)


# Weights that are deleted from the cache while a model runs on them.

X = torch.linspace(-1, 1, 64).reshape(2, 32)
GONE = (
    r"weights\.safetensors is gone, and it held the weights of Sequential.* put the file back; .* restore\(\)"
)


@pytest.fixture
def lost(tmp_path):
    """A model whose plan is loaded, what it returned, what `apply` returned, and a function that deletes."""
    torch.manual_seed(0)
    model = models.frozen(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    expected = model(X)
    applied = apply(model, "1MB", cache=tmp_path)
    for _ in range(2):
        assert torch.equal(model(X), expected)
    shutil.move(tmp_path / "weights", tmp_path / "elsewhere")

    def put_back():
        shutil.move(tmp_path / "elsewhere", tmp_path / "weights")

    yield model, expected, applied, put_back
    if (tmp_path / "elsewhere").exists():
        put_back()
    applied.restore()


def test_a_call_that_needs_another_plan_says_so_and_smaller_ones_run_on(lost):
    model, expected, _, _ = lost
    with pytest.raises(SourceError, match=GONE):
        model(X.repeat(1000, 1))
    assert torch.equal(model(X), expected)


def test_a_load_after_close_says_so_and_works_when_they_are_back(lost):
    model, expected, applied, put_back = lost
    applied.close()
    with pytest.raises(SourceError, match=GONE):
        model(X)
    put_back()
    assert torch.equal(model(X), expected)


def test_a_restore_says_so_and_leaves_what_is_loaded(lost):
    model, expected, applied, put_back = lost
    with pytest.raises(SourceError, match=GONE):
        applied.restore()
    with pytest.raises(SourceError, match="is missing"):
        model[0].weight.sum()
    assert torch.equal(model(X), expected)
    assert applied.freed_bytes
    put_back()
    applied.restore()
    assert not applied.freed_bytes
    assert torch.equal(model(X), expected)
