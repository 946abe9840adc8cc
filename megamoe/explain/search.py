"""The search: which single change, or which two changes of layout, reproduces the actual bytes.

Cheap tests first: every candidate is tried on a few thousand units (half of them differing ones), and only
what survives is measured on all of them. Candidates come in classes, simplest first, and a class is looked at
only if the ones before it explain nothing:

    A  named changes of layout, value maps, replays with one knob turned
    B  changes that were read off the data: rows exchanged, copied or left out
    C  two named changes of layout
    D  patterns of some units

Within a class the best reproduction wins; other causes that reproduce just as much make the finding
ambiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.explain.fit import Fit, Step, fit_all, fit_at, measure, plausible, sample_positions
from megamoe.explain.given import Given
from megamoe.explain.kinds import sure_patterns, value_steps, weak_patterns
from megamoe.explain.layout_steps import layout_steps
from megamoe.explain.row_matches import row_steps
from megamoe.explain.subject import Subject, spread, to_units
from megamoe.explain.variants import TOKEN_OUTPUTS, Call, Replay, Variant

_SUBSUMED = {"transposed": "mn_major_missing", "rows_permuted": ""}
_MOST_PAIRS = 6000
_FEW_FREE = (
    0.1  # of the differing units: a change that leaves more open is weighed against what the data shows
)


@dataclass(frozen=True)
class Candidate:
    """An explanation with its fit to every output that it speaks of. causes: one, or two for a pair of
    changes.
    """

    causes: tuple[str, ...]
    detail: str
    cost: int
    fits: Mapping[str, Fit]
    min_hits: int = 1
    by_construction: bool = False
    doubts: tuple[str, ...] = ()

    def explains(self, output: str) -> bool:
        fit = self.fits.get(output)
        if fit is None:
            return False
        if self.by_construction:
            return fit.hits >= self.min_hits and fit.wrong <= fit.allowed
        return fit.accepted(self.min_hits)

    @property
    def contradicted(self) -> bool:
        """It predicts changes of an output that are not there."""
        return any(fit.changed > 0 and not self.explains(name) for name, fit in self.fits.items())

    def left(self, output: str) -> int:
        return self.fits[output].wrong + self.fits[output].free

    @property
    def outputs(self) -> int:
        return sum(self.explains(name) for name in self.fits)


def candidates_of(
    subjects: Sequence[Subject],
    replay: Replay | None,
    call: Call | None,
    replayable: frozenset[str] = frozenset(),
) -> dict[str, list[Candidate]]:
    """Accepted candidates by output, those of the simplest class that explains it; joint ones for several
    outputs.

    replayable: outputs that the replay reproduces without a change, so that a change says something of them.
    """
    shared: list[Candidate] = []
    if replay is not None and call is not None:
        judged = [subject for subject in subjects if subject.name in replayable]
        shared = [c for c in _replayed(judged, replay, call) if not c.contradicted]
    found: dict[str, list[Candidate]] = {}
    for subject in subjects:
        if subject.count:
            found[subject.name] = _classes(subject, [c for c in shared if c.explains(subject.name)])
    return found


def _classes(subject: Subject, joint: list[Candidate]) -> list[Candidate]:
    name = subject.name
    sample = sample_positions(subject)
    steps = [*layout_steps(subject), *value_steps(subject)]
    likely = [step for step in steps if plausible(fit_at(subject, [step], sample))]
    named = [_of_steps(subject, [step]) for step in likely]
    patterns = [_of_given(subject, pattern) for pattern in sure_patterns(subject)]
    named = [c for c in [*named, *joint, *patterns] if c.cost <= 2 and c.explains(name)]
    if any(c.fits[name].free <= _FEW_FREE * subject.count for c in named):
        return _best(name, named)
    read_off = [step for step in row_steps(subject) if plausible(fit_at(subject, [step], sample))]
    rows = [_of_steps(subject, [step]) for step in read_off]
    patterns += [_of_given(subject, pattern) for pattern in weak_patterns(subject)]
    rest = [c for c in [*rows, *patterns, *joint] if c.cost > 2 and c.explains(name)]
    accepted = named + [c for c in rest if c.cost == 3]
    if accepted:
        return _best(name, accepted)
    pairs = [_of_steps(subject, pair) for pair in _pairs(subject, steps, sample)]
    accepted = [c for c in pairs if c.explains(name)]
    return _best(name, accepted or rest)


def _of_steps(subject: Subject, steps: Sequence[Step]) -> Candidate:
    detail = steps[0].detail
    if len(steps) > 1:
        detail = ", then ".join(f"{s.cause} ({s.detail})" if s.detail else s.cause for s in steps)
    return Candidate(
        tuple(s.cause for s in steps),
        detail,
        sum(step.cost for step in steps),
        {subject.name: fit_all(subject, steps)},
        max(_evidence(steps), *(s.min_hits for s in steps)),
        doubts=tuple(cause for s in steps for cause in s.doubts),
    )


def _evidence(steps: Sequence[Step]) -> int:
    """Units that must be explained: of hundreds of changes, and thousands of pairs, some fit a few."""
    if len(steps) > 1:
        return 16
    return 4 if steps[0].source is not None else 2


def _of_given(subject: Subject, pattern: Given) -> Candidate:
    fits = {subject.name: pattern.fit(subject)}
    return Candidate(
        (pattern.cause,),
        pattern.detail,
        pattern.cost,
        fits,
        pattern.min_hits,
        pattern.by_construction,
        pattern.doubts,
    )


def _pairs(subject: Subject, steps: Sequence[Step], sample: Tensor) -> Iterator[list[Step]]:
    """Two different changes whose composition is plausible; a smaller sample first."""
    few = sample[:: max(1, sample.numel() // 512)]
    tried = 0
    for first, second in itertools.permutations(steps, 2):
        if first.cause == second.cause or (first.source is None and second.source is None):
            continue
        tried += 1
        if tried > _MOST_PAIRS:
            return
        if plausible(fit_at(subject, [first, second], few)) and plausible(
            fit_at(subject, [first, second], sample)
        ):
            yield [first, second]


def _best(output: str, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates that reproduce most, one for each cause, the simplest first."""
    if not candidates:
        return []
    most = max(c.outputs for c in candidates)
    candidates = [c for c in candidates if c.outputs == most]
    least = min(c.left(output) for c in candidates)
    best = sorted((c for c in candidates if c.left(output) == least), key=lambda c: c.cost)
    kept: dict[frozenset[str], Candidate] = {}
    for candidate in best:
        kept.setdefault(frozenset(candidate.causes), candidate)
    names = {cause for causes in kept for cause in causes}
    return [c for causes, c in kept.items() if not any(_SUBSUMED.get(cause, "") in names for cause in causes)]


