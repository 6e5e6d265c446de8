"""Trains a small mixture of experts on text that every machine has, and records the routes of other text.

No checkpoint is downloaded: transformers' OLMoE, with as many experts as the real one has in a layer, learns
Python's own documentation and sources with the load-balancing loss of its paper, layer by layer. Then a
program of penstock reads text that was kept apart, one token a call, and records which experts each token
asked for. `replay.py` replays the file. The seed decides everything, on one version of Python and
torch and one kind of processor.
"""

from __future__ import annotations

import math
import mmap
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer

import penstock
from benchmarks.experts.mixture import RESULTS, routes_path
from benchmarks.ways import scratch

KINDS = ("prose", "sources")
WINDOW = 320
"""Tokens that the model sees at once while it learns, and at most while routes are recorded."""

_APART = 16
"""One of so many texts is not trained on."""


def texts(kind: str, *, apart: bool) -> Iterator[str]:
    """Topics of Python's documentation, or files of its library: those kept apart, or all others."""
    if kind == "prose":
        found = dict(topics)
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        paths = (
            path
            for folder in (".", "asyncio", "email", "http", "json")
            for path in (library / folder).glob("*.py")
        )
        found = {str(path.relative_to(library)): path.read_text("utf-8") for path in sorted(paths)}
    for name, text in sorted(found.items()):
        if (zlib.crc32(name.encode()) % _APART == 0) == apart:
            yield text


def make_tokenizer(words: int) -> Any:
    """Pairs of bytes that are frequent in the texts to learn become tokens, `words` of them."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    learned = (text for kind in KINDS for text in texts(kind, apart=False))
    tokenizer.train_from_iterator(learned, vocab_size=words, show_progress=False)
    return tokenizer


def make_model(*, layers: int, experts: int, asked: int, words: int, width: int = 128) -> Any:
    """A mixture of OLMoE's kind in float32, with random weights."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        **{"vocab_size": words, "hidden_size": width, "intermediate_size": width // 2},
        **{"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"num_experts": experts, "num_experts_per_tok": asked, "max_position_embeddings": WINDOW},
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    )
    return OlmoeForCausalLM(config)


def train(model: Any, tokens: torch.Tensor, *, steps: int, batch: int = 8, seed: int = 0) -> Iterator[float]:
    """Adam, with a rate that rises and falls; yields the loss of each step without what balances experts."""
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 2e-3 * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for _ in range(steps):
        starts = torch.randint(len(tokens) - WINDOW, (batch,), generator=generator)
        given = torch.stack([tokens[start : start + WINDOW] for start in starts.tolist()])
        out = model(given, labels=given, output_router_logits=True, use_cache=False)
        uneven = [
            load_balancing_loss_func((logits,), model.config.num_experts, model.config.num_experts_per_tok)
            for logits in out.router_logits
        ]
        loss: Any = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), given[:, 1:].flatten()
        )
        optimizer.zero_grad()
        (loss + 0.01 * torch.stack(uneven).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        yield loss.item()


def export(model: Any) -> torch.export.ExportedProgram:
    """A program that reads one token a call, and keeps a cache of those that it has read."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model.generation_config.cache_implementation = "static"
    decoder = TorchExportableModuleWithStaticCache(model.eval(), 1, WINDOW, torch.device("cpu"))
    zero = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        return torch.export.export(decoder, (), {"input_ids": zero.view(1, 1), "cache_position": zero})


def record(program: penstock.Program, budget: int, tokens: torch.Tensor, path: Path) -> float:
    """Write the routes of the tokens; returns the mean loss of predicting each of them, in nats."""
    losses = []
    with program.load(budget, keep=["*embed_tokens*"]) as module, torch.no_grad():
        with module.record_routes() as recorder:
            for at, token in enumerate(tokens[:-1]):
                logits = module(input_ids=token.view(1, 1), cache_position=torch.tensor([at]))
                losses.append(torch.nn.functional.cross_entropy(logits[0, -1], tokens[at + 1]).item())
        recorder.save(path, force=True)
    return sum(losses) / len(losses)


def main(
    *,
    layers: Annotated[int, typer.Option(min=1)] = 6,
    experts: Annotated[int, typer.Option(min=2, help="In each layer.")] = 64,
    asked: Annotated[int, typer.Option(min=1, help="Of these, by a token.")] = 8,
    words: Annotated[int, typer.Option(min=300, help="Tokens that there are.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Of training.")] = 800,
    tokens: Annotated[int, typer.Option(min=1, max=WINDOW - 1, help="Recorded, of each kind of text.")] = 300,
    seed: int = 0,
    weights: Annotated[
        Path | None, typer.Option(help="What was trained: taken if the file exists, else written.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="For the routes.")] = RESULTS,
) -> None:
    """Train a mixture for ten minutes of a core, and record its routes.

    Example: python -m benchmarks.experts.recorded_routes --experts 128
    """
    torch.set_num_threads(1)  # so that sums have one order
    tokenizer = make_tokenizer(words)
    torch.manual_seed(seed)
    model = make_model(layers=layers, experts=experts, asked=asked, words=words)
    if weights is not None and weights.exists():
        model.load_state_dict(torch.load(weights))
    else:
        learned = (text for kind in KINDS for text in texts(kind, apart=False))
        ids = torch.tensor([token for text in learned for token in tokenizer.encode(text).ids])
        for number, loss in enumerate(train(model, ids, steps=steps, seed=seed), 1):
            if number % 50 == 0 or number == steps:
                typer.echo(f"step {number} of {steps}: a loss of {loss:.2f}", err=True)
        if weights is not None:
            torch.save(model.state_dict(), weights)
    exported = export(model)
    with scratch(64 << 20) as place:
        program = penstock.compile(exported, place / "model.penstock")
        words_nbytes = model.get_input_embeddings().weight.nbytes
        # The table stays, with the pages that it shares with others, and experts are read one by one.
        budget = program.floor_bytes + words_nbytes + 2 * mmap.PAGESIZE
        for kind in KINDS:
            text = max(texts(kind, apart=True), key=len)
            given = torch.tensor(tokenizer.encode(text).ids[: tokens + 1])
            path = routes_path(experts, kind, folder)
            loss = record(program, budget, given, path)
            typer.echo(f"{path}: {len(given) - 1} tokens, a loss of {loss:.2f} nats")


if __name__ == "__main__":
    typer.run(main)
