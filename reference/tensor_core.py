"""Bit-accurate models of the matrix-multiply-accumulate (MMA) instructions behind MegaMoE, one row a family.

One MMA step computes ``d = c + sum_k a[k] * b[k]`` as one fused operation, and its result differs from both the
exactly rounded sum and a chain of float32 operations:

1. A product is exact: product of the two significands (not renormalized), exponent ``ea + eb``. A subnormal operand
   has its format's smallest exponent and a significand below 1. The accumulator c enters with its own exponent
   (-126 for a subnormal). A term that is zero has the exponent ``zero_exponent``, which lies below all others.
2. ``E`` is the largest exponent among all terms. Every term is truncated toward zero to ``fraction_bits`` bits
   after the binary point of 2^E.
3. The truncated terms are added exactly.
4. The sum is truncated toward zero to ``output_fraction_bits`` significant fraction bits (fewer for a subnormal
   result: the last place is never below ``2**(-126 - output_fraction_bits)``).

NaN, Inf - Inf and 0 * Inf give the bit pattern ``nan_bits``; other infinities survive; a zero sum is +0. A longer K
is a chain of steps in ascending k, each taking the last one's result as its accumulator.

Block-scaled families add the two UE8M0 scales' exponents to each product's exponent; the four-bit ones sum groups of
16 products exactly, multiply by the two scales' significands, and align the groups by the scales' exponents alone.

``mma_step`` is this text in 64-bit integers, one step at a time; ``matmul`` is the same arithmetic arranged for
speed (``reference._tensor_core_fast``), and the tests hold the two equal. Results do not depend on the device, on
strides or on block sizes.

Sources: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (arXiv 2511.10909), "Accurate Models
of NVIDIA Tensor Cores" (arXiv 2512.07004). The Hopper rows were also checked against an H200 (``evidence``
"hardware"); the Blackwell rows follow the papers (``evidence`` "literature").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reference import _tensor_core_fast as fast
from reference._tensor_core_operands import (
    FORMAT_OF_DTYPE,
    OPERAND_FORMATS,
    decode_table,
    power_of_two,
    to_codes,
)

__all__ = ["FAMILIES", "MmaFamily", "get_family", "matmul", "mma_step"]

_F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


@dataclass(frozen=True)
class MmaFamily:
    """Arithmetic of one instruction family.

    k_step: products per fused step. fraction_bits: bits kept below the largest exponent when terms are aligned.
    output_fraction_bits: fraction bits of the result (23 = float32). scale_format, scale_group: block scales and how
    many k share one, None without. exact_group: products summed exactly before alignment (1: none).
    zero_exponent: exponent of a term that is zero. nan_bits: the float32 pattern of every NaN result.
    evidence: "hardware" if compared with the instruction itself, "literature" otherwise.
    """

    name: str
    instruction: str
    operand_formats: tuple[str, ...]
    k_step: int
    fraction_bits: int
    output_fraction_bits: int
    scale_formats: tuple[str, ...] = ()
    scale_group: int | None = None
    exact_group: int = 1
    zero_exponent: int = -133
    nan_bits: int = 0x7FFFFFFF
    evidence: Literal["hardware", "literature"] = "literature"


FAMILIES: dict[str, MmaFamily] = {
    row.name: row
    for row in (
        MmaFamily("hopper_fp8", "wgmma .f32.e4m3/.e5m2", ("e4m3", "e5m2"), 32, 13, 13),
        MmaFamily("hopper_bf16", "wgmma .f32.bf16/.f16", ("bf16", "fp16"), 16, 25, 23),
        MmaFamily("blackwell_f8f6f4", "tcgen05.mma kind::f8f6f4", _F8F6F4, 32, 25, 23),
        MmaFamily("blackwell_bf16", "tcgen05.mma kind::f16", ("bf16", "fp16"), 16, 25, 23),
        MmaFamily("blackwell_mxf8f6f4", "tcgen05.mma kind::mxf8f6f4", _F8F6F4, 32, 25, 23, ("ue8m0",), 32),
        MmaFamily("blackwell_mxf4", "tcgen05.mma kind::mxf4", ("e2m1",), 64, 35, 23, ("ue8m0",), 32, 16),
        MmaFamily(
            "blackwell_mxf4nvf4",
            "tcgen05.mma kind::mxf4nvf4",
            ("e2m1",),
            64,
            35,
            23,
            ("ue4m3", "ue8m0"),
            16,
            16,
        ),
    )
}


def get_family(family: MmaFamily | str) -> MmaFamily:
    """A family by name; a row is passed through. ValueError for an unknown name."""
    if isinstance(family, MmaFamily):
        return family
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {sorted(FAMILIES)}, got {family!r}")
    return FAMILIES[family]


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

    a_codes [..., M, K], b_codes [..., N, K]: codes (uint8, one code a byte, or int16/uint16 for bf16 and fp16; then
    with a_format and b_format), or tensors of dtype float8_e4m3fn, float8_e5m2, bfloat16 or float16. Equal leading
    dimensions are independent problems (a K loop cut into blocks that each start from zero, experts). K is a
    multiple of the family's k_step. a_scales [..., M, K / scale_group], b_scales [..., N, K / scale_group]: scale
    codes (uint8), for the block-scaled families only; scale_format where a family has two. accumulator [..., M, N]
    float32, zero if None. Returns float32 [..., M, N].

    ValueError or TypeError naming the argument otherwise.
    """
    row, a, b, scales = _arguments(
        family, a_codes, b_codes, a_format, b_format, a_scales, b_scales, scale_format
    )
    shape = (*a[0].shape[:-1], b[0].shape[-2])
    c = _accumulator(accumulator, shape, a[0].device)
    return fast.matmul(row, a, b, scales, c)


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
    """One MMA step, K = k_step exactly, in 64-bit integers as the module's text says it; arguments as ``matmul``."""
    row, a, b, scales = _arguments(
        family, a_codes, b_codes, a_format, b_format, a_scales, b_scales, scale_format
    )
    if a[0].shape[-1] != row.k_step:
        raise ValueError(f"a_codes: one step of {row.name} has K = {row.k_step}, got {a[0].shape[-1]}")
    shape = (*a[0].shape[:-1], b[0].shape[-2])
    c = _accumulator(accumulator, shape, a[0].device)
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
    row: MmaFamily, a: tuple[Tensor, str], b: tuple[Tensor, str], scales: tuple[Tensor, Tensor, str] | None
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Significands and exponents [..., M, N, terms] int64, their fraction bits, and the sum of NaN and Inf float64."""
    (a_codes, a_name), (b_codes, b_name) = a, b
    ta, tb = decode_table(a_name, a_codes.device), decode_table(b_name, b_codes.device)

    def outer(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left[..., :, None, :], right[..., None, :, :]

    a_sig, b_sig = outer(ta.significands[a_codes], tb.significands[b_codes])
    a_exp, b_exp = outer(ta.exponents[a_codes], tb.exponents[b_codes])
    significands, exponents = a_sig * b_sig, a_exp + b_exp
    fraction_bits = OPERAND_FORMATS[a_name].fraction_bits + OPERAND_FORMATS[b_name].fraction_bits
    a_val, b_val = outer(ta.values[a_codes] + ta.specials[a_codes], tb.values[b_codes] + tb.specials[b_codes])
    products = a_val * b_val
    specials = torch.where(products.isfinite(), 0.0, products).sum(-1)
    if scales is None:
        return significands, exponents, fraction_bits, specials
    a_scale, b_scale, scale_name = scales
    ts = decode_table(scale_name, a_scale.device)
    specials = specials + (
        ts.specials[a_scale].sum(-1)[..., :, None] + ts.specials[b_scale].sum(-1)[..., None, :]
    )
    sa_sig, sb_sig = outer(ts.significands[a_scale], ts.significands[b_scale])
    sa_exp, sb_exp = outer(ts.exponents[a_scale], ts.exponents[b_scale])
    scale_sig, scale_exp = sa_sig * sb_sig, sa_exp + sb_exp
    scale_fraction = 2 * OPERAND_FORMATS[scale_name].fraction_bits
    if row.exact_group == 1:
        assert row.scale_group == row.k_step, "one scale a step"
        return significands, exponents + scale_exp, fraction_bits, specials
    # A group's products are added exactly in units of the smallest product, then scaled; only the scales' exponents
    # take part in the alignment. A group whose products are all zero, or whose scale is zero, is a zero term; a
    # group whose products cancel is not.
    assert row.scale_group is not None
    smallest = ta.min_exponent + tb.min_exponent
    units = (significands << exponents - smallest).unflatten(-1, (-1, row.exact_group))
    repeats = row.scale_group // row.exact_group
    scale_sig, scale_exp = scale_sig.repeat_interleave(repeats, -1), scale_exp.repeat_interleave(repeats, -1)
    is_zero = (units == 0).all(-1) | (scale_sig == 0)
    group_exponents = torch.where(is_zero, row.zero_exponent, scale_exp)
    return units.sum(-1) * scale_sig, group_exponents, fraction_bits - smallest + scale_fraction, specials


def _align(significands: Tensor, fraction_bits: int, exponents: Tensor, largest: Tensor, kept: int) -> Tensor:
    """``significands * 2**(exponents - fraction_bits)`` truncated toward zero, in units of 2**(largest - kept)."""
    shift = (largest - exponents + (fraction_bits - kept)).clamp(max=62)
    magnitude = significands.abs()
    moved = torch.where(shift >= 0, magnitude >> shift.clamp(min=0), magnitude << (-shift).clamp(min=0))
    return torch.where(significands < 0, -moved, moved)


def _split_float32(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 -> signed significand with 23 fraction bits, exponent, and its NaN or Inf as float64 (0 if finite)."""
    bits = values.view(torch.int32).long()
    field, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    special = torch.where(field == 255, values.double(), 0.0)
    magnitude = torch.where(field == 255, 0, fraction + ((field > 0).long() << 23))
    exponent = torch.where(field == 255, 1, field.clamp(min=1)) - 127
    return torch.where(bits < 0, -magnitude, magnitude), exponent, special


