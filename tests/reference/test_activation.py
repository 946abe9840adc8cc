"""Activations against scalar float32 arithmetic, the exact float32 helpers under them against rationals."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from reference import _float32, _mufu, activation
from reference.activation import ACTIVATION_RECIPES, situ, swiglu

F32 = np.float32


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def floats(generator: torch.Generator, count: int, low: int = 0, high: int = 256) -> Tensor:
    """Random patterns with exponent fields in [low, high)."""
    field = torch.randint(low, high, (count,), generator=generator)
    pattern = field << 23 | torch.randint(0, 1 << 23, (count,), generator=generator)
    sign = torch.randint(0, 2, (count,), generator=generator)
    return (pattern - (sign << 31)).to(torch.int32).view(torch.float32)


SPECIALS = torch.tensor(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, 89.0, -104.0]
)


# --- Exact float32 helpers ---


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to a rational, ties to even, by looking at its neighbours."""
    with np.errstate(over="ignore"):
        guess = F32(float(value))
        candidates = [np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf))]
    distances = [abs(Fraction(float(c)) - value) if np.isfinite(c) else None for c in candidates]
    best = min(d for d in distances if d is not None)
    tied = [c for c, d in zip(candidates, distances, strict=True) if d == best]
    return tied[0] if len(tied) == 1 else next(c for c in tied if int(c.view(np.uint32)) % 2 == 0)


def test_fma_rounds_once(generator: torch.Generator) -> None:
    a, b, c = (floats(generator, 4000, 97, 157) for _ in range(3))
    c[:2000] = -(a * b)[:2000] * (
        1 + floats(generator, 2000, 97, 110)
    )  # cancelling: double rounding would show
    c[2000:3000] = (a * b)[2000:3000] * 2.0**24 * (1 + torch.rand(1000, generator=generator))
    actual = _float32.fma(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), actual.numpy(), strict=True):
        assert r == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


def test_fma_where_two_roundings_go_wrong() -> None:
    """1 + 2^-24 + 2^-60 is just above a tie: through float64 it would round to even, down to 1."""
    one = torch.ones(1)
    assert _float32.fma(one, 1.0 + 2.0**-23, torch.full((1,), 2.0**-60)).item() == 1.0 + 2.0**-23
    a = torch.tensor([1.0 + 2.0**-12])  # a * a = 1 + 2^-11 + 2^-24, a tie, decided by the addend
    assert _float32.fma(a, a, torch.tensor([2.0**-70])).item() == 1.0 + 2.0**-11 + 2.0**-23
    assert _float32.fma(a, a, torch.tensor([-(2.0**-70)])).item() == 1.0 + 2.0**-11
    assert _float32.fma(-a, a, torch.tensor([-(2.0**-70)])).item() == -(1.0 + 2.0**-11 + 2.0**-23)


def test_fma_specials() -> None:
    inf, nan = torch.tensor([math.inf]), torch.tensor([math.nan])
    assert _float32.fma(inf, 1.0, 1.0).item() == math.inf
    assert math.isnan(_float32.fma(inf, 1.0, -math.inf).item())
    assert math.isnan(_float32.fma(nan, 1.0, 1.0).item())
    assert _float32.fma(torch.tensor([3e38]), 2.0, 0.0).item() == math.inf


def test_round_to_bf16_for_all_upper_halves(generator: torch.Generator) -> None:
    upper = torch.arange(1 << 16)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        pattern = upper << 16 | lower
        values = (
            torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
        )
        with np.errstate(invalid="ignore"):
            expected = values.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(_float32.round_to_bf16(values).numpy(), expected)


# --- The multifunction unit ---

# sha256 of an H200's results for all 2^23 fractions (hardware/measure_functions.py), by exponent field.
RECORDED_BINADES = {
    ("rcp", 127): "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55",
    ("rsqrt", 127): "c733e1437c713cd7e87f4c7e52e9aab270b2107f274cda35309dc8586ad6ec22",
    ("rsqrt", 128): "fd7b866f4085a9e88ef6abdd9ba2726eb26708fb17d173619dac4405acb06bc0",
    ("ex2", 127): "cce5df10202dbfcde720ca547d147edb3e2a406a5fed189323f419177a72a1a5",
}


def sha256(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("name", "field"), sorted(RECORDED_BINADES))
def test_every_fraction_as_recorded(name: str, field: int) -> None:
    values = (torch.arange(1 << 23, dtype=torch.int32) + (field << 23)).view(torch.float32)
    assert sha256(getattr(_mufu, name)(values)) == RECORDED_BINADES[name, field]


