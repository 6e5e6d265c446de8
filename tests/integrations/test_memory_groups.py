"""Capped models in a memory cgroup of their libraries, the cap and 64 MiB, as benchmarks/calls/capped.py."""

import pytest

from benchmarks.calls import capped
from examples.demo.cgroup import make_group
from tests.hunt import sampled

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*`:FutureWarning"),
]

CASES = [
    *[("t5", "apply"), ("lora", "load"), ("llama", "load"), ("pipeline", "load"), ("lora", "apply")],
    ("experts", "load"),
]
"""So that the sample has both ways and both libraries."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Bytes that a process holds which imports the libraries and does nothing."""
    with make_group(1 << 20) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    return int(capped.run_apart("", "bare", tmp_path_factory.mktemp("bare")))


@pytest.mark.random
@pytest.mark.parametrize(("kind", "way"), sampled(CASES, 3))
def test_nothing_is_killed_and_the_outputs_are_those_of_the_model_in_memory(bare, tmp_path, kind, way):
    expected = capped.outputs_of(kind, capped.MAKERS[kind](tmp_path))
    lived = capped.run_capped(kind, way, tmp_path, bare)
    assert lived is not None
    assert lived.outputs == expected
    assert lived.peak_bytes <= bare + capped.CAP + capped.SLACK


def test_a_process_that_takes_more_is_killed(bare, tmp_path):
    capped.make_llama(tmp_path)
    with pytest.raises(capped.StreamError, match="the process ended with -9: killed by the kernel"):
        capped.run_capped("llama", "load", tmp_path, bare - capped.CAP - capped.SLACK - (100 << 20))
