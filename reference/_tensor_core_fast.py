"""The MMA arithmetic of ``reference.tensor_core`` arranged for speed; bit-identical to ``mma_step``.

Where ``mma_step`` shifts 64-bit integers one product at a time, this module uses floats whose operations are
exact:

* A product of two operand values is exact in the working type, and so is its multiplication by a power of
  two. ``trunc`` of it is the aligned term in units of the last kept bit. For 13 fraction bits and 32 products
  the terms add up to less than 2^24, so float32 is the working type and sums are exact in any order; other
  rows use float64.
* The largest exponent of a step is a matrix product in disguise: with operand x replaced by ``2**(g *
  exponent(x))`` (zero for zero) and ``2**g > k_step``, the product lies in ``[2**(g*E), 2**(g*(E+1)))``
  whatever the order and precision in which it is accumulated, so its exponent field gives E. Operands whose
  exponents span too much for that (bf16 with extreme values) take the maximum product by product.
* Groups of E2M1 products are small integers: a float32 matrix product adds them exactly.

Outputs are cut into blocks whose products fit a cache; block sizes cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reference._tensor_core_families import MmaFamily
from reference._tensor_core_operands import OPERAND_FORMATS, Coded, CodedScales, decode_table, lookup

# Products in flight at a time: on a CPU they should stay in the caches, on a GPU each launch should be
# long enough to hide the host.
_CPU_BLOCK_PRODUCTS = 1 << 19
_GPU_BLOCK_PRODUCTS = 1 << 26
_NO_EXPONENT = -(1 << 14)  # the largest exponent of products that are all zero


@dataclass(frozen=True)
class _Float:
    """A float type seen as bits."""

    dtype: torch.dtype
    integer: torch.dtype
    fraction_bits: int
    bias: int

    def power_of_two(self, exponents: Tensor) -> Tensor:
        """2**exponents, exponents of dtype ``integer``; those below the normal range give 0 or a smaller
        power."""
        return ((exponents + self.bias).clamp(0, 2 * self.bias) << self.fraction_bits).view(self.dtype)

    def exponent_field(self, values: Tensor) -> Tensor:
        """The exponent field, sign ignored."""
        return values.view(self.integer) >> self.fraction_bits & (2 * self.bias + 1)


_F32 = _Float(torch.float32, torch.int32, 23, 127)
_F64 = _Float(torch.float64, torch.int64, 52, 1023)


@dataclass(frozen=True)
class _Terms:
    """The product terms of one block of outputs.

    largest [steps, ...]: the largest exponent of each step's products (_NO_EXPONENT if all are zero).
    total(step, largest): the aligned terms' sum, in units of 2**(largest - fraction_bits).
    specials(step): NaN and Inf of the step, 0 elsewhere, float64; None if the operands have none.
    """

    largest: Tensor
    total: Callable[[int, Tensor], Tensor]
    specials: Callable[[int], Tensor] | None


def matmul(row: MmaFamily, a: Coded, b: Coded, scales: CodedScales | None, accumulator: Tensor) -> Tensor:
    """The K loop for checked arguments: codes [..., M, K] and [..., N, K], accumulator [..., M, N]
    float32."""
    if row.zero_exponent > -126:
        # Then a zero product could outweigh a small accumulator, and no zero term may be left out of the
        # maximum.
        raise ValueError(f"family: zero_exponent must be at most -126, got {row.zero_exponent}")
    (a_codes, a_name), (b_codes, b_name) = a, b
    (m, k), n = a_codes.shape[-2:], b_codes.shape[-2]
    if accumulator.numel() == 0 or k == 0:
        return accumulator.clone()
    out = accumulator.reshape(-1, m, n).clone()
    a_flat, b_flat = (a_codes.reshape(-1, m, k), a_name), (b_codes.reshape(-1, n, k), b_name)
    if scales is not None:
        scales = (
            scales[0].reshape(-1, *scales[0].shape[-2:]),
            scales[1].reshape(-1, *scales[1].shape[-2:]),
            scales[2],
        )
    if row.exact_group > 1:
        assert scales is not None
        work, terms_of = _F64, _group_terms(row, a_flat, b_flat, scales)
    else:
        fits_f32 = scales is None and (row.k_step + 1) << (row.fraction_bits + 2) <= 1 << 24
        work = (
            _F32 if fits_f32 and all(OPERAND_FORMATS[name].bits <= 8 for name in (a_name, b_name)) else _F64
        )
        terms_of = _product_terms(row, work, a_flat, b_flat, scales)
    for block in _blocks(out, row.k_step):
        terms, c = terms_of(*block), out[block].contiguous()
        for step in range(terms.largest.shape[0]):
            c = _step(row, work, terms, step, c)
        out[block] = c
    nan = torch.tensor(row.nan_bits, dtype=torch.int32, device=out.device).view(torch.float32)
    return torch.where(out.isnan(), nan, out).reshape(accumulator.shape)


def _blocks(out: Tensor, k_step: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of [batch, M, N] whose products of one step number at most the block size."""
    batch, m, n = out.shape
    outputs = max((_CPU_BLOCK_PRODUCTS if out.device.type == "cpu" else _GPU_BLOCK_PRODUCTS) // k_step, 1)
    n_size = min(n, max(outputs // min(m, 8), 1))
    m_size = min(m, max(outputs // n_size, 1))
    batch_size = max(outputs // (m_size * n_size), 1)
    for i in range(0, batch, batch_size):
        for j in range(0, m, m_size):
            for h in range(0, n, n_size):
                yield slice(i, i + batch_size), slice(j, j + m_size), slice(h, h + n_size)


def _step(row: MmaFamily, work: _Float, terms: _Terms, step: int, c: Tensor) -> Tensor:
    """One MMA step for a block: accumulator [batch, m, n] float32 -> the new accumulator."""
    c_exponent = (_F32.exponent_field(c).clamp(min=1) - 127).to(work.integer)
    c_exponent = torch.where(c == 0, row.zero_exponent, c_exponent)
    largest = torch.maximum(terms.largest[step], c_exponent)
    # Two factors, because 2**(fraction_bits - largest) can leave the type's range where the result does not.
    # A factor that underflows belongs to an accumulator far below the last kept bit.
    shift = row.fraction_bits - largest
    half = shift >> 1
    aligned = c.to(work.dtype) * work.power_of_two(half) * work.power_of_two(shift - half)
    total = terms.total(step, largest) + aligned.trunc_()
    dropped = work.fraction_bits - row.output_fraction_bits
    total = (total.view(work.integer) & (-1 << dropped)).view(work.dtype)
    if work is _F32:
        # The unit is at least 2**-139: exact, be the result normal or not.
        result = total * 2.0**-row.fraction_bits * work.power_of_two(largest.clamp(min=-126))
    else:
        exact = total * work.power_of_two(largest - row.fraction_bits)
        result = exact.float()
        beyond = (
            result.abs() > exact.abs()
        )  # a subnormal result is truncated too; beyond the largest it is Inf
        result = torch.where(
            beyond & result.isfinite(), (result.view(torch.int32) - 1).view(torch.float32), result
        )
    if terms.specials is None:
        return torch.where(c.isfinite(), result, c)
    special = terms.specials(step) + torch.where(c.isfinite(), 0.0, c)
    return torch.where(special == 0, result, special.float()) + 0.0


def _steps_first(codes: Tensor, k_step: int) -> Tensor:
    """[batch, rows, K] -> [steps, batch, k_step, rows]."""
    return codes.reshape(*codes.shape[:2], -1, k_step).permute(2, 0, 3, 1).contiguous()


def _special_products(
    operands: tuple[Coded, Coded], scales: CodedScales | None, k_step: int
) -> Callable[[int, slice, slice, slice], Tensor] | None:
    """NaN and Inf of a step's products, or None if no operand or scale has any."""
    coded = list(operands) + ([(codes, scales[2]) for codes in scales[:2]] if scales is not None else [])
    tables = [decode_table(name, codes.device) for codes, name in coded]
    if not any(
        table.has_specials and bool(lookup(table.is_special, codes).any())
        for (codes, _), table in zip(coded, tables, strict=True)
    ):
        return None
    left, right = (
        lookup(table.values + table.specials, _steps_first(codes, k_step))
        for (codes, _), table in zip(coded[:2], tables[:2], strict=True)
    )
    scale_specials = [
        lookup(table.specials, codes).reshape(*codes.shape[:2], left.shape[0], -1).sum(-1)
        for (codes, _), table in zip(coded[2:], tables[2:], strict=True)
    ]

    def specials(step: int, batch: slice, rows: slice, columns: slice) -> Tensor:
        total = left[step, batch, :, rows].transpose(-1, -2) @ right[step, batch, :, columns]
        total = torch.where(total.isfinite(), 0.0, total)
        if scale_specials:
            total = (
                total
                + scale_specials[0][batch, rows, step, None]
                + scale_specials[1][batch, None, columns, step]
            )
        return total

    return specials


def _product_terms(
    row: MmaFamily, work: _Float, a: Coded, b: Coded, scales: CodedScales | None
) -> Callable[[slice, slice, slice], _Terms]:
    """Families that align every product."""
    values = []
    for codes, name in (a, b):
        table = decode_table(name, codes.device)
        values.append(lookup(table.values.to(work.dtype), _steps_first(codes, row.k_step)))
    largest_of = _largest_exponent(row, work, a, b)
    specials_of = _special_products((a, b), scales, row.k_step)
    scale_exponents = []
    if scales is not None:
        for codes in scales[:2]:
            table = decode_table(scales[2], codes.device)
            scale_exponents.append(lookup(table.exponents, codes).permute(2, 0, 1).to(work.integer))

    def terms(batch: slice, rows: slice, columns: slice) -> _Terms:
        left, right = values[0][:, batch, :, rows, None], values[1][:, batch, :, None, columns]
        largest, scale = largest_of(batch, rows, columns), None
        if scale_exponents:
            scale = scale_exponents[0][:, batch, rows, None] + scale_exponents[1][:, batch, None, columns]
            largest = torch.where(largest == _NO_EXPONENT, largest, largest + scale)

        def total(step: int, top: Tensor) -> Tensor:
            # Dividing by the unit truncates toward zero in the same pass. A unit that leaves the type's range
            # belongs to a step whose products are all zero (below) or all truncated to zero (above).
            unit = top - row.fraction_bits
            if scale is not None:
                unit = unit - scale[step]
            unit = work.power_of_two(unit.clamp(1 - work.bias, work.bias))
            products = left[step] * right[step]
            return torch.div(products, unit[:, None], rounding_mode="trunc", out=products).sum(1)

        def specials(step: int) -> Tensor:
            assert specials_of is not None
            return specials_of(step, batch, rows, columns)

        return _Terms(largest, total, None if specials_of is None else specials)

    return terms


def _largest_exponent(
    row: MmaFamily, work: _Float, a: Coded, b: Coded
) -> Callable[[slice, slice, slice], Tensor]:
    """The largest exponent among the non-zero products of each step, as [steps, batch, m, n]."""
    middle, span = [], 0
    for codes, name in (a, b):
        low, high = _exponent_range(codes, name)
        middle.append((low + high) // 2)
        span += high - low + 2  # the middles may be off by half
    gap = row.k_step.bit_length()  # 2**gap > k_step
    for probe in (_F32, _F64):
        if gap * (span // 2 + 1) + gap < probe.bias - 1:
            break
    else:
        return _largest_exponent_by_product(row, work, a, b)
    powers = []
    for (codes, name), mid in zip((a, b), middle, strict=True):
        table = decode_table(name, codes.device)
        power = probe.power_of_two((table.exponents - mid).to(probe.integer) * gap)
        power = torch.where(table.significands != 0, power, 0.0)
        powers.append(lookup(power, codes).reshape(*codes.shape[:2], -1, row.k_step).permute(2, 0, 1, 3))
    offset = gap * (probe.bias // gap + 1) - probe.bias
    inverse = (1 << 16) // gap + 1  # floor(x / gap) for the small x of an exponent field

    def largest(batch: slice, rows: slice, columns: slice) -> Tensor:
        sums = powers[0][:, batch, rows] @ powers[1][:, batch, columns].transpose(-1, -2)
        field = sums.view(probe.integer) >> probe.fraction_bits
        exponent = ((field + offset) * inverse >> 16) + (sum(middle) - probe.bias // gap - 1)
        return torch.where(field == 0, _NO_EXPONENT, exponent).to(work.integer)

    return largest


def _exponent_range(codes: Tensor, name: str) -> tuple[int, int]:
    """Bounds of the exponents of an operand: the format's, or the data's where the format's range is wide."""
    table = decode_table(name, codes.device)
    if OPERAND_FORMATS[name].bits <= 8:
        return table.min_exponent, table.max_exponent
    exponents = lookup(torch.where(table.significands != 0, table.exponents, table.min_exponent), codes)
    high = int(exponents.max())
    exponents = lookup(torch.where(table.significands != 0, table.exponents, high), codes)
    return min(int(exponents.min()), high), high


def _largest_exponent_by_product(
    row: MmaFamily, work: _Float, a: Coded, b: Coded
) -> Callable[[slice, slice, slice], Tensor]:
    operands = []
    for codes, name in (a, b):
        table = decode_table(name, codes.device)
        exponents = torch.where(table.significands != 0, table.exponents, _NO_EXPONENT // 2).short()
        operands.append(lookup(exponents, _steps_first(codes, row.k_step)))
    left, right = operands

    def largest(batch: slice, rows: slice, columns: slice) -> Tensor:
        steps = []
        for step in range(left.shape[0]):
            step_max = (left[step, batch, :, rows, None] + right[step, batch, :, None, columns]).amax(1)
            steps.append(torch.where(step_max < _NO_EXPONENT // 4, _NO_EXPONENT, step_max.to(work.integer)))
        return torch.stack(steps)

    return largest


def _group_terms(
    row: MmaFamily, a: Coded, b: Coded, scales: CodedScales
) -> Callable[[slice, slice, slice], _Terms]:
    """Families that add groups of products exactly and align the scaled groups."""
    assert row.scale_group is not None
    groups = row.k_step // row.exact_group
    repeats = row.scale_group // row.exact_group
    values, exponents, significands = [], [], []
    for (codes, name), scale_codes in zip((a, b), scales[:2], strict=True):
        value = lookup(decode_table(name, codes.device).values.float(), codes)
        values.append(
            value.reshape(*codes.shape[:2], -1, groups, row.exact_group).permute(2, 3, 0, 1, 4).contiguous()
        )
        table = decode_table(scales[2], codes.device)
        scale = (
            scale_codes.repeat_interleave(repeats, -1)
            .reshape(*scale_codes.shape[:2], -1, groups)
            .permute(2, 3, 0, 1)
            .contiguous()
        )
        exponents.append(lookup(table.exponents, scale))
        # The significand as a value in [1, 2), below 1 for a subnormal scale.
        significands.append(
            lookup(table.significands, scale).double() * 2.0 ** -OPERAND_FORMATS[scales[2]].fraction_bits
        )
    specials_of = _special_products((a, b), scales, row.k_step)

    def terms(batch: slice, rows: slice, columns: slice) -> _Terms:
        left, right = values[0][:, :, batch, rows], values[1][:, :, batch, columns].transpose(-1, -2)
        sums = (left @ right).double()
        sums *= significands[0][:, :, batch, rows, None] * significands[1][:, :, batch, None, columns]
        exponent = exponents[0][:, :, batch, rows, None] + exponents[1][:, :, batch, None, columns]
        absent = (left.abs() @ right.abs()) == 0
        absent |= (
            significands[0][:, :, batch, rows, None] * significands[1][:, :, batch, None, columns]
        ) == 0
        exponent = torch.where(absent, _NO_EXPONENT, exponent)

        def total(step: int, top: Tensor) -> Tensor:
            shift = (row.fraction_bits + exponent[step] - top[None]).clamp(min=1 - _F64.bias)
            return (sums[step] * _F64.power_of_two(shift)).trunc_().sum(0)

        def specials(step: int) -> Tensor:
            assert specials_of is not None
            return specials_of(step, batch, rows, columns)

        return _Terms(exponent.amax(1), total, None if specials_of is None else specials)

    return terms
