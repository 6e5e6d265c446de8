import pytest

from penstock.passes.pipeline import Pipeline
from penstock.schedule.facts.errors import PassError, StreamError


def double(numbers):
    return [2 * n for n in numbers]


def drop_first(numbers):
    return numbers[1:]


def forget(numbers):
    """Changes its input and returns nothing."""


def test_passes_run_from_left_to_right():
    assert Pipeline((drop_first, double))([1, 2, 3]) == [4, 6]


def test_a_pipeline_is_a_pass():
    assert Pipeline((Pipeline((double, double)), drop_first))([1, 2]) == [8]


def test_no_passes_return_the_program():
    program = object()
    assert Pipeline(())(program) is program


def test_an_error_names_the_pass_and_its_position():
    def explode(numbers):
        raise ValueError("no")

    with pytest.raises(PassError, match=r"pass 2 of 3 \(.*explode\) failed: ValueError: no") as caught:
        Pipeline((double, explode, double))([1])
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_the_tree_keeps_its_class_and_gains_the_position():
    def refuse(numbers):
        raise StreamError("not like this")

    with pytest.raises(StreamError, match="not like this") as caught:
        Pipeline((refuse,))([1])
    assert caught.value.__notes__ == [f"in pass 1 of 1 ({refuse.__qualname__})"]


@pytest.mark.parametrize(("bad", "got"), [(forget, "None"), (tuple, "tuple"), (sum, "int")])
def test_a_pass_must_return_a_program(bad, got):
    with pytest.raises(PassError, match=f"pass 1 of 1 .* returned {got} instead of list"):
        Pipeline((bad,))([1])
