"""Float32 operations whose last bit must not depend on library or device: constants, reciprocals, exact fma,
conversion to 16 bits, GPU minimum and maximum, NaN."""

from __future__ import annotations

import torch
from torch import Tensor

NAN_BITS = 0x7FFFFFFF  # what every NVIDIA float32 instruction returns for NaN
_HALF_NAN_BITS = 0x7FFF  # what the conversions to bf16 and fp16 give for every NaN


def bits(values: Tensor) -> Tensor:
    """float32 -> its bits as int32."""
    return values.view(torch.int32)


def from_bits(pattern: Tensor) -> Tensor:
    """int32 bits -> float32."""
    return pattern.to(torch.int32).view(torch.float32)


def canonical_nan(values: Tensor) -> Tensor:
    """Every NaN replaced by the pattern that NVIDIA GPUs produce."""
    return torch.where(values.isnan(), from_bits(torch.tensor(NAN_BITS, device=values.device)), values)


def constant(like: Tensor, value: float) -> Tensor:
    """``value`` rounded to float32, a scalar tensor on the device of ``like``.

    Arithmetic with a Python number may become a product with its reciprocal; with a tensor it never does.
    """
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def reciprocal(values: Tensor) -> Tensor:
    """float32 -> 1 / values, IEEE division."""
    return constant(values, 1.0) / values


def to_half(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> ``dtype`` (bfloat16 or float16), to nearest even; every NaN becomes 0x7FFF, as in the PTX
    conversions."""
    nan = torch.tensor(_HALF_NAN_BITS, dtype=torch.int16, device=values.device).view(dtype)
    return torch.where(values.isnan(), nan, values.to(dtype))


def to_bf16(values: Tensor) -> Tensor:
    """float32 -> bfloat16 by ``to_half``."""
    return to_half(values, torch.bfloat16)


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c rounded once to float32. Arguments float32 (or Python floats that are float32 values).

    The product is exact in float64. The float64 sum is rounded to odd (its last bit set if it is inexact), so
    that rounding it to float32 cannot be a double rounding.
    """
    device = a.device
    product = a.double() * torch.as_tensor(b, device=device).double()
    addend = torch.as_tensor(c, device=device).double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    pattern = total.view(torch.int64)
    even_and_inexact = (pattern & 1 == 0) & (error != 0) & total.isfinite()
    # One step toward the exact sum makes the last bit odd.
    away = (error > 0) == (total > 0)
    pattern = torch.where(even_and_inexact, torch.where(away, pattern + 1, pattern - 1), pattern)
    return pattern.view(torch.float64).float()


def round_to_bf16(values: Tensor) -> Tensor:
    """float32 -> nearest bfloat16 (ties to even), as float32; NaN stays NaN."""
    pattern = bits(values)
    rounded = pattern + (0x7FFF + (pattern >> 16 & 1)) & -0x10000
    return torch.where(values.isnan(), values, from_bits(rounded))


def gpu_min(values: Tensor, bound: Tensor) -> Tensor:
    """The smaller one; where ``values`` is NaN, the bound."""
    return torch.where(values.isnan() | (bound < values), bound, values)


def gpu_max(values: Tensor, bound: Tensor) -> Tensor:
    """The larger one; where ``values`` is NaN, the bound."""
    return torch.where(values.isnan() | (bound > values), bound, values)
