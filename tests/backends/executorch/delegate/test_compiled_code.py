"""The library that runs compiled code, by its functions for C: what the delegate never asks it to do."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from penstock.backends.executorch import read
from tests.backends.executorch.delegate.pte_models import DEEP, WIDE

pytestmark = pytest.mark.timeout(300)

CODE = """
import ctypes as c, sys

class Tensor(c.Structure):  # pa_tensor
    sizes = c.POINTER(c.c_int64)
    _fields_ = [("name", c.c_char_p), ("address", c.c_void_p), ("sizes", sizes), ("strides", sizes),
                ("dims", c.c_int32), ("dtype", c.c_int32)]

PROBE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int32)
TENSORS, ERROR = c.POINTER(Tensor), (c.c_char_p, c.c_size_t)

FUNCTIONS = [
    ("load", c.c_int, (c.c_char_p, c.c_size_t, c.c_char_p, c.c_char_p, c.c_char_p, c.c_void_p, *ERROR)),
    ("bind", c.c_int, (c.c_void_p, TENSORS, c.c_size_t, *ERROR)),
    ("run", c.c_int, (c.c_void_p, TENSORS, c.c_size_t, PROBE, c.c_void_p, *ERROR)),
    ("sizes", c.c_void_p, (c.c_void_p, c.c_size_t, c.c_void_p)),
    ("copy", c.c_int, (c.c_void_p, c.c_size_t, TENSORS, *ERROR)),
    ("drop", None, (c.c_void_p,)),
    ("close", None, (c.c_void_p,)),
]

class Library(c.Structure):  # pa_library
    _fields_ = [("version", c.c_int32)]
    _fields_ += [(name, c.CFUNCTYPE(result, *given)) for name, result, given in FUNCTIONS]

def tensor(address, *shape, name=None):
    strides = [1] * len(shape)
    for k in reversed(range(len(shape) - 1)):
        strides[k] = strides[k + 1] * shape[k + 1]
    numbers = c.c_int64 * len(shape)
    return Tensor(name, address, numbers(*shape), numbers(*strides), len(shape), 6)  # float32

def said(call, *arguments):
    text = c.create_string_buffer(4096)
    print("ok" if call(*arguments, text, len(text)) == 0 else text.value.decode())

entry = c.CDLL(sys.argv[1]).penstock_aoti
entry.restype = c.POINTER(Library)
library, package, WIDTH, LAYERS = entry().contents, open(sys.argv[2], "rb").read(), *map(int, sys.argv[4:])
code, probe = c.c_void_p(), PROBE(lambda context, call: 0)
said(library.load, package, len(package), b"forward", sys.argv[3].encode(), b"", c.byref(code))
if code:
    weights = [tensor(None, *shape, name=b"layers.%d.%s" % (k, name))
               for k in range(LAYERS) for name, shape in ((b"weight", (WIDTH, WIDTH)), (b"bias", (WIDTH,)))]
    for given in (weights[1:], weights):
        said(library.bind, code, (Tensor * len(given))(*given), len(given))
    said(library.run, code, tensor(None, 3, WIDTH), 1, probe, None)
    room, dims = (c.c_float * (3 * WIDTH + 16))(), c.c_int32()
    address = c.addressof(room)
    said(library.run, code, tensor(address, 3, WIDTH), 1, probe, None)
    said(library.copy, code, 0, tensor(None, 3, WIDTH))
    said(library.copy, code, 0, tensor(address, 2, WIDTH))
    said(library.copy, code, 0, tensor(address, 3, WIDTH))
    print(library.sizes(code, 1, c.byref(dims)), bool(library.sizes(code, 0, c.byref(dims))))
    library.drop(code)
    print(library.sizes(code, 0, c.byref(dims)))
    library.close(code)
"""


def lines(built, files, folder, version=torch.__version__, **variables):
    """What the code above says of the package of some files, in a process without penstock and torch."""
    exported = read(files.pte)
    package = folder / "package"
    package.write_bytes(exported.programs[exported.regions[0].program])
    release = version.partition("+")[0]
    arguments = [built / "libpenstock_aoti.so", package, release, str(WIDE), str(DEEP)]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.nightly
def test_tensors_without_memory_and_results_that_are_dropped(built, compiled, tmp_path):
    nowhere = "an input or a result has no memory: set the program's inputs and outputs before it runs"
    missing = "the compiled code reads a weight layers.0.weight that it is not given: export it again"
    other = "the compiled code gives other results than the program has: export it again"
    found = lines(built, compiled("wide"), tmp_path)
    assert found == ["ok", missing, "ok", nowhere, "ok", nowhere, other, "ok", "None True", "None"]


def test_code_of_another_torch(built, compiled, tmp_path):
    (said,) = lines(built, compiled("quantised rows"), tmp_path, "2.9.1")
    assert said.startswith("the program was compiled by torch 2.9.1, and this is torch ")


def test_another_torch_than_the_library_was_built_for(built, compiled, tmp_path):
    """As where torch was replaced under an application: another library answers for its version."""
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "unsigned long aoti_torch_abi_version(void) { return 2ul << 56 | 9ul << 48 | 1ul << 40; }"
    )
    compiler = shutil.which("gcc") or shutil.which("g++")
    assert compiler
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", other], check=True)
    (said,) = lines(built, compiled("quantised rows"), tmp_path, LD_PRELOAD=str(other))
    assert "what runs compiled code was built for torch " in said
    assert said.endswith(", and torch 2.9.1 is loaded: build it for that")
