"""Staging in FP8 groups (UE8M0 or float32 scales), and the plain copy, both with the routing beside.

Some programs repack the routing (`routing`); every other one quantizes a tile of BLOCK_M tokens x BLOCK_H
columns. The hidden states are read once, in 16-byte accesses where their strides allow it, and nothing is
written twice.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# ruff: noqa: PLR0124, SIM300  (a != a is the NaN test of a kernel language; dtypes compare from the left)

import triton
import triton.language as tl

from megamoe.kernels import constants
from megamoe.kernels.numerics import (
    add,
    e4m3_code,
    fp8_scale,
    maximum_number,
    page_row,
    ue8m0_code,
    ue8m0_reciprocal,
)
from megamoe.kernels.routing import (
    UNSPECIALIZED,
    is_routing_program,
    routing_programs_before,
    store_topk,
)

UE8M0_WORD_COLUMNS = tl.constexpr(constants.UE8M0_WORD_COLUMNS)


@triton.jit
def quantize_ue8m0_groups(values, GROUP: tl.constexpr):
    """[M, H] float32 -> (E4M3 codes [M, H] uint8, scale words [M, H / 128] int32)."""
    M: tl.constexpr = values.shape[0]
    H: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, (M, H // GROUP, GROUP))
    amax = tl.reduce(tl.abs(groups), 2, maximum_number)
    code = ue8m0_code(fp8_scale(amax))
    scaled = groups * ue8m0_reciprocal(code)[:, :, None]
    PER_WORD: tl.constexpr = UE8M0_WORD_COLUMNS // GROUP
    by_word = tl.reshape(code, (M, H // UE8M0_WORD_COLUMNS, PER_WORD))
    shifts = (tl.arange(0, PER_WORD) * 8)[None, None, :].to(tl.uint32)
    words = tl.reduce(by_word << shifts, 2, add).to(tl.int32)
    return tl.reshape(e4m3_code(scaled), (M, H)), words


@triton.jit
def quantize_fp32_groups(values, GROUP: tl.constexpr):
    """[M, H] float32 -> (E4M3 codes [M, H] uint8, scales [M, H / GROUP] float32)."""
    M: tl.constexpr = values.shape[0]
    H: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, (M, H // GROUP, GROUP))
    scale = fp8_scale(tl.reduce(tl.abs(groups), 2, maximum_number))
    scaled = groups * tl.div_rn(1.0, scale)[:, :, None]  # a product with the reciprocal, not a quotient
    return tl.reshape(e4m3_code(scaled), (M, H)), scale


@triton.jit
def copy_value(value, TARGET: tl.constexpr):
    """A float in another type. What the hardware's conversions make of NaN is written out, so that it holds
    everywhere: bfloat16 widens bit by bit, any other change of type gives the positive NaN of all ones.
    """
    if value.dtype == TARGET:
        result = value
    elif TARGET == tl.float32:
        result = value.to(tl.float32)
        if value.dtype == tl.float16:
            quiet = tl.full(value.shape, 0x7FFFFFFF, tl.uint32).to(tl.float32, bitcast=True)
            result = tl.where(value == value, result, quiet)
    else:
        wide = value.to(tl.float32)
        quiet = tl.full(value.shape, 0x7FFF, tl.uint16).to(TARGET, bitcast=True)
        result = tl.where(wide == wide, wide.to(TARGET), quiet)
    return result


@triton.jit(do_not_specialize=UNSPECIALIZED)
def stage_groups_kernel(
    hidden,
    x,
    x_sf,
    hidden_stride_m,
    hidden_stride_h,
    x_stride_m,
    x_stride_h,
    x_sf_stride_m,
    x_sf_stride_k,
    num_tokens,
    mapping,
    num_routing_programs,
    routing_shift,
    topk,
    load,
    shared_x_sf,
    shared_stride_m,
    shared_stride_k,
    shared_block_m,
    shared_page_rows,
    MODE: tl.constexpr,  # "ue8m0", "fp32" or "copy"
    GROUP: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROUTING: tl.constexpr,
):
    program = tl.program_id(0)
    if is_routing_program(program, num_routing_programs, routing_shift):
        store_topk(program >> routing_shift, num_tokens, mapping, topk, load, ROUTING)
    else:
        tile = program - routing_programs_before(program, num_routing_programs, routing_shift)
        first_column = (tile % COLUMN_TILES) * BLOCK_H
        tokens = (tile // COLUMN_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = tokens.to(tl.int64)[:, None]
        columns = (first_column + tl.arange(0, BLOCK_H))[None, :]
        live = (tokens < num_tokens)[:, None]
        mask = live
        if HIDDEN % BLOCK_H != 0:
            mask = live & (columns < HIDDEN)
        wide_columns = columns.to(tl.int64)
        values = tl.load(
            hidden + rows * hidden_stride_m + wide_columns * hidden_stride_h, mask=mask, other=0.0
        )
        x_pointers = x + rows * x_stride_m + wide_columns * x_stride_h
        if MODE == "copy":
            tl.store(x_pointers, copy_value(values, x.dtype.element_ty), mask=mask)
        elif MODE == "fp32":
            codes, scales = quantize_fp32_groups(values.to(tl.float32), GROUP)
            tl.store(x_pointers, codes, mask=mask)
            group = (first_column // GROUP + tl.arange(0, BLOCK_H // GROUP))[None, :]
            tl.store(
                x_sf + rows * x_sf_stride_m + group.to(tl.int64) * x_sf_stride_k,
                scales,
                mask=live & (group < HIDDEN // GROUP),
            )
        else:
            codes, words = quantize_ue8m0_groups(values.to(tl.float32), GROUP)
            tl.store(x_pointers, codes, mask=mask)
            WORDS: tl.constexpr = BLOCK_H // UE8M0_WORD_COLUMNS
            word = (first_column // UE8M0_WORD_COLUMNS + tl.arange(0, WORDS))[None, :]
            word_mask = live & (word < HIDDEN // UE8M0_WORD_COLUMNS)
            wide_word = word.to(tl.int64)
            tl.store(x_sf + rows * x_sf_stride_m + wide_word * x_sf_stride_k, words, mask=word_mask)
            if shared_x_sf is not None:
                page = page_row(tokens[:, None], shared_block_m, shared_page_rows)
                tl.store(
                    shared_x_sf + page * shared_stride_m + wide_word * shared_stride_k, words, mask=word_mask
                )
