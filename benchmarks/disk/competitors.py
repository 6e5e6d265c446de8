"""The competitors: penstock, its peers, the plain module in memory, and the bare disk.

`prepare` writes the files that a competitor keeps on disk, in a process of its own; `load` returns a
function to call. All competitors use one module and one weights file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.disk.cases import load_weights, make_inputs, make_meta_module
from benchmarks.disk.reader import Reader, Way
from penstock import LoadOptions

PEERS = ("accelerate", "diffusers", "mmap")


@dataclass(frozen=True)
class Job:
    """One competitor in one case, `way` in its table; JSON carries it to the process that runs it."""

    way: str
    competitor: str
    model: str
    nbytes: int
    tokens: int
    weights: str
    folder: str
    budget: int = 0
    engine: str = "auto"
    reader: tuple[Way, int, int] = ("direct", 1, 1 << 20)


@dataclass(frozen=True)
class Loaded:
    """A competitor that is ready: `call` runs one forward pass.

    `files` hold the weights that it reads while running. `unmaps` says that its mappings of them
    may be dropped to make a cold cache. `counters` are totals since it was loaded.
    """

    call: Callable[[], Tensor | None]
    files: tuple[Path, ...] = ()
    unmaps: bool = True
    counters: Callable[[], dict[str, float]] = dict
    close: Callable[[], object] = lambda: None


def prepare(job: Job) -> None:
    """Write the artifact or offload folder of the job's competitor, all of it or nothing.

    An offload folder depends on nothing but the weights it is named after, and is made once.
    """
    folder = Path(job.folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if job.competitor == "penstock":
        _compile(job, folder)
    elif job.competitor in _OFFLOAD and not folder.exists():
        module = make_meta_module(job.model, job.nbytes)
        load_weights(module, Path(job.weights), in_memory=False)
        _OFFLOAD[job.competitor](module, partial)
        partial.rename(folder)
    os.sync()


def load(job: Job, module: nn.Module) -> Loaded:
    """The job's competitor, ready to be called; it must have been prepared. `module` is on meta."""
    if job.competitor == "raw":
        return _load_raw(job)
    if job.competitor == "penstock":
        return _load_penstock(job, make_inputs(module, job.tokens))
    return _load_module(job, module)


def _load_module(job: Job, module: nn.Module) -> Loaded:
    weights = Path(job.weights)
    load_weights(module, weights, in_memory=job.competitor == "memory")
    files: tuple[Path, ...] = (weights,) if job.competitor == "mmap" else ()
    if job.competitor in _OFFLOAD:
        _OFFLOAD[job.competitor](module, Path(job.folder))
        files = _list_files(Path(job.folder))
    inputs = make_inputs(module, job.tokens)

    def call() -> Tensor:
        with torch.no_grad():
            output: Tensor = module(*inputs)
        return output

    return Loaded(call, files)


def _offload_accelerate(module: nn.Module, folder: Path) -> None:
    from accelerate import disk_offload

    disk_offload(module, folder, execution_device=torch.device("cpu"))


def _offload_diffusers(module: nn.Module, folder: Path) -> None:
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    apply_group_offloading(
        module,
        onload_device=cpu,
        offload_device=cpu,
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(folder),
    )


# Each replaces the module's weights by hooks that bring them from the folder, filled on first use.
_OFFLOAD = {"accelerate": _offload_accelerate, "diffusers": _offload_diffusers}


def _compile(job: Job, folder: Path) -> None:
    import penstock

    # Mapped weights: exporting must not need the memory that the program is to do without.
    weights = Path(job.weights)
    module = make_meta_module(job.model, job.nbytes)
    load_weights(module, weights, in_memory=False)
    with torch.no_grad():
        exported = torch.export.export(module, make_inputs(module, job.tokens))
    penstock.compile(exported, folder, weights=weights)


def _load_penstock(job: Job, inputs: tuple[Tensor, ...]) -> Loaded:
    import penstock

    program = penstock.open(job.folder)
    module = program.load(budget=job.budget, device="cpu", options=LoadOptions(engine=job.engine))
    files = _list_files(Path(job.folder))

    def call() -> Tensor:
        with torch.no_grad():
            output: Tensor = module(*inputs)
        return output

    def count() -> dict[str, float]:
        stats = module.stats
        return {
            "bytes_moved": stats.bytes_moved,
            "misses": stats.misses,
            "stall_seconds": stats.stall_seconds,
        }

    return Loaded(call, files, unmaps=False, counters=count, close=module.close)


def _load_raw(job: Job) -> Loaded:
    weights = Path(job.weights)
    reader = Reader(*job.reader)
    nbytes = weights.stat().st_size

    def call() -> None:
        reader.read(weights, nbytes)

    return Loaded(call, (weights,))


def _list_files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
