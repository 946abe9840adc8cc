"""The tensor-core models: a rational-number oracle, hand-computed cases, and fast against literal."""

from __future__ import annotations

import dataclasses
import math
import zlib
from fractions import Fraction
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mma_inputs import CATEGORIES, draw, finite_codes
from safetensors.torch import load_file
from torch import Tensor

from reference import _tensor_core_fast
from reference.tensor_core import FAMILIES, OPERAND_FORMATS, MmaFamily, get_family, matmul, mma_step

_ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "ue4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def as_codes(codes: Tensor, name: str) -> Tensor:
    if OPERAND_FORMATS[name].bits == 16:
        return torch.where(codes >= 1 << 15, codes - (1 << 16), codes).to(torch.int16)
    return codes.to(torch.uint8)


def floats_of(codes: Tensor, name: str) -> np.ndarray:
    """Values of codes by an independent library, float64."""
    array = codes.numpy()
    raw = array.astype(np.uint16) if OPERAND_FORMATS[name].bits == 16 else array.astype(np.uint8)
    if name == "ue4m3":
        raw = raw & 0x7F
    with np.errstate(invalid="ignore"):
        return raw.view(_ML_DTYPES[name]).astype(np.float64)


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def operand_pairs(row: MmaFamily) -> list[tuple[str, str]]:
    """All pairs for families of one or two formats, one partner each for the mixed eight-bit kinds."""
    formats = row.operand_formats
    return (
        list(product(formats, formats))
        if len(formats) < 3
        else [(formats[0], f) for f in formats] + [("e5m2", "e2m3")]
    )


CASES = [
    pytest.param(row, a, b, scale, id=f"{row.name}-{a}-{b}" + (f"-{scale}" if scale else ""))
    for row in FAMILIES.values()
    for a, b in operand_pairs(row)
    for scale in (row.scale_formats or (None,))
]


