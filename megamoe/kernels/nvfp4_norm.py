"""RMSNorm, bfloat16 rounding and one-level NVFP4 in one kernel."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs

import triton
import triton.language as tl

from megamoe.kernels.numerics import add
from megamoe.kernels.nvfp4 import quantize_block
from megamoe.kernels.nvfp4_tile import (
    GROUP,
    even_columns,
    float32_tile,
    load_tile,
    store_scales,
    store_words,
)


@triton.jit
def sums_of_squares(hidden, row_offsets, stride, live, HIDDEN: tl.constexpr):
    """Sums of squares of rows [M] in a stated order, the one that the recorded kernel's compiler chose.

    Lane t of 256 adds the squares of columns 2048 c + 8 t + e one after another, c and then e ascending;
    then lanes 16, 8, 4, 2, 1 apart are added inside each 32, then 32s that are 4, 2, 1 apart. Every step
    is an explicit addition of two numbers: no compiler chooses an order.
    """
    M: tl.constexpr = row_offsets.shape[0]
    lanes = tl.arange(0, 2048)[None, :]
    total = tl.zeros((M, 256), tl.float32)
    for c in tl.static_range((HIDDEN + 2047) // 2048):
        columns = c * 2048 + lanes
        pointers = hidden + row_offsets + columns.to(tl.int64) * stride
        values = tl.load(pointers, mask=live & (columns < HIDDEN), other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(values * values, (M, 256, 2, 2, 2)))
        columns_04, columns_26 = tl.split(even)
        columns_15, columns_37 = tl.split(odd)
        v0, v4 = tl.split(columns_04)
        v2, v6 = tl.split(columns_26)
        v1, v5 = tl.split(columns_15)
        v3, v7 = tl.split(columns_37)
        total = total + v0 + v1 + v2 + v3 + v4 + v5 + v6 + v7
    left = tl.reduce(tl.reshape(total, (M, 8, 2, 16)), 2, add)
    left = tl.reduce(tl.reshape(left, (M, 8, 2, 8)), 2, add)
    left = tl.reduce(tl.reshape(left, (M, 8, 2, 4)), 2, add)
    left = tl.reduce(tl.reshape(left, (M, 8, 2, 2)), 2, add)
    left = tl.reduce(left, 2, add)
    left = tl.reduce(tl.reshape(left, (M, 2, 4)), 1, add)
    left = tl.reduce(tl.reshape(left, (M, 2, 2)), 1, add)
    return tl.reduce(left, 1, add)


@triton.jit
def normalize(values, weight, rstd, gain_center):
    """bfloat16((h * rstd) * gamma) as float32: two rounded products, then one more rounding."""
    gamma = weight + gain_center
    return ((values * rstd) * gamma).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def stage_nvfp4_norm_kernel(
    hidden,
    hidden_stride_m,
    hidden_stride_h,
    tiles,  # the hidden states once more, as words of two columns with PAIRS
    tiles_stride_m,
    tiles_stride_h,
    norm_weight,  # [1, H], as words of two columns with WEIGHT_PAIRS
    norm_weight_stride,
    norm_eps,
    gain_center,
    inverse_hidden,
    x,
    x_stride_m,
    x_sf,
    x_sf_stride_m,
    x_sf_stride_k,
    num_tokens,
    HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    WEIGHT_PAIRS: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    X_WORDS: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tokens.to(tl.int64)[:, None]
    live = (tokens < num_tokens)[:, None]
    square_sum = sums_of_squares(hidden, rows * hidden_stride_m, hidden_stride_h, live, HIDDEN)
    # IEEE square root and quotient, where production uses the approximate rsqrt: see `prepare_...norm`.
    rstd = tl.div_rn(1.0, tl.sqrt_rn(square_sum * inverse_hidden + norm_eps))[:, None, None]
    GROUPS: tl.constexpr = BLOCK_H // GROUP
    MASK: tl.constexpr = HIDDEN % BLOCK_H != 0
    for i in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        column = i * BLOCK_H
        raw = load_tile(
            tiles, rows * tiles_stride_m, tiles_stride_h, column, live, GROUPS, MASK, HIDDEN, PAIRS
        )
        raw_weights = load_tile(
            norm_weight, rows * 0, norm_weight_stride, column, live, GROUPS, MASK, HIDDEN, WEIGHT_PAIRS
        )
        values = float32_tile(raw, PAIRS, DTYPE)
        weights = float32_tile(raw_weights, WEIGHT_PAIRS, WEIGHT_DTYPE)
        # A row without a finite deviation would turn the zeros outside the matrix into NaN.
        inside = live[:, :, None] & (even_columns(column, GROUPS) < HIDDEN)
        normed = (
            tl.where(inside, normalize(values[0], weights[0], rstd, gain_center), 0.0),
            tl.where(inside, normalize(values[1], weights[1], rstd, gain_center), 0.0),
            tl.where(inside, normalize(values[2], weights[2], rstd, gain_center), 0.0),
            tl.where(inside, normalize(values[3], weights[3], rstd, gain_center), 0.0),
        )
        words, code = quantize_block(normed)
        store_words(x, rows * x_stride_m, column, words, live, HIDDEN, X_WORDS)
        store_scales(x_sf, rows * x_sf_stride_m, x_sf_stride_k, column, code, live, HIDDEN)
