"""Small float formats as data, and their encode and decode by integer arithmetic.

A format is ten numbers; everything else (largest value, smallest normal, NaN code) is derived from them.
Values are float32, whose bits are taken apart as integers, so that neither a library's cast nor the device
decides a rounding:

* ``encode`` rounds a float32 significand to the format's fraction bits by adding a rounding increment below
  the last kept bit and shifting; the carry out of the significand is the carry into the exponent.
* A code depends only on sign, exponent, the first ``fraction_bits + 1`` fraction bits, and on whether any
  lower bit is set. Large tensors use that: the codes of all such keys are computed once by the same
  arithmetic, and looked up.

Easy to get wrong: E4M3 keeps the sign of zero and the software E2M1 quantizers drop it; NaN has one canonical
code (0x7F for E4M3, whatever the sign); byte 0 of UE8M0 is 2^-127, a float32 subnormal, which the shift used
by production decodes to 0.0 (``decode_ue8m0_shift``).

Sources: OCP MX and OFP8 specifications for the formats, NUMERICS 1.1 to 1.5 for what production kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["even", "away", "toward_zero", "half_to_zero", "ceil", "floor", "nearest"]
Overflow = Literal["saturate", "nan"]
NegativeZero = Literal["keep", "drop"]
Subnormals = Literal["keep", "flush"]

_SIGN = 0x80000000
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HIDDEN_BIT = 1 << 23
_TABLE_FROM = 1 << 13  # elements; below this a table lookup saves nothing


@dataclass(frozen=True)
class Format:
    """A float format of at most eight bits, described by ten numbers.

    bits: width of a code, sign included. exponent_bits, fraction_bits: field widths. bias: exponent bias.
    is_signed, has_zero, has_subnormals, has_negative_zero, has_infinities: 0 or 1. num_high_nans: how many of
    the largest magnitude codes are NaN.
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int
    is_signed: int
    has_zero: int
    has_subnormals: int
    has_negative_zero: int
    has_infinities: int
    num_high_nans: int

    @property
    def num_codes(self) -> int:
        return 1 << self.bits

    @property
    def sign_bit(self) -> int:
        """The sign's weight in a code, 0 for an unsigned format."""
        return self.is_signed << (self.bits - 1)

    @property
    def max_code(self) -> int:
        """The largest finite magnitude's code."""
        magnitudes = 1 << (self.exponent_bits + self.fraction_bits)
        return magnitudes - 1 - self.num_high_nans - self.has_infinities

    @property
    def nan_code(self) -> int | None:
        """The canonical NaN (positive, all ones), or None for a format without NaN."""
        return (1 << (self.exponent_bits + self.fraction_bits)) - 1 if self.num_high_nans else None

    @property
    def max_value(self) -> float:
        return self._magnitude(self.max_code)

    @property
    def min_normal(self) -> float:
        return float(2.0 ** ((1 if self.has_subnormals else 0) - self.bias))

    @property
    def min_positive(self) -> float:
        """The smallest positive value, subnormals included."""
        return self._magnitude(1 if self.has_zero else 0)

    def _magnitude(self, code: int) -> float:
        exponent, fraction = code >> self.fraction_bits, code & ((1 << self.fraction_bits) - 1)
        if exponent == 0 and self.has_subnormals:
            return float(fraction * 2.0 ** (1 - self.bias - self.fraction_bits))
        return float((1 + fraction / (1 << self.fraction_bits)) * 2.0 ** (exponent - self.bias))


#                         bits exp frac bias sign zero subn -0 inf nans
E4M3FN = Format("e4m3fn", 8, 4, 3, 7, 1, 1, 1, 1, 0, 1)
E2M1 = Format("e2m1", 4, 2, 1, 1, 1, 1, 1, 1, 0, 0)
UE8M0 = Format("ue8m0", 8, 8, 0, 127, 0, 0, 0, 0, 0, 1)
UE4M3 = Format("ue4m3", 7, 4, 3, 7, 0, 1, 1, 0, 0, 1)

FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in (E4M3FN, E2M1, UE8M0, UE4M3)}


def get_format(fmt: Format | str) -> Format:
    """A format by name; a Format is passed through. ValueError for an unknown name."""
    if isinstance(fmt, Format):
        return fmt
    if fmt not in FORMATS:
        raise ValueError(f"fmt: expected one of {sorted(FORMATS)}, got {fmt!r}")
    return FORMATS[fmt]


def float_bits(values: Tensor) -> Tensor:
    """float32 -> its bits as int32, same shape. TypeError for another dtype."""
    if values.dtype != torch.float32:
        raise TypeError(f"values: expected float32, got {values.dtype}")
    return values.view(torch.int32)


