"""What the demo asks of the machine: raw reads, room on a disk, a memory cgroup."""

import signal
import subprocess
import sys

import pytest

from examples.demo import cgroup
from penstock.runtime.system.limits import own_groups
from tests.examples.demo.screens import MIB


def test_a_group_kills_what_takes_too_much_and_leaves_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from examples.demo.cgroup import join_group;"
        "join_group(Path(sys.argv[1])); print('in', flush=True); bytearray(1 << 28)"
    )
    with cgroup.make_group(64 * MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        done = subprocess.run(
            [sys.executable, "-c", code, str(group.folder)], capture_output=True, check=False
        )
        assert done.stdout == b"in\n"
        assert done.returncode == -signal.SIGKILL
        assert group.kills == 1
        assert 32 * MIB < group.peak_bytes <= 64 * MIB
    assert not group.folder.exists()


def test_no_group_is_made_where_there_are_no_cgroups(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/some\n0::/other\n")
    for folder in ("mount/memory/some", "mount/other"):
        (tmp_path / folder).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    own = own_groups(tmp_path, tmp_path / "mount")
    assert len(own) == 2
    with cgroup.make_group(MIB, own=own) as group:
        assert group is None
    assert sorted(tmp_path.rglob("*")) == before
    with cgroup.make_group(MIB, own=[]) as group:
        assert group is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4:memory:/a/b\n0::/\n", [("memory/a/b", 1), ("", 2)]),
        ("4:cpu,memory:/elsewhere\n", [("memory", 1)]),
        ("0::/a/b\n", [("a/b", 2), ("a", 2)]),
        ("0::/\n", [("", 2)]),
        ("3:cpu:/a\n", []),
    ],
)
def test_where_a_group_can_be_made(tmp_path, text, expected):
    for folder in ("self", "memory/a/b", "a/b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "self/cgroup").write_text(text)
    found = cgroup.list_parents(own_groups(tmp_path, tmp_path))
    assert found == [(tmp_path / folder, version) for folder, version in expected]
