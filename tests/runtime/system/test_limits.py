from pathlib import Path

import pytest

from penstock.runtime.system.limits import Limit, address_limit, available_bytes, memory_limit


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    4000 kB\n")
    return tmp_path / "proc"


def write_limit(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_groups_it_is_what_the_system_has(proc, tmp_path):
    assert memory_limit(proc, tmp_path / "none") == Limit(4000 << 10, "the system")


@pytest.mark.parametrize(
    ("membership", "file", "text", "expected"),
    [
        ("4:memory:/a/b", "memory/a/b/memory.limit_in_bytes", "1024000\n", 1024000),
        ("4:memory:/a/b", "memory/a/memory.limit_in_bytes", "2048\n", 2048),
        ("4:memory:/a/b", "memory/a/b/memory.limit_in_bytes", "9223372036854771712\n", 4000 << 10),
        ("0::/a/b", "a/b/memory.max", "512000\n", 512000),
        ("0::/a/b", "a/b/memory.max", "max\n", 4000 << 10),
        ("3:cpuset:/a", "memory/a/memory.limit_in_bytes", "1\n", 4000 << 10),
    ],
)
def test_a_group_or_one_above_it_limits(proc, tmp_path, *, membership, file, text, expected):
    (proc / "self/cgroup").write_text(membership + "\n")
    write_limit(tmp_path / "groups" / file, text)
    found = memory_limit(proc, tmp_path / "groups")
    assert found is not None
    assert found.left == expected
    named = (
        "the system"
        if expected == 4000 << 10
        else f"control group /{Path(file).parent}".replace("/memory/", "/")
    )
    assert found.name == named


@pytest.mark.parametrize(
    ("membership", "folder", "name", "stat"),
    [
        (
            "4:memory:/a",
            "memory/a",
            "memory.limit_in_bytes",
            "cache 900\nrss 9\ntotal_rss 2900\ntotal_shmem 100\ntotal_cache 900\n",
        ),
        (
            "0::/a",
            "a",
            "memory.max",
            "anon 2000\nshmem 600\npagetables 400\nfile 900\ninactive_file 900\nslab_reclaimable 9\n",
        ),
    ],
)
def test_what_a_group_cannot_give_back_is_not_available(proc, tmp_path, *, membership, folder, name, stat):
    (proc / "self/cgroup").write_text(membership + "\n")
    write_limit(tmp_path / "groups" / folder / name, "10000\n")
    write_limit(tmp_path / "groups" / folder / "memory.stat", stat)
    found = memory_limit(proc, tmp_path / "groups")
    assert found is not None
    assert found.left == 7000


def test_a_system_that_does_not_say(tmp_path):
    assert memory_limit(tmp_path) is None
    assert address_limit(tmp_path) is None


def test_here_it_is_some_memory():
    found = available_bytes()
    assert found is None or found > 1 << 20
