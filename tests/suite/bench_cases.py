"""Small cases for the tests of `megamoe bench`."""

import dataclasses

from megamoe.suite import measurement
from megamoe.suite.operation import Case, Implementation
from megamoe.suite.table import table

FP8 = "prepare_megamoe_inputs"


def small_case(tokens: int = 5, **params: object) -> Case:
    (case,) = measurement.cases_of(table()[FP8], (), {"tokens": [tokens], "hidden": [256]})
    return dataclasses.replace(case, params=case.params | params)


def reference_implementation() -> Implementation:
    return Implementation("reference", table()[FP8].reference)
