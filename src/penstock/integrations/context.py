"""How long a context may become within a cap: what a token of it takes, by the configuration of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from penstock.schedule.facts.sizes import format_budget, format_size


class TokenBytes(NamedTuple):
    """The bytes that a token of a context takes.

    Attributes:
        lasting: In the caches of layers that attend to all tokens.
        passing: In the caches of layers that attend to the last `window` tokens.
        window: The number of these tokens.
        computing: In the call that reads the token as part of a prompt: one layer's activations.
    """

    lasting: int
    passing: int
    window: int
    computing: int


def token_bytes(module: nn.Module) -> TokenBytes | None:
    """Return what a token takes in a decoder of transformers; None for other modules."""
    config = getattr(module, "config", None)
    can_generate = getattr(module, "can_generate", None)
    if config is None or can_generate is None or not can_generate() or config.is_encoder_decoder:
        return None
    config = config.get_text_config(decoder=True)
    layers, hidden, heads = (
        _most(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not (layers and hidden and heads):
        return None
    head = _most(config, "head_dim") or hidden // heads
    dtype: Any = module.dtype
    nbytes = dtype.itemsize
    each = 2 * (_most(config, "num_key_value_heads") or heads) * head * nbytes
    if _most(config, "kv_lora_rank"):  # keys and values of all heads are kept
        sizes = sum(_most(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        each = heads * sizes * nbytes
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    near = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    window = _most(config, "sliding_window") or _most(config, "attention_chunk_size")
    wide = _most(config, "intermediate_size") or 4 * hidden
    if experts := _most(config, "num_experts_per_tok"):
        wide = max(wide, (_most(config, "moe_intermediate_size") or wide) * experts)
    computing = (4 * hidden + 2 * heads * head + 3 * wide) * nbytes
    return TokenBytes(full * each, near * each, window, computing)


def _most(config: Any, name: str) -> int:
    """Return a number of a configuration, the largest where layers have their own; 0 where it is none."""
    value = getattr(config, name, None)
    numbers = value if isinstance(value, list | tuple) else [value]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def largest_context(token: TokenBytes, left: int) -> int | None:
    """Return the tokens that fit `left` bytes; None where a longer context takes no more."""
    tokens = left // (token.lasting + token.passing + token.computing)
    if token.window and tokens > token.window:
        tokens = (left - token.window * token.passing) // (token.lasting + token.computing)
    return None if not token.lasting and tokens > token.window else tokens


def context_that_fits(module: nn.Module, room: int, largest: int, memory: int) -> str | None:
    """A sentence about the largest context that fits `room`, with `largest` bytes of weights, or None."""
    token = token_bytes(module)
    tokens = None if token is None else largest_context(token, max(0, room - largest))
    if token is None or not tokens:
        return None
    return (
        f"a context of about {tokens:,} tokens fits {format_budget(memory)}: each takes "
        f"{format_size(token.lasting + token.passing)} in the cache"
    )
