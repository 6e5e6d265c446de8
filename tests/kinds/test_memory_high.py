"""What control groups leave of memory, in both languages: memory.high, and paths of groups that lead up."""

import os
import subprocess
from dataclasses import dataclass

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
    """A made-up /proc, where control groups are mounted, and what their files hold: `path=text; path=text`.

    In `mounts`, each with its root, its mount point and its kind, and in `files`, paths are relative. What is
    left is that of the group, or of the system.
    """

    own: str | bytes
    files: str | bytes = ""
    left: int = SYSTEM
    group: str = ""
    mounts: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self):
        return f"control group {self.group}" if self.group else "the system"

    def contents(self):
        files = self.files if isinstance(self.files, bytes) else self.files.encode()
        return dict(one.split(b"=", 1) for one in files.split(b"; ") if one)

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
        written |= {groups / os.fsdecode(name): content for name, content in self.contents().items()}
        for path, content in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return proc, groups


V2 = ("/", "", "cgroup2")
HIGH, MAX, STAT = "memory.high", "memory.max", "memory.stat"
OF_V1 = "memory.limit_in_bytes"
MACHINES = {
    "memory.high alone": Machine("0::/a\n", f"a/{MAX}=max\n; a/{HIGH}=1000\n", 1000, "/a"),
    "memory.high below memory.max": Machine(
        "0::/a\n", f"a/{MAX}=9000\n; a/{HIGH}=7000\n; a/{STAT}=anon 500\nfile 90\n", 6500, "/a"
    ),
    "memory.max below memory.high": Machine("0::/a\n", f"a/{MAX}=7000\n; a/{HIGH}=9000\n", 7000, "/a"),
    "memory.high of a group above": Machine("0::/a/b\n", f"a/b/{MAX}=9000\n; a/{HIGH}=5000\n", 5000, "/a"),
    "memory.high of 0": Machine("0::/a\n", f"a/{HIGH}=0\n", 0, "/a"),
    "memory.high that limits nothing": Machine("0::/a\n", f"a/{MAX}=max\n; a/{HIGH}=max\n"),
    "a soft limit of version 1": Machine("4:memory:/a\n", "memory/a/memory.soft_limit_in_bytes=1\n"),
    "files of version 2 in version 1": Machine("4:memory:/a\n", f"memory/a/{HIGH}=1\n"),
    "several controllers": Machine("4:cpu,memory:/a\n", f"memory/a/{OF_V1}=800\n", 800, "/a"),
    "both versions": Machine(
        "4:memory:/a\n0::/b\n",
        *(f"memory/a/{OF_V1}=800\n; two/b/{HIGH}=700\n", 700, "/b"),
        (("/", "memory", "cgroup"), ("/", "two", "cgroup2")),
    ),
    "mounted elsewhere": Machine(
        *("0::/a\n", f"else where/a/{HIGH}=600\n; a/{MAX}=1\n", 600, "/a"),
        (("/", "else\\040where", "cgroup2"),),
    ),
    "the own group is the root of the mount": Machine(
        "0::/docker/a\n", f"{HIGH}=600\n; docker/a/{MAX}=1\n", 600, "/", (("/docker/a", "", "cgroup2"),)
    ),
    "a mount of another group": Machine(
        "0::/docker/a\n", f"{MAX}=1\n", mounts=(("/docker/b", "", "cgroup2"),)
    ),
    "a mount that another covers": Machine(
        "0::/a\n", f"{MAX}=1\n; a/{MAX}=1\n", mounts=(V2, ("/", "", "tmpfs"), ("/", "two", "cgroup2"))
    ),
    "outside of the namespace": Machine("0::/../other\n", f"../other/{MAX}=1\n; other/{MAX}=2\n; {MAX}=3\n"),
    "outside of the namespace, version 1": Machine(
        "4:memory:/../../other\n", f"other/{OF_V1}=1\n; memory/{OF_V1}=2\n"
    ),
    "beside the namespace, seen from above": Machine(
        *("0::/../other/a\n", f"other/a/{HIGH}=500\n; {MAX}=9000\n", 500, "/other/a"),
        (("/..", "", "cgroup2"),),
    ),
    "two levels beside it": Machine(
        "0::/../../x\n", f"x/{MAX}=450\n", 450, "/x", (("/../..", "", "cgroup2"),)
    ),
    "in the namespace, seen from above": Machine(  # the name of the namespace's own group is not known
        "0::/a\n", f"{HIGH}=500\n; a/{MAX}=1\n", 500, "/", (("/..", "", "cgroup2"),)
    ),
    "beside a mount that lies above": Machine(
        "0::/../../x\n", f"x/{MAX}=1\n; {MAX}=2\n", mounts=(("/..", "", "cgroup2"),)
    ),
    "beside a mount that lies beside": Machine("0::/a\n", f"{MAX}=1\n", mounts=(("/../b", "", "cgroup2"),)),
    "dots within": Machine("0::/a/../b\n", f"b/{MAX}=1\n; a/{MAX}=2\n; {MAX}=3\n"),
    "a path without a root": Machine("0::other\n", f"other/{MAX}=1\n; ../groupsother/{MAX}=1\n"),
    "lines that are none": Machine("\n:\nx\n0:\n::\n4:memory\n0::/a\n", f"a/{MAX}=900\n", 900, "/a"),
    "numbers that are none": Machine(
        "0::/a\n", f"a/{MAX}=; a/{HIGH}=-5\n; {MAX}={'9' * 5000}; {HIGH}=12 kB\n"
    ),
    "numbers beyond 64 bits": Machine(
        "0::/a\n",
        f"a/{MAX}=18446744073709551615\n; a/{HIGH}=3000\n; a/{STAT}=anon 9223372036854775807\n"
        "shmem 9223372036854775807\nfile x\nsock\n",
        *(0, "/a"),
    ),
    "a name that is no UTF-8": Machine(
        b"0::/a\xff\x0b b\n", b"a\xff\x0b b/memory.high=400\n", 400, "/a\ufffd\x0b b"
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
    proc, groups = Machine("0::/\n", "memory.max=1\n").write(tmp_path)
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
