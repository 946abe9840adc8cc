"""Formats: exhaustive over codes and bf16, dense around every rounding boundary, against independent
oracles."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch

from reference.formats import (
    E2M1,
    E4M3FN,
    FORMATS,
    UE4M3,
    UE8M0,
    Format,
    _encode_bits,
    decode,
    decode_ue8m0_shift,
    encode,
    encode_ue8m0_scale,
    pack_e2m1,
    pack_scale_words,
    unpack_e2m1,
    unpack_scale_words,
)

GFLOAT = {
    "e4m3fn": gf.format_info_ocp_e4m3,
    "e2m1": gf.format_info_ocp_e2m1,
    "ue8m0": gf.format_info_ocp_e8m0,
    "ue4m3": dataclasses.replace(gf.format_info_ocp_e4m3, name="ue4m3", k=7, is_signed=False, has_nz=False),
}
ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}
GFLOAT_ROUNDING = {
    "even": gfloat.RoundMode.TiesToEven,
    "away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
}


@dataclass(frozen=True)
class Difference:
    """Inputs for which an oracle's code is declared to differ from ours, and the two codes."""

    fmt: str
    oracle: str
    what: str
    ours: int
    theirs: int


# Everything else must be equal.
DIFFERENCES = [
    Difference("e4m3fn", "ml_dtypes", "positive overflow", 0x7E, 0x7F),
    Difference("e4m3fn", "ml_dtypes", "negative overflow", 0xFE, 0xFF),
    Difference("e4m3fn", "ml_dtypes", "negative NaN", 0x7F, 0xFF),
    Difference("e4m3fn", "gfloat", "positive NaN", 0x7F, 0xFF),
    Difference("e4m3fn", "gfloat", "negative NaN", 0x7F, 0xFF),
    Difference("e2m1", "ml_dtypes", "positive NaN", 0x0, 0x8),
    Difference("ue8m0", "ml_dtypes", "positive overflow", 254, 255),
    Difference("ue8m0", "ml_dtypes", "negative overflow", 0, 255),
    Difference("ue8m0", "ml_dtypes", "negative", 0, 255),
    Difference("ue8m0", "ml_dtypes", "zero", 0, 255),
    Difference("ue8m0", "ml_dtypes", "above the smallest, nearer to it than to the next", 0, 1),
]


