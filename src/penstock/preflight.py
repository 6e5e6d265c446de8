"""Whether and how a model will run on hardware that is not here: exported fake, planned, never built."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.passes.activations import activation_bytes
from penstock.passes.annotate import annotate
from penstock.passes.fake_export import Built
from penstock.passes.lines import sentence
from penstock.plan_command import host_of
from penstock.runtime.host_limit import parse_host_memory
from penstock.runtime.memory_split import CUDA_WORKSPACE, MemorySplit
from penstock.schedule import whatif
from penstock.schedule.costs import with_times
from penstock.schedule.errors import BudgetError, PassError, SourceError
from penstock.schedule.host import host_bytes
from penstock.schedule.layout import packed_arena
from penstock.schedule.model import Arena, Hardware, Plan
from penstock.schedule.payload import Payload
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.presets import find_hardware
from penstock.schedule.sizes import format_size, parse_size

_ALIGNMENT = 64


@dataclass(frozen=True)
class Model:
    """A model that was never built: its facts, and what it needs beside weights.

    `cache_bytes` is a key-value cache for the context asked for, which the program itself does not hold.
    """

    name: str
    payload: Payload
    activations: int
    cache_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, storages counted once."""
        return sum(s.nbytes for s in self.payload.storages)

    @property
    def arena(self) -> Arena:
        """One buffer on a device."""
        storages, traces = self.payload.storages, self.payload.traces
        return packed_arena(storages, traces, kind="contiguous", granule=_ALIGNMENT, alignment=_ALIGNMENT)


@dataclass(frozen=True)
class Finding:
    """What came of one budget on one kind of hardware: a plan, or (None) why there is none."""

    hardware: Hardware
    split: MemorySplit
    budget: int
    floor_bytes: int
    plan: Plan | None
    verdict: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        plan, split = self.plan, self.split
        found = {
            "hardware": self.hardware.name,
            "runs": plan is not None,
            "budget_bytes": self.budget,
            "floor_bytes": self.floor_bytes,
            "device_bytes": self.budget + split.activations + split.workspace + split.reserved,
            "activation_bytes": split.activations,
            "cache_bytes": split.reserved,
            "verdict": list(self.verdict),
        }
        if plan is None:
            return found
        return found | {
            "seconds_per_pass": plan.predicted_seconds,
            "lower_bound_seconds": plan.lower_bound_seconds,
            "streamed_bytes_per_pass": plan.streamed_bytes,
            "host_bytes": host_bytes(plan),
            "disk_bytes_per_pass": sum(sum(s.staged) for s in plan.schedules),
        }


def read_model(source: str, *, tokens: int = 1, context: int = 0, dtype: str | None = None) -> Model:
    """Export the model of a transformers `config.json` (or its folder), or of `module:function`, fake.

    The function returns a module and its example inputs. `tokens` is the length of the call, `context` that
    of a key-value cache, `dtype` replaces that of the configuration.

    Raises SourceError for what cannot be read, PassError, with the line, for what does not export.
    """
    build, inputs = open_source(source, tokens=tokens, dtype=dtype)
    exported = Built.by(build, "cuda").export(inputs())
    cache = 0
    if context and Path(source).exists():
        cache = context * _cache_bytes_per_token(_read_config(Path(source)), dtype)
    return Model(source, annotate(exported), activation_bytes(exported), cache)


Inputs = Callable[[], Sequence[Any] | Mapping[str, Any]]


def open_source(
    source: str, *, tokens: int = 1, dtype: str | None = None
) -> tuple[Callable[[], nn.Module], Inputs]:
    """What builds the model of a configuration or of `module:function`, and, once it has, example inputs.

    Raises SourceError for what cannot be read.
    """
    path = Path(source)
    if not path.exists():
        return _from_factory(source)
    config = _read_config(path)
    inputs = _inputs(config, source, tokens)
    return _builder(config, source, dtype), lambda: inputs


