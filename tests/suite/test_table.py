"""The table keeps its own rules: ids, seeds, layouts, recipes, twins."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys

import pytest
import torch

from megamoe.suite.compare import Observed
from megamoe.suite.operation import Call, Case, Implementation, Operation, Output, Sweep, load
from megamoe.suite.replay import record_case, restore
from megamoe.suite.runner import execute
from megamoe.suite.table import select, select_cases, table
from reference.layouts import LAYOUTS
from reference.recipes import RECIPES

OPERATIONS = list(table().values())
OWN_TWINS = [
    pytest.param(row, implementation, id=f"{row.name}-{implementation.name}")
    for row in OPERATIONS
    for implementation in row.implementations
    if implementation.target.startswith("megamoe.") and implementation.target.endswith(f":{row.name}")
]


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_row(row):
    assert len(dataclasses.fields(row)) <= 15
    assert callable(load(row.reference))
    assert row.source
    for name, output in row.outputs.items():
        assert output.layout in LAYOUTS, name
    for recipe in row.recipes:
        assert recipe in RECIPES or recipe == "unquantized"
    used = {case.recipe for case in row.cases("default")}
    assert used == (set(row.recipes) or {""}), "each recipe has a case in the default tier"
    json.dumps(row.defaults)


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_tiers_contain_each_other(row):
    ids = [[case.id for case in row.cases(tier)] for tier in ("smoke", "default", "full")]
    for found in ids:
        assert len(set(found)) == len(found)
    assert set(ids[0]) <= set(ids[1]) <= set(ids[2])
    assert ids[0]


def test_ids_say_every_parameter():
    """Two cases with one id would be one case."""
    for row in OPERATIONS:
        by_id: dict[str, str] = {}
        for sweep in row.sweeps:
            for params in row._product(sweep):
                text = json.dumps(params, sort_keys=True)
                assert by_id.setdefault(Case(row, params).id, text) == text


def test_default_tier_is_large_enough():
    staging = [case for case in select_cases("prepare_*,eplb_*") if case.operation.implementations]
    assert len(staging) >= 150


def test_cases_are_the_same_in_every_process():
    code = (
        "from megamoe.suite.table import table\n"
        "import hashlib\n"
        "row = table()['prepare_megamoe_inputs']\n"
        "case = row.cases('smoke')[-1]\n"
        "data = b''.join(repr(t.tolist()).encode() for t in case.inputs().values())\n"
        "print(case.id, case.seed, hashlib.sha256(data).hexdigest())\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        ).stdout
        for environment in ({**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2"))
    }
    assert len(seen) == 1


@pytest.mark.parametrize(("row", "implementation"), OWN_TWINS)
def test_twins_have_one_signature(row, implementation):
    expected, actual = (inspect.signature(load(target)) for target in (row.reference, implementation.target))
    assert list(expected.parameters) == list(actual.parameters)
    for name, parameter in expected.parameters.items():
        other = actual.parameters[name]
        assert parameter.kind == other.kind, name
        empty = inspect.Parameter.empty
        assert (parameter.default is empty) == (other.default is empty), name
        assert parameter.default is empty or parameter.default == other.default, name


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_every_implementation_takes_the_call(row):
    """Adapters too, also those that only run on other machines."""
    case = row.cases("smoke")[0]
    call = row.call(case.params, case.inputs())
    seen = {}

    def catch(**arguments):
        seen.update(arguments)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(call, catch, 0)
    for implementation in row.implementations:
        if not implementation.target.startswith("megamoe."):
            continue  # a library that need not be here
        inspect.signature(load(implementation.target)).bind(**seen)


@pytest.mark.parametrize("row", OPERATIONS, ids=lambda row: row.name)
def test_a_recorded_case_is_the_same_call(row):
    """What a bundle keeps of a case (JSON parameters, inputs) rebuilds it."""
    case = row.cases("smoke")[-1]
    inputs = case.inputs()
    some_output = {next(iter(row.outputs)): Observed(torch.zeros(1))}
    recorded = record_case(case, some_output, inputs)
    recorded = dataclasses.replace(recorded, params=json.loads(json.dumps(recorded.params)))
    operation, params, _ = restore(recorded)
    assert operation is row
    again = Case(operation, params)
    assert (again.id, again.seed) == (case.id, case.seed)


def _row(**changes):
    values = {
        "name": "op",
        "reference": "m:f",
        "implementations": (Implementation("i", "m:f"),),
        "outputs": {"out": Output("row_major")},
        "defaults": {"n": 1, "values": "random", "flag": False, "shape": (1, 2)},
        "sweeps": (
            Sweep("smoke", {"n": (1, 2)}),
            Sweep("default", {"flag": (True,), "shape": ((1, 2), (3,))}),
        ),
        "inputs": lambda params, rng: {},
        "call": lambda params, inputs: Call({}),
        "source": "here",
    }
    return Operation(**(values | changes))


def test_ids():
    ids = [case.id for case in _row().cases("default")]
    assert ids == ["op", "op.n2", "op.flag", "op.flag.shape3"]


def test_lists_from_json_are_the_tuples_they_were():
    row = _row()
    assert Case(row, row.defaults | {"shape": [1, 2]}).id == "op"


def test_unknown_parameter_of_a_sweep():
    with pytest.raises(ValueError, match=r"unknown parameters \['m'\]"):
        _row(sweeps=(Sweep("smoke", {"m": (1,)}),)).cases()


def test_select():
    names = {row.name for row in select("*nvfp4_block*,eplb*")}
    assert names == {"prepare_megamoe_nvfp4_block_inputs", "eplb_map_to_physical_and_record"}
    assert select("nothing*") == []


def test_returned_values_need_their_names():
    for returned, match in (
        ((torch.zeros(1),), "must return 2 tensors"),
        (None, "must return 2"),
        ((1, 2), "must be a tensor"),
    ):
        with pytest.raises(AssertionError, match=match):
            execute(Call({}, returns=("a", "b")), lambda returned=returned: returned, 0)
    with pytest.raises(AssertionError, match="must return None"):
        execute(Call({}), lambda: 1, 0)
