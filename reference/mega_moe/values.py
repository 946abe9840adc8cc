"""Operands as numbers: codes times scales in float64, exactly."""

from __future__ import annotations

from torch import Tensor

from reference.formats import decode
from reference.mega_moe.families import MegaMoeFamily
from reference.mega_moe.linear import WEIGHT_BLOCK

__all__ = ["act_values", "weight_values"]

_FORMATS = {"e4m3": "e4m3fn", "e2m1": "e2m1"}


def act_values(family: MegaMoeFamily, codes: Tensor, scales: Tensor | None) -> Tensor:
    """Activations, of either layer: codes [M, K] one a byte (or bfloat16), scales [M, groups] float32 or
    codes -> float64."""
    if family.act_format == "bf16":
        return codes.double()
    assert scales is not None
    return _grouped(decode(codes, _FORMATS[family.act_format]).double(), _scale_values(family, scales))


def weight_values(family: MegaMoeFamily, codes: Tensor, scales: Tensor | None) -> Tensor:
    """One expert's weights: codes [N, K], scales [N, groups], on SM90 float32 [N / 128, K / 128] -> float64
    [N, K]."""
    if family.weight_format == "bf16":
        return codes.double()
    assert scales is not None
    values = decode(codes, _FORMATS[family.weight_format]).double()
    factors = _scale_values(family, scales)
    return _grouped(values, factors if family.scale_format else factors.repeat_interleave(WEIGHT_BLOCK, 0))


def _scale_values(family: MegaMoeFamily, scales: Tensor) -> Tensor:
    return scales.double() if family.scale_format is None else decode(scales, family.scale_format).double()


def _grouped(values: Tensor, factors: Tensor) -> Tensor:
    return values * factors.repeat_interleave(values.shape[1] // factors.shape[1], 1)