def find(model: Model, hardware: str, budget: str | None, host_memory: str | None = None) -> Finding:
    """Plan a model for a preset; `budget` None is all that its memory leaves for weights."""
    machine = find_hardware(hardware)
    storages, arena = model.payload.storages, model.arena
    traces = [with_times(trace, machine) for trace in model.payload.traces]
    total = machine.memory_nbytes or model.weight_bytes
    split = MemorySplit(total, model.activations, CUDA_WORKSPACE, model.cache_bytes)
    asked = split.weights if budget is None else parse_size(budget, total=model.weight_bytes)
    asked = max(0, min(asked, model.weight_bytes))
    least = floor(storages, traces, arena).upper_bytes
    names = model.payload.storage_names()

    def plan(nbytes: int) -> Plan:
        return make_plan(
            storages,
            traces,
            arena,
            budget=nbytes,
            hardware=machine,
            names=names,
            host_memory=parse_host_memory(host_memory, model.weight_bytes),
        )

    try:
        found = plan(asked)
    except BudgetError as error:
        return Finding(machine, split, asked, least, None, (f"It does not run: {error}.",))
    more = plan(asked + whatif.GIGABYTE) if found.streamed_bytes and host_memory is None else None
    policies = whatif.point_of(found, storages, host_of(machine)).policies
    verdict = (*_room(split, asked, machine), *whatif.verdict(found, policies, more))
    return Finding(machine, split, asked, least, found, verdict)


def _room(split: MemorySplit, budget: int, machine: Hardware) -> Iterator[str]:
    """What to say of the device's memory, beside weights."""
    if machine.memory_nbytes is not None and budget > split.weights:
        yield (
            f"It does not fit into {machine.name}: {format_size(budget)} for weights beside {split}; "
            f"give at most {format_size(max(0, split.weights))}."
        )


def _from_factory(source: str) -> tuple[Callable[[], nn.Module], Inputs]:
    function = _function(source)
    given: list[Any] = []

    def build() -> nn.Module:
        found = function()
        if not isinstance(found, tuple) or len(found) != 2:
            raise PassError(f"{source} returns {type(found).__name__}, expected a module and example inputs")
        given.append(found[1])
        return found[0]  # type: ignore[no-any-return]

    return build, lambda: given[0]


def _function(source: str) -> Callable[[], Any]:
    module, _, name = source.partition(":")
    if not name:
        raise SourceError(
            f"{source} is neither a file that exists nor module:function: give a transformers config.json, "
            "its folder, or a function that returns a module and its example inputs"
        )
    try:
        with _here():
            found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"{source} cannot be imported: {error}") from error
    if not callable(found):
        raise SourceError(f"{source} is {type(found).__name__}, expected a function")
    return found  # type: ignore[no-any-return]


@contextmanager
def _here() -> Iterator[None]:
    """Modules in the current folder can be imported, as with `python -m`."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.remove(str(Path.cwd()))


def _read_config(path: Path) -> Any:
    """A transformers configuration; only local files are read."""
    from transformers import AutoConfig

    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name != "config.json":
        raise SourceError(f"{path} is not a config.json: give that, its folder, or module:function")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise SourceError(f"{path} is no configuration that transformers knows: {sentence(error)}") from error


def _builder(config: Any, source: str, dtype: str | None) -> Callable[[], nn.Module]:
    import transformers

    names = getattr(config, "architectures", None) or ()
    model = getattr(transformers, names[0], None) if names else None
    if model is None:
        raise SourceError(
            f"{source} names the architectures {list(names)}, of which this transformers has none: give a "
            "function that builds the model (module:function)"
        )

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(_dtype(config, dtype))
        try:
            built: nn.Module = model(config)
            return built
        finally:
            torch.set_default_dtype(before)

    return build


def _dtype(config: Any, dtype: str | None) -> torch.dtype:
    found = dtype or getattr(config, "dtype", None) or torch.float32
    found = getattr(torch, found, None) if isinstance(found, str) else found
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SourceError(f"there is no dtype {dtype!r} for weights: give bfloat16, float16 or float32")
    return found


def _inputs(config: Any, source: str, tokens: int) -> dict[str, Any]:
    """What a forward call takes, by the configuration's kind."""
    text = config.get_text_config()
    if getattr(text, "vocab_size", None):
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        inputs: dict[str, Any] = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            return inputs | {"decoder_input_ids": ids.clone(), "use_cache": False}
        return inputs | ({"use_cache": False} if hasattr(text, "use_cache") else {})
    if getattr(config, "image_size", None) and getattr(config, "num_channels", None):
        side = config.image_size
        return {"pixel_values": torch.zeros(1, config.num_channels, side, side, dtype=_dtype(config, None))}
    raise SourceError(
        f"{source} does not tell what its model takes: give module:function, with example inputs"
    )


def _cache_bytes_per_token(config: Any, dtype: str | None) -> int:
    """Keys and values of all layers for one token (0 where the configuration has no heads)."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    layers, width = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
    size = getattr(text, "head_dim", None) or (width // text.num_attention_heads if heads else 0)
    return 2 * int(layers) * int(heads or 0) * int(size) * _dtype(config, dtype).itemsize
