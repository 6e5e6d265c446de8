"""First and later calls of a Llama of 469 MiB: in memory, through `load`, and through `load` of another tree.

Each way runs in processes of its own, interleaved, and medians are shown. Processor seconds count from `load`
on, in a process that has imported its libraries, with an empty cache.

Example: python benchmarks/apply.py --before ../penstock-before/src --rounds 3
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import drop_cache

LAYERS, PROMPT, TOKENS = 16, 12, 9
LONG, LONG_CAP = 900, 100_000_000
"""Tokens of the long prompt, and the cap that it runs in."""
WAYS = ("in memory", "load", "load before")


def make_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=32_000, pad_token_id=0, **sizes, **heads)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure_here(way: str, folder: Path, memory: int, long: bool) -> dict[str, Any]:
    """Load and call in this process. Times are processor seconds, but of a token wall milliseconds."""
    import torch
    from transformers import LlamaForCausalLM

    import penstock.integrations

    torch.set_num_threads(2)
    base = _anonymous_peak()
    began, said, found = time.process_time(), hashlib.sha256(), dict[str, Any]()
    if way == "in memory":
        model: Any = LlamaForCausalLM.from_pretrained(folder).eval()
    else:
        model = penstock.integrations.load(folder, memory)
    ids = torch.arange(3, 3 + PROMPT)[None]

    def generate(given: torch.Tensor, tokens: int, **options: Any) -> None:
        mask = options.pop("attention_mask", torch.ones_like(given))
        made = model.generate(
            given,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            **options,
        )
        said.update(made.numpy().tobytes())

    def timed(name: str, run: Callable[[], None]) -> None:
        start = time.process_time()
        run()
        found[name] = time.process_time() - start

    generate(ids, 1)
    found["first token"] = time.process_time() - began
    found["a token, ms"] = _token_ms(model, ids)
    padded = torch.stack([ids[0], ids[0] + 17])
    mask = torch.ones_like(padded)
    mask[0, :4] = 0
    timed("first beams", lambda: generate(ids, 2, num_beams=3))
    timed("first padded batch", lambda: generate(padded, 2, attention_mask=mask))
    if long:
        with torch.no_grad():
            logits = model(torch.arange(LONG)[None] % 30_000 + 3, logits_to_keep=1).logits
        said.update(logits.float().numpy().tobytes())
        found["above the imports, MiB"] = (_anonymous_peak() - base) / 2**20
    return found | {"said": said.hexdigest()}


def _token_ms(model: Any, ids: Any) -> float:
    import torch

    times = []
    with torch.no_grad():
        output = model(ids, use_cache=True)
        for _ in range(TOKENS):
            token = output.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def _anonymous_peak() -> int:
    """The highest resident size so far, less what files have of it now."""
    facts = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssFile"):
            facts[name] = int(value.split()[0]) << 10
    return facts["VmHWM"] - facts["RssFile"]


def measure_apart(
    way: str, folder: Path, memory: int, before: str, *, cold: bool, long: bool
) -> dict[str, Any]:
    """Measure a way in a process of its own, with an empty cache."""
    files = sorted(folder.glob("*.safetensors"))
    if cold:
        drop_cache(files, unmap=False)
    else:
        for file in files:
            file.read_bytes()
    with tempfile.TemporaryDirectory() as cache:
        home = os.environ | {"XDG_CACHE_HOME": cache}
        if way == "load before":
            home["PYTHONPATH"] = before
        own = ["--way", way, "--folder", str(folder), "--memory", str(memory), *["--long"] * long]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, *own],
            capture_output=True,
            text=True,
            check=False,
            env=home,
        )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(
    *,
    before: Annotated[str, typer.Option(help="The src of another tree of penstock, to compare with.")] = "",
    rounds: Annotated[int, typer.Option(help="Processes of each way.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where the model is, or is made.")] = None,
    way: Annotated[str, typer.Option(help="Measure one way in this process.")] = "",
    memory: Annotated[int, typer.Option(help="The cap of --way, in bytes.")] = 0,
    long: Annotated[bool, typer.Option("--long", help="With a long prompt.")] = False,
) -> None:
    """Measure first tokens, beams, batches, later tokens and a long prompt: some minutes."""
    if way:
        assert folder is not None
        typer.echo(json.dumps(measure_here(way, folder, memory, long)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = folder or Path(made) / "llama"
        if not folder.exists():
            make_llama(folder)
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        ways = [one for one in WAYS if before or one != "load before"]
        cases = {
            "50 %, warm": (nbytes // 2, False, False),
            "50 %, cold": (nbytes // 2, True, False),
            "20 %, cold": (nbytes // 5, True, False),
            f"{LONG} tokens in {LONG_CAP // 10**6} MB": (LONG_CAP, False, True),
        }
        for case, (cap, cold, with_long) in cases.items():
            found: dict[str, list[dict[str, Any]]] = {one: [] for one in ways}
            for _ in range(rounds):
                for one in ways:
                    found[one].append(measure_apart(one, folder, cap, before, cold=cold, long=with_long))
            for one, rows in found.items():
                typer.echo(f"{case}: {one}: {_median(rows)}")


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [row["failed"] for row in rows if "failed" in row]
    if failed:
        return {"failed": failed[0]}
    middle = {
        name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0] if name != "said"
    }
    return middle | {"said": " ".join(sorted({row["said"][:8] for row in rows}))}


if __name__ == "__main__":
    typer.run(main)
