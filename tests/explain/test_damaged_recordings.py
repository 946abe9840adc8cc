"""Recorded cases, damaged at random: nothing crashes, and no damage without a cause is explained away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megamoe.bundle import Case, read_bundle
from megamoe.explain.engine import explain_cases
from megamoe.explain.files import Request, load_pair, pair_cases
from megamoe.explain.findings import Report
from megamoe.suite.operation import stable_seed
from tests.explain.faults import copied, raw

GOLDENS = Path(__file__).parents[1] / "goldens"
BUNDLES = {
    name: read_bundle(GOLDENS / f"{name}.safetensors") for name in ("staging", "layouts", "sm90_mega_moe")
}
CASES = [
    (name, case) for name, bundle in BUNDLES.items() for case in bundle.cases if case.op != "fp8_mega_moe"
]
IDS = [f"{name}-{case.case}" for name, case in CASES]


def damaged(case: Case, kind: str) -> Case:
    rng = np.random.default_rng(stable_seed(f"{case.case}.{kind}"))
    outputs = {}
    for name, output in case.outputs.items():
        tensor = copied(output.tensor)
        values = raw(tensor)
        if values.size:
            place = tuple(int(rng.integers(0, size)) for size in values.shape)
            if kind == "bit":
                values[place] ^= 1
            else:
                row = np.asarray(values[place[:1]])
                values[place[:1]] = np.frombuffer(rng.bytes(row.nbytes), row.dtype).reshape(row.shape)
        outputs[name] = replace(output, tensor=tensor)
    return replace(case, outputs=outputs)


def explained(bundle: str, case: Case, actual: Case) -> Report:
    pair, missing = pair_cases(case, actual, BUNDLES[bundle], Request())
    assert missing == []
    report = explain_cases([pair])
    assert len(report.text().splitlines()) <= 25
    return report


@pytest.mark.parametrize(("bundle", "case"), CASES, ids=IDS)
def test_one_flipped_bit(bundle: str, case: Case) -> None:
    report = explained(bundle, case, damaged(case, "bit"))
    assert {finding.output for finding in report.findings} == {
        n for n, o in case.outputs.items() if o.tensor.numel()
    }
    assert all(finding.confidence != "unique" for finding in report.findings), str(report)


@pytest.mark.parametrize(("bundle", "case"), CASES[::2], ids=IDS[::2])
def test_one_row_of_garbage(bundle: str, case: Case) -> None:
    report = explained(bundle, case, damaged(case, "row"))
    assert not report.equal
    # Ids and weights of a padding token that are not masked any more look like what they should have been.
    assert {f.cause for f in report.findings if f.confidence == "unique"} <= {"padding_not_masked"}, str(
        report
    )
    assert "</html>" in report.html()


@pytest.mark.parametrize("name", BUNDLES)
def test_a_recording_equals_itself(name: str) -> None:
    path = GOLDENS / f"{name}.safetensors"
    assert explain_cases(load_pair(path, path, Request()).cases).equal
