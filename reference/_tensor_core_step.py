"""One MMA step as ``reference.tensor_core`` describes it, in 64-bit integers, one product a term."""

from __future__ import annotations

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


def step(row: MmaFamily, a: Coded, b: Coded, scales: CodedScales | None, c: Tensor) -> Tensor:
    """Codes [..., M, k_step] and [..., N, k_step], accumulator [..., M, N] float32 -> the new accumulator."""
    significands, exponents, fraction_bits, specials = _terms(row, a, b, scales)
    c_significand, c_exponent, c_special = _split_float32(c)
    exponents = (
        torch.where(significands == 0, row.zero_exponent, exponents) if row.exact_group == 1 else exponents
    )
    c_exponent = torch.where(c_significand == 0, row.zero_exponent, c_exponent)
    largest = torch.maximum(exponents.amax(-1), c_exponent)
    total = _align(significands, fraction_bits, exponents, largest[..., None], row.fraction_bits).sum(-1)
    total += _align(c_significand, 23, c_exponent, largest, row.fraction_bits)
    result = _round_output(total, largest - row.fraction_bits, row.output_fraction_bits)
    return _apply_specials(result, specials + c_special, row.nan_bits)


def _terms(
    row: MmaFamily, a: Coded, b: Coded, scales: CodedScales | None
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Significands and exponents [..., M, N, terms], fraction bits, sum of NaN and Inf [..., M, N]."""
    significands, exponents, specials = _products(a, b)
    fraction_bits = OPERAND_FORMATS[a[1]].fraction_bits + OPERAND_FORMATS[b[1]].fraction_bits
    if scales is None:
        return significands, exponents, fraction_bits, specials.sum(-1)
    a_scale, b_scale, scale_name = scales
    scale_sig, scale_exp, scale_specials = _products((a_scale, scale_name), (b_scale, scale_name))
    specials = specials.sum(-1) + scale_specials.sum(-1)
    scale_fraction = 2 * OPERAND_FORMATS[scale_name].fraction_bits
    if row.exact_group == 1:
        assert row.scale_group == row.k_step, "one scale a step"
        return significands, exponents + scale_exp, fraction_bits, specials
    # A group's products are added exactly in units of the smallest product, then scaled; only the scales'
    # exponents take part in the alignment. A group whose products are all zero, or whose scale is zero, is a
    # zero term; a group whose products cancel is not.
    assert row.scale_group is not None
    smallest = sum(decode_table(name, codes.device).min_exponent for codes, name in (a, b))
    units = significands << exponents - smallest
    units = units.reshape(*units.shape[:-1], row.k_step // row.exact_group, row.exact_group)
    repeats = row.scale_group // row.exact_group
    scale_sig, scale_exp = scale_sig.repeat_interleave(repeats, -1), scale_exp.repeat_interleave(repeats, -1)
    is_zero = (units == 0).all(-1) | (scale_sig == 0)
    group_exponents = torch.where(is_zero, row.zero_exponent, scale_exp)
    return units.sum(-1) * scale_sig, group_exponents, fraction_bits - smallest + scale_fraction, specials


def _products(a: Coded, b: Coded) -> tuple[Tensor, Tensor, Tensor]:
    """Significand and exponent of every product [..., M, N, K] int64, and the product if NaN or Inf."""

    def outer(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return lookup(tables[0], a[0])[..., :, None, :], lookup(tables[1], b[0])[..., None, :, :]

    left, right = (decode_table(name, codes.device) for codes, name in (a, b))
    a_significand, b_significand = outer((left.significands, right.significands))
    a_exponent, b_exponent = outer((left.exponents, right.exponents))
    a_value, b_value = outer((left.values + left.specials, right.values + right.specials))
    product = a_value * b_value
    specials = torch.where(product.isfinite(), 0.0, product)
    return a_significand * b_significand, a_exponent + b_exponent, specials


def _align(significands: Tensor, fraction_bits: int, exponents: Tensor, largest: Tensor, kept: int) -> Tensor:
    """``significands * 2**(exponents - fraction_bits)`` truncated toward zero, in units of 2**(largest -
    kept)."""
    shift = (largest - exponents + (fraction_bits - kept)).clamp(max=62)
    magnitude = significands.abs()
    moved = torch.where(shift >= 0, magnitude >> shift.clamp(min=0), magnitude << (-shift).clamp(min=0))
    return torch.where(significands < 0, -moved, moved)


def _split_float32(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 -> signed significand with 23 fraction bits, exponent, and its NaN or Inf as float64 (0 if
    finite)."""
    bits = values.view(torch.int32).long()
    field, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    special = torch.where(field == 255, values.double(), 0.0)
    magnitude = torch.where(field == 255, 0, fraction + ((field > 0).long() << 23))
    exponent = torch.where(field == 255, 1, field.clamp(min=1)) - 127
    return torch.where(bits < 0, -magnitude, magnitude), exponent, special


def _round_output(total: Tensor, unit_exponent: Tensor, fraction_bits: int) -> Tensor:
    """``total * 2**unit_exponent`` truncated toward zero to fraction_bits, as float32; Inf beyond its
    range."""
    magnitude = total.abs()
    # float64 may round the sum up to the next power of two only above 2^53, which no family reaches.
    top = (magnitude.double().view(torch.int64) >> 52) - 1023 + unit_exponent
    last_place = top.clamp(min=-126) - fraction_bits
    drop = (last_place - unit_exponent).clamp(min=0, max=62)
    kept = (magnitude >> drop).double() * power_of_two((unit_exponent + drop).clamp(min=-1000))
    return torch.where(total < 0, -kept, kept).float() + 0.0  # a result that underflows to zero is +0


def _apply_specials(result: Tensor, specials: Tensor, nan_bits: int) -> Tensor:
    """NaN and Inf sums take the place of the finite result; every NaN gets the family's pattern."""
    replaced = torch.where(specials == 0, result, specials.float())
    return torch.where(replaced.isnan(), nan_bits, replaced.view(torch.int32)).view(torch.float32)
