"""Whether the shards of a checkpoint belong together, by their names and by their index."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from penstock.schedule.facts.errors import SourceError

_log = logging.getLogger(__name__)

_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")


def find_index(path: Path) -> Path | None:
    """The index that `path` is, or that the folder `path` has."""
    if path.is_dir():
        return next(iter(sorted(path.glob(f"*{_INDEX}"))), None)
    return path if path.name.endswith(_INDEX) else None


def check_names(files: Iterable[Path]) -> None:
    """Refuse shards without an index whose own names (`NAME-00001-of-00003`) say that some are missing.

    Raises SourceError also for shards of two numbers of them.
    """
    sets: dict[tuple[Path, str, str], dict[int, list[tuple[int, Path]]]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match:
            name, number, count, suffix = match.groups()
            counts = sets.setdefault((file.parent, name, suffix), {})
            counts.setdefault(int(count), []).append((int(number), file))
    for counts in sets.values():
        (count, shards), *others = counts.items()
        if others:
            raise SourceError(
                f"{shards[0][1]} and {others[0][1][0][1].name} are shards of different checkpoints "
                f"(of {count} and of {others[0][0]}): give the files of one"
            )
        numbers = {number for number, _ in shards}
        first = 0 if 0 in numbers else 1
        missing = (number for number in range(first, first + count) if number not in numbers)
        named = ", ".join(map(str, islice(missing, 5)))
        if named:
            raise SourceError(
                f"{shards[0][1]} is one of {count} shards, of which are not given: {named}; complete the "
                "checkpoint, or name the tensors that are needed (only=)"
            )


def note_total(index: Path, nbytes: Mapping[Path, int]) -> None:
    """Say where an index's `metadata.total_size` is not what its files hold: `nbytes` of tensors in each.

    Published ones are often wrong, above all where weights are tied, so that alone is no error.
    """
    fields = json.loads(index.read_bytes())
    metadata = fields.get("metadata")
    expected = metadata.get("total_size") if isinstance(metadata, dict) else None
    files = {(index.parent / name).resolve() for name in fields["weight_map"].values()}
    found = sum(nbytes[file] for file in files)
    if isinstance(expected, int) and expected != found:
        _log.warning(
            "%s gives total_size as %s bytes and its files hold %s: the index is wrong, as many are, or they "
            "are not of one checkpoint",
            index,
            f"{expected:,}",
            f"{found:,}",
        )
