"""A contract that is weaker than bitwise lets through what it names, and nothing else."""

from __future__ import annotations

import pytest
import torch

from megamoe.suite.contracts import RSTD_ULPS, bitwise_given_rstd
from megamoe.suite.operation import Case
from megamoe.suite.runner import compare_outputs, execute, expected_outputs
from megamoe.suite.table import table
from reference.stages import stage_nvfp4_with_norm

ROW = table()["prepare_megamoe_nvfp4_with_norm"]


@pytest.fixture(scope="module")
def made():
    case = Case(ROW, ROW.defaults | {"tokens": 64, "hidden": 4096, "strides": "rows"})
    call = ROW.call(case.params, case.inputs())
    return case, call, expected_outputs(case, call)


def _with_rstd(made, ulps):
    """Outputs of an implementation whose rstd is some ulps off in every row."""
    case, call, _ = made

    def other(hidden_states, norm_weight, norm_eps, gain_center, x, x_sf):
        arguments = (hidden_states, norm_weight, norm_eps, gain_center)
        norm = stage_nvfp4_with_norm(*arguments).norm
        staged = stage_nvfp4_with_norm(
            *arguments, rstd=(norm.rstd.view(torch.int32) + ulps).view(torch.float32)
        )
        x.copy_(staged.x)
        x_sf.copy_(staged.x_sf)

    return execute(call, other, case.seed)


def _wrong(made, actual):
    _, call, expected = made
    return [
        seen.output
        for seen in compare_outputs(ROW, bitwise_given_rstd(call, expected, actual), actual)
        if not seen.equal
    ]


@pytest.mark.parametrize("ulps", range(-RSTD_ULPS, RSTD_ULPS + 1))
def test_another_rstd_is_let_through(made, ulps):
    actual = _with_rstd(made, ulps)
    assert _wrong(made, actual) == []


def test_the_inputs_notice_another_rstd(made):
    """Otherwise the test above would show nothing."""
    differing = [seen.output for seen in compare_outputs(ROW, made[2], _with_rstd(made, 2)) if not seen.equal]
    assert differing


def test_a_larger_difference_is_not(made):
    assert _wrong(made, _with_rstd(made, 64))


@pytest.mark.parametrize("output", ["x", "x_sf"])
@pytest.mark.parametrize("ulps", [0, 1])
def test_a_single_wrong_code_is_not(made, output, ulps):
    actual = _with_rstd(made, ulps)
    actual[output].tensor[7, 11] ^= 1
    assert output in _wrong(made, actual)


def test_bytes_between_the_rows_are_not(made):
    actual = _with_rstd(made, 1)
    view = actual["x"].tensor
    view.as_strided((1,), (1,), view.storage_offset() + view.shape[1])[0] ^= 1
    assert _wrong(made, actual) == ["x"]


def test_missing_output(made):
    actual = dict(_with_rstd(made, 1))
    del actual["x_sf"]
    assert "x_sf" in _wrong(made, actual)


def test_the_expected_outputs_are_left_alone(made):
    _, call, expected = made
    before = expected["x"].tensor.clone()
    bitwise_given_rstd(call, expected, _with_rstd(made, 2))
    assert torch.equal(expected["x"].tensor, before)