def test_reciprocal_scales_with_the_exponent(generator: torch.Generator) -> None:
    fraction = torch.randint(0, 1 << 23, (5000,), generator=generator)
    one = _mufu.rcp((fraction | 127 << 23).to(torch.int32).view(torch.float32))
    for field in (1, 2, 100, 200, 252, 253, 254):
        result = _mufu.rcp((fraction | field << 23).to(torch.int32).view(torch.float32))
        exact = one.double() * 2.0 ** (127 - field)
        assert torch.equal(result.double(), torch.where(exact < 2.0**-126, 0.0, exact))


def test_ex2_takes_the_complement_of_a_negative_fraction(generator: torch.Generator) -> None:
    """2^-x is 2^(1-x) / 2 with one unit of the fixed-point fraction less; whole numbers are exact."""
    fraction = torch.randint(1, 1 << 23, (5000,), generator=generator)
    x = fraction.double() * 2.0**-23
    below = _mufu.ex2(-x.float())
    assert torch.equal(below * 2, _mufu.ex2((1 - x - 2.0**-23).float()))
    whole = torch.arange(-126, 128)
    assert torch.equal(_mufu.ex2(whole.float()).double(), 2.0 ** whole.double())
    assert _mufu.ex2(torch.tensor([-126.5, -127.0, 128.0, 1e30, -1e30])).tolist() == [
        0.0,
        0.0,
        math.inf,
        math.inf,
        0.0,
    ]


# --- Functions built on the approximate ones ---

# sha256 of an H200's results for 2^20 patterns over all signs and exponents (hardware/check_functions.py,
# which found the models equal for all 2^32).
RECORDED_SAMPLES = {
    "ex2_approx_ftz": "8dbdde92e68b3ffa77baf9c724eec6902a7e75ed5f1974164d7590aad2881cf9",
    "ex2_approx": "5c4239291136e986a311491165be05fa9cddff3b8b254a037d29b1c5cb2671cb",
    "rcp_approx_ftz": "ae91cba0840cfca0a3ee8e92eb159be958e88fb0e357228014677941991bff7f",
    "rcp_approx": "63af63933e075593d2a831d3bf01335d3668a54abfadda2b72057007ce936299",
    "rsqrt_approx_ftz": "80ad8074b7ad7124cd778222907adb0767473f9639a8c6a68ed91f8eee399421",
    "rsqrt_approx": "00d5c45d979dcf16f2d58140a813f08f929140f4cd798613d4633daa6eb011f3",
    "rsqrtf": "00d5c45d979dcf16f2d58140a813f08f929140f4cd798613d4633daa6eb011f3",
    "expf": "8deff51c4a8cc6ff9422a74c09f435b0cfe78b42b517dac1819613ff756762cb",
    "fast_expf": "6999d1b9db47d86fb41092b1ade0eb0927889a06281160fa4ed51e3363a78ada",
    "silu": "a4850f7bd2a1928893c495bea16fc9fd722abf971877018c84d3aa8917401f26",
    "silu_fast": "565ed0160a4ce29c5a2bec1a2cccf3b32112efb83e0f1580e6177fdf09ee00fd",
}
FUNCTIONS = {
    "rsqrt_approx": activation.cuda_rsqrtf,
    "rsqrtf": activation.cuda_rsqrtf,
    "expf": activation.cuda_expf,
    "silu": lambda x: swiglu(x, torch.ones_like(x), fast_math=False),
    "silu_fast": lambda x: swiglu(x, torch.ones_like(x), fast_math=True),
}


@pytest.mark.parametrize("name", sorted(RECORDED_SAMPLES))
def test_all_exponents_as_recorded(name: str) -> None:
    pattern = torch.arange(1 << 20) * 4096 + 1234
    values = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
    function = FUNCTIONS.get(name) or getattr(activation, name)
    assert sha256(function(values)) == RECORDED_SAMPLES[name]


