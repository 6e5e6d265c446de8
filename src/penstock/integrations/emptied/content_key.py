"""By what an artifact in the cache is known: equal content has one, in any process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from penstock._version import __version__
from penstock.passes.building.fake_export import with_computed_buffers


def content_key(programs: Mapping[str, ExportedProgram], weights: Sequence[Path], lowering: str) -> str:
    """A name for what programs compute, over which files as they are now, with which versions."""
    states = [path.stat() for path in weights]
    stamps = [(state.st_size, state.st_mtime_ns, state.st_ino) for state in states]  # used in place
    versions = f"{lowering} {torch.__version__} {__version__}"
    digest = hashlib.sha256(f"{versions} {weights} {stamps}".encode())
    for name, exported in programs.items():
        text = exported.graph_module.print_readable(
            print_output=False, include_stride=True, include_device=True
        )
        facts = (name, text, exported.graph_signature, exported.range_constraints, exported._guards_code)
        digest.update(repr(facts).encode())
        for key, value in with_computed_buffers(exported).constants.items():
            digest.update(key.encode())
            digest.update(_bytes_of(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    return digest.hexdigest()[:32]


def _bytes_of(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())
