"""Staging in NVFP4: two-level (per token) and one-level (per group of 16), with the routing beside.

The two-level kernel holds whole rows in registers: one read, a reduction over the row, then the codes.
Rows with exceptional values (NaN, infinities, or groups so far below the row's maximum that their scale
is subnormal and codes can exceed the grid) take a second, slower path with the same results by definition:
IEEE divisions, NaN as zero and a clamp at the largest code. `numerics` says why the fast path needs none
of them.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# mypy: disable-error-code="assignment"
# ruff: noqa: PLR0912, PLR0915, RUF005  (kernel language: one function a kernel, sums of tuples)

import triton
import triton.language as tl

from megamoe.kernels import constants
from megamoe.kernels.fp8_groups import UE8M0_WORD_COLUMNS, copy_value
from megamoe.kernels.numerics import (
    add,
    e4m3_code,
    fp8_scale,
    maximum_number,
    maximum_or_nan,
    minimum_number,
    multiply_pair,
    nvfp4_scale_code,
    page_row,
    reciprocal_pair,
    scale_reciprocal_pair,
    ue8m0_code,
    ue8m0_reciprocal,
)
from megamoe.kernels.nvfp4_tile import (
    GROUP,
    even_value,
    float32_tile,
    group_amax,
    group_amax_as_stored,
    limit_tile,
    load_tile,
    nan_to_zero,
    nan_to_zero_tile,
    odd_value,
    pack_tile,
    store_scales,
    store_words,
)
from megamoe.kernels.routing import (
    UNSPECIALIZED,
    UNSPECIALIZED_ROUTED,
    is_routing_program,
    routing_programs_before,
    store_topk,
)

TOKEN_AMAX_FLOOR = tl.constexpr(constants.NVFP4_TOKEN_AMAX_FLOOR)
TOKEN_RECIPROCAL = tl.constexpr(constants.NVFP4_TOKEN_RECIPROCAL)
BLOCK_SATURATION = tl.constexpr(constants.NVFP4_BLOCK_SATURATION)
# Above this row maximum the low half of 1 / xs would be subnormal.
FAST_AMAX_LIMIT = tl.constexpr(2.0**90)
# A group below this share of the row's scale may have a subnormal E4M3 scale (6 * 2^-6, rounded up).
FAST_GROUP_SHARE = tl.constexpr(0.1)
UNSPECIALIZED_TOKEN = [*UNSPECIALIZED, "num_local_experts"]


@triton.jit
def shared_copy_value(raw, value, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """A hidden value as bfloat16; bfloat16 bit by bit, NaN payloads included."""
    if PAIRS and DTYPE == "bfloat16":
        result = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = copy_value(value, tl.bfloat16)
    return result


@triton.jit
def store_half(pointers, even, odd, mask):
    """Stores even and odd columns [M, G, 4] side by side."""
    M: tl.constexpr = even.shape[0]
    GROUPS: tl.constexpr = even.shape[1]
    tl.store(pointers, tl.reshape(tl.join(even, odd), (M, GROUPS, 8)), mask=mask)


@triton.jit
def store_shared(
    tile,  # as loaded
    rows,
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
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The shared experts' input: a bfloat16 copy, or MXFP8 with its scale words in pages."""
    M: tl.constexpr = tile[0].shape[0]
    GROUPS: tl.constexpr = tile[0].shape[1]
    groups = (tl.arange(0, GROUPS) + first_column // GROUP)[None, :, None]
    pointers = shared_x + (rows * shared_x_stride_m)[:, :, None] + groups * GROUP
    pointers = pointers + tl.arange(0, 8)[None, None, :]
    mask = live[:, :, None] & (groups * GROUP < HIDDEN)
    if shared_x_sf is None:
        first_even = shared_copy_value(tile[0], even_value(tile[0], PAIRS, DTYPE), PAIRS, DTYPE)
        first_odd = shared_copy_value(tile[1], odd_value(tile[1], PAIRS, DTYPE), PAIRS, DTYPE)
        second_even = shared_copy_value(tile[2], even_value(tile[2], PAIRS, DTYPE), PAIRS, DTYPE)
        second_odd = shared_copy_value(tile[3], odd_value(tile[3], PAIRS, DTYPE), PAIRS, DTYPE)
        store_half(pointers, first_even, first_odd, mask)
        store_half(pointers + 8, second_even, second_odd, mask)
    else:
        values = float32_tile(tile, PAIRS, DTYPE)
        amax = group_amax(nan_to_zero_tile(values))
        amax = tl.reduce(tl.reshape(amax, (M, GROUPS // 2, 2)), 2, maximum_number)  # groups of 32
        code = ue8m0_code(fp8_scale(amax))
        reciprocal = tl.broadcast_to(ue8m0_reciprocal(code)[:, :, None], (M, GROUPS // 2, 2))
        reciprocal = tl.reshape(reciprocal, (M, GROUPS))[:, :, None]
        store_half(pointers, e4m3_code(values[0] * reciprocal), e4m3_code(values[1] * reciprocal), mask)
        store_half(pointers + 8, e4m3_code(values[2] * reciprocal), e4m3_code(values[3] * reciprocal), mask)
        WORDS: tl.constexpr = GROUPS // 8
        shifts = (tl.arange(0, 4) * 8)[None, None, :].to(tl.uint32)
        words = tl.reduce(tl.reshape(code, (M, WORDS, 4)) << shifts, 2, add).to(tl.int32)
        word = (tl.arange(0, WORDS) + first_column // UE8M0_WORD_COLUMNS)[None, :]
        page = page_row(rows.to(tl.int32), shared_block_m, shared_page_rows)
        tl.store(
            shared_x_sf + page * shared_sf_stride_m + word.to(tl.int64) * shared_sf_stride_k,
            words,
            mask=live & (word < HIDDEN // UE8M0_WORD_COLUMNS),
        )


@triton.jit(do_not_specialize=UNSPECIALIZED_TOKEN)
def stage_nvfp4_token_kernel(
    hidden,
    x,
    x_sf,
    x_scales,
    hidden_stride_m,
    hidden_stride_h,
    x_stride_m,
    x_sf_stride_m,
    x_scales_stride,
    num_tokens,
    mapping,
    num_routing_programs,
    routing_shift,
    topk,
    load,
    shared_x,
    shared_x_sf,
    shared_x_stride_m,
    shared_sf_stride_m,
    shared_sf_stride_k,
    shared_block_m,
    shared_page_rows,
    w2_global_scale,
    l2_alpha,
    w2_global_scale_stride,
    l2_alpha_stride,
    l2_activation_scale,
    num_local_experts,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    X_WORDS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ROUTING: tl.constexpr,
):
    program = tl.program_id(0)
    if is_routing_program(program, num_routing_programs, routing_shift):
        store_topk(program >> routing_shift, num_tokens, mapping, topk, load, ROUTING)
        if l2_alpha is not None and program == 0:
            expert = tl.arange(0, EXPERTS_PADDED)
            local = expert < num_local_experts
            scale = tl.load(w2_global_scale + expert * w2_global_scale_stride, mask=local, other=0.0)
            tl.store(l2_alpha + expert * l2_alpha_stride, scale * l2_activation_scale, mask=local)
    else:
        GROUPS: tl.constexpr = BLOCK_H // GROUP
        turn = program - routing_programs_before(program, num_routing_programs, routing_shift)
        tokens = turn * BLOCK_M + tl.arange(0, BLOCK_M)
        live = (tokens < num_tokens)[:, None]
        rows = tokens.to(tl.int64)[:, None]
        hidden_offsets = rows * hidden_stride_m
        x_offsets = rows * x_stride_m
        sf_offsets = rows * x_sf_stride_m
        chunks = ()
        for i in tl.static_range(CHUNKS):
            loaded = load_tile(
                hidden,
                hidden_offsets,
                hidden_stride_h,
                i * BLOCK_H,
                live,
                GROUPS,
                (i + 1) * BLOCK_H > HIDDEN,
                HIDDEN,
                PAIRS,
            )
            chunks = chunks + (loaded,)
        if shared_x is not None:  # first: afterwards its values are not needed any more
            for i in tl.static_range(CHUNKS):
                store_shared(
                    chunks[i],
                    rows,
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
                    PAIRS,
                    DTYPE,
                )
        # Maxima are combined lane by lane first: one reduction across the program, not one a chunk.
        amaxes = ()
        highest = tl.zeros((BLOCK_M, GROUPS), tl.float32)
        lowest = tl.full((BLOCK_M, GROUPS), float("inf"), tl.float32)
        for i in tl.static_range(CHUNKS):
            amax = group_amax_as_stored(chunks[i], PAIRS, DTYPE)
            amaxes = amaxes + (amax,)
            highest = maximum_or_nan(highest, amax)
            lowest = minimum_number(lowest, tl.where(amax == 0.0, float("inf"), amax))
        row_amax = tl.reduce(highest, 1, maximum_or_nan)
        low_amax = tl.reduce(lowest, 1, minimum_number)
        xs = maximum_number(row_amax, TOKEN_AMAX_FLOOR) * TOKEN_RECIPROCAL
        usual = (row_amax < FAST_AMAX_LIMIT) & (low_amax >= xs * FAST_GROUP_SHARE)
        if DTYPE == "float32":
            usual = usual & False
        if tl.reduce(usual.to(tl.int32), 0, minimum_number) == 0:
            highest = tl.zeros((BLOCK_M, GROUPS), tl.float32)
            for i in tl.static_range(CHUNKS):
                clean = nan_to_zero_tile(float32_tile(chunks[i], PAIRS, DTYPE))
                highest = maximum_number(highest, group_amax(clean))
            row_amax = tl.reduce(highest, 1, maximum_number)
            xs = maximum_number(row_amax, TOKEN_AMAX_FLOOR) * TOKEN_RECIPROCAL
            divisor = tl.broadcast_to(xs[:, None, None], (BLOCK_M, GROUPS, 4))
            for chunk in range(CHUNKS):
                column = chunk * BLOCK_H
                again = load_tile(
                    hidden, hidden_offsets, hidden_stride_h, column, live, GROUPS, True, HIDDEN, PAIRS
                )
                values = float32_tile(again, PAIRS, DTYPE)
                scaled = (
                    nan_to_zero(tl.div_rn(values[0], divisor)),
                    nan_to_zero(tl.div_rn(values[1], divisor)),
                    nan_to_zero(tl.div_rn(values[2], divisor)),
                    nan_to_zero(tl.div_rn(values[3], divisor)),
                )
                slow_code = nvfp4_scale_code(group_amax(scaled))
                slow_high, slow_low = scale_reciprocal_pair(slow_code.to(tl.float32))
                slow_words = pack_tile(scaled, slow_high, slow_low, True)
                store_words(x, x_offsets, column, slow_words, live, HIDDEN, X_WORDS)
                store_scales(x_sf, sf_offsets, 1, column, slow_code, live, HIDDEN)
        else:
            token_high, token_low = reciprocal_pair(xs[:, None])
            wide_high, wide_low = token_high[:, :, None], token_low[:, :, None]
            for i in tl.static_range(CHUNKS):
                values = float32_tile(chunks[i], PAIRS, DTYPE)
                code = nvfp4_scale_code(multiply_pair(amaxes[i], token_high, token_low))
                high, low = scale_reciprocal_pair(code.to(tl.float32))
                scaled = (
                    multiply_pair(values[0], wide_high, wide_low),
                    multiply_pair(values[1], wide_high, wide_low),
                    multiply_pair(values[2], wide_high, wide_low),
                    multiply_pair(values[3], wide_high, wide_low),
                )
                words = pack_tile(scaled, high, low, False)
                store_words(x, x_offsets, i * BLOCK_H, words, live, HIDDEN, X_WORDS)
                store_scales(x_sf, sf_offsets, 1, i * BLOCK_H, code, live, HIDDEN)
        tl.store(x_scales + tokens.to(tl.int64) * x_scales_stride, xs, mask=tokens < num_tokens)


@triton.jit
def quantize_block(values):
    """One-level NVFP4 of a float32 tile: code words and the E4M3 scale [M, G].

    Saturated groups (amax above 2688, scale 448) are clamped first: every code and scale stays the same,
    infinities become finite, and NaN becomes zero without a test per element in the usual case.
    """
    amax = group_amax(values)
    inside = (amax <= BLOCK_SATURATION).to(tl.int32)
    if tl.reduce(tl.reduce(inside, 1, minimum_number), 0, minimum_number) == 0:
        values = limit_tile(values, BLOCK_SATURATION)
        amax = group_amax(values)
    code = nvfp4_scale_code(amax)
    high, low = scale_reciprocal_pair(code.to(tl.float32))
    return pack_tile(values, high, low, True), code


@triton.jit
def load_block(
    hidden,
    stride_m,
    stride_h,
    tokens,
    num_tokens,
    column,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """`load_tile` of BLOCK_H columns of some tokens."""
    live = (tokens < num_tokens)[:, None]
    offsets = tokens.to(tl.int64)[:, None] * stride_m
    GROUPS: tl.constexpr = BLOCK_H // GROUP
    MASK: tl.constexpr = HIDDEN % BLOCK_H != 0
    return load_tile(hidden, offsets, stride_h, column, live, GROUPS, MASK, HIDDEN, PAIRS)


@triton.jit(do_not_specialize=UNSPECIALIZED_ROUTED)
def stage_nvfp4_block_kernel(
    hidden,
    x,
    x_sf,
    hidden_stride_m,
    hidden_stride_h,
    x_stride_m,
    x_sf_stride_m,
    x_sf_stride_k,
    num_tokens,
    mapping,
    num_routing_programs,
    routing_shift,
    topk,
    load,
    HIDDEN: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    X_WORDS: tl.constexpr,
    ROUTING: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of a program, one below the other
):
    program = tl.program_id(0)
    if is_routing_program(program, num_routing_programs, routing_shift):
        store_topk(program >> routing_shift, num_tokens, mapping, topk, load, ROUTING)
    else:
        tile = program - routing_programs_before(program, num_routing_programs, routing_shift)
        column = (tile % COLUMN_TILES) * BLOCK_H
        tokens = (tile // COLUMN_TILES) * (BLOCK_M * STEPS) + tl.arange(0, BLOCK_M)
        values = load_block(
            hidden, hidden_stride_m, hidden_stride_h, tokens, num_tokens, column, HIDDEN, BLOCK_H, PAIRS
        )
        for step in range(STEPS):
            if STEPS > 1:  # the next tile is on its way while this one is quantized
                limit = tl.where(step + 1 < STEPS, num_tokens, 0)
                following = load_block(
                    hidden,
                    hidden_stride_m,
                    hidden_stride_h,
                    tokens + BLOCK_M,
                    limit,
                    column,
                    HIDDEN,
                    BLOCK_H,
                    PAIRS,
                )
            words, code = quantize_block(float32_tile(values, PAIRS, DTYPE))
            rows = tokens.to(tl.int64)[:, None]
            live = (tokens < num_tokens)[:, None]
            store_words(x, rows * x_stride_m, column, words, live, HIDDEN, X_WORDS)
            store_scales(x_sf, rows * x_sf_stride_m, x_sf_stride_k, column, code, live, HIDDEN)
            if STEPS > 1:
                tokens += BLOCK_M
                values = following
