"""A pipeline orders its passes by what they declare, runs them, and says which one failed."""

import sys
from functools import partial

import pytest

from penstock.passes.pipeline import Pipeline, declare
from penstock.schedule.facts.errors import PassError, StreamError


def double(numbers):
    return [2 * n for n in numbers]


def drop_first(numbers):
    return numbers[1:]


def forget(numbers):
    """Changes its input and returns nothing."""


def test_passes_run_from_left_to_right():
    assert Pipeline((drop_first, double))([1, 2, 3]) == [4, 6]


def test_no_passes_return_the_program():
    program = object()
    assert Pipeline(())(program) is program


@pytest.mark.parametrize("kind", [ValueError, MemoryError, StreamError])
def test_an_error_keeps_its_class_and_cause_and_gains_the_pass_and_its_position(kind):
    cause = OSError("why")

    def explode(numbers):
        raise kind("not like this") from cause

    with pytest.raises(kind, match="not like this") as caught:
        Pipeline((double, explode, double))([1])
    assert type(caught.value) is kind
    assert caught.value.__cause__ is cause
    assert caught.value.__notes__ == [f"in pass 2 of 3 ({explode.__qualname__})"]


@pytest.mark.parametrize(("bad", "got"), [(forget, "None"), (tuple, "tuple"), (sum, "int")])
def test_a_pass_must_return_a_program(bad, got):
    with pytest.raises(PassError, match=f"pass 1 of 1 .* returned {got} instead of list"):
        Pipeline((bad,))([1])


def step(name, requires=(), ensures=()):
    """A pass that appends its name to a list of names."""

    def run(names):
        return [*names, name]

    run.__qualname__ = name
    return declare(requires=requires, ensures=ensures)(run) if requires or ensures else run


LOAD, CLEAN = step("load", ensures=("data",)), step("clean", requires=("data",), ensures=("clean data",))
FIT = step("fit", requires=("clean data",))
PLAIN, OTHER = step("plain"), step("other")


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ((FIT, CLEAN, LOAD), ["load", "clean", "fit"]),
        ((CLEAN, FIT, LOAD), ["load", "clean", "fit"]),
        ((LOAD, OTHER, CLEAN, PLAIN, FIT), ["load", "other", "clean", "plain", "fit"]),
        ((OTHER, PLAIN, OTHER), ["other", "plain", "other"]),
        ((PLAIN, CLEAN, LOAD, OTHER), ["plain", "load", "clean", "other"]),
        ((step("b", ensures=("b",)), step("a", ensures=("a",)), CLEAN, LOAD), ["b", "a", "load", "clean"]),
        ((FIT, Pipeline((CLEAN, LOAD))), ["load", "clean", "fit"]),
    ],
)
def test_a_pass_runs_behind_those_that_ensure_what_it_requires(passes, expected):
    assert Pipeline(passes)([]) == expected


def test_a_pass_with_some_arguments_given_declares_what_it_did_without():
    @declare(requires=("data",))
    def add(names, name):
        return [*names, name]

    pipeline = Pipeline((partial(add, name="more"), LOAD))
    assert pipeline([]) == ["load", "more"]
    with pytest.raises(TypeError) as caught:
        Pipeline((LOAD, partial(add, other="more")))([])
    assert caught.value.__notes__ == [f"in pass 2 of 2 ({add.__qualname__})"]


def test_a_pass_with_some_arguments_given_can_declare_by_itself():
    def add(names, name):
        return [*names, name]

    more = declare(requires=("data",))(partial(add, name="more"))
    assert Pipeline((more, LOAD))([]) == ["load", "more"]
    assert Pipeline((partial(add, name="less"), LOAD))([]) == ["less", "load"]


def test_what_holds_from_the_start_is_required_of_nobody():
    nested = Pipeline((FIT, CLEAN), requires=("data",))
    assert nested([]) == ["clean", "fit"]
    assert nested.ensures == ("clean data",)
    assert Pipeline((nested, LOAD))([]) == ["load", "clean", "fit"]


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((LOAD, FIT), r"pass fit requires 'clean data', which no pass of the pipeline ensures: add one"),
        ((LOAD, CLEAN, LOAD), r"passes load and load both ensure 'data': leave one out"),
        (
            (step("hen", ("egg",), ("hen",)), step("egg", ("hen",), ("egg",))),
            r"the passes (hen, egg|egg, hen) wait for each other",
        ),
        ((step("self", ("self",), ("self",)),), r"the passes self wait for each other"),
        (
            (CLEAN, PLAIN, LOAD),
            r"the passes .*plain.* wait for each other.*or move a pass that declares nothing",
        ),
    ],
)
def test_passes_that_cannot_be_ordered_are_refused_when_the_pipeline_is_made(passes, message):
    with pytest.raises(PassError, match=message):
        Pipeline(passes)


def test_passes_in_order_need_no_graph_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    assert Pipeline((LOAD, CLEAN, FIT))([]) == ["load", "clean", "fit"]


def test_facts_that_are_no_tuple_are_refused():
    with pytest.raises(PassError, match=r"facts are a tuple of names, got 'probes': give \('probes',\)"):
        declare(requires="probes")  # type: ignore[arg-type]
