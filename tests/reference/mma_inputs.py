"""Operands and accumulators that bring out every rule of an MMA step, by category, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference._tensor_core_operands import OPERAND_FORMATS, power_of_two


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
    """Normal data scaled to the format (of eight bits: up to its largest value), rounded toward zero."""
    fmt = OPERAND_FORMATS[name]
    values = torch.randn(shape, generator=generator, device=generator.device)
    if fmt.bits <= 8 and values.numel():
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


def _keep(codes: Tensor, name: str, share: float, generator: torch.Generator) -> Tensor:
    """All but a share of the codes replaced by zeros of either sign."""
    kept = torch.rand(codes.shape, generator=generator, device=codes.device) < share
    zero = _uniform(tuple(codes.shape), 0, 2, generator) << (OPERAND_FORMATS[name].bits - 1)
    return torch.where(kept, codes, zero)


def _edges(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Finite codes whose fraction is all zeros or all ones."""
    fmt = OPERAND_FORMATS[name]
    fraction = (1 << fmt.fraction_bits) - 1
    codes = moderate_codes(name, shape, generator)
    picked = torch.where(_uniform(shape, 0, 2, generator) == 0, codes & ~fraction, codes | fraction)
    return torch.where(picked & ((1 << fmt.bits - 1) - 1) > fmt.max_code, codes, picked)


@dataclass(frozen=True)
class _Problem:
    """Formats, shapes and the generator of one draw, with the operands that most categories start from."""

    names: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    out: tuple[int, ...]
    generator: torch.Generator

    def operands(self, draw_codes: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        a, b = (
            draw_codes(name, shape, self.generator)
            for name, shape in zip(self.names, self.shapes, strict=True)
        )
        return a, b

    def floats(self, low: int, high: int) -> Tensor:
        return floats(self.out, low, high, self.generator)

    def zeros(self) -> Tensor:
        return torch.zeros(self.out, device=self.generator.device)

    def keep(self, codes: tuple[Tensor, Tensor], shares: tuple[float, float]) -> tuple[Tensor, Tensor]:
        a, b = (_keep(c, n, s, self.generator) for c, n, s in zip(codes, self.names, shares, strict=True))
        return a, b

    @property
    def k(self) -> int:
        return self.shapes[0][-1]


def _cancelling(p: _Problem, draw_codes: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Neighbouring products made opposite, except in a few places."""
    a, b = p.operands(draw_codes)
    same = torch.rand(a[..., ::2].shape, generator=p.generator, device=a.device) < 0.9
    a[..., 1::2] = torch.where(same, a[..., ::2], a[..., 1::2])
    opposite = torch.rand(b[..., ::2].shape, generator=p.generator, device=b.device) < 0.95
    sign = 1 << (OPERAND_FORMATS[p.names[1]].bits - 1)
    b[..., 1::2] = torch.where(opposite, b[..., ::2] ^ sign, b[..., 1::2])
    return a, b


def _negative_zeros(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    a, b = p.keep(p.operands(moderate_codes), (0.0, 1.0))
    signs = [1 << (OPERAND_FORMATS[name].bits - 1) for name in p.names]
    return a | signs[0], b & ~signs[1], -p.zeros()


def _subnormal(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    a, b = p.operands(moderate_codes)
    formats = [OPERAND_FORMATS[name] for name in p.names]
    a = a & ((1 << formats[0].fraction_bits) - 1 | 1 << (formats[0].bits - 1))
    half = _uniform(p.shapes[1], 0, 2, p.generator) == 0
    return a, torch.where(half, b & ((1 << formats[1].fraction_bits) - 1), b), p.floats(0, 110)


def _smallest(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Subnormal and smallest normal numbers on both sides."""
    a, b = p.operands(moderate_codes)
    masks = [(2 << OPERAND_FORMATS[name].fraction_bits) - 1 for name in p.names]
    return a & masks[0], b & masks[1], p.floats(0, 3)


def _special_operands(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    mixed = []
    for usual, unusual in zip(p.operands(moderate_codes), p.operands(any_codes), strict=True):
        chosen = torch.rand(usual.shape, generator=p.generator, device=usual.device) < 0.3 / max(p.k, 1)
        mixed.append(torch.where(chosen, unusual, usual))
    return mixed[0], mixed[1], p.floats(100, 160)


def _around(p: _Problem, centers: tuple[int, int], width: int) -> tuple[Tensor, Tensor]:
    """Operands with exponents within ``width`` of a center each, clamped to what the format has."""
    out = []
    for name, shape, center in zip(p.names, p.shapes, centers, strict=True):
        fmt = OPERAND_FORMATS[name]
        field = _uniform(shape, center - width, center + width + 1, p.generator) + fmt.bias
        field = field.clamp(0, (fmt.max_code >> fmt.fraction_bits) - 1)
        fraction = _uniform(shape, 0, 1 << fmt.fraction_bits, p.generator)
        out.append(
            field << fmt.fraction_bits | fraction | _uniform(shape, 0, 2, p.generator) << (fmt.bits - 1)
        )
    return out[0], out[1]


def _far_exponents(p: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """All products within a few powers of two of each other, far from 1 where the format gets that far."""
    center = int(torch.randint(0, 4, (1,), generator=p.generator, device=p.generator.device))
    center = (-70, -55, 55, 62)[center]
    low = min(max(127 + 2 * center - 8, 0), 240)
    return *_around(p, (center, center), 3), p.floats(low, low + 14)


CATEGORIES: dict[str, Callable[[_Problem], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": lambda p: (*p.operands(normal_codes), p.zeros()),
    "normal_accumulator": lambda p: (*p.operands(normal_codes), p.floats(110, 150)),
    "uniform": lambda p: (*p.operands(moderate_codes), p.floats(100, 160)),
    "wide_accumulator": lambda p: (*p.operands(moderate_codes), p.floats(0, 255)),
    "cancelling": lambda p: (*_cancelling(p, normal_codes), p.floats(105, 130)),
    "cancelling_uniform": lambda p: (*_cancelling(p, moderate_codes), p.zeros()),
    "sparse": lambda p: (*p.keep(p.operands(moderate_codes), (0.2, 0.5)), p.floats(0, 127)),
    "single_product": lambda p: (
        *p.keep(p.operands(moderate_codes), (1.5 / max(p.k, 1), 1.0)),
        p.floats(90, 140),
    ),
    "zero_products": lambda p: (*p.keep(p.operands(moderate_codes), (0.0, 1.0)), p.floats(0, 256)),
    "negative_zeros": _negative_zeros,
    "subnormal": _subnormal,
    "smallest": _smallest,
    "tiny_products": lambda p: (
        *_around(p, (-40, -100), 12),
        p.floats(0, 2) * _uniform(p.out, 0, 2, p.generator),
    ),
    "far_exponents": _far_exponents,
    "edges": lambda p: (*p.operands(_edges), p.floats(115, 150)),
    "special_operands": _special_operands,
    "special_accumulator": lambda p: (*p.operands(normal_codes), special_floats(p.out, p.generator)),
    "any_bits": lambda p: (*p.operands(any_codes), p.floats(0, 256)),
    "overflow": lambda p: (*p.keep(p.operands(finite_codes), (4 / max(p.k, 1), 1.0)), p.floats(250, 255)),
}


def draw(
    category: str, a_name: str, b_name: str, batch: int, m: int, n: int, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """(a codes [batch, m, k] int64, b codes [batch, n, k] int64, accumulator [batch, m, n] float32)."""
    shapes = ((batch, m, k), (batch, n, k))
    return CATEGORIES[category](_Problem((a_name, b_name), shapes, (batch, m, n), generator))


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
