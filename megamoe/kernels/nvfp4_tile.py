"""Tiles of the NVFP4 kernels: groups of 16 columns, one thread a group, two columns a register.

A tile of G groups is four tensors [M, G, 4]: the even and the odd columns of the groups' first and second
halves. A thread holds whole groups, so that a group's maximum, scale and codes need no exchange between
threads, and a half is one 16-byte access of two-byte elements.

Where rows are dense and aligned (PAIRS), two neighbouring columns are loaded as one integer word: the even
column is its lower, the odd one its upper half, and both stay in one register until they are needed. Other
strides load even and odd columns apart.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
# ruff: noqa: PLR0124  (a != a is the NaN test of a kernel language)

import triton
import triton.language as tl

from megamoe.kernels import constants
from megamoe.kernels.numerics import (
    bits_float,
    maximum_or_nan,
    multiply_pair,
    pack_e2m1,
)

GROUP = tl.constexpr(constants.NVFP4_GROUP)
E2M1_MAX = tl.constexpr(constants.E2M1_MAX)


@triton.jit
def even_columns(first_column, GROUPS: tl.constexpr):
    """The even columns of the groups' first halves, [1, G, 4]."""
    groups = tl.arange(0, GROUPS) + first_column // GROUP
    return groups[None, :, None] * GROUP + tl.arange(0, 4)[None, None, :] * 2


