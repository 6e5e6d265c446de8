"""Accepts identical copies of the weight files that an artifact refers to in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from penstock.runtime.files.artifact_files import note_seen, read_payload, replace_payload
from penstock.runtime.files.safetensors_file import own_place, reading
from penstock.runtime.files.stamp import Progress, compare_header, stamp_file
from penstock.runtime.program import Program, read_program
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import WeightFile


def relink(
    path: str | PathLike[str],
    files: Sequence[str | PathLike[str]] = (),
    *,
    progress: Progress | None = None,
    trust: bool = False,
) -> Program:
    """Let the artifact `path` refer to `files`, copies of its weight files, and read it, as `open` does.

    Each of `files` replaces the weight file of its name, or the only weight file; it may also be a folder
    with such files. A weight file that is not replaced is looked for at its recorded path. Every byte of the
    weights is compared with the hash taken at compile time; then paths and stamps are written anew, in one
    step.

    Raises SourceError for a file that is missing or has other bytes, and for an artifact that refers to no
    files in place. The artifact then stays as it was.
    """
    folder = Path(path)
    new_files = [Path(file) for file in files]
    with reading(folder):
        places = [file.resolve() if file.is_dir() else own_place(file) for file in new_files]
        relinked = _relinked(folder, places)
    with reading(folder):
        paths = [file.path for file in relinked.payload.files if Path(file.path).is_absolute()]
        seen = {path: os.stat(path).st_ctime_ns for path in paths}
    relinked.verify(progress)
    replace_payload(folder, relinked.payload)
    note_seen(folder, seen)
    return read_program(folder, trust=trust)


def _relinked(folder: Path, files: Sequence[Path]) -> Program:
    """The program of an artifact over other files, whose sizes and headers are those of its own."""
    payload = read_payload(folder)
    in_place = [file for file in payload.files if Path(file.path).is_absolute()]
    if not in_place:
        raise SourceError(f"{folder} holds its weights itself: there is nothing to relink")
    places = _places(in_place, files)
    stamped = tuple(_stamped(file, places[file.path]) if file in in_place else file for file in payload.files)
    return Program(folder, replace(payload, files=stamped))


def _places(in_place: Sequence[WeightFile], new_files: Sequence[Path]) -> dict[str, Path]:
    """The new path of each weight file, by its path in the payload."""
    names = {file.path: Path(file.path).name for file in in_place}
    places = {path: Path(path) for path in names}
    for place in new_files:
        if not place.exists():
            raise SourceError(f"there is no file or folder {place}")
        if place.is_dir():
            places |= {path: place / name for path, name in names.items() if (place / name).exists()}
            continue
        meant = [path for path, name in names.items() if name == place.name or len(names) == 1]
        if len(meant) != 1:
            problem = "is the name of several weight files" if meant else "is the name of no weight file"
            raise SourceError(f"{place} {problem} of the artifact, which refers to {', '.join(names)}")
        places[meant[0]] = place
    return places


def _stamped(file: WeightFile, place: Path) -> WeightFile:
    """The stamp of a copy of a weight file; SourceError if its size or header differ."""
    stamp = stamp_file(place, recorded_path=str(place))
    compare_header(place, file, stamp)
    return stamp
