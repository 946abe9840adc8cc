"""Recorded cases: what real hardware produced, replayed with the reference and with every implementation that
runs here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe.bundle import read_bundle
from megamoe.suite.pytest_plugin import note_result, run_device, skip
from megamoe.suite.replay import replay_case
from megamoe.suite.runner import why_not_provided, why_skipped
from megamoe.suite.table import select_implementations, table

GOLDENS = sorted((Path(__file__).parent / "goldens").glob("*.safetensors"))


def pytest_generate_tests(metafunc):
    if "recorded" not in metafunc.fixturenames:
        return
    device = run_device(metafunc.config)
    found = []
    for path in GOLDENS:
        for case in read_bundle(path).cases:
            operation = table().get(case.op)
            if operation is None:
                found.append(pytest.param(case, None, id=f"{path.stem}/{case.case}"))
                continue
            chosen = select_implementations(operation, metafunc.config.getoption("--impl"), device)
            reference = select_implementations(operation, "reference", device)
            for implementation in {row.name: row for row in [*reference, *chosen]}.values():
                found.append(
                    pytest.param(case, implementation, id=f"{path.stem}/{case.case}-{implementation.name}")
                )
    metafunc.parametrize(("recorded", "implementation"), found)


def test_recorded_bytes_come_out(recorded, implementation, device, request):
    assert implementation is not None, f"the table has no operation {recorded.op}"
    reason = why_skipped(implementation, device) or why_not_provided(implementation)
    if reason is not None:
        skip(reason)
    result = replay_case(recorded, implementation, device)
    if result.skip is not None:
        skip(result.skip)
    note_result(
        request, op=f"{recorded.op} (recorded)", implementation=implementation.name, device=device,
        compared=result.bytes_compared,
    )  # fmt: skip
    assert not result.problems()
    assert {output.output for output in result.outputs} == set(recorded.outputs)
    assert result.bytes_compared > 0
