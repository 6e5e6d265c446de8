"""Routes that are recorded of a tiny mixture, trained for two steps, and those that benchmarks replay."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.experts import recorded_routes
from benchmarks.experts.mixture import recorded_experts, routes_path
from benchmarks.experts.recorded_routes import KINDS, make_model

SIZES = {"layers": 1, "experts": 32, "asked": 2, "words": 300}


@pytest.fixture
def few_texts(monkeypatch):
    """Have little to learn, and something else to read."""

    def few(kind, *, apart):
        return ["".join(f"{kind} {number * (7 + 4 * apart)} is even. " for number in range(60))]

    monkeypatch.setattr(recorded_routes, "texts", few)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.mark.usefixtures("few_texts")
def test_routes_are_recorded_of_every_token(tmp_path):
    application = recorded_routes.typer.Typer()
    application.command()(recorded_routes.main)
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    options = [*sizes, "--tokens", "5", "--weights", str(tmp_path / "trained.pt")]
    done = CliRunner().invoke(application, [*options, "--steps", "1", "--folder", str(tmp_path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "step 1 of 1" in done.output
    make_model(**SIZES).load_state_dict(torch.load(tmp_path / "trained.pt"))
    for kind in KINDS:
        tokens = recorded_experts(routes_path(32, kind, tmp_path))
        assert len(tokens) == 5
        assert all(len(layers) == 1 and len(layers[0]) == 2 for layers in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_routes_in_this_repository_are_those_of_a_mixture(kind):
    path = routes_path(64, kind)
    tokens = recorded_experts(path)
    assert path.stat().st_size < 1 << 20
    assert len(tokens) == 300
    assert all([len(units) for units in token] == [8] * 6 for token in tokens)
