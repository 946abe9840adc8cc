"""Exact conversions of checkpoint values, and what no kernel can use."""

from __future__ import annotations

import torch

from megamoe.backends.scales import find_not_power_of_two


class UnusableValueError(ValueError):
    """A checkpoint value that cannot be represented; the message says where and what."""


def to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes of a scale tensor: uint8 and float8_e8m0fnu as they are, float32 if every value is a power
    of two.

    UnusableValueError, with index and value, for a float32 that is not: nothing is rounded.
    """
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8)
    where = find_not_power_of_two(scale)
    if where is not None:
        raise UnusableValueError(
            f"the scale at {list(where)} is {float(scale[where])!r}, not a power of two that UE8M0 can hold"
        )
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def _first(wrong: torch.Tensor, values: torch.Tensor, what: str) -> str:
    where = tuple(int(i) for i in wrong.nonzero()[0])
    return f"the scale at {list(where)} is {float(values[where])!r}, {what}"


def check_block_scale(scale: torch.Tensor) -> str:
    """E4M3 block scales: NaN bytes (0x7F, 0xFF) and negative ones are wrong, the tensor core reads them
    unsigned.
    """
    codes = scale.view(torch.uint8)
    wrong = (codes == 0x7F) | (codes >= 0x80)
    return _first(wrong, scale.to(torch.float32), "NaN or negative") if bool(wrong.any()) else ""


def check_global_scale(scale: torch.Tensor) -> str:
    """float32 scales must be finite and not negative."""
    wrong = ~torch.isfinite(scale) | (scale < 0)
    return _first(wrong, scale, "not a finite number >= 0") if bool(wrong.any()) else ""
