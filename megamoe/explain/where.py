"""Where the differences lie, in words: only expert 5; rows 32 to 63 of every 128; every fourth group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.explain.subject import PlainLayout, Subject, spread

_PERIODS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 240, 256, 384, 512, 1024, 2048)
_MOST = 1 << 18
_PLURALS = {"index": "indices", "in_word": "bytes in a word", "batch": "batches"}


@dataclass(frozen=True)
class AxisPattern:
    """words: e.g. "rows 32 to 63 of every 128", "" where the differences are all over the axis. share: of the
    differences that lie there. values: the affected indices (at most 4096), for drawings."""

    axis: str
    words: str
    share: float
    values: tuple[int, ...]


def patterns(subject: Subject, positions: Tensor) -> list[AxisPattern]:
    """What stands out along each axis, at most ``_MOST`` differences being looked at."""
    if positions.numel() > _MOST:
        positions = positions[spread(positions.numel(), _MOST)]
    coordinates = subject.locate(positions)
    sizes = {axis.name: axis.size for axis in subject.layout.axes}
    for digit in getattr(subject.layout, "digits", ()):
        if digit.name in ("page", "half"):
            sizes[digit.name] = digit.size
    found = []
    for name, size in sizes.items():
        index = coordinates[name]
        index = index[index >= 0]
        if index.numel() and size > 1:
            found.append(_pattern(name, size, index, shown_name(subject, name)))
    in_padding = int((coordinates[subject.layout.axes[0].name] < 0).sum()) if subject.layout.axes else 0
    if in_padding:
        words = "only padding" if in_padding == positions.numel() else f"{in_padding} in padding"
        found.append(AxisPattern("padding", words, in_padding / positions.numel(), ()))
    return found


def in_words(subject: Subject, positions: Tensor) -> str:
    """One line for a report."""
    if positions.numel() == 0:
        return "nowhere"
    if positions.numel() <= 3:
        return "; ".join(place_words(subject, int(p)) for p in positions)
    words = [pattern.words for pattern in patterns(subject, positions) if pattern.words]
    if words:
        return "; ".join(words)
    return "everywhere" if positions.numel() > 0.25 * subject.total else "scattered, without a pattern"


def place_words(subject: Subject, position: int) -> str:
    coordinates = subject.locate(torch.tensor([position]))
    axes = [axis.name for axis in subject.layout.axes]
    if axes and int(coordinates[axes[0]]) < 0:
        return f"padding at stored {stored_index(subject, position)}"
    return ", ".join(f"{shown_name(subject, name)} {int(coordinates[name])}" for name in axes)


def shown_name(subject: Subject, axis: str) -> str:
    """The outer axis of a named weight layout is the experts."""
    return "expert" if axis == "batch" and not isinstance(subject.layout, PlainLayout) else axis


def _pattern(name: str, size: int, index: Tensor, shown: str) -> AxisPattern:
    counts = torch.bincount(index, minlength=size)
    top = counts.sort(descending=True).values
    typical = float(top[: max(1, int((counts > 0).sum()) // 2 + 1)].float().median())
    hit = counts >= max(1.0, 0.05 * typical)
    if int(counts[hit].sum()) < 0.9 * index.numel():
        hit = counts > 0
    values = hit.nonzero().reshape(-1)
    share = float(counts[hit].sum()) / index.numel()
    words = _describe(shown, size, values.tolist(), dense=index.numel() >= 8 * size)
    if words and share < 1:
        words = f"mostly {words}"
    return AxisPattern(name, words, share, tuple(values[:4096].tolist()))


def _describe(name: str, size: int, values: list[int], *, dense: bool) -> str:
    plural = _PLURALS.get(name, f"{name}s")
    holes = size - len(values)
    words = ""
    if holes == 0:
        pass
    elif len(values) == 1:
        words = f"only {name} {values[0]}"
    elif values[-1] - values[0] == len(values) - 1:
        words = f"{plural} {values[0]} to {values[-1]}"
    elif period := _period(size, values):
        words = _describe_period(name, plural, *period)
    elif len(values) <= 4:
        words = f"{plural} {', '.join(map(str, values))}"
    elif holes <= 4:
        words = f"all {plural} but {', '.join(map(str, sorted(set(range(size)) - set(values))))}"
    elif dense:
        words = f"{len(values)} of {size} {plural}, {values[0]} to {values[-1]}"
    return words


def _period(size: int, values: list[int]) -> tuple[int, list[int]] | None:
    """The smallest period, and the residues, that these values nearly fill; three repetitions at least."""
    for period in _PERIODS:
        residues = sorted({v % period for v in values})
        possible = sum(len(range(r, size, period)) for r in residues)
        is_filled = len(values) >= 0.95 * possible and possible >= 3 * len(residues)
        is_simple = len(residues) <= 4 or residues[-1] - residues[0] == len(residues) - 1
        if period < size and len(residues) < period and is_filled and is_simple:
            return period, residues
    return None


def _describe_period(name: str, plural: str, period: int, residues: list[int]) -> str:
    if len(residues) == 1:
        return f"every {_ordinal(period)} {name} (from {residues[0]})"
    if residues[-1] - residues[0] == len(residues) - 1:
        return f"{plural} {residues[0]} to {residues[-1]} of every {period}"
    return f"{plural} {', '.join(map(str, residues))} of every {period}"


def _ordinal(number: int) -> str:
    words = {2: "second", 3: "third", 4: "fourth", 8: "eighth", 16: "sixteenth"}
    return words.get(number, f"{number}th")


def stored_index(subject: Subject, position: int) -> list[int]:
    """Index in the storage tensor of the element that holds this unit."""
    layout = subject.layout
    rest = position // max(1, layout.storage_dtype.itemsize * 8 // layout.element_bits)
    index = [0] * len(layout.storage_shape)
    for axis in sorted(range(len(index)), key=lambda a: -layout.storage_strides[a]):
        index[axis], rest = divmod(rest, layout.storage_strides[axis])
    return index
