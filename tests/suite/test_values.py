"""The generators do what their names promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megamoe.suite.operation import stable_seed
from megamoe.suite.values import VALUES, Target, generate
from reference.fp8 import quantize_fp8_groups
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES

MXFP8 = Target("e4m3fn", "ue8m0", 32)
FP32 = Target("e4m3fn", "fp32", 128)
NVFP4 = Target("e2m1", "e4m3", 16)
TOKEN = Target("e2m1", "e4m3", 16, two_level=True)
TARGETS = {"mxfp8": MXFP8, "fp32": FP32, "nvfp4_block": NVFP4, "nvfp4_token": TOKEN}


def _draw(name, shape, target, dtype=torch.bfloat16):
    return generate(name, shape, target, np.random.default_rng(stable_seed(f"{name}{shape}{target}")), dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (5, 384)], ids=str)
def test_shape_and_repeatability(name, target, shape):
    first, again = (_draw(name, shape, TARGETS[target]) for _ in range(2))
    assert first.shape == shape
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    if name != "specials":
        assert first.isfinite().all()


def test_position_has_a_scale_of_its_own_for_every_group():
    groups = quantize_fp8_groups(_draw("position", (8, 512), MXFP8), RECIPES["fp8_ue8m0_g32"])
    assert groups.exponents.unique().numel() == 8 * 16
    groups = quantize_fp8_groups(_draw("position", (16, 4096), FP32), RECIPES["fp8_fp32_g128"])
    assert groups.scales.unique().numel() == 16 * 32
    groups = quantize_nvfp4(_draw("position", (4, 448), NVFP4), RECIPES["nvfp4_block"])
    assert groups.scale_codes.unique().numel() == 4 * 28


@pytest.mark.parametrize(
    ("target", "recipe"), [(MXFP8, "fp8_ue8m0_g32"), (FP32, "fp8_fp32_g128")], ids=["mxfp8", "fp32"]
)
def test_position_tells_shifts_apart(target, recipe):
    """Moving the scales by any small step in any direction changes most of them."""
    scales = quantize_fp8_groups(_draw("position", (32, 2304), target), RECIPES[recipe]).scales
    for rows, columns in [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2), (4, 0), (0, 4), (16, 0)]:
        moved = torch.roll(scales, (rows, columns), (0, 1))
        assert (moved != scales).float().mean() > 0.9, (rows, columns)


@pytest.mark.parametrize(
    ("target", "recipe"), [(MXFP8, "fp8_ue8m0_g32"), (FP32, "fp8_fp32_g128")], ids=["mxfp8", "fp32"]
)
def test_ties_are_ties(target, recipe):
    """A fair share of the scaled values lies exactly half way between two codes."""
    found = quantize_fp8_groups(_draw("ties", (8, 512), target), RECIPES[recipe], intermediates=True)
    bits = found.scaled.abs().view(torch.int32)
    normal = found.scaled.abs() >= 2.0**-6
    assert ((bits & 0xFFFFF) == 0x80000)[normal].float().mean() > 0.2


def test_nvfp4_ties_are_ties():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for target, recipe in ((NVFP4, "nvfp4_block"), (TOKEN, "nvfp4_token")):
        found = quantize_nvfp4(_draw("ties", (8, 512), target), RECIPES[recipe], intermediates=True)
        if found.scaled is not None:
            assert torch.isin(found.scaled.abs(), middles).float().mean() > 0.1


def test_codes_are_all_there():
    found = quantize_fp8_groups(_draw("codes", (4, 512), MXFP8), RECIPES["fp8_ue8m0_g32"])
    missing = set(range(256)) - set(found.codes.unique().tolist())
    assert missing == {0x7F, 0xFF}


def test_specials_are_all_there():
    values = _draw("specials", (8, 1024), MXFP8).float()
    assert values.isnan().any()
    assert (values == float("inf")).any()
    assert (values == -float("inf")).any()
    assert ((values == 0) & values.signbit()).any()
    assert ((values != 0) & (values.abs() < 2.0**-126)).any()


def test_every_amax_reaches_every_exponent():
    found = quantize_fp8_groups(_draw("every_amax", (64, 4096), MXFP8), RECIPES["fp8_ue8m0_g32"])
    assert set(range(105, 248)) == set(found.exponents.unique().tolist())


def test_edges_surround_powers_of_two():
    amax = _draw("edges", (64, 1024), MXFP8, torch.float32).view(64, -1, 32).abs().amax(-1)
    for exponent in (-10, 0, 5):
        top = np.float32(448 * 2.0**exponent)
        near = {
            float(np.nextafter(top, np.float32(0))),
            float(top),
            float(np.nextafter(top, np.float32(np.inf))),
        }
        assert near <= set(amax.flatten().tolist())
