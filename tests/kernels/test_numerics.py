"""The properties that the quantizers' shortcuts rest on, over their whole domains."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from megamoe.kernels import constants, numerics
from megamoe.kernels.interpreter import fused_multiply_add, interpret

F32 = np.float32
E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32)
GOES_UP_AT_TIE = np.array([False, True, False, True, False, True, False])


def pair(value: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return high, (fused_multiply_add(-value, high, F32(1)) * high).astype(F32)


def multiply_pair(value: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return fused_multiply_add(value, high, (value * low).astype(F32))


def test_constants_are_the_nearest_float32() -> None:
    assert F32(1) / F32(448) == F32(constants.E4M3_MAX_RECIPROCAL)
    assert F32(1) / F32(2688) == F32(constants.NVFP4_TOKEN_RECIPROCAL)
    assert F32(1) / F32(6) == F32(constants.E2M1_MAX_RECIPROCAL)
    assert F32(1e-4) == F32(constants.FP8_AMAX_FLOOR)
    assert F32(1e-12) == F32(constants.NVFP4_TOKEN_AMAX_FLOOR)


@pytest.mark.parametrize(
    ("mantissa_bits", "exponents"), [(7, (-120, -40, 0, 60)), (10, (-14, 0, 15))], ids=["bf16", "fp16"]
)
def test_pair_product_is_the_ieee_quotient(mantissa_bits: int, exponents: tuple[int, ...]) -> None:
    """h / xs for every mantissa of the row maximum and every mantissa of h, and for the floor's xs."""
    mantissas = (1 + np.arange(1 << mantissa_bits) / (1 << mantissa_bits)).astype(F32)
    floor = F32(constants.NVFP4_TOKEN_AMAX_FLOOR) * F32(constants.NVFP4_TOKEN_RECIPROCAL)
    for exponent in exponents:
        amax = np.ldexp(mantissas, exponent).astype(F32)
        xs = np.maximum(amax, F32(constants.NVFP4_TOKEN_AMAX_FLOOR)) * F32(constants.NVFP4_TOKEN_RECIPROCAL)
        xs = np.unique(np.append(xs.astype(F32), floor))[:, None]
        high, low = pair(xs, (F32(1) / xs).astype(F32))
        h = np.ldexp(mantissas, exponent)[None, :].astype(F32)
        np.testing.assert_array_equal(multiply_pair(h, high, low), (h / xs).astype(F32))


def test_scale_pair_decides_like_the_ieee_quotient() -> None:
    """c * S goes to c, its neighbours to either side, for a reciprocal that is up to 2 ulp off."""
    scale = (1 + np.arange(8, dtype=F32) / 8)[:, None]
    middle = (E2M1_MIDPOINTS * scale).astype(F32)
    assert (middle.astype(np.float64) == E2M1_MIDPOINTS * scale.astype(np.float64)).all()
    for ulps in range(-2, 3):
        start = ((F32(1) / scale).view(np.int32) + ulps).astype(np.int32).view(F32)
        high, low = pair(scale, start)
        for step, compare in ((-1, np.less), (0, np.equal), (1, np.greater)):
            u = (middle.view(np.int32) + step).astype(np.int32).view(F32)
            assert compare(multiply_pair(u, high, low), E2M1_MIDPOINTS).all()
            assert compare((u / scale).astype(F32), E2M1_MIDPOINTS).all()


@triton.jit
def _e2m1_kernel(values, words, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)[None, :]
    even = tl.load(values + word[:, :, None] * 8 + tl.arange(0, 4)[None, None, :] * 2)
    odd = tl.load(values + word[:, :, None] * 8 + tl.arange(0, 4)[None, None, :] * 2 + 1)
    tl.store(words + word, numerics.pack_e2m1(even, odd).to(tl.int32))


