"""Exported calls in the cache, so that another process need not export them again.

A file holds one call as a zip of data: `call.json`, how the call is taken apart and put together;
`method.json`, what runs of it; `payload.json`, the facts of which an artifact is made; `values.safetensors`,
the values that no checkpoint has. A call that is trained has the last three of its backward too, in the
folder `backward`, and `training.json`, what joins them. Its name is a hash of the module's key (`keys/`), of
the kind of call, and of a number, since calls of one kind may need several programs. A damaged file counts as
none.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import fx

from penstock.integrations.calls.arguments import (
    STATE_MODULES,
    Collected,
    Constant,
    Count,
    Given,
    State,
    Tree,
)
from penstock.integrations.calls.exported import ExportedCall, Output, Result
from penstock.integrations.calls.kinds import Call
from penstock.integrations.training.backward import Backward
from penstock.passes.annotate import Annotated
from penstock.passes.calls.stored_graph import decode_graph, decode_value, encode_graph, encode_value
from penstock.passes.lowering.archive import encoded_methods
from penstock.passes.lowering.method_code import decode_activations, decode_method
from penstock.passes.training.facts import Training
from penstock.passes.weights.values import has_values, storage_bytes
from penstock.runtime.cache import Cache
from penstock.schedule.atomic_file import replace_file, write_all, writing_privately
from penstock.schedule.bounded_file import read_bounded, read_member, refuse_larger
from penstock.schedule.facts.errors import PassError, PenstockError, SourceError
from penstock.schedule.payload.codec import Payload

_log = logging.getLogger(__name__)

_CALL, _METHOD, _PAYLOAD, _VALUES = "call.json", "method.json", "payload.json", "values.safetensors"

_MEMBERS = (_CALL, _METHOD, _PAYLOAD, _VALUES)

_TRAINING, _BACKWARD = "training.json", "backward/"


@dataclass(frozen=True)
class KeptCalls:
    """The calls of one module in a cache.

    `key` says the module's key now, or None: then nothing is found and nothing is kept. It is asked for each
    kind of call right before the export, which may come long after `apply`: what a function names may have
    changed since then.
    """

    cache: Cache
    key: Callable[[], str | None]
    name: str

    def find(self, call: Call, key: str | None) -> ExportedCall | None:
        """A program that serves a call, if there is one under a key."""
        if key is None:
            return None
        for number in count():
            path = _path(self.cache, key, call.kind, number)
            try:
                found = self._read(path)
            except FileNotFoundError:
                return None
            except Exception as error:  # whatever is wrong with it, the call can be exported again
                _log.info("%s is of no use (%s: %s)", path, type(error).__name__, error)
                with suppress(OSError):
                    path.unlink()
                return None
            if found.accepts(call):
                with suppress(OSError):
                    os.utime(path)
                return found
        return None

    def _read(self, path: Path) -> ExportedCall:
        """Read a call. Raises FileNotFoundError, and any error for a file that is of no use."""
        data, own = read_bounded(path, "an exported call"), self.cache.own
        if own and (writer := self.cache.writer_of(path)):
            raise SourceError(f"it is not trusted, as {writer}")
        return decode_call(data, trust=own)

    def keep(self, method: ExportedCall, key: str | None) -> ExportedCall:
        """Write a program into the cache under the key that the module had when its export began.

        Returns what comes back of it; itself where that cannot be.
        """
        if key is None:
            return method
        try:
            data = encode_call(method)
            refuse_larger(f"the program of {self.name}", len(data), "an exported call")
            same = decode_call(data, trust=True)  # this process has just made it
        except (PassError, SourceError) as error:
            _log.info("%s: a call is exported again in each process: %s", self.name, error)
            return method
        try:
            self.cache.make_room(len(data))
            self._write(key, method.kind, data)
        except (OSError, PenstockError) as error:
            _log.info("%s: a call is not kept for another process: %s", self.name, error)
        return same

    def _write(self, key: str, kind: str, data: bytes) -> None:
        self.cache.make_folder(self.cache.calls)
        paths = (_path(self.cache, key, kind, number) for number in count())
        path = next(path for path in paths if not path.exists())
        with writing_privately(), replace_file(path, force=True) as fd:
            write_all(fd, data)


def _path(cache: Cache, key: str, kind: str, number: int) -> Path:
    facts = f"{key} {kind} {number}"
    return cache.calls / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.zip"


def encode_call(method: ExportedCall) -> bytes:
    """An exported call as a zip of data.

    Raises PassError where something of it has no form in JSON.
    """
    annotated, backward = method.annotated(), method.backward
    call = {
        "name": method.name,
        "kind": method.kind,
        "output": _encode_tree(method.result.output),
        "states": [_encode_leaf(state) for state in method.result.states],
        "assumed": method.assumed,
        "values": method.result.values,
        "grad": method.result.grad,
        "outputs": [encode_value((one.dtype, one.device, one.shape, one.stride)) for one in method.outputs],
        "truth": None if method.truth is None else encode_graph(method.truth),
        "computed": sorted(annotated.computed),
    }
    if backward is not None:
        taken = backward.activations
        call["backward"] = [backward.name, *map(encode_value, (taken.sizes, taken.moments, taken.held))]
    members = {_CALL: json.dumps(call, separators=(",", ":"), allow_nan=False).encode()}
    members |= _encode_method(annotated)
    if backward is not None:
        members[_TRAINING] = backward.training.to_bytes()
        members |= {_BACKWARD + name: one for name, one in _encode_method(backward.annotated()).items()}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            archive.writestr(zipfile.ZipInfo(name), member)  # without the time, so that equal calls are equal
    return data.getvalue()


def _encode_method(annotated: Annotated) -> dict[str, bytes]:
    (code,) = encoded_methods(annotated).values()
    if not isinstance(code, bytes):
        raise PassError("its program has arguments that JSON cannot hold")
    values = {str(s): storage_bytes(one) for s, one in enumerate(annotated.values) if has_values(one)}
    return {
        _METHOD: code,
        _PAYLOAD: annotated.payload.to_bytes(),
        _VALUES: save_tensors({name: value.contiguous() for name, value in values.items()}),
    }


def decode_call(data: bytes, *, trust: bool) -> ExportedCall:
    """An exported call again. With `trust` it may call any operator of this process.

    Raises whatever error there is for data that are none.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [*_MEMBERS, _TRAINING, *(_BACKWARD + name for name in _MEMBERS[1:])]
        stored = [name for name in names if name in archive.namelist()]
        members = {name: read_member(archive, name, "an exported call") for name in stored}
    call = json.loads(members[_CALL])
    result = Result(
        _decode_tree(call["output"]),
        tuple(_decode_leaf(state) for state in call["states"]),
        tuple(bool(answer) for answer in call["assumed"]),
        tuple((index, value) for index, value in call["values"]),
        call["grad"],
    )
    return ExportedCall(
        call["name"],
        call["kind"],
        result,
        tuple(Output(*decode_value(output)) for output in call["outputs"]),
        None if call["truth"] is None else _graph_module(call["truth"], trust),
        decode_method(members[_METHOD], trust=trust),
        lambda: _annotated(members, call["name"], call["computed"]),
        lambda: hashlib.sha256(data).hexdigest(),
        _decode_backward(members, *call["backward"], trust=trust) if "backward" in call else None,
    )


