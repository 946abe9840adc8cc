"""The activations of MegaMoE kernels, and the GPU functions under them, bit for bit.

A gated activation takes the two halves of the first product, gate g and up u, elementwise in float32:

    swiglu      p = (g * sigmoid(alpha * g)) * (u + beta)           clamped: g <= c, -c <= u <= c
    swiglustep  the same, but the clamp of g applies to g * sigmoid(g)
    situ        p = (alpha * tanh(g / alpha) * sigmoid(g)) * (beta * tanh(u / beta))

What decides the last bit is written down in ``ActivationRecipe``: whether g and u are rounded to bf16 first
(SM100) or not (SM90), and whether g is divided by ``1 + exp(-z)`` or multiplied by its reciprocal. Fast math
replaces exp and the reciprocal by instructions that are not correctly rounded:

    exp(-z)     ex2.approx(fl(-z * fl(log2 e)))
    1 / d       rcp.approx.ftz(d)

and without fast math exp is CUDA's expf, itself built on ex2.approx: none of them is the correctly rounded
value. The three instructions behind them (MUFU.EX2, MUFU.RCP, MUFU.RSQ) are modelled in ``reference._mufu``.

Source: NUMERICS 8.2, 8.7, 8.8 and 17; the instruction sequences are what nvcc 13.0 generates for sm_90a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reference._float32 import canonical_nan, fma, from_bits, gpu_max, gpu_min, round_to_bf16
from reference._mufu import ex2, rcp, rsqrt

__all__ = [
    "ACTIVATION_RECIPES",
    "ActivationRecipe",
    "cuda_expf",
    "cuda_rsqrtf",
    "ex2_approx",
    "ex2_approx_ftz",
    "fast_expf",
    "rcp_approx",
    "rcp_approx_ftz",
    "rsqrt_approx_ftz",
    "situ",
    "swiglu",
]

_LOG2_E = float.fromhex("0x1.715476p+0")  # fl(log2 e), 0x3FB8AA3B
_LOG2_E_LOW = float.fromhex("0x1.4ae0c0p-26")  # log2 e - _LOG2_E, 0x32A57060


def ex2_approx_ftz(values: Tensor) -> Tensor:
    """``ex2.approx.ftz.f32``: 2**x, subnormal inputs and results flushed to zero. float32, any shape."""
    return ex2(_float32(values))


def rcp_approx_ftz(values: Tensor) -> Tensor:
    """``rcp.approx.ftz.f32``: 1/x, subnormal inputs and results flushed to zero. float32, any shape."""
    return rcp(_float32(values))


def rsqrt_approx_ftz(values: Tensor) -> Tensor:
    """``rsqrt.approx.ftz.f32``: 1/sqrt(x), subnormal inputs flushed to zero. float32, any shape."""
    return rsqrt(_float32(values))


def ex2_approx(values: Tensor) -> Tensor:
    """``ex2.approx.f32``: below -126 the square of the result for half the exponent, which may be
    subnormal."""
    values = _float32(values)
    small = values < -126.0
    result = ex2(torch.where(small, values * 0.5, values))
    return canonical_nan(torch.where(small, result * result, result))


def rcp_approx(values: Tensor) -> Tensor:
    """``rcp.approx.f32``: scales inputs and results that would be flushed."""
    values = _float32(values)
    magnitude = values.abs()
    scale = torch.where(magnitude > 2.0**126, 0.25, torch.where(magnitude < 2.0**-126, 2.0**24, 1.0))
    return canonical_nan(rcp(values * scale) * scale)


def cuda_rsqrtf(values: Tensor) -> Tensor:
    """CUDA's ``rsqrtf`` (``rsqrt.approx.f32``): scales subnormal inputs."""
    values = _float32(values)
    small = values.abs() < 2.0**-126
    result = rsqrt(torch.where(small, values * 2.0**24, values))
    return torch.where(small, result * 2.0**12, result)


def cuda_expf(values: Tensor) -> Tensor:
    """CUDA's ``expf`` without fast math: x = n ln 2 + r in two fma, then ex2.approx.ftz(r / ln 2) * 2**n."""
    values = _float32(values)
    quotient = fma(values, float.fromhex("0x1.77313ap-8"), 0.5)
    quotient = torch.where(quotient > 0, quotient, 0.0).clamp(max=1.0)  # saturation takes NaN to zero
    n = (quotient.double() * 252.0).floor()  # fma rounding down to an integer; n - 126 is the exponent
    rest = fma(values, _LOG2_E, 126.0 - n)
    rest = fma(values, _LOG2_E_LOW, rest)
    return canonical_nan(ex2(rest) * from_bits((n.int() + 1) << 23))


def fast_expf(values: Tensor) -> Tensor:
    """CUDA's ``__expf`` without flushing: ``ex2.approx.f32(fl(x * fl(log2 e)))``."""
    return ex2_approx(_float32(values) * _LOG2_E)


def _float32(values: Tensor) -> Tensor:
    if values.dtype != torch.float32:
        raise TypeError(f"values: expected float32, got {values.dtype}")
    return values


