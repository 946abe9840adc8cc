"""The differential test: every case of the table, with every implementation, byte for byte."""

from __future__ import annotations

import functools

import pytest

from megamoe.suite.compare import count_differing_bytes
from megamoe.suite.failure import explain_failure, write_failure
from megamoe.suite.operation import load
from megamoe.suite.pytest_plugin import note_result, run_device, skip
from megamoe.suite.runner import execute, expected_outputs, run_case, why_not_provided, why_skipped
from megamoe.suite.table import select_cases, select_implementations

CASES = {}


def pytest_generate_tests(metafunc):
    config = metafunc.config
    found = [
        pytest.param(case, implementation, id=f"{case.id}-{implementation.name}")
        for case in select_cases("*", config.getoption("--tier"))
        for implementation in select_implementations(
            case.operation, config.getoption("--impl"), run_device(config)
        )
    ]
    CASES.update({param.values[0].id: param.values[0] for param in found})
    metafunc.parametrize(("case", "implementation"), found)


@functools.lru_cache(maxsize=1)
def _expected(case_id):
    return expected_outputs(CASES[case_id])


def test_every_byte_agrees(case, implementation, device, artifacts, request):
    reason = why_skipped(implementation, device, case) or why_not_provided(implementation)
    if reason is not None:
        skip(reason)
    expected = _expected(case.id)
    result = run_case(case, implementation, device, expected, keep=True)
    note_result(
        request,
        op=case.operation.name,
        implementation=implementation.name,
        device=device,
        compared=result.bytes_compared,
    )
    if result.status == "failed":
        message = [f"{case.id} with {implementation.name} on {device}", *result.problems()]
        if result.actual:
            files = write_failure(case, result, artifacts)
            message.append(explain_failure(files, files.actual.with_suffix(".html")) or files.command())
        again = f"megamoe verify --op {case.operation.name} --case '{case.id}' --impl {implementation.name}"
        pytest.fail("\n".join([*message, f"{again} --device {device}"]), pytrace=False)

    call = case.operation.call(case.params, case.inputs())
    for repetition in range(1, request.config.getoption("--repeat")):
        repeated = execute(call, load(implementation.target), case.seed, device)
        for name, first in result.actual.items():
            differing, _ = count_differing_bytes(first.tensor, repeated[name].tensor)
            assert differing == 0, f"{name}: run {repetition + 1} differs from the first in {differing} bytes"
