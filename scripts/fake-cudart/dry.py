"""Runs the tests of CUDA devices without a GPU: on torch's CUDA build and a counterfeit of libcudart.

    make cuda-dry                                      # with the CUDA build that pip finds
    make cuda-dry WHEEL=torch-2.13.0-cp311-...whl      # or with one that lies here
    .venv/bin/python scripts/fake-cudart/dry.py --wheel torch-2.11.0-cp311-...whl --tests tests/rig

The last runs other tests on that torch, which finds no GPU then. What is needed lies in build/cuda-dry, by
version, and nothing else uses it. docs/devices.md says what this shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILT = ROOT / "build" / "cuda-dry"
RESULT = ROOT / "benchmarks" / "results" / "cuda-dry.json"

ORDERS = ("soon:0", "late:0", "random:1")
DEVICE_TESTS = ("tests/runtime/device/test_device.py", "tests/runtime/device/test_cuda.py", "-k", "cuda")
OWN_TESTS = (str(HERE.relative_to(ROOT) / "test_counterfeit.py"),)
EXCLUDED = {
    "test_without_a_gpu_cuda_is_refused_by_name": "it is for a torch that finds no GPU, and skips itself"
}
"""Tests of CUDA that do not run here, and why. None needs a kernel that computes."""

_CUDAS = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", help="torch's CUDA build as a file, for pip")
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, help="run these alone, by pytest's arguments, and find no GPU"
    )
    given = parser.parse_args()
    named = re.match(r"torch-([\d.]+)", Path(given.wheel).name) if given.wheel else None
    dry = Dry(BUILT / (named[1] if named else version("torch").partition("+")[0]))
    dry.install(given.wheel)
    dry.build()
    if given.tests:
        sys.exit(dry.test(given.tests, {"FAKE_CUDART_DEVICES": "0"}))
    runs = {order: dry.run(order, DEVICE_TESTS) for order in ORDERS}
    runs["the counterfeit itself"] = dry.run(ORDERS[0], OWN_TESTS)
    torch, cuda = dry.told_by_torch("__version__"), dry.told_by_torch("cuda")
    results = {torch: {"cuda": cuda, "excluded": EXCLUDED, "runs": runs}}
    results = (json.loads(RESULT.read_text()) if RESULT.exists() else {}) | results
    RESULT.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    for name, found in runs.items():
        others, said = len(found["others"]), len(found["said"])
        print(f"{name}: {found['passed']} passed, {others} did not, {said} complaints of the library")
    if not all(found["passed"] and not found["others"] and not found["said"] for found in runs.values()):
        sys.exit(f"{RESULT.relative_to(ROOT)} says which")


@dataclass(frozen=True)
class Dry:
    """What one version of torch is run with, in a folder of its own: `home`."""

    home: Path

    @property
    def torch(self) -> Path:
        return self.home / "torch"

    @property
    def headers(self) -> Path:
        return self.home / "headers"

    @property
    def libraries(self) -> Path:
        return self.home / "lib"

    def install(self, wheel: str | None) -> None:
        """Lay torch's CUDA build, and the headers of its CUDA, where nothing else finds them."""
        wanted = wheel or f"torch=={self.home.name}"
        if not self.torch.exists():
            _pip(self.torch, wanted)
        cuda = self.told_by_torch("cuda")
        if cuda == "None":
            shutil.rmtree(self.torch)
            sys.exit(
                f"what pip found for {wanted} is no CUDA build of torch: give the file of one, with WHEEL="
            )
        if not self.headers.exists():
            _pip(self.headers, f"nvidia-cuda-runtime=={cuda}.*", f"nvidia-cuda-crt=={cuda}.*")

    def told_by_torch(self, name: str) -> str:
        """A value of torch's version.py, which nobody has to import for it."""
        text = (self.torch / "torch" / "version.py").read_text()
        found = re.search(rf"^{name}\b.*= (\S+)$", text, re.MULTILINE)
        return found[1].strip("'") if found else "None"

    def build(self) -> None:
        """Compile one library under the names of all of CUDA's that torch's libraries load.

        It has what cudart.cpp defines. Any other function that they want says so when called, and fails.
        """
        (include,) = self.headers.glob("nvidia/*/include")
        self.libraries.mkdir(parents=True, exist_ok=True)
        compiled, stubs, exported = (self.home / name for name in ("cudart.o", "stubs.cpp", "exported.map"))
        shared = f"-I{ROOT / 'tests' / 'rig'}"
        _run("g++", *_FLAGS, "-isystem", include, shared, "-c", HERE / "cudart.cpp", "-o", compiled)
        defined = set(_run("nm", "-g", "--defined-only", "--format=just-symbols", compiled).split())
        names, wanted = _wanted(self.torch)
        stubs.write_text("".join(_stubs(set(wanted) - defined)))
        exported.write_text("".join(_exported(wanted)))
        library = self.libraries / "libcounterfeit.so"
        _run("g++", *_FLAGS, "-shared", stubs, compiled, f"-Wl,--version-script={exported}", "-o", library)
        for name in names:
            (self.libraries / name).unlink(missing_ok=True)
            (self.libraries / name).symlink_to(library.name)

    def run(self, order: str, tests: Sequence[str]) -> dict[str, Any]:
        """Run tests in an order of streams; returns how many passed, which others ran, and what was said."""
        log, report = self.home / "said.txt", self.home / "report.xml"
        log.unlink(missing_ok=True)
        report.unlink(missing_ok=True)
        skipped = [argument for name in EXCLUDED for argument in ("--deselect", f"{DEVICE_TESTS[0]}::{name}")]
        variables = {"FAKE_CUDART_ORDER": order, "FAKE_CUDART_LOG": str(log)}
        self.test((f"--junitxml={report}", *skipped, *tests), variables)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        others = [case.attrib["name"] for case in cases if len(case)]  # that failed, or were skipped
        said = sorted(set(log.read_text().splitlines())) if log.exists() else []
        return {"passed": len(cases) - len(others), "others": others, "said": said}

    def test(self, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run pytest on this torch; returns its exit status."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(self.torch), str(ROOT / "src"))),
            "LD_LIBRARY_PATH": str(self.libraries),
            "OMP_WAIT_POLICY": "passive",
            **variables,
        }
        command = (sys.executable, "-m", "pytest", "-n", "0", "-q", *arguments)
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _pip(target: Path, *wanted: str) -> None:
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps")
    subprocess.run((*command, "--target", target, *wanted), check=True)


