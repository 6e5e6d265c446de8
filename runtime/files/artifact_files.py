"""The files of an artifact folder beside its weights, read and checked."""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.schedule.facts.errors import PayloadError, SourceError
from penstock.schedule.payload.codec import Payload, verify_payload

PAYLOAD = "payload.json"
DIGEST = "payload.json.sha256"
"""Beside the payload, as sha256sum writes it: numbers that changed can still be a valid payload."""


def read_payload(folder: Path) -> Payload:
    """The payload of an artifact folder, its plans proven, its lowered program the one that was compiled."""
    try:
        data = (folder / PAYLOAD).read_bytes()
    except OSError as error:
        raise SourceError(
            f"{folder} is not an artifact: {PAYLOAD} cannot be read ({error.strerror}); "
            "give the folder that penstock compile wrote"
        ) from error
    payload = Payload.from_bytes(data, source=str(folder / PAYLOAD))
    _check_digest(folder / DIGEST, data)
    if payload.program is None:
        raise PayloadError(f"{folder / PAYLOAD} describes a program in memory: compile it to run it")
    verify_payload(payload)
    _check_program(folder / payload.program.path, payload.program.sha256)
    return payload


def digest_line(data: bytes) -> bytes:
    """What the file DIGEST holds for these bytes of a payload."""
    return f"{hashlib.sha256(data).hexdigest()}  {PAYLOAD}\n".encode()


def _check_digest(path: Path, data: bytes) -> None:
    try:
        expected = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror}): the artifact is incomplete") from error
    if expected != digest_line(data):
        raise PayloadError(
            f"{path.with_suffix('')} is not what was written: its sha256 differs from that in {path.name}; "
            "compile again"
        )


def _check_program(path: Path, sha256: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SourceError(f"the lowered program {path} cannot be read: {error.strerror}") from error
    if found != sha256:
        raise PayloadError(
            f"the lowered program {path} is not the one compiled: its sha256 was {sha256} and is {found}; "
            "compile again"
        )
