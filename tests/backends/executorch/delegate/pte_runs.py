"""Runs `.pte` files in a process of their own, as an application does (`run_pte.cpp`)."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.backends.executorch.delegate.pte_models import Files


@dataclass(frozen=True)
class Program:
    """A program to load: how its files are read, and its load options."""

    files: Files
    options: dict[str, object] = field(default_factory=dict)
    mode: str = "mmap"
    share: bool = False

    def to_json(self):
        files = {"pte": str(self.files.pte), "data": [str(path) for path in self.files.data]}
        return {**files, "options": self.options, "mode": self.mode, "share": self.share}


@dataclass(frozen=True)
class Call:
    """A call of a method of program number `program`.

    Without inputs, `method` is unloaded, or the whole program if it is empty. `options` replace those of the
    program from here on. With `shell`, this command runs instead; with `reload`, the program is loaded and
    destroyed so many times.
    """

    inputs: Sequence[Tensor] = ()
    method: str = "forward"
    program: int = 0
    options: dict[str, object] = field(default_factory=dict)
    shell: str = ""
    reload: int = 0


@dataclass(frozen=True)
class Answer:
    """What a call gave, and the delegate's figures after it, over all programs that are loaded.

    `process_bytes` is the most memory that the process has taken until then, and `heap_bytes` what its heap
    has.
    """

    error: str
    outputs: list[Tensor]
    process_bytes: int
    heap_bytes: int
    programs: int = 0
    plan_budget: int = 0
    bytes_moved: int = 0
    misses: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Runner:
    """Runs calls, and keeps what was said on stderr in `said`."""

    program: Path
    library: Path
    folder: Path
    said: list[str] = field(default_factory=list)

    def __call__(self, programs, calls, *, with_library=True, threads=False, late=False):
        """Runs calls, one after another; with `threads`, those of each program in a thread of its own.

        With `late`, programs are destroyed after everything that is static in the libraries.
        """
        asked = [self._asked(number, call) for number, call in enumerate(calls)]
        request = {
            "libraries": [str(self.library)] if with_library else [],
            "programs": [one.to_json() for one in programs],
            "calls": asked,
            "threads": threads,
            "late": late,
        }
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        found = subprocess.run([self.program, path], capture_output=True, text=True, check=False, timeout=120)
        assert found.returncode == 0, found.stderr
        self.said[:] = found.stderr.splitlines()
        answers = json.loads(found.stdout)
        return [Answer(**said, outputs=_outputs(one)) for said, one in zip(answers, asked, strict=True)]

    def _asked(self, number, call):
        if call.shell:
            return {"program": call.program, "shell": call.shell}
        if call.reload:
            return {"program": call.program, "method": call.method, "reload": call.reload}
        if not call.inputs:
            return {"program": call.program, "unload": call.method or True}
        inputs, outputs = self.folder / f"inputs{number}", self.folder / f"outputs{number}"
        outputs.unlink(missing_ok=True)
        save_file({str(k): tensor.contiguous() for k, tensor in enumerate(call.inputs)}, inputs)
        paths = {"inputs": str(inputs), "outputs": str(outputs)}
        return {"program": call.program, "method": call.method, "options": call.options, **paths}

    def sentences(self):
        """What the delegate said."""
        return [line.partition("penstock: ")[2] for line in self.said if "penstock: " in line]


def _outputs(asked):
    path = Path(asked.get("outputs", ""))
    if not path.is_file():
        return []
    found = load_file(path)
    return [found[str(k)] for k in range(len(found))]


def outputs_of(answers):
    assert [one.error for one in answers] == ["Error::Ok"] * len(answers)
    return [tensor for one in answers for tensor in one.outputs]
