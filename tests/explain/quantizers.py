"""Quantizers in NumPy and ml_dtypes, one function a step, so that a fault is a different function in one
place.

Written for the faults of this directory alone; nothing here is shared with the reference or with the
explainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

F = np.float32
Step = Callable[..., np.ndarray]


def e4m3_saturating(values: np.ndarray) -> np.ndarray:
    codes = np.clip(values, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


def e4m3_values() -> np.ndarray:
    return np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def nearest_code(values: np.ndarray, table: np.ndarray, ties: str) -> np.ndarray:
    """Index of the nearest entry of an ascending table of magnitudes. ties: "even" (index), "away", "zero",
    "down".
    """
    magnitude = np.abs(values).astype(np.float64)
    low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 1)
    high = np.minimum(low + 1, len(table) - 1)
    below, above = magnitude - table[low], table[high] - magnitude
    up = above < below
    tie = above == below
    if ties == "even":
        up |= tie & (low % 2 == 1)
    elif ties == "away":
        up |= tie
    elif ties == "down":
        up = np.zeros_like(up)
    return np.where(up, high, low).astype(np.uint8)


def e4m3_with_ties(values: np.ndarray, ties: str) -> np.ndarray:
    codes = nearest_code(values, e4m3_values(), ties)
    codes = np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)
    return codes | (np.signbit(values) & ~np.isnan(values)).astype(np.uint8) * np.uint8(0x80)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def e2m1_codes(values: np.ndarray, ties: str = "even", *, keep_negative_zero: bool = False) -> np.ndarray:
    codes = np.where(np.isnan(values), 0, nearest_code(np.nan_to_num(values), E2M1, ties))
    negative = np.signbit(values) & ~np.isnan(values) & ((codes != 0) | keep_negative_zero)
    return (codes | negative * 8).astype(np.uint8)


def packed(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def words(scale_bytes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scale_bytes).view("<i4")


def group_amax(hidden: np.ndarray, group: int) -> np.ndarray:
    return (
        np.nan_to_num(np.abs(hidden), nan=0.0, posinf=np.inf)
        .reshape(hidden.shape[0], -1, group)
        .max(2)
        .astype(F)
    )


def ceil_power(scale: np.ndarray) -> np.ndarray:
    """Exponent of the smallest power of two not below a positive scale."""
    mantissa, exponent = np.frexp(scale)
    return np.where(np.isinf(scale), 127, np.where(mantissa == 0.5, exponent - 1, exponent))


def floor_power(scale: np.ndarray) -> np.ndarray:
    return np.frexp(scale)[1] - 1


def nearest_power(scale: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(scale)
    return np.where(mantissa >= 0.75, exponent, exponent - 1)


def fp8_ue8m0(
    hidden: np.ndarray,
    group: int = 32,
    *,
    floor: float = 1e-4,
    power: Step = ceil_power,
    cast: Step = e4m3_saturating,
    amax: Step = group_amax,
    unrounded_division: bool = False,
    between: Step | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(value bytes [T, H], scale bytes [T, H / group])."""
    with np.errstate(all="ignore"):
        raw = (np.maximum(amax(hidden, group), F(floor)) / F(448)).astype(F)
        exponent = np.clip(power(raw), -126, 127)
        divisor = raw if unrounded_division else np.exp2(exponent.astype(np.float64)).astype(F)
        scaled = (hidden.reshape(hidden.shape[0], -1, group) * (F(1) / divisor)[..., None]).astype(F)
        if between is not None:
            scaled = between(scaled)
    return cast(scaled).reshape(hidden.shape), (exponent + 127).astype(np.uint8)


def fp8_fp32(
    hidden: np.ndarray,
    group: int = 128,
    *,
    floor: float = 1e-4,
    scale: Step = lambda a: (a * F(1 / 448)).astype(F),
    divide: Step = lambda h, s: (h * (F(1) / s)).astype(F),
    cast: Step = e4m3_saturating,
    between: Step | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(value bytes, float32 scales [T, H / group])."""
    with np.errstate(all="ignore"):
        scales = scale(np.maximum(group_amax(hidden, group), F(floor)))
        scaled = divide(hidden.reshape(hidden.shape[0], -1, group).astype(F), scales[..., None])
        if between is not None:
            scaled = between(scaled)
    return cast(scaled).reshape(hidden.shape), scales


def nvfp4_two_level(
    hidden: np.ndarray,
    *,
    token_floor: float = 1e-12,
    outer: Step = lambda a: (a * F(1 / 2688)).astype(F),
    normalize: Step = lambda h, xs: (h / xs).astype(F),
    block: Step = lambda a: (a * F(1 / 6)).astype(F),
    low: float = 2.0**-9,
    element: Step = lambda u, s: (u / s).astype(F),
    codes: Step = e2m1_codes,
    stored: Step = lambda xs: xs,
    between: Step | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed bytes, E4M3 scale bytes [T, H / 16], token scales [T])."""
    with np.errstate(all="ignore"):
        row = np.maximum(np.nan_to_num(np.abs(hidden), nan=0.0).max(1), F(token_floor)).astype(F)
        xs = outer(row)
        u = normalize(hidden.astype(F), xs[:, None]).reshape(hidden.shape[0], -1, 16)
        raw = np.clip(block(np.nan_to_num(np.abs(u), nan=0.0).max(2)), F(low), F(448))
        scale_bytes = e4m3_saturating(raw)
        scale = scale_bytes.view(ml_dtypes.float8_e4m3fn).astype(F)
        w = element(u, scale[..., None])
        if between is not None:
            w = between(w)
    return packed(codes(w).reshape(hidden.shape)), scale_bytes, stored(xs)


def through(dtype: Any) -> Step:
    """Rounds float32 to a narrower float and back."""
    return lambda values: values.astype(dtype).astype(F)
