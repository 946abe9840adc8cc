"""The faults that real implementations had, numbered as in CASES: the explainer names each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from megamoe.explain import explain
from tests.explain import faults as f
from tests.explain import quantizers as q
from tests.explain.corpus import CORPUS
from tests.explain.scenes import fp8_scene
from tests.explain.test_corpus import check, run

FAULTS = {fault.id: fault for fault in CORPUS}

# Case -> the faults of the corpus that are of its kind.
BY_NUMBER = {
    1: "scale_rounded_after_quantization-fp8",
    2: "scale_rounding_log2-frexp-fp8",
    3: "amax_floor-1e-10-fp8",
    4: "scale_rounding_nearest-fp8",
    6: "scale_rounding_floor-fp8",
    7: "tile_stride-x_sf-g32",
    8: "overflow_nan-fp8-infs",
    10: "division_instead_of_reciprocal-elements-g128",
    11: "reciprocal_instead_of_division-nvfp4-two",
    12: "negative_zero-nvfp4_block-one",
    13: "global_scale_inverted-stored-two",
    14: "gate_up_scale_shared-gate",
    16: "row_stride-dense-h2304",
    17: "swizzle_128x4_missing-256-named",
    18: "wrong_block_m-128-bm64",
    19: "mn_major_missing-packed",
    20: "interleave_missing-r48",
    21: "swapped_rows-experts-weights",
    22: "padded_tokens_counted-k4",
    23: "replica_hash_width-signed-k4",
    24: "padding_sentinel-0-fp8",
    25: "duplicate_experts-fp8",
    27: "unwritten-columns-fp8",
    28: "clamp_symmetric-sm90",
    29: "swapped_rows-fp8",
}


@pytest.mark.parametrize("number", BY_NUMBER)
def test_case(number: int) -> None:
    fault = FAULTS[BY_NUMBER[number]]
    scene = fault.scene()
    check(fault, run(scene, fault.actual(scene)))


def test_case_5_bytes_0_and_255() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    expected = reference.ue8m0_uint8_to_float(codes)
    with np.errstate(over="ignore"):
        actual = torch.from_numpy(np.exp2(codes.numpy().astype(np.float64) - 127).astype(np.float32))
    actual[1, 127] = float("nan")
    report = explain(actual, expected, op="ue8m0_uint8_to_float", output="out", inputs={"sf": codes})
    assert [(g.cause, g.confidence, g.count) for g in report.findings] == [("special_codes", "unique", 2)]


def test_case_15_a_zero_group_takes_one() -> None:
    """An amax of zero replaced by one: the scale byte of a zero group is that of 1 / 448."""
    scene = fp8_scene(40, 256)

    def amax(hidden: np.ndarray, group: int) -> np.ndarray:
        found = q.group_amax(hidden, group)
        return np.where(found == 0, np.float32(1), found)

    actual = {name: f.copied(t) for name, t in scene.expected.items()} | f.fp8(amax=amax, floor=0.0)(scene)
    report = run(scene, actual)
    assert {(g.cause, g.confidence) for g in report.findings} == {("amax_floor", "unique")}


def test_case_26_garbage_in_padding_that_reaches_live_bytes_is_located() -> None:
    """No named change does that; what can be said is where."""
    scene = fp8_scene(40, 256)
    actual = {name: f.copied(t) for name, t in scene.expected.items()}
    g = torch.Generator().manual_seed(0)
    elements = f.raw(actual["x"])
    elements[7] = torch.randint(0, 256, (256,), generator=g, dtype=torch.uint8).numpy()
    (finding,) = run(scene, actual).findings
    assert (finding.cause, finding.confidence) == ("unknown", "unknown")
    assert "only token 7" in finding.where


def test_case_29_one_doubled_group() -> None:
    """A metric over the whole tensor would not see it."""
    scene = fp8_scene(200, 512)
    actual = {name: f.copied(t) for name, t in scene.expected.items()}
    f.raw(actual["x_sf"]).view(np.uint8).reshape(200, 16)[50:54, 3] += 1
    (finding,) = run(scene, actual).findings
    assert (finding.cause, finding.confidence, finding.count) == ("scale_plus_one", "unique", 4)
    assert finding.where == "tokens 50 to 53; only group 3"
