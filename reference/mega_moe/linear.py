"""The two GEMMs: what the tensor core leaves in its accumulator, scales included.

SM90 has no block scales in the instruction: a K block as wide as the activation's scale group is one chain
of MMA steps, and how blocks meet is the launch's accumulation mode (``reference.mega_moe.launch``).
Everywhere else the whole K is one chain of steps, with the scales inside the instruction.

Sources: NUMERICS 8.2, 8.4, 17; the rescaling modes also from the public SM90 kernel header.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference._float32 import fma, reciprocal
from reference.activation import rcp_approx_ftz
from reference.mega_moe.families import MegaMoeFamily
from reference.mega_moe.launch import Accumulation
from reference.tensor_core import matmul

__all__ = ["WEIGHT_BLOCK", "block_scaled", "expert_gemm"]

WEIGHT_BLOCK = 128  # rows and columns that share a weight scale on SM90


def expert_gemm(
    family: MegaMoeFamily,
    acts: Tensor,
    acts_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    *,
    accumulation: Accumulation = "promote",
    fast_math: bool = True,
) -> Tensor:
    """acts [M, K] @ weights [N, K]^T -> float32 [M, N] as one expert's accumulators end up.

    acts, weights: codes uint8, or bfloat16. Scales: for SM90 float32 [M, K / group] and [N / 128, K / 128];
    for families with block scales codes uint8 [M, K / group] and [N, K / group]; None for bf16.
    accumulation and fast_math act on SM90 only.
    """
    if family.arch == "sm90":
        assert acts_scale is not None
        assert weights_scale is not None
        return block_scaled(acts, acts_scale, weights, weights_scale, accumulation, fast_math)
    return matmul(
        family.mma,
        acts,
        weights,
        a_format=family.act_format,
        b_format=family.weight_format,
        a_scales=acts_scale,
        b_scales=weights_scale,
        scale_format=family.scale_format,
    )


def block_scaled(
    acts: Tensor,
    acts_scale: Tensor,
    weights: Tensor,
    weights_scale: Tensor,
    accumulation: Accumulation,
    fast_math: bool,
) -> Tensor:
    """The SM90 GEMM with float32 scales: acts [M, K] by groups of K / acts_scale.shape[1], weights by
    128x128 blocks."""
    groups = acts_scale.shape[1]
    group = acts.shape[1] // groups
    per_block = WEIGHT_BLOCK // group
    # Scale of K block j for every output: fl(activation scale * weight scale), constant over 128 columns of
    # N.
    by_block = weights_scale.repeat_interleave(per_block, 1).t()  # [groups, N / 128]
    scales = acts_scale.t()[:, :, None] * by_block[:, None, :]  # [groups, M, N / 128]
    a = acts.view(acts.shape[0], groups, group).transpose(0, 1)
    b = weights.view(weights.shape[0], groups, group).transpose(0, 1)
    if accumulation == "promote":
        return _promote(matmul("hopper_fp8", a, b, a_format="e4m3", b_format="e4m3"), scales)
    invert = rcp_approx_ftz if fast_math else reciprocal
    final: Tensor | None = None
    for j in range(groups):
        if final is not None:
            if accumulation == "rescale":
                # Off the previous scale (below) and onto this one: two products.
                final = final * _spread(invert(scales[j]))
            elif j % per_block:
                # Inside a 128-wide block the weight scale stays, and the kernel leaves it out of the ratio.
                final = final * (acts_scale[:, j - 1] * invert(acts_scale[:, j].contiguous()))[:, None]
            else:
                final = final * _spread(scales[j - 1] * invert(scales[j]))
        final = matmul("hopper_fp8", a[j], b[j], a_format="e4m3", b_format="e4m3", accumulator=final)
        if accumulation == "rescale" or j == groups - 1:
            final = final * _spread(scales[j])
    assert final is not None
    return final


def _promote(blocks: Tensor, scales: Tensor) -> Tensor:
    """final = fma(scale, block, final), block after block; blocks [groups, M, N], scales [groups, M, N /
    128]."""
    final = torch.zeros_like(blocks[0])
    for block, scale in zip(blocks, scales, strict=True):
        final = fma(_spread(scale), block, final)
    return final


def _spread(scales: Tensor) -> Tensor:
    """[M, N / 128] -> [M, N]."""
    return scales.repeat_interleave(WEIGHT_BLOCK, 1)