@triton.jit
def load_tile(
    base,
    row_offsets,
    column_stride,
    first_column,
    live,
    GROUPS: tl.constexpr,
    MASK: tl.constexpr,  # columns may end inside the tile
    HIDDEN: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """(first even, first odd, second even, second odd) as stored, 0 outside the matrix.

    With PAIRS the base, the offsets and the stride count words of two columns, and even and odd are the
    same words.
    """
    mask = live[:, :, None]
    groups = (tl.arange(0, GROUPS) + first_column // GROUP)[None, :, None]
    if MASK:
        mask = mask & (groups < HIDDEN // GROUP)  # the same for a group's columns: accesses stay wide
    if PAIRS:
        words = groups * (GROUP // 2) + tl.arange(0, 4)[None, None, :]
        pointers = base + row_offsets[:, :, None] + words
        first = tl.load(pointers, mask=mask, other=0)
        second = tl.load(pointers + 4, mask=mask, other=0)
        tile = (first, first, second, second)
    else:
        columns = even_columns(first_column, GROUPS)
        pointers = base + row_offsets[:, :, None] + columns.to(tl.int64) * column_stride
        tile = (
            tl.load(pointers, mask=mask, other=0.0),
            tl.load(pointers + column_stride, mask=mask, other=0.0),
            tl.load(pointers + column_stride * 8, mask=mask, other=0.0),
            tl.load(pointers + column_stride * 9, mask=mask, other=0.0),
        )
    return tile


@triton.jit
def even_value(raw, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """The even columns in their own dtype; bfloat16 already as the float32 of the same value."""
    if not PAIRS:
        value = raw
    elif DTYPE == "bfloat16":
        value = bits_float((raw << 16).to(tl.uint32))
    elif DTYPE == "float16":
        value = raw.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        value = raw.to(tl.uint32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def odd_value(raw, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    if not PAIRS:
        value = raw
    elif DTYPE == "bfloat16":
        value = bits_float((raw & -65536).to(tl.uint32))
    elif DTYPE == "float16":
        value = (raw >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        value = (raw >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def float32_tile(tile, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    return (
        even_value(tile[0], PAIRS, DTYPE).to(tl.float32),
        odd_value(tile[1], PAIRS, DTYPE).to(tl.float32),
        even_value(tile[2], PAIRS, DTYPE).to(tl.float32),
        odd_value(tile[3], PAIRS, DTYPE).to(tl.float32),
    )


@triton.jit
def group_amax(tile):
    """float32 tile -> maxima [M, G]; NaN if the group holds one."""
    first = maximum_or_nan(tl.abs(tile[0]), tl.abs(tile[1]))
    second = maximum_or_nan(tl.abs(tile[2]), tl.abs(tile[3]))
    return tl.reduce(maximum_or_nan(first, second), 2, maximum_or_nan)


@triton.jit
def group_amax_as_stored(tile, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """`group_amax` of a tile as loaded, from the integers where it can.

    Magnitudes order like their bits, NaN last: with the sign shifted out of words of two columns, the largest
    word has the largest upper half. Of integers one instruction takes the maximum of three, and nothing is
    unpacked that would stay in registers until the codes are made.
    """
    if PAIRS and DTYPE != "float32":
        first, second = tile[0].to(tl.uint32), tile[2].to(tl.uint32)
        odd = tl.max(tl.maximum(first << 1, second << 1), 2)
        even = tl.max(tl.maximum(first << 17, second << 17), 2)
        magnitude = tl.maximum(odd, even) >> 17
        if DTYPE == "bfloat16":
            amax = bits_float(magnitude << 16)
        else:
            amax = magnitude.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        amax = group_amax(float32_tile(tile, PAIRS, DTYPE))
    return amax


@triton.jit
def nan_to_zero(values):
    return tl.where(values == values, values, 0.0)


@triton.jit
def nan_to_zero_tile(tile):
    return nan_to_zero(tile[0]), nan_to_zero(tile[1]), nan_to_zero(tile[2]), nan_to_zero(tile[3])


@triton.jit
def clamp(value, LIMIT: tl.constexpr):
    """Of a value that is not NaN: what becomes of NaN depends on Triton's version, and on the interpreter."""
    return tl.clamp(value, -LIMIT, LIMIT)


@triton.jit
def divide(values, high, low, CLAMP: tl.constexpr):
    """w = value / S with 1 / S as a pair [M, G]; with CLAMP within the largest E2M1 values."""
    w = multiply_pair(values, high[:, :, None], low[:, :, None])
    if CLAMP:
        w = clamp(w, E2M1_MAX)
    return w


@triton.jit
def pack_tile(values, high, low, CLAMP: tl.constexpr):
    """The groups' two words [M, G] of E2M1 codes: a float32 tile before the scale, 1 / scale as a pair."""
    first = pack_e2m1(divide(values[0], high, low, CLAMP), divide(values[1], high, low, CLAMP))
    second = pack_e2m1(divide(values[2], high, low, CLAMP), divide(values[3], high, low, CLAMP))
    return first, second


@triton.jit
def store_words(x, row_offsets, first_column, words, live, HIDDEN: tl.constexpr, WORDS: tl.constexpr):
    """Stores the groups' two code words, as words or, where rows are not aligned, as bytes."""
    GROUPS: tl.constexpr = words[0].shape[1]
    groups = (tl.arange(0, GROUPS) + first_column // GROUP)[None, :, None]
    mask = live[:, :, None] & (groups < HIDDEN // GROUP)
    both = tl.join(words[0], words[1])
    half = tl.arange(0, 2)[None, None, :]
    pointers = x + row_offsets[:, :, None]
    if WORDS:
        tl.store(pointers + groups * 2 + half, both.to(tl.int32), mask=mask)
    else:
        byte = tl.arange(0, 4)[None, None, None, :]
        values = (both[:, :, :, None] >> (byte * 8).to(tl.uint32)).to(tl.uint8)
        pointers = (pointers + groups * 8 + half * 4)[:, :, :, None] + byte
        tl.store(pointers, values, mask=mask[:, :, :, None])


@triton.jit
def store_scales(x_sf, row_offsets, group_stride, first_column, scale_code, live, HIDDEN: tl.constexpr):
    group = (tl.arange(0, scale_code.shape[1]) + first_column // GROUP)[None, :]
    pointers = x_sf + row_offsets + group.to(tl.int64) * group_stride
    tl.store(pointers, scale_code.to(tl.uint8, bitcast=True), mask=live & (group < HIDDEN // GROUP))


@triton.jit
def limit_tile(tile, LIMIT: tl.constexpr):
    """NaN as zero, infinities and all else beyond LIMIT as LIMIT."""
    clean = nan_to_zero_tile(tile)
    return clamp(clean[0], LIMIT), clamp(clean[1], LIMIT), clamp(clean[2], LIMIT), clamp(clean[3], LIMIT)
