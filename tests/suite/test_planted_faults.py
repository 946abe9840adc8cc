"""`megamoe verify` turns red for one wrong bit in any output of any operation, and for every other kind of
fault."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import torch
from click.testing import CliRunner

from megamoe.bundle import as_bytes, extent
from megamoe.cli import main
from megamoe.suite.operation import load
from megamoe.suite.runner import execute, expected_outputs
from megamoe.suite.table import table

OUTPUTS = [
    pytest.param(name, output, id=f"{name}-{output}")
    for name, row in table().items()
    for output in row.outputs
]


def _outputs(padding, *, but=()):
    return [
        param
        for param in OUTPUTS
        if (table()[param.values[0]].outputs[param.values[1]].padding == "kept") == (padding == "kept")
        and param.values[1] not in but
    ]


BUFFERS = _outputs("kept")
RETURNED = _outputs("returned")


@functools.cache
def _calls(operation, tier):
    return [
        (case, case.operation.call(case.params, case.inputs())) for case in table()[operation].cases(tier)
    ]


def _case(operation, accepts):
    """The smallest case whose call is accepted, of the smoke tier if possible; or None."""
    for tier in ("smoke", "default"):
        found = [(case, call) for case, call in _calls(operation, tier) if accepts(call)]
        if found:
            return min(found, key=lambda pair: _size(pair[1]))
    return None


def _size(call):
    return sum(value.numel() for value in call.arguments.values() if isinstance(value, torch.Tensor))


def _has(output):
    def accepts(call):
        if output in call.buffers:
            return 0 not in call.buffers[output].shape
        return output in call.returns and _size(call) > 0

    return accepts


def _has_gaps(output):
    def accepts(call):
        spec = call.buffers.get(output)
        return spec is not None and extent(spec.shape, spec.strides()) > math.prod(spec.shape) > 0

    return accepts


def _verify(case, impl):
    command = ["verify", "--op", case.operation.name, "--case", case.id, "--impl", impl]
    done = CliRunner().invoke(main, [*command, "--device", "cpu", "--jobs", "1", "--json", "-"])
    found = json.loads(done.stdout)
    assert found["cases"] == 1
    return done.exit_code, found["results"][0]


def _wrong_outputs(result):
    return {seen["output"]: seen for seen in result["outputs"] if not seen["equal"]}


@pytest.mark.parametrize(("operation", "output"), OUTPUTS)
def test_one_flipped_bit_is_one_differing_byte(operation, output):
    found = _case(operation, _has(output))
    assert found is not None, "no case of the default tier has this output"
    case, call = found
    code, result = _verify(case, f"faulty:flip__{output}__")
    assert (code, result["status"]) == (1, "failed")
    wrong = _wrong_outputs(result)
    assert list(wrong) == [output]
    if output in call.returns and expected_outputs(case, call)[output].aliases:
        assert (
            "aliased argument" in wrong[output]["problem"]
        )  # a bit cannot differ in the argument's own memory
    else:
        assert result["bytes_differing"] == 1


@pytest.mark.parametrize(("operation", "output"), _outputs("kept", but=("expert_load",)))
def test_unwritten_output(operation, output):
    """Not for the load: it differs from its initial contents anyway, and its own bytes are tested above."""
    case, _ = _case(operation, _has(output))
    code, result = _verify(case, f"faulty:unwritten__{output}__")
    assert code == 1
    assert list(_wrong_outputs(result)) == [output]
    assert result["bytes_differing"] > 0


@pytest.mark.parametrize(("operation", "output"), BUFFERS)
def test_write_past_the_end(operation, output):
    case, _ = _case(operation, _has(output))
    code, result = _verify(case, f"faulty:past__{output}__")
    assert code == 1
    wrong = _wrong_outputs(result)
    assert list(wrong) == [output]
    assert wrong[output]["bytes_outside"] == 1


# DeepGEMM's own staging takes rows of a symmetric buffer, which has no gaps
DENSE = ("mega_moe_pre_dispatch", "mega_moe_pre_dispatch_sm90")


# the load and the alphas are vectors that nothing strides over
@pytest.mark.parametrize(
    ("operation", "output"),
    [param for param in _outputs("kept", but=("expert_load", "l2_alpha")) if param.values[0] not in DENSE],
)
def test_write_between_the_rows(operation, output):
    found = _case(operation, _has_gaps(output))
    assert found is not None, "no case of the default tier has bytes between the elements of this output"
    code, result = _verify(found[0], f"faulty:between__{output}__")
    assert (code, result["bytes_differing"]) == (1, 1)
    assert "between the rows" in _wrong_outputs(result)[output]["problem"]


@pytest.mark.parametrize("fault", ["dtype", "stride"])
@pytest.mark.parametrize(("operation", "output"), RETURNED)
def test_wrong_form_of_a_returned_tensor(operation, output, fault):
    case, _ = _case(operation, _has(output))
    code, result = _verify(case, f"faulty:{fault}__{output}__")
    assert code == 1
    wrong = _wrong_outputs(result)
    assert list(wrong) == [output]
    assert wrong[output]["problem"].startswith(f"{fault}: expected")


@pytest.mark.parametrize("operation", table())
def test_changed_argument(operation):
    """Every argument that is only read is looked at after the call."""
    case, call = _case(operation, lambda call: _size(call) > 0)
    names = [
        name for name, value in call.arguments.items() if isinstance(value, torch.Tensor) and value.numel()
    ]
    for name in (names[0], names[-1]):

        def spoil(arguments, views, name=name):
            as_bytes(arguments[name]).view(-1).view(torch.uint8)[-1:] ^= 1
            return call.bind(arguments, views) if call.bind else {**arguments, **views}

        with pytest.raises(AssertionError, match=f"argument {name} was changed"):
            execute(dataclasses.replace(call, bind=spoil), load(case.operation.reference), case.seed)


def test_exception_is_a_failure():
    case, _ = _case("prepare_megamoe_bf16_inputs", _has("x"))
    code, result = _verify(case, "faulty:raise__x__")
    assert code == 1
    assert "RuntimeError" in result["error"]
    assert "planted" in result["error"]
