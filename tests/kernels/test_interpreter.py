"""The interpreter's canaries and the operations that replace what is wrong."""

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from megamoe.kernels import interpreter
from megamoe.kernels.interpreter import failing_canaries, interpret

# What the interpreter of this Triton gets wrong. When a release fixes an operation, its canary passes and
# this table disagrees: remove the entry, and, once the oldest supported Triton is past it, the repair.
KNOWN_WRONG = {
    "float32 to float8e4nv": lambda version: True,
    "float32 to bfloat16": lambda version: True,
    "bfloat16 to float32": lambda version: True,
    "float8e4nv to float32": lambda version: False,
    "float32 fma": lambda version: version < (3, 7),
}


def version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.parametrize("canary", interpreter.CANARIES, ids=lambda canary: canary.name.replace(" ", "-"))
def test_canary_says_what_this_triton_gets_wrong(canary: interpreter.Canary) -> None:
    expected = KNOWN_WRONG[canary.name](version())
    assert (canary.name in failing_canaries()) == expected, (
        f"Triton {triton.__version__}: the interpreter's {canary.name} is now "
        f"{'wrong' if canary.name in failing_canaries() else 'right'}; update KNOWN_WRONG and the repairs"
    )


def float32_samples() -> np.ndarray:
    """Every bfloat16, the neighbourhood of every E4M3 and bfloat16 rounding boundary, and random bits."""
    bfloat16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    edges = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2, [448.0, 464.0, 480.0]]).astype(np.float32)
    steps = np.arange(-3, 4, dtype=np.int32)
    near = (edges.view(np.int32)[:, None] + steps).ravel().view(np.float32)
    halfway = (
        (np.arange(1 << 15, dtype=np.uint32) << 16)[:, None] + np.uint32(0x8000) + steps.astype(np.uint32)
    )
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    values = np.concatenate([bfloat16, near, halfway.ravel().view(np.float32), random.view(np.float32)])
    return np.concatenate([values, -values])


def test_float32_to_e4m3_agrees_with_ml_dtypes() -> None:
    values = float32_samples()
    actual = interpreter.float32_to_e4m3(values)
    with np.errstate(all="ignore"):
        clamped = np.clip(values, -448, 448)
        expected = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    expected = np.where(np.isnan(values), 0x7F, expected)
    np.testing.assert_array_equal(actual, expected)


def test_e4m3_to_float32_agrees_with_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    actual = interpreter.e4m3_to_float32(codes)
    np.testing.assert_array_equal(actual, expected)
    assert np.array_equal(np.signbit(actual[~np.isnan(actual)]), np.signbit(expected[~np.isnan(expected)]))


def test_float32_to_bfloat16_agrees_with_torch() -> None:
    values = float32_samples()
    actual = interpreter.float32_to_bfloat16(values)
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    expected = np.where(np.isnan(values), np.uint16(0x7FFF), expected)
    np.testing.assert_array_equal(actual, expected)


def test_bfloat16_to_float32_is_exact() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    actual = interpreter.bfloat16_to_float32(bits).view(np.uint32)
    np.testing.assert_array_equal(actual, bits.astype(np.uint32) << 16)


def test_fma_rounds_once() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.integers(0, 1 << 32, (2, 1 << 17), dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        near = -(x * y) * np.float32(1 + 2.0**-20)  # cancellation, where a second rounding shows
        z = np.where(generator.random(x.shape) < 0.5, near, generator.normal(size=x.shape)).astype(np.float32)
        exact = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)
        expected = exact.astype(np.float32)
        double = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
        # 64 bits of long double hold the sum exactly unless the addends are far apart; there, skip ties.
        trusted = np.isfinite(expected) & (double.astype(np.float32) == expected)
    actual = interpreter.fused_multiply_add(x, y, z)
    assert trusted.sum() > 50_000
    np.testing.assert_array_equal(actual[trusted], expected[trusted])


def test_fma_where_float64_would_round_twice() -> None:
    # x * x = 1 + 2^-11 + 2^-24 lies on a float32 midpoint; z moves it up by less than half a float64 ulp.
    x, z = np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    assert interpreter.fused_multiply_add(x, x, z) == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert interpreter.fused_multiply_add(x, x, -z) == np.float32(1 + 2.0**-11)
    assert interpreter.fused_multiply_add(x, x, np.float32(0)) == np.float32(1 + 2.0**-11)
    assert np.float32(np.float64(x) * np.float64(x) + np.float64(z)) == np.float32(1 + 2.0**-11)


@triton.jit
def _double(value):
    return value + value


@triton.jit
def _kernel(source, target, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    values = tl.load(source + offsets)
    tl.store(target + offsets, _double(values) + tl.max(values, axis=0))


def test_jitted_functions_run_under_the_interpreter_in_this_process() -> None:
    source, target = torch.arange(16, dtype=torch.float32), torch.zeros(16)
    interpret(_kernel, (1,), (source, target), {"SIZE": 16})
    assert torch.equal(target, 2 * source + 15)


def test_nothing_stays_patched() -> None:
    load, maximum = tl.load, tl.max
    source, target = torch.zeros(16), torch.zeros(16)
    interpret(_kernel, (1,), (source, target), {"SIZE": 16})
    assert tl.load is load
    assert tl.max is maximum
    with pytest.raises(RuntimeError):
        _double(1)
    with pytest.raises(Exception):  # noqa: B017 (whatever the interpreter raises)
        interpret(_kernel, (1,), (source, None), {"SIZE": 16})
    assert tl.load is load