def draw_case(
    row: MmaFamily, a: str, b: str, scale: str | None, category: str, batch: int, m: int, n: int, steps: int
):
    """Operands and keyword arguments of one category, scales from all codes in the special ones."""
    g = generator(row.name, a, b, scale, category)
    k = row.k_step * steps
    a_codes, b_codes, c = draw(category, a, b, batch, m, n, k, g)
    arguments = {"a_format": a, "b_format": b}
    if scale:
        low, high = (
            (0, 256)
            if "special" in category or category == "any_bits"
            else (115, 140)
            if scale == "ue8m0"
            else (0, 126)
        )
        for side, rows in (("a", m), ("b", n)):
            codes = torch.randint(low, high, (batch, rows, k // row.scale_group), generator=g)
            arguments[f"{side}_scales"] = codes.to(torch.uint8)
        arguments["scale_format"] = scale
    return as_codes(a_codes, a), as_codes(b_codes, b), c, arguments


def chain(row: MmaFamily, a: Tensor, b: Tensor, c: Tensor, **arguments: object) -> Tensor:
    """The K loop as a chain of literal steps."""
    for start in range(0, a.shape[-1], row.k_step):
        k = slice(start, start + row.k_step)
        if row.scale_group:
            g = slice(start // row.scale_group, (start + row.k_step) // row.scale_group)
            scales = {s: arguments[s][..., g] for s in ("a_scales", "b_scales")}
            c = mma_step(row, a[..., k], b[..., k], c, **{**arguments, **scales})
        else:
            c = mma_step(row, a[..., k], b[..., k], c, **arguments)
    return c


# --- An oracle from rational numbers ---


def exponent_of(value: float, smallest: int) -> int:
    return max(math.frexp(value)[1] - 1, smallest)


def toward_zero(value: Fraction) -> int:
    return int(value)  # int() of a Fraction truncates


def oracle(
    row: MmaFamily,
    a: list[float],
    b: list[float],
    c: float,
    a_name: str,
    b_name: str,
    scale_name: str | None,
    scales=None,
) -> int:
    """One result of one step, as float32 bits, in rational arithmetic."""
    smallest = [1 - OPERAND_FORMATS[name].bias for name in (a_name, b_name)]
    terms: list[tuple[Fraction, int]] = []  # exact value, exponent
    with np.errstate(all="ignore"):
        special = c + sum(x * y for x, y in zip(a, b, strict=True) if not math.isfinite(x * y))
    if scales is not None and not all(map(math.isfinite, (*scales[0], *scales[1]))):
        special = math.nan
    if not math.isfinite(special):
        return 0x7FFFFFFF if math.isnan(special) else (0x7F800000 if special > 0 else 0xFF800000)
    if row.exact_group == 1:
        shift = 0 if scales is None else round(math.log2(scales[0][0]) + math.log2(scales[1][0]))
        for x, y in zip(a, b, strict=True):
            exponent = exponent_of(x, smallest[0]) + exponent_of(y, smallest[1]) + shift
            value = Fraction(x) * Fraction(y) * Fraction(2) ** shift
            terms.append((value, exponent if value else row.zero_exponent))
    else:
        per_group = row.exact_group
        for i in range(0, len(a), per_group):
            products = [
                Fraction(x) * Fraction(y)
                for x, y in zip(a[i : i + per_group], b[i : i + per_group], strict=True)
            ]
            sa, sb = (side[i // row.scale_group] for side in scales)
            floor = -127 if scale_name == "ue8m0" else -6
            is_zero = not any(products) or sa * sb == 0
            exponent = row.zero_exponent if is_zero else exponent_of(sa, floor) + exponent_of(sb, floor)
            terms.append((sum(products) * Fraction(sa) * Fraction(sb), exponent))
    terms.append((Fraction(c), exponent_of(c, -126) if c else row.zero_exponent))
    top = max(exponent for _, exponent in terms)
    unit = Fraction(2) ** (top - row.fraction_bits)
    total = sum(toward_zero(value / unit) for value, _ in terms) * unit
    if total == 0:
        return 0
    exponent = -300
    while abs(total) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    place = Fraction(2) ** (max(exponent, -126) - row.output_fraction_bits)
    rounded = toward_zero(total / place) * place
    if abs(rounded) >= 2**128:
        return 0x7F800000 if rounded > 0 else 0xFF800000
    return int(np.float32(float(rounded)).view(np.uint32))


@pytest.mark.parametrize(("row", "a", "b", "scale"), CASES)
def test_step_against_rational_arithmetic(row: MmaFamily, a: str, b: str, scale: str | None) -> None:
    compared = 0
    for category in CATEGORIES:
        a_codes, b_codes, c, arguments = draw_case(row, a, b, scale, category, 1, 3, 4, 1)
        actual = bits(mma_step(row, a_codes, b_codes, c, **arguments))
        a_values, b_values = floats_of(a_codes, a), floats_of(b_codes, b)
        sides = None
        if scale:
            sides = floats_of(arguments["a_scales"], scale), floats_of(arguments["b_scales"], scale)
        for i, j in product(range(3), range(4)):
            pair = None if sides is None else (sides[0][0, i].tolist(), sides[1][0, j].tolist())
            expected = oracle(
                row, a_values[0, i].tolist(), b_values[0, j].tolist(), float(c[0, i, j]), a, b, scale, pair
            )
            assert expected == actual[0, i, j].item() & 0xFFFFFFFF, (category, i, j)
            compared += 1
    assert compared == 12 * len(CATEGORIES)


# --- Fast against literal ---


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize(("row", "a", "b", "scale"), CASES)
def test_loop_equals_chain_of_steps(row: MmaFamily, a: str, b: str, scale: str | None, category: str) -> None:
    a_codes, b_codes, c, arguments = draw_case(row, a, b, scale, category, 2, 9, 21, 3)
    expected = chain(row, a_codes, b_codes, c, **arguments)
    actual = matmul(row, a_codes, b_codes, accumulator=c, **arguments)
    assert torch.equal(bits(expected), bits(actual))


@pytest.mark.parametrize("products", [1, 500, 1 << 12])
def test_block_size_changes_nothing(products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = FAMILIES["hopper_fp8"]
    a, b, c, arguments = draw_case(row, "e4m3", "e4m3", None, "uniform", 3, 10, 33, 2)
    expected = matmul(row, a, b, accumulator=c, **arguments)
    monkeypatch.setattr(_tensor_core_fast, "_CPU_BLOCK_PRODUCTS", products)
    assert torch.equal(bits(expected), bits(matmul(row, a, b, accumulator=c, **arguments)))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 40),
    st.integers(0, 3),
    st.sampled_from(sorted(FAMILIES)),
)
def test_any_shape(batch: int, m: int, n: int, steps: int, name: str) -> None:
    row = FAMILIES[name]
    fmt, scale = row.operand_formats[0], (row.scale_formats or (None,))[0]
    a, b, c, arguments = draw_case(row, fmt, fmt, scale, "zero_products", batch, m, n, steps)
    assert torch.equal(
        bits(chain(row, a, b, c, **arguments)), bits(matmul(row, a, b, accumulator=c, **arguments))
    )


def test_strides_and_leading_dimensions() -> None:
    row = FAMILIES["hopper_fp8"]
    a, b, c, arguments = draw_case(row, "e4m3", "e4m3", None, "normal_accumulator", 4, 6, 10, 2)
    expected = matmul(row, a, b, accumulator=c, **arguments)
    strided = [
        torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2].copy_(t) for t in (a, b, c)
    ]
    transposed = strided[1].transpose(-1, -2).contiguous().transpose(-1, -2)
    actual = matmul(row, strided[0], transposed, accumulator=strided[2], **arguments)
    assert torch.equal(bits(expected), bits(actual))
    nested = matmul(
        row, a.reshape(2, 2, 6, -1), b.reshape(2, 2, 10, -1), accumulator=c.reshape(2, 2, 6, 10), **arguments
    )
    assert torch.equal(bits(expected), bits(nested.reshape(4, 6, 10)))
    alone = matmul(row, a[0].view(torch.float8_e4m3fn), b[0].view(torch.float8_e4m3fn), accumulator=c[0])
    assert torch.equal(bits(expected[0]), bits(alone))


def test_arguments_are_not_written() -> None:
    row = FAMILIES["hopper_fp8"]
    a, b, c, arguments = draw_case(row, "e4m3", "e4m3", None, "any_bits", 1, 5, 7, 2)
    before = [t.clone() for t in (a, b, c)]
    matmul(row, a, b, accumulator=c, **arguments)
    mma_step(row, a[..., :32], b[..., :32], c, **arguments)
    for old, new in zip(before, (a, b, c), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


# --- Exhaustive and exact ---


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_product_of_two_codes_is_exact(name: str) -> None:
    """A single product among zeros has at most eight significant bits: the model returns it exactly."""
    codes = torch.arange(256)
    a = torch.zeros(256, 32, dtype=torch.long)
    a[:, 5] = codes
    b = torch.zeros(256, 32, dtype=torch.long)
    b[:, 5] = codes
    result = matmul("hopper_fp8", as_codes(a, name), as_codes(b, name), a_format=name, b_format=name)
    values = floats_of(codes, name)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.multiply.outer(values, values)
    np.testing.assert_array_equal(result.numpy().astype(np.float64), exact)
    assert set(bits(result)[result.isnan()].tolist()) == {0x7FFFFFFF}
    assert not (bits(result) == -(1 << 31)).any(), "a product of -0 leaves +0"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_narrow_data_is_exact(name: str) -> None:
    """Where no term loses a bit the model is the exact sum: small integers."""
    row = FAMILIES[name]
    fmt = row.operand_formats[0]
    g = generator("narrow", name)
    values = torch.randint(-1, 2, (2, 7, 4 * row.k_step), generator=g).float()
    one = OPERAND_FORMATS[fmt].bias << OPERAND_FORMATS[fmt].fraction_bits
    sign = 1 << (OPERAND_FORMATS[fmt].bits - 1)
    codes = as_codes(torch.where(values == 0, 0, torch.where(values < 0, one | sign, one)), fmt)
    arguments: dict[str, object] = {"a_format": fmt, "b_format": fmt}
    if row.scale_group:
        unit = 127 if row.scale_formats[0] == "ue8m0" else 0x38
        scales = torch.full((7, 4 * row.k_step // row.scale_group), unit, dtype=torch.uint8)
        arguments |= {"a_scales": scales, "b_scales": scales}
    actual = matmul(row, codes[0], codes[1], **arguments)
    assert torch.equal(actual, values[0] @ values[1].T)


# --- By hand ---


def hopper(
    a: list[float], b: list[float], c: float = 0.0, dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    family = "hopper_fp8" if dtype.itemsize == 1 else "hopper_bf16"
    k = FAMILIES[family].k_step
    rows = [torch.zeros(1, k) for _ in range(2)]
    for row, values in zip(rows, (a, b), strict=True):
        row[0, : len(values)] = torch.tensor(values)
    result = matmul(family, rows[0].to(dtype), rows[1].to(dtype), accumulator=torch.tensor([[c]]))
    assert torch.equal(
        bits(result), bits(mma_step(family, rows[0].to(dtype), rows[1].to(dtype), torch.tensor([[c]])))
    )
    return result[0, 0]


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        # 13 fraction bits below the largest exponent, toward zero on both sides.
        ([1.0], [1.0], 2.0**-13, 1.0 + 2.0**-13),
        ([1.0], [1.0], 2.0**-14, 1.0),
        ([1.0], [1.0], -(2.0**-14), 1.0),
        ([-1.0], [1.0], -(2.0**-13) * 1.5, -1.0 - 2.0**-13),
        # Each term is truncated on its own: two halves of a unit do not add up.
        ([1.0, 2.0**-7, 2.0**-7], [1.0, 2.0**-7, 2.0**-7], 0.0, 1.0),
        # Products are not renormalized: 1.5 * 1.5 = 2.25 counts with exponent 0, so 2^-13 survives ...
        ([1.5, 2.0**-6], [1.5, 2.0**-7], 0.0, 2.25),
        ([1.5, 2.0**-6, -1.5], [1.5, 2.0**-7, 1.5], 0.0, 2.0**-13),
        # ... and the output keeps 13 fraction bits of its own, larger, exponent.
        ([1.75, 2.0**-6], [1.75, 2.0**-7], 1.0, 1.75 * 1.75 + 1.0),
        # A subnormal operand has the smallest exponent: -6 for E4M3, and c keeps bits down to 2^-19.
        ([2.0**-9], [1.0], 2.0**-19, 2.0**-9 + 2.0**-19),
        ([2.0**-9], [1.0], 2.0**-20, 2.0**-9),
        # The accumulator is truncated like any term, even beside zeros alone.
        ([0.0], [1.0], 1.0 + 2.0**-20, 1.0),
        # Largest values.
        ([448.0] * 32, [448.0] * 32, 0.0, 448.0 * 448.0 * 32),
    ],
)
def test_hopper_fp8_by_hand(a: list[float], b: list[float], c: float, expected: float) -> None:
    assert hopper(a, b, c).item() == expected


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ([1.0], [1.0], 2.0**-23, 1.0 + 2.0**-23),
        ([1.0], [1.0], 2.0**-24 * 1.5, 1.0),
        # 25 fraction bits inside: two quarters of a last place add up to a half, truncated; four make one.
        ([1.0] + [2.0**-12] * 2, [1.0] + [2.0**-13] * 2, 0.0, 1.0),
        ([1.0] + [2.0**-12] * 4, [1.0] + [2.0**-13] * 4, 0.0, 1.0 + 2.0**-23),
        ([1.0] + [2.0**-13] * 8, [1.0] + [2.0**-13] * 8, 0.0, 1.0),
        # A product beyond float32's range is Inf only if the sum is.
        ([2.0**100], [2.0**100], 0.0, math.inf),
        ([2.0**100, 2.0**100, 1.0], [2.0**100, -(2.0**100), 1.0], 0.0, 0.0),
        ([math.inf], [1.0], 1.0, math.inf),
    ],
)
def test_hopper_bf16_by_hand(a: list[float], b: list[float], c: float, expected: float) -> None:
    assert hopper(a, b, c, torch.bfloat16).item() == expected


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        ([math.nan], [1.0], 0.0),
        ([math.inf], [0.0], 0.0),
        ([math.inf], [1.0], -math.inf),
        ([1.0], [1.0], math.nan),
    ],
)
def test_nan_has_one_pattern(a: list[float], b: list[float], c: float) -> None:
    assert bits(hopper(a, b, c, torch.bfloat16)[None]).item() == 0x7FFFFFFF


def test_negative_zeros_sum_to_positive_zero() -> None:
    assert bits(hopper([-0.0] * 32, [1.0] * 32, -0.0)[None]).item() == 0


def test_negative_underflow_is_positive_zero() -> None:
    """-2^-155 survives the alignment beside zeros (its last place is 2^-158) but not the output's 2^-149."""
    assert bits(hopper([2.0**-80], [-(2.0**-75)], 0.0, torch.bfloat16)[None]).item() == 0
    below = hopper([2.0**-80, 2.0**-74], [-(2.0**-75), -(2.0**-75)], 0.0, torch.bfloat16)
    assert bits(below[None]).item() & 0xFFFFFFFF == 0x80000001


def test_four_bit_groups_by_hand() -> None:
    """mxf4nvf4: groups are added exactly, scaled by significands, aligned by scale exponents alone."""
    a = torch.zeros(1, 64, dtype=torch.uint8)
    b = torch.zeros(1, 64, dtype=torch.uint8)
    a[0, :16] = 7  # 6.0
    b[0, :16] = 7
    a[0, 16] = 1  # 0.5
    b[0, 16] = 1
    scales = torch.tensor([[0x7E, 0x01, 0x38, 0x38]], dtype=torch.uint8)  # 448, 2^-9, 1, 1
    arguments = {"a_scales": scales, "b_scales": scales}
    # 576 * 448^2 + 0.25 * 2^-18: exponent 8 + 8, and 2^-20 lies below 2^(16 - 35): lost.
    assert matmul("blackwell_mxf4nvf4", a, b, **arguments).item() == 576 * 448.0**2
    b[0, :16] = 0
    assert matmul("blackwell_mxf4nvf4", a, b, **arguments).item() == 2.0**-20
    b[0, :16] = torch.tensor([7, 15] * 8)  # cancels exactly, yet its exponent takes part
    assert matmul("blackwell_mxf4nvf4", a, b, **arguments).item() == 0.0


# --- Recorded ---

RECORDED = load_file(Path(__file__).with_name("wgmma.safetensors"))


@pytest.mark.parametrize("case", sorted({name.rsplit("/", 1)[0] for name in RECORDED}))
def test_recorded_wgmma_results(case: str) -> None:
    """Results of an H200 (hardware/check_tensor_core.py --record), K loops of several steps."""
    family, a_format, b_format, _ = case.split("/")
    a, b, c, out = (RECORDED[f"{case}/{part}"] for part in ("a", "b", "c", "out"))
    expected = out.view(torch.int32)
    accumulator = c.view(torch.float32)
    assert expected.shape == (16, 8)
    actual = matmul(family, a, b, a_format=a_format, b_format=b_format, accumulator=accumulator)
    assert torch.equal(expected, bits(actual))
    steps = chain(FAMILIES[family], a, b, accumulator, a_format=a_format, b_format=b_format)
    assert torch.equal(expected, bits(steps))


def test_recorded_results_cover_the_hardware_rows() -> None:
    recorded = {(name.split("/")[0], name.split("/")[3]) for name in RECORDED}
    hardware = [name for name, row in FAMILIES.items() if row.evidence == "hardware"]
    assert recorded == set(product(hardware, CATEGORIES))


# --- Arguments ---


def _codes(rows: int = 2, k: int = 32) -> Tensor:
    return torch.zeros(rows, k, dtype=torch.uint8)


_E4M3 = {"a_format": "e4m3", "b_format": "e4m3"}
_TYPED = torch.zeros(2, 32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("error", "argument", "call"),
    [
        (ValueError, "family", lambda: matmul("volta", _codes(), _codes())),
        (ValueError, "a_codes", lambda: matmul("hopper_fp8", _codes(), _codes())),
        (ValueError, "b_codes", lambda: matmul("hopper_fp8", _TYPED, _codes(), b_format="bf8")),
        (ValueError, "b_codes", lambda: matmul("hopper_fp8", _TYPED, _codes(), b_format="e2m1")),
        (TypeError, "b_codes", lambda: matmul("hopper_fp8", _TYPED, _codes().int(), b_format="e4m3")),
        (ValueError, "a_codes", lambda: matmul("hopper_bf16", _TYPED, _codes(), b_format="bf16")),
        (
            ValueError,
            "a_codes",
            lambda: matmul("hopper_fp8", _TYPED, _codes(), a_format="e5m2", b_format="e4m3"),
        ),
        (ValueError, "b_codes", lambda: matmul("hopper_fp8", _TYPED, _codes(2, 64), b_format="e4m3")),
        (ValueError, "a_codes", lambda: matmul("hopper_fp8", _codes(2, 33), _codes(2, 33), **_E4M3)),
        (ValueError, "a_codes", lambda: mma_step("hopper_fp8", _codes(2, 64), _codes(2, 64), **_E4M3)),
        (ValueError, "a_codes", lambda: matmul("hopper_fp8", _codes()[0], _codes(), **_E4M3)),
        (
            ValueError,
            "accumulator",
            lambda: matmul("hopper_fp8", _TYPED, _TYPED, accumulator=torch.zeros(2, 3)),
        ),
        (
            TypeError,
            "accumulator",
            lambda: matmul("hopper_fp8", _TYPED, _TYPED, accumulator=torch.zeros(2, 2).double()),
        ),
        (ValueError, "a_scales", lambda: matmul("hopper_fp8", _TYPED, _TYPED, a_scales=_codes(2, 1))),
        (ValueError, "a_scales", lambda: matmul("blackwell_mxf4", _codes(2, 64), _codes(2, 64))),
        (
            ValueError,
            "b_scales",
            lambda: matmul(
                "blackwell_mxf4", _codes(2, 64), _codes(2, 64), a_scales=_codes(2, 2), b_scales=_codes(2, 4)
            ),
        ),
        (
            ValueError,
            "scale_format",
            lambda: matmul("blackwell_mxf4", _codes(2, 64), _codes(2, 64), scale_format="ue4m3"),
        ),
        (
            ValueError,
            "fraction_bits",
            lambda: dataclasses.replace(FAMILIES["hopper_fp8"], fraction_bits=39),
        ),
        (
            ValueError,
            "family",
            lambda: matmul(dataclasses.replace(FAMILIES["hopper_fp8"], zero_exponent=0), _TYPED, _TYPED),
        ),
    ],
)
def test_bad_arguments_are_named(error: type[Exception], argument: str, call) -> None:
    with pytest.raises(error, match=f"^{argument}: "):
        call()


def test_a_turned_knob_shows() -> None:
    """Rows are data: another alignment width, another rounding width, another step give other results."""
    row = get_family("hopper_fp8")
    g = generator("knob")
    a, b = (as_codes(finite_codes("e4m3", (16, 128), g), "e4m3") for _ in range(2))
    base = matmul(row, a, b, a_format="e4m3", b_format="e4m3")
    for change in (
        {"fraction_bits": 12},
        {"output_fraction_bits": 23},
        {"k_step": 16},
        {"fraction_bits": 25},
    ):
        turned = dataclasses.replace(row, **change)
        other = matmul(turned, a, b, a_format="e4m3", b_format="e4m3")
        assert torch.equal(
            bits(other), bits(chain(turned, a, b, torch.zeros(16, 16), a_format="e4m3", b_format="e4m3"))
        )
        assert not torch.equal(bits(base), bits(other)), change
