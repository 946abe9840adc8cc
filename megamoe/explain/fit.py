"""How well a predicted memory agrees with the actual one, and when that is an explanation.

A step reads the expected units from other places (``source``) or changes them (``value``); a chain of steps
predicts the actual units. An explanation is accepted only if it reproduces the actual units: all of them, or
all but a residue that is as thin inside the predicted changes as outside of them, as unrelated noise is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.explain.subject import Subject, count_true, spread

CHUNK = 1 << 18
MAX_RESIDUE = 0.004  # of the compared bytes; a unit of several bytes is hit as often as its bytes are
MAX_FREE = 0.7  # of the differing units


@dataclass(frozen=True)
class Step:
    """One named change. source: positions (int64) -> positions read, -1 where nothing is written. value:
    units -> units. cost: 1 for a change without a parameter, 2 with one, 3 for one that was read off the
    data. doubts: causes that look the same where no arithmetic was replayed."""

    cause: str
    detail: str
    cost: int = 1
    source: Callable[[Tensor], Tensor] | None = None
    value: Callable[[Tensor], Tensor] | None = None
    min_hits: int = 1
    doubts: tuple[str, ...] = ()
    whole: Callable[[Tensor], Tensor] | None = (
        None  # the same as source on a whole memory of which every unit is moved
    )


@dataclass(frozen=True)
class Fit:
    """Counts of units. total: compared and predicted. differing: actual differs from expected. changed:
    predicted differs from expected. hits: differing units predicted right. wrong: predicted differs from
    actual. free: differing units that the prediction says nothing about."""

    total: int = 0
    differing: int = 0
    changed: int = 0
    hits: int = 0
    wrong: int = 0
    free: int = 0
    unit_bytes: int = 1

    def __add__(self, other: Fit) -> Fit:
        counts = ("total", "differing", "changed", "hits", "wrong", "free")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return Fit(**sums, unit_bytes=max(self.unit_bytes, other.unit_bytes))

    @property
    def exact(self) -> bool:
        return self.wrong == 0 and self.hits > 0

    @property
    def allowed(self) -> float:
        """The most wrong units that can pass for unrelated noise."""
        return max(2.0, MAX_RESIDUE * self.unit_bytes * self.total)

    def accepted(self, min_hits: int = 1) -> bool:
        if self.hits < min_hits or self.free > MAX_FREE * (self.differing + self.free):
            return False
        if self.wrong == 0:
            return True
        if self.wrong > self.allowed:
            return False
        # Unrelated noise hits predicted changes and everything else alike.
        rate = self.wrong / self.total
        missed_inside = self.changed - self.hits
        return missed_inside <= _upper(rate * self.changed) and self.hits > 3 * missed_inside


def _upper(mean: float) -> float:
    """A count that a Poisson variable of this mean hardly ever exceeds."""
    return mean + 4 * math.sqrt(mean) + 2


def predict(subject: Subject, steps: Sequence[Step], positions: Tensor) -> tuple[Tensor, Tensor]:
    """(predicted units, bool: something is predicted) at these positions."""
    place = positions
    for step in reversed(steps):
        if step.source is not None:
            moved = step.source(place.clamp_min(0))
            place = torch.where(place < 0, place, moved)
    outside = (place < 0) | (place >= subject.expected.numel())
    units = subject.expected[place.clamp(0, subject.expected.numel() - 1)]
    for step in steps:
        if step.value is not None:
            units = step.value(units)
    known = torch.ones_like(outside)
    if bool(outside.any()):
        background, background_known = _background(subject, positions)
        units = torch.where(outside, background, units)
        known = ~outside | background_known
    if subject.compared is not None:
        known = known & subject.compared[positions]
    return units, known


def _background(subject: Subject, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What unwritten units hold, and whether that is known: the buffer before the call, a constant fill, or
    the expected side where it was not written either."""
    if subject.before is not None:
        return subject.before[positions], torch.ones_like(positions, dtype=torch.bool)
    if subject.fill is not None:
        known = torch.ones_like(positions, dtype=torch.bool)
        return torch.full(positions.shape, subject.fill, dtype=subject.expected.dtype), known
    units, padding = subject.expected[positions], subject.is_padding
    if padding is None or not subject.padding_known:
        return units, torch.zeros_like(positions, dtype=torch.bool)
    return units, padding[positions]


def measure(predicted: Tensor, known: Tensor, expected: Tensor, actual: Tensor) -> Fit:
    total = predicted.numel()
    all_known = count_true(known) == total
    differing, changed, agrees = expected != actual, predicted != expected, predicted == actual
    free = 0
    if not all_known:
        total = count_true(known)
        free = count_true(differing & ~known)
        differing, changed, agrees = differing & known, changed & known, agrees & known
    return Fit(
        total=total,
        differing=count_true(differing),
        changed=count_true(changed),
        hits=count_true(differing & agrees),
        wrong=total - count_true(agrees),
        free=free,
        unit_bytes=expected.element_size(),
    )


def fit_at(subject: Subject, steps: Sequence[Step], positions: Tensor) -> Fit:
    predicted, known = predict(subject, steps, positions)
    expected, actual = subject.expected[positions], subject.actual[positions]
    if subject.compared is not None:
        actual = torch.where(subject.compared[positions], actual, expected)
    return measure(predicted, known, expected, actual)


def fit_all(subject: Subject, steps: Sequence[Step]) -> Fit:
    """The fit over the whole memory, in chunks; stops early where it can no longer be accepted."""
    fit = Fit()
    number = subject.expected.numel()
    allowed = max(2.0, MAX_RESIDUE * subject.expected.element_size() * number)
    index = torch.int32 if number < 1 << 31 else torch.int64
    moved = _moved_whole(subject, steps)
    for start in range(0, number, CHUNK):
        stop = min(start + CHUNK, number)
        if moved is None:
            fit = fit + fit_at(subject, steps, torch.arange(start, stop, dtype=index))
        else:
            fit = fit + _fit_slice(subject, moved, slice(start, stop))
        if fit.wrong > allowed:
            break
    return fit


def _moved_whole(subject: Subject, steps: Sequence[Step]) -> Tensor | None:
    """The predicted memory without index arithmetic, where every step has a shortcut."""
    if any(step.source is not None and step.whole is None for step in steps):
        return None
    units = subject.expected
    for step in steps:
        if step.whole is not None:
            units = step.whole(units)
        elif step.value is not None:
            units = step.value(units)
    return units


def _fit_slice(subject: Subject, predicted: Tensor, part: slice) -> Fit:
    expected, actual = subject.expected[part], subject.actual[part]
    known = (
        torch.ones_like(expected, dtype=torch.bool) if subject.compared is None else subject.compared[part]
    )
    return measure(predicted[part], known, expected, torch.where(known, actual, expected))


def sample_positions(subject: Subject, number: int = 4096) -> Tensor:
    """Differing units and others, spread over the memory; the same for the same data."""
    chosen = subject.positions
    if chosen.numel() > number // 2:
        chosen = chosen[spread(chosen.numel(), number // 2)]
    total = subject.expected.numel()
    everywhere = (
        torch.arange(number // 2) * max(1, total // (number // 2)) + 7 * torch.arange(number // 2) % 13
    ) % total
    return torch.cat([chosen, everywhere]).unique()


def plausible(fit: Fit) -> bool:
    """Whether a fit on a sample is worth measuring on everything."""
    if fit.hits == 0:
        return False
    missed = fit.changed - fit.hits
    return missed <= 0.05 * fit.changed + 2 and fit.hits > missed
