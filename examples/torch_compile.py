"""Runs a module of your own under `torch.compile`, with its parameters in files instead of memory.

    python examples/torch_compile.py [BUDGET]         # 50% of the parameters unless given

`offload` gives the parameters' memory back; the backend "penstock" then streams them through Inductor's
kernels. Graph breaks and new sizes work as usual: all pieces share one budget. docs/lowering.md says what
is refused.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import penstock


def main(folder: Path, budget: str) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
    module = nn.Sequential(*layers).eval()
    x = torch.randn(8, 256)
    with torch.no_grad():
        expected = module(x)
    save_file(module.state_dict(), folder / "model.safetensors")

    record = penstock.offload(module, folder / "model.safetensors")
    print(f"{record.nbytes:,} bytes of parameters are in files now")
    options = {
        "budget": budget,
        "resident_below": "4KiB",
    }  # biases stay: they are smaller than a probe is worth
    streamed = torch.compile(module, backend="penstock", options=options)
    with torch.no_grad():
        for _ in range(3):
            # Other kernels than eager PyTorch's: equal but for rounding.
            torch.testing.assert_close(streamed(x), expected)
    stats = record.stats
    print(f"{stats.bytes_moved:,} bytes moved in {stats.passes} passes, at most {stats.peak_bytes:,} held")
    record.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch), sys.argv[1] if len(sys.argv) > 1 else "50%")
