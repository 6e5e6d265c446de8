"""Predicts how a model would run on GPUs of other machines, without building the model.

    python examples/plan_for_other_hardware.py                  # a Llama of 8B parameters
    python examples/plan_for_other_hardware.py CONFIG [REPORT]  # your config.json; the last plan as HTML

The model is exported with fake weights from its configuration alone: no memory, no checkpoint, no GPU. The
command `penstock preflight` makes such predictions too; docs/large-models.md explains it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from penstock.models.preflight import find, read_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def main(config: Path, report: Path | None) -> None:
    model = read_model(str(config), tokens=1, context=4096)
    print(f"{model.weight_bytes:,} bytes of weights; {model.floor_bytes:,} is the least that runs them")
    for hardware, budget in (("l4", "25%"), ("rtx4090", "25%"), ("h200", "50%")):
        finding = find(model, hardware, budget)
        plan = finding.plan
        if plan is not None:
            print(f"{hardware} within {budget}: {plan.predicted_seconds:.3f} s a token")
        for sentence in finding.verdict:
            print(f"  {sentence}")
    if plan is not None and report is not None:
        plan.save_report(report)
        print(f"{report} shows the last of these plans")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "config.json"
        own.write_text(json.dumps(LLAMA))
        given = [Path(argument) for argument in sys.argv[1:]]
        main(given[0] if given else own, given[1] if len(given) > 1 else None)
