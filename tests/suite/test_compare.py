"""Comparison by bytes, and the buffers that make it possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.bundle import extent
from megamoe.suite.buffers import GUARD_BYTES, BufferSpec, allocate, byte_mask
from megamoe.suite.compare import Observed, compare_bitwise


def _compare(expected, actual, padding="compared"):
    return compare_bitwise("out", Observed(expected), Observed(actual), padding)


@pytest.mark.parametrize(
    ("left", "right"),
    [(0.0, -0.0), (float("nan"), torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32).item())],
    ids=["zeros", "nans"],
)
def test_values_that_torch_calls_equal(left, right):
    expected, actual = torch.tensor([left, 1.0]), torch.tensor([right, 1.0])
    if np.isnan(left):
        actual = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    result = _compare(expected, actual)
    assert not result.equal
    assert result.bytes_differing == 1


def test_equal_nans_are_equal():
    nans = torch.tensor([float("nan"), -0.0])
    assert _compare(nans, nans.clone()).equal


@pytest.mark.parametrize(
    ("actual", "problem"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), "dtype: expected torch.float32, got torch.int32"),
        (torch.zeros(3, 2), "shape: expected (2, 3), got (3, 2)"),
        (torch.zeros(3, 2).T, "stride: expected (3, 1), got (1, 2)"),
    ],
    ids=["dtype", "shape", "stride"],
)
def test_form_comes_before_bytes(actual, problem):
    assert _compare(torch.zeros(2, 3), actual).problem == problem


def test_first_difference_is_shown_with_its_bytes():
    expected = torch.arange(6, dtype=torch.int32).view(2, 3)
    actual = expected.clone()
    actual[1, 2] = -2
    assert _compare(expected, actual).problem == (
        "4 of 24 bytes differ, first at [1, 2]: expected 0x00000005, got 0xfffffffe"
    )


@pytest.mark.parametrize(("padding", "equal"), [("compared", False), ("undefined", True)])
def test_bytes_between_returned_elements(padding, equal):
    memory = torch.zeros(8), torch.zeros(8)
    memory[1][3] = 1.0
    views = [torch.as_strided(m, (2, 3), (4, 1)) for m in memory]
    assert _compare(*views, padding).equal is equal


def test_a_single_element_may_have_any_stride():
    expected = torch.ones(1).as_strided((1, 1, 1), (4, 1, 4))
    result = _compare(expected, torch.ones(1).as_strided((1, 1, 1), (4, 1, 4)))
    assert (result.equal, result.bytes_compared) == (True, 4)


def test_alias_of_an_argument_is_part_of_the_result():
    tensor = torch.zeros(3)
    result = compare_bitwise("out", Observed(tensor, aliases="w"), Observed(tensor), "compared")
    assert result.problem == "aliased argument: expected w, got None"


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@given(shape=SHAPES, gaps=st.lists(st.integers(0, 3), min_size=3, max_size=3), seed=st.integers(0, 2**64 - 1))
def test_mask_covers_exactly_the_elements(shape, gaps, seed):
    stride, step = [], 1
    for size, gap in zip(reversed(shape), gaps, strict=False):
        stride.append(step)
        step = step * max(size, 1) + gap
    spec = BufferSpec(tuple(shape), torch.int32, tuple(reversed(stride)))
    buffer = allocate(spec, seed)
    touched = buffer.memory.clone()
    buffer.view.bitwise_not_()
    assert torch.equal(buffer.memory != touched, buffer.logical_mask())
    assert buffer.logical_mask().sum() == 4 * np.prod(shape)
    assert buffer.memory.numel() >= 2 * GUARD_BYTES + 4 * extent(spec.shape, spec.strides())


def test_poison_is_the_same_everywhere_and_varies():
    spec = BufferSpec((64, 128), torch.uint8)
    first, again, other = (allocate(spec, seed).view for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first == other).float().mean() < 0.02
    rows = {bytes(row.tolist()) for row in first}
    assert len(rows) == 64  # no two rows are poisoned alike: a stale row cannot pass for its neighbour


def test_fill_and_initial_contents():
    assert (allocate(BufferSpec((3,), torch.int32, fill=0x5A), 1).view == 0x5A5A5A5A).all()
    start = torch.arange(3, dtype=torch.int32)
    assert torch.equal(allocate(BufferSpec((3,), torch.int32, initial=start), 1).view, start)


def test_mask_of_an_empty_view():
    assert not byte_mask(16, torch.zeros(0, dtype=torch.int32)).any()
