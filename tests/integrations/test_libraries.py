"""What an export tells the libraries, and what other threads of the process see of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.integrations import apply
from penstock.integrations.calls.assumptions import Assumptions
from penstock.integrations.libraries import as_when_called
from tests.integrations import models


def flags():
    return torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag


def test_two_threads_that_export_leave_the_flags_as_they_were(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with as_when_called(Assumptions((), True)):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with as_when_called(Assumptions((), True)):
        assert flags() == (False, False)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(60)
    leave.set()
    thread.join()
    assert flags() == (True, True)


def test_models_of_two_threads_are_exported_at_once(tmp_path):
    ids = torch.arange(6)[None]

    def run(model):
        expected = model(input_ids=ids).logits
        with apply(model, "1MB", cache=tmp_path, example=models.nothing):
            return torch.equal(model(input_ids=ids).logits, expected)

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        assert all(pool.map(run, [models.llama(num_hidden_layers=layers) for layers in (1, 2)]))
    assert flags() == (False, False)
