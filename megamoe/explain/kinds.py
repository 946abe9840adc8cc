"""Patterns that need neither a layout nor a replay: value maps, and patterns read off the differing units.

Value maps are steps like any other (they predict every unit). A ``Given`` is a whole predicted memory; where
it was read off the differences it is right by construction there, so it must explain many of them and say
little else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megamoe.explain.fit import Step
from megamoe.explain.given import Given
from megamoe.explain.regions import earlier_patterns, fp32_patterns, unwritten_patterns
from megamoe.explain.subject import FLOAT_CODES, Subject

_FP8 = ("e4m3fn", "ue4m3")
_WITH_ZERO = ("e4m3fn", "e2m1", "bfloat16", "float16", "float32")


Matches = Callable[[Tensor, Tensor], Tensor]


def value_steps(subject: Subject) -> Iterator[Step]:
    """Maps from code to code, applied to every unit."""
    if subject.role == "scale" and subject.unit_bits == 8:
        yield Step("scale_plus_one", "every scale", 1, value=lambda u: u + 1)
        doubts = ("scale_rounding_floor",) if subject.code == "ue8m0" else ()
        yield Step("scale_minus_one", "every scale", 1, value=lambda u: u - 1, doubts=doubts)
    if subject.role == "scale" and subject.code == "float32":
        yield Step("scale_plus_one", "every scale doubled", 1, value=lambda u: u + (1 << 23))
        yield Step("scale_minus_one", "every scale halved", 1, value=lambda u: u - (1 << 23))
    if subject.role in ("payload", "values") and subject.code in FLOAT_CODES:
        zero = _sign(subject)
        yield Step(
            "negative_zero", "the sign of zero is dropped", 1, value=lambda u: torch.where(u == zero, 0, u)
        )
        smallest = _smallest_normal(subject)
        for keep in (True, False):
            sign = "keeping the sign" if keep else "without a sign"
            yield Step(
                "flush_to_zero", f"subnormals become zero, {sign}", 1, value=_flush(subject, smallest, keep)
            )
    if subject.role == "ids" and subject.unit_bits == 64:
        yield Step(
            "id_width", "zero-extended from 32 bits: -1 became 4294967295", 1, value=lambda u: u & 0xFFFFFFFF
        )
        yield Step("id_width", "cut to 32 bits", 1, value=lambda u: u.to(torch.int32).to(torch.int64))


def _sign(subject: Subject) -> int:
    return {4: 8, 8: 0x80, 16: -(1 << 15), 32: -(1 << 31)}[subject.unit_bits]


def _magnitude(subject: Subject, units: Tensor) -> Tensor:
    return units & {4: 7, 8: 0x7F, 16: 0x7FFF, 32: 0x7FFFFFFF}[subject.unit_bits]


def _smallest_normal(subject: Subject) -> int:
    return {"e4m3fn": 8, "e2m1": 2, "bfloat16": 1 << 7, "float16": 1 << 10, "float32": 1 << 23}[subject.code]


def _flush(subject: Subject, smallest: int, keep: bool) -> Callable[[Tensor], Tensor]:
    def value(units: Tensor) -> Tensor:
        magnitude = _magnitude(subject, units)
        tiny = (magnitude > 0) & (magnitude < smallest)
        return torch.where(tiny, units - magnitude if keep else torch.zeros_like(units), units)

    return value


def sure_patterns(subject: Subject) -> Iterator[Given]:
    """Patterns that weigh as much as a named change of layout."""
    for make in (earlier_patterns, _id_width, fp32_patterns):
        yield from make(subject)


def weak_patterns(subject: Subject) -> Iterator[Given]:
    """Patterns that are looked at only where nothing simpler explains the differences."""
    for make in (unwritten_patterns, _padding, _duplicate_experts, _some_units):
        yield from make(subject)


# What else makes some scales one code larger, or smaller, where no arithmetic was replayed.
_ROUNDED = ("division_instead_of_reciprocal", "ties_away")
_DOUBTS = {
    "ue8m0": (("scale_rounding_log2",), ("scale_rounding_floor", "scale_rounding_nearest")),
    "ue4m3": (_ROUNDED, _ROUNDED),
}


def _some_units(subject: Subject) -> Iterator[Given]:
    """A value map that only some of the units that it could change underwent."""
    if subject.role == "scale" and subject.unit_bits == 8:
        up, down = _DOUBTS.get(subject.code, ((), ()))
        yield from _where(subject, _larger_by(1), "scale_plus_one", "some scales", doubts=up)
        yield from _where(subject, _larger_by(-1), "scale_minus_one", "some scales", doubts=down)
        if subject.code in _FP8:
            yield from _where(subject, _larger_by(8), "scale_plus_one", "some scales doubled")
            yield from _where(subject, _larger_by(-8), "scale_minus_one", "some scales halved")
    if subject.role == "scale" and subject.code == "float32":
        yield from _where(subject, _larger_by(1 << 23), "scale_plus_one", "some scales doubled", 2.0**-31)
        yield from _where(subject, _larger_by(-(1 << 23)), "scale_minus_one", "some scales halved", 2.0**-31)
    if subject.role in ("payload", "values") and subject.code in _WITH_ZERO:
        sign, smallest = _sign(subject), _smallest_normal(subject)
        chance = 1 / 15 if subject.unit_bits == 4 else 1 / 255

        def flushed(expected: Tensor, actual: Tensor) -> Tensor:
            magnitude = _magnitude(subject, expected)
            return (magnitude > 0) & (magnitude < smallest) & (_magnitude(subject, actual) == 0)

        kept, lost = _from_to(0, sign), _from_to(sign, 0)
        yield from _where(subject, kept, "negative_zero", "zeros that keep a sign", chance)
        yield from _where(subject, lost, "negative_zero", "some zeros that lost their sign", chance)
        yield from _where(subject, flushed, "flush_to_zero", "some subnormals became zero", chance)
    if subject.code == "e4m3fn" and subject.role == "payload":
        yield from _where(subject, _became_nan, "overflow_nan", "448 became NaN")


def _larger_by(step: int) -> Matches:
    wide = torch.int16 if abs(step) < 256 else torch.int64
    return lambda expected, actual: actual.to(wide) - expected.to(wide) == step


def _from_to(before: int, after: int) -> Matches:
    return lambda expected, actual: (expected == before) & (actual == after)


def _became_nan(expected: Tensor, actual: Tensor) -> Tensor:
    return ((expected & 0x7F) == 0x7E) & ((actual & 0x7F) == 0x7F)


def _where(
    subject: Subject,
    matches: Matches,
    cause: str,
    detail: str,
    chance: float = 1 / 255,
    doubts: tuple[str, ...] = (),
) -> Iterator[Given]:
    places = subject.positions
    hits = int(matches(subject.expected[places], subject.actual[places]).sum())
    # As many as random differences would match say nothing; two do if there are no others.
    enough = 2 if hits == places.numel() else 3 + 4 * chance * places.numel()
    if hits < enough or hits < 0.05 * places.numel():
        return
    inside = subject.different & matches(subject.expected, subject.actual)
    predicted = torch.where(inside, subject.actual, subject.expected)
    yield Given(cause, detail, 4, predicted, by_construction=True, min_hits=2, doubts=doubts)


def _id_width(subject: Subject) -> Iterator[Given]:
    if subject.role != "ids" or subject.unit_bits != 64:
        return
    low = subject.expected & 0xFFFFFFFF
    high = subject.actual >> 32
    common = int(torch.mode(high).values)
    if common not in (0, -1):
        yield Given(
            "id_width",
            f"only the lower 32 bits were written; above them is 0x{common & 0xFFFFFFFF:08x}",
            2,
            low | (common << 32),
        )
    row = subject.dims[-1].size if subject.dims else 1
    for width in {subject.expected.numel(), row}:  # dense over everything, or inside each row
        if width < 2 or subject.expected.numel() % width:
            continue
        rows = low.view(-1, width)
        packed, known = rows.clone(), torch.zeros_like(rows, dtype=torch.bool)
        half = width // 2
        packed[:, :half] = rows[:, 0 : 2 * half : 2] | (rows[:, 1 : 2 * half : 2] << 32)
        known[:, :half] = True
        rest = known.numel() - int(known.sum())
        step = Given("id_width", "32-bit ids in a 64-bit buffer", 2, packed.reshape(-1), known.reshape(-1))
        if rest <= 0.6 * known.numel():
            yield step


def _padding(subject: Subject) -> Iterator[Given]:
    """Padding tokens of routing outputs: another sentinel, or none."""
    if subject.role not in ("ids", "weights") or subject.expected.numel() == 0:
        return
    masked = -1 if subject.role == "ids" else 0
    expected, actual = subject.expected[subject.positions], subject.actual[subject.positions]
    here = expected == masked
    if int(here.sum()) < 1 or int(here.sum()) < 0.5 * here.numel():
        return
    width = subject.dims[-1].size if subject.dims else 1
    tokens = torch.bincount(subject.positions[here] // width).float()
    if float(tokens[tokens > 0].median()) < 0.6 * width:
        return  # whole tokens are masked, not single slots
    values = actual[here]
    common = torch.mode(values).values
    share = float((values == common).float().mean())
    if share > 0.95 and values.numel() >= 2:
        name = int(common) if subject.role == "ids" else float(common.reshape(1).view(torch.float32))
        right = "-1" if masked else "0.0"
        inside = (subject.expected == masked) & (subject.actual == common)
        yield _sentinel(subject, inside, "padding_sentinel", f"{name} instead of {right}")
    elif values.numel() >= 4 and values.unique().numel() > 1:
        yield _sentinel(
            subject, subject.expected == masked, "padding_not_masked", "padding tokens kept theirs"
        )


def _sentinel(subject: Subject, inside: Tensor, cause: str, detail: str) -> Given:
    predicted = torch.where(inside & subject.different, subject.actual, subject.expected)
    return Given(cause, detail, 3, predicted, by_construction=True, min_hits=1)


def _duplicate_experts(subject: Subject) -> Iterator[Given]:
    if subject.role != "ids" or len(subject.dims) != 2 or subject.expected.numel() == 0:
        return
    width = subject.dims[-1].size
    if subject.expected.numel() % width or width < 2:
        return

    def repeated(units: Tensor) -> Tensor:
        order = units.view(-1, width).sort(1).values
        return ((order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)).any(1)

    rows = repeated(subject.actual) & ~repeated(subject.expected)
    changed = subject.different.view(-1, width).any(1)
    if int(rows.sum()) >= 2 and int((rows & changed).sum()) >= 0.8 * int(changed.sum()):
        inside = rows.repeat_interleave(width)
        predicted = torch.where(inside, subject.actual, subject.expected)
        detail = f"{int(rows.sum())} tokens list an expert twice"
        yield Given("duplicate_experts", detail, 4, predicted, by_construction=True, min_hits=2)
