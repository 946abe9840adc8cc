"""Patterns that need neither a layout nor a replay: value maps, and patterns read off the differing units.

Value maps are steps like any other (they predict every unit). A ``Given`` is a whole predicted memory; where it was read
off the differences it is right by construction there, so it must explain many of them and say little else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.explain.fit import Fit, Step, measure
from megamoe.explain.subject import Subject

_FP8 = ("e4m3fn", "ue4m3")


@dataclass(frozen=True)
class Given:
    """predicted: units of the whole memory, with what is known of them. by_construction: copied from the actual side where
    the pattern holds, so only the number of explained differences speaks for it."""

    cause: str
    detail: str
    cost: int
    predicted: Tensor
    known: Tensor | None = None
    by_construction: bool = False
    min_hits: int = 4
    grain: int = 1  # units that one wrong byte spoils together
    doubts: tuple[str, ...] = ()

    def fit(self, subject: Subject) -> Fit:
        known = torch.ones_like(subject.different) if self.known is None else self.known
        if subject.compared is not None:
            known = known & subject.compared
        fit = measure(self.predicted, known, subject.expected, subject.actual)
        return replace(fit, unit_bytes=fit.unit_bytes * self.grain)


def value_steps(subject: Subject) -> Iterator[Step]:
    """Maps from code to code, applied to every unit."""
    if subject.role == "scale" and subject.unit_bits == 8:
        yield Step("scale_plus_one", "every scale", 1, value=lambda u: u + 1)
        doubts = ("scale_rounding_floor",) if subject.code == "ue8m0" else ()
        yield Step("scale_minus_one", "every scale", 1, value=lambda u: u - 1, doubts=doubts)
    if subject.role == "scale" and subject.code == "float32":
        yield Step("scale_plus_one", "every scale doubled", 1, value=lambda u: u + (1 << 23))
        yield Step("scale_minus_one", "every scale halved", 1, value=lambda u: u - (1 << 23))
    if subject.role in ("payload", "values") and subject.code in (
        "e4m3fn",
        "e2m1",
        "bfloat16",
        "float16",
        "float32",
    ):
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


def given_patterns(subject: Subject) -> Iterator[Given]:
    """Patterns read off the differences, most specific first."""
    for make in (
        _earlier,
        _unwritten,
        _id_width,
        _looks_like_fp32,
        _padding,
        _duplicate_experts,
        _some_units,
    ):
        yield from make(subject)


def _some_units(subject: Subject) -> Iterator[Given]:
    """A value map that only some of the units that it could change underwent."""
    expected, actual = subject.expected[subject.positions], subject.actual[subject.positions]
    if subject.role == "scale" and subject.unit_bits == 8:
        step = actual.to(torch.int16) - expected.to(torch.int16)
        up, down = _DOUBTS.get(subject.code, ((), ()))
        yield from _where(subject, step == 1, "scale_plus_one", "some scales", doubts=up)
        yield from _where(subject, step == -1, "scale_minus_one", "some scales", doubts=down)
        if subject.code in _FP8:
            yield from _where(subject, step == 8, "scale_plus_one", "some scales doubled")
            yield from _where(subject, step == -8, "scale_minus_one", "some scales halved")
    if subject.role == "scale" and subject.code == "float32":
        step = actual.to(torch.int64) - expected.to(torch.int64)
        yield from _where(subject, step == 1 << 23, "scale_plus_one", "some scales doubled", 2.0**-31)
        yield from _where(subject, step == -(1 << 23), "scale_minus_one", "some scales halved", 2.0**-31)
    if subject.role in ("payload", "values") and subject.code in (
        "e4m3fn",
        "e2m1",
        "bfloat16",
        "float16",
        "float32",
    ):
        sign = _sign(subject)
        chance = 1 / 15 if subject.unit_bits == 4 else 1 / 255
        kept, dropped = (expected == 0) & (actual == sign), (expected == sign) & (actual == 0)
        yield from _where(subject, kept, "negative_zero", "zeros that keep a sign", chance)
        yield from _where(subject, dropped, "negative_zero", "some zeros that lost their sign", chance)
        magnitude, other = _magnitude(subject, expected), _magnitude(subject, actual)
        flushed = (magnitude > 0) & (magnitude < _smallest_normal(subject)) & (other == 0)
        yield from _where(subject, flushed, "flush_to_zero", "some subnormals became zero", chance)
    if subject.code == "e4m3fn" and subject.role == "payload":
        became_nan = ((expected & 0x7F) == 0x7E) & ((actual & 0x7F) == 0x7F)
        yield from _where(subject, became_nan, "overflow_nan", "448 became NaN")


# What else makes some scales one code larger, or smaller, where no arithmetic was replayed.
_ROUNDED = ("division_instead_of_reciprocal", "ties_away")
_DOUBTS = {
    "ue8m0": (("scale_rounding_log2",), ("scale_rounding_floor", "scale_rounding_nearest")),
    "ue4m3": (_ROUNDED, _ROUNDED),
}


def _where(
    subject: Subject,
    matches: Tensor,
    cause: str,
    detail: str,
    chance: float = 1 / 255,
    doubts: tuple[str, ...] = (),
) -> Iterator[Given]:
    hits = int(matches.sum())
    # As many as random differences would match say nothing.
    if hits < 3 + 4 * chance * matches.numel() or hits < 0.05 * matches.numel():
        return
    predicted = subject.expected.clone()
    places = subject.positions[matches]
    predicted[places] = subject.actual[places]
    yield Given(cause, detail, 4, predicted, by_construction=True, min_hits=3, doubts=doubts)


def _earlier(subject: Subject) -> Iterator[Given]:
    if subject.before is not None and subject.before.numel() == subject.expected.numel():
        yield from _regions(
            subject, subject.before, "unwritten", "it holds what the buffer held before the call"
        )
    for label, units in subject.earlier.items():
        if units.numel() == subject.expected.numel() and units.dtype == subject.expected.dtype:
            yield from _regions(subject, units, "stale", f"it holds {label}")


def _unwritten(subject: Subject) -> Iterator[Given]:
    """Complete rows, tiles or stretches of one repeated byte pattern."""
    for inside in _region_masks(subject):
        fill = _repeated(subject, inside)
        if fill is None or int((inside & subject.different).sum()) < 8:
            continue
        predicted = torch.where(inside, fill, subject.expected)
        agree = float((subject.actual[inside] == predicted[inside]).float().mean())
        if agree > 0.98:
            first = predicted[inside][: max(1, 32 // max(subject.unit_bits, 4))]
            yield Given(
                "unwritten", f"it holds {_hex(first, subject.unit_bits)} throughout", 3, predicted, min_hits=8
            )
            return


def _regions(subject: Subject, held: Tensor, cause: str, detail: str) -> Iterator[Given]:
    same = subject.actual[subject.positions] == held[subject.positions]
    if int(same.sum()) >= 8 and float(same.float().mean()) > 0.5:
        for inside in _region_masks(subject):
            predicted = torch.where(inside, held, subject.expected)
            if float((subject.actual[inside] == held[inside]).float().mean()) > 0.98:
                yield Given(cause, detail, 2, predicted, min_hits=8)
                return
        if float(same.float().mean()) > 0.98:
            predicted = subject.expected.clone()
            places = subject.positions[same]
            predicted[places] = held[places]
            yield Given(cause, detail, 3, predicted, by_construction=True, min_hits=8)


def _region_masks(subject: Subject) -> Iterator[Tensor]:
    """bool per unit: the box that the differences span along the memory's dimensions, then the stretch they span."""
    number = subject.expected.numel()
    places = subject.positions
    sample = places if places.numel() <= 1 << 20 else places[:: places.numel() // (1 << 20)]
    if sample.numel() == 0:
        return
    box = torch.ones(number, dtype=torch.bool)
    outer = number
    for dim in subject.dims:
        index = sample // dim.stride % dim.room
        counts = torch.bincount(index, minlength=dim.room)
        hit = counts >= max(
            1.0, 0.2 * float(counts[counts > 0].float().quantile(0.9)) if counts.numel() < 1 << 20 else 1.0
        )
        if bool(hit.all()):
            continue
        repeats = max(1, -(-outer // (dim.stride * dim.room)))
        pattern = hit.repeat_interleave(dim.stride).repeat(repeats)
        box &= (
            pattern[:number]
            if pattern.numel() >= number
            else torch.nn.functional.pad(pattern, (0, number - pattern.numel()))
        )
    if bool(box.any()):
        yield box
    stretch = torch.zeros(number, dtype=torch.bool)
    stretch[int(places[0]) : int(places[-1]) + 1] = True
    yield stretch


def _repeated(subject: Subject, inside: Tensor) -> Tensor | None:
    """The actual units of a region continued over the whole memory, if they repeat with a period of 1, 2, 4 or 8 units."""
    places = inside.nonzero().reshape(-1)
    units = subject.actual[places]
    if units.numel() < 8:
        return None
    for period in (1, 2, 4, 8):
        values = torch.zeros(period, dtype=units.dtype)
        agree = 0
        for phase in range(period):
            chosen = units[places % period == phase]
            if chosen.numel():
                values[phase] = torch.mode(chosen[:65536]).values
                agree += int((chosen == values[phase]).sum())
        if agree >= 0.98 * units.numel():
            return values.repeat(-(-subject.expected.numel() // period))[: subject.expected.numel()]
    return None


def _hex(units: Tensor, bits: int) -> str:
    digits = max(1, bits // 4)
    mask = (1 << bits) - 1
    shown = [f"{int(unit) & mask:0{digits}x}" for unit in units[:4].tolist()]
    return "0x" + (shown[0] if len(set(shown)) == 1 else " ".join(shown))


def _id_width(subject: Subject) -> Iterator[Given]:
    if subject.role != "ids" or subject.unit_bits != 64:
        return
    low = subject.expected & 0xFFFFFFFF
    high = subject.actual >> 32
    common = int(torch.mode(high).values)
    if common not in (0, -1):
        yield Given("id_width", f"only the lower 32 bits were written; above them is 0x{common & 0xFFFFFFFF:08x}", 2,
                    low | (common << 32))  # fmt: skip
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


def _looks_like_fp32(subject: Subject) -> Iterator[Given]:
    if (
        subject.unit_bits != 8
        or subject.role not in ("scale", "payload", "values")
        or subject.expected.numel() < 32
    ):
        return
    number = subject.expected.numel() // 4
    words = subject.actual[: 4 * number].view(torch.int32)
    exponent = (words >> 23) & 255
    changed = subject.different[: 4 * number].view(-1, 4).any(1)
    if int(changed.sum()) < 8:
        return
    if subject.role == "scale" and subject.code == "ue8m0":
        whole = (words & 0x7FFFFF) != 0
        byte = exponent + whole.to(torch.int32)
        for detail, codes in (
            ("one after another", subject.expected[:number]),
            ("one a word", subject.expected[: 4 * number : 4]),
        ):
            agree = (byte == codes.to(torch.int32)) & (words > 0)
            if int((agree & changed).sum()) >= 0.99 * int(changed.sum()):
                yield _as_read(subject, agree, f"float32 scales, {detail}")
                return
    plausible = (
        (words != 0)
        & (exponent > 87)
        & (exponent < 167)
        & (((words & 0xFFFF) != 0) | (words & 0x7FFFFF != 0))
    )
    expected_words = subject.expected[: 4 * number].view(torch.int32)
    before = (expected_words >> 23) & 255
    usual = float(((before > 87) & (before < 167))[changed].float().mean())
    distinct = exponent[changed].unique().numel()
    different_words = words[changed].unique().numel() > 0.1 * int(changed.sum())
    if float(plausible[changed].float().mean()) > 0.98 and usual < 0.6 and distinct <= 48 and different_words:
        yield _as_read(subject, plausible, "every four bytes are a float32 of ordinary magnitude")


def _as_read(subject: Subject, words: Tensor, detail: str) -> Given:
    inside = torch.zeros_like(subject.different)
    inside[: 4 * words.numel()] = words.repeat_interleave(4)
    predicted = torch.where(inside, subject.actual, subject.expected)
    return Given("bytes_look_like_fp32", detail, 2, predicted, by_construction=True, min_hits=16, grain=4)


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
    if share > 0.95 and values.numel() >= min(2, width):
        name = int(common) if subject.role == "ids" else float(common.reshape(1).view(torch.float32))
        yield from _sentinel(
            subject,
            here & (actual == common),
            "padding_sentinel",
            f"{name} instead of {'-1' if masked else '0.0'}",
        )
    elif values.unique().numel() > 1:
        yield from _sentinel(subject, here, "padding_not_masked", "padding tokens kept theirs")


def _sentinel(subject: Subject, matches: Tensor, cause: str, detail: str) -> Iterator[Given]:
    predicted = subject.expected.clone()
    places = subject.positions[matches]
    predicted[places] = subject.actual[places]
    yield Given(cause, detail, 3, predicted, by_construction=True, min_hits=1)


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
