"""Bit-accurate models of the matrix-multiply-accumulate (MMA) instructions behind MegaMoE, one row a family.

One MMA step computes ``d = c + sum_k a[k] * b[k]`` as one fused operation, and its result differs from both
the exactly rounded sum and a chain of float32 operations:

1. A product is exact: product of the two significands (not renormalized), exponent ``ea + eb``. A subnormal
   operand has its format's smallest exponent and a significand below 1. The accumulator c enters with its own
   exponent (-126 for a subnormal). A term that is zero has the exponent ``zero_exponent``, which lies below
   all others.
2. ``E`` is the largest exponent among all terms. Every term is truncated toward zero to ``fraction_bits``
   bits after the binary point of 2^E.
3. The truncated terms are added exactly.
4. The sum is truncated toward zero to ``output_fraction_bits`` significant fraction bits (fewer for a
   subnormal result: the last place is never below ``2**(-126 - output_fraction_bits)``).

NaN, Inf - Inf and 0 * Inf give the bit pattern ``nan_bits``; other infinities survive; a zero sum is +0. A
longer K is a chain of steps in ascending k, each taking the last one's result as its accumulator.

Block-scaled families add the two UE8M0 scales' exponents to each product's exponent; the four-bit ones sum
groups of 16 products exactly, multiply by the two scales' significands, and align the groups by the scales'
exponents alone.

``mma_step`` is this text in 64-bit integers, one step at a time; ``matmul`` is the same arithmetic arranged
for speed (``reference._tensor_core_fast``), and the tests hold the two equal. Results do not depend on the
device, on strides or on block sizes.

Sources: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (arXiv 2511.10909),
"Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004). The Hopper rows were also checked against an H200
(``evidence`` "hardware"); the Blackwell rows follow the papers (``evidence`` "literature").
"""

from __future__ import annotations

from torch import Tensor

from reference import _tensor_core_fast, _tensor_core_step
from reference._tensor_core_families import FAMILIES, MmaFamily, get_family
from reference._tensor_core_operands import OPERAND_FORMATS, accumulator_or_zero, check_operands, check_scales

__all__ = ["FAMILIES", "OPERAND_FORMATS", "MmaFamily", "get_family", "matmul", "mma_step"]


def matmul(
    family: MmaFamily | str,
    a_codes: Tensor,
    b_codes: Tensor,
    *,
    a_format: str | None = None,
    b_format: str | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    scale_format: str | None = None,
    accumulator: Tensor | None = None,
) -> Tensor:
    """``accumulator + a @ b.T`` as the tensor core computes it: a chain of MMA steps in ascending k.

    a_codes [..., M, K], b_codes [..., N, K]: codes (uint8, one code a byte, or int16/uint16 for bf16 and
    fp16; then with a_format and b_format), or tensors of dtype float8_e4m3fn, float8_e5m2, bfloat16 or
    float16. Equal leading dimensions are independent problems (a K loop cut into blocks that each start from
    zero, experts). K is a multiple of the family's k_step. a_scales [..., M, K / scale_group], b_scales [...,
    N, K / scale_group]: scale codes (uint8), for the block-scaled families only; scale_format where a family
    has two. accumulator [..., M, N] float32, zero if None. Returns float32 [..., M, N].

    ValueError or TypeError naming the argument otherwise.
    """
    row, a, b = check_operands(family, (a_codes, a_format), (b_codes, b_format))
    scales = check_scales(row, (a[0], a_scales), (b[0], b_scales), scale_format)
    return _tensor_core_fast.matmul(row, a, b, scales, accumulator_or_zero(accumulator, a, b))


def mma_step(
    family: MmaFamily | str,
    a_codes: Tensor,
    b_codes: Tensor,
    accumulator: Tensor | None = None,
    *,
    a_format: str | None = None,
    b_format: str | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    scale_format: str | None = None,
) -> Tensor:
    """One MMA step, K = k_step exactly, in 64-bit integers as the module's text says it; arguments as
    ``matmul``."""
    row, a, b = check_operands(family, (a_codes, a_format), (b_codes, b_format))
    if a[0].shape[-1] != row.k_step:
        raise ValueError(f"a_codes: one step of {row.name} has K = {row.k_step}, got {a[0].shape[-1]}")
    scales = check_scales(row, (a[0], a_scales), (b[0], b_scales), scale_format)
    return _tensor_core_step.step(row, a, b, scales, accumulator_or_zero(accumulator, a, b))
