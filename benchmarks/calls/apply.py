"""Calls of a Llama of 469 MiB: in memory, through `load` or `apply`, and through those of another tree.

Each way runs in processes of its own, interleaved, and medians are shown. Processor seconds count from `load`
on, in a process that has imported its libraries, with an empty cache. Warm files have been read from the disk
once: of a file that was only written, the page cache has single pages, which map slowly until penstock has
read them again. Of LoRA's steps, and of the tokens of a mixture of 64 experts in 4 layers, the bytes of
weights that they move are counted.

Example: python -m benchmarks.calls.apply --before ../penstock-before/src --rounds 3
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.machine import Memory, drop_cache, read_memory, warm_cache

PROMPT, TOKENS = 12, 9
LONG, LONG_CAP = 900, 100_000_000
"""Tokens of the long prompt, and the cap that it runs in."""
WAYS = ("in memory", "load", "load before")
STEPS = 9


def measure_here(way: str, folder: Path, memory: int, long: bool = False) -> dict[str, Any]:
    """Load and call in this process. Times are processor seconds, but of a token wall milliseconds."""
    import torch
    from transformers import LlamaForCausalLM

    import penstock.integrations

    torch.set_num_threads(2)
    base = read_memory()
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
        found["above the imports, MiB"] = _anonymous_peak(base) / 2**20
    return found | {"said": said.hexdigest()}


def measure_lora(way: str, folder: Path, memory: int) -> dict[str, Any]:
    """Train an adapter on a prompt of 64 tokens, nine steps of AdamW."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    import penstock.integrations

    torch.set_num_threads(2)
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(folder), lora).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    ids = torch.randint(3, 30_000, (1, 64))
    components: list[Any] = []
    if way != "in memory":
        components += penstock.integrations.apply(model, memory, train=True).components.values()
    seconds, moved, losses = [], [0], []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        moved += [one.stats.bytes_moved if one.stats else 0 for one in components]
        losses.append(loss.item())
    step = {
        "a step, ms": 1e3 * statistics.median(seconds[3:]),
        "MB a step": (moved[-1] - moved[-2]) / 1e6 if components else 0.0,
    }
    return step | {"said": hashlib.sha256(str(losses).encode()).hexdigest()}


def make_mixture(folder: Path) -> None:
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 8192}
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "num_attention_heads": 16}
    model = OlmoeForCausalLM(OlmoeConfig(**sizes, **experts, num_key_value_heads=16, pad_token_id=1))
    for name, value in model.to(torch.bfloat16).named_parameters():
        if "gate.weight" in name:
            value.data.mul_(20)  # so that tokens differ in what they choose
    model.save_pretrained(folder)


def measure_mixture(way: str, folder: Path, memory: int) -> dict[str, Any]:
    """Generate 40 tokens, drawn, and count the bytes that the last of them read."""
    import torch

    import penstock.integrations

    model = penstock.integrations.load(folder, memory)
    ids = torch.arange(3, 19)[None]
    (component,) = model.penstock_applied.components.values()
    moved: list[int] = []
    model.register_forward_hook(
        lambda *_: moved.append(component.stats.bytes_moved if component.stats else 0)
    )
    torch.manual_seed(1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "min_new_tokens": 40}
    made = model.generate(ids, do_sample=True, **options)
    each = [after - before for before, after in pairwise(moved[12:]) if after > before]
    pool = re.search(r"a pool of ([\d.]+) MiB", component.plan.residency)
    found = {"MB a token": sum(each) / len(each) / 1e6, "pool, MiB": float(pool[1]) if pool else 0.0}
    return found | {"said": hashlib.sha256(made.numpy().tobytes()).hexdigest()}


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


def _anonymous_peak(base: Memory) -> int:
    """The highest resident size so far, less what files have of it now, above what `base` had."""
    now = read_memory()
    return now.peak - now.mapped - (base.peak - base.mapped)


def measure_apart(
    way: str, folder: Path, memory: int, before: str, *, cold: bool = False, what: str = "calls"
) -> dict[str, Any]:
    """Measure a way in a process of its own, with an empty cache."""
    from benchmarks import ways  # and penstock with it, which is another one where `before` says so
    from penstock.schedule.facts.errors import StreamError

    files = list(folder.glob("*.safetensors"))
    drop_cache(files)
    if not cold:
        warm_cache(files)
    with tempfile.TemporaryDirectory() as cache:
        environment = {"XDG_CACHE_HOME": cache, "PYTHONWARNINGS": "ignore"}
        if way == "load before":
            environment["PYTHONPATH"] = before
        own = ["--way", way, "--folder", str(folder), "--memory", str(memory), "--what", what]
        try:
            found: dict[str, Any] = ways.run_apart("benchmarks.calls.apply", *own, **environment)
        except StreamError as error:
            return {"failed": str(error)}
    return found


def main(
    *,
    before: Annotated[str, typer.Option(help="The src of another tree of penstock, to compare with.")] = "",
    rounds: Annotated[int, typer.Option(help="Processes of each way.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where the model is, or is made.")] = None,
    way: Annotated[str, typer.Option(help="Measure one way in this process.")] = "",
    memory: Annotated[int, typer.Option(help="The cap of --way, in bytes.")] = 0,
    what: Annotated[str, typer.Option(help="What --way does: calls, long, lora or mixture.")] = "calls",
) -> None:
    """Measure calls, a long prompt, steps of training and tokens of a mixture: some minutes a round."""
    if way:
        assert folder is not None
        if what == "lora":
            figures = measure_lora(way, folder, memory)
        elif what == "mixture":
            figures = measure_mixture(way, folder, memory)
        else:
            figures = measure_here(way, folder, memory, long=what == "long")
        typer.echo(json.dumps(figures))
        return
    from benchmarks.calls.capped_calls import LARGE, make_llama

    with tempfile.TemporaryDirectory() as made:
        folder = folder or Path(made) / "llama"
        if not folder.exists():
            make_llama(folder, **LARGE)
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        ways = [one for one in WAYS if before or one != "load before"]
        mixture = Path(made) / "mixture"
        make_mixture(mixture)
        experts = sum(file.stat().st_size for file in mixture.glob("*.safetensors"))
        cases = {
            "50 %, warm": (folder, nbytes // 2, False, "calls"),
            "50 %, cold": (folder, nbytes // 2, True, "calls"),
            "20 %, cold": (folder, nbytes // 5, True, "calls"),
            f"{LONG} tokens in {LONG_CAP // 10**6} MB": (folder, LONG_CAP, False, "long"),
            "LoRA, 80 %": (folder, nbytes * 4 // 5, False, "lora"),
            "a mixture, 30 %": (mixture, experts * 3 // 10, False, "mixture"),
        }
        for case, (place, cap, cold, doing) in cases.items():
            found: dict[str, list[dict[str, Any]]] = {one: [] for one in ways}
            for _ in range(rounds):
                for one in ways if doing != "mixture" else ways[1:]:
                    found[one].append(measure_apart(one, place, cap, before, cold=cold, what=doing))
            for one, rows in found.items():
                if rows:
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
