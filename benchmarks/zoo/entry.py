"""The entry of a model in the zoo: functions that make it, call it, and write and read its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.runtime.checkpoint.binding import Rename


def save(model: Any, folder: Path) -> None:
    """Write a model as its library writes it."""
    model.save_pretrained(folder)


def load(model: Any, folder: Path) -> nn.Module:
    """A second model of the class of `model`, as the library reads it."""
    loaded: nn.Module = type(model).from_pretrained(folder)
    return loaded


def itself(model: nn.Module) -> nn.Module:
    """The model itself, as the module that is exported."""
    return model


@dataclass(frozen=True)
class Entry:
    """One model: `build` is its constructor, `inputs` are the keyword arguments of a call.

    `wrap` turns the library's model into the module that is exported. `rename` and `ignore` are what
    `penstock.bind` gets; without a `rename` the library's own names are looked up. `hollow` gives another
    constructor of what is exported, where only the checkpoint tells it all.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    wrap: Callable[[nn.Module], nn.Module] = itself
    rename: Rename = None
    ignore: tuple[str, ...] = ()
    write: Callable[[nn.Module, Path], None] = save
    load: Callable[[nn.Module, Path], nn.Module] = load
    hollow: Callable[[Path], Callable[[], nn.Module]] | None = None

    def exports(self, checkpoint: Path) -> Callable[[], nn.Module]:
        """What builds the module that is exported."""
        build = self.hollow(checkpoint) if self.hollow else self.build
        return lambda: self.wrap(build())


def noise(*shape: int) -> torch.Tensor:
    """Random values that are equal on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
