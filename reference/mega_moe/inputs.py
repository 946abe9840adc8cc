"""What a launch reads: one rank's staged tokens, its experts, its shared expert, and the post-expert norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ExpertWeights", "PostNorm", "RankInputs", "SharedExpert"]


@dataclass(frozen=True)
class RankInputs:
    """One rank's staged tokens, in logical order.

    x [T, H]: codes uint8 (E4M3, or E2M1 one code a byte) or bfloat16. x_sf [T, H / group]: float32 (SM90),
    codes uint8 (UE8M0, UE4M3), or None (bf16). topk_idx [T, K] int64, negative for no route. topk_weights
    [T, K] float32. x_scales [T] float32: two-level NVFP4. shared_x, shared_x_sf: a shared expert's input
    where it is not x itself.
    """

    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    x_scales: Tensor | None = None
    shared_x: Tensor | None = None
    shared_x_sf: Tensor | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """One rank's experts as in the checkpoint: gate rows first, not interleaved, scales in logical order.

    l1 [e, 2I, H], l2 [e, H, I]: codes uint8 or bfloat16. l1_sf, l2_sf: float32 [e, N / 128, K / 128] on
    SM90, codes uint8 [e, N, K / group] elsewhere, None for bf16. l1_alphas [e, 2] (gate, up) or [e],
    l2_alphas [e], a2_scales [e]: float32, NVFP4 families only; None counts as 1.
    """

    l1: Tensor
    l2: Tensor
    l1_sf: Tensor | None = None
    l2_sf: Tensor | None = None
    l1_alphas: Tensor | None = None
    l2_alphas: Tensor | None = None
    a2_scales: Tensor | None = None


@dataclass(frozen=True)
class SharedExpert:
    """The fused shared experts of a rank as one expert of intermediate size I * S: tensors of ExpertWeights
    with e = 1, and the family whose arithmetic it runs in."""

    family: str
    weights: ExpertWeights


@dataclass(frozen=True)
class PostNorm:
    """Post-expert RMS norm: gamma float32 [H] (a zero-centred gain already folded in), eps."""

    gamma: Tensor
    eps: float
