"""The files of an artifact: read and checked, recognised by stamps, with every byte accounted for."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.runtime.files.safetensors_file import (
    RECOMPILE,
    Header,
    close_read,
    open_for_reading,
    parse_header,
    read_exactly,
    read_open_header,
    read_raw_header,
)
from penstock.runtime.system.atomic import write_artifact
from penstock.runtime.system.memory import open_uncached
from penstock.schedule.atomic_file import replace_file, write_all
from penstock.schedule.bounded_file import hash_bounded, read_bounded
from penstock.schedule.facts.errors import PayloadError, PenstockError, SourceError
from penstock.schedule.facts.model import Storage, WeightFile
from penstock.schedule.payload.codec import Payload, check_artifact, verify_payload

BytesDone = Callable[[int], None]
"""Called with the number of bytes done since the last call."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done so far and the bytes in all."""

SAMPLE_BYTES = 4096
_SPREAD_SAMPLES = 64
_TENSOR_SAMPLES = 256
_LARGE_TENSOR = 1 << 20
CHUNK_BYTES = 16 << 20


def stamp_file(path: Path, *, recorded_path: str) -> WeightFile:
    """The stamp of a safetensors file, recorded as `recorded_path`. Raises SourceError for another file."""
    with open_for_reading(path) as fd:
        status = os.fstat(fd)
        header = read_open_header(fd, path)
        return WeightFile(
            path=recorded_path,
            nbytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            header_sha256=hashlib.sha256(header.raw).hexdigest(),
            sampled_sha256=_hash_samples(fd, header, path),
        )


def check_open_file(fd: int, path: Path, file: WeightFile, *, in_place: bool) -> None:
    """Raise SourceError unless an open file is still the one that was stamped.

    The file is open so that what is checked is what will be read. Modification time and inode count only for
    files used `in_place`: a packed file may be copied together with its artifact.
    """
    status = os.fstat(fd)
    _compare(path, "size in bytes", file.nbytes, status.st_size)
    if in_place:
        _compare(path, "modification time in ns", file.mtime_ns, status.st_mtime_ns)
        _compare(path, "inode", file.inode, status.st_ino)
    raw = read_raw_header(fd, path)
    _compare(path, "sha256 of its header", file.header_sha256, hashlib.sha256(raw).hexdigest())
    sampled_sha256 = _hash_samples(fd, parse_header(raw, status.st_size, path), path)
    _compare(path, "sha256 of its sampled blocks", file.sampled_sha256, sampled_sha256)


def compare_header(path: Path, file: WeightFile, present: WeightFile) -> None:
    """Raise SourceError where size or header of the stamp `present` of `path` are not those of `file`."""
    _compare(path, "size in bytes", file.nbytes, present.nbytes)
    _compare(path, "sha256 of its header", file.header_sha256, present.header_sha256)


def locate(file: WeightFile, folder: Path) -> Path:
    """Where a weight file lies. Raises SourceError for a relative path that leaves the folder."""
    if ".." in Path(file.path).parts or "\0" in file.path or not file.path:
        raise SourceError(
            f"the payload names the weight file {file.path!r}, which is not inside {folder}: "
            "do not trust this artifact, compile again"
        )
    return folder / file.path


