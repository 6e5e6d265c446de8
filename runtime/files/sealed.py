"""Every byte of an artifact's folder: the payload accounts for it, or it is a zero between two of those."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from penstock.runtime.files.artifact_files import DIGEST, PAYLOAD, SEEN
from penstock.runtime.files.safetensors_file import open_for_reading, read_raw_header
from penstock.runtime.files.stamp import file_chunks
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.payload.codec import Payload


def check_folder(folder: Path, payload: Payload, beside: Collection[str]) -> None:
    """Raise SourceError for a file that is no part of the artifact, and for bytes that nothing accounts for.

    The bytes of storages, of the payload and of the lowered program have hashes, which others compare, and so
    do headers of weight files; between storages are zeros. `beside` are the names of further files that are
    compared elsewhere. SEEN may hold anything: whoever changes it has files compared again, or not.
    """
    packed = [k for k, file in enumerate(payload.files) if not Path(file.path).is_absolute()]
    known = {PAYLOAD, DIGEST, SEEN, *beside, *(payload.files[k].path for k in packed)}
    known |= {payload.program.path} if payload.program else set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        inside = (
            path.is_dir()
            and not path.is_symlink()
            and any(file_name.startswith(f"{name}/") for file_name in known)
        )
        if not inside and (name not in known or path.is_symlink() or not path.is_file()):
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
