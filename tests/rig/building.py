"""Builds the rig with g++ and torch's headers, once for each state of its sources and each torch.

`make test` runs this file. What is built lies in build/rig, under a name that tells the state.
"""

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BUILT = HERE.parent.parent / "build" / "rig"
SOURCES = ("rig.cpp", "kernels.h", "locked.h", "memory.h", "streams.h")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


def build():
    """Returns the library, which is compiled unless it was before: in half a minute. Raises what g++ says."""
    state = hashlib.sha256(repr((torch.__version__, FLAGS)).encode())
    for name in SOURCES:
        state.update((HERE / name).read_bytes())
    library = BUILT / f"rig-{state.hexdigest()[:16]}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run build it once
        if not library.exists():
            _compile(library)
    return library


def _compile(library):
    print(f"Compiling the rig, a device for tests, for torch {torch.__version__}: half a minute.", flush=True)
    home = Path(torch.__file__).parent
    partial = library.with_suffix(f".{os.getpid()}")
    linked = (f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl")
    command = ("g++", *FLAGS, "-isystem", home / "include", HERE / "rig.cpp", "-o", partial, *linked)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError("the rig needs g++: scripts/install-compiler installs it") from error
    if done.returncode:
        raise RuntimeError(f"the rig does not compile:\n{done.stderr}")
    partial.replace(library)


if __name__ == "__main__":
    build()