def _wanted(torch: Path) -> tuple[set[str], dict[str, str]]:
    """Returns CUDA's libraries, and by symbol the version that torch's libraries want of them."""
    names: set[str] = set()
    symbols: dict[str, str] = {}
    for library in sorted((torch / "torch" / "lib").glob("*.so*")):
        told = _run("readelf", "-W", "-d", "-V", "--dyn-syms", library)
        names.update(filter(_CUDAS.fullmatch, re.findall(r"\(NEEDED\).*\[(.*)\]", told)))
        versions: set[str] = set()
        for needed in told.split("Version: 1  File: ")[1:]:
            if _CUDAS.match(needed):
                versions.update(re.findall(r"Name: (\S+)  Flags: \w+  Version: \d+", needed))
        for symbol, of in re.findall(r" UND (\w+)(?:@(\S+))?", told):
            if of in versions or (not of and re.match(r"cu|nccl|nvshmem", symbol)):
                symbols[symbol] = of
    return names, symbols


def _stubs(symbols: set[str]) -> Iterator[str]:
    yield 'extern "C" int fake_cudart_missing(const char* name);\n'
    for symbol in sorted(symbols):
        if symbol.endswith("String"):
            yield f'extern "C" const char* {symbol}() {{ return "of a library that is not there"; }}\n'
        else:
            yield f'extern "C" int {symbol}() {{ return fake_cudart_missing("{symbol}"); }}\n'


def _exported(symbols: dict[str, str]) -> Iterator[str]:
    """Yields the linker's list of symbols by version, among them those that tests call."""
    for of in sorted(set(symbols.values())):
        inside = " ".join(f"{symbol};" for symbol in sorted(symbols) if symbols[symbol] == of)
        yield f"{of or 'NONE'} {{ global: {inside}{'' if of else ' fake_cudart_*; local: *;'} }};\n"


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