def encode(
    values: Tensor,
    fmt: Format | str,
    *,
    rounding: Rounding = "even",
    overflow: Overflow = "saturate",
    negative_zero: NegativeZero = "keep",
    subnormals: Subnormals = "keep",
    nan_code: int | None = None,
) -> Tensor:
    """Rounds float32 values to ``fmt`` and returns their codes, uint8, same shape.

    rounding: "even" (ties to the even code), "away" (ties away from zero; "nearest" is another name for it),
        "toward_zero" (truncation), "half_to_zero" (nearest, ties toward zero); for an unsigned format also
        "floor" and "ceil". UE8M0 has no fraction: "even" there means the even exponent byte.
    overflow: what becomes of magnitudes that round above the largest finite value, infinities included:
        "saturate" gives the largest finite value of that sign, "nan" the NaN code.
    negative_zero: "keep" the sign of a zero or of a value that rounds to zero, or "drop" it.
    subnormals: "keep", or "flush" results below the smallest normal to zero.
    nan_code: the code of a NaN; by default the format's canonical NaN, and 0 for a format that has none.
    An unsigned format takes negative values (and -0.0) to its smallest code.

    TypeError for a dtype other than float32; ValueError for an unknown knob.
    Source: NUMERICS 1.1 (E4M3FN), 1.2 (UE8M0), 1.3 (UE4M3), 1.4 (E2M1).
    """
    fmt = get_format(fmt)
    _check_choice("overflow", overflow, Overflow)
    _check_choice("negative_zero", negative_zero, NegativeZero)
    _check_choice("subnormals", subnormals, Subnormals)
    _check_choice("rounding", rounding, Rounding)
    if rounding in ("ceil", "floor") and fmt.is_signed:
        raise ValueError(f"rounding: {rounding!r} is defined for unsigned formats, got {fmt.name}")
    if overflow == "nan" and fmt.nan_code is None:
        raise ValueError(f"overflow: {fmt.name} has no NaN to overflow to")
    if nan_code is None:
        nan_code = fmt.nan_code or 0
    bits = float_bits(values)
    knobs = (fmt, rounding, overflow, negative_zero, subnormals, nan_code)
    if values.numel() < _TABLE_FROM:
        return _encode_bits(bits, *knobs)
    return _encode_by_table(bits, *knobs)


def decode(codes: Tensor, fmt: Format | str) -> Tensor:
    """Codes (uint8, any shape) -> float32 values, exact. Bits above the format's width are ignored.

    UE8M0 is decoded as OCP says: byte 0 is 2^-127 (a float32 subnormal) and byte 255 is NaN.
    TypeError for a dtype other than uint8.
    """
    fmt = get_format(fmt)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes: expected uint8, got {codes.dtype}")
    table = _decode_table(fmt, codes.device)
    index = codes if fmt.bits == 8 else codes & (fmt.num_codes - 1)
    return table.index_select(0, index.reshape(-1).int()).reshape(codes.shape)


