"""Runs the command line in this process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.cli import main as cli


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture(name="penstock")
def penstock_fixture(monkeypatch, capsys):
    """Runs `penstock ARGUMENTS...` and returns what came of it."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return Result(0 if code is None else int(code), *capsys.readouterr())

    return run
