"""What an explanation consists of: findings, most likely first, and the report that holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from megamoe.explain.causes import CAUSES
from megamoe.explain.subject import Subject, spread
from megamoe.explain.variants import Intermediates
from megamoe.explain.where import place_words

Confidence = Literal["unique", "ambiguous", "unknown"]


@dataclass(frozen=True)
class Example:
    """One differing unit. at: logical coordinates in words. value: decoded. scale, unrounded: where a replay
    knows them.
    """

    at: str
    byte: int
    expected: str
    expected_value: float | int
    actual: str
    actual_value: float | int
    scale: float | None = None
    unrounded: float | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "at": self.at,
            "byte": self.byte,
            "expected": {"hex": self.expected, "value": _plain(self.expected_value)},
            "actual": {"hex": self.actual, "value": _plain(self.actual_value)},
        }
        if self.scale is not None:
            found["scale"] = _plain(self.scale)
        if self.unrounded is not None:
            found["unrounded"] = _plain(self.unrounded)
        return found

    def __str__(self) -> str:
        text = f"{self.at}: expected {self.expected} ({self.expected_value:g})"
        text += f", actual {self.actual} ({self.actual_value:g})"
        if self.scale is not None:
            text += f"; scale {self.scale:.9g}"
        if self.unrounded is not None:
            text += f"; before rounding {self.unrounded:.9g}"
        return text


@dataclass(frozen=True)
class Finding:
    """One cause in one output. count of total units differ. where: in words. detail: of the cause. residue:
    units that the cause does not explain. decide: what would settle an ambiguity. unit: what is counted."""

    output: str
    cause: str
    confidence: Confidence
    alternatives: tuple[str, ...]
    count: int
    total: int
    where: str
    examples: tuple[Example, ...]
    detail: str = ""
    residue: int = 0
    decide: str = ""
    unit: str = "bytes"
    case: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "cause": self.cause,
            "confidence": self.confidence,
            "alternatives": list(self.alternatives),
            "count": self.count,
            "total": self.total,
            "where": self.where,
            "examples": [example.to_json() for example in self.examples],
        }

    @property
    def meaning(self) -> str:
        return CAUSES[self.cause].meaning


@dataclass(frozen=True)
class Report:
    """findings: most likely first, of all outputs and cases. compared: output -> units compared. notes: what
    a reader should know of how it was compared. subjects: for drawings. replay: one command."""

    findings: tuple[Finding, ...]
    compared: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    title: str = ""
    replay: str = ""
    subjects: tuple[Subject, ...] = field(default=(), repr=False)

    @property
    def equal(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal, "findings": [finding.to_json() for finding in self.findings]}

    def text(self, max_lines: int = 25) -> str:
        from megamoe.explain.message import render

        return render(self, max_lines)

    def html(self) -> str:
        from megamoe.explain.page import render

        return render(self)

    def __str__(self) -> str:
        return self.text()


def _plain(value: float) -> float | int | str:
    """JSON has no NaN and no infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode_unit(subject: Subject, unit: int) -> float | int:
    """The value of one unit in the subject's format."""
    from reference import formats

    code = subject.code
    if code in formats.FORMATS:
        return float(formats.decode(torch.tensor([unit], dtype=torch.uint8), code)[0])
    kinds = {
        "bfloat16": (torch.int16, torch.bfloat16),
        "float16": (torch.int16, torch.float16),
        "float32": (torch.int32, torch.float32),
        "float64": (torch.int64, torch.float64),
    }
    if code in kinds:
        integer, real = kinds[code]
        return float(torch.tensor([unit], dtype=integer).view(real)[0])
    return unit


def examples_of(
    subject: Subject, positions: Tensor, intermediates: Intermediates | None, number: int = 5
) -> tuple[Example, ...]:
    """Some differing units, the first and the last among them."""
    if positions.numel() > number:
        positions = positions[spread(positions.numel(), number)]
    return tuple(_example(subject, int(position), intermediates) for position in positions)


def _example(subject: Subject, position: int, intermediates: Intermediates | None) -> Example:
    expected, actual = int(subject.expected[position]), int(subject.actual[position])
    scale = unrounded = None
    if intermediates is not None:
        scale, unrounded = _before_rounding(subject, position, intermediates)
    return Example(
        place_words(subject, position),
        position * subject.unit_bits // 8,
        hex_unit(expected, subject.unit_bits),
        decode_unit(subject, expected),
        hex_unit(actual, subject.unit_bits),
        decode_unit(subject, actual),
        scale,
        unrounded,
    )


def _before_rounding(
    subject: Subject, position: int, known: Intermediates
) -> tuple[float | None, float | None]:
    place = subject.locate(torch.tensor([position]))
    token, column, group = (
        int(place[name]) if name in place else -1 for name in ("token", "column", "group")
    )
    if token < 0 or token >= known.scaled.shape[0]:
        return None, None
    if subject.role == "payload" and 0 <= column < known.scaled.shape[1]:
        return float(known.scales[token, column // known.group]), float(known.scaled[token, column])
    if subject.role == "scale" and 0 <= group < known.scales.shape[1]:
        return float(known.scales[token, group]), None
    return None, None


def hex_unit(unit: int, bits: int) -> str:
    return f"0x{unit & ((1 << bits) - 1):0{max(1, bits // 4)}x}"
