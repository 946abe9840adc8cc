"""The product terms of an MMA, for a block of outputs and all its steps: the inner part of
``reference._tensor_core_fast``, whose text says why the floats used here are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from reference._tensor_core_families import MmaFamily
from reference._tensor_core_operands import (
    OPERAND_FORMATS,
    Coded,
    CodedScales,
    decode_table,
    lookup,
    power_of_two,
)


class _Float(NamedTuple):
    """The layout of a float type."""

    dtype: torch.dtype
    integer: torch.dtype
    fraction_bits: int
    bias: int


_PROBES = (_Float(torch.float32, torch.int32, 23, 127), _Float(torch.float64, torch.int64, 52, 1023))
_ABSENT = -(1 << 14)  # stands for the exponent of a zero in sums of two exponents


@dataclass(frozen=True)
class Terms:
    """largest [steps, batch, m, n]: 2**E, E the largest exponent of each step's products (0 if all are zero).

    total(step, unit): the sum [batch, m, n] of the step's terms, each truncated to multiples of ``unit``, in
    units. specials(step): NaN and Inf of the step, 0 elsewhere, float64; None if the operands have none.
    """

    largest: Tensor
    total: Callable[[int, Tensor], Tensor]
    specials: Callable[[int], Tensor] | None


def product_terms(
    row: MmaFamily, dtype: torch.dtype, a: Coded, b: Coded, scales: CodedScales | None
) -> Terms:
    """Families that align every product. Codes [batch, m, K], [batch, n, K]; scales with K / scale_group."""
    left, right = (_Operand(codes, name, row.k_step) for codes, name in (a, b))
    largest = _largest_power(row, dtype, left, right)
    inverse_scale = None
    if scales is not None:
        exponents = decode_table(scales[2], scales[0].device).exponents
        a_scale, b_scale = (lookup(exponents, codes).permute(2, 0, 1) for codes in scales[:2])
        scale = a_scale[..., :, None] + b_scale[..., None, :]
        largest, inverse_scale = largest * power_of_two(scale), power_of_two(-scale)
    a_values, b_values = left.values(dtype)[..., :, None], right.values(dtype)[..., None, :]
    steps, batch, k_step, m, n = *a_values.shape[:4], b_values.shape[-1]
    products = torch.empty((batch, k_step, m, n), dtype=dtype, device=a_values.device)

    def total(step: int, unit: Tensor) -> Tensor:
        if inverse_scale is not None:
            unit = unit * inverse_scale[step]
        torch.mul(a_values[step], b_values[step], out=products)
        return torch.div(products, unit[:, None], rounding_mode="trunc", out=products).sum(1)

    return Terms(largest, total, _specials(left, right, scales, steps))


def group_terms(row: MmaFamily, a: Coded, b: Coded, scales: CodedScales) -> Terms:
    """Families that add groups of products exactly and align the scaled groups; as product_terms."""
    assert row.scale_group is not None
    left, right = (_Operand(codes, name, row.exact_group) for codes, name in (a, b))
    repeats = row.scale_group // row.exact_group
    a_scale, b_scale = (codes.repeat_interleave(repeats, -1).permute(2, 0, 1) for codes in scales[:2])
    table = decode_table(scales[2], scales[0].device)

    def outer(entries: Tensor) -> Tensor:
        return lookup(entries, a_scale)[..., :, None] * lookup(entries, b_scale)[..., None, :]

    a_values, b_values = left.values(torch.float32).transpose(-1, -2), right.values(torch.float32)
    values, powers = outer(table.values), outer(power_of_two(table.exponents))
    is_zero = ((a_values.abs() @ b_values.abs()) == 0) | (values == 0)
    values = (a_values @ b_values) * values
    steps = values.shape[0] * row.exact_group // row.k_step
    values, powers = (t.reshape(steps, -1, *t.shape[1:]) for t in (values, torch.where(is_zero, 0.0, powers)))

    def total(step: int, unit: Tensor) -> Tensor:
        return torch.div(values[step], unit[None], rounding_mode="trunc").sum(0)

    left, right = (_Operand(codes, name, row.k_step) for codes, name in (a, b))
    return Terms(powers.amax(1), total, _specials(left, right, scales, steps))


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

    def powers(self, scale: int, offset: int, dtype: torch.dtype) -> Tensor:
        """2**(scale * (exponent - offset)), 0 for zeros."""
        power = power_of_two(scale * (self.table.exponents - offset)).to(dtype)
        return lookup(torch.where(self.table.significands != 0, power, 0.0), self.codes)

    def exponents(self, zero: int) -> Tensor:
        """Exponents as int16, ``zero`` for zeros."""
        return lookup(
            torch.where(self.table.significands != 0, self.table.exponents, zero).short(), self.codes
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


def _largest_power(row: MmaFamily, dtype: torch.dtype, left: _Operand, right: _Operand) -> Tensor:
    """2**E [steps, batch, m, n], E the largest exponent of a step's non-zero products; 0 without any."""
    ranges = [side.exponent_range() for side in (left, right)]
    middles = [(low + high) // 2 for low, high in ranges]
    span = sum(high - low + 2 for low, high in ranges)  # the middles may be off by half
    gap = row.k_step.bit_length()  # 2**gap > k_step
    probe = next((p for p in _PROBES if gap * (span // 2 + 1) + gap < p.bias - 1), None)
    if probe is None:
        a, b = (side.exponents(_ABSENT // 2)[..., None] for side in (left, right))
        largest = torch.stack([(i + j.transpose(-1, -2)).amax(1) for i, j in zip(a, b, strict=True)])
        return torch.where(largest < _ABSENT // 4, 0.0, power_of_two(largest.clamp(min=-1022))).to(dtype)
    a, b = (
        side.powers(gap, middle, probe.dtype) for side, middle in zip((left, right), middles, strict=True)
    )
    fields = (a.transpose(-1, -2) @ b).view(probe.integer) >> probe.fraction_bits
    every_field = torch.arange(2 * probe.bias + 2, device=fields.device)
    exponents = torch.div(every_field - probe.bias, gap, rounding_mode="floor") + sum(middles)
    powers = torch.where(every_field == 0, 0.0, power_of_two(exponents.clamp(-1022, 1023)))
    return lookup(powers.to(dtype), fields)
