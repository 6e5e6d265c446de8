"""Whether a process with a capped model lives within its libraries, the cap and 64 MiB, as the kernel counts.

A Llama, a T5, a pipeline of diffusers and a mixture of experts, whose weights are several times the cap, run
in processes that join a memory cgroup before they import anything, page cache included, the weight files
cold. The limit is what a process holds that imports the same libraries and does nothing, and the cap, and
64 MiB. The prompts have 32 and 1,024 tokens; the Llama is also trained by LoRA, on 16 and 32 tokens. What
they compute is compared with the model in memory, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from examples.demo.cgroup import join_group, make_group
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size

CAP = 96 << 20
SLACK = 64 << 20
PROMPTS = (32, 1024)
TRAINED = (16, 32, 16)


@dataclass(frozen=True)
class Lived:
    """What a process left behind: the sha256 of its outputs, and what its group held at most."""

    outputs: str
    limit_bytes: int
    peak_bytes: int


def make_llama(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": 1024, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "pad_token_id": 0},
    )
    return _saved(LlamaForCausalLM(config), folder)


def make_lora(folder: Path) -> Any:
    make_llama(folder)
    return _adapted(_llama(folder))


def _llama(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder)


def _adapted(model: Any) -> Any:
    """The model with the same random adapter each time."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def make_t5(folder: Path) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        **{"vocab_size": 1024, "d_model": 640, "d_ff": 5120, "d_kv": 64, "num_heads": 1, "num_layers": 5},
        decoder_start_token_id=0,
    )
    return _saved(T5ForConditionalGeneration(config), folder)