# ---- replays


def _replayed(subjects: Sequence[Subject], replay: Replay, call: Call) -> Iterator[Candidate]:
    by_name = {subject.name: subject for subject in subjects}
    few = _few_tokens(subjects, call, replay.few_tokens) if call.num_tokens > replay.few_tokens else None
    for variant in replay.variants(call):
        try:
            if few is not None and variant.by_token and not _likely_on(few, variant, call, by_name):
                continue
            fits = _fits(variant.outputs(call), by_name)
        except ValueError:
            continue  # an arithmetic that the reference refuses for this call is none that was used
        if any(fit.hits for fit in fits.values()):
            yield Candidate((variant.cause,), variant.detail, variant.cost, fits)


def _fits(outputs: Mapping[str, Tensor], subjects: Mapping[str, Subject]) -> dict[str, Fit]:
    fits: dict[str, Fit] = {}
    for name, tensor in outputs.items():
        subject = subjects.get(name)
        if subject is None:
            continue
        predicted = predicted_units(subject, tensor)
        known = torch.ones_like(subject.different) if subject.compared is None else subject.compared
        fits[name] = measure(predicted, known, subject.expected, subject.actual)
    return fits


def predicted_units(subject: Subject, tensor: Tensor) -> Tensor:
    """A replayed output in the subject's memory; units between its elements are the expected ones."""
    from megamoe.explain.pairs import memory_like

    units = memory_like(subject, tensor)
    padding = subject.is_padding
    return units if padding is None else torch.where(padding, subject.expected, units)


def _few_tokens(subjects: Sequence[Subject], call: Call, number: int) -> Tensor:
    """Token rows, half of them with differences."""
    rows = [spread(call.num_tokens, number // 2)]
    for subject in subjects:
        is_by_token = subject.name in TOKEN_OUTPUTS and "token" in {axis.name for axis in subject.layout.axes}
        if subject.count and is_by_token:
            token = subject.locate(subject.positions[spread(subject.positions.numel(), number // 2)])["token"]
            rows.append(token[(token >= 0) & (token < call.num_tokens)])
    return torch.cat(rows).unique()


def _likely_on(rows: Tensor, variant: Variant, call: Call, subjects: Mapping[str, Subject]) -> bool:
    part = call.tokens(rows)
    seen = False
    for name, tensor in variant.outputs(part).items():
        subject = subjects.get(name)
        if subject is None or name not in part.outputs:
            continue
        bits = 8 if subject.unit_bits < 8 else subject.unit_bits
        predicted = to_units(tensor, bits, memory=False)
        expected = to_units(part.outputs[name], bits, memory=False)
        actual = to_units(call.outputs[f"actual/{name}"][rows], bits, memory=False)
        fit = measure(predicted, torch.ones_like(expected, dtype=torch.bool), expected, actual)
        if fit.changed and not (plausible(fit) and fit.wrong <= 8 + 0.02 * fit.total):
            return False
        seen = seen or fit.hits > 0
    # Outputs that are not stored token by token (pages) are left to the full replay.
    return seen or not any(name in part.outputs for name in ("x", "x_sf"))
