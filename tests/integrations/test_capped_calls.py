"""A process with a capped model that is called with prompts of many lengths, in a memory cgroup."""

import pytest

from benchmarks.calls import capped_calls
from examples.demo.cgroup import make_group

CAP = 64_000_000
SMALL = {"layers": 8, "hidden": 512, "vocabulary": 16000}
"""Of 78 MB."""


def test_kernels_that_torch_keeps_for_each_length_stay_within_the_cap(tmp_path):
    with make_group(1 << 20) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    capped_calls.make_llama(tmp_path, **SMALL)
    calls = (capped_calls.MANY_LENGTHS,)
    free = capped_calls.run_apart(tmp_path, calls)
    lived = capped_calls.run_capped(tmp_path, calls, bare=free.bare, cap=CAP)
    assert lived.tokens == free.tokens
    assert lived.peak <= free.bare + CAP + capped_calls.SLACK
