"""Tiny models and pipelines with random weights, and copies of them that stay as their library made them."""

import copy
import json

import torch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return frozen(LlamaForCausalLM(LlamaConfig(**SIZES | options)))


def sliding():
    """Attention that sees 6 tokens back in every other layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    return frozen(Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, sliding_window=6)))


def mixtral():
    """In bfloat16, as it is published."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    return frozen(MixtralForCausalLM(MixtralConfig(**SIZES | experts)).bfloat16())


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return frozen(T5ForConditionalGeneration(config))


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"layers": 1, "ffn_dim": 64, "attention_heads": 4}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    config = BartConfig(
        vocab_size=128, d_model=32, max_position_embeddings=32, forced_eos_token_id=None, **sides
    )
    return frozen(BartForConditionalGeneration(config))


def llava():
    """A picture becomes 4 tokens, of number 120 each."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 1}
    seen = {**sizes, "image_size": 16, "patch_size": 8}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**seen), text_config=LlamaConfig(**sizes), image_token_id=120
    )
    return frozen(LlavaForConditionalGeneration(config))


def frozen(module):
    """In eval mode and without grad: whether a weight requires grad decides about last bits in torch."""
    return module.eval().requires_grad_(False)


def twin(module):
    """A copy whose weights are aligned as torch allocates them."""
    return copy.deepcopy(module)


def unet():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )


def pipeline(folder):
    """A text-to-image pipeline; its U-Net is its largest component."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = _tokenizer(folder)
    torch.manual_seed(0)
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
    )
    made = StableDiffusionPipeline(
        vae=frozen(vae),
        text_encoder=frozen(encoder),
        tokenizer=tokenizer,
        unet=frozen(unet()),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.set_progress_bar_config(disable=True)
    return made


def picture(made):
    """What the pipeline draws with one seed."""
    generator = torch.Generator().manual_seed(3)
    drawn = made("a cat", num_inference_steps=3, height=16, width=16, generator=generator, output_type="pt")
    return drawn.images


def _tokenizer(folder):
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
