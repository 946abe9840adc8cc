"""Combine: the slots of a token added in the source rank's float32, and the post-expert RMS norm.

Source: NUMERICS 8.5, 8.6. The norm's reduction order is fixed by the kernel; which of its products are
contracted is not established, and here all are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference._float32 import constant, fma, to_bf16
from reference.activation import cuda_rsqrtf
from reference.mega_moe.families import MegaMoeFamily

__all__ = ["combine", "combine_norm", "combine_normalized", "norm_scales"]

_NORM_TILE = 128


def combine(
    family: MegaMoeFamily,
    slots: Tensor,
    used: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    """slots bfloat16 [K, T, H] (unused ones hold anything), used bool [T, K], weights float32 [T, K],
    shared bfloat16 [T, H] -> y bfloat16 [T, H]. A token without a slot gives +0."""
    total = torch.zeros(slots.shape[1:], dtype=torch.float32, device=slots.device)
    if shared is not None and family.shared_first:
        total = total + shared.float()
    for k in range(slots.shape[0]):
        value = slots[k].float()
        added = fma(value, weights[:, k, None], total) if family.combine_fma else total + value
        total = torch.where(used[:, k, None], added, total)
    if shared is not None and not family.shared_first:
        total = total + shared.float()
    return to_bf16(total)


def combine_norm(outputs: Tensor, gamma: Tensor) -> Tensor:
    """Sums of squares of outputs * gamma per 128 columns: bfloat16 [..., H], float32 [H] -> float32 [..., H
    / 128].

    Sixteen lanes take eight columns each, two at a time; then lanes are added at distances 8, 4, 2, 1.
    """
    scaled = (outputs.float() * gamma).reshape(*outputs.shape[:-1], -1, _NORM_TILE // 8, 4, 2)
    part = torch.zeros(scaled.shape[:-2], dtype=torch.float32, device=scaled.device)
    for q in range(4):
        first, second = scaled[..., q, 0], scaled[..., q, 1]
        part = fma(first, first, fma(second, second, part))
    for _ in range(4):
        half = part.shape[-1] // 2
        part = part[..., :half] + part[..., half:]
    return part[..., 0]


def norm_scales(partial: Tensor, eps: float, weights: Tensor, hidden: int) -> Tensor:
    """Each slot's factor: rsqrt(mean of squares + eps) * routing weight; partial float32 [..., H / 128],
    weights [...].

    Lane L of a warp adds tiles L, L + 32, ... in ascending order; then lanes are added at distances 16, 8,
    4, 2, 1.
    """
    tiles = torch.nn.functional.pad(partial, (0, -partial.shape[-1] % 32))
    tiles = tiles.reshape(*partial.shape[:-1], -1, 32)
    lanes = torch.zeros_like(tiles[..., 0, :])
    for i in range(tiles.shape[-2]):
        lanes = lanes + tiles[..., i, :]
    for _ in range(5):
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    mean = lanes[..., 0] / constant(lanes, float(hidden)) + constant(lanes, eps)
    return cuda_rsqrtf(mean) * weights


def combine_normalized(slots: Tensor, used: Tensor, scales: Tensor, gamma: Tensor) -> Tensor:
    """acc = fma(o * gamma, scale, acc), slots ascending: bfloat16 [K, T, H], bool [T, K], float32 [T, K]
    and [H] -> y."""
    total = torch.zeros(slots.shape[1:], dtype=torch.float32, device=slots.device)
    for k in range(slots.shape[0]):
        added = fma(slots[k].float() * gamma, scales[:, k, None], total)
        total = torch.where(used[:, k, None], added, total)
    return to_bf16(total)
