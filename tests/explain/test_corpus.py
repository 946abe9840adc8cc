"""The corpus of planted faults: the right cause first, none wrong with confidence unique, nothing on clean
pairs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.explain import CAUSES, Report, explain
from tests.explain.corpus import CORPUS
from tests.explain.faults import Fault, copied, with_noise
from tests.explain.scenes import Scene

# Causes that these data cannot tell apart, so that an ambiguous answer is the right one.
AMBIGUOUS = {
    "overflow_nan-fp8-infs": {"inf_handling"},  # Inf is the only overflow that a scale rounded up leaves
}


def run(scene: Scene, actual: dict[str, Tensor]) -> Report:
    return explain(
        actual,
        scene.expected,
        op=scene.op,
        params=scene.params,
        inputs=scene.inputs if scene.op else None,
        layout=scene.layouts or None,
        dtype=scene.dtypes or None,
        code=scene.code,
    )


def differs(left: Tensor, right: Tensor) -> bool:
    return not torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def check(fault: Fault, report: Report) -> None:
    assert not report.equal, "the fault changed nothing"
    first = report.findings[0]
    assert first.cause == fault.cause, str(report)
    for finding in report.findings:
        assert finding.confidence != "unique" or finding.cause == fault.cause, str(report)
    if first.confidence == "ambiguous":
        assert set(first.alternatives) <= AMBIGUOUS.get(fault.id, set()), str(report)
        assert first.decide
    assert len(str(report).splitlines()) <= 25


@pytest.mark.parametrize("fault", CORPUS, ids=lambda fault: fault.id)
def test_fault(fault: Fault) -> None:
    scene = fault.scene()
    report = run(scene, fault.actual(scene))
    check(fault, report)
    assert {finding.cause for finding in report.findings} == {fault.cause}, str(report)
    assert all(finding.residue == 0 or finding.cause in PARTIAL for finding in report.findings), str(report)


# Causes that leave part of the memory as it was, about which the explanation says nothing.
PARTIAL = {
    "row_shift",
    "row_stride",
    "tile_stride",
    "off_by_one_tile",
    "mn_major_missing",
    "id_width",
    "bytes_look_like_fp32",
}


@pytest.mark.parametrize("fault", CORPUS, ids=lambda fault: fault.id)
def test_fault_under_noise(fault: Fault) -> None:
    """0.1% of the bytes of the outputs that the fault shows in are random besides."""
    scene = fault.scene()
    actual = {
        name: with_noise({name: tensor}, seed=len(fault.id))[name]
        if differs(tensor, scene.expected[name])
        else tensor
        for name, tensor in fault.actual(scene).items()
    }
    check(fault, run(scene, actual))


SCENES = {repr(fault.scene): fault.scene for fault in CORPUS}


@pytest.mark.parametrize("number", range(len(SCENES)))
def test_clean_pair(number: int) -> None:
    scene = list(SCENES.values())[number]()
    report = run(scene, {name: copied(tensor) for name, tensor in scene.expected.items()})
    assert report.equal
    assert report.findings == ()
    assert report.to_json() == {"equal": True, "findings": []}


@pytest.mark.parametrize("number", range(0, len(SCENES), 3))
def test_noise_alone_is_unknown(number: int) -> None:
    """Random bytes are not explained away."""
    scene = list(SCENES.values())[number]()
    report = run(scene, with_noise(scene.expected, seed=number))
    assert not report.equal
    assert {(finding.cause, finding.confidence) for finding in report.findings} == {("unknown", "unknown")}, (
        str(report)
    )


# Causes that need more than two recordings of one call, or that replace another one's name: they have tests
# of their own.
ELSEWHERE = {
    "special_codes",
    "stale",
    "inf_handling",
    "scale_ceiling",
    "product_of_scales",
    "fast_math",
    "unknown",
}


def test_the_corpus_covers_the_vocabulary() -> None:
    assert len({fault.id for fault in CORPUS}) == len(CORPUS) >= 100
    named = {cause.name for cause in CAUSES.values() if cause.family != "form"}
    assert {fault.cause for fault in CORPUS} == named - ELSEWHERE
