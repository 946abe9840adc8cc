"""float32 constants and conversions whose last bit must not depend on the device or the library."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reciprocal", "scalar", "to_bf16"]

_BF16_NAN = 0x7FFF  # what cvt.rn.bf16.f32 gives for every NaN


def scalar(value: float, like: Tensor) -> Tensor:
    """A float32 scalar tensor on the device of ``like``: dividing by it is a division on every device."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def reciprocal(values: Tensor) -> Tensor:
    """1 / values, IEEE division."""
    return torch.ones((), dtype=torch.float32, device=values.device) / values


def to_bf16(values: Tensor) -> Tensor:
    """float32 -> bfloat16, to nearest even; every NaN becomes 0x7fff."""
    rounded = values.to(torch.bfloat16).view(torch.int16)
    return torch.where(values.isnan(), _BF16_NAN, rounded).to(torch.int16).view(torch.bfloat16)
