"""The table of benchmarks/replay.py, small."""

from __future__ import annotations

from benchmarks import replay


def test_penstock_beats_lru_and_nothing_beats_the_bound() -> None:
    head, _, *rows = replay.render([2], tokens=20).splitlines()
    assert head.count("|") == 9
    assert len(rows) == len(replay.DRIFTS) * len(replay.SHARES)
    for row in rows:
        *_, lru, lfu, own, most, against = (float(cell) for cell in row.strip("|").split("|"))
        assert max(lru, lfu, own) <= most
        assert against <= 1.02
