"""The reference's own quantization keys, and what staging accepts of any key with the same fields.

Keys are read by their fields alone (dtype, scale.dtype, scale.static, scale.group_shape.row and col, scale2,
symmetric), so that the keys of the package under test can be handed in. A key here equals every key with
equal fields; scale dtypes uint8 and float8_e8m0fnu both mean UE8M0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from reference._checks import require
from reference.recipes import RECIPES, Fp8GroupRecipe

_UE8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_TILE = 128  # columns that one int32 scale word covers


@dataclass(frozen=True)
class GroupShape:
    """Rows and columns that share a scale."""

    row: int
    col: int


@dataclass(frozen=True)
class ScaleDesc:
    """dtype of a scale, whether it is static, and what shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True, eq=False)
class QuantKey:
    """How a tensor is quantized."""

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True

    def __eq__(self, other: object) -> bool:
        mine, theirs = key_fields(self), key_fields(other)
        return NotImplemented if theirs is None else mine == theirs

    def __hash__(self) -> int:
        return hash(key_fields(self))


kMxfp8Dynamic = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.uint8, False, GroupShape(1, 32)))
kFp8Dynamic128 = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, False, GroupShape(1, 128)))


def key_fields(key: Any) -> tuple[object, ...] | None:
    """The fields of any key as a tuple of plain values (UE8M0 as "ue8m0"), or None if it has others."""
    try:
        return (key.dtype, _scale_fields(key.scale), _scale_fields(key.scale2), bool(key.symmetric))
    except AttributeError:
        return None


def fp8_recipe_of_key(key: Any) -> Fp8GroupRecipe:
    """The production recipe that a hidden_quant key asks for.

    ValueError unless the key is symmetric dynamic e4m3fn with one scale (no second one) per 1 x col group,
    col dividing 128 and at least 16, with UE8M0 scales (col at least 32: smaller groups' bytes do not fit the
    word of a tile) or float32 scales. Source: NUMERICS 2.6.
    """
    expected = (
        f"a symmetric dynamic float8_e4m3fn key with one scale per 1 x col group, col dividing {_TILE}, "
        "float32 (col 16 to 128) or UE8M0 (col 32 to 128)"
    )
    require(key_fields(key) is not None, "hidden_quant", expected, repr(key))
    scale = key.scale
    holds = key.dtype == torch.float8_e4m3fn and key.symmetric and key.scale2 is None and not scale.static
    holds = holds and scale.group_shape.row == 1 and scale.dtype in (*_UE8M0_DTYPES, torch.float32)
    kind = "ue8m0" if scale.dtype in _UE8M0_DTYPES else "fp32"
    name = f"fp8_{kind}_g{scale.group_shape.col}"
    require(holds and name in RECIPES, "hidden_quant", expected, repr(key))
    return cast(Fp8GroupRecipe, RECIPES[name])


def _scale_fields(scale: Any) -> tuple[object, ...] | None:
    if scale is None:
        return None
    dtype = "ue8m0" if scale.dtype in _UE8M0_DTYPES else scale.dtype
    return (dtype, bool(scale.static), scale.group_shape.row, scale.group_shape.col)
