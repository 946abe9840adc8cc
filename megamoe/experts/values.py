"""Exact conversions of checkpoint values, and what no kernel can use."""

from __future__ import annotations

import torch

from megamoe.backends.scales import find_not_power_of_two


class UnusableValueError(ValueError):
    """A checkpoint value that no kernel can use: where it is in the tensor, and what is wrong with it."""

    def __init__(self, index: tuple[int, ...], what: str) -> None:
        super().__init__(f"at {list(index)}: {what}")
        self.index = index
        self.what = what


def _refuse_first(wrong: torch.Tensor, values: torch.Tensor, what: str) -> None:
    index = tuple(int(i) for i in wrong.nonzero()[0])
    raise UnusableValueError(index, f"{float(values[index])!r} is {what}")


def to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes of a scale tensor: uint8 and float8_e8m0fnu as they are, float32 if every value is a power
    of two.

    UnusableValueError for a float32 that is not: nothing is rounded.
    """
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8)
    index = find_not_power_of_two(scale)
    if index is not None:
        raise UnusableValueError(index, f"{float(scale[index])!r} is not a power of two that UE8M0 can hold")
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def check_block_scale(scale: torch.Tensor) -> None:
    """E4M3 block scales: NaN bytes (0x7F, 0xFF) and negative ones are wrong, the tensor core reads them
    unsigned.
    """
    codes = scale.view(torch.uint8)
    if codes.numel() and int(codes.max()) >= 0x7F:
        _refuse_first(codes >= 0x7F, scale.to(torch.float32), "NaN or negative")


def check_global_scale(scale: torch.Tensor) -> None:
    """float32 scales must be finite and not negative."""
    wrong = ~torch.isfinite(scale) | (scale < 0)
    if bool(wrong.any()):
        _refuse_first(wrong, scale, "not a finite number >= 0")
