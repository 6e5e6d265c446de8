"""Routes that are recorded of a tiny mixture, and the tables that benchmarks make of routes, small."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.experts import recorded_routes, replay, speculation
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


def test_the_table_has_a_row_for_each_preference_and_size():
    head, _, *rows = speculation.render(2, 20, []).splitlines()
    assert head.count("|") == 8
    assert len(rows) == len(speculation.PREFERENCES) * len(speculation.SHARES)
    assert all(row.count("|") == 8 for row in rows)


def test_penstock_beats_lru_and_nothing_beats_the_bound(monkeypatch):
    monkeypatch.setattr(replay, "recorded_experts", lambda path: recorded_experts(path)[:60])
    recorded, made_up, asked = replay.render([2], 20, [routes_path(64)]).strip().split("\n\n")
    tables = [[line.strip("|").split("|") for line in one.splitlines()] for one in (recorded, made_up)]
    assert [len(rows) - 2 for rows in tables] == [len(replay.SHARES), len(replay.DRIFTS) * len(replay.SHARES)]
    against = []
    for head, _, *rows in tables:
        for row in rows:
            assert len(row) == len(head)
            lru, lfu, own, most, ratio = (float(cell) for cell in row[-5:])
            assert max(lru, lfu, own) <= most
            assert (
                ratio == round((100 - own) / (100 - lru), 3) or abs(ratio - (100 - own) / (100 - lru)) < 2e-3
            )
            against.append(ratio)
    _, _, anywhere, worth = asked.splitlines()
    assert f"| 1.02 | {max(against):.3f} | yes |" in anywhere
    assert f"| 0.86 | {against[1]:.3f} | {'yes' if against[1] <= 0.86 else '**no**'} |" in worth
