"""Staging in NVFP4: two-level (per token), one-level (per group of 16), and RMSNorm-fused one-level.

The two-level kernel holds whole rows in registers: one read, a reduction over the row, then the codes.
Rows with exceptional values (NaN, infinities, or groups so far below the row's maximum that their scale
is subnormal and codes can exceed the grid) take a second, slower path with the same results by definition:
IEEE divisions, NaN as zero and a clamp at the largest code. `numerics` says why the fast path needs none
of them.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# mypy: disable-error-code="assignment"
# ruff: noqa: PLR0124, PLR0912, PLR0915, RUF005  (kernel language: NaN tests, one function a kernel, tuple sums)

import triton
import triton.language as tl

from megamoe.kernels import constants
from megamoe.kernels.fp8_groups import copy_value, quantize_ue8m0_groups
from megamoe.kernels.numerics import (
    E2M1_MAX,
    add,
    drop_negative_zeros,
    e2m1_code,
    float_bits,
    maximum_number,
    maximum_or_nan,
    minimum_number,
    multiply_pair,
    nvfp4_scale_code,
    page_row,
    reciprocal_pair,
    scale_reciprocal_pair,
)
from megamoe.kernels.routing import UNSPECIALIZED, UNSPECIALIZED_ROUTED, store_topk

GROUP = tl.constexpr(constants.NVFP4_GROUP)
TOKEN_AMAX_FLOOR = tl.constexpr(constants.NVFP4_TOKEN_AMAX_FLOOR)
TOKEN_RECIPROCAL = tl.constexpr(constants.NVFP4_TOKEN_RECIPROCAL)
BLOCK_SATURATION = tl.constexpr(constants.NVFP4_BLOCK_SATURATION)
UE8M0_WORD_COLUMNS = tl.constexpr(constants.UE8M0_WORD_COLUMNS)
# Above this row maximum the low half of 1 / xs would be subnormal.
FAST_AMAX_LIMIT = tl.constexpr(2.0**90)
# A group below this share of the row's scale may have a subnormal E4M3 scale (6 * 2^-6, rounded up).
FAST_GROUP_SHARE = tl.constexpr(0.1)
UNSPECIALIZED_TOKEN = [*UNSPECIALIZED, "num_local_experts", "x_sf_stride_k"]
UNSPECIALIZED_BLOCK = [*UNSPECIALIZED_ROUTED, "x_sf_stride_k"]


@triton.jit
def group_columns(first_column, GROUPS: tl.constexpr):
    """Columns of a tile as [1, GROUPS, 16]: tiles are loaded in the shape in which they are reduced."""
    groups = tl.arange(0, GROUPS) + first_column // GROUP
    return groups[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def group_amax(values):
    """[M, G, 16] float32 -> [M, G]; NaN if the group holds one."""
    return tl.reduce(tl.abs(values), 2, maximum_or_nan)


@triton.jit
def nan_to_zero(values):
    return tl.where(values == values, values, 0.0)


@triton.jit
def quantize_scaled(scaled, amax, CLAMP: tl.constexpr):
    """E2M1 codes of `scaled` [M, G, 16] (no NaN) and E4M3 scale bytes [M, G], from the groups' maxima.

    w = scaled / S decides the code. With CLAMP, magnitudes above the grid's end saturate.
    """
    scale_code = nvfp4_scale_code(amax)
    high, low = scale_reciprocal_pair(scale_code.to(tl.float32))
    w = tl.abs(multiply_pair(scaled, high[:, :, None], low[:, :, None]))
    if CLAMP:
        w = minimum_number(w, E2M1_MAX)
    return e2m1_code(w, float_bits(scaled)), scale_code.to(tl.uint8, bitcast=True)


@triton.jit
def store_codes(x, row_offsets, first_column, codes, live, HIDDEN: tl.constexpr, WORDS: tl.constexpr):
    """Packs E2M1 codes [M, G, 16] two a byte, even column low, and stores them as words or bytes."""
    M: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1]
    PER_STORE: tl.constexpr = 8 if WORDS else 2
    STORES: tl.constexpr = GROUP // PER_STORE
    shifts = (tl.arange(0, PER_STORE) * 4)[None, None, None, :].to(tl.uint32)
    packed = tl.reduce(tl.reshape(codes, (M, GROUPS, STORES, PER_STORE)) << shifts, 3, add)
    packed = drop_negative_zeros(packed.to(tl.uint32))
    groups = (tl.arange(0, GROUPS) + first_column // GROUP)[None, :, None]
    pointers = x + row_offsets[:, :, None] + groups * STORES + tl.arange(0, STORES)[None, None, :]
    mask = live[:, :, None] & (groups < HIDDEN // GROUP)
    if WORDS:
        tl.store(pointers, packed.to(tl.int32), mask=mask)
    else:
        tl.store(pointers, packed.to(tl.uint8), mask=mask)


@triton.jit
def store_scales(x_sf, row_offsets, group_stride, first_column, scale_bytes, live, HIDDEN: tl.constexpr):
    M: tl.constexpr = scale_bytes.shape[0]
    GROUPS: tl.constexpr = scale_bytes.shape[1]
    # Stored by the threads that hold the group's codes. For a [M, G] store, or if the compiler knew that
    # group_stride is 1, it would first move the bytes to other threads through shared memory.
    half = tl.arange(0, 2)[None, None, :]
    groups = (tl.arange(0, GROUPS) + first_column // GROUP)[None, :, None]
    pointers = x_sf + row_offsets[:, :, None] + groups.to(tl.int64) * group_stride + half
    mask = live[:, :, None] & (groups < HIDDEN // GROUP) & (half == 0)
    tl.store(pointers, tl.broadcast_to(scale_bytes[:, :, None], (M, GROUPS, 2)), mask=mask)


@triton.jit
def store_shared(
    values,  # the hidden states as loaded, [M, G, 16]
    rows,
    columns,
    first_column,
    shared_x,
    shared_x_stride_m,
    shared_x_sf,
    shared_sf_stride_m,
    shared_sf_stride_k,
    shared_block_m,
    shared_page_rows,
    live,
    HIDDEN: tl.constexpr,
):
    """The shared experts' input: a bfloat16 copy, or MXFP8 with its scale words in pages."""
    M: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    pointers = shared_x + (rows * shared_x_stride_m)[:, :, None] + columns
    mask = live[:, :, None] & (columns < HIDDEN)
    if shared_x_sf is None:
        tl.store(pointers, copy_value(values, shared_x.dtype.element_ty), mask=mask)
    else:
        flat = tl.reshape(values.to(tl.float32), (M, GROUPS * GROUP))
        codes, words = quantize_ue8m0_groups(flat, 32)
        tl.store(pointers, tl.reshape(codes, (M, GROUPS, GROUP)), mask=mask)
        word = (tl.arange(0, words.shape[1]) + first_column // UE8M0_WORD_COLUMNS)[None, :]
        page = page_row(rows, shared_block_m, shared_page_rows)
        tl.store(
            shared_x_sf + page * shared_sf_stride_m + word.to(tl.int64) * shared_sf_stride_k,
            words,
            mask=live & (word < HIDDEN // UE8M0_WORD_COLUMNS),
        )


@triton.jit(do_not_specialize=UNSPECIALIZED_TOKEN)
def stage_nvfp4_token_kernel(
    hidden,
    hidden_stride_m,
    hidden_stride_h,
    x,
    x_stride_m,
    x_sf,
    x_sf_stride_m,
    x_sf_stride_k,
    x_scales,
    x_scales_stride,
    shared_x,
    shared_x_stride_m,
    shared_x_sf,
    shared_sf_stride_m,
    shared_sf_stride_k,
    shared_block_m,
    shared_page_rows,
    w2_global_scale,
    w2_global_scale_stride,
    l2_alpha,
    l2_alpha_stride,
    l2_activation_scale,
    num_local_experts,
    num_tokens,
    num_routing_programs,
    topk,
    eplb,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    X_WORDS: tl.constexpr,
    EXACT_DIVISION: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    ROUTING_TOKENS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_routing_programs:
        store_topk(program * ROUTING_TOKENS, num_tokens, topk, eplb, TOPK, TOPK_PADDED, ROUTING_TOKENS)
        if l2_alpha is not None and program == 0:
            expert = tl.arange(0, EXPERTS_PADDED)
            local = expert < num_local_experts
            scale = tl.load(w2_global_scale + expert * w2_global_scale_stride, mask=local, other=0.0)
            tl.store(l2_alpha + expert * l2_alpha_stride, scale * l2_activation_scale, mask=local)
    else:
        tokens = (program - num_routing_programs) * BLOCK_M + tl.arange(0, BLOCK_M)
        live = (tokens < num_tokens)[:, None]
        rows = tokens.to(tl.int64)[:, None]
        GROUPS: tl.constexpr = BLOCK_H // GROUP
        x_offsets = rows * x_stride_m
        sf_offsets = rows * x_sf_stride_m
        chunks = ()
        for i in tl.static_range(CHUNKS):
            columns = group_columns(i * BLOCK_H, GROUPS)
            mask = live[:, :, None]
            if HIDDEN % BLOCK_H != 0 and i == CHUNKS - 1:
                mask = mask & (columns < HIDDEN)
            pointers = hidden + (rows * hidden_stride_m)[:, :, None] + columns.to(tl.int64) * hidden_stride_h
            chunks = chunks + (tl.load(pointers, mask=mask, other=0.0),)
        # Maxima are combined lane by lane first: one reduction across the program, not one a chunk.
        amaxes = ()
        highest = tl.zeros((BLOCK_M, GROUPS), tl.float32)
        lowest = tl.full((BLOCK_M, GROUPS), float("inf"), tl.float32)
        for i in tl.static_range(CHUNKS):
            amax = group_amax(chunks[i].to(tl.float32))
            amaxes = amaxes + (amax,)
            highest = maximum_or_nan(highest, amax)
            lowest = minimum_number(lowest, tl.where(amax == 0.0, float("inf"), amax))
        row_amax = tl.reduce(highest, 1, maximum_or_nan)
        low_amax = tl.reduce(lowest, 1, minimum_number)
        xs = maximum_number(row_amax, TOKEN_AMAX_FLOOR) * TOKEN_RECIPROCAL
        usual = (row_amax < FAST_AMAX_LIMIT) & (low_amax >= xs * FAST_GROUP_SHARE)
        if EXACT_DIVISION:
            usual = usual & False
        if tl.reduce(usual.to(tl.int32), 0, minimum_number) == 0:
            highest = tl.zeros((BLOCK_M, GROUPS), tl.float32)
            for i in tl.static_range(CHUNKS):
                highest = maximum_number(highest, group_amax(nan_to_zero(chunks[i].to(tl.float32))))
            row_amax = tl.reduce(highest, 1, maximum_number)
            xs = maximum_number(row_amax, TOKEN_AMAX_FLOOR) * TOKEN_RECIPROCAL
            for chunk in range(CHUNKS):
                slow_columns = group_columns(chunk * BLOCK_H, GROUPS)
                slow_mask = live[:, :, None] & (slow_columns < HIDDEN)
                slow_pointers = hidden + (rows * hidden_stride_m)[:, :, None]
                slow_pointers += slow_columns.to(tl.int64) * hidden_stride_h
                values = tl.load(slow_pointers, mask=slow_mask, other=0.0).to(tl.float32)
                divisor = tl.broadcast_to(xs[:, None, None], (BLOCK_M, GROUPS, GROUP))
                scaled = nan_to_zero(tl.div_rn(values, divisor))
                codes, scale_bytes = quantize_scaled(scaled, group_amax(scaled), True)
                store_codes(x, x_offsets, chunk * BLOCK_H, codes, live, HIDDEN, X_WORDS)
                store_scales(x_sf, sf_offsets, x_sf_stride_k, chunk * BLOCK_H, scale_bytes, live, HIDDEN)
        else:
            high, low = reciprocal_pair(xs[:, None])
            for i in tl.static_range(CHUNKS):
                scaled = multiply_pair(chunks[i].to(tl.float32), high[:, :, None], low[:, :, None])
                codes, scale_bytes = quantize_scaled(scaled, multiply_pair(amaxes[i], high, low), False)
                store_codes(x, x_offsets, i * BLOCK_H, codes, live, HIDDEN, X_WORDS)
                store_scales(x_sf, sf_offsets, x_sf_stride_k, i * BLOCK_H, scale_bytes, live, HIDDEN)
        tl.store(x_scales + tokens.to(tl.int64) * x_scales_stride, xs, mask=tokens < num_tokens)
        if shared_x is not None:
            for i in tl.static_range(CHUNKS):
                store_shared(
                    chunks[i],
                    rows,
                    group_columns(i * BLOCK_H, GROUPS),
                    i * BLOCK_H,
                    shared_x,
                    shared_x_stride_m,
                    shared_x_sf,
                    shared_sf_stride_m,
                    shared_sf_stride_k,
                    shared_block_m,
                    shared_page_rows,
                    live,
                    HIDDEN,
                )


@triton.jit
def quantize_block(values):
    """One-level NVFP4 of float32 [M, G, 16]: codes and scale bytes.

    Saturated groups (amax above 2688, scale 448) are clamped first: every code and scale stays the same,
    infinities become finite, and NaN becomes zero without a test per element in the usual case.
    """
    amax = group_amax(values)
    inside = (amax <= BLOCK_SATURATION).to(tl.int32)
    if tl.reduce(tl.reduce(inside, 1, minimum_number), 0, minimum_number) == 0:
        values = nan_to_zero(values)
        values = minimum_number(maximum_number(values, -BLOCK_SATURATION), BLOCK_SATURATION)
        amax = group_amax(values)
    return quantize_scaled(values, amax, True)


@triton.jit(do_not_specialize=UNSPECIALIZED_BLOCK)
def stage_nvfp4_block_kernel(
    hidden,
    hidden_stride_m,
    hidden_stride_h,
    x,
    x_stride_m,
    x_sf,
    x_sf_stride_m,
    x_sf_stride_k,
    num_tokens,
    num_routing_programs,
    topk,
    eplb,
    HIDDEN: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    X_WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    ROUTING_TOKENS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_routing_programs:
        store_topk(program * ROUTING_TOKENS, num_tokens, topk, eplb, TOPK, TOPK_PADDED, ROUTING_TOKENS)
    else:
        tile = program - num_routing_programs
        first_column = (tile % COLUMN_TILES) * BLOCK_H
        tokens = (tile // COLUMN_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tokens.to(tl.int64)[:, None]
        columns = group_columns(first_column, BLOCK_H // GROUP)
        live = (tokens < num_tokens)[:, None]
        mask = live[:, :, None]
        if HIDDEN % BLOCK_H != 0:
            mask = mask & (columns < HIDDEN)
        pointers = hidden + (rows * hidden_stride_m)[:, :, None] + columns.to(tl.int64) * hidden_stride_h
        codes, scale_bytes = quantize_block(tl.load(pointers, mask=mask, other=0.0).to(tl.float32))
        store_codes(x, rows * x_stride_m, first_column, codes, live, HIDDEN, X_WORDS)
        store_scales(x_sf, rows * x_sf_stride_m, x_sf_stride_k, first_column, scale_bytes, live, HIDDEN)


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


@triton.jit(do_not_specialize=["x_sf_stride_k"])
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
    for i in tl.static_range((HIDDEN + BLOCK_H - 1) // BLOCK_H):
        columns = group_columns(i * BLOCK_H, BLOCK_H // GROUP)
        mask = columns < HIDDEN
        wide = columns.to(tl.int64)
        pointers = hidden + (rows * hidden_stride_m)[:, :, None] + wide * hidden_stride_h
        values = tl.load(pointers, mask=mask, other=0.0)
        weight = tl.load(norm_weight + wide * norm_weight_stride, mask=mask, other=0.0)
        gamma = weight.to(tl.float32) + gain_center
        normed = ((values.to(tl.float32) * rstd) * gamma).to(tl.bfloat16).to(tl.float32)
        codes, scale_bytes = quantize_block(tl.where(mask, normed, 0.0))
        store_codes(x, rows * x_stride_m, i * BLOCK_H, codes, live, HIDDEN, X_WORDS)
        store_scales(x_sf, rows * x_sf_stride_m, x_sf_stride_k, i * BLOCK_H, scale_bytes, live, HIDDEN)
