"""The product terms of an MMA, for a block of outputs and all its steps: the inner part of
``reference._tensor_core_fast``, whose text says why the floats used here are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference._tensor_core_families import MmaFamily
from reference._tensor_core_operands import OPERAND_FORMATS, Coded, CodedScales, decode_table, lookup

_NO_EXPONENT = -(1 << 14)  # the largest exponent of products that are all zero


@dataclass(frozen=True)
class Float:
    """A float type seen as bits."""

    dtype: torch.dtype
    integer: torch.dtype
    fraction_bits: int
    bias: int

    def power_of_two(self, exponents: Tensor) -> Tensor:
        """2**exponents, exponents of dtype ``integer``; 0 below and the largest power above the normal
        range."""
        return ((exponents + self.bias).clamp(0, 2 * self.bias) << self.fraction_bits).view(self.dtype)

    def exponent_field(self, values: Tensor) -> Tensor:
        """The exponent field, sign ignored."""
        return values.view(self.integer) >> self.fraction_bits & (2 * self.bias + 1)


F32 = Float(torch.float32, torch.int32, 23, 127)
F64 = Float(torch.float64, torch.int64, 52, 1023)


@dataclass(frozen=True)
class Terms:
    """largest [steps, batch, m, n]: the largest exponent of each step's products. total(step, largest): the
    sum of the aligned terms [batch, m, n], in units of 2**(largest - fraction_bits). specials(step): NaN and
    Inf of the step, 0 elsewhere, float64; None if the operands have none."""

    largest: Tensor
    total: Callable[[int, Tensor], Tensor]
    specials: Callable[[int], Tensor] | None


def product_terms(row: MmaFamily, work: Float, a: Coded, b: Coded, scales: CodedScales | None) -> Terms:
    """Families that align every product. Codes [batch, m, K] and [batch, n, K], scales with K /
    scale_group."""
    left, right = (_Operand(codes, name, row.k_step) for codes, name in (a, b))
    largest = _largest_exponent(row, left, right).to(work.integer)
    scale = None
    if scales is not None:
        scale_exponents = decode_table(scales[2], scales[0].device).exponents.to(work.integer)
        a_scale, b_scale = (lookup(scale_exponents, codes).permute(2, 0, 1) for codes in scales[:2])
        scale = a_scale[..., :, None] + b_scale[..., None, :]
        largest = torch.where(largest == _NO_EXPONENT, largest, largest + scale)
    a_values, b_values = left.values(work.dtype)[..., :, None], right.values(work.dtype)[..., None, :]
    steps, batch, k_step, m, n = *a_values.shape[:4], b_values.shape[-1]
    products = torch.empty((batch, k_step, m, n), dtype=work.dtype, device=a_values.device)

    def total(step: int, top: Tensor) -> Tensor:
        # Dividing by the unit truncates toward zero in the same pass. A unit that leaves the type's range
        # belongs to a step whose products are all zero (below) or all truncated to zero (above).
        unit = top - row.fraction_bits
        if scale is not None:
            unit = unit - scale[step]
        unit = work.power_of_two(unit.clamp(1 - work.bias, work.bias))
        torch.mul(a_values[step], b_values[step], out=products)
        return torch.div(products, unit[:, None], rounding_mode="trunc", out=products).sum(1)

    return Terms(largest, total, _specials(left, right, scales, steps))


def group_terms(row: MmaFamily, a: Coded, b: Coded, scales: CodedScales) -> Terms:
    """Families that add groups of products exactly and align the scaled groups. Arguments as
    product_terms."""
    assert row.scale_group is not None
    left, right = (_Operand(codes, name, row.exact_group) for codes, name in (a, b))
    scale_table = decode_table(scales[2], scales[0].device)
    # The significand as a value in [1, 2), below 1 for a subnormal scale.
    significands = scale_table.significands.double() * 2.0 ** -OPERAND_FORMATS[scales[2]].fraction_bits
    each_group = [
        codes.repeat_interleave(row.scale_group // row.exact_group, -1).permute(2, 0, 1)
        for codes in scales[:2]
    ]

    def outer(table: Tensor) -> tuple[Tensor, Tensor]:
        return lookup(table, each_group[0])[..., :, None], lookup(table, each_group[1])[..., None, :]

    a_significand, b_significand = outer(significands)
    scale = a_significand * b_significand
    a_exponent, b_exponent = outer(scale_table.exponents)
    a_values, b_values = left.values(torch.float32).transpose(-1, -2), right.values(torch.float32)
    is_zero = ((a_values.abs() @ b_values.abs()) == 0) | (scale == 0)
    exponent = torch.where(is_zero, _NO_EXPONENT, a_exponent + b_exponent)
    sums = (a_values @ b_values) * scale
    groups = row.k_step // row.exact_group  # a step
    steps = sums.shape[0] // groups
    sums, exponent = (t.reshape(steps, groups, *t.shape[1:]) for t in (sums, exponent))

    def total(step: int, top: Tensor) -> Tensor:
        shift = (row.fraction_bits + exponent[step] - top[None]).clamp(min=1 - F64.bias)
        return (sums[step] * F64.power_of_two(shift)).trunc_().sum(0)

    left, right = (_Operand(codes, name, row.k_step) for codes, name in (a, b))
    return Terms(exponent.amax(1), total, _specials(left, right, scales, steps))


class _Operand:
    """Codes of one side of a block, [batch, rows, K], cut into steps: tables are looked up as
    [steps, batch, k_step, rows]."""

    def __init__(self, codes: Tensor, name: str, k_step: int) -> None:
        self.table = decode_table(name, codes.device)
        self.is_wide = OPERAND_FORMATS[name].bits > 8
        self.codes = codes.reshape(*codes.shape[:2], -1, k_step).permute(2, 0, 3, 1).contiguous()

    def values(self, dtype: torch.dtype) -> Tensor:
        """Finite values, 0 for NaN and Inf."""
        return lookup(self.table.values.to(dtype), self.codes)

    def exact_values(self) -> Tensor:
        """Values with NaN and Inf, float64."""
        return lookup(self.table.values + self.table.specials, self.codes)

    def has_specials(self) -> bool:
        return self.table.has_specials and bool(lookup(self.table.is_special, self.codes).any())

    def exponent_range(self) -> tuple[int, int]:
        """Bounds of the exponents of non-zero values: the format's, or the data's where that range is
        wide."""
        low, high = self.table.min_exponent, self.table.max_exponent
        if not self.is_wide:
            return low, high
        nonzero = self.table.significands != 0
        high = int(lookup(torch.where(nonzero, self.table.exponents, low), self.codes).max())
        low = int(lookup(torch.where(nonzero, self.table.exponents, high), self.codes).min())
        return min(low, high), high

    def by_exponent(self, function: Callable[[Tensor], Tensor], zero: float) -> Tensor:
        """``function(exponent)`` for non-zero values and ``zero`` for zeros."""
        return lookup(
            torch.where(self.table.significands != 0, function(self.table.exponents), zero), self.codes
        )


def _specials(
    left: _Operand, right: _Operand, scales: CodedScales | None, steps: int
) -> Callable[[int], Tensor] | None:
    """NaN and Inf of a step's products and scales, or None if no operand or scale has any."""
    scale_specials: list[Tensor] = []
    if scales is not None:
        table = decode_table(scales[2], scales[0].device)
        for codes in scales[:2]:
            special = lookup(table.specials, codes).reshape(*codes.shape[:2], steps, -1)
            scale_specials.append(special.sum(-1).permute(2, 0, 1))
    any_scale = any(bool((special != 0).any()) for special in scale_specials)
    if not (left.has_specials() or right.has_specials() or any_scale):
        return None
    a, b = left.exact_values().transpose(-1, -2), right.exact_values()

    def specials(step: int) -> Tensor:
        total = a[step] @ b[step]
        total = torch.where(total.isfinite(), 0.0, total)
        if scale_specials:
            total = total + scale_specials[0][step, :, :, None] + scale_specials[1][step, :, None, :]
        return total

    return specials


