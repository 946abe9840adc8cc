"""Operands of the tensor-core models: codes -> exact values, significands and exponents.

An operand number is ``significand * 2**(exponent - fraction_bits)``: the significand is a signed integer, in
[2^f, 2^(f+1)) for a normal number and below 2^f for a subnormal one, which has the format's smallest
exponent. The multiplier of a tensor core takes the number apart in this way and never renormalizes a
subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from reference._tensor_core_families import MmaFamily, get_family
from reference.formats import FORMATS, Format

Coded = tuple[Tensor, str]  # codes and the name of their format
CodedScales = tuple[Tensor, Tensor, str]  # scale codes of a and b, and the name of their format

# Formats that occur only as operands of an MMA; the others are those of reference.formats.
#                      bits exp frac bias sign zero subn -0 inf nans
E5M2 = Format("e5m2", 8, 5, 2, 15, 1, 1, 1, 1, 1, 3)
E3M2 = Format("e3m2", 6, 3, 2, 3, 1, 1, 1, 1, 0, 0)
E2M3 = Format("e2m3", 6, 2, 3, 1, 1, 1, 1, 1, 0, 0)
BF16 = Format("bf16", 16, 8, 7, 127, 1, 1, 1, 1, 1, (1 << 7) - 1)
FP16 = Format("fp16", 16, 5, 10, 15, 1, 1, 1, 1, 1, (1 << 10) - 1)

OPERAND_FORMATS: dict[str, Format] = {
    "e4m3": FORMATS["e4m3fn"],
    "e2m1": FORMATS["e2m1"],
    "ue8m0": FORMATS["ue8m0"],
    "ue4m3": FORMATS["ue4m3"],
    **{fmt.name: fmt for fmt in (E5M2, E3M2, E2M3, BF16, FP16)},
}

_CODE_DTYPES = {
    torch.float8_e4m3fn: ("e4m3", torch.uint8),
    torch.float8_e5m2: ("e5m2", torch.uint8),
    torch.bfloat16: ("bf16", torch.int16),
    torch.float16: ("fp16", torch.int16),
    torch.float8_e8m0fnu: ("ue8m0", torch.uint8),
}


@dataclass(frozen=True)
class DecodeTable:
    """One row a code: ``significands`` int64 (0 for NaN and Inf), ``exponents`` int64, ``specials`` float64
    (the value of NaN and Inf codes, 0 elsewhere), ``values`` float64 (finite values, 0 for NaN and Inf),
    ``is_special``."""

    significands: Tensor
    exponents: Tensor
    specials: Tensor
    values: Tensor
    is_special: Tensor
    has_specials: bool
    min_exponent: int
    max_exponent: int


@cache
def decode_table(name: str, device: torch.device) -> DecodeTable:
    """The table of one operand format (``e4m3``, ``bf16`` ...) on a device."""
    fmt = OPERAND_FORMATS[name]
    codes = torch.arange(1 << 8 if fmt.bits < 8 else 1 << fmt.bits)
    field_bits = fmt.exponent_bits + fmt.fraction_bits
    # Bits above the format's own width are ignored: an E2M1 code in a byte, the sign bit of an unsigned
    # scale.
    magnitude = codes & ((1 << field_bits) - 1)
    sign = 1 - 2 * (codes >> field_bits & 1) * fmt.is_signed
    field, fraction = magnitude >> fmt.fraction_bits, magnitude & ((1 << fmt.fraction_bits) - 1)
    is_normal = (field > 0) if fmt.has_subnormals else torch.ones_like(field, dtype=torch.bool)
    exponents = torch.where(is_normal, field, 1) - fmt.bias
    significands = sign * (fraction + is_normal.long() * (1 << fmt.fraction_bits))
    specials = torch.zeros(len(codes), dtype=torch.float64)
    if fmt.has_infinities:
        specials[magnitude == fmt.max_code + 1] = float("inf")
    specials[magnitude > fmt.max_code + fmt.has_infinities] = float("nan")
    specials *= sign
    special = magnitude > fmt.max_code
    significands[special] = 0
    min_exponent = (1 if fmt.has_subnormals else 0) - fmt.bias
    exponents[special] = min_exponent
    values = significands.double() * power_of_two(exponents - fmt.fraction_bits)
    return DecodeTable(
        significands=significands.to(device),
        exponents=exponents.to(device),
        specials=specials.to(device),
        values=values.to(device),
        is_special=special.to(device),
        has_specials=bool(special.any()),
        min_exponent=min_exponent,
        max_exponent=int(exponents.max()),
    )


def lookup(table: Tensor, codes: Tensor) -> Tensor:
    """``table[codes]`` for integer codes of any shape (int16 codes count from 0 to 65535)."""
    index = codes.reshape(-1).int()
    if codes.dtype == torch.int16:
        index &= 0xFFFF
    return table.index_select(0, index).view(codes.shape)


def power_of_two(exponents: Tensor) -> Tensor:
    """2**exponents as float64, exact for -1022 <= exponents <= 1023 (integer tensor)."""
    return (exponents.long() + 1023 << 52).view(torch.float64)


def to_codes(tensor: Tensor, fmt: str | None, argument: str) -> tuple[Tensor, str]:
    """(codes as uint8 or int16, format name) of an operand given as codes (integer dtype) or as a tensor of
    its own dtype.

    uint8 codes for formats of at most eight bits, int16 or uint16 for bf16 and fp16. TypeError or ValueError
    naming ``argument`` if dtype and format do not fit together.
    """
    if tensor.dtype in _CODE_DTYPES:
        name, view = _CODE_DTYPES[tensor.dtype]
        if fmt not in {None, name}:
            raise ValueError(f"{argument}: dtype {tensor.dtype} holds {name}, but the format given is {fmt}")
        codes = tensor.view(view)
    else:
        if fmt is None:
            raise ValueError(
                f"{argument}: codes of dtype {tensor.dtype} need a format, one of {sorted(OPERAND_FORMATS)}"
            )
        if fmt not in OPERAND_FORMATS:
            raise ValueError(f"{argument}: expected a format among {sorted(OPERAND_FORMATS)}, got {fmt!r}")
        name = fmt
        expected = (torch.int16, torch.uint16) if OPERAND_FORMATS[name].bits == 16 else (torch.uint8,)
        if tensor.dtype not in expected:
            raise TypeError(f"{argument}: expected codes of dtype {expected} for {name}, got {tensor.dtype}")
        codes = tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor
    return codes, name


def accumulator_or_zero(accumulator: Tensor | None, a: Coded, b: Coded) -> Tensor:
    """The accumulator [..., M, N] after checks, or zeros. TypeError or ValueError naming it."""
    shape, device = (*a[0].shape[:-1], b[0].shape[-2]), a[0].device
    if accumulator is None:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    if accumulator.dtype != torch.float32:
        raise TypeError(f"accumulator: expected float32, got {accumulator.dtype}")
    if accumulator.shape != shape or accumulator.device != device:
        got = f"{list(accumulator.shape)} on {accumulator.device}"
        raise ValueError(f"accumulator: expected shape {list(shape)} on {device}, got {got}")
    return accumulator


def check_operands(
    family: MmaFamily | str, a: tuple[Tensor, str | None], b: tuple[Tensor, str | None]
) -> tuple[MmaFamily, Coded, Coded]:
    """Family row and coded operands of a product [..., M, K] x [..., N, K]. TypeError or ValueError."""
    row = get_family(family)
    operands = []
    for argument, (tensor, fmt) in (("a_codes", a), ("b_codes", b)):
        default = row.operand_formats[0] if len(row.operand_formats) == 1 else None
        codes, name = to_codes(tensor, fmt or default, argument)
        if name not in row.operand_formats:
            raise ValueError(f"{argument}: {row.name} takes {row.operand_formats}, got {name}")
        if codes.dim() < 2:
            raise ValueError(f"{argument}: expected at least two dimensions, got shape {list(codes.shape)}")
        operands.append((codes, name))
    (a_codes, _), (b_codes, _) = operands
    k = a_codes.shape[-1]
    if b_codes.shape[-1] != k or a_codes.shape[:-2] != b_codes.shape[:-2] or a_codes.device != b_codes.device:
        raise ValueError(
            f"b_codes: expected [..., N, K] with the K, leading dimensions and device of a_codes "
            f"{list(a_codes.shape)} on {a_codes.device}, got {list(b_codes.shape)} on {b_codes.device}"
        )
    if k % row.k_step:
        raise ValueError(f"a_codes: K must be a multiple of {row.k_step} for {row.name}, got {k}")
    return row, operands[0], operands[1]


def check_scales(
    row: MmaFamily, a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None], scale_format: str | None
) -> CodedScales | None:
    """Coded scales of (operand codes, scales or None) for each side; None for a family without scales."""
    given = (("a_scales", *a), ("b_scales", *b))
    if row.scale_group is None:
        for argument, _, scales in given:
            if scales is not None:
                raise ValueError(f"{argument}: {row.name} takes no scales")
        return None
    name = scale_format or row.scale_formats[0]
    if name not in row.scale_formats:
        raise ValueError(f"scale_format: {row.name} takes {row.scale_formats}, got {scale_format!r}")
    checked = []
    for argument, operand, scales in given:
        if scales is None:
            raise ValueError(f"{argument}: {row.name} needs scales")
        is_e4m3 = name == "ue4m3" and scales.dtype == torch.float8_e4m3fn
        codes, _ = to_codes(scales.view(torch.uint8) if is_e4m3 else scales, name, argument)
        expected = [*operand.shape[:-1], operand.shape[-1] // row.scale_group]
        if list(codes.shape) != expected or codes.device != operand.device:
            got = f"{list(codes.shape)} on {codes.device}"
            raise ValueError(f"{argument}: expected shape {expected} on {operand.device}, got {got}")
        checked.append(codes)
    return checked[0], checked[1], name
