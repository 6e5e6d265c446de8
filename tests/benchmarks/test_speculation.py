"""The table of benchmarks/experts/speculation.py, small, and what it counts."""

from benchmarks.experts import speculation


def test_the_table_has_a_row_for_each_preference_and_size():
    head, _, *rows = speculation.render(2, 20, []).splitlines()
    assert head.count("|") == 8
    assert len(rows) == len(speculation.PREFERENCES) * len(speculation.SHARES)
    assert all(row.count("|") == 8 for row in rows)