@pytest.mark.parametrize(
    ("name", "exact", "low", "high", "ulps"),
    [
        ("ex2_approx_ftz", np.exp2, 90, 133, 2),
        ("ex2_approx", np.exp2, 90, 134, 3),
        ("rcp_approx_ftz", np.reciprocal, 1, 253, 1),
        ("rcp_approx", np.reciprocal, 0, 255, 1),
        ("rsqrt_approx_ftz", lambda x: 1 / np.sqrt(np.abs(x)), 1, 255, 2),
        ("cuda_rsqrtf", lambda x: 1 / np.sqrt(np.abs(x)), 0, 255, 2),
        ("cuda_expf", np.exp, 90, 134, 2),
        ("fast_expf", np.exp, 90, 125, 3),
    ],
)
def test_documented_error_bounds(
    name, exact, low: int, high: int, ulps: int, generator: torch.Generator
) -> None:
    """The CUDA guide's error bounds hold for the models; results may be subnormal."""
    x = floats(generator, 200000, low, high)
    if "rsqrt" in name:
        x = x.abs()
    actual = getattr(activation, name)(x)
    with np.errstate(over="ignore", divide="ignore"):
        expected = torch.from_numpy(exact(x.numpy().astype(np.float64)).astype(np.float32))
    if "ftz" in name:
        expected = torch.where(expected.abs() < 2.0**-126, 0 * expected, expected)
    distance = (bits(actual).long() - bits(expected).long()).abs()
    assert int(distance.max()) <= ulps


@pytest.mark.parametrize(
    "name", [n for n in activation.__all__ if n not in {"swiglu", "situ"} and n[0].islower()]
)
def test_specials_of_functions(name: str) -> None:
    """NaN is canonical; zero, Inf and subnormals behave as IEEE or flush."""
    result = getattr(activation, name)(SPECIALS)
    assert bits(result)[4].item() == 0x7FFFFFFF
    zero, minus_zero, inf, minus_inf = result[:4].tolist()
    if "exp" in name or "ex2" in name:
        assert (zero, minus_zero, inf, minus_inf) == (1.0, 1.0, math.inf, 0.0)
        assert math.copysign(1, minus_inf) == 1
        assert result[5:7].tolist() == [1.0, 1.0]
    elif "rcp" in name:
        assert (zero, minus_zero, inf) == (math.inf, -math.inf, 0.0)
        assert math.copysign(1, minus_inf) == -1
    else:
        assert (zero, minus_zero, inf) == (math.inf, -math.inf, 0.0)
        assert bits(result)[3].item() == 0x7FFFFFFF


def test_functions_take_float32_only() -> None:
    for name in ("ex2_approx_ftz", "rcp_approx", "cuda_expf", "fast_expf", "cuda_rsqrtf"):
        with pytest.raises(TypeError, match=r"^values: "):
            getattr(activation, name)(torch.zeros(2, dtype=torch.float64))


# --- SwiGLU and SiTU against scalar float32 ---


def through(function, value: np.float32) -> np.float32:
    return F32(function(torch.tensor([value]))[0].item())


def bf16(value: np.float32) -> np.float32:
    return F32(ml_dtypes.bfloat16(value))


def scalar_sigmoid(z: np.float32, fast: bool) -> np.float32:
    if fast:
        d = F32(1) + through(activation.ex2_approx, (-z) * F32(1.4426950408889634))
        return through(activation.rcp_approx_ftz, d)
    return F32(1) / (F32(1) + through(activation.cuda_expf, -z))


def scalar_swiglu(g, u, recipe: str, clamp, alpha: float, beta: float, fast: bool, step: bool) -> np.float32:
    """NUMERICS 8.2 in numpy float32, one operation a line."""
    if recipe != "sm90":
        g, u = bf16(g), bf16(u)
    if clamp is not None:
        bound = F32(clamp) if recipe == "sm90" else bf16(F32(clamp))
        if not step:
            g = bound if np.isnan(g) or g > bound else g
        if np.isnan(u):
            u = bound if recipe == "sm90" else -bound
        u = bound if u > bound else -bound if u < -bound else u
    z = g if alpha == 1 else F32(alpha) * g
    if fast or recipe != "sm100":
        a = g * scalar_sigmoid(z, fast)
    else:
        a = g / (F32(1) + through(activation.cuda_expf, -z))
    if step and clamp is not None:
        a = F32(clamp) if np.isnan(a) or a > F32(clamp) else a
    if beta != 0:
        u = u + F32(beta)
    return a * u


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("recipe", sorted(ACTIVATION_RECIPES))
@pytest.mark.parametrize(
    ("clamp", "alpha", "beta", "step"),
    [
        (0.0, 1.0, 0.0, False),
        (None, 1.0, 0.0, False),
        (7.3, 1.0, 0.0, False),
        (7.0, 1.702, 1.0, False),
        (1.23, 1.0, 0.0, True),
        (2.5, 0.7, -0.3, True),
    ],
)
def test_swiglu_against_scalar(
    clamp, alpha, beta, step, recipe: str, fast: bool, generator: torch.Generator
) -> None:
    g = torch.cat([floats(generator, 150, 118, 134), SPECIALS, SPECIALS, SPECIALS])
    u = torch.cat([floats(generator, 150, 118, 134), SPECIALS, SPECIALS.roll(1), SPECIALS.roll(4)])
    actual = swiglu(g, u, clamp=clamp, alpha=alpha, beta=beta, fast_math=fast, step=step, recipe=recipe)
    with np.errstate(all="ignore"):
        for x, y, r in zip(g.numpy(), u.numpy(), actual.numpy(), strict=True):
            expected = scalar_swiglu(x, y, recipe, clamp, alpha, beta, fast, step)
            same = int(expected.view(np.uint32)) if not np.isnan(expected) else 0x7FFFFFFF
            assert same == int(r.view(np.uint32)), (x, y)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("beta", [0.0, 25.0])
