"""RMSNorm, bfloat16 rounding and one-level NVFP4 in one kernel, a row a program."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs

import triton
import triton.language as tl

from megamoe.kernels.numerics import add
from megamoe.kernels.nvfp4 import quantize_block
from megamoe.kernels.nvfp4_tile import (
    GROUP,
    even_columns,
    group_amax,
    load_tile,
    store_scales,
    store_words,
)


@triton.jit
def row_sum_of_squares(hidden, row_offset, stride, HIDDEN: tl.constexpr):
    """Sum of squares of one row in a stated order, the one that the recorded kernel's compiler chose.

    Lane t of 256 adds the squares of columns 2048 c + 8 t + e one after another, c and then e ascending;
    then lanes 16, 8, 4, 2, 1 apart are added inside each 32, then 32s that are 4, 2, 1 apart. Every step
    is an explicit addition of two numbers: no compiler chooses an order.
    """
    lanes = tl.arange(0, 2048)
    total = tl.zeros((256,), tl.float32)
    for c in tl.static_range((HIDDEN + 2047) // 2048):
        columns = c * 2048 + lanes
        values = tl.load(
            hidden + row_offset + columns.to(tl.int64) * stride, mask=columns < HIDDEN, other=0.0
        )
        values = values.to(tl.float32)
        even, odd = tl.split(tl.reshape(values * values, (256, 2, 2, 2)))
        columns_04, columns_26 = tl.split(even)
        columns_15, columns_37 = tl.split(odd)
        v0, v4 = tl.split(columns_04)
        v2, v6 = tl.split(columns_26)
        v1, v5 = tl.split(columns_15)
        v3, v7 = tl.split(columns_37)
        total = total + v0 + v1 + v2 + v3 + v4 + v5 + v6 + v7
    lanes_left = tl.reshape(total, (8, 2, 16))
    lanes_left = tl.reshape(tl.reduce(lanes_left, 1, add), (8, 2, 8))
    lanes_left = tl.reshape(tl.reduce(lanes_left, 1, add), (8, 2, 4))
    lanes_left = tl.reshape(tl.reduce(lanes_left, 1, add), (8, 2, 2))
    lanes_left = tl.reduce(lanes_left, 1, add)
    warps = tl.reshape(tl.reduce(lanes_left, 1, add), (2, 4))
    warps = tl.reshape(tl.reduce(warps, 0, add), (2, 2))
    return tl.reduce(tl.reduce(warps, 0, add), 0, add)


@triton.jit
def normalize(values, weight, rstd, gain_center):
    """bfloat16((h * rstd) * gamma) as float32: two rounded products, then one more rounding."""
    gamma = weight.to(tl.float32) + gain_center
    return ((values.to(tl.float32) * rstd) * gamma).to(tl.bfloat16).to(tl.float32)


@triton.jit
def stage_nvfp4_norm_kernel(
    hidden,
    hidden_stride_m,
    hidden_stride_h,
    norm_weight,
    norm_weight_stride,
    norm_eps,
    gain_center,
    inverse_hidden,
    x,
    x_stride_m,
    x_sf,
    x_sf_stride_m,
    x_sf_stride_k,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    X_WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    square_sum = row_sum_of_squares(hidden, row * hidden_stride_m, hidden_stride_h, HIDDEN)
    # IEEE square root and quotient, where production uses the approximate rsqrt: see `prepare_...norm`.
    rstd = tl.div_rn(1.0, tl.sqrt_rn(square_sum * inverse_hidden + norm_eps))
    live = tl.full((1, 1), 1, tl.int1)
    rows = tl.full((1, 1), 0, tl.int64) + row
    GROUPS: tl.constexpr = BLOCK_H // GROUP
    MASK: tl.constexpr = HIDDEN % BLOCK_H != 0
    for i in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        column = i * BLOCK_H
        tile = load_tile(
            hidden, rows * hidden_stride_m, hidden_stride_h, column, live, GROUPS, MASK, HIDDEN, False
        )
        weights = load_tile(
            norm_weight, rows * 0, norm_weight_stride, column, live, GROUPS, MASK, HIDDEN, False
        )
        # A row without a finite deviation would turn the zeros outside the matrix into NaN.
        inside = even_columns(column, GROUPS) < HIDDEN
        values = (
            tl.where(inside, normalize(tile[0], weights[0], rstd, gain_center), 0.0),
            tl.where(inside, normalize(tile[1], weights[1], rstd, gain_center), 0.0),
            tl.where(inside, normalize(tile[2], weights[2], rstd, gain_center), 0.0),
            tl.where(inside, normalize(tile[3], weights[3], rstd, gain_center), 0.0),
        )
        words, code = quantize_block(values, group_amax(values))
        store_words(x, rows * x_stride_m, column, words, live, HIDDEN, X_WORDS)
        store_scales(x_sf, rows * x_sf_stride_m, x_sf_stride_k, column, code, live, HIDDEN)
