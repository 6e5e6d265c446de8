"""The tables of benchmarks/experts/replay.py, small."""

from benchmarks.experts import replay
from benchmarks.experts.mixture import recorded_experts, routes_path


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
