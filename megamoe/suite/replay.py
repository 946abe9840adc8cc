"""Replaying recorded cases: the call is made again and compared with the recorded outputs, byte for byte."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megamoe import bundle
from megamoe.suite.compare import Observed, OutputComparison, compare_memory
from megamoe.suite.operation import Case, Implementation, Operation, Params, load
from megamoe.suite.runner import Result, describe_error, execute, why_not_provided, why_skipped
from megamoe.suite.table import table


class CannotReplay(ValueError):
    """The table has no row for a recorded case, or its parameters are not the row's."""


def restore(case: bundle.Case) -> tuple[Operation, Params, dict[str, Tensor]]:
    """The row, the parameters and the inputs of a recorded case. Raises CannotReplay."""
    operation = table().get(case.op)
    if operation is None:
        raise CannotReplay(f"{case.case}: the table has no operation {case.op!r}")
    if not case.outputs:
        raise CannotReplay(f"{case.case}: the recording has no outputs to compare with")
    if set(operation.defaults) <= set(case.params):
        return operation, case.params, dict(case.inputs)
    try:
        if operation.golden is not None:
            return operation, *operation.golden(case)
    except (KeyError, IndexError) as error:
        raise CannotReplay(f"{case.case}: the recording lacks {error}") from error
    missing = sorted(set(operation.defaults) - set(case.params))
    raise CannotReplay(f"{case.case}: parameters {missing} are missing")


def replay_case(case: bundle.Case, implementation: Implementation, device: str = "cpu") -> Result:
    """Run a recorded case again with an implementation. Raises CannotReplay."""
    operation, params, inputs = restore(case)
    run = Case(operation, params)
    result = Result(case.case, case.op, run.recipe, implementation.name, device, "passed")
    skip = why_skipped(implementation, device, run) or why_not_provided(implementation)
    if skip is not None:
        return replace(result, status="skipped", skip=skip)
    try:
        call = operation.call(params, inputs)
    except Exception as error:  # missing or misshapen inputs, or parameters that the row does not know
        raise CannotReplay(f"{case.case}: the recording makes no call: {describe_error(error)}") from error
    started = time.perf_counter()
    try:
        actual = execute(call, load(implementation.target), run.seed, device)
        outputs = compare_recorded(case.outputs, actual)
    except Exception as error:  # whatever an implementation raises is a failure of the case
        seconds = time.perf_counter() - started
        return replace(result, status="failed", error=describe_error(error), seconds=seconds)
    equal = all(output.equal for output in outputs)
    return replace(
        result,
        status="passed" if equal else "failed",
        outputs=outputs,
        seconds=time.perf_counter() - started,
        unrecorded=tuple(sorted(set(actual) - set(case.outputs))),
        expected={
            name: Observed(output.tensor, aliases=output.aliases) for name, output in case.outputs.items()
        },
        actual=actual,
    )


def compare_recorded(
    recorded: Mapping[str, bundle.RecordedOutput], actual: Mapping[str, Observed]
) -> tuple[OutputComparison, ...]:
    """Each recorded output with what came out now; what was not recorded is in `Result.unrecorded`."""
    return tuple(
        _compare_one(name, output, actual[name]) if name in actual else OutputComparison(name, "not produced")
        for name, output in recorded.items()
    )


def record_case(
    case: Case, outputs: Mapping[str, Observed], inputs: dict[str, Tensor] | None = None
) -> bundle.Case:
    """A case and what an implementation produced, as it goes into a bundle; it replays by itself."""
    recorded = {}
    for name, seen in outputs.items():
        padding = "undefined" if case.operation.outputs[name].padding == "undefined" else None
        tensor = seen.tensor.detach().cpu()
        recorded[name] = bundle.RecordedOutput(
            tensor,
            bundle.dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            padding,
            seen.aliases,
        )
    kept = case.inputs() if inputs is None else inputs
    return bundle.Case(case.id, case.operation.name, dict(case.params), kept, recorded)


def _compare_one(name: str, recorded: bundle.RecordedOutput, seen: Observed) -> OutputComparison:
    expected, actual = recorded.tensor, seen.tensor.cpu()
    size = expected.numel() * expected.element_size()
    form: list[tuple[str, Any, Any]] = [
        ("shape", recorded.shape, tuple(actual.shape)),
        ("dtype", *_comparable_dtypes(recorded, actual)),
    ]
    if recorded.stride is not None:
        form.append(("stride", recorded.stride, actual.stride()))
    if recorded.aliases is not None:
        form.append(("aliased argument", recorded.aliases, seen.aliases))
    for what, left, right in form:
        if left != right:
            return OutputComparison(name, f"{what}: expected {left}, got {right}", size, size)
    return compare_memory(name, expected, actual, recorded.stride is not None and recorded.padding is None)


def _comparable_dtypes(recorded: bundle.RecordedOutput, actual: Tensor) -> tuple[str, str]:
    """Names to compare. Codes of one byte may come as uint8, int8 or their float8 type: the APIs differ
    there."""
    names = recorded.dtype, bundle.dtype_name(actual.dtype)
    codes = {"e2m1x2", "float8_e4m3fn", "uint8", "int8"}
    return ("codes", "codes") if set(names) <= codes else names
