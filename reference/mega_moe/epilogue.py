"""Between the GEMMs: alphas, the activation, and the L2 output's bf16.

Source: NUMERICS 8.2, 8.4 (SM100), 8.8 and 17 (SM90). The activations themselves are ``reference.activation``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reference._float32 import to_bf16
from reference.activation import situ, swiglu
from reference.mega_moe.families import MegaMoeFamily

__all__ = ["Activation", "activate", "scale_output"]


@dataclass(frozen=True)
class Activation:
    """name: "swiglu", "swiglustep" or "situ". clamp: None for none. alpha, beta: of the activation.
    fast_math: approximate exponential and reciprocal."""

    name: str = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    fast_math: bool = True


def activate(
    family: MegaMoeFamily, activation: Activation, acc: Tensor, alphas: Tensor | None, x_scales: Tensor | None
) -> Tensor:
    """acc float32 [M, 2I], gate columns first -> float32 [M, I], before the routing weight.

    alphas: float32 scalar, or [2] for gate and up. x_scales: float32 [M] (two-level NVFP4).
    """
    gate, up = acc.chunk(2, dim=1)
    if alphas is not None or x_scales is not None:
        gate, up = _scaled(gate, alphas, 0, x_scales), _scaled(up, alphas, 1, x_scales)
    fast_math, recipe = activation.fast_math, family.activation_recipe
    if activation.name == "situ":
        return situ(
            gate, up, alpha=activation.alpha, beta=activation.beta, fast_math=fast_math, recipe=recipe
        )
    return swiglu(
        gate,
        up,
        clamp=activation.clamp,
        alpha=activation.alpha,
        beta=activation.beta,
        fast_math=fast_math,
        step=activation.name == "swiglustep",
        recipe=recipe,
    )


def _scaled(acc: Tensor, alphas: Tensor | None, half: int, x_scales: Tensor | None) -> Tensor:
    """acc * alpha, or acc * fl(x_scale * alpha)."""
    alpha = None if alphas is None else alphas if alphas.dim() == 0 else alphas[half]
    if x_scales is None:
        return acc if alpha is None else acc * alpha
    return acc * (x_scales if alpha is None else x_scales * alpha)[:, None]


def scale_output(
    family: MegaMoeFamily,
    acc: Tensor,
    l2_alpha: Tensor | None,
    a2_scale: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """acc float32 [M, H] -> the combine slots' bfloat16: alpha (times the activation scale), bf16; where
    the weight enters at the output, one more product and one more rounding."""
    if l2_alpha is not None and a2_scale is not None:
        l2_alpha = l2_alpha * a2_scale
    elif l2_alpha is None:
        l2_alpha = a2_scale
    rows = to_bf16(acc if l2_alpha is None else acc * l2_alpha)
    if family.weight_at == "output" and weights is not None:
        rows = to_bf16(rows.float() * weights[:, None])
    return rows
