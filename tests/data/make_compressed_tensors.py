"""Writes compressed_tensors.safetensors: what compressed-tensors 0.20.1 unpacks and rounds."""

from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file

PARTS = {"weight": "qdata", "weight_packed": "packed", "weight_scale": "scale"}
WEIGHTS = {
    "int4": ("pack-quantized", {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}),
    "int8": ("pack-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}),
    "w8": ("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "tensor"}),
    "fp8rows": ("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}),
}


def unpacked(format_, options):
    """Return the parts of a weight, and its values."""
    weight = torch.randn(12, 48).bfloat16()
    grouped = weight.unflatten(1, (-1, options.get("group_size", 48))).abs().amax(2)
    most = weight.abs().max().reshape(1) if options["strategy"] == "tensor" else grouped
    largest = 448 if options["type"] == "float" else 2 ** (options["num_bits"] - 1) - 1
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, **options))
    compressor = BaseCompressor.get_value_from_registry(format_)
    state = {"weight": weight, "weight_scale": (most.float() / largest).bfloat16()}
    parts = compressor.compress(state, scheme)
    values = compressor.decompress(dict(parts), scheme)["weight"]
    return {PARTS[name]: part for name, part in parts.items() if name in PARTS} | {"values": values}


def rounded(value, kind, strategy):
    """Return the input of a layer as the library rounds it."""
    options = {"num_bits": 8, "dynamic": True, "symmetric": True}
    args = QuantizationArgs(type=kind, strategy=strategy, **options)
    return fake_quantize(value, *compute_dynamic_scales_and_zp(value, args, torch.nn.Identity()), args)


def main():
    """Write the file."""
    torch.manual_seed(0)
    tensors = {
        f"{name}.{part}": value for name, made in WEIGHTS.items() for part, value in unpacked(*made).items()
    }
    for dtype in (torch.bfloat16, torch.float32):
        cube = torch.randn(2, 3, 32).to(dtype)
        cube[0, 1], cube[1, 1], cube[1, 2] = 0, -cube[1, 1].abs(), cube[1, 2] * 1000
        for kind in ("int", "float"):
            for strategy in ("token", "tensor"):
                for shape, value in (("3d", cube), ("2d", cube[1])):
                    key = f"{kind}.{strategy}.{shape}.{str(dtype).removeprefix('torch.')}"
                    tensors |= {f"{key}.input": value, f"{key}.rounded": rounded(value, kind, strategy)}
    file = Path(__file__).with_name("compressed_tensors.safetensors")
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file)


if __name__ == "__main__":
    main()
