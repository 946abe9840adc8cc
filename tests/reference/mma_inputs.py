"""Operands and accumulators that bring out every rule of an MMA step, by category, on any device. Not a test module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference._tensor_core_operands import OPERAND_FORMATS, power_of_two

Draw = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _uniform(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def finite_codes(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform over the finite codes of a format, both signs and zeros included (int64)."""
    fmt = OPERAND_FORMATS[name]
    magnitude = _uniform(shape, 0, fmt.max_code + 1, generator)
    return magnitude | _uniform(shape, 0, 2, generator) << (fmt.bits - 1)


def moderate_codes(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Finite codes; for 16-bit formats exponents within 2^-20 to 2^20, so that not every sum is Inf."""
    fmt = OPERAND_FORMATS[name]
    if fmt.bits <= 8:
        return finite_codes(name, shape, generator)
    low, high = max(fmt.bias - 20, 0), min(fmt.bias + 20, fmt.max_code >> fmt.fraction_bits)
    field = _uniform(shape, low, high, generator)
    fraction = _uniform(shape, 0, 1 << fmt.fraction_bits, generator)
    return field << fmt.fraction_bits | fraction | _uniform(shape, 0, 2, generator) << (fmt.bits - 1)


def any_codes(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform over all codes, NaN and Inf included (int64)."""
    return _uniform(shape, 0, 1 << OPERAND_FORMATS[name].bits, generator)


def normal_codes(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal data scaled to the format (eight bits: largest value of a row 448 or so), rounded toward zero."""
    fmt = OPERAND_FORMATS[name]
    values = torch.randn(shape, generator=generator, device=generator.device)
    if fmt.bits <= 8:
        values = values / values.abs().amax(-1, keepdim=True) * fmt.max_value
    exponent = torch.frexp(values)[1] - 1
    field = (exponent + fmt.bias).clamp(min=1)
    fraction = (values.abs().double() * power_of_two(fmt.fraction_bits + fmt.bias - field)).long()
    magnitude = (field - 1 << fmt.fraction_bits) + fraction
    magnitude = magnitude.clamp(0, fmt.max_code)
    return magnitude | (values < 0).long() << (fmt.bits - 1)


def floats(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    """float32 with exponent fields uniform in [low, high), random fractions and signs."""
    pattern = _uniform(shape, low, high, generator) << 23 | _uniform(shape, 0, 1 << 23, generator)
    return (pattern | -_uniform(shape, 0, 2, generator) << 31).to(torch.int32).view(torch.float32)


def _zeros(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, device=generator.device)


def _keep(codes: Tensor, name: str, share: float, generator: torch.Generator) -> Tensor:
    """All but a share of the codes replaced by zeros of either sign."""
    kept = torch.rand(codes.shape, generator=generator, device=codes.device) < share
    zero = _uniform(tuple(codes.shape), 0, 2, generator) << (OPERAND_FORMATS[name].bits - 1)
    return torch.where(kept, codes, zero)


def _edges(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Finite codes whose fraction is all zeros or all ones."""
    fraction = (1 << OPERAND_FORMATS[name].fraction_bits) - 1
    codes = moderate_codes(name, shape, generator)
    ones = torch.where(codes & ~0 | fraction > codes | fraction, codes, codes | fraction)
    picked = torch.where(_uniform(shape, 0, 2, generator) == 0, codes & ~fraction, ones)
    magnitude = picked & ((1 << OPERAND_FORMATS[name].bits - 1) - 1)
    return torch.where(magnitude > OPERAND_FORMATS[name].max_code, codes, picked)


def _cancelling(a: Tensor, b: Tensor, b_name: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Neighbouring products made opposite, except in a few places."""
    even = torch.rand(a[..., ::2].shape, generator=generator, device=a.device) < 0.9
    a, b = a.clone(), b.clone()
    a[..., 1::2] = torch.where(even, a[..., ::2], a[..., 1::2])
    sign = 1 << (OPERAND_FORMATS[b_name].bits - 1)
    b[..., 1::2] = torch.where(
        torch.rand(b[..., ::2].shape, generator=generator, device=b.device) < 0.95,
        b[..., ::2] ^ sign,
        b[..., 1::2],
    )
    return a, b


def draw(
    category: str, a_name: str, b_name: str, batch: int, m: int, n: int, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(a codes [batch, m, k] int64, b codes [batch, n, k] int64, accumulator [batch, m, n] float32)."""
    sa, sb, sc = (batch, m, k), (batch, n, k), (batch, m, n)
    finite = moderate_codes(a_name, sa, generator), moderate_codes(b_name, sb, generator)
    normal = normal_codes(a_name, sa, generator), normal_codes(b_name, sb, generator)
    if category == "normal":
        return *normal, _zeros(sc, generator)
    if category == "normal_accumulator":
        return *normal, floats(sc, 110, 150, generator)
    if category == "uniform":
        return *finite, floats(sc, 100, 160, generator)
    if category == "wide_accumulator":
        return *finite, floats(sc, 0, 255, generator)
    if category == "cancelling":
        return *_cancelling(*normal, b_name, generator), floats(sc, 105, 130, generator)
    if category == "cancelling_uniform":
        return *_cancelling(*finite, b_name, generator), _zeros(sc, generator)
    if category == "sparse":
        a = _keep(finite[0], a_name, 0.2, generator)
        return a, _keep(finite[1], b_name, 0.5, generator), floats(sc, 0, 127, generator)
    if category == "single_product":
        return _keep(finite[0], a_name, 1.5 / k, generator), finite[1], floats(sc, 90, 140, generator)
    if category == "zero_products":
        a = _keep(finite[0], a_name, 0.0, generator)
        return a, finite[1], any_floats(sc, generator)
    if category == "negative_zeros":
        sign_a, sign_b = (1 << (OPERAND_FORMATS[name].bits - 1) for name in (a_name, b_name))
        return torch.full(sa, sign_a, device=generator.device), finite[1] & ~sign_b, -_zeros(sc, generator)
    if category == "subnormal":
        f_a, f_b = (OPERAND_FORMATS[name] for name in (a_name, b_name))
        keep_a = (1 << f_a.fraction_bits) - 1 | 1 << (f_a.bits - 1)
        b = torch.where(
            _uniform(sb, 0, 2, generator) == 0, finite[1] & ((1 << f_b.fraction_bits) - 1), finite[1]
        )
        return finite[0] & keep_a, b, floats(sc, 0, 110, generator)
    if category == "smallest":
        f_a, f_b = (OPERAND_FORMATS[name] for name in (a_name, b_name))
        return (
            finite[0] & ((2 << f_a.fraction_bits) - 1),
            finite[1] & ((2 << f_b.fraction_bits) - 1),
            floats(sc, 0, 3, generator),
        )
    if category == "tiny_products":
        # Products around the smallest float32 numbers: only 16-bit formats and e5m2 get near them.
        return *_tiny(a_name, b_name, sa, sb, generator), floats(sc, 0, 2, generator) * _uniform(
            sc, 0, 2, generator
        )
    if category == "edges":
        return _edges(a_name, sa, generator), _edges(b_name, sb, generator), floats(sc, 115, 150, generator)
    if category == "special_operands":
        sprinkle = 0.3 / k
        chosen = (
            torch.where(
                torch.rand(shape, generator=generator, device=generator.device) < sprinkle,
                any_codes(name, shape, generator),
                codes,
            )
            for name, shape, codes in ((a_name, sa, finite[0]), (b_name, sb, finite[1]))
        )
        return *chosen, floats(sc, 100, 160, generator)
    if category == "special_accumulator":
        return *normal, special_floats(sc, generator)
    if category == "any_bits":
        return any_codes(a_name, sa, generator), any_codes(b_name, sb, generator), any_floats(sc, generator)
    if category == "overflow":
        extreme = finite_codes(a_name, sa, generator), finite_codes(b_name, sb, generator)
        return _keep(extreme[0], a_name, 4 / k, generator), extreme[1], floats(sc, 250, 255, generator)
    raise ValueError(f"category: expected one of {CATEGORIES}, got {category!r}")


CATEGORIES = (
    "normal", "normal_accumulator", "uniform", "wide_accumulator", "cancelling", "cancelling_uniform", "sparse", "single_product",
    "zero_products", "negative_zeros", "subnormal", "smallest", "tiny_products", "edges", "special_operands", "special_accumulator",
    "any_bits", "overflow",
)  # fmt: skip


def _tiny(
    a_name: str, b_name: str, sa: tuple[int, ...], sb: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    out = []
    for name, shape, center in ((a_name, sa, -40), (b_name, sb, -100)):
        fmt = OPERAND_FORMATS[name]
        field = (_uniform(shape, center - 12, center + 13, generator) + fmt.bias).clamp(
            0, (fmt.max_code >> fmt.fraction_bits) - 1
        )
        fraction = _uniform(shape, 0, 1 << fmt.fraction_bits, generator)
        out.append(field << fmt.fraction_bits | fraction | _uniform(shape, 0, 2, generator) << (fmt.bits - 1))
    return out[0], out[1]


def any_floats(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform over all float32 bit patterns."""
    return floats(shape, 0, 256, generator)


def special_floats(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """NaN of several patterns, Inf, zeros, the largest and the smallest numbers, of both signs."""
    patterns = (
        0x7F800000,
        0x7F800001,
        0x7FC00000,
        0x7FFFFFFF,
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x7F7FFFFF,
        0x7F7FFC00,
        0x3F800000,
    )
    table = torch.tensor(patterns, device=generator.device)
    picked = table[_uniform(shape, 0, len(patterns), generator)] | -_uniform(shape, 0, 2, generator) << 31
    return picked.to(torch.int32).view(torch.float32)