def test_e2m1_codes_near_every_boundary() -> None:
    edges = np.concatenate([E2M1_MIDPOINTS, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.99]]).astype(F32)
    near = np.abs((edges.view(np.int32)[:, None] + np.arange(-4, 5)).astype(np.int32).view(F32)).ravel()
    values = np.concatenate([near, np.linspace(0, 6.99, 1 << 14, dtype=F32), [1e-30, 1e-45]]).astype(F32)
    values = values[(values < 7) & ~np.isnan(values)]
    values = np.concatenate([values, -values])
    size = 1 << int(np.ceil(np.log2(values.size)))
    padded = torch.from_numpy(np.pad(values, (0, size - values.size)))
    words = torch.zeros(size // 8, dtype=torch.int32)
    interpret(_e2m1_kernel, (1,), (padded, words), {"WORDS": size // 8})
    packed = words.view(torch.uint8).numpy()
    codes = np.stack([packed & 15, packed >> 4], 1).ravel()
    m = np.abs(values)[:, None]
    index = np.where(GOES_UP_AT_TIE, m >= E2M1_MIDPOINTS, m > E2M1_MIDPOINTS).sum(1)
    expected = index | np.where((values < 0) & (index != 0), 8, 0)
    np.testing.assert_array_equal(codes[: values.size], expected)


@triton.jit
def _ue8m0_kernel(amaxes, codes, reciprocals, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    code = numerics.ue8m0_code(numerics.fp8_scale(tl.load(amaxes + offsets)))
    tl.store(codes + offsets, code.to(tl.int32))
    tl.store(reciprocals + offsets, numerics.ue8m0_reciprocal(code))


def test_ue8m0_code_is_the_exact_ceiling() -> None:
    """Every bfloat16 amax, and 448 * 2^k with its neighbours by up to 3 ulp, against exact integers."""
    bfloat16 = (np.arange(0x7F81, dtype=np.uint32) << 16).view(F32)
    powers = np.ldexp(F32(448), np.arange(-21, 119)).astype(F32)
    near = (powers.view(np.int32)[:, None] + np.arange(-3, 4)).astype(np.int32).view(F32).ravel()
    amax = np.concatenate([bfloat16, near]).astype(F32)
    size = 1 << int(np.ceil(np.log2(amax.size)))
    padded = torch.from_numpy(np.pad(amax, (0, size - amax.size), constant_values=1))
    codes, reciprocals = torch.zeros(size, dtype=torch.int32), torch.zeros(size)
    interpret(_ue8m0_kernel, (1,), (padded, codes, reciprocals), {"SIZE": size})
    actual = codes.numpy()[: amax.size]
    floored = np.maximum(amax, F32(1e-4)).astype(np.float64)
    mantissa, exponent = np.frexp(floored / 448)
    exact = np.where(mantissa == 0.5, exponent - 1, exponent) + 127
    expected = np.where(np.isinf(amax), 254, exact)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(reciprocals.numpy()[: amax.size], np.ldexp(1.0, 127 - expected).astype(F32))
    assert actual.min() == 105


def test_page_rows_of_worked_examples() -> None:
    @triton.jit
    def rows(tokens, target, block_m, page, SIZE: tl.constexpr):
        offsets = tl.arange(0, SIZE)
        tl.store(target + offsets, numerics.page_row(tl.load(tokens + offsets), block_m, page))

    tokens = torch.tensor(
        [0, 10, 15, 16, 31, 32, 63, 64, 96, 100, 127, 128, 192, 193, 239, 240], dtype=torch.int32
    )
    expected = {
        16: [0, 40, 60, 128, 188, 256, 444, 512, 768, 784, 956, 1024, 1536, 1540, 1852, 1920],
        64: [0, 40, 60, 64, 124, 1, 125, 128, 129, 145, 253, 256, 384, 388, 445, 449],
        128: [0, 40, 60, 64, 124, 1, 125, 2, 3, 19, 127, 128, 130, 134, 191, 195],
        192: [0, 40, 60, 64, 124, 1, 125, 2, 3, 19, 127, 128, 256, 260, 317, 321],
        240: [0, 40, 60, 64, 124, 1, 125, 2, 3, 19, 127, 128, 130, 134, 191, 256],
    }
    for block_m, wanted in expected.items():
        target = torch.zeros(16, dtype=torch.int64)
        interpret(rows, (1,), (tokens, target, block_m, -(-block_m // 128) * 128), {"SIZE": 16})
        assert target.tolist() == wanted
