"""What control groups leave of memory, in both languages: memory.high, and paths of groups that lead up."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from examples.demo.cgroup import make_group
from penstock.runtime.system.limits import available_bytes, memory_limit
from tests.engines import COMPILER, ROOT

SYSTEM = 4000 << 10
"""What the made-up system has available, in bytes."""

MAIN = """
#include <iostream>
#include "limits.h"
int main(int count, char **words) {
    std::cout << (count > 2 ? penstock::available_bytes(words[1], words[2]) : penstock::available_bytes());
}
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """The function of native/limits.cpp, in a program of its own."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path_factory.mktemp("limits") / "limits"
    program.with_suffix(".cpp").write_text(MAIN)
    sources = [str(program.with_suffix(".cpp")), str(ROOT / "native/limits.cpp")]
    command = [COMPILER, "-std=c++17", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    subprocess.run([*command, f"-I{ROOT / 'native'}", "-o", str(program), *sources], check=True)

    def run(*folders):
        return int(subprocess.run([program, *folders], capture_output=True, text=True, check=True).stdout)

    return run


@dataclass(frozen=True)
class Machine:
    """A made-up /proc, where control groups are mounted, and what their files hold.

    In `mounts`, each with its root, its mount point and its kind, and in `files`, paths are relative.
    """

    own: str | bytes
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    mounts: tuple[tuple[str, str, str], ...] = ()
    left: int = SYSTEM
    name: str = "the system"

    def write(self, folder):
        proc, groups = folder / "proc", folder / "groups"
        table = [
            f"{30 + k} 23 0:{k} {root} {groups / point if point else groups} rw,relatime - {kind} {kind} "
            f"rw,{'memory' if kind == 'cgroup' else 'nsdelegate'}\n"
            for k, (root, point, kind) in enumerate(self.mounts)
        ]
        written = {proc / "meminfo": f"MemTotal: 99 kB\nMemAvailable:    {SYSTEM >> 10} kB\n"}
        written |= {proc / "self/cgroup": self.own, groups / "kept": ""}
        written |= {proc / "self/mountinfo": "".join(table)} if table else {}
        written |= {groups / os.fsdecode(name): content for name, content in self.files.items()}
        for path, content in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return proc, groups


V2 = ("/", "", "cgroup2")
MACHINES = {
    "memory.high alone": Machine(
        "0::/a\n", {"a/memory.max": "max\n", "a/memory.high": "1000\n"}, left=1000, name="control group /a"
    ),
    "memory.high below memory.max": Machine(
        "0::/a\n",
        {"a/memory.max": "9000\n", "a/memory.high": "7000\n", "a/memory.stat": "anon 500\nfile 90\n"},
        left=6500,
        name="control group /a",
    ),
    "memory.max below memory.high": Machine(
        "0::/a\n", {"a/memory.max": "7000\n", "a/memory.high": "9000\n"}, left=7000, name="control group /a"
    ),
    "memory.high of a group above": Machine(
        "0::/a/b\n",
        {"a/b/memory.max": "9000\n", "a/memory.high": "5000\n"},
        left=5000,
        name="control group /a",
    ),
    "memory.high of 0": Machine("0::/a\n", {"a/memory.high": "0\n"}, left=0, name="control group /a"),
    "memory.high that limits nothing": Machine(
        "0::/a\n", {"a/memory.max": "max\n", "a/memory.high": "max\n"}
    ),
    "a soft limit of version 1": Machine("4:memory:/a\n", {"memory/a/memory.soft_limit_in_bytes": "1\n"}),
    "files of version 2 in version 1": Machine("4:memory:/a\n", {"memory/a/memory.high": "1\n"}),
    "several controllers": Machine(
        "4:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": "800\n"}, left=800, name="control group /a"
    ),
    "both versions": Machine(
        "4:memory:/a\n0::/b\n",
        {"memory/a/memory.limit_in_bytes": "800\n", "two/b/memory.high": "700\n"},
        (("/", "memory", "cgroup"), ("/", "two", "cgroup2")),
        left=700,
        name="control group /b",
    ),
    "mounted elsewhere": Machine(
        "0::/a\n",
        {"else where/a/memory.high": "600\n", "a/memory.max": "1\n"},
        (("/", "else\\040where", "cgroup2"),),
        left=600,
        name="control group /a",
    ),
    "the own group is the root of the mount": Machine(
        "0::/docker/a\n",
        {"memory.high": "600\n", "docker/a/memory.max": "1\n"},
        (("/docker/a", "", "cgroup2"),),
        left=600,
        name="control group /",
    ),
    "a mount of another group": Machine(
        "0::/docker/a\n", {"memory.max": "1\n"}, (("/docker/b", "", "cgroup2"),)
    ),
    "a mount that another covers": Machine(
        "0::/a\n",
        {"memory.max": "1\n", "a/memory.max": "1\n"},
        (V2, ("/", "", "tmpfs"), ("/", "two", "cgroup2")),
    ),
    "outside of the namespace": Machine(
        "0::/../other\n", {"../other/memory.max": "1\n", "other/memory.max": "2\n", "memory.max": "3\n"}
    ),
    "outside of the namespace, version 1": Machine(
        "4:memory:/../../other\n",
        {"other/memory.limit_in_bytes": "1\n", "memory/memory.limit_in_bytes": "2\n"},
    ),
    "beside the namespace, seen from above": Machine(
        "0::/../other/a\n",
        {"other/a/memory.high": "500\n", "memory.max": "9000\n"},
        (("/..", "", "cgroup2"),),
        left=500,
        name="control group /other/a",
    ),
    "two levels beside it": Machine(
        "0::/../../x\n",
        {"x/memory.max": "450\n"},
        (("/../..", "", "cgroup2"),),
        left=450,
        name="control group /x",
    ),
    "in the namespace, seen from above": Machine(  # the name of the namespace's own group is not known
        "0::/a\n",
        {"memory.high": "500\n", "a/memory.max": "1\n"},
        (("/..", "", "cgroup2"),),
        left=500,
        name="control group /",
    ),
    "beside a mount that lies above": Machine(
        "0::/../../x\n", {"x/memory.max": "1\n", "memory.max": "2\n"}, (("/..", "", "cgroup2"),)
    ),
    "beside a mount that lies beside": Machine("0::/a\n", {"memory.max": "1\n"}, (("/../b", "", "cgroup2"),)),
    "dots within": Machine(
        "0::/a/../b\n", {"b/memory.max": "1\n", "a/memory.max": "2\n", "memory.max": "3\n"}
    ),
    "a path without a root": Machine(
        "0::other\n", {"other/memory.max": "1\n", "../groupsother/memory.max": "1\n"}
    ),
    "lines that are none": Machine(
        "\n:\nx\n0:\n::\n4:memory\n0::/a\n", {"a/memory.max": "900\n"}, left=900, name="control group /a"
    ),
    "numbers that are none": Machine(
        "0::/a\n",
        {"a/memory.max": "", "a/memory.high": "-5\n", "memory.max": "9" * 5000, "memory.high": "12 kB\n"},
    ),
    "numbers beyond 64 bits": Machine(
        "0::/a\n",
        {
            "a/memory.max": "18446744073709551615\n",
            "a/memory.high": "3000\n",
            "a/memory.stat": "anon 9223372036854775807\nshmem 9223372036854775807\nfile x\nsock\n",
        },
        left=0,
        name="control group /a",
    ),
    "a name that is no UTF-8": Machine(
        b"0::/a\xff\x0b b\n",
        {b"a\xff\x0b b/memory.high": "400\n"},
        left=400,
        name="control group /a\ufffd\x0b b",
    ),
    "no files": Machine("0::/gone/away\n"),
    "nothing at all": Machine("", mounts=(V2,)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_groups_leave(name, tmp_path):
    machine = MACHINES[name]
    found = memory_limit(*machine.write(tmp_path))
    assert found is not None
    assert (found.left, found.name) == (machine.left, machine.name)


@pytest.mark.parametrize("name", MACHINES)
def test_what_groups_leave_in_cpp(name, tmp_path, native):
    assert native(*MACHINES[name].write(tmp_path)) == MACHINES[name].left


@pytest.mark.parametrize("line", ["MemAvailable: 12 MB", "MemAvailable: x kB", "MemAvailable:", ""])
def test_a_system_that_does_not_say(line, tmp_path, native):
    proc, groups = Machine("0::/\n", {"memory.max": "1\n"}).write(tmp_path)
    (proc / "meminfo").write_text(line + "\n")
    assert memory_limit(proc, groups) is None
    assert native(proc, groups) == (1 << 63) - 1


def test_a_group_of_this_machine(native):
    """Joined by a child, which the kernel's own files then describe; memory.high where it has that."""
    limit = 512 << 20
    with make_group(limit) as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        if group.version == 2:
            (group.folder / "memory.high").write_text(str(limit >> 1))
        limit >>= group.version - 1
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                (group.folder / "cgroup.procs").write_text(str(os.getpid()))
                os.write(writing, f"{available_bytes()} {native()}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as told:
            python, cpp = map(int, told.read().split())
        assert limit - (64 << 20) < min(python, cpp) <= max(python, cpp) <= limit
