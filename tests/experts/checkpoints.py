"""Checkpoints for tests: NVFP4, MXFP4, block-FP8 and bf16 experts with reproducible values."""

from __future__ import annotations

from pathlib import Path

import torch


def random_bytes(shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def random_floats(shape: tuple[int, ...], seed: int, low: float = 0.5, high: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * (high - low) + low


def nvfp4_layer(experts: int, hidden: int, inter: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """All experts' tensors of one layer, stacked. Scale bytes stay near 1 so that sums stay finite."""
    return {
        "w13_weight": random_bytes((experts, 2 * inter, hidden // 2), seed),
        "w13_weight_scale": random_bytes((experts, 2 * inter, hidden // 16), seed + 1, 0x20, 0x40).view(
            torch.float8_e4m3fn
        ),
        "w13_weight_scale_2": random_floats((experts, 1), seed + 2, 0.01, 0.02).repeat(1, 2),
        "w13_input_scale": random_floats((experts, 2), seed + 3),
        "w2_weight": random_bytes((experts, hidden, inter // 2), seed + 4),
        "w2_weight_scale": random_bytes((experts, hidden, inter // 16), seed + 5, 0x20, 0x40).view(
            torch.float8_e4m3fn
        ),
        "w2_weight_scale_2": random_floats((experts,), seed + 6, 0.01, 0.02),
        "w2_input_scale": random_floats((experts,), seed + 7),
    }


def mxfp4_layer(experts: int, hidden: int, inter: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "w13_weight": random_bytes((experts, 2 * inter, hidden // 2), seed),
        "w13_weight_scale": random_bytes((experts, 2 * inter, hidden // 32), seed + 1, 118, 126),
        "w2_weight": random_bytes((experts, hidden, inter // 2), seed + 2),
        "w2_weight_scale": random_bytes((experts, hidden, inter // 32), seed + 3, 118, 126),
    }


def mxfp8_layer(experts: int, hidden: int, inter: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "w13_weight": random_floats((experts, 2 * inter, hidden), seed, -2.0, 2.0).to(torch.float8_e4m3fn),
        "w13_weight_scale": random_bytes((experts, 2 * inter, hidden // 32), seed + 1, 118, 126),
        "w2_weight": random_floats((experts, hidden, inter), seed + 2, -2.0, 2.0).to(torch.float8_e4m3fn),
        "w2_weight_scale": random_bytes((experts, hidden, inter // 32), seed + 3, 118, 126),
    }


def fp8_block_layer(experts: int, hidden: int, inter: int, seed: int = 0) -> dict[str, torch.Tensor]:
    def fp8(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return (random_floats(shape, seed, -2.0, 2.0)).to(torch.float8_e4m3fn)

    return {
        "w13_weight": fp8((experts, 2 * inter, hidden), seed),
        "w13_weight_scale": random_floats((experts, 2 * inter // 128, hidden // 128), seed + 1, 0.01, 0.02),
        "w2_weight": fp8((experts, hidden, inter), seed + 2),
        "w2_weight_scale": random_floats((experts, hidden // 128, inter // 128), seed + 3, 0.01, 0.02),
    }


def bf16_layer(experts: int, hidden: int, inter: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "w13_weight": random_floats((experts, 2 * inter, hidden), seed, -0.1, 0.1).to(torch.bfloat16),
        "w2_weight": random_floats((experts, hidden, inter), seed + 1, -0.1, 0.1).to(torch.bfloat16),
    }


LAYERS = {
    "nvfp4": nvfp4_layer,
    "mxfp4": mxfp4_layer,
    "mxfp8": mxfp8_layer,
    "fp8_block": fp8_block_layer,
    "bf16": bf16_layer,
}


def split_experts(layer: dict[str, torch.Tensor], inter: int) -> dict[str, torch.Tensor]:
    """The same layer under per-expert names: "3.gate_proj.weight_scale"."""
    result: dict[str, torch.Tensor] = {}
    for name, stacked in layer.items():
        family, kind = name.split("_", 1)
        for expert, tensor in enumerate(stacked):
            if family == "w2":
                result[f"{expert}.down_proj.{kind}"] = tensor
                continue
            half = tensor.shape[0] // 2
            result[f"{expert}.gate_proj.{kind}"] = tensor[:half].squeeze() if half == 1 else tensor[:half]
            result[f"{expert}.up_proj.{kind}"] = tensor[half:].squeeze() if half == 1 else tensor[half:]
    return result


def write_checkpoint(
    folder: Path, layers: int, experts: int, hidden: int, inter: int
) -> tuple[list[Path], int]:
    """NVFP4 layers "layers.N.experts.w13_weight" ..., one shard a layer; (files, bytes of tensors)."""
    from safetensors.torch import save_file

    files, total = [], 0
    for layer in range(layers):
        tensors = nvfp4_layer(experts, hidden, inter, seed=1000 * layer)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
        path = folder / f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        save_file(
            {f"layers.{layer}.experts.{name}": t.contiguous() for name, t in tensors.items()}, str(path)
        )
        files.append(path)
    return files, total
