"""Float32 operations whose result must not depend on the library: exact fma, bf16 rounding, GPU minimum,
NaN."""

from __future__ import annotations

import torch
from torch import Tensor

NAN_BITS = 0x7FFFFFFF  # what every NVIDIA float32 instruction returns for NaN


def bits(values: Tensor) -> Tensor:
    """float32 -> its bits as int32."""
    return values.view(torch.int32)


def from_bits(pattern: Tensor) -> Tensor:
    """int32 bits -> float32."""
    return pattern.to(torch.int32).view(torch.float32)


def canonical_nan(values: Tensor) -> Tensor:
    """Every NaN replaced by the pattern that NVIDIA GPUs produce."""
    return torch.where(values.isnan(), from_bits(torch.tensor(NAN_BITS, device=values.device)), values)


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
