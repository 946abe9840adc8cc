"""FP8 groups: the arithmetic against a plain NumPy chain with library casts, and the cases that went wrong in
the field."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.formats import E4M3FN, decode, decode_ue8m0_shift
from reference.fp8 import quantize_fp8_groups
from reference.recipes import RECIPES, Fp8GroupRecipe

G32 = RECIPES["fp8_ue8m0_g32"]
FP32 = RECIPES["fp8_fp32_g128"]
DIVIDE = RECIPES["fp8_fp32_g128_divide"]
FP8_RECIPES = [r for r in RECIPES.values() if isinstance(r, Fp8GroupRecipe) and r.element_format == "e4m3fn"]


def expected_groups(hidden: torch.Tensor, recipe: Fp8GroupRecipe) -> tuple[np.ndarray, np.ndarray]:
    """Codes [T, H] and scales [T, G] of finite values, in NumPy float32 with ml_dtypes' cast."""
    f32 = np.float32
    values = hidden.float().numpy().reshape(hidden.shape[0], -1, recipe.group)
    amax = np.maximum(np.abs(values).max(axis=-1), f32(recipe.amax_floor))
    raw = amax / f32(448) if recipe.scale_division == "divide" else amax * f32(1 / 448)
    scales = raw
    if recipe.scale_format == "ue8m0":
        mantissa, exponent = np.frexp(
            raw.astype(np.float64)
        )  # raw = mantissa * 2^exponent, mantissa in [0.5, 1)
        byte = np.clip(exponent - (mantissa == 0.5) + 127, 1, 254)
        scales = np.ldexp(1.0, byte - 127).astype(f32)
        if recipe.scale_min_exponent == 0:
            scales = np.where(raw == 0, f32(0), scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = values * np.where(scales == 0, f32(2.0**127), f32(1) / scales)[..., None]
    codes = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes.reshape(hidden.shape), scales.astype(f32)


def spread(shape: tuple[int, int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Values of many magnitudes, with zeros, an all-zero group and tiny groups."""
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(torch.randint(-12, 13, shape, generator=generator).float())
    values[torch.rand(shape, generator=generator) < 0.05] = 0.0
    values[0, : min(128, shape[1])] = 0.0
    values[-1] *= 1e-6
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES, ids=lambda r: r.name)
def test_every_recipe_against_numpy(
    recipe: Fp8GroupRecipe, dtype: torch.dtype, generator: torch.Generator
) -> None:
    hidden = spread((19, 384), generator, dtype)
    codes, scales = expected_groups(hidden, recipe)
    actual = quantize_fp8_groups(hidden, recipe)
    np.testing.assert_array_equal(actual.codes.numpy(), codes)
    np.testing.assert_array_equal(actual.scales.numpy().view(np.int32), scales.view(np.int32))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    tiles=st.integers(1, 4),
    name=st.sampled_from([r.name for r in FP8_RECIPES]),
    seed=st.integers(0, 2**31),
    transposed=st.booleans(),
)
def test_any_shape_and_stride(rows: int, tiles: int, name: str, seed: int, transposed: bool) -> None:
    hidden = spread((rows, 128 * tiles), torch.Generator().manual_seed(seed), torch.bfloat16)
    strided = hidden.t().contiguous().t() if transposed else hidden.repeat(1, 2)[:, : 128 * tiles]
    codes, scales = expected_groups(hidden, RECIPES[name])
    actual = quantize_fp8_groups(strided, RECIPES[name])
    np.testing.assert_array_equal(actual.codes.numpy(), codes)
    np.testing.assert_array_equal(actual.scales.numpy(), scales)


def test_chunks_of_rows_give_the_same(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = spread((300, 2048), generator, torch.bfloat16)
    whole = quantize_fp8_groups(hidden, G32, intermediates=True)
    monkeypatch.setattr("reference._groups._CHUNK_ELEMENTS", 7 * 2048 + 1)
    chunked = quantize_fp8_groups(hidden, G32, intermediates=True)
    for field in ("codes", "exponents", "scales", "amax", "raw_scale", "reciprocal", "scaled"):
        assert torch.equal(getattr(whole, field), getattr(chunked, field)), field


def test_intermediates_are_the_chain(generator: torch.Generator) -> None:
    hidden = spread((8, 256), generator, torch.bfloat16)
    groups = quantize_fp8_groups(hidden, G32, intermediates=True)
    assert quantize_fp8_groups(hidden, G32).scaled is None
    assert torch.equal(decode_ue8m0_shift(groups.exponents), groups.scales)
    assert torch.equal(groups.reciprocal * groups.scales, torch.ones_like(groups.scales))
    exact = hidden.float() * groups.reciprocal.repeat_interleave(32, dim=1)
    assert torch.equal(groups.scaled, exact)
    assert bool((groups.scaled.abs() <= 448).all())


def test_vectors_of_numerics_14_1() -> None:
    rows = [[448, -3, 0.25, -0.0], [1.0, -0.30078125, 0.0130005, -0.00099945, 300], []]
    hidden = torch.zeros(3, 32)
    for row, values in zip(hidden, rows, strict=True):
        row[: len(values)] = torch.tensor(values)
    groups = quantize_fp8_groups(hidden.bfloat16(), G32)
    assert groups.exponents.flatten().tolist() == [127, 127, 105]
    assert groups.codes[0, :5].tolist() == [0x7E, 0xC4, 0x28, 0x80, 0x00]
    assert groups.codes[1, :6].tolist() == [0x38, 0xAA, 0x07, 0x81, 0x79, 0x00]
    assert not bool(groups.codes[2].any())


def test_constants() -> None:
    bits = lambda value: int(torch.tensor(value).view(torch.int32))  # noqa: E731
    assert (bits(1 / 448), bits(1e-4)) == (0x3B124925, 0x38D1B717)


def test_scale_is_rounded_before_the_payload_is_divided() -> None:
    """CASES 1."""
    hidden = torch.zeros(1, 32)
    hidden[0, :3] = torch.tensor([300.0, -150.0, 10.0])
    right = quantize_fp8_groups(hidden, G32)
    assert right.scales.item() == 1.0
    assert decode(right.codes, E4M3FN)[0, :3].tolist() == [288.0, -144.0, 10.0]
    wrong = quantize_fp8_groups(hidden, replace(G32, scale_rounded_after_quantization=True))
    assert wrong.scales.item() == 1.0
    assert decode(wrong.codes, E4M3FN)[0, :3].tolist() == [448.0, -224.0, 15.0]
    assert wrong.raw_scale.item() == pytest.approx(0.66964287, abs=1e-8)


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_exponent_around_448_times_powers_of_two(ulps: int) -> None:
    """CASES 2: amax 448 * 2^k (and 224) with float32 neighbours; the division rounds, the ceil does not."""
    k = torch.arange(-20, 100)
    amax = ((448.0 * torch.exp2(k.float())).view(torch.int32) + ulps).view(torch.float32)
    hidden = torch.zeros(len(k), 32)
    hidden[:, 5] = amax
    for recipe in (G32, replace(G32, scale_division="divide")):
        groups = quantize_fp8_groups(hidden, recipe)
        quotient = (
            (amax.double() / 448).float()
            if recipe.scale_division == "divide"
            else amax * torch.tensor(1 / 448)
        )
        mantissa, exponent = np.frexp(quotient.numpy())
        expected = exponent - (mantissa == 0.5)
        np.testing.assert_array_equal(groups.exponents.flatten().numpy().astype(int) - 127, expected)
    one = quantize_fp8_groups(torch.full((1, 32), 448.0), G32)
    half = quantize_fp8_groups(torch.full((1, 32), 224.0), G32)
    assert (one.scales.item(), half.scales.item()) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("recipe", "zero_byte"),
    [
        (G32, 105),
        (replace(G32, amax_floor=1e-10), 127 - 42),
        (RECIPES["fp8_ue8m0_g32_no_floor"], 0),
    ],
    ids=["1e-4", "1e-10", "none"],
)
def test_amax_floors(recipe: Fp8GroupRecipe, zero_byte: int) -> None:
    """CASES 3."""
    hidden = torch.zeros(5, 32)
    hidden[:, 3] = torch.tensor([0.0, 1e-10, 1e-8, 1e-4, 1.0001e-4])
    groups = quantize_fp8_groups(hidden, recipe)
    assert groups.exponents[0].item() == zero_byte
    assert not bool(groups.codes[0].any())
    codes, scales = expected_groups(hidden, recipe)
    np.testing.assert_array_equal(groups.codes.numpy(), codes)
    np.testing.assert_array_equal(groups.scales.numpy(), scales)


def test_sm90_zero_group_scale() -> None:
    groups = quantize_fp8_groups(torch.zeros(1, 128), DIVIDE)
    assert groups.scales.item() == pytest.approx(2.2321428e-13, rel=1e-7)


def test_floor_style_scale_clips_the_maximum() -> None:
    """CASES 6."""
    hidden = torch.zeros(1, 32)
    hidden[0, :2] = torch.tensor([959.5632, 957.0])
    ceil = quantize_fp8_groups(hidden, G32)
    floor = quantize_fp8_groups(hidden, replace(G32, scale_rounding="floor"))
    assert (ceil.scales.item(), floor.scales.item()) == (4.0, 2.0)
    assert (decode(ceil.codes, E4M3FN) * ceil.scales)[0, 0].item() == 960.0
    assert (decode(floor.codes, E4M3FN) * floor.scales)[0, 1].item() == 896.0


def test_exponent_is_the_same_for_both_divisions_of_every_bf16_amax() -> None:
    """CASES 11: the fp32 scale differs for about half of all amax, the UE8M0 byte for none. 2.1: bytes 105 to
    247."""
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    hidden = amax.unsqueeze(1).expand(-1, 32)
    product = quantize_fp8_groups(hidden, G32)
    quotient = quantize_fp8_groups(hidden, replace(G32, scale_division="divide"))
    assert torch.equal(product.exponents, quotient.exponents)
    assert torch.equal(product.codes, quotient.codes)
    assert (product.exponents.min().item(), product.exponents.max().item()) == (105, 247)
    above_floor = amax.float() >= 1e-4
    assert int(above_floor.sum()) == 18094
    assert int((product.raw_scale != quotient.raw_scale)[above_floor].sum()) == 10036


def specials(dtype: torch.dtype, group: int) -> torch.Tensor:
    """Rows: one NaN; all NaN; +inf with finite values; -inf with NaN; negative NaN payload with -0."""
    hidden = torch.linspace(-3.0, 3.0, group).repeat(5, 1)
    hidden[0, 4] = float("nan")
    hidden[1] = float("nan")
    hidden[2, 7] = float("inf")
    hidden[3, 2], hidden[3, 9] = -float("inf"), float("nan")
    hidden[4, 0], hidden[4, 1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32), -0.0
    return hidden.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_specials_ue8m0(dtype: torch.dtype) -> None:
    """CASES 5, NUMERICS 2.4."""
    hidden = specials(dtype, 32)
    groups = quantize_fp8_groups(hidden, G32)
    assert groups.exponents.flatten().tolist() == [120, 105, 254, 254, 120]
    assert groups.codes[0, 4].item() == 0x7F
    assert set(groups.codes[1].tolist()) == {0x7F}
    assert (groups.codes[2, 7].item(), groups.codes[3, 2].item(), groups.codes[3, 9].item()) == (
        0x7E,
        0xFE,
        0x7F,
    )
    assert groups.codes[4, :2].tolist() == [0x7F, 0x80]
    finite = torch.ones(32, dtype=torch.bool)
    finite[7] = False
    assert set((groups.codes[2][finite] & 0x7F).tolist()) == {0}
    clean = torch.nan_to_num(hidden[0].float(), nan=0.0).unsqueeze(0)
    alone = quantize_fp8_groups(clean, G32)
    keep = torch.arange(32) != 4
    assert torch.equal(alone.codes[0][keep], groups.codes[0][keep])


def test_every_nan_of_bf16_is_ignored_and_has_one_byte() -> None:
    """All 254 payloads, signalling ones and both signs, each alone in a group of ones."""
    low = torch.arange(1, 128, dtype=torch.int32)
    payloads = torch.cat([0x7F80 + low, 0x7F80 + low - 0x8000]).to(torch.int16).view(torch.bfloat16)
    for payload in payloads:
        hidden = torch.ones(1, 32, dtype=torch.bfloat16)
        hidden[0, 3] = payload
        groups = quantize_fp8_groups(hidden, G32)
        assert groups.exponents.item() == 119
        assert groups.codes[0, :5].tolist() == [0x78, 0x78, 0x78, 0x7F, 0x78]


def test_inf_with_the_largest_bf16_uses_a_subnormal_reciprocal() -> None:
    """h * 2^-127 is not flushed: the largest bf16 comes out as 1.9921875 -> 2.0 (0x40)."""
    hidden = torch.zeros(1, 32)
    hidden[0, 0], hidden[0, 1] = float("inf"), torch.finfo(torch.bfloat16).max
    assert quantize_fp8_groups(hidden.bfloat16(), G32).codes[0, :2].tolist() == [0x7E, 0x40]
    zero = quantize_fp8_groups(hidden.bfloat16(), RECIPES["fp8_ue8m0_g32_pre_dispatch"])
    assert zero.codes[0, :2].tolist() == [0x7F, 0x00]
    assert zero.exponents.item() == 254


@pytest.mark.parametrize("recipe", [FP32, DIVIDE], ids=lambda r: r.name)
def test_specials_fp32(recipe: Fp8GroupRecipe) -> None:
    groups = quantize_fp8_groups(specials(torch.bfloat16, 128), recipe)
    assert groups.scales[2:4].flatten().tolist() == [float("inf")] * 2
    assert (groups.codes[2, 7].item(), groups.codes[3, 2].item(), groups.codes[3, 9].item()) == (
        0x7F,
        0x7F,
        0x7F,
    )
    assert set((groups.codes[2, 8:] & 0x7F).tolist()) == {0}
    assert groups.codes[2, 0].item() == 0x80
    assert set(groups.codes[1].tolist()) == {0x7F}
    assert groups.scales[1].item() == quantize_fp8_groups(torch.zeros(1, 128), recipe).scales.item()


def test_propagated_nan_takes_the_whole_group() -> None:
    recipe = RECIPES["fp8_ue8m0_g32_helper"]
    groups = quantize_fp8_groups(specials(torch.bfloat16, 32), recipe)
    assert groups.exponents[0].item() == 254
    assert groups.codes[0, 4].item() == 0x7F


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("element_rounding", "away"),
        ("element_rounding", "toward_zero"),
        ("negative_zero", "drop"),
        ("subnormals", "flush"),
        ("inf_reciprocal", "zero"),
        ("scale_rounding", "floor"),
        ("scale_rounding", "nearest"),
        ("amax_floor", 1e6),
        ("overflow", "nan"),
        ("scale_rounded_after_quantization", True),
    ],
)
def test_knobs_change_bytes(knob: str, value: object) -> None:
    """Each knob turned alone changes the result on an input that reacts to it."""
    hidden = torch.full((3, 32), 1.2)
    hidden[0, :4] = torch.tensor([448.0, -0.0, 17.0, 0.001])
    hidden[1, :3] = torch.tensor([449.0, 3.0e38, float("inf")])
    base = quantize_fp8_groups(hidden, G32)
    changed = quantize_fp8_groups(hidden, replace(G32, **{knob: value}))
    assert not (torch.equal(base.codes, changed.codes) and torch.equal(base.exponents, changed.exponents))


@pytest.mark.parametrize(
    ("hidden", "error", "message"),
    [
        (torch.zeros(2, 48), ValueError, "hidden: expected .T, H. with H a multiple of 32, got .2, 48."),
        (torch.zeros(64), ValueError, "hidden: expected .T, H."),
        (torch.zeros(2, 64, dtype=torch.float64), TypeError, "hidden: expected bfloat16, float16 or float32"),
    ],
)
def test_refusals(hidden: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_fp8_groups(hidden, G32)
