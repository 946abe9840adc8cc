"""From two recordings of a call to findings: compare first, then locate, then search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megamoe.bundle import dtype_name
from megamoe.explain.causes import CAUSES
from megamoe.explain.findings import Confidence, Finding, Report, examples_of
from megamoe.explain.pairs import CasePair, OutputPair, form_problem, same_bytes, subject_of
from megamoe.explain.search import Candidate, candidates_of
from megamoe.explain.subject import FLOAT_CODES, Subject, spread
from megamoe.explain.variants import Call, Intermediates, Replay, replay_of
from megamoe.explain.where import in_words

_UNITS = {4: "FP4 codes", 8: "bytes", 16: "16-bit values", 32: "32-bit values", 64: "64-bit values"}


def explain_cases(cases: Sequence[CasePair], *, title: str = "", replay: str = "") -> Report:
    """Compares and explains every case; findings of the first case first, each case's most certain first."""
    findings: list[Finding] = []
    subjects: list[Subject] = []
    notes: list[str] = []
    compared: dict[str, int] = {}
    for case in cases:
        report = explain_case(case)
        findings.extend(replace(finding, case=case.case) for finding in report.findings)
        subjects.extend(report.subjects)
        notes.extend(report.notes)
        for name, number in report.compared.items():
            compared[name] = compared.get(name, 0) + number
    return Report(tuple(findings), compared, tuple(dict.fromkeys(notes)), title, replay, tuple(subjects))


def explain_case(case: CasePair) -> Report:
    compared = {pair.name: pair.expected.numel() * pair.expected.element_size() for pair in case.outputs}
    forms: list[Finding] = []
    comparable: list[OutputPair] = []
    for pair in case.outputs:
        found = _form_finding(pair)
        if found is not None:
            forms.append(found)
        if found is None or found.cause == "stride_differs":
            comparable.append(pair)
    unequal = [pair for pair in comparable if not _equal(pair)]
    if not unequal:
        return Report(tuple(forms), compared)
    # Every output takes part: a cause that would change an output that did not change is none.
    subjects = [subject_of(pair, case) for pair in comparable]
    if not any(subject.count for subject in subjects):
        return Report(tuple(forms), compared)
    call = _call(case, comparable)
    replay, notes = _replay(call)
    replayable: frozenset[str] = frozenset()
    if replay is not None and call is not None:
        replayable = _reproduced(replay, call)
        if not replayable & {subject.name for subject in subjects if subject.count}:
            notes.append(
                "the reference does not reproduce the expected side from these inputs: "
                "no arithmetic was replayed"
            )
            replay = None
    candidates = candidates_of(subjects, replay, call, replayable)
    findings: list[Finding] = []
    for subject in subjects:
        if subject.count:
            known = _intermediates(replay, call, subject)
            judged = subject.name in replayable
            findings.extend(_findings(subject, candidates[subject.name], known, judged))
    if any(f.cause == "unknown" for f in findings) and replay is None and not notes:
        notes.append(
            "without the operation and its inputs no arithmetic was replayed"
            if call is None
            else f"nothing in {case.op} could be replayed from these inputs and outputs"
        )
    order = {"unique": 0, "ambiguous": 1, "unknown": 2}
    findings.sort(key=lambda finding: order[finding.confidence])
    return Report((*forms, *findings), compared, tuple(notes), subjects=tuple(s for s in subjects if s.count))


def _replay(call: Call | None) -> tuple[Replay | None, list[str]]:
    """How the call is replayed, or why not, as far as the recording is to blame."""
    try:
        return (replay_of(call) if call is not None else None), []
    except (ValueError, TypeError, KeyError, IndexError) as error:
        return None, [f"the recorded call cannot be made again ({error}): no arithmetic was replayed"]


def _equal(pair: OutputPair) -> bool:
    """Fast path: elements, and the bytes between them unless they mean nothing."""
    if not same_bytes(pair.expected, pair.actual):
        return False
    if pair.padding == "undefined" or pair.expected.stride() != pair.actual.stride():
        return True
    if pair.expected.is_contiguous():
        return True
    from megamoe.bundle import raw_memory

    return same_bytes(raw_memory(pair.expected), raw_memory(pair.actual))


