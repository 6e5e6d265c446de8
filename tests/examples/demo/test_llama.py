"""The decoder, and the file of its weights."""

from pathlib import Path

import torch

from examples.demo import llama


def test_the_decoder_is_causal_and_the_export_equals_it(prepared):
    shape = llama.Shape(prepared.hidden, prepared.layers, prepared.vocabulary)
    decoder = llama.load_decoder(shape, Path(prepared.weights))
    tokens = torch.arange(llama.WINDOW)[None] % prepared.vocabulary
    later = tokens.clone()
    later[0, 9:] = 0
    with torch.no_grad():
        logits = decoder(tokens)
        assert torch.equal(logits[0, :9], decoder(later)[0, :9])
        assert not torch.equal(logits[0, 9:], decoder(later)[0, 9:])
        assert torch.equal(llama.export_decoder(shape, Path(prepared.weights)).module()(tokens), logits)
