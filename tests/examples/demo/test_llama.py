"""The decoder, and the file of its weights."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.demo import llama
from tests.examples.demo.screens import MIB


def test_the_shape_has_the_size_asked_for():
    for wanted in (8 * MIB, 2 << 30, 5 << 30):
        shape = llama.choose_shape(wanted)
        nbytes = sum(2 * torch.Size(size).numel() for size in llama.list_weights(shape).values())
        assert wanted <= nbytes <= wanted * 1.1
        assert shape.layers >= 8


def test_the_weights_are_the_same_every_time_and_follow_the_fan_in(tmp_path):
    shape = llama.choose_shape(2 * MIB)
    digests = set()
    for name in ("one", "two"):
        nbytes = llama.write_weights(shape, tmp_path / name, 1)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    llama.write_weights(shape, tmp_path / "three", 2)
    digests.add(hashlib.sha256((tmp_path / "three").read_bytes()).hexdigest())
    assert len(digests) == 2

    weights = load_file(tmp_path / "one")
    assert sum(weight.nbytes for weight in weights.values()) == nbytes
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == llama.list_weights(shape)
    down = weights["layers.0.feed_forward.down.weight"].float()
    assert abs(float(down.mean())) < 1e-3
    assert 0.7 < float(down.std()) * down.shape[1] ** 0.5 < 1.4
    assert torch.equal(weights["norm.weight"], torch.ones(shape.hidden, dtype=torch.bfloat16))


def test_every_weight_is_aligned_so_that_the_file_serves_in_place(tmp_path):
    path = tmp_path / "weights.safetensors"
    llama.write_weights(llama.choose_shape(2 * MIB), path, 1)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length]).values()
    assert all((8 + length + entry["data_offsets"][0]) % llama.ALIGNMENT == 0 for entry in entries)


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


def test_generate_appends_the_most_likely_token():
    def successor(tokens):
        return torch.nn.functional.one_hot((tokens + 1) % 32, 32).float()

    seen = []
    assert llama.generate(successor, (3, 7), 4, seen.append) == [3, 7, 8, 9, 10, 11]
    assert len(seen) == 4
