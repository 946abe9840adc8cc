"""Group quantization to FP8 (and MXFP4): one scale per group of consecutive columns.

Per row and group of ``recipe.group`` columns, all in float32, round to nearest even:

    amax   = max(max |h|, floor)               NaN elements ignored; floor 1e-4
    raw    = amax * fl(1/448)                  or amax / 448 (recipe.scale_division)
    b      = exponent byte of raw, rounded up  UE8M0 only; scale = 2^(b - 127). fp32: scale = raw
    v      = h * (1 / scale)                   a product with the reciprocal, not a quotient
    byte   = E4M3(v)                           nearest even, saturating; NaN -> 0x7F, -0 -> 0x80

Easy to simplify wrongly: the exponent goes up to the next power of two by the bits (log2 is off just above
one); the two forms of raw differ by an ulp for half of all bf16 amax, though never in b; a group with Inf has
byte 254, and whether 1 / 2^127 is the subnormal 2^-127 or 0 decides between 0x7E and 0x7F for the Inf
(recipe.inf_reciprocal).

Source: NUMERICS 2 to 2.8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference._float32 import constant, reciprocal
from reference._groups import check_hidden, group_amax, row_chunks
from reference.formats import FORMATS, Format, decode_ue8m0_shift, encode, encode_ue8m0_scale
from reference.recipes import Fp8GroupRecipe


@dataclass(frozen=True)
class Fp8Groups:
    """Quantized rows. T tokens, H columns, G = H / group; everything but the codes is small.

    codes: uint8 [T, H], E4M3 (or unpacked E2M1) codes.
    exponents: uint8 [T, G] UE8M0 bytes, or None with fp32 scales.
    scales: float32 [T, G], what is stored: 2^(byte - 127), or the fp32 scale.
    amax: float32 [T, G], after the floor. raw_scale: float32 [T, G], before rounding to a power of two.
    reciprocal: float32 [T, G], the factor of the elements (of the unrounded scale, if the recipe says so).
    scaled: float32 [T, H], the elements before rounding; None unless asked for.
    """

    codes: Tensor
    exponents: Tensor | None
    scales: Tensor
    amax: Tensor
    raw_scale: Tensor
    reciprocal: Tensor
    scaled: Tensor | None = None


def quantize_fp8_groups(hidden: Tensor, recipe: Fp8GroupRecipe, *, intermediates: bool = False) -> Fp8Groups:
    """Quantizes hidden [T, H] (bf16, fp16 or fp32; any strides) by ``recipe``.

    TypeError for another dtype, ValueError for a shape that is not [T, H] with H a multiple of the group.
    Source: NUMERICS 2; the recipe names its own.
    """
    check_hidden(hidden, recipe.group)
    num_tokens, num_columns = hidden.shape
    device, num_groups = hidden.device, num_columns // recipe.group
    codes = torch.empty((num_tokens, num_columns), dtype=torch.uint8, device=device)
    amax = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=device)
    scaled = (
        torch.empty((num_tokens, num_columns), dtype=torch.float32, device=device) if intermediates else None
    )
    for rows in row_chunks(num_tokens, num_columns):
        values = hidden[rows].float().contiguous().view(-1, num_groups, recipe.group)
        amax[rows] = group_amax(values, propagate_nan=recipe.nan_amax == "propagate").clamp_min(
            recipe.amax_floor
        )
        divided = _divide(values, group_scales(amax[rows], recipe), recipe)
        codes[rows] = _encode_elements(divided, recipe).view(-1, num_columns)
        if scaled is not None:
            scaled[rows] = divided.view(-1, num_columns)
    scales = group_scales(amax, recipe)
    return Fp8Groups(codes, scales.exponents, scales.stored, amax, scales.raw, scales.reciprocal, scaled)


@dataclass(frozen=True)
class GroupScales:
    """From amax to scale, elementwise, all of the shape of amax and float32 but the exponents.

    raw: before rounding to a power of two. exponents: UE8M0 bytes (uint8) or None. stored: the scale.
    divisor, reciprocal: what elements are divided by, and its reciprocal.
    """

    raw: Tensor
    exponents: Tensor | None
    stored: Tensor
    divisor: Tensor
    reciprocal: Tensor


def group_scales(amax: Tensor, recipe: Fp8GroupRecipe) -> GroupScales:
    """float32 amax (floor applied), any shape -> the scale and its steps. Source: NUMERICS 2, 2.3, 2.4."""
    largest = _element_format(recipe).max_value
    if recipe.scale_division == "divide":
        raw = amax / constant(amax, largest)
    else:
        raw = amax * constant(amax, 1.0 / largest)
    if recipe.scale_format == "fp32":
        return GroupScales(raw, None, raw, raw, reciprocal(raw))
    exponents = encode_ue8m0_scale(raw, rounding=recipe.scale_rounding, smallest=recipe.scale_min_exponent)
    stored = decode_ue8m0_shift(exponents)
    if recipe.scale_rounded_after_quantization:
        return GroupScales(raw, exponents, stored, raw, reciprocal(raw))
    bits = (254 - exponents.to(torch.int32)) << 23
    if recipe.inf_reciprocal == "subnormal":
        bits = torch.where(bits == 0, torch.full_like(bits, 1 << 22), bits)  # 2^-127
    return GroupScales(raw, exponents, stored, stored, bits.view(torch.float32))


def _divide(values: Tensor, scales: GroupScales, recipe: Fp8GroupRecipe) -> Tensor:
    if recipe.element_division == "divide":
        return values / scales.divisor.unsqueeze(-1)
    return values * scales.reciprocal.unsqueeze(-1)


def _element_format(recipe: Fp8GroupRecipe) -> Format:
    return FORMATS[recipe.element_format]


def _encode_elements(scaled: Tensor, recipe: Fp8GroupRecipe) -> Tensor:
    return encode(
        scaled,
        _element_format(recipe),
        rounding=recipe.element_rounding,
        overflow=recipe.overflow,
        negative_zero=recipe.negative_zero,
        subnormals=recipe.subnormals,
    )
