"""Recognises weight files: a stamp that is quick at any size, and full hashes for verification.

A stamp holds size, modification time, inode, the sha256 of length prefix and header, and the
sha256 of sampled blocks. It catches another model of the same shapes; an edit that misses every
sampled block and keeps the modification time is caught only by the full hashes.
"""

from __future__ import annotations

from pathlib import Path

from penstock.schedule.errors import SourceError
from penstock.schedule.model import WeightFile


def stamp_file(path: Path, *, recorded_path: str) -> WeightFile:
    raise NotImplementedError


def check_stamp(file: WeightFile, folder: Path, *, in_place: bool) -> None:
    raise NotImplementedError


def check_open_file(fd: int, path: Path, file: WeightFile, *, in_place: bool) -> None:
    raise NotImplementedError


def locate(file: WeightFile, folder: Path) -> Path:
    return folder / file.path


def open_error(path: Path, error: OSError) -> SourceError:
    return SourceError(f"{path} cannot be opened: {error.strerror}")
