"""`penstock cache`: what it lists, removes and asks."""

import json
import os
import sys
import time

import pytest
import torch

import penstock as library
from penstock.runtime.cache import LIMIT, Cache

DAY = 86_400


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache with 2000 bytes of weights used 40 days ago, 1000 used now, and three plans."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(LIMIT, raising=False)
    cache = Cache.at(None)
    for letter, days, nbytes in (("a", 40, 2000), ("b", 0, 1000)):
        path = cache.weights / (letter * 32)
        path.mkdir(parents=True)
        (path / "weights.safetensors").write_bytes(bytes(nbytes))
        cache.keep(path, f"model {letter}", lambda: None).close()
        os.utime(path / "entry.json", (time.time() - days * DAY,) * 2)
    (cache.folder / "plans").mkdir()
    for number in range(3):
        (cache.folder / "plans" / f"{number:032x}.json").write_text("{}")
    return cache


def held(cache):
    return {path.name[0] for path in cache.weights.iterdir()}


def test_a_list_has_a_line_for_all_that_a_model_has_of_a_kind(penstock, cache):
    also = cache.weights / ("c" * 32)
    cache.keep(also, "model b", also.mkdir).close()
    (also / "weights.safetensors").write_bytes(bytes(968))
    use = cache.keep(cache.weights / ("b" * 32), "model b", lambda: None)
    lines = penstock("cache", "list").out.splitlines()
    assert lines[0].startswith(str(cache.folder)[:20])
    (old,) = (line for line in lines if "model a" in line)
    assert all(word in old for word in ("1 set of weights", "1.98 KiB", "40 d ago"))
    (new,) = (line for line in lines if "model b" in line)
    assert all(word in new for word in ("2 sets of weights", "in use"))
    kinds = [next(k for k, line in enumerate(lines) if word in line) for word in ("2 sets", "3 plans")]
    assert kinds == sorted(kinds)
    (plans,) = (line for line in lines if "plan" in line and "penstock" not in line)
    assert all(word in plans for word in ("3 plans", "all models", "6 B", "now"))
    facts = json.loads(penstock("cache", "list", "--json").out)
    assert facts["bytes"] == sum(one["bytes"] for one in facts["entries"])
    assert [one["in_use"] for one in facts["entries"] if one["path"][-1] in "ab"] == [False, True]
    assert facts["entries"][0]["made_for"] == "model a"
    assert facts["entries"][0]["last_used"].endswith("+00:00")
    use.close()


def test_a_prune_goes_by_age_by_size_and_by_the_limit(penstock, cache, monkeypatch):
    for options, told in ((["--older-than", "6w"], False), (["--to", "8GB"], False), ([], True)):
        said = penstock("cache", "prune", *options).out
        assert "0 B freed" in said
        assert ("Only leftovers of killed runs are removed without --older-than" in said) == told
    said = penstock("cache", "prune", "--older-than", "30d", "--dry-run").out
    assert "would be removed" in said
    assert held(cache) == {"a", "b"}
    facts = json.loads(penstock("cache", "prune", "--older-than", "30d", "--json").out)
    assert [one["made_for"] for one in facts["removed"]] == ["model a"]
    assert facts["freed_bytes"] == facts["removed"][0]["bytes"] > 2000
    assert held(cache) == {"b"}
    assert penstock("cache", "prune", "--to", "900").status == 0
    assert held(cache) == set()


def test_the_limit_is_shown_and_kept(penstock, cache, monkeypatch):
    monkeypatch.setenv(LIMIT, "1500")
    assert json.loads(penstock("cache", "list", "--json").out)["limit"] == 1500
    use = cache.keep(cache.weights / ("a" * 32), "model a", lambda: None)
    done = penstock("cache", "prune")
    assert "1 in use should have gone" in done.out
    assert held(cache) == {"a"}
    use.close()


@pytest.mark.parametrize(("answer", "left"), [("n\n", {"a", "b"}), ("y\n", set())])
def test_a_terminal_is_asked_before_all_is_removed(penstock, cache, monkeypatch, answer, left):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked = []

    def confirm(question, **_):
        asked.append(question)
        return answer == "y\n"

    monkeypatch.setattr("typer.confirm", confirm)
    assert penstock("cache", "clear", "--dry-run").status == 0
    assert not asked
    done = penstock("cache", "clear")
    assert done.status == (2 if left else 0)
    assert held(cache) == left
    assert len(asked) == 1
    assert str(cache.folder) in asked[0]


def test_all_of_another_folder_is_removed_without_a_question(penstock, cache, monkeypatch, tmp_path):
    monkeypatch.setattr("typer.confirm", lambda *_, **__: pytest.fail("it asked"))
    other = tmp_path / "other"
    assert penstock("cache", "clear", "--cache", other).status == 0
    assert held(cache) == {"a", "b"}
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert penstock("cache", "clear", "--yes", "--cache", cache.folder).status == 0
    assert held(cache) == set()
    assert penstock("cache", "list").out.startswith("nothing is kept in ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["prune", "--older-than", "30"], "no age"),
        (["prune", "--older-than", "old"], "no age"),
        (["prune", "--to", "10%"], "percentage of an unknown total"),
        (["prune", "--to", "much"], "--to 'much' is not a size"),
    ],
)
def test_wrong_ages_and_sizes_are_refused(penstock, cache, options, words):
    done = penstock("cache", *options)
    assert done.status == 2
    assert words in done.err
    assert held(cache) == {"a", "b"}


def test_what_one_model_has_is_together_and_goes_alone(penstock, cache, tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    artifact = tmp_path / "model b.penstock"
    library.compile(torch.export.export(model, (torch.zeros(1, 64),)), artifact)
    library.open(artifact).plan("60%")
    rows = [line for line in penstock("cache", "list").out.splitlines() if "set" in line or " plan" in line]
    order = ("1 plan", "model a", "model b", "all models")
    assert [next(word for word in order if word in row) for row in rows] == [*order]
    done = penstock("cache", "clear", "--model", "Model C")
    assert done.status == 2
    assert f"was made for 'Model C': it has entries of {artifact}, model a, model b" in done.err
    facts = json.loads(penstock("cache", "clear", "--model", "model b", "--json", "--yes").out)
    assert sorted(one["kind"] for one in facts["removed"]) == ["plan", "weights"]
    assert held(cache) == {"a"}
    assert len([*(cache.folder / "plans").iterdir()]) == 3
