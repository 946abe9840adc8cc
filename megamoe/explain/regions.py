"""Regions of memory that hold something else throughout: a fill, older contents, other widths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megamoe.explain.given import Given
from megamoe.explain.subject import Subject, count_true, spread

_ENOUGH = 1 << 16  # units that a first look takes


def earlier_patterns(subject: Subject) -> Iterator[Given]:
    """What the buffer held before the call, and what other calls left."""
    if subject.before is not None and subject.before.numel() == subject.expected.numel():
        detail = "it holds what the buffer held before the call"
        yield from _holding(subject, subject.before, "unwritten", detail)
    for label, units in subject.earlier.items():
        if units.numel() == subject.expected.numel() and units.dtype == subject.expected.dtype:
            yield from _holding(subject, units, "stale", f"it holds {label}")


def _holding(subject: Subject, held: Tensor, cause: str, detail: str) -> Iterator[Given]:
    same = (subject.actual[subject.positions] == held[subject.positions]).float().mean()
    if subject.count < 8 or float(same) < 0.5:
        return
    for inside in _region_masks(subject):
        # A region of one value is more likely a fill than what another call left.
        is_telling = cause == "unwritten" or held[inside].unique().numel() > 2
        if is_telling and _agreement(subject, inside, held) > 0.98:
            yield Given(cause, detail, 2, torch.where(inside, held, subject.expected), min_hits=8)
            return
    inside = subject.different & (subject.actual == held)
    if float(same) > 0.98 and (cause == "unwritten" or held[inside].unique().numel() > 2):
        yield Given(
            cause, detail, 3, torch.where(inside, held, subject.expected), by_construction=True, min_hits=8
        )


def unwritten_patterns(subject: Subject) -> Iterator[Given]:
    """Complete rows, tiles or stretches of one repeated pattern of units."""
    if subject.count < 8:
        return
    for period in (1, 2, 4, 8):
        # Before anything of the memory's size is made: do the differing units repeat at all?
        fill = _repeated(subject, subject.positions[spread(subject.positions.numel(), _ENOUGH)], period, 0.5)
        if fill is None:
            continue
        held = fill.repeat(-(-subject.expected.numel() // period))[: subject.expected.numel()]
        for inside in _region_masks(subject):
            if _agreement(subject, inside, held) > 0.98:
                detail = f"it holds {_hex(fill, subject.unit_bits)} throughout"
                enough = max(8, 4 * period)
                yield Given(
                    "unwritten", detail, 3, torch.where(inside, held, subject.expected), min_hits=enough
                )
                return


def _agreement(subject: Subject, inside: Tensor, held: Tensor) -> float:
    total = count_true(inside)
    return count_true((subject.actual == held) & inside) / total if total else 0.0


def _repeated(subject: Subject, places: Tensor, period: int, share: float) -> Tensor | None:
    """The commonest actual unit of every phase, if they make up that share of the units at these places."""
    units = subject.actual[places]
    fill = torch.zeros(period, dtype=units.dtype)
    agree = 0
    for phase in range(period):
        chosen = units[places % period == phase]
        if chosen.numel():
            fill[phase] = torch.mode(chosen).values
            agree += int((chosen == fill[phase]).sum())
    return fill if agree >= share * units.numel() else None


def _region_masks(subject: Subject) -> Iterator[Tensor]:
    """bool per unit: the box that the differences span along the memory's dimensions, then the stretch they
    span.
    """
    number = subject.expected.numel()
    places = subject.positions
    if places.numel() == 0:
        return
    box = torch.ones(number, dtype=torch.bool)
    for dim in subject.dims:
        counts = torch.bincount(places // dim.stride % dim.room, minlength=dim.room)
        typical = float(counts[counts > 0].float().sort().values[int(0.9 * (int((counts > 0).sum()) - 1))])
        hit = counts >= max(1.0, 0.2 * typical)
        if bool(hit.all()):
            continue
        repeats = -(-number // (dim.stride * dim.room))
        box &= hit[None, :, None].expand(repeats, -1, dim.stride).reshape(-1)[:number]
    if bool(box.any()):
        yield box
    stretch = torch.zeros(number, dtype=torch.bool)
    stretch[int(places[0]) : int(places[-1]) + 1] = True
    yield stretch


def _hex(units: Tensor, bits: int) -> str:
    digits = max(1, bits // 4)
    mask = (1 << bits) - 1
    shown = [f"{int(unit) & mask:0{digits}x}" for unit in units[:4].tolist()]
    return "0x" + (shown[0] if len(set(shown)) == 1 else " ".join(shown))


def fp32_patterns(subject: Subject) -> Iterator[Given]:
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
    # Sixteen bits of a plain float32 are anything, its exponent is not: a look at some words says whether it
    # may be so.
    some = changed.nonzero().reshape(-1)
    some = some[spread(some.numel(), _ENOUGH)]
    expected_words = subject.expected[: 4 * number].view(torch.int32)[some]
    usual = _ordinary(expected_words).float().mean()
    found = words[some]
    is_varied = exponent[some].unique().numel() <= 48 and found.unique().numel() > 0.1 * some.numel()
    if float(usual) < 0.6 and is_varied and float(_ordinary(found).float().mean()) > 0.98:
        yield _as_read(subject, _ordinary(words), "every four bytes are a float32 of ordinary magnitude")


def _ordinary(words: Tensor) -> Tensor:
    """int32 bits: a float32 between 2^-40 and 2^40 that is no power of two."""
    exponent = (words >> 23) & 255
    return (exponent > 87) & (exponent < 167) & ((words & 0x7FFFFF) != 0)


def _as_read(subject: Subject, words: Tensor, detail: str) -> Given:
    inside = torch.zeros_like(subject.different)
    inside[: 4 * words.numel()] = words.repeat_interleave(4)
    predicted = torch.where(inside, subject.actual, subject.expected)
    return Given("bytes_look_like_fp32", detail, 2, predicted, by_construction=True, min_hits=16, grain=4)
