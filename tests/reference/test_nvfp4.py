"""NVFP4: both levels against a plain NumPy chain, the helper variants, and the norm-fused form given its
deviation."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.formats import E2M1, UE4M3, decode, encode, unpack_e2m1
from reference.nvfp4 import quantize_nvfp4, rms_norm_bf16
from reference.recipes import RECIPES

TOKEN = RECIPES["nvfp4_token"]
BLOCK = RECIPES["nvfp4_block"]
F32 = np.float32
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=F32)


def e4m3(values: np.ndarray) -> np.ndarray:
    return np.minimum(values, F32(448)).astype(ml_dtypes.float8_e4m3fn)


def e2m1(values: np.ndarray) -> np.ndarray:
    """The comparison ladder of NUMERICS 1.4, sign dropped for zero."""
    with np.errstate(invalid="ignore"):
        magnitudes = np.abs(values)
        index = sum(
            (magnitudes >= m if i % 2 else magnitudes > m).astype(np.uint8) for i, m in enumerate(MIDPOINTS)
        )
        return index | np.where((values < 0) & (index != 0), np.uint8(8), np.uint8(0))


def expected_token(hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = hidden.float().numpy()
    xs = np.maximum(np.abs(values).max(axis=1), F32(1e-12)) * F32(1 / 2688)
    u = (values / xs[:, None]).reshape(len(values), -1, 16)
    s = np.clip(np.abs(u).max(axis=-1) * F32(1 / 6), F32(2**-9), F32(448))
    scale = e4m3(s)
    codes = e2m1(u / scale.astype(F32)[..., None]).reshape(values.shape)
    return codes, scale.view(np.uint8), xs


def expected_block(hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    values = hidden.double().numpy().reshape(hidden.shape[0], -1, 16)
    amax = np.abs(values).max(axis=-1).astype(F32)
    scale = e4m3(np.maximum(amax * F32(1 / 6), F32(2**-9)))
    # float64 holds the products of a midpoint, an E4M3 scale and a float32 value's rival exactly
    bounds = MIDPOINTS.astype(np.float64)[:, None, None, None] * scale.astype(np.float64)[None, ..., None]
    magnitudes = np.abs(values)
    index = sum(
        (magnitudes >= bounds[i] if i % 2 else magnitudes > bounds[i]).astype(np.uint8) for i in range(7)
    )
    codes = index | np.where((values < 0) & (index != 0), np.uint8(8), np.uint8(0))
    return codes.reshape(hidden.shape), scale.view(np.uint8)


def spread(shape: tuple[int, int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(
        torch.randint(-9, 6, (shape[0], shape[1] // 16), generator=generator)
    ).repeat_interleave(16, dim=1)
    values[torch.rand(shape, generator=generator) < 0.05] = 0.0
    values[0, :16] = 0.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_two_levels_against_numpy(dtype: torch.dtype, generator: torch.Generator) -> None:
    hidden = spread((33, 640), generator, dtype)
    codes, scales, token_scales = expected_token(hidden)
    actual = quantize_nvfp4(hidden, TOKEN)
    np.testing.assert_array_equal(actual.codes.numpy(), codes)
    np.testing.assert_array_equal(actual.scale_codes.numpy(), scales)
    np.testing.assert_array_equal(actual.token_scales.numpy(), token_scales)
    assert torch.equal(unpack_e2m1(actual.packed), actual.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_level_against_exact_comparison(dtype: torch.dtype, generator: torch.Generator) -> None:
    hidden = spread((33, 640), generator, dtype)
    codes, scales = expected_block(hidden)
    actual = quantize_nvfp4(hidden, BLOCK)
    np.testing.assert_array_equal(actual.codes.numpy(), codes)
    np.testing.assert_array_equal(actual.scale_codes.numpy(), scales)
    assert actual.token_scales is None


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    transposed=st.booleans(),
    level=st.sampled_from(["token", "block"]),
)
def test_any_shape_and_stride(rows: int, blocks: int, seed: int, transposed: bool, level: str) -> None:
    hidden = spread((rows, 64 * blocks), torch.Generator().manual_seed(seed), torch.bfloat16)
    strided = hidden.t().contiguous().t() if transposed else hidden.repeat(1, 2)[:, : 64 * blocks]
    codes, scales = expected_token(hidden)[:2] if level == "token" else expected_block(hidden)
    actual = quantize_nvfp4(strided, TOKEN if level == "token" else BLOCK)
    np.testing.assert_array_equal(actual.codes.numpy(), codes)
    np.testing.assert_array_equal(actual.scale_codes.numpy(), scales)


def test_chunks_of_rows_give_the_same(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = spread((300, 2048), generator, torch.bfloat16)
    weight = torch.rand(2048, generator=generator)
    results = []
    for chunk in (1 << 20, 7 * 2048 + 1):
        monkeypatch.setattr("reference._groups._CHUNK_ELEMENTS", chunk)
        results.append([quantize_nvfp4(hidden, recipe, intermediates=True) for recipe in (TOKEN, BLOCK)])
        results[-1].append(rms_norm_bf16(hidden, weight, 1e-6, 0.5))
    for whole, chunked in zip(*results, strict=True):
        for name, tensor in vars(whole).items():
            assert tensor is None or torch.equal(tensor, getattr(chunked, name)), name


def test_division_equals_comparison_for_every_bf16_and_scale() -> None:
    """One level compares |h| with c * S, and the reference divides: all 126 scales, all 32,640 finite
    bf16."""
    magnitudes = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for code in range(1, 0x7F):
        assert_division_equals_comparison(magnitudes, decode(torch.tensor([code], dtype=torch.uint8), UE4M3))


@pytest.mark.parametrize("ulps", range(-3, 4))
def test_division_equals_comparison_around_every_float32_boundary(ulps: int) -> None:
    """The same for float32 values next to c * S, for all midpoints and scales: no quotient rounds onto a
    midpoint."""
    scales = decode(torch.arange(1, 0x7F, dtype=torch.uint8), UE4M3).unsqueeze(1)
    exact = scales * torch.from_numpy(MIDPOINTS)
    assert_division_equals_comparison((exact.view(torch.int32) + ulps).view(torch.float32), scales)


def assert_division_equals_comparison(magnitudes: torch.Tensor, scales: torch.Tensor) -> None:
    compared = sum(
        ((magnitudes >= scales * m) if i % 2 else (magnitudes > scales * m)).to(torch.uint8)
        for i, m in enumerate(MIDPOINTS.tolist())
    )
    assert torch.equal(encode(magnitudes / scales, E2M1), compared)


ROW = [6, -6, 3, -3, 1.25, 0.75, -0.25, 0.26, 5, -5, 2.5, 3.5, 0.1, -0.1, 4, 1.75, 0.01, -0.02, 0.03, -0.04]


@pytest.mark.parametrize(
    ("recipe", "scale_bytes", "codes", "packed"),
    [
        (
            BLOCK,
            [0x38, 0x03, 0x01, 0x01],
            [7, 15, 5, 13, 2, 2, 0, 1, 6, 14, 4, 6, 0, 0, 6, 4, 3, 13, 7, 15],
            [0xF7, 0xD5, 0x22, 0x10, 0xE6, 0x64, 0x00, 0x46, 0xD3, 0xF7],
        ),
        (
            TOKEN,
            [0x7E, 0x44, 0x01, 0x01],
            [7, 15, 5, 13, 2, 2, 0, 1, 6, 14, 4, 5, 0, 0, 6, 3, 3, 13, 6, 15],
            [0xF7, 0xD5, 0x22, 0x10, 0xE6, 0x54, 0x00, 0x36, 0xD3, 0xF6],
        ),
    ],
    ids=["block", "token"],
)
def test_vector_of_numerics_14_3(recipe, scale_bytes: list[int], codes: list[int], packed: list[int]) -> None:
    hidden = torch.zeros(1, 64)
    hidden[0, : len(ROW)] = torch.tensor(ROW)
    actual = quantize_nvfp4(hidden.bfloat16(), recipe)
    assert actual.scale_codes[0].tolist() == scale_bytes
    assert actual.codes[0, : len(codes)].tolist() == codes
    assert actual.packed[0, : len(packed)].tolist() == packed
    assert not bool(actual.packed[0, len(packed) :].any())
    if recipe is TOKEN:
        assert actual.token_scales.view(torch.int32).item() == 0x3B124925


def test_zero_rows_have_finite_scales_and_zero_codes() -> None:
    """CASES 15."""
    token = quantize_nvfp4(torch.zeros(2, 64), TOKEN)
    assert token.token_scales.tolist() == [3.7202380551634435e-16] * 2
    for groups in (token, quantize_nvfp4(torch.zeros(2, 64), BLOCK)):
        assert set(groups.scale_codes.flatten().tolist()) == {0x01}
        assert not bool(groups.codes.any())
    without_floor = quantize_nvfp4(torch.zeros(2, 64), RECIPES["nvfp4_token_pre_dispatch"])
    assert not bool(without_floor.scale_codes.any())
    assert not bool(without_floor.codes.any())


def test_scale_bytes_are_never_nan(generator: torch.Generator) -> None:
    """CASES 15: every finite bf16 amax, and rows with Inf."""
    amax = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    hidden = torch.zeros(len(amax), 64, dtype=torch.bfloat16)
    hidden[:, 17] = amax
    for recipe in (TOKEN, BLOCK):
        codes = quantize_nvfp4(hidden, recipe).scale_codes
        assert (int(codes.min()), int(codes.max())) == (0x01, 0x7E)


def test_specials() -> None:
    """NUMERICS 3a, 3b: NaN is ignored with code 0; Inf empties a row at two levels, saturates a group at
    one."""
    hidden = torch.linspace(-2.0, 2.0, 64).repeat(3, 1)
    hidden[1, 3], hidden[2, 3] = float("nan"), float("inf")
    hidden = hidden.bfloat16()
    token, block = quantize_nvfp4(hidden, TOKEN), quantize_nvfp4(hidden, BLOCK)
    for groups in (token, block):
        keep = torch.arange(64) != 3
        assert torch.equal(groups.codes[0][keep], groups.codes[1][keep])
        assert groups.codes[1, 3].item() == 0
    assert token.token_scales[2].item() == float("inf")
    assert set(token.scale_codes[2].tolist()) == {1}
    assert not bool(token.codes[2].any())
    assert block.scale_codes[2, 0].item() == 0x7E
    assert block.codes[2, 3].item() == 7
    assert torch.equal(block.codes[2, 16:], block.codes[0, 16:])


def test_reciprocal_for_division_changes_codes() -> None:
    """CASES 11: scale byte 0x07, v = 0.0239257794."""
    v, scale = torch.tensor(0.0239257794), decode(torch.tensor([0x07], dtype=torch.uint8), UE4M3)
    assert decode(encode(v / scale, E2M1), E2M1).item() == 1.5
    assert decode(encode(v * (torch.ones(1) / scale), E2M1), E2M1).item() == 2.0


def test_helper_variants_agree_as_recorded(generator: torch.Generator) -> None:
    """NUMERICS 3c: with global scale 1 the two helpers equal the one-level kernel; the reciprocal form does
    not."""
    hidden = spread((512, 512), generator, torch.bfloat16)
    base = quantize_nvfp4(hidden, BLOCK)
    for name in ("nvfp4_global_divide", "nvfp4_global_reciprocal"):
        other = quantize_nvfp4(hidden, RECIPES[name])
        assert torch.equal(other.codes, base.codes), name
        assert torch.equal(other.scale_codes, base.scale_codes), name
    reciprocal = quantize_nvfp4(hidden, RECIPES["nvfp4_block_reciprocal"])
    assert not torch.equal(reciprocal.codes, base.codes)
    token, dispatch = (
        quantize_nvfp4(hidden, TOKEN),
        quantize_nvfp4(hidden, RECIPES["nvfp4_token_pre_dispatch"]),
    )
    differ = token.token_scales != dispatch.token_scales
    assert 0.05 < float(differ.float().mean()) < 0.5


@pytest.mark.parametrize("global_scale", [0.5, 0.37, 3.0])
def test_global_scale(global_scale: float, generator: torch.Generator) -> None:
    hidden = spread((16, 128), generator, torch.bfloat16)
    values = hidden.float().numpy().reshape(16, -1, 16)
    amax = np.abs(values).max(axis=-1)
    for name in ("nvfp4_global_divide", "nvfp4_global_reciprocal"):
        if name == "nvfp4_global_divide":
            raw = np.clip(amax / F32(6.0 * global_scale), F32(2**-9), F32(448))
        else:
            raw = np.maximum((amax * F32(1 / 6)) * (F32(1) / F32(global_scale)), F32(2**-9))
        scale = e4m3(raw)
        codes = e2m1(values / (scale.astype(F32) * F32(global_scale))[..., None]).reshape(16, 128)
        actual = quantize_nvfp4(hidden, RECIPES[name], global_scale=global_scale)
        np.testing.assert_array_equal(actual.scale_codes.numpy(), scale.view(np.uint8))
        np.testing.assert_array_equal(actual.codes.numpy(), codes)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("token_scale", "divide"),
        ("token_floor", 1e4),
        ("block_division", "divide_by_product"),
        ("block_floor", 100.0),
        ("block_ceiling", 100.0),
        ("element_division", "multiply_reciprocal"),
        ("element_rounding", "toward_zero"),
        ("negative_zero", "keep"),
        ("nan_code", 7),
    ],
)
def test_knobs_change_bytes(knob: str, value: object, generator: torch.Generator) -> None:
    hidden = spread((256, 256), generator, torch.bfloat16)
    hidden[3, 5], hidden[3, 6] = float("nan"), -0.0
    base, changed = quantize_nvfp4(hidden, TOKEN), quantize_nvfp4(hidden, replace(TOKEN, **{knob: value}))
    same = torch.equal(base.codes, changed.codes) and torch.equal(base.scale_codes, changed.scale_codes)
    assert not (same and torch.equal(base.token_scales, changed.token_scales))


@pytest.mark.parametrize("columns", [64, 192, 4096])
def test_norm_given_the_deviation(columns: int, generator: torch.Generator) -> None:
    hidden = torch.randn(7, columns, generator=generator).bfloat16()
    weight = torch.randn(columns, generator=generator).bfloat16()
    rstd = torch.rand(7, generator=generator) + 0.5
    norm = rms_norm_bf16(hidden, weight, 1e-5, 1.0, rstd=rstd)
    values = hidden.float().numpy()
    expected = (values * rstd.numpy()[:, None]) * (weight.float().numpy() + F32(1))
    theirs = expected.astype(ml_dtypes.bfloat16).view(np.int16)
    np.testing.assert_array_equal(norm.normalized.view(torch.int16).numpy(), theirs)
    assert torch.equal(norm.rstd, rstd)


@pytest.mark.parametrize("columns", [64, 192, 4096])
def test_norm_deviation_is_within_the_order_of_the_sum(columns: int, generator: torch.Generator) -> None:
    hidden = torch.randn(7, columns, generator=generator).bfloat16()
    norm = rms_norm_bf16(hidden, torch.ones(columns), 1e-5, 0.0)
    exact = 1 / np.sqrt((hidden.double().numpy() ** 2).mean(axis=1) + 1e-5)
    np.testing.assert_allclose(norm.rstd.numpy(), exact, rtol=3e-7)
    squares = hidden.float().numpy() ** 2
    lanes = np.zeros((256, len(squares)), F32)
    for column in range(columns):  # ascending, so that each lane adds its own columns in order
        lanes[column % 2048 // 8] += squares[:, column]
    sums = list(lanes)
    for start, distance in [(range(0, 256, 32), d) for d in (16, 8, 4, 2, 1)]:
        for lane in (first + i for first in start for i in range(distance)):
            sums[lane] = sums[lane] + sums[lane + distance]
    for distance in (4, 2, 1):
        for warp in range(distance):
            sums[32 * warp] = sums[32 * warp] + sums[32 * (warp + distance)]
    np.testing.assert_array_equal(norm.sum_squares.numpy(), sums[0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize_nvfp4(torch.zeros(2, 24), TOKEN), ValueError, "hidden: expected .* multiple of 16"),
        (lambda: quantize_nvfp4(torch.zeros(2, 32).int(), TOKEN), TypeError, "hidden: expected bfloat16"),
        (
            lambda: quantize_nvfp4(torch.zeros(2, 32), BLOCK, global_scale=0.0),
            ValueError,
            "global_scale: expected",
        ),
        (
            lambda: quantize_nvfp4(torch.zeros(2, 32), TOKEN, global_scale=2.0),
            ValueError,
            "global_scale: nvfp4_token",
        ),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