def sample_offsets(header: Header) -> tuple[int, ...]:
    """Tells where the sampled blocks begin, ascending: multiples of SAMPLE_BYTES, the last cut at the end.

    64 blocks spread evenly over the file (first and last among them), and the blocks in which up
    to 256 tensors of 1 MiB or more begin, taken evenly in file order.
    """
    last = max(header.file_nbytes - 1, 0)
    spread = [last * i // (_SPREAD_SAMPLES - 1) for i in range(_SPREAD_SAMPLES)]
    large = [tensor.start for tensor in header.entries.values() if tensor.nbytes >= _LARGE_TENSOR]
    count = min(len(large), _TENSOR_SAMPLES)
    chosen = [large[len(large) * i // count] for i in range(count)]
    return tuple(sorted({offset // SAMPLE_BYTES * SAMPLE_BYTES for offset in spread + chosen}))


def file_chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes `start` to `stop` of a file, at most 16 MiB at a time. Raises SourceError."""
    with open_for_reading(path, RECOMPILE) as fd:
        for offset in range(start, stop, CHUNK_BYTES):
            yield read_exactly(fd, offset, min(CHUNK_BYTES, stop - offset), path)


def hash_storage(
    storage: Storage, files: Sequence[WeightFile], folder: Path, *, progress: BytesDone | None = None
) -> str:
    """Returns the sha256 of a storage's bytes as they lie in its files, extent after extent."""
    digest = hashlib.sha256()
    for extent in storage.extents:
        path = locate(files[extent.file], folder)
        for chunk in file_chunks(path, extent.file_offset, extent.file_offset + extent.nbytes):
            digest.update(chunk)
            if progress:
                progress(len(chunk))
    return digest.hexdigest()


def count_bytes(progress: Progress | None, title: str, total: int) -> BytesDone | None:
    """Returns a function that takes the bytes done since its last call, and reports their sum."""
    if progress is None:
        return None
    report, done = progress, 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(title, done, total)

    return add


def _hash_samples(fd: int, header: Header, path: Path) -> str:
    """Returns the sha256 of the sampled blocks.

    Read past the page cache where that is possible: a small folio that a sample brings in would keep the
    granule around it from ever being mapped as one huge page.
    """
    digest = hashlib.sha256()
    uncached = open_uncached(path, fd)
    with ExitStack() as opened:
        if uncached >= 0:
            opened.callback(close_read, uncached)
        block = opened.enter_context(mmap.mmap(-1, SAMPLE_BYTES))
        for offset in sample_offsets(header):
            nbytes = min(SAMPLE_BYTES, header.file_nbytes - offset)
            try:
                whole = uncached >= 0 and os.preadv(uncached, [block], offset) >= nbytes
            except OSError:
                whole = False
            digest.update(block[:nbytes] if whole else read_exactly(fd, offset, nbytes, path))
    return digest.hexdigest()


def _compare(path: Path, title: str, expected: int | str, present: int | str) -> None:
    if expected != present:
        raise SourceError(
            f"{path} is not the file that was compiled: its {title} was {expected} and is {present}; "
            "put the original back, or compile again"
        )


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
        sentence = f"is not an artifact: {reason}; give the folder that penstock compile wrote"
        raise SourceError(f"{folder} {_of_model(folder) or sentence}") from error


def _of_model(path: Path) -> str:
    """What makes an artifact of a model's folder, or of a file in it; empty for everything else."""
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isfile(folder / "config.json") or not os.path.exists(path):
        return ""
    relation = "is a model's folder" if folder == path else "is a file of a model"
    name = f"{folder.resolve().name}.penstock"
    return (
        f"{relation} and not an artifact: `penstock compile {folder} {name}` makes one of it, and "
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


def check_folder(folder: Path, payload: Payload, beside: Collection[str]) -> None:
    """Raise SourceError for a file that is no part of the artifact, and for bytes that nothing accounts for.

    The bytes of storages, of the payload and of the lowered program have hashes, which others compare, and so
    do headers of weight files; between storages are zeros. `beside` are the names of further files that are
    compared elsewhere. SEEN may hold anything: whoever changes it has files compared again, or not.
    """
    packed = [k for k, file in enumerate(payload.files) if not Path(file.path).is_absolute()]
    accounted = {PAYLOAD, DIGEST, SEEN, *beside, *(payload.files[k].path for k in packed)}
    accounted |= {payload.program.path} if payload.program else set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        inside = (
            path.is_dir()
            and not path.is_symlink()
            and any(file_name.startswith(f"{name}/") for file_name in accounted)
        )
        if not inside and (name not in accounted or path.is_symlink() or not path.is_file()):
            raise SourceError(f"{folder} holds {name}, which is no part of it as it was compiled: remove it")
    for k in packed:
        path = folder / payload.files[k].path
        for start, stop in _between(path, payload, k):
            for chunk in file_chunks(path, start, stop):
                if chunk.count(0) != len(chunk):
                    raise SourceError(
                        f"{path} holds bytes from {start} to {stop} that belong to no weight: it was changed "
                        "since it was compiled; restore it, or compile again"
                    )


def _between(path: Path, payload: Payload, number: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a packed file that neither its header nor a storage has."""
    with open_for_reading(path) as fd:
        reached = len(read_raw_header(fd, path))
    extents = [e for storage in payload.storages for e in storage.extents if e.file == number]
    for start, nbytes in sorted((extent.file_offset, extent.nbytes) for extent in extents):
        if start > reached:
            yield reached, start
        reached = max(reached, start + nbytes)
    if reached < payload.files[number].nbytes:
        yield reached, payload.files[number].nbytes


def verify_weights(payload: Payload, folder: Path, progress: Progress | None) -> int:
    """Hash every weight byte, and return the bytes hashed. Raises SourceError for a weight that changed."""
    names = payload.storage_names()
    in_files = [(s, storage) for s, storage in enumerate(payload.storages) if storage.extents]
    for index, storage in in_files:
        if storage.sha256 is None:
            raise SourceError(
                f"weight {names[index]} cannot be verified: the payload lacks its sha256; compile again"
            )
    total = sum(e.nbytes for _, storage in in_files for e in storage.extents)
    report = count_bytes(progress, "verifying weights", total)
    for index, storage in in_files:
        digest_now = hash_storage(storage, payload.files, folder, progress=report)
        if digest_now != storage.sha256:
            raise SourceError(
                f"weight {names[index]} has changed since it was compiled: its sha256 was "
                f"{storage.sha256} and is {digest_now}; restore the file, or compile again"
            )
    return total
