"""Python's collector waits while a model is loaded of what is kept, and no longer."""

from __future__ import annotations

import gc

import pytest

from penstock.integrations import load
from penstock.integrations.calls import exported
from penstock.integrations.collector import with_collector, without_collector
from penstock.integrations.folders import Stored
from penstock.schedule.facts.errors import SourceError
from tests.integrations import models


@pytest.fixture
def enabled(monkeypatch):
    """Whether the collector ran when modules were made and when calls were exported."""
    seen: dict[str, bool] = {}

    def noting(name, function):
        def noted(*args, **kwargs):
            seen[name] = gc.isenabled()
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(Stored, "make", noting("make", Stored.make))
    monkeypatch.setattr(exported, "_export", noting("export", exported._export))
    return seen


def test_it_waits_but_for_exports(enabled, tmp_path):
    models.llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    for seen in ({"make": False, "export": True}, {"make": False}):  # the second time nothing is exported
        enabled.clear()
        load(tmp_path / "model", "400KB", cache=tmp_path / "cache")
        assert enabled == seen
        assert gc.isenabled()


def test_it_runs_after_a_failure(tmp_path):
    with pytest.raises(SourceError):
        load(tmp_path, "400KB")
    assert gc.isenabled()


def test_one_that_does_not_run_is_left_alone():
    gc.disable()
    try:
        with without_collector(), with_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_waits_inside_another_wait_does_not_end_it():
    with without_collector():
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
