"""A weight file that shrinks while a kernel reads its mapping: an error, and not the end of the process."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.engines import ENGINES
from tests.forked import run_forked

SCRIPT = """
import os, sys, torch, penstock
from penstock.runtime.stream import native, streamer

engine, path, guarded = sys.argv[1], sys.argv[2], sys.argv[3] == "guarded"
if not guarded:
    from penstock.runtime.arena import mapping
    mapping.library = lambda: None
torch.set_num_threads(1)
kind = native.NativeStreamer if engine == "native" else streamer.ArenaStreamer
acquire, calls = kind.acquire, []

def shrinks(self, graph, step):
    acquire(self, graph, step)
    calls.append(step)
    if len(calls) == 3:  # what it has waited for is read now
        os.truncate(path, 8192)

tokens = torch.zeros(3, 7, dtype=torch.int64)
options = penstock.LoadOptions(arena="mapped", engine=engine)
with penstock.open(os.path.dirname(path)).load("70%", options=options) as module:
    expected = module(tokens)
    whole, before = open(path, "rb").read(), os.stat(path)
    calls.clear()
    kind.acquire = shrinks
    for words in ("truncated while in use", "truncated"):
        try:
            module(tokens)
            print("no error")
        except penstock.SourceError as error:
            print(words in str(error))
    open(path, "r+b").write(whole)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:  # the mapping has zeros where the file had none
        module(tokens)
        print("no error")
    except penstock.SourceError as error:
        print("was read meanwhile: open the artifact again" in str(error))
options = penstock.LoadOptions(arena="mapped", engine=engine)
with penstock.open(os.path.dirname(path)).load("70%", options=options) as module:
    print(torch.equal(module(tokens), expected))
"""


@pytest.fixture
def weights(stack, tmp_path):
    return Path(shutil.copytree(stack.path, tmp_path / "copy.penstock")) / "weights.safetensors"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_behind_the_new_end_is_an_error(weights, engine, native):
    done = run_forked(SCRIPT, engine, str(weights), "guarded")
    assert (done.status, done.out.split()) == (0, ["True"] * 4), done.err


def test_it_would_end_the_process(weights):
    """Without the native library there is nothing that could take the signal, as docs/security.md says."""
    assert run_forked(SCRIPT, "python", str(weights), "bare").status == -signal.SIGBUS


HANDLERS = """
import ctypes, mmap, os, signal, sys, faulthandler
from penstock.native.library import library

native = library()
with open("file", "wb+") as file:
    file.write(bytes(3 * mmap.PAGESIZE))
    file.flush()
    held = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) for _ in range(2)]
    address = ctypes.CDLL(None).mmap
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
    first = address(None, 3 * mmap.PAGESIZE, 1, 2, file.fileno(), 0)
    other = address(None, 3 * mmap.PAGESIZE, 1, 2, file.fileno(), 0)
    guard = native.ps_guard(first, 3 * mmap.PAGESIZE)
    if sys.argv[1] == "again":
        faulthandler.enable()  # takes the signal
        second = native.ps_guard(other, mmap.PAGESIZE)
        print(native.ps_guard_hit(second))
    os.ftruncate(file.fileno(), mmap.PAGESIZE)
    print(native.ps_guard_hit(guard), ctypes.c_char.from_address(first).value, native.ps_guard_hit(guard))
    print(ctypes.c_char.from_address(first + 2 * mmap.PAGESIZE).value, native.ps_guard_hit(guard), flush=True)
    native.ps_unguard(guard)
    ctypes.c_char.from_address(other + 2 * mmap.PAGESIZE).value
    print("no fault")
"""


@pytest.mark.parametrize("how", ["first", "again"])
def test_other_faults_are_what_they_were(native, tmp_path, how, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_forked(HANDLERS, how)
    assert done.status == -signal.SIGBUS
    lines = done.out.splitlines()
    assert lines[-2:] == ["0 b'\\x00' 0", "b'\\x00' 1"]
    assert ("Bus error" in done.err) is (how == "again")  # by faulthandler, which had the signal before
