"""Knobs of NVFP4 quantization: both scales, the elements, the shared expert's copy and l2_alpha."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from megamoe.explain.variants import (
    Call,
    Intermediates,
    Outputs,
    Replay,
    Variant,
    bound,
    placed,
    replays,
    turned,
)
from megamoe.explain.variants_fp8 import (
    DIVISION,
    FLOORS,
    FP8_CAUSES,
    few_tokens,
    fp8_variants,
    hidden_of,
    place_pages,
)
from megamoe.explain.variants_routing import routing_only, routing_outputs, routing_variants
from reference import formats, staging
from reference.fp8 import quantize_fp8_groups
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES, Fp8GroupRecipe, Nvfp4Recipe
from reference.routing import ROUTING

_NVFP4_KNOBS: list[tuple[str, str, dict[str, Any], int]] = [
    ("ties_away", "", {"element_rounding": "away"}, 1),
    ("ties_toward_zero", "", {"element_rounding": "half_to_zero"}, 1),
    ("truncation", "", {"element_rounding": "toward_zero"}, 1),
    ("nan_propagated", "NaN becomes 6", {"nan_code": 7}, 1),
    ("amax_floor", "no lower bound of the block scale", {"block_floor": 0.0}, 1),
    (
        "amax_floor",
        "no lower bound of the block scale, zero codes there",
        {"block_floor": 0.0, "zero_scale": "zero"},
        2,
    ),
    *[("amax_floor", f"token {floor:g}", {"token_floor": floor}, 2) for floor in FLOORS],
    ("scale_ceiling", "none", {"block_ceiling": float("inf")}, 1),
    ("scale_ceiling", "448", {"block_ceiling": 448.0}, 1),
    (
        "reciprocal_instead_of_division",
        "elements times the reciprocal of both scales",
        {"element_division": "multiply_reciprocal"},
        1,
    ),
    ("product_of_scales", "elements", {"element_division": "divide_by_product"}, 1),
    ("division_instead_of_reciprocal", "block scale", {"block_division": "divide"}, 1),
    ("reciprocal_instead_of_division", "block scale", {"block_division": "multiply_reciprocals"}, 2),
    ("product_of_scales", "block scale", {"block_division": "divide_by_product"}, 1),
]


@replays(
    "prepare_megamoe_nvfp4_inputs", "prepare_megamoe_nvfp4_block_inputs", "prepare_megamoe_nvfp4_with_norm"
)
def _nvfp4(call: Call) -> Replay | None:
    if "hidden_states" not in call.inputs or not {"x", "x_sf", "x_scales", "shared_x_sf", "l2_alpha"} & set(
        call.outputs
    ):
        return routing_only(call)
    recipe = cast(
        Nvfp4Recipe, RECIPES["nvfp4_token" if call.op == "prepare_megamoe_nvfp4_inputs" else "nvfp4_block"]
    )

    def outputs(call: Call, changed: Nvfp4Recipe) -> Outputs:
        return _place_nvfp4(call, changed, quantize_nvfp4(_values(call), changed))

    def variants(call: Call) -> Iterator[Variant]:
        yield from _nvfp4_variants(recipe, outputs)
        yield from _shared_variants(call)
        yield from _alpha_variants(call)
        yield from routing_variants(call)

    def baseline(call: Call) -> Outputs:
        found = {
            **outputs(call, recipe),
            **routing_outputs(call, ROUTING),
            **_shared_outputs(call, staging.MXFP8),
        }
        if "l2_alpha" in call.outputs and "w2_global_scale" in call.inputs:
            found["l2_alpha"] = call.inputs["w2_global_scale"].float() * _activation_scale(call)
        return found

    def intermediates(call: Call, output: str) -> Intermediates | None:
        if output not in ("x", "x_sf"):
            return None
        groups = quantize_nvfp4(_values(call), recipe, intermediates=True)
        assert groups.scaled is not None
        return Intermediates(groups.scaled, groups.scales, recipe.group)

    return Replay(baseline, variants, intermediates, few_tokens(call))


def _values(call: Call) -> Tensor:
    hidden = call.inputs["hidden_states"]
    if call.op != "prepare_megamoe_nvfp4_with_norm":
        return hidden
    from reference.nvfp4 import rms_norm_bf16

    params = call.params
    return rms_norm_bf16(
        hidden, call.inputs["norm_weight"], float(params["norm_eps"]), float(params["gain_center"])
    ).normalized


def _place_nvfp4(call: Call, recipe: Nvfp4Recipe, groups: Any, token_scales: Tensor | None = None) -> Outputs:
    words = (
        formats.pack_scale_words(groups.scale_codes)
        if call.op == "prepare_megamoe_nvfp4_inputs"
        else groups.scale_codes
    )
    found: Outputs = {"x": groups.packed, "x_sf": words}
    scales = token_scales if token_scales is not None else groups.token_scales
    if scales is not None:
        found["x_scales"] = scales
    return placed(call, found)


def _nvfp4_variants(
    recipe: Nvfp4Recipe, outputs: Callable[[Call, Nvfp4Recipe], Outputs]
) -> Iterator[Variant]:
    knobs = list(_NVFP4_KNOBS)
    knobs.append(
        ("negative_zero", "", {"negative_zero": "keep" if recipe.negative_zero == "drop" else "drop"}, 1)
    )
    if recipe.levels == "token":
        cause, value = DIVISION[recipe.token_scale]
        knobs.append((cause, "token scale", {"token_scale": value}, 1))
    for cause, detail, change, cost in knobs:
        changed = turned(recipe, change)
        if changed is not None:
            yield Variant(cause, detail, bound(outputs, changed), cost)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield Variant("double_rounding", f"through {name}", bound(_nvfp4_twice, recipe, dtype))
    for rounding in ("toward_zero", "away"):
        cause = "scale_rounding_floor" if rounding == "toward_zero" else "ties_away"
        yield Variant(cause, "block scale", bound(_nvfp4_scale_rounding, recipe, rounding), 2)
    if recipe.levels == "token":
        yield Variant(
            "reciprocal_instead_of_division",
            "elements times the reciprocal of the block scale",
            bound(_times_reciprocal, recipe),
        )
        for cause, detail, function in _OUTER_SCALE:
            yield Variant(cause, detail, bound(function, recipe))


def _e2m1(values: Tensor, recipe: Nvfp4Recipe) -> Tensor:
    codes = formats.encode(
        values,
        "e2m1",
        rounding=recipe.element_rounding,
        negative_zero=recipe.negative_zero,
        nan_code=recipe.nan_code,
    )
    return formats.pack_e2m1(codes)


def _times_reciprocal(call: Call, recipe: Nvfp4Recipe) -> Outputs:
    hidden = _values(call).float()
    groups = quantize_nvfp4(hidden, recipe)
    assert groups.token_scales is not None
    normalized = (hidden / groups.token_scales[:, None]).view(hidden.shape[0], -1, 16)
    return placed(
        call, {"x": _e2m1((normalized * (1 / groups.scales).unsqueeze(-1)).view(hidden.shape), recipe)}
    )


def _nvfp4_twice(call: Call, recipe: Nvfp4Recipe, dtype: torch.dtype) -> Outputs:
    groups = quantize_nvfp4(_values(call), recipe, intermediates=True)
    assert groups.scaled is not None
    return placed(call, {"x": _e2m1(groups.scaled.to(dtype).float(), recipe)})


def _nvfp4_scale_rounding(call: Call, recipe: Nvfp4Recipe, rounding: str) -> Outputs:
    hidden = _values(call).float()
    groups = quantize_nvfp4(hidden, recipe)
    codes = formats.encode(groups.raw_scales, "e4m3fn", rounding=cast(Any, rounding))
    outer = groups.token_scales.view(-1, 1, 1) if groups.token_scales is not None else torch.ones(1)
    scaled = hidden.view(hidden.shape[0], -1, 16) / outer / formats.decode(codes, "ue4m3").unsqueeze(-1)
    packed = _e2m1(scaled.view(hidden.shape), recipe)
    words = formats.pack_scale_words(codes) if call.op == "prepare_megamoe_nvfp4_inputs" else codes
    return placed(call, {"x": packed, "x_sf": words})


def _without_outer(call: Call, recipe: Nvfp4Recipe) -> Outputs:
    """As at one level, the token scale stored but not divided by."""
    groups = quantize_nvfp4(_values(call), replace(recipe, levels="block"))
    return _place_nvfp4(call, recipe, groups, quantize_nvfp4(_values(call), recipe).token_scales)


def _outer_one(call: Call, recipe: Nvfp4Recipe) -> Outputs:
    groups = quantize_nvfp4(_values(call), replace(recipe, levels="block"))
    return _place_nvfp4(call, recipe, groups, torch.ones(groups.codes.shape[0]))


def _stored(function: Callable[[Tensor], Tensor]) -> Callable[[Call, Nvfp4Recipe], Outputs]:
    def outputs(call: Call, recipe: Nvfp4Recipe) -> Outputs:
        scales = quantize_nvfp4(_values(call), recipe).token_scales
        assert scales is not None
        return placed(call, {"x_scales": function(scales)})

    return outputs


def _elements_by(power: int) -> Callable[[Call, Nvfp4Recipe], Outputs]:
    """Elements divided by the block scale and by outer^power; the stored scales as they should be."""

    def outputs(call: Call, recipe: Nvfp4Recipe) -> Outputs:
        hidden = _values(call).float()
        groups = quantize_nvfp4(hidden, recipe)
        assert groups.token_scales is not None
        outer = groups.token_scales.view(-1, 1, 1)
        values = hidden.view(hidden.shape[0], -1, 16)
        values = values * outer if power < 0 else values
        return placed(call, {"x": _e2m1((values / groups.scales.unsqueeze(-1)).view(hidden.shape), recipe)})

    return outputs


def _multiplied_by_outer(call: Call, recipe: Nvfp4Recipe) -> Outputs:
    """u = h * xs in place of h / xs, in scales and elements."""
    hidden = _values(call).float()
    scales = quantize_nvfp4(hidden, recipe).token_scales
    assert scales is not None
    groups = quantize_nvfp4(hidden * scales[:, None], replace(recipe, levels="block"))
    return _place_nvfp4(call, recipe, groups, scales)


_OUTER_SCALE: list[tuple[str, str, Callable[[Call, Nvfp4Recipe], Outputs]]] = [
    ("global_scale_missing", "the values were not divided by it", _without_outer),
    ("global_scale_missing", "it is 1 throughout", _outer_one),
    ("global_scale_missing", "1 is stored for it", _stored(torch.ones_like)),
    ("global_scale_missing", "only the elements were not divided by it", _elements_by(0)),
    ("global_scale_inverted", "the reciprocal is stored", _stored(torch.reciprocal)),
    ("global_scale_inverted", "the values were multiplied by it", _multiplied_by_outer),
    ("global_scale_inverted", "only the elements were multiplied by it", _elements_by(-1)),
]


def _shared_outputs(call: Call, recipe: Fp8GroupRecipe) -> Outputs:
    """The shared expert's MXFP8 copy of an NVFP4 staging."""
    expected = call.outputs.get("shared_x")
    if expected is None or expected.element_size() != 1:
        return {}
    groups = quantize_fp8_groups(hidden_of(call), recipe)
    assert groups.exponents is not None
    found: Outputs = {"shared_x": groups.codes, "shared_words": formats.pack_scale_words(groups.exponents)}
    place_pages(call, found)
    return placed(call, found)


def _activation_scale(call: Call) -> Tensor:
    return torch.tensor(float(call.params.get("l2_activation_scale") or 1.0))


def _shared_variants(call: Call) -> Iterator[Variant]:
    if not _shared_outputs(call, staging.MXFP8):
        return
    for variant in fp8_variants(staging.MXFP8, _shared_outputs):
        if variant.cause in FP8_CAUSES | {"negative_zero"} and "the payload" not in variant.detail:
            yield variant


def _alphas(_: Call, value: Tensor) -> Outputs:
    return {"l2_alpha": value.clone()}


def _alpha_variants(call: Call) -> Iterator[Variant]:
    if "l2_alpha" not in call.outputs or "w2_global_scale" not in call.inputs:
        return
    scale = call.inputs["w2_global_scale"].float()
    factor = _activation_scale(call)
    for cause, detail, value in (
        ("global_scale_missing", "the activation scale", scale),
        ("global_scale_missing", "the weight scale", factor.expand_as(scale)),
        ("global_scale_inverted", "the activation scale", scale / factor),
        ("global_scale_inverted", "the weight scale", factor / scale),
        ("global_scale_inverted", "both", 1 / (scale * factor)),
    ):
        yield Variant(cause, detail, bound(_alphas, value), by_token=False)
