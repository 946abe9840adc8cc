"""From the activation's result to l2_acts: group maxima, scales and codes, one function a rule.

Source: NUMERICS 8.3 (SM100), 8.8 and 17 (SM90; floor and reciprocal measured).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference._float32 import constant, reciprocal, to_bf16
from reference.activation import rcp_approx_ftz
from reference.formats import decode, encode
from reference.mega_moe.families import MegaMoeFamily

__all__ = ["HiddenActs", "requantize"]

_HARDWARE_E2M1_NAN = 7  # cvt.rn.satfinite.e2m1x2: a NaN becomes +6; the sign of a zero is kept


@dataclass(frozen=True)
class HiddenActs:
    """The L2 GEMM's operand. codes: uint8 [M, I] one code a byte, or bfloat16. scales [M, I / group]:
    float32 on SM90, codes uint8 elsewhere, None for bf16."""

    codes: Tensor
    scales: Tensor | None


def requantize(
    family: MegaMoeFamily,
    values: Tensor,
    weights: Tensor,
    *,
    fast_math: bool = True,
    swap_ab: bool = False,
    a2_scale: Tensor | None = None,
    l2_activation_scale: float = 1.0,
) -> HiddenActs:
    """values float32 [M, I]: the activation's result before the routing weight; weights float32 [M] (ones
    for a shared expert). a2_scale: float32 scalar of the expert (fp4xfp4). l2_activation_scale: of the
    launch (nvfp4)."""
    rule = family.requantization
    weighted = values * weights[:, None] if family.weight_at == "activation" else values
    if rule == "bf16":
        return HiddenActs(to_bf16(weighted), None)
    if rule == "fp32_g64":
        return _fp32_g64(values, weighted, weights, swap_ab)
    if rule == "ue8m0_g32":
        return _ue8m0_g32(weighted)
    if rule == "ue4m3_g16_scaled":
        return _ue4m3_scaled(weighted, a2_scale, fast_math)
    return _ue4m3_divided(weighted, l2_activation_scale)


def _amax(values: Tensor, group: int) -> Tensor:
    """Largest magnitude of each group; a NaN is ignored."""
    return values.reshape(len(values), -1, group).abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)


def _scaled(values: Tensor, inverse: Tensor) -> Tensor:
    return values * inverse.repeat_interleave(values.shape[1] // inverse.shape[1], 1)


def _fp32_g64(values: Tensor, weighted: Tensor, weights: Tensor, swap_ab: bool) -> HiddenActs:
    """Where the operands are not swapped, the maximum is taken before the weight. For finite values that is
    the same (rounding is monotone); but it is taken pair by pair, and a NaN in an even column hides its odd
    neighbour. Measured on an H200, as is the reciprocal of the rounded scale."""
    if swap_ab:
        amax = _amax(weighted, 64)
    else:
        pairs = values.reshape(len(values), -1, 2).abs()
        first, second = pairs.unbind(-1)
        pair = torch.where(first.isnan(), 0.0, torch.where(second > first, second, first))
        amax = pair.reshape(len(values), -1, 32).amax(-1) * weights.abs()[:, None]
    floor = constant(amax, 1e-10)
    scales = torch.where(amax > floor, amax, floor) * constant(amax, 1 / 448)
    return HiddenActs(encode(_scaled(weighted, reciprocal(scales)), "e4m3fn"), scales)


def _ue8m0_g32(values: Tensor) -> HiddenActs:
    """Exponent by integer arithmetic on the maximum's bits: ceil(log2(amax / 448)) with a floor; inf gives
    247."""
    bits = _amax(values, 32).view(torch.int32)
    exponents = ((bits + 0x1FFFFF) >> 23).clamp(min=113) - 8
    inverse = ((254 - exponents) << 23).view(torch.float32)
    return HiddenActs(encode(_scaled(values, inverse), "e4m3fn"), exponents.to(torch.uint8))


def _ue4m3_scaled(values: Tensor, a2_scale: Tensor | None, fast_math: bool) -> HiddenActs:
    """One-level NVFP4: the group maximum times the reciprocal of the expert's activation scale."""
    invert = rcp_approx_ftz if fast_math else reciprocal
    r = constant(values, 1.0) if a2_scale is None else invert(a2_scale)
    raw = _amax(values, 16) * constant(values, 1 / 6) * r
    codes = encode(raw.clamp(min=2.0**-9), "e4m3fn")
    decoded = decode(codes, "e4m3fn")
    inverse = r * rcp_approx_ftz(decoded) if fast_math else r / decoded
    return HiddenActs(_e2m1(_scaled(values, inverse)), codes)


def _ue4m3_divided(values: Tensor, activation_scale: float) -> HiddenActs:
    """Two-level NVFP4: an IEEE quotient by 6 * scale."""
    scale = constant(values, activation_scale)
    divisor = scale * 6
    amax = torch.minimum(_amax(values, 16), divisor * 448)
    codes = encode((amax / divisor).clamp(2.0**-9, 448.0), "e4m3fn")
    inverse = reciprocal(decode(codes, "e4m3fn") * scale)
    return HiddenActs(_e2m1(_scaled(values, inverse)), codes)


def _e2m1(values: Tensor) -> Tensor:
    return encode(values, "e2m1", negative_zero="keep", nan_code=_HARDWARE_E2M1_NAN)
