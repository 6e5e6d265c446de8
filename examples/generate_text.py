"""Generates with a transformers model that may use less memory than its weights take.

    python examples/generate_text.py                        # a tiny model of random weights
    python examples/generate_text.py FOLDER MEMORY PROMPT   # yours: Llama-3.1-8B-Instruct 10GB "Once upon"

`load` never has the model in memory: it reads the folder's safetensors files in place. A model that you
have built goes through `penstock.integrations.apply(model, memory)`; docs/transformers.md has the rest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

try:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as error:
    sys.exit(f"this example needs {error.name}: pip install '.[transformers]'")

from penstock.integrations import load


def generate(folder: Path, memory: str, prompt: str) -> None:
    model = load(folder, memory=memory)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))


def generate_tiny(folder: Path) -> None:
    """Compares the tokens with those of the library's own model."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "llama")
    ids = torch.tensor([[11, 48, 7, 301]])
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)

    streamed = load(folder / "llama", memory="1MB", cache=folder / "cache")
    tokens = streamed.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected)
    for name, component in streamed.penstock_applied.components.items():
        print(f"{name}: {tokens.tolist()[0]}, at most {component.stats.peak_bytes:,} bytes of weights held")
    streamed.penstock_applied.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            generate_tiny(Path(scratch))