def classes(values: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """The kinds of input that DIFFERENCES names; a value is of the first kind that holds."""
    largest, step = fmt.max_value, fmt.max_value - decode_one(fmt.max_code - 1, fmt)
    exact = values.double()
    negative = torch.signbit(values)
    overflow = exact.abs() > largest + step / 2 if fmt.fraction_bits else exact.abs() >= largest * 1.5
    kinds = {
        "positive NaN": values.isnan() & ~negative,
        "negative NaN": values.isnan() & negative,
        "positive overflow": overflow & ~negative,
        "negative overflow": overflow & negative,
        "zero": exact == 0,
        "negative": negative,
        "above the smallest, nearer to it than to the next": (exact > fmt.min_positive)
        & (exact < 1.5 * fmt.min_positive),
    }
    taken = torch.zeros_like(negative)
    for name, mask in kinds.items():
        kinds[name] = mask & ~taken
        taken |= kinds[name]
    return kinds


def decode_one(code: int, fmt: Format) -> float:
    return float(decode(torch.tensor([code], dtype=torch.uint8), fmt)[0])


def all_bf16() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()


def boundary_values(fmt: Format) -> torch.Tensor:
    """Every value, every midpoint, the overflow thresholds, each with its neighbours by 1 and 2 ulp, both
    signs."""
    codes = torch.arange(fmt.max_code + 1, dtype=torch.uint8)
    values = decode(codes, fmt).double()
    following = torch.cat(
        [values[1:], 2 * values[-1:] - values[-2:-1] if fmt.fraction_bits else values[-1:] * 2]
    )
    smallest = values[values > 0][:1]
    points = torch.cat(
        [values, (values + following) / 2, smallest / 2, values[-1:] * 2, smallest / 4]
    ).float()
    bits = points.view(torch.int32)
    near = torch.cat([(bits + ulps).clamp(0, 0x7F800000) for ulps in (-2, -1, 0, 1, 2)]).unique()
    magnitudes = near.to(torch.int32).view(torch.float32)
    return torch.cat([magnitudes, -magnitudes])


def special_values() -> torch.Tensor:
    bits = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    signed = [b - (1 << 31) for b in bits]
    return torch.tensor(bits + signed, dtype=torch.int64).to(torch.int32).view(torch.float32)


def oracle_inputs(fmt: Format) -> torch.Tensor:
    return torch.cat([all_bf16(), boundary_values(fmt), special_values()])


def nearest_code(values: np.ndarray, fmt: Format, rounding: str) -> np.ndarray:
    """Codes of non-negative finite values by search among the format's values, in exact float64
    arithmetic."""
    table = decode(torch.arange(fmt.max_code + 1, dtype=torch.uint8), fmt).double().numpy()
    step = table[-1] - table[-2] if fmt.fraction_bits else table[-1]
    ladder = np.append(table, table[-1] + step)
    x = values.astype(np.float64)
    low = np.clip(np.searchsorted(ladder, x, side="right") - 1, 0, len(table) - 1)
    below, above = x - ladder[low], ladder[low + 1] - x
    up = {
        "even": (below > above) | ((below == above) & (low % 2 == 1)),
        "away": below >= above,
        "nearest": below >= above,
        "half_to_zero": below > above,
        "toward_zero": np.zeros_like(x, dtype=bool),
        "floor": np.zeros_like(x, dtype=bool),
        "ceil": below > 0,
    }[rounding]
    up &= x >= ladder[0]  # below UE8M0's smallest value there is nothing to choose
    return np.minimum(low + up, fmt.max_code)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_ten_numbers_and_agrees_with_gfloat(name: str) -> None:
    fmt, info = FORMATS[name], GFLOAT[name]
    assert sum(field.type == "int" for field in dataclasses.fields(Format)) == 10
    assert (fmt.bits, fmt.fraction_bits + 1, fmt.bias) == (info.k, info.precision, info.bias)
    assert (bool(fmt.is_signed), bool(fmt.has_subnormals)) == (info.is_signed, info.has_subnormals)
    assert (bool(fmt.has_negative_zero), fmt.num_high_nans) == (info.has_nz, info.num_high_nans)
    assert bool(fmt.has_zero) == info.has_zero
    assert (fmt.max_value, fmt.min_positive) == (info.max, info.smallest)
    assert fmt.min_normal == info.smallest_normal


@pytest.mark.parametrize("name", FORMATS)
def test_decode_of_every_code(name: str) -> None:
    fmt = FORMATS[name]
    codes = np.arange(fmt.num_codes, dtype=np.uint8)
    values = decode(torch.from_numpy(codes), fmt).numpy()
    expected = gfloat.decode_ndarray(GFLOAT[name], codes).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(expected[number]))
    if name in ML_DTYPES:
        theirs = codes.view(ML_DTYPES[name]).astype(np.float32)
        np.testing.assert_array_equal(values, theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_encodes_to_its_own_code(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(fmt.num_codes, dtype=torch.uint8)
    values = decode(codes, fmt)
    finite = ~values.isnan()
    assert torch.equal(encode(values, fmt)[finite], codes[finite])
    assert set(encode(values, fmt)[~finite].tolist()) <= {fmt.nan_code}


@pytest.mark.parametrize(
    "rounding", ["even", "away", "toward_zero", "half_to_zero", "nearest", "ceil", "floor"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_encode_by_search_among_the_values(name: str, rounding: str) -> None:
    fmt = FORMATS[name]
    if fmt.is_signed and rounding in ("ceil", "floor"):
        with pytest.raises(ValueError, match=f"rounding: '{rounding}'"):
            encode(torch.zeros(1), fmt, rounding=rounding)
        return
    values = oracle_inputs(fmt)
    values = values[values.isfinite()]
    magnitudes = np.abs(values.numpy())
    negative = np.signbit(values.numpy())
    expected = nearest_code(magnitudes, fmt, rounding)
    expected = np.where(negative, expected | fmt.sign_bit if fmt.is_signed else 0, expected)
    np.testing.assert_array_equal(encode(values, fmt, rounding=rounding).numpy(), expected)


@pytest.mark.parametrize("rounding", GFLOAT_ROUNDING)
@pytest.mark.parametrize("name", FORMATS)
def test_encode_equals_gfloat(name: str, rounding: str) -> None:
    fmt, info = FORMATS[name], GFLOAT[name]
    values = oracle_inputs(fmt)
    in_reach = ~values.isnan() if fmt.nan_code is None else torch.ones_like(values, dtype=torch.bool)
    if not fmt.is_signed:  # gfloat does not define negative values of an unsigned format
        in_reach &= (values >= fmt.min_positive * (0 if fmt.has_zero else 1)) & ~torch.signbit(
            values
        ) | values.isnan()
    values = values[in_reach]
    rounded = gfloat.round_ndarray(info, values.double().numpy(), GFLOAT_ROUNDING[rounding], sat=True)
    theirs = torch.from_numpy(gfloat.encode_ndarray(info, rounded).astype(np.int64))
    ours = encode(values, fmt, rounding=rounding).long()
    apply_differences(theirs, values, fmt, "gfloat")
    if not fmt.is_signed:
        theirs = torch.where(values.isnan(), torch.full_like(theirs, fmt.nan_code), theirs)
    assert_codes_equal(ours, theirs, values)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_encode_equals_ml_dtypes(name: str) -> None:
    fmt = FORMATS[name]
    values = oracle_inputs(fmt)
    with np.errstate(invalid="ignore"):  # NaN to a format without one is among the inputs
        cast = values.numpy().astype(ML_DTYPES[name])
    theirs = torch.from_numpy(cast.view(np.uint8).astype(np.int64))
    ours = encode(values, fmt, rounding="nearest" if name == "ue8m0" else "even").long()
    apply_differences(theirs, values, fmt, "ml_dtypes")
    assert_codes_equal(ours, theirs, values)


def apply_differences(theirs: torch.Tensor, values: torch.Tensor, fmt: Format, oracle: str) -> None:
    """Replaces the oracle's codes by ours where that is declared, after checking that the oracle gives what
    is said."""
    kinds = classes(values, fmt)
    for difference in DIFFERENCES:
        if (difference.fmt, difference.oracle) != (fmt.name, oracle):
            continue
        mask = kinds[difference.what]
        assert bool(mask.any()), f"{difference} matches no input"
        assert set(theirs[mask].tolist()) == {difference.theirs}, difference
        theirs[mask] = difference.ours


def assert_codes_equal(ours: torch.Tensor, theirs: torch.Tensor, values: torch.Tensor) -> None:
    wrong = (ours != theirs).nonzero().flatten()[:5].tolist()
    assert not wrong, [(values[i].item(), ours[i].item(), theirs[i].item()) for i in wrong]


@pytest.mark.parametrize("name", ["e4m3fn", "ue4m3", "ue8m0"])
def test_overflow_to_nan(name: str) -> None:
    fmt = FORMATS[name]
    values = oracle_inputs(fmt)
    rounding = "even" if fmt.fraction_bits else "nearest"
    saturated = encode(values, fmt, rounding=rounding)
    with_nan = encode(values, fmt, rounding=rounding, overflow="nan")
    kinds = classes(values, fmt)
    over = kinds["positive overflow"] | (kinds["negative overflow"] if fmt.is_signed else False)
    assert int(over.sum()) > 10
    assert torch.equal(with_nan[~over], saturated[~over])
    assert set((with_nan[over] & ~fmt.sign_bit).tolist()) == {fmt.nan_code}
    assert not bool((saturated[over & ~values.isnan()] & ~fmt.sign_bit == fmt.nan_code).any())


@pytest.mark.parametrize("name", ["e4m3fn", "e2m1"])
def test_negative_zero_and_subnormal_knobs(name: str) -> None:
    fmt = FORMATS[name]
    values = oracle_inputs(fmt)
    kept = encode(values, fmt)
    zero = kept & ~fmt.sign_bit == 0
    dropped = encode(values, fmt, negative_zero="drop")
    assert torch.equal(dropped, torch.where(zero, torch.zeros_like(kept), kept))
    assert int((kept[zero] == fmt.sign_bit).sum()) > 100
    flushed = encode(values, fmt, subnormals="flush")
    subnormal = (kept & ~fmt.sign_bit > 0) & (kept & ~fmt.sign_bit < 1 << fmt.fraction_bits)
    assert torch.equal(flushed, torch.where(subnormal, kept & fmt.sign_bit, kept))
    assert int(subnormal.sum()) > 10


KNOBS = [
    {},
    {"rounding": "away"},
    {"rounding": "toward_zero"},
    {"rounding": "half_to_zero"},
    {"negative_zero": "drop"},
    {"subnormals": "flush"},
    {"nan_code": 7},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs.values())) or "default")
@pytest.mark.parametrize("name", FORMATS)
def test_large_tensors_take_a_table_and_get_the_same_codes(name: str, knobs: dict) -> None:
    """All 65,536 upper halves of a float32 with lower halves on both sides of every rounding position."""
    fmt = FORMATS[name]
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    bits = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64).unsqueeze(1) << 16) + low
    values = bits.to(torch.int32).view(torch.float32)
    defaults = {"rounding": "even", "overflow": "saturate", "negative_zero": "keep", "subnormals": "keep"}
    direct = _encode_bits(
        values.view(torch.int32), fmt, **{**defaults, "nan_code": fmt.nan_code or 0, **knobs}
    )
    assert torch.equal(encode(values, fmt, **knobs), direct)
    assert torch.equal(encode(values.t(), fmt, **knobs), direct.t())


