"""Kernels that move scales and weights into the order that the MegaMoE kernels read. No arithmetic but
shifts: every output byte is an input byte or zero.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs

import triton
import triton.language as tl

from megamoe.kernels.numerics import add


@triton.jit
def ue8m0_to_float_kernel(codes, values, count, BLOCK: tl.constexpr):
    """UE8M0 bytes to float32 by the shift that production uses: 0 gives 0.0, 255 gives infinity."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + offsets, mask=offsets < count, other=0).to(tl.uint32)
    tl.store(values + offsets, (code << 23).to(tl.float32, bitcast=True), mask=offsets < count)


@triton.jit
def mn_major_kernel(
    scales,
    stride_g,
    stride_m,
    stride_k,
    out,
    out_stride_g,
    out_stride_k,
    rows,
    groups,
    row_tiles,
    column_tiles,
    ROW_REPEAT: tl.constexpr,  # row r of the output takes row r // ROW_REPEAT
    PACK: tl.constexpr,  # four float32 scales become the bytes of one int32 word
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scales [batch, rows, groups] to MN-major columns of float32 or of packed UE8M0 words."""
    program = tl.program_id(0)
    column_tile = program % column_tiles
    row_tile = program // column_tiles % row_tiles
    batch = (program // (column_tiles * row_tiles)).to(tl.int64)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = column_tile * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    source_row = (row // ROW_REPEAT).to(tl.int64)
    mask = (row < rows) & (column < groups)
    pointers = scales + batch * stride_g + source_row * stride_m + column.to(tl.int64) * stride_k
    values = tl.load(pointers, mask=mask, other=0.0)
    target = out + batch * out_stride_g + row
    if PACK:
        bytes_ = (values.to(tl.uint32, bitcast=True) >> 23) & 0xFF
        shifts = (tl.arange(0, 4) * 8)[None, None, :].to(tl.uint32)
        by_word = tl.reshape(bytes_, (BLOCK_M, BLOCK_K // 4, 4)) << shifts
        words = tl.reduce(by_word, 2, add).to(tl.int32)
        word = column_tile * (BLOCK_K // 4) + tl.arange(0, BLOCK_K // 4)[None, :]
        word_mask = (row < rows) & (word * 4 < groups)
        tl.store(target + word.to(tl.int64) * out_stride_k, words, mask=word_mask)
    else:
        tl.store(target + column.to(tl.int64) * out_stride_k, values, mask=mask)


@triton.jit
def source_row(row, half_rows, ORDER: tl.constexpr, UTCCP: tl.constexpr):
    """The row that comes to `row`: gate rows first in the source, `half_rows` of them, then up rows."""
    if UTCCP:
        inside = row % 128
        row = row - inside + (inside % 4) * 32 + inside // 4
    if ORDER == "gate_up_8":
        row = (row // 8) % 2 * half_rows + row // 16 * 8 + row % 8
    elif ORDER == "gate_up_16_even_odd":
        odd, half, pair = row // 16 % 2, row // 8 % 2, row % 8
        row = half * half_rows + row // 32 * 16 + pair * 2 + odd
    return row


@triton.jit
def move_rows_kernel(
    source,
    source_stride_g,
    source_stride_m,
    source_stride_k,
    out,
    out_stride_g,
    out_stride_m,
    out_stride_k,
    rows,
    columns,
    row_tiles,
    column_tiles,
    ORDER: tl.constexpr,
    UTCCP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copies [batch, rows, columns] with the rows in another order."""
    program = tl.program_id(0)
    column_tile = program % column_tiles
    row_tile = program // column_tiles % row_tiles
    batch = (program // (column_tiles * row_tiles)).to(tl.int64)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = (column_tile * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]).to(tl.int64)
    mask = (row < rows) & (column < columns)
    origin = source_row(row, rows // 2, ORDER, UTCCP).to(tl.int64)
    values = tl.load(
        source + batch * source_stride_g + origin * source_stride_m + column * source_stride_k, mask=mask
    )
    pointers = out + batch * out_stride_g + row.to(tl.int64) * out_stride_m + column * out_stride_k
    tl.store(pointers, values, mask=mask)