def _largest_exponent(row: MmaFamily, left: _Operand, right: _Operand) -> Tensor:
    """The largest exponent among the non-zero products of each step, [steps, batch, m, n]."""
    ranges = [side.exponent_range() for side in (left, right)]
    middles = [(low + high) // 2 for low, high in ranges]
    span = sum(high - low + 2 for low, high in ranges)  # the middles may be off by half
    gap = row.k_step.bit_length()  # 2**gap > k_step
    for probe in (F32, F64):
        if gap * (span // 2 + 1) + gap < probe.bias - 1:
            break
    else:
        return _largest_exponent_by_product(left, right)

    def powers(side: _Operand, middle: int) -> Tensor:
        return side.by_exponent(lambda e: probe.power_of_two((e - middle).to(probe.integer) * gap), 0.0)

    sums = powers(left, middles[0]).transpose(-1, -2) @ powers(right, middles[1])
    field = sums.view(probe.integer) >> probe.fraction_bits
    wraps = probe.bias // gap + 1
    # floor(x / gap) by a multiplication, exact for the small x of an exponent field.
    exponent = (field + (gap * wraps - probe.bias)) * ((1 << 16) // gap + 1) >> 16
    return torch.where(field == 0, _NO_EXPONENT, exponent + (sum(middles) - wraps))


def _largest_exponent_by_product(left: _Operand, right: _Operand) -> Tensor:
    a, b = (side.by_exponent(Tensor.short, _NO_EXPONENT // 2)[..., None] for side in (left, right))
    steps = [(i + j.transpose(-1, -2)).amax(1) for i, j in zip(a, b, strict=True)]
    largest = torch.stack(steps)
    return torch.where(largest < _NO_EXPONENT // 4, _NO_EXPONENT, largest)
