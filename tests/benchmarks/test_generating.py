"""The benchmark of generating, on a tiny model: all ways say the same tokens, and what is said is theirs."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.calls import generating
from tests.benchmarks.in_process import invoke


def test_all_ways_say_the_same_tokens(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=128, dtype="bfloat16")
    monkeypatch.setattr("benchmarks.calls.loading.make_config", lambda *_: config)
    command = ["--cap", "300KB", "--limit", "0", "--rounds", "1", "--json", str(tmp_path / "all.json")]
    monkeypatch.setattr(generating, "run_apart", generating.measure_here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = invoke(generating.main, *command)

    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "all.json").read_text())
    rows = facts["results"]["warm"]
    assert list(rows) == list(generating.LOADERS)
    assert len({row["tokens"] for found in rows.values() for row in found}) == 1
    for way, (row,) in rows.items():
        assert f"| {way} | {row['ready_s']:.1f} |" in done.output
