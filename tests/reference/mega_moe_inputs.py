"""Small launches of every family, drawn from a seed. Not a test module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.mega_moe import FAMILIES, ExpertWeights, MegaMoeFamily, RankInputs, SharedExpert

# Scales are drawn around 1 in powers of two; codes keep to magnitudes that leave products of ordinary size.
_CODES = {"e4m3": 0x48, "e2m1": 8}


@dataclass(frozen=True)
class Drawn:
    """inputs, weights, shared: one entry a rank."""

    inputs: list[RankInputs]
    weights: list[ExpertWeights]
    shared: list[SharedExpert] | None


def draw_launch(
    name: str,
    tokens: Sequence[int],
    *,
    experts: int = 4,
    topk: int = 2,
    hidden: int = 256,
    intermediate: int = 256,
    masked: float = 0.2,
    shared: str | None = None,
    seed: int = 0,
) -> Drawn:
    """One launch over len(tokens) ranks."""
    family = FAMILIES[name]
    g = torch.Generator().manual_seed(seed)
    local = experts // len(tokens)
    inputs, weights, shared_experts = [], [], []
    for count in tokens:
        ids = torch.rand(count, experts, generator=g).topk(topk, dim=1).indices
        ids[torch.rand(count, topk, generator=g) < masked] = -1
        shared_x = shared_sf = None
        if shared is not None and name in ("sm100_nvfp4", "sm100_fp4xfp4"):
            shared_x, shared_sf = operand(FAMILIES[shared], (count, hidden), g)
        x, x_sf = operand(family, (count, hidden), g)
        inputs.append(
            RankInputs(
                x,
                x_sf,
                ids,
                torch.rand(count, topk, generator=g) + 0.1,
                torch.rand(count, generator=g) + 0.5 if name == "sm100_nvfp4" else None,
                shared_x,
                shared_sf,
            )
        )
        weights.append(draw_weights(family, local, hidden, intermediate, g))
        if shared is not None:
            shared_experts.append(
                SharedExpert(shared, draw_weights(FAMILIES[shared], 1, hidden, 2 * intermediate, g))
            )
    return Drawn(inputs, weights, shared_experts or None)


def draw_weights(
    family: MegaMoeFamily, experts: int, hidden: int, intermediate: int, g: torch.Generator
) -> ExpertWeights:
    l1, l1_sf = operand(family, (experts, 2 * intermediate, hidden), g, weight=True)
    l2, l2_sf = operand(family, (experts, hidden, intermediate), g, weight=True)
    fp4 = family.scale_format == "ue4m3"
    both = family.name == "sm100_fp4xfp4"
    return ExpertWeights(
        l1,
        l2,
        l1_sf,
        l2_sf,
        torch.rand(*((experts, 2) if both else (experts,)), generator=g) + 0.5 if fp4 else None,
        torch.rand(experts, generator=g) + 0.5 if fp4 else None,
        torch.rand(experts, generator=g) + 0.5 if both else None,
    )


def operand(
    family: MegaMoeFamily, shape: tuple[int, ...], g: torch.Generator, weight: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Codes and scales as RankInputs and ExpertWeights have them; products are of the order of 1 /
    sqrt(K)."""
    fmt = family.weight_format if weight else family.act_format
    scale = shape[-1] ** -0.5 if weight else 1.0
    if fmt == "bf16":
        return (torch.randn(shape, generator=g) * scale).bfloat16(), None
    codes = torch.randint(0, _CODES[fmt], shape, generator=g, dtype=torch.uint8)
    sign_bit = 128 if fmt == "e4m3" else 8
    codes |= torch.randint(0, 2, shape, generator=g, dtype=torch.uint8) * sign_bit
    if family.scale_format is None:
        rows = (shape[-2] // 128,) if weight else (shape[-2],)
        size = (*shape[:-2], *rows, shape[-1] // 128)
        return codes, torch.rand(size, generator=g) * scale + 0.01
    groups = (*shape[:-1], shape[-1] // (family.act_group or 1))
    if family.scale_format == "ue8m0":
        shift = 4 if weight else 0
        return codes, torch.randint(126 - shift, 129 - shift, groups, generator=g, dtype=torch.uint8)
    base = 0x08 if weight else 0x30  # E4M3: 2^-6, 2^-1
    return codes, base + torch.randint(0, 16, groups, generator=g, dtype=torch.uint8)