@dataclass(frozen=True)
class ActivationRecipe:
    """What decides the last bit of an activation.

    input_rounding: gate, up and the clamp's bound are rounded to bf16 first, or stay float32. sigmoid:
    without fast math, ``g / d`` or ``g * (1 / d)``. nan_up: the bound that a NaN up value becomes under a
    clamp (a NaN gate becomes the upper one).
    """

    name: str
    input_rounding: Literal["bf16", "none"]
    sigmoid: Literal["divide", "multiply_reciprocal"]
    nan_up: Literal["lower", "upper"]
    source: str


ACTIVATION_RECIPES: dict[str, ActivationRecipe] = {
    row.name: row
    for row in (
        ActivationRecipe("sm90", "none", "multiply_reciprocal", "upper", "NUMERICS 8.8, 17 (measured); SASS"),
        ActivationRecipe("sm100", "bf16", "divide", "lower", "NUMERICS 8.2; PTX ISA min, max"),
        ActivationRecipe("sm100_sgl", "bf16", "multiply_reciprocal", "lower", "NUMERICS 8.7"),
    )
}


def swiglu(
    gate: Tensor,
    up: Tensor,
    *,
    clamp: float | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    fast_math: bool,
    step: bool = False,
    recipe: ActivationRecipe | str = "sm90",
) -> Tensor:
    """``(g * sigmoid(alpha * g)) * (u + beta)`` in the order and precision of the kernels; float32, same
    shape.

    clamp: bound c, g <= c and -c <= u <= c; None (or Inf) leaves both alone. step: ``swiglustep``, the bound
    applies to ``g * sigmoid(alpha * g)`` instead of g, unrounded. swigluoai is alpha = 1.702, beta = 1 with a
    clamp. TypeError unless gate and up are float32, ValueError unless their shapes agree and clamp is
    not negative.
    """
    row = _recipe(recipe)
    gate, up = _gate_and_up(gate, up)
    if row.input_rounding == "bf16":
        gate, up = round_to_bf16(gate), round_to_bf16(up)
    post_clamp = None
    if clamp is not None and clamp != float("inf"):
        if not clamp >= 0:
            raise ValueError(f"clamp: expected a bound that is not negative, or None, got {clamp}")
        exact = torch.tensor(clamp, dtype=torch.float32, device=gate.device)
        bound = round_to_bf16(exact) if row.input_rounding == "bf16" else exact
        if step:
            post_clamp = exact
        else:
            gate = gpu_min(gate, bound)
        nan_up = bound if row.nan_up == "upper" else -bound
        up = torch.where(up.isnan(), nan_up, gpu_min(gpu_max(up, -bound), bound))
    scaled = gate if alpha == 1.0 else gate * _constant(alpha, gate)
    activated = _times_sigmoid(gate, scaled, fast_math, row)
    if post_clamp is not None:
        activated = gpu_min(activated, post_clamp)
    if beta != 0.0:
        up = up + _constant(beta, up)
    return canonical_nan(activated * up)


def situ(
    gate: Tensor,
    up: Tensor,
    *,
    alpha: float,
    beta: float = 0.0,
    fast_math: bool,
    recipe: ActivationRecipe | str = "sm100",
) -> Tensor:
    """SiTU: ``(alpha tanh(g / alpha) sigmoid(g)) * (beta tanh(u / beta))``, beta 0 leaves u; tanh(v) is
    ``2 sigmoid(2v) - 1`` and the divisions are multiplications by the float32 reciprocal. Shapes as
    ``swiglu``."""
    row = _recipe(recipe)
    gate, up = _gate_and_up(gate, up)
    if alpha == 0.0:
        raise ValueError("alpha: SiTU needs a non-zero alpha")
    if row.input_rounding == "bf16":
        gate, up = round_to_bf16(gate), round_to_bf16(up)

    def scaled_tanh(values: Tensor, scale: float) -> Tensor:
        constant = _constant(scale, values)
        doubled = (values * (torch.ones_like(constant) / constant)) * 2.0
        return (_sigmoid(doubled, fast_math) * 2.0 - 1.0) * constant

    activated = scaled_tanh(gate, alpha) * _sigmoid(gate, fast_math)
    if beta != 0.0:
        up = scaled_tanh(up, beta)
    return canonical_nan(activated * up)


def _denominator(values: Tensor, fast_math: bool) -> Tensor:
    return (fast_expf(-values) if fast_math else cuda_expf(-values)) + 1.0


def _sigmoid(values: Tensor, fast_math: bool) -> Tensor:
    denominator = _denominator(values, fast_math)
    return rcp(denominator) if fast_math else torch.ones_like(denominator) / denominator


def _times_sigmoid(gate: Tensor, scaled: Tensor, fast_math: bool, row: ActivationRecipe) -> Tensor:
    if fast_math or row.sigmoid == "multiply_reciprocal":
        return gate * _sigmoid(scaled, fast_math)
    return gate / _denominator(scaled, fast_math)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _gate_and_up(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    for argument, tensor in (("gate", gate), ("up", up)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{argument}: expected float32, got {tensor.dtype}")
    if gate.shape != up.shape:
        raise ValueError(f"up: expected the shape of gate {list(gate.shape)}, got {list(up.shape)}")
    return gate, up


def _recipe(recipe: ActivationRecipe | str) -> ActivationRecipe:
    if isinstance(recipe, ActivationRecipe):
        return recipe
    if recipe not in ACTIVATION_RECIPES:
        raise ValueError(f"recipe: expected one of {sorted(ACTIVATION_RECIPES)}, got {recipe!r}")
    return ACTIVATION_RECIPES[recipe]
