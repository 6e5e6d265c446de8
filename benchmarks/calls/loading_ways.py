"""The ways of loading, reading and saving a checkpoint that benchmarks/calls/loading.py measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PIECE = 2 << 20


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget_pages(folder: Path) -> None:
    for path in shards(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm_pages(folder: Path) -> None:
    for path in shards(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def load_plain(folder: Path) -> Any:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for path in shards(folder):
        model.load_state_dict(load_file(path), strict=False)
    return model.eval()


def load_assign(folder: Path) -> Any:
    from accelerate import init_empty_weights
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for path in shards(folder):
        model.load_state_dict(load_file(path), strict=False, assign=True)
    return model.eval()


def load_accelerate(folder: Path) -> Any:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}).eval()


def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def load_penstock(folder: Path, budget: str) -> Any:
    import penstock

    return penstock.open(folder / "model.penstock").load(budget)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "plain": load_plain,
    "assign": load_assign,
    "accelerate": load_accelerate,
    "transformers": load_transformers,
    "penstock 25%": lambda folder: load_penstock(folder, "25%"),
    "penstock 100%": lambda folder: load_penstock(folder, "100%"),
}


def read_alone(folder: Path, *, new_memory: bool) -> float:
    """Seconds in which three readers bring all bytes of the shards, past the page cache where it is cold.

    The bytes go repeatedly into one area of 64 MiB, or each into new memory.
    """
    from concurrent.futures import ThreadPoolExecutor

    import penstock
    from penstock.runtime.files.source import open_source
    from penstock.runtime.system.threads import READERS

    program = penstock.open(folder / "model.penstock")
    payload = program.payload
    with open_source(payload.files, program.path, storages=payload.storages) as source:
        pieces = [
            (number, at, min(PIECE, file.nbytes - at))
            for number, file in enumerate(source.files)
            for at in range(0, file.nbytes, PIECE)
        ]

        room = len(pieces) * PIECE if new_memory else 64 << 20
        memory = (torch.empty if new_memory else torch.zeros)(room, dtype=torch.uint8)
        slots = [memory.data_ptr() + at for at in range(0, room, PIECE)]

        def read(number: int) -> None:
            file, at, nbytes = pieces[number]
            source.read_into(file, at, slots[number % len(slots)], nbytes)

        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, range(len(pieces))))
        return time.perf_counter() - began


def save(way: str, folder: Path, target: Path) -> None:
    """Write the checkpoint once more, in one of the ways."""
    if way == "penstock convert":
        from penstock.runtime.checkpoint.convert import convert

        convert(folder, target, shard_size="500MB")
        return
    model = load_transformers(folder)
    if way == "save_pretrained":
        model.save_pretrained(target, max_shard_size="500MB")
        return
    from safetensors.torch import save_file

    target.mkdir()
    save_file(model.state_dict(), target / "model.safetensors")
