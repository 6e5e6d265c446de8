"""Measures what an export to ExecuTorch takes: of Llama 3.1 70B, without values, with more and more layers.

    python -m benchmarks.calls.executorch_export --layers 8 --layers 80

Each row comes from a process of its own: bytes of weights, delegates, seconds of the processor for each of
the steps that users call, and the peak of the process above what it holds once everything is imported. The
shares are of the time to lower: torch's sorting of the graph, which ExecuTorch asks for at each delegate, and
all that penstock does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
HEAD = (
    "| layers | weights GiB | delegates | export s | lower s | of which sorting | of which penstock "
    "| to_executorch and save s | peak above imports MiB | peak MiB |\n" + "|---" * 10 + "|"
)


def main(*, layers: Annotated[list[int] | None, typer.Option(min=1)] = None, one: bool = False) -> None:
    """Export models of these numbers of layers, each in a process of its own."""
    counts = layers or [8, 16]
    if one:
        typer.echo(measure(counts[0]))
        return
    typer.echo(HEAD)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for count in counts:
        command = [
            sys.executable,
            "-m",
            "benchmarks.calls.executorch_export",
            "--one",
            "--layers",
            str(count),
        ]
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        typer.echo(done.stdout.splitlines()[-1])


def measure(layers: int) -> str:
    """The row of a model, measured in this process."""
    warnings.simplefilter("ignore")
    import executorch.exir.lowered_backend_module as delegating
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    from penstock.backends.executorch import PenstockBackend, PenstockPartitioner, read, save

    export_llama(1)  # imports, and what torch makes once
    imported = peak_bytes()
    clocks = {"sorting": 0.0, "penstock": 0.0}
    _timed(delegating, "legalize_graph", clocks, "sorting")
    for owner, name in (
        (PenstockPartitioner, "transform_for_pre_decomposition"),
        (PenstockPartitioner, "partition"),
        (PenstockBackend, "preprocess_multimethod"),
    ):
        _timed(owner, name, clocks, "penstock")
    began = [time.process_time()]
    program = export_llama(layers)
    began.append(time.process_time())
    edge = to_edge_transform_and_lower(program, partitioner=[PenstockPartitioner()])
    began.append(time.process_time())
    with tempfile.TemporaryDirectory() as folder:
        executable = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
        exported = read(save(executable, Path(folder) / "model.pte"))
    began.append(time.process_time())
    exporting, lowering, saving = (after - before for before, after in pairwise(began))
    shares = " | ".join(f"{seconds / lowering:.0%}" for seconds in clocks.values())
    peak = peak_bytes()
    return (
        f"| {layers} | {exported.weight_bytes / 2**30:.1f} | {len(exported.regions)} | {exporting:.0f} "
        f"| {lowering:.0f} | {shares} | {saving:.0f} | {peak - imported >> 20} | {peak >> 20} |"
    )


def export_llama(layers: int) -> Any:
    """The program of a prefill of 16 tokens, of weights that have no values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import penstock

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        rope_theta=500000.0,
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config).to(torch.bfloat16)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
            return logits

    return penstock.fake_export(lambda: Logits().eval(), (torch.zeros(1, 16, dtype=torch.long),))


def peak_bytes() -> int:
    """The most memory that this process has held."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def _timed(owner: Any, name: str, clocks: dict[str, float], clock: str) -> None:
    """Has a function add the seconds that it takes to a clock."""
    run: Callable[..., Any] = getattr(owner, name)
    bound = hasattr(run, "__self__")  # a class method knows its class

    @wraps(run)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return run(*args, **kwargs)
        finally:
            clocks[clock] += time.process_time() - began

    setattr(owner, name, staticmethod(timed) if bound else timed)


if __name__ == "__main__":
    typer.run(main)
