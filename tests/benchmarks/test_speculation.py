"""The table of benchmarks/experts/speculation.py, small, and what it counts."""

from benchmarks.experts import speculation
from benchmarks.experts.replay import TOP, UNIT


def test_the_table_has_a_row_for_each_preference_and_size():
    head, _, *rows = speculation.render(2, 20, []).splitlines()
    assert head.count("|") == 8
    assert len(rows) == len(speculation.PREFERENCES) * len(speculation.SHARES)
    assert all(row.count("|") == 8 for row in rows)


def test_without_guesses_nothing_is_covered_and_a_full_pool_misses_each_expert_once():
    profile = speculation.made_up(2, 40, 2.0)
    asked = {(ask.read, unit) for call in profile.routes.calls for ask in call for unit in ask.units}
    alone = speculation.outcome(profile, 1 << 30, 0)
    assert (alone.covered, alone.wasted) == (0, 0)
    assert 2 * alone.missed == len(asked)


def test_guesses_are_covered_or_wasted():
    profile = speculation.made_up(3, 40, 4.0)
    some = speculation.outcome(profile, 2 * TOP * 3 * UNIT, speculation.GUESSED)
    assert some.covered + some.wasted == 40 * 2 * speculation.GUESSED  # of every layer but the first
    assert 0 < some.covered <= some.missed
