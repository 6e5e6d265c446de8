"""What is exported once serves every process with the same model, and none with another."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zipfile

import pytest
import torch
from torch import nn

from penstock.integrations import apply, load
from penstock.integrations.calls import exported
from penstock.integrations.calls.kept_calls import decode_call
from penstock.runtime import choice, program
from penstock.runtime.cache import Cache
from penstock.schedule.planner import make_plan
from tests.forked import run_forked
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42]])
PADDED = torch.tensor([[0, 0, 1, 1, 1]])


@pytest.fixture
def exports(monkeypatch):
    """The kinds of calls that are exported, as they are."""
    made: list[str] = []
    export = exported._export

    def count(known, model, call, stage):
        made.append(call.text)
        return export(known, model, call, stage)

    monkeypatch.setattr(exported, "_export", count)
    return made


def said_by(model, **options):
    return model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)


def used(cache):
    """Generate with a Llama to which penstock is applied, and compare with one in memory."""
    model = models.llama(num_hidden_layers=1)
    want = [said_by(models.twin(model)), said_by(models.twin(model), attention_mask=PADDED)]
    with apply(model, "400KB", cache=cache):
        got = [said_by(model), said_by(model, attention_mask=PADDED)]
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache in which are the calls of `used`."""
    folder = tmp_path_factory.mktemp("cache")
    used(folder)
    return folder


def test_nothing_is_exported_again(cache, exports):
    calls = set(Cache(cache).calls.iterdir())
    used(cache)
    assert not exports
    assert set(Cache(cache).calls.iterdir()) == calls


def test_a_plan_is_made_once_for_a_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[int] = []

    def make(problem, budget, **options):
        made.append(budget)
        return make_plan(problem, budget, **options)

    monkeypatch.setattr(choice, "make_plan", make)
    monkeypatch.setattr(program, "least_budget", None)  # a plan tells whether there is one
    for memory in ("200KB", "200KB", "190KB"):
        apply(models.llama(num_hidden_layers=1), memory, example=IDS, cache=tmp_path).restore()
    assert len(made) == 2
    assert made[0] - made[1] == 10_000


SCRIPT = """
import sys, torch
from penstock.integrations import load
from penstock.integrations.calls import exported
def refuse(*_): raise AssertionError("exported again")
exported._export = refuse
model = load(sys.argv[1], "400KB", cache=sys.argv[2])
ids = torch.tensor([[5, 17, 99, 23, 42]])
said = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True,
                      return_dict_in_generate=True)
torch.save([said.sequences, *said.logits], sys.argv[3])
"""


def test_another_process_runs_what_the_first_one_exported_bit_for_bit(tmp_path, exports):
    models.llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", "400KB", cache=tmp_path / "cache")
    assert len(exports) == 2
    options = {"return_dict_in_generate": True, "output_logits": True}
    said = said_by(model, **options)
    given = [tmp_path / "model", tmp_path / "cache", tmp_path / "said.pt"]
    done = run_forked(SCRIPT, *given, warnings="ignore")
    assert done.status == 0, done.err
    got = torch.load(given[-1])
    assert all(torch.equal(*pair) for pair in zip(got, [said.sequences, *said.logits], strict=True))


def test_a_changed_model_is_exported_again(tmp_path, exports):
    def ids_of(change):
        model = models.llama(num_hidden_layers=1)
        change(model)
        want = model(IDS).logits
        with apply(model, "400KB", example=IDS, cache=tmp_path):
            assert torch.equal(model(IDS).logits, want)
        return len(exports)

    def scale(model):
        model.model.layers[0].self_attn.scaling *= 2

    def eager(model):
        model.set_attn_implementation("eager")

    def halve(model):
        model.model.rotary_emb.inv_freq.mul_(0.5)

    assert [ids_of(change) for change in (lambda _: None, scale, eager, halve)] == [1, 2, 3, 4]
    assert [ids_of(change) for change in (lambda _: None, scale, eager, halve)] == [4] * 4


FACTOR = 1.0


class Scaled(nn.Module):
    """Names a global, which may be set at any time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * FACTOR


def test_what_was_set_between_apply_and_the_export_is_in_the_key(tmp_path, exports, monkeypatch):
    x, model = torch.ones(2, 4), models.frozen(Scaled())
    for factor, count in ((5.0, 1), (1.0, 2), (5.0, 2)):
        with apply(models.twin(model), "1MB", cache=tmp_path) as applied, monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "FACTOR", factor)
            assert torch.equal(applied.target(x), model(x))
        assert len(exports) == count


@pytest.mark.parametrize("damage", ["cut", "foreign", "other json", "nothing"])
def test_a_damaged_file_is_written_again(damage, tmp_path, exports, said):
    def use():
        model = models.frozen(nn.Sequential(nn.Linear(4, 4)))
        x = torch.ones(2, 4)
        want = model(x)
        with apply(model, "1MB", example=x, cache=tmp_path):
            assert torch.equal(model(x), want)

    use()
    (file,) = Cache(tmp_path).calls.iterdir()
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "foreign":
        file.write_bytes(b"not a zip at all")
    elif damage == "nothing":
        file.write_bytes(b"")
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("call.json", json.dumps({"name": []}))
    said()
    use()
    assert len(exports) == 2
    assert f"{file} is of no use" in said()
    assert file.read_bytes() == data


def test_every_byte_of_a_file_counts(cache):
    file = max(Cache(cache).calls.iterdir())
    data = bytearray(file.read_bytes())
    kept = decode_call(bytes(data), trust=False).content()
    assert kept == hashlib.sha256(data).hexdigest()
    members = zipfile.ZipFile(file).infolist()
    for member in members:
        changed = bytearray(data)
        changed[member.header_offset + 30 + len(member.filename) + member.file_size // 2] ^= 1
        with pytest.raises(zipfile.BadZipFile):
            decode_call(bytes(changed), trust=False)


def test_what_has_no_description_is_exported_in_each_process(tmp_path, exports, said):
    for count in (1, 2):
        model = models.frozen(nn.Sequential(nn.Linear(4, 4)))
        model.held = torch.Generator()
        with apply(model, "1MB", example=torch.ones(2, 4), cache=tmp_path):
            assert len(exports) == count
        assert "the Sequential is not kept for other processes: held is a torch" in said()
    assert not Cache(tmp_path).calls.exists()


def test_a_call_that_cannot_be_written_runs_all_the_same(tmp_path, said):
    (tmp_path / "calls").write_text("in the way")
    model = models.frozen(nn.Sequential(nn.Linear(4, 4)))
    want = model(torch.ones(2, 4))
    with apply(model, "1MB", example=torch.ones(2, 4), cache=tmp_path):
        assert torch.equal(model(torch.ones(2, 4)), want)
    assert "is not kept for another process" in said()


def test_two_that_export_at_once_keep_one_or_two_and_both_run(tmp_path):
    def use(results):
        torch.manual_seed(0)
        model = models.frozen(nn.Sequential(nn.Linear(4, 4)))
        with torch.no_grad():
            want = model(torch.ones(2, 4))
            with apply(model, "1MB", example=torch.ones(2, 4), cache=tmp_path):
                results.append(torch.equal(model(torch.ones(2, 4)), want))

    found: list[bool] = []
    threads = [threading.Thread(target=use, args=(found,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3