def test_e4m3_overflow_saturates() -> None:
    """CASES 8."""
    values = torch.tensor([448.0, 464, 465, 1000, float("inf"), -float("inf"), float("nan"), -float("nan")])
    assert encode(values, "e4m3fn").tolist() == [0x7E] * 5 + [0xFE, 0x7F, 0x7F]
    assert encode(values[:6], "e4m3fn", overflow="nan").tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0xFF]


def test_e4m3_small_magnitudes() -> None:
    values = torch.tensor([-0.0, -1e-9, 2.0**-10, 2.0**-10 * 1.0000001, 2.0**-9, 2.0**-6])
    assert encode(values, E4M3FN).tolist() == [0x80, 0x80, 0x00, 0x01, 0x01, 0x08]


def test_e2m1_ties_and_signs() -> None:
    """CASES 12."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert decode(encode(ties, E2M1), E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert decode(encode(ties, E2M1, rounding="half_to_zero"), E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    small = torch.tensor([-0.1, -0.0])
    assert encode(small, E2M1, negative_zero="drop").tolist() == [0, 0]
    assert encode(small, E2M1).tolist() == [8, 8]
    nan = torch.tensor([float("nan"), -float("nan")])
    assert encode(nan, E2M1, negative_zero="drop").tolist() == [0, 0]
    assert encode(nan, E2M1, nan_code=7).tolist() == [7, 7]
    assert pack_e2m1(encode(torch.tensor([[1.0, 6.0]]), E2M1)).tolist() == [[0x72]]
    assert pack_e2m1(encode(torch.tensor([[1.5, -0.5]]), E2M1)).tolist() == [[0x93]]


@pytest.mark.parametrize(
    ("value", "nearest", "floor", "ceil"),
    [
        (0.75, 127, 126, 127),
        (1.25, 127, 127, 128),
        (1.5, 128, 127, 128),
        (3.0, 129, 128, 129),
        (6.0, 130, 129, 130),
    ],
)
def test_ue8m0_rounding_conventions(value: float, nearest: int, floor: int, ceil: int) -> None:
    """CASES 4."""
    for rounding, expected in (("nearest", nearest), ("floor", floor), ("ceil", ceil)):
        assert encode_ue8m0_scale(torch.tensor([value]), rounding=rounding).item() == expected
        assert encode(torch.tensor([value]), UE8M0, rounding=rounding).item() == expected


def test_ue8m0_ceil_is_exact_just_above_powers_of_two() -> None:
    """CASES 2: every exponent, each power of two with its neighbours by 1 and 2 ulp."""
    power = torch.arange(1, 254, dtype=torch.int32) << 23
    for ulps, extra in ((-2, 0), (-1, 0), (0, 0), (1, 1), (2, 1)):
        codes = encode_ue8m0_scale((power + ulps).view(torch.float32))
        expected = ((power >> 23) + extra).clamp(1, 254)
        assert torch.equal(codes.int(), expected), ulps


def test_ue8m0_bytes_0_254_255() -> None:
    """CASES 5."""
    codes = torch.tensor([0, 1, 254, 255], dtype=torch.uint8)
    decoded = decode(codes, UE8M0)
    assert decoded[:3].tolist() == [2.0**-127, 2.0**-126, 2.0**127]
    assert bool(decoded[3].isnan())
    assert decode_ue8m0_shift(codes).tolist() == [0.0, 2.0**-126, 2.0**127, float("inf")]
    every = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(decode_ue8m0_shift(every), decode(every, UE8M0))
    scales = torch.tensor([0.0, 1e-45, 2.0**-127, float("inf"), float("nan"), 3.4e38])
    assert encode_ue8m0_scale(scales).tolist() == [1, 1, 1, 254, 254, 254]
    assert encode_ue8m0_scale(scales, smallest=0).tolist() == [0, 1, 1, 254, 254, 254]


def test_ue4m3_has_no_sign() -> None:
    values = torch.tensor([-1.0, -0.0, 448.0, 1e9, float("nan")])
    assert encode(values, UE4M3).tolist() == [0, 0, 0x7E, 0x7E, 0x7F]
    assert decode(torch.tensor([0xFE], dtype=torch.uint8), UE4M3).item() == 448.0


def test_packing_is_the_memory_order(generator: torch.Generator) -> None:
    codes = torch.randint(0, 16, (5, 64), generator=generator, dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert torch.equal(packed & 15, codes[:, 0::2])
    assert torch.equal(packed >> 4, codes[:, 1::2])
    assert torch.equal(unpack_e2m1(packed), codes)
    scales = torch.randint(0, 256, (5, 8), generator=generator, dtype=torch.uint8)
    words = pack_scale_words(scales)
    assert torch.equal(words.view(torch.uint8), scales)
    assert torch.equal(unpack_scale_words(words), scales)
    assert pack_scale_words(torch.tensor([[127, 126, 125, 128]], dtype=torch.uint8)).item() == 0x807D7E7F - (
        1 << 32
    )
    assert pack_scale_words(torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.uint8)).tolist() == [[0x04030201, 5]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: encode(torch.zeros(1, dtype=torch.float64), "e4m3fn"),
            TypeError,
            "values: expected float32",
        ),
        (lambda: encode(torch.zeros(1), "e5m2"), ValueError, "fmt: expected one of"),
        (lambda: encode(torch.zeros(1), "e4m3fn", rounding="up"), ValueError, "rounding: expected one of"),
        (lambda: encode(torch.zeros(1), "e4m3fn", overflow="wrap"), ValueError, "overflow: expected one of"),
        (lambda: encode(torch.zeros(1), "e4m3fn", negative_zero=True), ValueError, "negative_zero: expected"),
        (lambda: encode(torch.zeros(1), "e4m3fn", subnormals="ftz"), ValueError, "subnormals: expected"),
        (lambda: encode(torch.zeros(1), "e2m1", overflow="nan"), ValueError, "overflow: e2m1 has no NaN"),
        (lambda: decode(torch.zeros(1), "e2m1"), TypeError, "codes: expected uint8"),
        (lambda: decode_ue8m0_shift(torch.zeros(1)), TypeError, "codes: expected uint8"),
        (
            lambda: pack_e2m1(torch.zeros(1, 3, dtype=torch.uint8)),
            ValueError,
            "codes: expected an even number",
        ),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