def _form_finding(pair: OutputPair) -> Finding | None:
    problem = form_problem(pair)
    total = pair.expected.numel()
    if problem is not None:
        return Finding(pair.name, problem[0], "unique", (), total, total, "the whole tensor", (), problem[1])
    expected, actual = pair.expected.stride(), pair.actual.stride()
    if _significant(pair.expected.shape, expected) != _significant(pair.actual.shape, actual):
        detail = f"expected strides {list(expected)}, actual {list(actual)}"
        is_mn_major = pair.expected.dim() >= 2 and expected[-2] == 1 and actual[-1] == 1
        cause = "mn_major_missing" if is_mn_major else "stride_differs"
        return (
            Finding(pair.name, cause, "unique", (), total, total, "the whole tensor", (), detail)
            if is_mn_major and same_bytes(pair.expected, pair.actual)
            else Finding(
                pair.name, "stride_differs", "unique", (), total, total, "the whole tensor", (), detail
            )
        )
    return None


def _significant(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of dimensions of one entry say nothing."""
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


def _call(case: CasePair, pairs: Sequence[OutputPair]) -> Call | None:
    if case.op is None or not case.inputs:
        return None
    outputs = {pair.name: pair.expected for pair in pairs}
    actual = {f"actual/{pair.name}": pair.actual for pair in pairs}
    return Call(case.op, case.params, case.inputs, {**outputs, **actual})


def _reproduced(replay: Replay, call: Call) -> frozenset[str]:
    """The outputs that the reference gives as expected, judged on a few tokens where there are many."""
    if call.num_tokens > replay.few_tokens:
        few = call.tokens(spread(call.num_tokens, replay.few_tokens // 2))
        # What is not stored token by token cannot be judged on a few: it follows the outputs that are.
        found = {
            n for n, t in replay.baseline(few).items() if n in few.outputs and _agrees(t, few.outputs[n])
        }
        return frozenset(found | ({n for n in call.outputs if n not in few.outputs} if found else set()))
    return frozenset(
        n for n, t in replay.baseline(call).items() if n in call.outputs and _agrees(t, call.outputs[n])
    )


def _agrees(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.element_size() == right.element_size() and same_bytes(left, right)


def _intermediates(replay: Replay | None, call: Call | None, subject: Subject) -> Intermediates | None:
    if replay is None or call is None or replay.intermediates is None:
        return None
    hidden = call.inputs.get("hidden_states")
    if hidden is None or hidden.numel() > 1 << 22:
        return None
    return replay.intermediates(call, subject.name)


def _findings(
    subject: Subject, candidates: list[Candidate], known: Intermediates | None, judged: bool
) -> list[Finding]:
    """judged: replays took part, so that causes which only a replay tells apart were looked at."""
    positions = subject.positions
    where = in_words(subject, positions)
    examples = examples_of(subject, positions, known)
    common = (subject.count, subject.total, where, examples)
    unit = "scale bytes" if subject.role == "scale" and subject.unit_bits == 8 else _UNITS[subject.unit_bits]
    if not candidates:
        detail = _hint(subject)
        return [Finding(subject.name, "unknown", "unknown", (), *common, detail=detail, unit=unit)]
    best, *others = candidates
    doubts = () if judged else best.doubts
    alternatives = tuple(
        dict.fromkeys(
            cause
            for causes in (*(other.causes for other in others), doubts)
            for cause in causes
            if cause not in best.causes
        )
    )
    confidence: Confidence = "ambiguous" if alternatives else "unique"
    decide = (
        "; ".join(dict.fromkeys(CAUSES[c].decide for c in (*best.causes, *alternatives) if CAUSES[c].decide))
        if alternatives
        else ""
    )
    return [
        Finding(
            subject.name,
            cause,
            confidence,
            alternatives,
            *common,
            detail=best.detail,
            residue=best.left(subject.name),
            decide=decide,
            unit=unit,
        )
        for cause in best.causes
    ]


def _hint(subject: Subject) -> str:
    """What can be said of differences that nothing explains."""
    if subject.role in ("payload", "values") and subject.code in FLOAT_CODES:
        expected, actual = (
            subject.expected[subject.positions].to(torch.int64),
            subject.actual[subject.positions].to(torch.int64),
        )
        near = ((expected - actual).abs() == 1).float().mean()
        if subject.count >= 3 and float(near) > 0.9:
            return (
                "the codes are neighbours: another rounding, division or order of sums; "
                "give operation and inputs to tell which"
            )
    return ""


__all__ = ["dtype_name", "explain_case", "explain_cases"]
