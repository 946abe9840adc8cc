"""The instruction families of ``reference.tensor_core``, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


@dataclass(frozen=True)
class MmaFamily:
    """Arithmetic of one instruction family.

    k_step: products per fused step. fraction_bits: bits kept below the largest exponent when terms are
    aligned. output_fraction_bits: fraction bits of the result (23 = float32). scale_format, scale_group:
    block scales and how many k share one, None without. exact_group: products summed exactly before alignment
    (1: none). zero_exponent: exponent of a term that is zero (measured on hopper_bf16: beside a zero
    accumulator, product bits below 2^(-133 - 25) vanish; fp8 operands never get there). nan_bits: the float32
    pattern of every NaN result. evidence: "hardware" if the row was compared with the instruction itself, bit
    for bit, over more than 10^8 results; "literature" if it follows the papers alone.
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

    def __post_init__(self) -> None:
        if not 1 <= self.fraction_bits <= 38:
            # Beyond, sums of terms leave the 53 bits within which both models are exact.
            raise ValueError(f"fraction_bits: expected 1 to 38, got {self.fraction_bits}")


_HOPPER_FP8 = ("e4m3", "e5m2")
_SIXTEEN_BITS = ("bf16", "fp16")
_TCGEN05 = "tcgen05.mma kind::"

FAMILIES: dict[str, MmaFamily] = {
    row.name: row
    for row in (
        # name, instruction, operands, k a step, F, output fraction bits
        MmaFamily("hopper_fp8", "wgmma .f32.e4m3, .e5m2", _HOPPER_FP8, 32, 13, 13, evidence="hardware"),
        MmaFamily("hopper_bf16", "wgmma .f32.bf16, .f16", _SIXTEEN_BITS, 16, 25, 23, evidence="hardware"),
        MmaFamily("blackwell_f8f6f4", _TCGEN05 + "f8f6f4", _F8F6F4, 32, 25, 23),
        MmaFamily("blackwell_bf16", _TCGEN05 + "f16", _SIXTEEN_BITS, 16, 25, 23),
        # and for block scales: their formats, k a scale, products added exactly
        MmaFamily("blackwell_mxf8f6f4", _TCGEN05 + "mxf8f6f4", _F8F6F4, 32, 25, 23, ("ue8m0",), 32),
        MmaFamily("blackwell_mxf4", _TCGEN05 + "mxf4", ("e2m1",), 64, 35, 23, ("ue8m0",), 32, 16),
        MmaFamily(
            "blackwell_mxf4nvf4", _TCGEN05 + "mxf4nvf4", ("e2m1",), 64, 35, 23, ("ue4m3", "ue8m0"), 16, 16
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