def test_situ_against_scalar(beta: float, fast: bool, generator: torch.Generator) -> None:
    g, u = floats(generator, 150, 118, 132), floats(generator, 150, 118, 132)
    actual = situ(g, u, alpha=4.0, beta=beta, fast_math=fast)

    def tanh(v: np.float32, scale: float) -> np.float32:
        inner = F32(2) * (v * (F32(1) / F32(scale)))
        return (F32(2) * scalar_sigmoid(inner, fast) - F32(1)) * F32(scale)

    with np.errstate(all="ignore"):
        for x, y, r in zip(g.numpy(), u.numpy(), actual.numpy(), strict=True):
            x, y = bf16(x), bf16(y)  # noqa: PLW2901
            a = tanh(x, 4.0) * scalar_sigmoid(x, fast)
            assert a * (tanh(y, beta) if beta else y) == r


def test_nan_under_a_clamp() -> None:
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    assert swiglu(one, nan, clamp=3.0, fast_math=False, recipe="sm90").item() > 0  # the upper bound
    assert swiglu(one, nan, clamp=3.0, fast_math=False, recipe="sm100").item() < 0  # the lower bound
    assert swiglu(nan, one, clamp=3.0, fast_math=False).item() == swiglu(3 * one, one, fast_math=False).item()
    assert bits(swiglu(nan, one, fast_math=True)).item() == 0x7FFFFFFF


def test_no_clamp_is_infinite_clamp(generator: torch.Generator) -> None:
    g, u = floats(generator, 500), floats(generator, 500)
    for fast in (False, True):
        same = swiglu(g, u, clamp=None, fast_math=fast), swiglu(g, u, clamp=math.inf, fast_math=fast)
        assert torch.equal(bits(same[0]), bits(same[1]))


def test_recipes_differ_in_the_last_bit(generator: torch.Generator) -> None:
    """Dividing and multiplying by the reciprocal are two activations, as are exact and fast exponentials."""
    g, u = (_float32.round_to_bf16(torch.randn(20000, generator=generator)) for _ in range(2))
    results = [swiglu(g, u, fast_math=False, recipe=r) for r in ("sm100", "sm100_sgl")] + [
        swiglu(g, u, fast_math=True)
    ]
    for i in range(3):
        for j in range(i):
            assert 0.02 < (bits(results[i]) != bits(results[j])).float().mean() < 0.9


@pytest.mark.parametrize(
    ("error", "argument", "call"),
    [
        (TypeError, "gate", lambda x: swiglu(x.double(), x, fast_math=True)),
        (TypeError, "up", lambda x: swiglu(x, x.bfloat16(), fast_math=True)),
        (ValueError, "up", lambda x: swiglu(x, x[:2], fast_math=True)),
        (ValueError, "clamp", lambda x: swiglu(x, x, clamp=-1.0, fast_math=True)),
        (ValueError, "clamp", lambda x: swiglu(x, x, clamp=math.nan, fast_math=True)),
        (ValueError, "recipe", lambda x: swiglu(x, x, fast_math=True, recipe="sm80")),
        (ValueError, "alpha", lambda x: situ(x, x, alpha=0.0, fast_math=True)),
    ],
)
def test_bad_arguments_are_named(error: type[Exception], argument: str, call) -> None:
    with pytest.raises(error, match=f"^{argument}: "):
        call(torch.zeros(3))
