"""The GPU's multifunction unit: 2**x, 1/x and 1/sqrt(x), bit for bit (MUFU.EX2, MUFU.RCP, MUFU.RSQ).

The unit interpolates. The upper bits of a 23-bit fraction choose a row of three coefficients, the lower ones
are the place ``r`` inside the row, and the result's 24-bit significand is

    (c0 << a) + c1 * r + (c2 * square(r) << b) + bias  >>  shift

with a squarer that drops the low bits of every partial product, and a bias below one half: results are
neither correctly rounded nor truncated. ``data/mufu.csv`` holds the coefficients. They were fitted, row by
row, to the results of an H200 for all 2^23 fractions of each function; in every row exactly one triple
reproduces them all.

2**x takes |x| as a fixed-point number, truncated to 23 fraction bits. A negative x is the complement of those
bits, one place below the true fraction, unless the fraction is zero: that, and not the interpolation, makes
results for negative x come out low. 1/sqrt of an even power of two is exact, by an exception to the table.

Sources: measurements on an H200 (tests/hardware/measure_functions.py); the structure is that of Oberman and
Siu, "A High-Performance Area-Efficient Multifunction Interpolator" (ARITH 2005).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from reference._float32 import NAN_BITS, bits, from_bits

_DATA = Path(__file__).with_name("data") / "mufu.csv"
_FRACTION = (1 << 23) - 1
_INF_BITS = 0x7F800000


@dataclass(frozen=True)
class _Interpolation:
    """Widths and shifts of one function's datapath; place_bits are the bits of ``r``."""

    name: str
    place_bits: int
    square_input_shift: int
    c0_shift: int
    c2_shift: int
    bias: int
    result_shift: int


_RCP = _Interpolation("rcp", 16, 1, 13, 0, 0x47E7, 15)
_RSQ = _Interpolation("rsqrt", 17, 0, 14, 2, 0x7FFF, 16)
_EX2 = _Interpolation("ex2", 17, 0, 13, 0, 0x77E2, 15)


@cache
def _coefficients(name: str, device: torch.device) -> Tensor:
    """[3, rows] int64: c0, c1, c2 of one function."""
    with _DATA.open(newline="") as file:
        rows = [
            [int(row[c]) for c in ("c0", "c1", "c2")]
            for row in csv.DictReader(file)
            if row["function"] == name
        ]
    return torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)


@cache
def _squares(device: torch.device) -> Tensor:
    """The unit's square of every 17-bit number: the partial products without their lower bits, halved."""
    place = torch.arange(1 << 17, dtype=torch.int64)
    total = torch.zeros_like(place)
    for bit in range(17):
        total += (place >> bit & 1) * (place >> (18 - bit))
    return (total >> 1).to(device)


def _interpolate(row: _Interpolation, index: Tensor, place: Tensor) -> Tensor:
    """The 24-bit significand (2^24 where the result reaches the next power of two), int64."""
    c0, c1, c2 = _coefficients(row.name, index.device)
    square = (
        _squares(index.device)
        .index_select(0, (place << row.square_input_shift).reshape(-1))
        .view(place.shape)
    )
    c0, c1, c2 = (c.index_select(0, index.reshape(-1)).view(index.shape) for c in (c0, c1, c2))
    total: Tensor = (c0 << row.c0_shift) + c1 * place + (c2 * square << row.c2_shift) + row.bias
    return total >> row.result_shift


def _assemble(sign: Tensor, exponent_field: Tensor, significand: Tensor) -> Tensor:
    """float32 bits (int64) of a significand in [2^23, 2^24], zero below the normal range, Inf above."""
    pattern = (exponent_field << 23) + (significand - (1 << 23))
    pattern = torch.where(pattern < 1 << 23, 0, pattern.clamp(max=_INF_BITS))
    return pattern | sign


def _split(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sign bit in place, exponent field and fraction, int64."""
    pattern = bits(values).long() & 0xFFFFFFFF
    return pattern & 0x80000000, pattern >> 23 & 0xFF, pattern & _FRACTION


def _result(pattern: Tensor) -> Tensor:
    return from_bits(torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern))


def rcp(values: Tensor) -> Tensor:
    """1/x, float32; subnormal inputs count as zero, subnormal results are zero, NaN is 0x7fffffff."""
    sign, field, fraction = _split(values)
    significand = _interpolate(_RCP, fraction >> 16, fraction & 0xFFFF)
    pattern = _assemble(sign, 253 - field, significand)
    pattern = torch.where(field == 0, sign | _INF_BITS, pattern)
    pattern = torch.where(field == 255, torch.where(fraction == 0, sign, NAN_BITS), pattern)
    return _result(pattern)


def rsqrt(values: Tensor) -> Tensor:
    """1/sqrt(x), float32; subnormal inputs count as zero, NaN and negative numbers give 0x7fffffff."""
    sign, field, fraction = _split(values)
    wide = fraction | (field - 127 & 1) << 23  # [1, 4) in rows of the two halves
    significand = _interpolate(_RSQ, wide >> 17, wide & 0x1FFFF)
    significand = torch.where(wide == 0, 1 << 24, significand)
    pattern = _assemble(torch.zeros_like(sign), 126 - (field - 127 >> 1), significand)
    pattern = torch.where(field == 255, 0, pattern)
    pattern = torch.where(field == 0, sign | _INF_BITS, pattern)
    invalid = ((field == 255) & (fraction != 0)) | ((field > 0) & (sign != 0))
    return _result(torch.where(invalid, NAN_BITS, pattern))


def ex2(values: Tensor) -> Tensor:
    """2**x, float32; subnormal inputs count as zero, subnormal results are zero, NaN is 0x7fffffff."""
    sign, _, _ = _split(values)
    # Beyond 2^8 every result is Inf or zero.
    magnitude = torch.where(values.isnan(), 0.0, values.abs()).clamp(max=256.0)
    fixed = (magnitude.double() * 2.0**23).trunc().long()
    fixed = torch.where(sign == 0, fixed, torch.where(fixed & _FRACTION == 0, -fixed, ~fixed))
    fraction = fixed & _FRACTION
    significand = _interpolate(_EX2, fraction >> 17, fraction & 0x1FFFF)
    pattern = _assemble(torch.zeros_like(sign), (fixed >> 23) + 127, significand)
    return _result(torch.where(values.isnan(), NAN_BITS, pattern))