def make_pipeline(folder: Path) -> Any:
    from diffusers import DDPMScheduler, DiTPipeline, DiTTransformer2DModel
    from diffusers.models import AutoencoderKL

    transformer = DiTTransformer2DModel(
        **{"num_attention_heads": 10, "attention_head_dim": 64, "in_channels": 4, "out_channels": 8},
        **{"num_layers": 8, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 1000},
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    return _saved(DiTPipeline(transformer.eval(), vae.eval(), DDPMScheduler()), folder)


def make_experts(folder: Path) -> Any:
    """Each of two stacks of experts in a layer is larger than the cap.

    The library itself copies experts of its own files into stacks, so that only `load` lives in so little.
    """
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        **{"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0},
        **{"num_experts": 112, "num_experts_per_tok": 4},
    )
    return _saved(OlmoeForCausalLM(config), folder)


def _saved(model: Any, folder: Path) -> Any:
    """The model as its library loads it: mapped files, whose addresses decide last bits."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder)
    return loaded.eval() if hasattr(loaded, "eval") else loaded


MAKERS: dict[str, Callable[[Path], Any]] = {
    "llama": make_llama,
    "lora": make_lora,
    "t5": make_t5,
    "pipeline": make_pipeline,
    "experts": make_experts,
}


RUNS = [run for run in product(MAKERS, ("load", "apply")) if run != ("experts", "apply")]
"""The models, and how each is run."""


def outputs_of(kind: str, model: Any) -> str:
    """The sha256 of what a model computes for all prompts."""
    import torch

    torch.set_num_threads(1)  # products in several threads may be added up in another order
    digest = hashlib.sha256()
    if kind == "lora":
        return _trained(model)
    if kind == "pipeline":
        model.set_progress_bar_config(disable=True)
        torch.manual_seed(4)  # of which its scheduler draws
        options = {"num_inference_steps": 2, "output_type": "np"}
        drawn = model([1, 2], generator=torch.Generator().manual_seed(3), **options).images
        return hashlib.sha256(drawn.tobytes()).hexdigest()
    for length in PROMPTS:
        ids = torch.arange(3, 3 + length)[None] % 1000 + 3
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        for tensor in (said.sequences, *said.logits):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _trained(model: Any) -> str:
    """The sha256 of the losses of steps of AdamW, and of the adapter behind them."""
    import torch

    digest, model = hashlib.sha256(), model.train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(5)
    for length in TRAINED:
        ids = torch.arange(3, 3 + length)[None] * 7 % 1000
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
    for one in trained:
        digest.update(one.detach().numpy().tobytes())
    return digest.hexdigest()


def live(kind: str, way: str, folder: Path, cap: int) -> str:
    """Import the libraries, then load or apply and compute; `bare` only says what it holds."""
    import peft  # noqa: F401
    import torch
    import transformers
    from diffusers import DiTPipeline
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    from penstock.integrations import apply, load
    from penstock.runtime.system.memory import anonymous_bytes

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # before a thread has memory of its own
    if way == "bare":
        return str(anonymous_bytes())
    if kind == "lora" and way == "load":
        return outputs_of(kind, load(folder, cap, train=True, adapter=_adapted))
    if kind == "lora":
        model = _adapted(_llama(folder))
        apply(model, cap, train=True)
        return outputs_of(kind, model)
    if way == "load":
        return outputs_of(kind, load(folder, cap))
    classes = {"llama": LlamaForCausalLM, "t5": T5ForConditionalGeneration, "pipeline": DiTPipeline}
    model = classes[kind].from_pretrained(folder)
    if hasattr(model, "eval"):
        model.eval()
    apply(model, cap)
    return outputs_of(kind, model)


def run_apart(kind: str, way: str, folder: Path, cap: int = CAP, group: Path | None = None) -> str:
    """What `live` returns in a process of its own. Raises StreamError where that dies."""
    own = ["--way", way, "--kind", kind, "--folder", str(folder), "--cap", str(cap)]
    own += [] if group is None else ["--group", str(group)]
    from benchmarks import ways  # and numpy with it, which `live` must not have imported outside its group

    home = str(folder / f"cache-{way}")
    return str(ways.run_apart("benchmarks.calls.capped", *own, XDG_CACHE_HOME=home))


def run_capped(kind: str, way: str, folder: Path, bare: int, cap: int = CAP) -> Lived | None:
    """Run in a cgroup of `bare` bytes, the cap and 64 MiB; None where no cgroup can be made."""
    from benchmarks.machine import drop_cache  # and numpy with it, as in `run_apart`

    drop_cache(folder.rglob("*.safetensors"))
    with make_group(bare + cap + SLACK) as group:
        if group is None:
            return None
        said = run_apart(kind, way, folder, cap, group.folder)
        return Lived(said, group.limit_bytes, group.peak_bytes)


def main(
    *,
    cap: Annotated[int, typer.Option(help="Bytes for the model.")] = CAP,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
    kind: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    group: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run all models, apply and load, each in a process of its own; ends with 1 where one dies or differs.

    Example: python -m benchmarks.calls.capped --json benchmarks/results/capped.json
    """
    if way is not None:
        assert folder is not None
        if group is not None:
            join_group(group)
        typer.echo(json.dumps(live(kind, way, folder, cap)))
        return
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        bare = int(run_apart("", "bare", Path(made)))
        for one, how in RUNS:
            place = Path(made) / one
            model = MAKERS[one](place)
            expected = outputs_of(one, model)
            try:
                lived = run_capped(one, how, place, bare, cap)
            except StreamError as error:
                typer.echo(f"{one}, {how}: {error}")
                facts[f"{one}, {how}"] = None
                continue
            if lived is None:
                raise SystemExit("no memory cgroup can be made here: run as root")
            facts[f"{one}, {how}"] = asdict(lived) | {"equal": lived.outputs == expected}
            typer.echo(
                f"{one}, {how}: {format_size(lived.peak_bytes)} of {format_size(lived.limit_bytes)}, outputs "
                + ("equal" if lived.outputs == expected else "DIFFERENT")
            )
    if json_path:
        json_path.write_text(json.dumps({"cap": cap, "bare": bare, "runs": facts}, indent=1) + "\n")
    raise SystemExit(not all(one and one["equal"] for one in facts.values()))


if __name__ == "__main__":
    typer.run(main)
