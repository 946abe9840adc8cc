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

from collections.abc import Iterator

import torch
from torch import Tensor

from reference._tensor_core_families import MmaFamily
from reference._tensor_core_operands import OPERAND_FORMATS, Coded, CodedScales
from reference._tensor_core_terms import Terms, group_terms, product_terms

# Products in flight at a time: on a CPU they should stay in the caches, on a GPU each launch should be long
# enough to hide the host.
_CPU_BLOCK_PRODUCTS = 1 << 19
_GPU_BLOCK_PRODUCTS = 1 << 26


def matmul(row: MmaFamily, a: Coded, b: Coded, scales: CodedScales | None, accumulator: Tensor) -> Tensor:
    """The K loop for checked arguments: codes [..., M, K], [..., N, K], accumulator [..., M, N] float32."""
    if row.zero_exponent > -126:
        # Then a zero product could outweigh a small accumulator, and no zero term may be left out.
        raise ValueError(f"family: zero_exponent must be at most -126, got {row.zero_exponent}")
    (a_codes, a_name), (b_codes, b_name) = a, b
    (m, k), n = a_codes.shape[-2:], b_codes.shape[-2]
    if accumulator.numel() == 0 or k == 0:
        return accumulator.clone()
    out = accumulator.reshape(-1, m, n).clone()
    a_codes, b_codes = a_codes.reshape(-1, m, k), b_codes.reshape(-1, n, k)
    flat_scales = None if scales is None else [codes.reshape(-1, *codes.shape[-2:]) for codes in scales[:2]]
    sums_fit_f32 = (row.k_step + 1) << (row.fraction_bits + 2) <= 1 << 24
    are_narrow = all(OPERAND_FORMATS[name].bits <= 8 for name in (a_name, b_name))
    dtype = torch.float32 if sums_fit_f32 and are_narrow and scales is None else torch.float64
    for batch, rows, columns in _blocks(out, row.k_step):
        block_a, block_b = (a_codes[batch, rows], a_name), (b_codes[batch, columns], b_name)
        block_scales = None
        if scales is not None and flat_scales is not None:
            block_scales = (flat_scales[0][batch, rows], flat_scales[1][batch, columns], scales[2])
        if row.exact_group > 1 and block_scales is not None:
            terms = group_terms(row, block_a, block_b, block_scales)
        else:
            terms = product_terms(row, dtype, block_a, block_b, block_scales)
        c = out[batch, rows, columns].contiguous()
        # With float32 as the working type, products are too small to push an accumulator beyond its range.
        stays_finite = dtype == torch.float32 and terms.specials is None and bool(c.isfinite().all())
        for step in range(terms.largest.shape[0]):
            c = _step(row, terms, step, c, stays_finite)
        out[batch, rows, columns] = c
    nan = torch.tensor(row.nan_bits, dtype=torch.int32, device=out.device).view(torch.float32)
    return torch.where(out.isnan(), nan, out).reshape(accumulator.shape)


def _blocks(out: Tensor, k_step: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of [batch, M, N] whose products of one step number at most the block size."""
    batch, m, n = out.shape
    outputs = max((_CPU_BLOCK_PRODUCTS if out.device.type == "cpu" else _GPU_BLOCK_PRODUCTS) // k_step, 1)
    n_size = min(n, max(outputs // min(m, 32), 1))
    m_size = min(m, max(outputs // n_size, 1))
    batch_size = max(outputs // (m_size * n_size), 1)
    for i in range(0, batch, batch_size):
        for j in range(0, m, m_size):
            for h in range(0, n, n_size):
                yield slice(i, i + batch_size), slice(j, j + m_size), slice(h, h + n_size)


def _step(row: MmaFamily, terms: Terms, step: int, c: Tensor, stays_finite: bool) -> Tensor:
    """One MMA step for a block: accumulator [batch, m, n] float32 -> the new accumulator."""
    dtype = terms.largest.dtype
    # 2**exponent of the accumulator; a subnormal one has exponent -126.
    power = (c.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=2.0**-126)
    if dtype == torch.float64:
        # In the other case every product outweighs a zero accumulator, so its exponent is never seen.
        power = torch.where(c == 0, 2.0**row.zero_exponent, power.double())
    unit = torch.maximum(terms.largest[step], power) * 2.0**-row.fraction_bits
    total = terms.total(step, unit) + torch.div(c.to(dtype), unit, rounding_mode="trunc")
    # Adding zero makes a negative zero positive: a sum that vanishes, or underflows, is +0.
    if dtype == torch.float32:
        result = _keep_fraction_bits(total + 0.0, torch.int32, 23 - row.output_fraction_bits) * unit
    else:
        exact = _keep_fraction_bits(total, torch.int64, 52 - row.output_fraction_bits) * unit
        result = exact.float()
        # float() rounds what does not fit: a subnormal result is truncated too, one beyond the range is Inf.
        above = (result.abs() > exact.abs()) & result.isfinite()
        result = torch.where(above, (result.view(torch.int32) - 1).view(torch.float32), result) + 0.0
    if stays_finite:
        return result
    if terms.specials is None:
        return torch.where(c.isfinite(), result, c)
    special = terms.specials(step) + torch.where(c.isfinite(), 0.0, c)
    return torch.where(special == 0, result, special.float())


def _keep_fraction_bits(values: Tensor, integer: torch.dtype, dropped: int) -> Tensor:
    """Truncation toward zero of normal floats, by clearing the lowest ``dropped`` fraction bits."""
    return (values.view(integer) & (-1 << dropped)).view(values.dtype)
