"""The zip with an artifact's programs: for each method its code as JSON, or else the exported program."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.activations import Activations
from penstock.passes.annotate import Annotated
from penstock.passes.building.refusals import sentence
from penstock.passes.calls.operators import operator_of
from penstock.passes.calls.ranks import Ranks, is_collective
from penstock.passes.calls.stored_graph import operators_in
from penstock.passes.calls.stored_program import load_stored, with_types
from penstock.passes.lowering.method_code import MethodCode, decode_method, encode_method, method_code
from penstock.passes.lowering.recomputed import OTHERS, check_uses
from penstock.passes.training.facts import Training
from penstock.passes.weights.values import with_values
from penstock.schedule.bounded_file import open_bounded, open_zip, read_member
from penstock.schedule.facts.errors import TRUST, PassError, PayloadError, PenstockError, SourceError
from penstock.schedule.facts.model import Method
from penstock.schedule.payload.codec import Payload

PROGRAM, PACKAGE, TRAINING, RANKS = "program.zip", "compiled.pt2", "training.json", "ranks.json"


def write_programs(archive: zipfile.ZipFile, annotated: Annotated) -> None:
    """Adds a file for each method: `METHOD.json`, or `METHOD.pt2` if the method has no form in JSON.

    Neither has weights. Raises PassError for a program that has no form in JSON and that torch cannot save.
    """
    for name, code in encoded_methods(annotated).items():
        if isinstance(code, bytes):
            archive.writestr(f"{name}.json", code)
        else:
            archive.writestr(f"{name}.pt2", _saved(code, name))
    if annotated.training is not None:
        archive.writestr(TRAINING, annotated.training.to_bytes())
    if (ranks := Ranks.of(_graphs(annotated))) is not None:
        archive.writestr(RANKS, ranks.to_bytes())


def _graphs(annotated: Annotated) -> Iterator[fx.Graph]:
    """The graphs of all methods that may have collectives, and those of the bodies in them."""
    modules = [exported.graph_module for exported in annotated.programs.values()]
    for code in annotated.codes.values():
        names = operators_in(json.loads(code)["graph"])
        if any(is_collective(operator_of(name, trust=True)) for name in names):
            graph = decode_method(code, trust=True).graph()
            yield graph.graph
            modules += graph.bodies.values()
    for module in modules:
        yield from (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))


def encoded_methods(annotated: Annotated) -> dict[str, bytes | ExportedProgram]:
    """The code of each method as JSON, or its exported program if it has no form in JSON."""
    codes: dict[str, bytes | ExportedProgram] = dict(annotated.codes)
    for name, exported in annotated.programs.items():
        values_kept = annotated.training.made(name) if annotated.training else ()
        activations = Activations.of(exported, annotated.propagated[name], values_kept)
        codes[name] = encode_method(exported, activations) or exported
    return codes


def _saved(exported: ExportedProgram, name: str) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.export.save(strip_weights(exported), buffer)
    except Exception as error:
        raise PassError(
            f"method {name!r} cannot be saved ({type(error).__name__}: {sentence(error)}): "
            "torch.export.save must accept the program"
        ) from error
    return buffer.getvalue()


def strip_weights(exported: ExportedProgram) -> ExportedProgram:
    """Returns a copy of the program whose weights are on the meta device and hold no bytes.

    The weights are not fake, because `torch.export.save` silently turns fake weights into zeros. Ties
    are lost here; the payload keeps them.
    """
    stripped = with_values(exported, _emptied)
    stripped._example_inputs = None
    return stripped


@contextmanager
def open_programs(folder: Path, payload: Payload) -> Iterator[zipfile.ZipFile]:
    """Yields the artifact's zip, which is closed at the end.

    Raises SourceError if the zip cannot be read, and PayloadError if a program in it cannot be loaded.
    """
    path = folder / (payload.program.path if payload.program else PROGRAM)
    try:
        with open_bounded(path, "a lowered program") as file, open_zip(file, path) as archive:
            yield archive
    except OSError as error:
        raise SourceError(f"the lowered program {path} cannot be read: {error.strerror or error}") from error
    except PenstockError as error:
        raise PayloadError(f"the lowered program {path} cannot be loaded: {error}") from error
    except Exception as error:
        raise PayloadError(
            f"the lowered program {path} cannot be loaded ({type(error).__name__}: {sentence(error)}): "
            "import the library that registers its operators and types first, or compile it again"
        ) from error


def check_ranks(folder: Path, payload: Payload) -> None:
    """Raises PayloadError for a program with collectives that another rank has compiled."""
    with open_programs(folder, payload) as archive:
        ranks = (
            Ranks.from_bytes(read_member(archive, RANKS, "a configuration"))
            if RANKS in archive.namelist()
            else None
        )
    if ranks is not None:
        ranks.check_here(str(folder))


def read_code(archive: zipfile.ZipFile, method: str, *, trust: bool) -> MethodCode:
    """Returns the code of a method.

    Without `trust` it is data: operators that may run for anybody, and no module is imported that it names.
    Raises PassError for a method that was stored as an exported program, whose reading runs code, or that
    calls other operators.
    """
    stored = f"{method}.json"
    if stored in archive.namelist():
        data = read_member(archive, stored, "a method's code")
        return with_types(lambda: decode_method(data, trust=trust), trust=trust)
    if not trust:
        raise PassError(
            f"method {method!r} has no form as data, and torch.export.load, which reads it, may run code: "
            f"{TRUST}"
        )
    training = read_training(archive)
    values_kept = training.made(method) if training else ()
    return method_code(load_stored(read_member(archive, f"{method}.pt2", "a lowered program")), values_kept)


def check_fits(payload: Payload, method: Method, code: MethodCode, *, trust: bool) -> None:
    """Raises PayloadError unless a method's code is for the weights and the steps that the payload has.

    Weights have the dtype, shape and strides that the graph was made for. Without `trust`, the graph is
    followed, and has to use them as the payload says (`check_uses`).
    """
    weights = {weight.fqn: weight.parts[0] for weight in payload.tensors}
    like = code.like or [None] * len(code.weights)
    for (_, fqn), expected in zip(code.weights, like, strict=True):
        part = weights.get(fqn)
        got = part and (part.dtype, part.shape, part.stride)
        if got is None or (expected is not None and got != expected):
            raise PayloadError(
                f"weight {fqn!r} of method {method.name!r} is {got}, expected {expected or 'one'}: {OTHERS}"
            )
    missing = set(code.signature.to_weight.values()) - {
        fqn for fqn, part in weights.items() if payload.storages[part.storage].kind == "mutable"
    }
    if missing:
        raise PayloadError(
            f"method {method.name!r} writes {min(missing)!r}, which is no mutable weight: {OTHERS}"
        )
    if not trust:
        check_uses(payload, method, code)


def read_training(archive: zipfile.ZipFile) -> Training | None:
    """Returns what joins forward and backward, None for a program that is not trained."""
    stored = TRAINING in archive.namelist()
    return Training.from_bytes(read_member(archive, TRAINING, "a payload")) if stored else None


def _emptied(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
