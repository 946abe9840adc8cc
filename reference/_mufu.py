"""The GPU's multifunction unit: 2**x, 1/x and 1/sqrt(x) (MUFU.EX2, MUFU.RCP, MUFU.RSQ of the machine code).

Correctly rounded for now in all but name: the measured deviations of the unit are not in yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference._float32 import canonical_nan

_SMALLEST_NORMAL = 2.0**-126


def _flush(values: Tensor) -> Tensor:
    return torch.where(values.abs() < _SMALLEST_NORMAL, values * 0.0, values)


def ex2(values: Tensor) -> Tensor:
    """2**x in float32, subnormals flushed."""
    return canonical_nan(_flush(torch.exp2(_flush(values).double()).float()))


def rcp(values: Tensor) -> Tensor:
    """1/x in float32, subnormals flushed."""
    flushed = _flush(values).double()
    return canonical_nan(_flush((torch.ones_like(flushed) / flushed).float()))


def rsqrt(values: Tensor) -> Tensor:
    """1/sqrt(x) in float32, subnormal inputs flushed."""
    root = _flush(values).double().sqrt()
    return canonical_nan((torch.ones_like(root) / root).float())
