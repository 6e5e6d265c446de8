"""The zip that holds an artifact's programs: of each method the exported program, and what runs of it."""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.passes.building.refusals import sentence
from penstock.passes.calls.stored_program import load_stored, with_types
from penstock.passes.lowering.method_code import MethodCode, decode_method, encode_method, method_code
from penstock.schedule.facts.errors import PassError, PayloadError, SourceError
from penstock.schedule.payload.codec import Payload

PROGRAM = "program.zip"


def write_programs(archive: zipfile.ZipFile, programs: Mapping[str, ExportedProgram]) -> None:
    """Adds for each method `METHOD.pt2`, without weights, and `METHOD.json`, if it has that form.

    Raises PassError for a program that torch cannot save.
    """
    for name, exported in programs.items():
        buffer = io.BytesIO()
        try:
            torch.export.save(strip_weights(exported), buffer)
        except Exception as error:
            raise PassError(
                f"method {name!r} cannot be saved ({type(error).__name__}: {error}): "
                "torch.export.save must accept the program"
            ) from error
        archive.writestr(f"{name}.pt2", buffer.getvalue())
        code = encode_method(exported)
        if code is not None:
            archive.writestr(f"{name}.json", code)


def strip_weights(exported: ExportedProgram) -> ExportedProgram:
    """Returns a copy of the program whose weights are on the meta device and hold no bytes.

    Meta and not fake: `torch.export.save` turns fake weights into zeros without a word. Ties are
    lost: the payload keeps them.
    """
    stripped = copy.copy(exported)
    stripped._state_dict = {name: _emptied(value) for name, value in exported.state_dict.items()}
    stripped._constants = {name: _emptied(value) for name, value in exported.constants.items()}
    stripped._example_inputs = None
    return stripped


@contextmanager
def open_programs(folder: Path, payload: Payload) -> Iterator[zipfile.ZipFile]:
    """The artifact's zip. It is code: trust it first.

    Raises SourceError where it cannot be read, PayloadError where what is read from it is not the payload's
    program.
    """
    path = folder / (payload.program.path if payload.program else PROGRAM)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        raise SourceError(f"the lowered program {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise PayloadError(
            f"the lowered program {path} cannot be loaded ({type(error).__name__}: {sentence(error)}): "
            "import the library that registers its operators and types first, or compile it again"
        ) from error


def read_code(archive: zipfile.ZipFile, method: str) -> MethodCode:
    """Returns what runs of a method: as it was stored, or else made again from its exported program."""
    stored = f"{method}.json"
    data = archive.read(stored) if stored in archive.namelist() else b""
    code = with_types(lambda: decode_method(data)) if data else None
    return code or method_code(load_stored(archive.read(f"{method}.pt2")))


def load_exported(folder: Path, payload: Payload) -> dict[str, ExportedProgram]:
    """The exported program of each method, without its weights. Raises what `open_programs` raises."""
    with open_programs(folder, payload) as archive:
        return {m.name: load_stored(archive.read(f"{m.name}.pt2")) for m in payload.methods}


def _emptied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    empty = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=False) if isinstance(value, torch.nn.Parameter) else empty