def _round_output(total: Tensor, unit_exponent: Tensor, fraction_bits: int) -> Tensor:
    """``total * 2**unit_exponent`` truncated toward zero to fraction_bits, as float32; Inf beyond its range."""
    magnitude = total.abs()
    # float64 may round the sum up to the next power of two only above 2^53, which no family reaches.
    top = (magnitude.double().view(torch.int64) >> 52) - 1023 + unit_exponent
    last_place = top.clamp(min=-126) - fraction_bits
    drop = (last_place - unit_exponent).clamp(min=0, max=62)
    kept = (magnitude >> drop).double() * power_of_two((unit_exponent + drop).clamp(min=-1000))
    return torch.where(total < 0, -kept, kept).float()


def _apply_specials(result: Tensor, specials: Tensor, nan_bits: int) -> Tensor:
    """NaN and Inf sums take the place of the finite result; every NaN gets the family's pattern."""
    replaced = torch.where(specials == 0, result, specials.float())
    return torch.where(replaced.isnan(), nan_bits, replaced.view(torch.int32)).view(torch.float32)


def _accumulator(accumulator: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if accumulator is None:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    if accumulator.dtype != torch.float32:
        raise TypeError(f"accumulator: expected float32, got {accumulator.dtype}")
    if tuple(accumulator.shape) != shape or accumulator.device != device:
        raise ValueError(
            f"accumulator: expected shape {list(shape)} on {device}, got {list(accumulator.shape)} on {accumulator.device}"
        )
    return accumulator


def _arguments(
    family: MmaFamily | str,
    a_codes: Tensor,
    b_codes: Tensor,
    a_format: str | None,
    b_format: str | None,
    a_scales: Tensor | None,
    b_scales: Tensor | None,
    scale_format: str | None,
) -> tuple[MmaFamily, tuple[Tensor, str], tuple[Tensor, str], tuple[Tensor, Tensor, str] | None]:
    row = get_family(family)
    operands = []
    for argument, tensor, fmt in (("a_codes", a_codes, a_format), ("b_codes", b_codes, b_format)):
        if fmt is None and tensor.dtype not in FORMAT_OF_DTYPE and len(row.operand_formats) == 1:
            fmt = row.operand_formats[0]
        codes, name = to_codes(tensor, fmt, argument)
        if name not in row.operand_formats:
            raise ValueError(f"{argument}: {row.name} takes {row.operand_formats}, got {name}")
        if codes.dim() < 2:
            raise ValueError(f"{argument}: expected at least two dimensions, got shape {list(codes.shape)}")
        operands.append((codes, name))
    a, b = operands
    k = a[0].shape[-1]
    if b[0].shape[-1] != k or a[0].shape[:-2] != b[0].shape[:-2] or a[0].device != b[0].device:
        raise ValueError(
            f"b_codes: expected [..., N, K] with the K, leading dimensions and device of a_codes "
            f"{list(a[0].shape)} on {a[0].device}, got {list(b[0].shape)} on {b[0].device}"
        )
    if k % row.k_step:
        raise ValueError(f"a_codes: K must be a multiple of {row.k_step} for {row.name}, got {k}")
    if row.scale_group is None:
        for argument, tensor_or_none in (("a_scales", a_scales), ("b_scales", b_scales)):
            if tensor_or_none is not None:
                raise ValueError(f"{argument}: {row.name} takes no scales")
        return row, a, b, None
    if scale_format is None:
        scale_format = row.scale_formats[0]
    if scale_format not in row.scale_formats:
        raise ValueError(f"scale_format: {row.name} takes {row.scale_formats}, got {scale_format!r}")
    scales = []
    for argument, tensor_or_none, operand in (("a_scales", a_scales, a[0]), ("b_scales", b_scales, b[0])):
        if tensor_or_none is None:
            raise ValueError(f"{argument}: {row.name} needs scales")
        if scale_format == "ue4m3" and tensor_or_none.dtype == torch.float8_e4m3fn:
            tensor_or_none = tensor_or_none.view(torch.uint8)
        codes, _ = to_codes(tensor_or_none, scale_format, argument)
        expected = (*operand.shape[:-1], k // row.scale_group)
        if tuple(codes.shape) != expected:
            raise ValueError(f"{argument}: expected shape {list(expected)}, got {list(codes.shape)}")
        scales.append(codes)
    return row, a, b, (scales[0], scales[1], scale_format)
