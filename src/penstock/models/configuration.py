"""A transformers configuration: the model that it builds, its inputs, and the names of its weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock._extras import require
from penstock.schedule.bounded_file import open_bounded, read_bounded
from penstock.schedule.facts.errors import SourceError

_STACKED = [("MergeModulelist", 0)]
_STACKED_SIDE_BY_SIDE = [("MergeModulelist", 0), ("Concatenate", 1)]
_ONE_AFTER_ANOTHER = [("Concatenate", 0)]


def names_in_checkpoint(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of a checkpoint that make up each weight of another name, in the form that `rename=` takes.

    `names` are the names of the checkpoint's tensors. `model` may be on the meta device. The library renames
    tensors while it loads them, and stacks those of experts: the rows of a stacked weight are the rows of its
    tensors, one after another. Weights that it makes in another way are left out. The result is empty for a
    model that is not of transformers.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return {}
    if not isinstance(model, PreTrainedModel):
        return {}
    conversions: dict[str, list[tuple[str, Any, str | None]]] = {}
    for name, fqn, converter, pattern in _conversions(model, names):
        conversions.setdefault(fqn, []).append((name, converter, pattern))
    result = {fqn: _in_order(sources) for fqn, sources in conversions.items()}
    return {fqn: order for fqn, order in result.items() if order and order != (fqn,)}


def _conversions(model: Any, names: Iterable[str]) -> Iterable[tuple[str, str, Any, str | None]]:
    """Yields each tensor's name, the weight that it becomes part of, its conversion, and its pattern."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    weights = model.state_dict()
    for name in names:
        fqn, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, weights)
        if fqn in weights:
            yield name, fqn, by_pattern.get(pattern), pattern


