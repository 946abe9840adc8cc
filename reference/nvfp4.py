"""NVFP4 quantization: E2M1 elements, one E4M3 scale per 16 columns, and at two levels a float32 scale a
token.

Two levels (recipe "nvfp4_token"), per token, all in float32, round to nearest even:

    xs = max(row amax, fl(1e-12)) * fl(1/2688)     a product, not a quotient
    u  = h / xs                                    a quotient
    S  = E4M3(min(max(max|u| * fl(1/6), 2^-9), 448))
    code = E2M1(u / S)                             a second quotient: bf16 ties are no longer ties

One level ("nvfp4_block"), per group:

    S  = E4M3(max(max|h| * fl(1/6), 2^-9))         no upper bound; the conversion saturates
    code: |h| compared with c * S for the midpoints c, exact products

Norm-fused: RMSNorm in float32, rounded to bf16, then one level; exact given the reciprocal deviation.

Easy to simplify wrongly: E2M1 codes drop the sign of zero; NaN elements are ignored in every amax and have
code 0; a row with Inf has scale Inf, byte 0x01 and codes 0 at two levels, but byte 0x7E and code 7 at one
level.

Source: NUMERICS 3a to 3d.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from reference._float32 import constant, reciprocal, to_bf16
from reference._groups import check_hidden, group_amax, row_chunks
from reference.formats import E2M1, E4M3FN, UE4M3, decode, encode, pack_e2m1
from reference.recipes import Nvfp4Recipe


@dataclass(frozen=True)
class Nvfp4Groups:
    """Quantized rows. T tokens, H columns, G = H / group.

    codes: uint8 [T, H], one E2M1 code a byte. packed: uint8 [T, H / 2], even columns in bits 3..0.
    scale_codes: uint8 [T, G] E4M3. scales: float32 [T, G], decoded. raw_scales: float32 [T, G], before E4M3.
    token_scales: float32 [T] at level "token", else None. amax: float32 [T, G] of the original values.
    scaled: float32 [T, H], elements before rounding; None unless asked for.
    """

    codes: Tensor
    packed: Tensor
    scale_codes: Tensor
    scales: Tensor
    raw_scales: Tensor
    token_scales: Tensor | None
    amax: Tensor
    scaled: Tensor | None = None


def quantize_nvfp4(
    hidden: Tensor, recipe: Nvfp4Recipe, *, global_scale: float = 1.0, intermediates: bool = False
) -> Nvfp4Groups:
    """Quantizes hidden [T, H] (bf16, fp16 or fp32; any strides) by ``recipe``.

    global_scale: the fixed outer scale at level "block" (a Python float; fl(6 g) is rounded once).
    TypeError for another dtype; ValueError for a shape that is not [T, H] with H a multiple of the group, and
    for a global scale that is not positive and finite or is given at level "token".
    Source: NUMERICS 3a, 3b, 3c.
    """
    check_hidden(hidden, recipe.group)
    if not 0.0 < global_scale < float("inf"):
        raise ValueError(f"global_scale: expected a positive finite number, got {global_scale}")
    if recipe.levels == "token" and global_scale != 1.0:
        raise ValueError(f"global_scale: {recipe.name} computes its outer scale, got {global_scale}")
    num_tokens, num_columns = hidden.shape
    device, num_groups = hidden.device, num_columns // recipe.group
    codes = torch.empty((num_tokens, num_columns), dtype=torch.uint8, device=device)
    packed = torch.empty((num_tokens, num_columns // 2), dtype=torch.uint8, device=device)
    amax = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=device)
    scaled = (
        torch.empty((num_tokens, num_columns), dtype=torch.float32, device=device) if intermediates else None
    )
    for rows in row_chunks(num_tokens, num_columns):
        values = hidden[rows].float().contiguous().view(-1, num_groups, recipe.group)
        amax[rows] = group_amax(values)
        scales = nvfp4_scales(amax[rows], recipe, global_scale)
        outer_is_one = recipe.levels == "block" and global_scale == 1.0
        normalized = values if outer_is_one else values / scales.outer
        divided = _divide(values, normalized, scales, recipe)
        codes[rows] = _encode_elements(divided, recipe).view(-1, num_columns)
        packed[rows] = pack_e2m1(codes[rows])
        if scaled is not None:
            scaled[rows] = divided.view(-1, num_columns)
    scales = nvfp4_scales(amax, recipe, global_scale)
    token_scales = scales.outer.view(-1) if recipe.levels == "token" else None
    return Nvfp4Groups(codes, packed, scales.codes, scales.values, scales.raw, token_scales, amax, scaled)


@dataclass(frozen=True)
class Nvfp4Scales:
    """outer: float32 [T, 1, 1], or [1] for a global scale. raw: float32 [T, G], before E4M3. codes: uint8
    [T, G], E4M3. values: float32 [T, G], decoded."""

    outer: Tensor
    raw: Tensor
    codes: Tensor
    values: Tensor


def nvfp4_scales(amax: Tensor, recipe: Nvfp4Recipe, global_scale: float = 1.0) -> Nvfp4Scales:
    """Group amax float32 [T, G] -> token and block scales. Source: NUMERICS 3a (1 to 4), 3b (1), 3c."""
    sixth = constant(amax, 1.0 / 6.0)
    if recipe.levels == "token":
        # A row without columns has no largest magnitude: the floor is its scale.
        row_amax = (
            torch.nn.functional.pad(amax, (0, 1)).amax(dim=-1, keepdim=True).clamp_min(recipe.token_floor)
        )
        if recipe.token_scale == "divide":
            outer = row_amax / constant(amax, 2688.0)
        else:
            outer = row_amax * constant(amax, 1.0 / 2688.0)
        six_outer = outer * constant(amax, 6.0)
    else:
        outer = constant(amax, global_scale)
        six_outer = constant(amax, 6.0 * global_scale)
    if recipe.block_division == "divide_by_product":
        raw = amax / six_outer
    elif recipe.block_division == "multiply_reciprocals":
        raw = (amax * sixth) * reciprocal(outer)
    else:
        # Division by a positive scale is monotone: the largest quotient is that of the largest magnitude.
        normalized = amax / outer
        normalized = normalized.masked_fill(normalized.isnan(), 0.0)  # Inf / Inf, which the amax ignores
        raw = (
            normalized * sixth
            if recipe.block_division == "multiply_reciprocal"
            else normalized / constant(amax, 6.0)
        )
    raw = raw.clamp(recipe.block_floor, recipe.block_ceiling)
    codes = encode(raw, E4M3FN)
    return Nvfp4Scales(outer.unsqueeze(-1), raw, codes, decode(codes, UE4M3))


def _divide(values: Tensor, normalized: Tensor, scales: Nvfp4Scales, recipe: Nvfp4Recipe) -> Tensor:
    block = scales.values.unsqueeze(-1)
    if recipe.element_division in ("divide", "compare_scaled"):
        # The same: c * S is a float32, and its neighbours' quotients are over half an ulp away from c.
        divided = normalized / block
    elif recipe.element_division == "divide_by_product":
        divided = values / (block * scales.outer)
    else:
        divided = values * reciprocal(block * scales.outer)
    if recipe.zero_scale == "zero":
        divided = divided.masked_fill(block == 0, 0.0)
    return divided


def _encode_elements(scaled: Tensor, recipe: Nvfp4Recipe) -> Tensor:
    return encode(
        scaled,
        E2M1,
        rounding=recipe.element_rounding,
        negative_zero=recipe.negative_zero,
        nan_code=recipe.nan_code,
    )


@dataclass(frozen=True)
class RmsNorm:
    """sum_squares, rstd: float32 [T]. gamma: float32 [H]. normalized: bf16 [T, H]."""

    sum_squares: Tensor
    rstd: Tensor
    gamma: Tensor
    normalized: Tensor


def rms_norm_bf16(
    hidden: Tensor, norm_weight: Tensor, norm_eps: float, gain_center: float, *, rstd: Tensor | None = None
) -> RmsNorm:
    """bf16((h * rstd) * (weight + gain_center)) for hidden [T, H], each product rounded to float32.

    Exact given rstd. A production kernel sums the squares in an order that its compiler chose and takes an
    approximate reciprocal square root; recorded outputs settle neither. Here the order is stated, that of
    eight warps with eight columns a thread (see _sum_by_lanes), and rstd is an IEEE quotient by an IEEE
    square root. rstd: float32 [T], used instead of the computed one. Source: NUMERICS 3d.
    """
    num_tokens, num_columns = hidden.shape
    sum_squares = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
    normalized = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
    gamma = norm_weight.float() + constant(hidden, gain_center)
    deviations = torch.empty_like(sum_squares) if rstd is None else rstd
    for rows in row_chunks(num_tokens, num_columns):
        values = hidden[rows].float()
        sum_squares[rows] = _sum_by_lanes(values * values)
        if rstd is None:
            variance = sum_squares[rows] * constant(values, 1.0 / num_columns) + constant(values, norm_eps)
            # through float64, where a second rounding of a root or a quotient of float32 changes nothing
            root = variance.double().sqrt().float()
            deviations[rows] = (1.0 / root.double()).float()
        normalized[rows] = to_bf16((values * deviations[rows].unsqueeze(-1)) * gamma)
    return RmsNorm(sum_squares, deviations, gamma, normalized)


def _sum_by_lanes(terms: Tensor) -> Tensor:
    """float32 [T] sums of [T, H], each addition rounded: of every 2048 columns, lane t of 256 takes 8 t to
    8 t + 7 and adds them one by one to what it has; then lanes 16, 8, 4, 2, 1 apart in each warp of 32 are
    added, then warps 4, 2, 1 apart."""
    num_tokens, num_columns = terms.shape
    padded = torch.nn.functional.pad(terms, (0, -num_columns % 2048)).view(num_tokens, -1, 256, 8)
    total = torch.zeros_like(padded[:, 0, :, 0])
    for tile, column in itertools.product(range(padded.shape[1]), range(8)):
        total = total + padded[:, tile, :, column]
    total = total.view(num_tokens, 8, 32)
    for distance in (16, 8, 4, 2, 1):
        total = total[..., :distance] + total[..., distance:]
    warps = total[..., 0]
    for distance in (4, 2, 1):
        warps = warps[..., :distance] + warps[..., distance:]
    return warps[..., 0]
