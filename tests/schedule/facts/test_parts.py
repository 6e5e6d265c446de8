"""Parts of weights: names, and reads that take them together."""

from dataclasses import replace

from penstock.schedule.facts.model import Part, SparseRead, Step, Trace, Weight
from penstock.schedule.facts.parts import join_parts, plain_weights, read_together, storages_together


def part(name, storage):
    return Part(name, "int8", (4,), (1,), storage, 0)


def weight(fqn, *parts):
    return Weight(fqn, "parameter", "cpu", parts)


PACKED = weight("a", part("data", 0), part("scale", 1), part("zero", 2))
PLAIN = weight("b", part("", 3))


def trace(*reads):
    steps = tuple(Step(f"s{k}", read, 0, 1) for k, read in enumerate(reads))
    return Trace("forward", 0, "", steps, 0, 0, "modelled")


def reads(weights, *given):
    return [step.reads for step in read_together(trace(*given), weights).steps]


def test_each_part_is_a_weight_with_a_name_of_its_own_and_back():
    flat = plain_weights([PACKED, PLAIN])
    assert [(w.fqn, w.parts[0].name, w.parts[0].storage) for w in flat] == [
        ("a.data", "", 0),
        ("a.scale", "", 1),
        ("a.zero", "", 2),
        ("b", "", 3),
    ]
    names = {f"a.{name}": ("a", name) for name in ("data", "scale", "zero")}
    assert join_parts(flat, names) == (PACKED, PLAIN)


def test_a_step_reads_all_parts_that_any_step_reads():
    assert reads([PACKED, PLAIN], (0,), (1, 3), (3,)) == [(0, 1), (0, 1, 3), (3,)]


def test_what_is_read_by_units_is_not_brought_whole_with_another_part():
    """Of a quantised table, each of whose parts is looked up in a step of its own, and one more part."""
    given = trace((0,), (1,), (1, 3), (2,))
    rows = [SparseRead(part("", s), "aten.embedding.default", 0, 2) for s in (0, 1)]
    first, second, *others = given.steps
    by_units = (replace(first, sparse=(rows[0],)), replace(second, sparse=(rows[1],)), *others)
    found = read_together(replace(given, steps=by_units), [PACKED, PLAIN])
    assert [step.reads for step in found.steps] == [(0,), (1,), (1, 3), (2,)]
    assert reads([PACKED, PLAIN], (0,), (1,), (1, 3), (2,)) == [(0, 1, 2), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2)]


def test_plain_weights_that_share_a_storage_are_left_alone():
    assert reads([PLAIN, weight("c", part("", 0))], (3,), (0,)) == [(3,), (0,)]
    assert storages_together([PLAIN]) == {}


def test_what_only_some_weights_share_is_on_its_own():
    one = weight("one", part("data", 0), part("scale", 1), part("table", 4))
    other = weight("other", part("data", 2), part("scale", 3), part("table", 4))
    assert storages_together([one, other]) == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3), 4: (4,)}
    assert reads([one, other], (0,), (1, 4), (2, 4), (3,)) == [(0, 1), (0, 1, 4), (2, 3, 4), (2, 3)]


def test_tied_weights_share_their_parts():
    tied = weight("tied", part("data", 0), part("scale", 1))
    again = weight("again", part("data", 0), part("scale", 1))
    assert storages_together([tied, again]) == {0: (0, 1), 1: (0, 1)}
