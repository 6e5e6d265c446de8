"""Memory of this process's own: each case in a new process, whose heap has no holes yet."""

import subprocess
import sys
import textwrap

import pytest

from penstock.runtime.system.memory import anonymous_bytes

pytestmark = pytest.mark.skipif(not anonymous_bytes(), reason="this system does not say what is anonymous")

_HEAD = """
from penstock.runtime.system.memory import anonymous_bytes, give_back_unused, give_back_when_freed
MIB = 1 << 20
"""


def run(code):
    program = _HEAD + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_that_is_touched_counts_and_goes_again():
    run("""
        before = anonymous_bytes()
        memory = b"a" * (32 * MIB)
        assert anonymous_bytes() - before > 30 * MIB
        del memory
        assert anonymous_bytes() - before < 2 * MIB
    """)


def test_where_the_system_does_not_say_nothing_counts(tmp_path):
    assert anonymous_bytes(tmp_path / "none") == 0
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t   12 kB\n")
    assert anonymous_bytes(tmp_path / "status") == 0


def test_garbage_in_circles_is_collected():
    run("""
        class Held:
            def __init__(self):
                self.memory, self.itself = bytearray(64 * MIB), self

        before = anonymous_bytes()
        Held()
        give_back_unused()
        assert anonymous_bytes() - before < 8 * MIB
    """)


def test_a_large_block_goes_back_though_a_smaller_one_above_it_stays():
    run("""
        del (freed := [bytearray(28 * MIB)])[:]  # after which glibc would take the next ones from the heap
        give_back_when_freed()
        before = anonymous_bytes()
        large, above = bytearray(b"a" * (24 * MIB)), bytearray(b"a" * 4096)
        assert anonymous_bytes() - before > 23 * MIB
        del large
        assert anonymous_bytes() - before < 4 * MIB, anonymous_bytes() - before
    """)