def decode_ue8m0_shift(codes: Tensor) -> Tensor:
    """UE8M0 codes (uint8, any shape) -> float32 by ``code << 23``, as production does: 0 is 0.0, 255 is +inf.

    TypeError for a dtype other than uint8. Source: NUMERICS 1.2.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes: expected uint8, got {codes.dtype}")
    return (codes.to(torch.int32) << 23).view(torch.float32)


def encode_ue8m0_scale(scales: Tensor, *, rounding: Rounding = "ceil", smallest: int = 1) -> Tensor:
    """Positive float32 scales -> UE8M0 codes in [smallest, 254], as production does; uint8, same shape.

    The exponent field, plus one if any fraction bit is set ("ceil"): a subnormal gives 1, inf and NaN give
    254. "floor" drops the fraction, "nearest" rounds half up, "even" ties to the even byte.
    Source: NUMERICS 1.2 and 2.4.
    """
    _check_choice("rounding", rounding, Rounding)
    # NaN is taken as inf, so that rounding up stays within 31 bits.
    magnitude = (float_bits(scales) & _MAGNITUDE).clamp_max(_INFINITY)
    return (
        _round_shift(magnitude, torch.full_like(magnitude, 23), rounding).clamp(smallest, 254).to(torch.uint8)
    )


def pack_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 [..., n] -> bytes uint8 [..., n / 2]: odd columns in bits 7..4, even ones in 3..0.

    ValueError for an odd number of columns. Source: NUMERICS 1.4.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even number of columns, got {codes.shape[-1]}")
    codes = codes.contiguous()
    if codes.storage_offset() % 2:
        codes = codes.clone()
    pairs = codes.view(torch.int16)  # bits 3..0 the even column, bits 11..8 the odd one
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., n / 2] -> E2M1 codes uint8 [..., n]; the inverse of pack_e2m1."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_scale_words(codes: Tensor) -> Tensor:
    """Scale bytes uint8 [..., n] -> int32 words [..., ceil(n / 4)], group i of a word in bits 8i+7..8i.

    A last word that is not full has zero bytes at its upper end. Source: NUMERICS 1.5.
    """
    missing = -codes.shape[-1] % 4
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    byte = codes.to(torch.int32).reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)
    return byte[..., 0] | (byte[..., 1] << 8) | (byte[..., 2] << 16) | (byte[..., 3] << 24)


def unpack_scale_words(words: Tensor) -> Tensor:
    """int32 words [..., n] -> scale bytes uint8 [..., 4 * n]; the inverse of pack_scale_words."""
    shifts = torch.arange(0, 32, 8, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(-2)


def _encode_bits(
    bits: Tensor,
    fmt: Format,
    rounding: Rounding,
    overflow: Overflow,
    negative_zero: NegativeZero,
    subnormals: Subnormals,
    nan_code: int,
) -> Tensor:
    """The arithmetic itself, on float32 bits as int32."""
    magnitude = bits & _MAGNITUDE
    if fmt.has_subnormals:
        # Below the smallest normal exponent the significand is shifted further right, one bit an exponent.
        exponent = magnitude >> 23
        smallest = 127 - fmt.bias + 1
        significand = (magnitude & (_HIDDEN_BIT - 1)) | ((exponent > 0).int() << 23)
        shift = (smallest - exponent).clamp(0, fmt.fraction_bits + 2) + (23 - fmt.fraction_bits)
        code = _round_shift(significand, shift, rounding)
        code = code + ((exponent - smallest).clamp_min(0) << fmt.fraction_bits)
    else:
        # UE8M0 has float32's exponent field; only 2^-127 (code 0) is a float32 subnormal, one bit lower.
        aligned = torch.where(magnitude < _HIDDEN_BIT, (2 * magnitude - _HIDDEN_BIT).clamp_min(0), magnitude)
        code = _round_shift(aligned, torch.full_like(bits, 23), rounding)
    if subnormals == "flush" and fmt.has_subnormals:
        code = torch.where(code < (1 << fmt.fraction_bits), torch.zeros_like(code), code)
    if overflow == "saturate":
        code = code.clamp_max(fmt.max_code)
    else:
        nan = fmt.nan_code
        assert nan is not None
        code = torch.where((code > fmt.max_code) | (magnitude == _INFINITY), torch.full_like(code, nan), code)
    negative = bits < 0
    if fmt.is_signed:
        signed = negative if negative_zero == "keep" else negative & (code != 0)
        code = code + (signed.int() << (fmt.bits - 1))
    else:
        code = torch.where(negative, torch.zeros_like(code), code)
    code = torch.where(magnitude > _INFINITY, torch.full_like(code, nan_code), code)
    return code.to(torch.uint8)


def _round_shift(significand: Tensor, shift: Tensor, rounding: Rounding) -> Tensor:
    """significand >> shift (both int32, shift >= 1), rounded; a carry runs into the bits above."""
    one = torch.ones_like(shift)
    if rounding == "even":
        increment = (one << (shift - 1)) - 1 + ((significand >> shift) & 1)
    elif rounding in ("away", "nearest"):
        increment = one << (shift - 1)
    elif rounding == "half_to_zero":
        increment = (one << (shift - 1)) - 1
    elif rounding == "ceil":
        increment = (one << shift) - 1
    else:
        return significand >> shift
    return (significand + increment) >> shift


def _encode_by_table(bits: Tensor, fmt: Format, *knobs: object) -> Tensor:
    """The same codes from a table over (sign, exponent, leading fraction bits, any lower bit set)."""
    low = _key_shift(fmt)
    below = (1 << low) - 1
    keys = bits & below
    keys += below
    keys |= bits
    keys >>= low
    keys &= (1 << (32 - low)) - 1
    table = _encode_table(bits.device, fmt, *knobs)
    return table.index_select(0, keys.reshape(-1)).reshape(bits.shape)


def _key_shift(fmt: Format) -> int:
    # Kept: sign, 8 exponent bits, the fraction and its guard bit. The lowest key bit says that anything below
    # is set. UE8M0's code 0 lies among float32's subnormals, where its leading one takes a fraction bit.
    return 23 - (fmt.fraction_bits + (1 if fmt.has_subnormals else 2)) - 1


@lru_cache(maxsize=64)
def _encode_table(device: torch.device, fmt: Format, *knobs: object) -> Tensor:
    low = _key_shift(fmt)
    keys = torch.arange(1 << (32 - low), dtype=torch.int64)
    bits = keys << low  # one representative a key: its lowest bit stands for everything below it
    bits = torch.where(bits >= _SIGN, bits - (1 << 32), bits).to(torch.int32)
    return _encode_bits(bits, fmt, *knobs).to(device)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _decode_table(fmt: Format, device: torch.device) -> Tensor:
    values: list[float] = []
    for code in range(fmt.num_codes):
        magnitude = code & ~fmt.sign_bit
        value = float("nan") if magnitude > fmt.max_code else fmt._magnitude(magnitude)
        values.append(-value if code & fmt.sign_bit else value)
    return torch.tensor(values, dtype=torch.float32, device=device)


def _check_choice(name: str, value: object, choices: object) -> None:
    allowed = choices.__args__  # type: ignore[attr-defined]
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {list(allowed)}, got {value!r}")
