"""Importing costs little and pulls in nothing that a machine might not have; constants agree across the
divide."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from reference.formats import FORMATS
from reference.recipes import RECIPES

HEAVY = ("triton", "deep_gemm", "rich", "jinja2", "click", "matplotlib", "safetensors")


@pytest.mark.parametrize(
    "module", ["megamoe", "reference", "megamoe.cli", "megamoe.suite.table", "megamoe.quant_keys"]
)
def test_import_pulls_in_little(module):
    code = f"import {module}, sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(found.stdout))
    allowed = {"click"} if module == "megamoe.cli" else set()
    assert loaded <= allowed


@pytest.mark.parametrize("module", ["megamoe", "reference", "megamoe.cli"])
def test_import_does_not_load_torch(module):
    """torch takes a second; these are loaded by whoever only wants a name or --help."""
    code = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reference_does_not_load_megamoe():
    code = (
        "import sys, pkgutil, importlib, reference\n"
        "for info in pkgutil.walk_packages(reference.__path__, 'reference.'):\n"
        "    importlib.import_module(info.name)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('megamoe', 'triton', 'deep_gemm')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernel_constants_are_those_of_the_formats():
    from megamoe.kernels import constants

    e4m3, e2m1 = FORMATS["e4m3fn"], FORMATS["e2m1"]
    assert e4m3.max_value == constants.E4M3_MAX
    assert e4m3.nan_code == constants.E4M3_NAN_CODE
    assert e2m1.max_value == constants.E2M1_MAX
    assert e4m3.min_positive == constants.NVFP4_SCALE_FLOOR
    assert e4m3.max_value * e2m1.max_value == constants.NVFP4_BLOCK_SATURATION


def test_kernel_constants_are_those_of_the_recipes():
    import numpy as np

    from megamoe.kernels import constants

    def rounded(value):
        return float(np.float32(value))

    mxfp8, token = RECIPES["fp8_ue8m0_g32"], RECIPES["nvfp4_token"]
    routing = next(recipe for recipe in RECIPES.values() if hasattr(recipe, "padding_id"))
    assert rounded(mxfp8.amax_floor) == constants.FP8_AMAX_FLOOR
    assert rounded(1 / 448) == constants.E4M3_MAX_RECIPROCAL
    assert mxfp8.scale_min_exponent == constants.UE8M0_MIN_CODE
    assert rounded(token.token_floor) == constants.NVFP4_TOKEN_AMAX_FLOOR
    assert rounded(1 / 2688) == constants.NVFP4_TOKEN_RECIPROCAL
    assert rounded(1 / 6) == constants.E2M1_MAX_RECIPROCAL
    assert token.group == constants.NVFP4_GROUP
    assert token.block_floor == constants.NVFP4_SCALE_FLOOR
    assert routing.padding_id == constants.PADDING_EXPERT_ID
    assert routing.padding_weight == constants.PADDING_WEIGHT
    assert routing.replica_hash_multiplier == constants.REPLICA_HASH_MULTIPLIER
    assert (1 << routing.replica_hash_bits) - 1 == constants.REPLICA_HASH_MASK