def _decode_backward(members: Mapping[str, bytes], name: str, *activations: Any, trust: bool) -> Backward:
    own = {one.removeprefix(_BACKWARD): held for one, held in members.items() if one.startswith(_BACKWARD)}
    return Backward(
        name,
        Training.from_bytes(members[_TRAINING]),
        decode_method(own[_METHOD], trust=trust),
        decode_activations(list(activations)),
        lambda: _annotated(own, name, ()),
    )


def _graph_module(stored: Mapping[str, Any], trust: bool) -> fx.GraphModule:
    graph, bodies = decode_graph(stored, trust=trust)
    return fx.GraphModule(bodies, graph)


def _annotated(members: Mapping[str, bytes], name: str, computed: Iterable[str]) -> Annotated:
    payload = Payload.from_bytes(members[_PAYLOAD], source=_PAYLOAD)
    known = load_tensors(members[_VALUES])
    absent = torch.empty(0, device="meta")
    return Annotated(
        payload,
        tuple(known.get(str(s), absent) for s in range(len(payload.storages))),
        frozenset(computed),
        codes={name: members[_METHOD]},
    )


def _encode_tree(tree: Tree) -> list[Any]:
    return [encode_value(tree.spec), [_encode_leaf(leaf) for leaf in tree.leaves]]


def _decode_tree(stored: list[Any]) -> Tree:
    spec, leaves = stored
    return Tree(decode_value(spec), tuple(_decode_leaf(leaf) for leaf in leaves))


def _encode_leaf(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, Collected | Count):
        return {"tensor" if isinstance(leaf, Collected) else "count": leaf.index}
    if isinstance(leaf, Given):
        return {"given": [leaf.index, leaf.state]}
    if isinstance(leaf, State):
        return {"state": [_encode_class(leaf.kind), _encode_tree(leaf.held)]}
    if isinstance(leaf.value, Enum):
        return {"enum": [_encode_class(type(leaf.value)), leaf.value.name]}
    if isinstance(leaf.value, type) and leaf.value.__module__ in STATE_MODULES:
        return {"class": _encode_class(leaf.value)}
    return {"constant": encode_value(leaf.value)}


def _decode_leaf(stored: Mapping[str, Any]) -> Any:
    ((name, held),) = stored.items()
    return _LEAVES[name](held)


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "tensor": Collected,
    "count": Count,
    "given": lambda held: Given(*held),
    "state": lambda held: State(_decode_class(held[0]), _decode_tree(held[1])),
    "enum": lambda held: Constant(_decode_class(held[0])[held[1]]),
    "class": lambda held: Constant(_decode_class(held)),
    "constant": lambda held: Constant(decode_value(held)),
}
"""What makes a leaf again, by the key that it has in JSON."""


def _encode_class(kind: type) -> str:
    """A class of the libraries' states by name, which is all that a file may make penstock look up."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ not in STATE_MODULES or _decode_class(name) is not kind:
        raise PassError(f"a {kind.__qualname__} has no JSON")
    return name


def _decode_class(name: str) -> Any:
    module, _, kind = name.partition(":")
    found = getattr(import_module(module), kind, None) if module in STATE_MODULES else None
    if not isinstance(found, type):
        raise PassError(f"there is no class {name}")
    return found
