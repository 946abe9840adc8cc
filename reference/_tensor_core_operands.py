"""Operands of the tensor-core models: codes -> exact values, significands and exponents.

An operand number is ``significand * 2**(exponent - fraction_bits)``: the significand is a signed integer, in
[2^f, 2^(f+1)) for a normal number and below 2^f for a subnormal one, which has the format's smallest exponent. The
multiplier of a tensor core takes the number apart in this way and never renormalizes a subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from reference.formats import FORMATS, Format

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
FORMAT_OF_DTYPE = {dtype: name for dtype, (name, _) in _CODE_DTYPES.items()}


@dataclass(frozen=True)
class DecodeTable:
    """One row a code: ``significands`` int64 (0 for NaN and Inf), ``exponents`` int64, ``specials`` float64 (the
    value of NaN and Inf codes, 0 elsewhere), ``values`` float64 (finite values, 0 for NaN and Inf)."""

    significands: Tensor
    exponents: Tensor
    specials: Tensor
    values: Tensor
    min_exponent: int
    max_exponent: int


@lru_cache(maxsize=None)
def decode_table(name: str, device: torch.device) -> DecodeTable:
    """The table of one operand format (``e4m3``, ``bf16`` ...) on a device."""
    fmt = OPERAND_FORMATS[name]
    codes = torch.arange(1 << 8 if fmt.bits < 8 else 1 << fmt.bits)
    field_bits = fmt.exponent_bits + fmt.fraction_bits
    # Bits above the format's own width are ignored: an E2M1 code in a byte, the sign bit of an unsigned scale.
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
        *(t.to(device) for t in (significands, exponents, specials, values)),
        min_exponent=min_exponent,
        max_exponent=int(exponents.max()),
    )


def power_of_two(exponents: Tensor) -> Tensor:
    """2**exponents as float64, exact for -1022 <= exponents <= 1023 (integer tensor)."""
    return (exponents.long() + 1023 << 52).view(torch.float64)


def to_codes(tensor: Tensor, fmt: str | None, argument: str) -> tuple[Tensor, str]:
    """(int codes, format name) of an operand given as codes (integer dtype) or as a tensor of its own dtype.

    uint8 codes for formats of at most eight bits, int16 or uint16 for bf16 and fp16. TypeError or ValueError naming
    ``argument`` if dtype and format do not fit together.
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
    if codes.dtype == torch.int16:
        return codes.int() & 0xFFFF, name
    return codes.int(), name