def _in_order(sources: Sequence[tuple[str, Any, str | None]]) -> tuple[str, ...]:
    """The tensors whose rows, one after another, are a weight's rows; () if there is no such order."""
    converter = sources[0][1]
    if converter is None:
        return (sources[0][0],) if len(sources) == 1 else ()
    operations = [(type(action).__name__, getattr(action, "dim", None)) for action in converter.operations]
    by_pattern: dict[str | None, list[str]] = {pattern: [] for pattern in converter.source_patterns}
    for name, _, pattern in sources:
        by_pattern[pattern].append(name)

    def numbers_in(name: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", name)]

    lists = [sorted(matching, key=numbers_in) for matching in by_pattern.values()]
    if operations == _STACKED:
        return tuple(lists[0]) if len(lists) == 1 else ()
    if operations == _ONE_AFTER_ANOTHER:
        return tuple(name for matching in lists for name in matching)
    if operations == _STACKED_SIDE_BY_SIDE and len({len(matching) for matching in lists}) == 1:
        return tuple(name for together in zip(*lists, strict=True) for name in together)
    return ()


DTYPES = ("bfloat16", "float16", "float32")


def read_config(path: Path) -> Any:
    """Read the configuration in a `config.json` or its folder; only local files are read.

    Raises SourceError for what is not one, and MissingExtraError without transformers.
    """
    require("transformers", purpose="a model's configuration")
    from transformers import AutoConfig

    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name != "config.json":
        raise SourceError(f"{path} is not a config.json: give that, its folder, or module:function")
    if not (folder / "config.json").is_file():
        raise SourceError(f"{folder} holds no config.json: give a model's folder, or module:function")
    _check_size(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = ""
        if "custom code" in reason:
            reason = "it needs code of its own"
            hint = (
                ": load it with that and give it to penstock.integrations.apply, or a command module:function"
            )
        raise SourceError(f"{path} is no configuration that transformers knows: {reason}{hint}") from error


def _check_size(folder: Path) -> None:
    """Raise SourceError for a configuration that is too large to be one, also one that it refers to."""
    facts_beside: Any = ()
    try:
        facts = json.loads(read_bounded(folder / "config.json", "a configuration"))
        facts_beside = facts.get("configuration_files")
    except (ValueError, RecursionError, AttributeError):  # transformers says what is wrong with it
        return
    for name in facts_beside if isinstance(facts_beside, list) else ():
        if isinstance(name, str) and (path := folder / name).is_file():
            with open_bounded(path, "a configuration"):
                pass


def model_class(config: Any, source: str) -> Any:
    """The class of a configuration's model. Raises SourceError if transformers has no such class."""
    import transformers

    names = getattr(config, "architectures", None) or ()
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    model = None
    with suppress(ImportError, RuntimeError):  # a class may need what is not installed
        model = getattr(transformers, names[0], None) if named and names else None
    if isinstance(model, type) and issubclass(model, transformers.PreTrainedModel):
        return model
    unknown = f"names the architectures {names!r:.200}, of which this transformers has none"
    raise SourceError(
        f"{source} {unknown if names else 'names no architectures'}: "
        + ("" if names else 'add them ("architectures": ["LlamaForCausalLM"]), or ')
        + "load it with its own code and give it to penstock.integrations.apply; commands take a function "
        "that builds it (module:function)"
    )


def builder(config: Any, source: str, dtype: str | None) -> Callable[[], nn.Module]:
    """A function that builds the model of a configuration in `dtype`, by default the configuration's.

    As the library does when it loads, the model's configuration, and those inside it, say that dtype then.
    """
    model, wanted = model_class(config, source), dtype_of(config, dtype)
    copied = copy.deepcopy(config)
    for part in (copied, *(getattr(copied, name, None) for name in copied.sub_configs)):
        if part is not None:
            part.dtype = wanted

    def build() -> nn.Module:
        with default_dtype(wanted):
            built: nn.Module = model(copied)
        _keep_dtypes(built, wanted)
        return built

    return build


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build modules in this dtype while the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _keep_dtypes(model: Any, wanted: torch.dtype) -> None:
    """Convert the weights that the library keeps in float32 (T5's `wo` in float16, some routers) to it."""
    for pattern, dtype in model._get_dtype_plan(wanted).items():
        for name, value in model.state_dict(keep_vars=True).items():
            if re.search(pattern.replace("*", ".*"), name):
                value.data = value.data.to(dtype)


def dtype_of(config: Any, dtype: str | None) -> torch.dtype:
    """The dtype asked for, or the configuration's, or float32. Raises SourceError for no float."""
    asked = dtype or getattr(config, "dtype", None) or torch.float32
    chosen = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise SourceError(f"there is no dtype {asked!r} for weights: give {', '.join(DTYPES)}")
    return chosen


def inputs_of(config: Any, source: str, *, tokens: int, dtype: str | None) -> dict[str, Any]:
    """Inputs of a call of `tokens` tokens, for the main input of the model's class. Raises SourceError."""
    name = getattr(model_class(config, source), "main_input_name", None)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    wanted = dtype_of(config, dtype)
    decoder = {"decoder_input_ids": ids, "use_cache": False}
    if name == "input_ids":
        inputs: dict[str, Any] = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False):
            return inputs | decoder
        return inputs | ({"use_cache": False} if hasattr(config.get_text_config(), "use_cache") else {})
    if name == "pixel_values" and _has(config, "image_size", "num_channels"):
        side = config.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width, dtype=wanted)}
    if name == "input_features" and _has(config, "num_mel_bins", "max_source_positions", "decoder_layers"):
        frames = 2 * config.max_source_positions
        return {"input_features": torch.zeros(1, config.num_mel_bins, frames, dtype=wanted), **decoder}
    raise SourceError(
        f"{source} does not tell what its model takes{f' as {name}' if name else ''}: "
        "give module:function, with example inputs"
    )


def cache_bytes_per_token(config: Any, source: str, dtype: str | None) -> int:
    """Bytes of keys and values of all layers for one token; 0 for a model that does not generate."""
    if not model_class(config, source).can_generate():
        return 0
    text = config.get_text_config()
    heads = _first(text, "num_key_value_heads", "decoder_attention_heads", "num_attention_heads")
    layers = _first(text, "num_decoder_layers", "decoder_layers", "num_hidden_layers")
    size = _first(text, "head_dim", "d_kv")
    if not size and heads:
        all_heads = _first(text, "decoder_attention_heads", "num_attention_heads")
        size = _first(text, "hidden_size") // (all_heads or heads)
    return 2 * layers * heads * size * dtype_of(config, dtype).itemsize


def notes_of(config: Any) -> tuple[str, ...]:
    """Sentences about parts of a configuration that the built model leaves out."""
    quantised = getattr(config, "quantization_config", None)
    if not quantised:
        return ()
    asked = quantised if isinstance(quantised, dict) else vars(quantised)
    method = getattr(asked.get("quant_method"), "value", asked.get("quant_method"))
    return (f"the quantisation ({method or 'unnamed'}) is not applied: weights count in their full dtype",)


def _has(config: Any, *names: str) -> bool:
    return all(getattr(config, name, None) for name in names)


def _first(config: Any, *names: str) -> int:
    return next((int(length) for name in names if (length := getattr(config, name, None))), 0)
