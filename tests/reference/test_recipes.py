"""Recipes as data: names, sources, and knobs that are what they say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from reference.fp8 import quantize_fp8_groups
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import KNOBS, RECIPES, Fp8GroupRecipe, Nvfp4Recipe, get_recipe

PRODUCTION = [
    *(f"fp8_ue8m0_g{g}" for g in (32, 64, 128)),
    *(f"fp8_fp32_g{g}" for g in (16, 32, 64, 128)),
    "fp8_fp32_g128_divide",
    "nvfp4_token",
    "nvfp4_block",
    "routing",
]


def test_production_names_are_there() -> None:
    assert set(PRODUCTION) <= set(RECIPES)
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    assert get_recipe("nvfp4_token") is RECIPES["nvfp4_token"]
    with pytest.raises(ValueError, match="recipe: expected one of"):
        get_recipe("nvfp4")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_its_source_and_keeps_to_the_choices(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.source.startswith("NUMERICS ")
    for knob, choices in KNOBS[type(recipe)].items():
        assert getattr(recipe, knob) in choices, knob


def test_recipes_are_frozen_and_differ() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["routing"].padding_id = 0
    bare = [dataclasses.replace(recipe, name="", source="") for recipe in RECIPES.values()]
    assert len(set(bare)) == len(bare)


@pytest.mark.parametrize(
    "name", [n for n, r in RECIPES.items() if isinstance(r, (Fp8GroupRecipe, Nvfp4Recipe))]
)
def test_every_choice_of_every_knob_runs(name: str, generator: torch.Generator) -> None:
    recipe = RECIPES[name]
    hidden = torch.randn(3, 128, generator=generator).bfloat16()
    quantize = quantize_fp8_groups if isinstance(recipe, Fp8GroupRecipe) else quantize_nvfp4
    for knob, choices in KNOBS[type(recipe)].items():
        for choice in choices:
            if getattr(recipe, "element_format", None) == "e2m1" and choice == "nan":
                with pytest.raises(ValueError, match="overflow: e2m1 has no NaN"):
                    quantize(hidden, dataclasses.replace(recipe, **{knob: choice}))
                continue
            turned = recipe
            if choice == "e2m1":
                turned = dataclasses.replace(recipe, overflow="saturate")
            groups = quantize(hidden, dataclasses.replace(turned, **{knob: choice}))
            assert groups.codes.shape == (3, 128)


def test_import_is_light() -> None:
    """``import reference`` loads none of its modules, and they load nothing but torch and NumPy."""
    code = (
        "import sys, reference; early = 'torch' in sys.modules; "
        "reference.prepare_megamoe_inputs; reference.mega_moe_pre_dispatch; "
        "bad = {'megamoe', 'triton', 'deep_gemm', 'safetensors', 'ml_dtypes', 'gfloat'} & set(sys.modules); "
        "print(early, sorted(bad))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split(maxsplit=1)[0] == "False"
    assert "megamoe" not in result.stdout
    assert "deep_gemm" not in result.stdout


def test_unknown_attribute() -> None:
    import reference

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = reference.nothing
    assert "prepare_megamoe_inputs" in dir(reference)
