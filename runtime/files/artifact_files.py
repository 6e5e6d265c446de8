"""Reads and checks the files of an artifact folder other than its weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from penstock.runtime.system.atomic import write_artifact
from penstock.schedule.atomic_file import replace_file, write_all
from penstock.schedule.bounded_file import hash_bounded, read_bounded
from penstock.schedule.facts.errors import PayloadError, PenstockError, SourceError
from penstock.schedule.payload.codec import Payload, check_artifact, verify_payload

PAYLOAD = "payload.json"
DIGEST = "payload.json.sha256"
"""The payload's sha256 as sha256sum writes it: a payload whose numbers were changed can still be valid."""

SEEN = "seen.json"
"""The ctime that each weight file in place had when all of its bytes were last compared, by path.

It is no part of the payload: a file that gets another ctime and keeps its bytes leaves the artifact's digest.
"""


def read_payload(folder: Path) -> Payload:
    """Returns the payload of an artifact folder, and checks its plans and the hash of its lowered program."""
    return read_artifact(folder)[0]


def read_artifact(folder: Path) -> tuple[Payload, str]:
    """Returns what `read_payload` returns, and the digest of the artifact.

    That is the sha256 of the payload's bytes, which have the hashes of the lowered program and of each
    storage: whoever knows it from elsewhere can tell that all of an artifact is as it was.
    """
    data = read_payload_bytes(folder)
    payload = Payload.from_bytes(data, source=str(folder / PAYLOAD))
    _check_digest(folder / DIGEST, data)
    if payload.program is None:
        raise PayloadError(f"{folder / PAYLOAD} describes a program in memory: compile it to run it")
    check_artifact(payload, str(folder / PAYLOAD))
    verify_payload(payload)
    _check_program(folder / payload.program.path, payload.program.sha256)
    return payload, hashlib.sha256(data).hexdigest()


def read_payload_bytes(folder: Path) -> bytes:
    """Returns the payload of an artifact folder as it is on the disk. Raises SourceError if there is none."""
    try:
        return read_bounded(folder / PAYLOAD, "a payload")
    except OSError as error:
        reason = f"{PAYLOAD} cannot be read ({error.strerror})"
        if not os.path.exists(folder):
            reason = "there is no such folder"
        elif not os.path.isdir(folder):
            reason = "it is a file"
        elif isinstance(error, FileNotFoundError):
            reason = f"it has no {PAYLOAD}"
        said = f"is not an artifact: {reason}; give the folder that penstock compile wrote"
        raise SourceError(f"{folder} {_of_model(folder) or said}") from error


def _of_model(path: Path) -> str:
    """What makes an artifact of a model's folder, or of a file in it; empty for everything else."""
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isfile(folder / "config.json") or not os.path.exists(path):
        return ""
    what = "is a model's folder" if folder == path else "is a file of a model"
    name = f"{folder.resolve().name}.penstock"
    return (
        f"{what} and not an artifact: `penstock compile {folder} {name}` makes one of it, and "
        f"`penstock generate {folder}` runs a language model as it is"
    )


def read_seen(folder: Path) -> Mapping[str, object]:
    """Return what SEEN says; nothing where it is missing or damaged, so that all bytes are compared again."""
    with suppress(OSError, PenstockError, ValueError, RecursionError):
        times = json.loads(read_bounded(folder / SEEN, "times of weight files"))
        return times if isinstance(times, dict) else {}
    return {}


def note_seen(folder: Path, seen: Mapping[str, object]) -> None:
    """Write SEEN into the folder of an artifact. A failure is ignored: the bytes are compared again then."""
    with suppress(OSError, SourceError), replace_file(folder / SEEN, force=True) as fd:
        write_all(fd, json.dumps(seen).encode() + b"\n")


def write_payload(payload: Payload, folder: Path) -> None:
    """Write a payload and its hash into the folder of an artifact that is being made."""
    data = payload.to_bytes()
    (folder / PAYLOAD).write_bytes(data)
    (folder / DIGEST).write_bytes(digest_line(data))


def replace_payload(folder: Path, payload: Payload) -> None:
    """Write an artifact anew with another payload, in one step; all its other files stay as they are."""

    def build(temporary: Path) -> None:
        ignored = shutil.ignore_patterns(PAYLOAD, DIGEST)
        shutil.copytree(folder, temporary, ignore=ignored, copy_function=_link, dirs_exist_ok=True)
        write_payload(payload, temporary)

    write_artifact(folder, force=True, build=build)


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def digest_line(data: bytes) -> bytes:
    """Returns the content of the file DIGEST for a payload of these bytes."""
    return f"{hashlib.sha256(data).hexdigest()}  {PAYLOAD}\n".encode()


def _check_digest(path: Path, data: bytes) -> None:
    try:
        expected = read_bounded(path, "a digest")
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read ({error.strerror}): the artifact is incomplete, so compile it again"
        ) from error
    if expected != digest_line(data):
        raise PayloadError(
            f"{path.with_suffix('')} is not what was written: its sha256 differs from that in {path.name}; "
            "compile again"
        )


def _check_program(path: Path, sha256: str) -> None:
    try:
        digest = hash_bounded(path, "a lowered program")
    except OSError as error:
        raise SourceError(f"the lowered program {path} cannot be read: {error.strerror}") from error
    if digest != sha256:
        raise PayloadError(
            f"the lowered program {path} is not the one compiled: its sha256 was {sha256} and is {digest}; "
            "compile again"
        )


def artifact_digest(folder: Path) -> str | None:
    """The hash of an artifact's payload; None if there is no artifact, as for a program in memory."""
    try:
        return read_bounded(folder / DIGEST, "a digest").decode().partition(" ")[0]
    except (OSError, PenstockError, ValueError):
        return None
