"""Knobs of the staging operations: FP8 and NVFP4 quantization, scale pages, routing and EPLB.

A knob's table says which cause a changed field of a recipe is; what no field expresses (a second rounding, an
exponent through log2, an outer scale that is dropped) is a small function beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from megamoe.explain.subject import spread
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
from reference import eplb, formats, routing, scale_pages, staging
from reference.fp8 import Fp8Groups, group_scales, quantize_fp8_groups
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES, Fp8GroupRecipe, Nvfp4Recipe, RoutingRecipe
from reference.routing import ROUTING

_FLOORS = (0.0, 1e-30, 1e-12, 1e-10, 4.48e-8, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, 448.0)
_ALL = 1 << 62  # routing is cheap, and replicas are chosen by row: never on some rows only
_INT_MAX = (2**31 - 1, 2**63 - 1)

# (cause, detail, knobs, cost)
_FP8_KNOBS: list[tuple[str, str, dict[str, Any], int]] = [
    ("scale_rounding_floor", "", {"scale_rounding": "floor"}, 1),
    ("scale_rounding_nearest", "", {"scale_rounding": "nearest"}, 1),
    ("scale_rounding_nearest", "ties to the even exponent", {"scale_rounding": "even"}, 2),
    ("scale_rounded_after_quantization", "", {"scale_rounded_after_quantization": True}, 1),
    ("ties_away", "", {"element_rounding": "away"}, 1),
    ("ties_toward_zero", "", {"element_rounding": "half_to_zero"}, 1),
    ("truncation", "", {"element_rounding": "toward_zero"}, 1),
    ("overflow_nan", "", {"overflow": "nan"}, 1),
    ("flush_to_zero", "subnormal codes become zero", {"subnormals": "flush"}, 1),
    (
        "flush_to_zero",
        "subnormal codes become zero without a sign",
        {"subnormals": "flush", "negative_zero": "drop"},
        2,
    ),
    ("nan_propagated", "", {"nan_amax": "propagate"}, 1),
    ("inf_handling", "the reciprocal of 2^127 is zero", {"inf_reciprocal": "zero"}, 1),
    ("inf_handling", "the reciprocal of 2^127 is subnormal", {"inf_reciprocal": "subnormal"}, 1),
    *[("amax_floor", f"{floor:g}", {"amax_floor": floor}, 2) for floor in _FLOORS],
    ("amax_floor", "none, and scale bytes from 0", {"amax_floor": 0.0, "scale_min_exponent": 0}, 2),
]
_DIVISION = {
    "divide": ("reciprocal_instead_of_division", "multiply_reciprocal"),
    "multiply_reciprocal": ("division_instead_of_reciprocal", "divide"),
}
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
    *[("amax_floor", f"token {floor:g}", {"token_floor": floor}, 2) for floor in _FLOORS],
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


@replays("prepare_megamoe_inputs", "mega_moe_pre_dispatch", "mega_moe_pre_dispatch_sm90")
def _fp8(call: Call) -> Replay | None:
    if "hidden_states" not in call.inputs or not {"x", "x_sf", "x_scales", "shared_x_sf", "l2_alpha"} & set(
        call.outputs
    ):
        return _routing_only(call)
    recipe = _fp8_recipe(call)
    if recipe is None:
        return _routing_only(call)

    def outputs(call: Call, changed: Fp8GroupRecipe) -> Outputs:
        return _place_fp8(call, changed, quantize_fp8_groups(_hidden(call), changed))

    def variants(call: Call) -> Iterator[Variant]:
        yield from _fp8_variants(recipe, outputs)
        yield from _routing_variants(call)

    def intermediates(call: Call, output: str) -> Intermediates | None:
        if output not in ("x", "x_sf"):
            return None
        groups = quantize_fp8_groups(_hidden(call), recipe, intermediates=True)
        assert groups.scaled is not None
        return Intermediates(groups.scaled, groups.scales, recipe.group)

    baseline = lambda c: {**outputs(c, recipe), **_routing_outputs(c, ROUTING)}  # noqa: E731
    return Replay(baseline, variants, intermediates, _few(call))


def _few(call: Call) -> int:
    """Tokens that are quick to quantize forty times over."""
    return max(64, (1 << 19) // call.inputs["hidden_states"].shape[-1])


def _hidden(call: Call) -> Tensor:
    hidden = call.inputs["hidden_states"]
    return hidden[: int(call.params["num_tokens"])] if "num_tokens" in call.params else hidden


def _fp8_recipe(call: Call) -> Fp8GroupRecipe | None:
    """The recipe that the call names, or else the first that reproduces the outputs of a few tokens."""
    params = call.params
    names = [
        str(params.get("recipe", "")),
        {"mxfp8": "fp8_ue8m0_g32", "fp8_g128_f32": "fp8_fp32_g128"}.get(str(params.get("hidden_quant")), ""),
    ]
    if "pre_dispatch" in call.op:
        fp4 = "x" in call.outputs and call.outputs["x"].shape[-1] * 2 == _hidden(call).shape[-1]
        names.append(
            "fp8_fp32_g128_divide"
            if "sm90" in call.op
            else f"{'mxfp4' if fp4 else 'fp8_ue8m0'}_g{params.get('group_size', 32)}_pre_dispatch"
        )
    known = [r for r in RECIPES.values() if isinstance(r, Fp8GroupRecipe)]
    named = [
        cast(Fp8GroupRecipe, RECIPES[name]) for name in names if isinstance(RECIPES.get(name), Fp8GroupRecipe)
    ]
    number = _hidden(call).shape[0]
    few = call if number <= 32 else call.tokens(spread(number, 32))
    for recipe in [*named, *known]:
        if _hidden(few).shape[-1] % recipe.group == 0 and _reproduces(
            few, _place_fp8(few, recipe, quantize_fp8_groups(_hidden(few), recipe))
        ):
            return recipe
    return None


def _reproduces(call: Call, outputs: Outputs) -> bool:
    return bool(outputs) and all(
        torch.equal(t.contiguous().view(torch.uint8), call.outputs[n].contiguous().view(torch.uint8))
        for n, t in outputs.items()
    )


def _place_fp8(call: Call, recipe: Fp8GroupRecipe, groups: Fp8Groups) -> Outputs:
    codes = formats.pack_e2m1(groups.codes) if recipe.element_format == "e2m1" else groups.codes
    found: Outputs = {"x": codes}
    if groups.exponents is None:
        found["x_sf"] = groups.scales
    else:
        dense = "pre_dispatch" in call.op
        found["x_sf"] = (
            formats.pack_scale_words(groups.exponents)
            if dense
            else staging.ue8m0_tile_words(groups.exponents, recipe.group)
        )
    _place_pages(call, found)
    return placed(call, found)


def _place_pages(call: Call, found: Outputs) -> None:
    """shared_x_sf from the words of ``found``; rows of no token keep what the expected side shows."""
    pages, block_m = call.outputs.get("shared_x_sf"), call.params.get("shared_block_m")
    words = found.get("shared_words", found.get("x_sf"))
    found.pop("shared_words", None)
    if pages is None or block_m is None or words is None or words.dtype != torch.int32:
        return
    whole = pages.clone(memory_format=torch.preserve_format)
    scale_pages.write_scale_pages(words, int(block_m), whole)
    found["shared_x_sf"] = whole


def _fp8_variants(
    recipe: Fp8GroupRecipe, outputs: Callable[[Call, Fp8GroupRecipe], Outputs]
) -> Iterator[Variant]:
    knobs = list(_FP8_KNOBS)
    for field, what in (("scale_division", "scale"), ("element_division", "elements")):
        cause, value = _DIVISION[getattr(recipe, field)]
        knobs.append((cause, what, {field: value}, 1))
    both = {field: _DIVISION[getattr(recipe, field)][1] for field in ("scale_division", "element_division")}
    knobs.append((_DIVISION[recipe.scale_division][0], "scale and elements", both, 2))
    knobs.append(
        ("negative_zero", "", {"negative_zero": "drop" if recipe.negative_zero == "keep" else "keep"}, 1)
    )
    for cause, detail, change, cost in knobs:
        changed = turned(recipe, change)
        if changed is None or (cause == "overflow_nan" and recipe.element_format == "e2m1"):
            continue
        if cause.startswith("scale_round") and recipe.scale_format == "fp32":
            continue
        yield Variant(cause, detail, bound(outputs, changed), cost)

    def with_groups(make: Callable[..., Fp8Groups], *values: Any) -> Callable[[Call], Outputs]:
        return lambda call: _place_fp8(call, recipe, make(_hidden(call), recipe, *values))

    if recipe.scale_format == "ue8m0":
        # Where the unrounded scale divides, how it was computed shows too.
        division = _DIVISION[recipe.scale_division][1]
        after = turned(recipe, {"scale_rounded_after_quantization": True, "scale_division": division})
        yield Variant(
            "scale_rounded_after_quantization", f"scale: {division}", lambda call: outputs(call, after), 2
        )
    yield Variant("amax_floor", "1 for zero groups only", with_groups(_floor_of_zero_groups), 2)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield Variant(
            "double_rounding",
            f"through {name}",
            with_groups(_rounded_twice, dtype),
            1,
        )
    if recipe.scale_format == "ue8m0":
        for how in ("log2", "frexp"):
            yield Variant("scale_rounding_log2", how, with_groups(_with_exponents, how), 1)
        for step, cause in ((1, "scale_plus_one"), (-1, "scale_minus_one")):
            # One step down with its payload is what rounding down does wherever a scale is no power of two:
            # it is named only where that does not fit.
            yield Variant(
                cause,
                "the payload follows",
                with_groups(_with_exponents, "", step),
                2 if step > 0 else 3,
            )


def _floor_of_zero_groups(hidden: Tensor, recipe: Fp8GroupRecipe) -> Fp8Groups:
    """No lower bound, but an amax of zero replaced by one."""
    without = replace(recipe, amax_floor=0.0)
    groups = quantize_fp8_groups(hidden, without)
    scales = group_scales(torch.where(groups.amax == 0, 1.0, groups.amax), without)
    is_zero = (groups.amax == 0).repeat_interleave(recipe.group, 1)
    codes = groups.codes.masked_fill(is_zero, 0)
    return Fp8Groups(codes, scales.exponents, scales.stored, groups.amax, scales.raw, scales.reciprocal)


def _encode(values: Tensor, recipe: Fp8GroupRecipe) -> Tensor:
    return formats.encode(
        values,
        recipe.element_format,
        rounding=recipe.element_rounding,
        overflow=recipe.overflow,
        negative_zero=recipe.negative_zero,
        subnormals=recipe.subnormals,
    )


def _rounded_twice(hidden: Tensor, recipe: Fp8GroupRecipe, dtype: torch.dtype) -> Fp8Groups:
    groups = quantize_fp8_groups(hidden, recipe, intermediates=True)
    assert groups.scaled is not None
    codes = _encode(groups.scaled.to(dtype).float(), recipe)
    return Fp8Groups(codes, groups.exponents, groups.scales, groups.amax, groups.raw_scale, groups.reciprocal)


def _with_exponents(hidden: Tensor, recipe: Fp8GroupRecipe, how: str, step: int = 0) -> Fp8Groups:
    """The exponents computed another way (or off by ``step``), and elements divided by the scales that they
    give.
    """
    groups = quantize_fp8_groups(hidden, recipe)
    assert groups.exponents is not None
    if how == "log2":
        exponents = (groups.raw_scale.log2().ceil() + 127).clamp(1, 254).to(torch.uint8)
    elif how == "frexp":
        exponents = (torch.frexp(groups.raw_scale).exponent + 127).clamp(1, 254).to(torch.uint8)
    else:
        exponents = (groups.exponents.to(torch.int16) + step).clamp(1, 254).to(torch.uint8)
    bits = (254 - exponents.to(torch.int32)) << 23
    if recipe.inf_reciprocal == "subnormal":
        bits = torch.where(bits == 0, 1 << 22, bits)  # 2^-127
    reciprocal = bits.view(torch.float32)
    values = hidden.float().view(hidden.shape[0], -1, recipe.group) * reciprocal.unsqueeze(-1)
    codes = _encode(values.view(hidden.shape), recipe)
    scales = formats.decode_ue8m0_shift(exponents)
    return Fp8Groups(codes, exponents, scales, groups.amax, groups.raw_scale, reciprocal)


# ---- NVFP4


@replays(
    "prepare_megamoe_nvfp4_inputs", "prepare_megamoe_nvfp4_block_inputs", "prepare_megamoe_nvfp4_with_norm"
)
def _nvfp4(call: Call) -> Replay | None:
    if "hidden_states" not in call.inputs or not {"x", "x_sf", "x_scales", "shared_x_sf", "l2_alpha"} & set(
        call.outputs
    ):
        return _routing_only(call)
    recipe = cast(
        Nvfp4Recipe, RECIPES["nvfp4_token" if call.op == "prepare_megamoe_nvfp4_inputs" else "nvfp4_block"]
    )

    def outputs(call: Call, changed: Nvfp4Recipe) -> Outputs:
        return _place_nvfp4(call, changed, quantize_nvfp4(_values(call), changed))

    def variants(call: Call) -> Iterator[Variant]:
        yield from _nvfp4_variants(recipe, outputs)
        yield from _shared_variants(call)
        yield from _alpha_variants(call)
        yield from _routing_variants(call)

    def baseline(call: Call) -> Outputs:
        found = {
            **outputs(call, recipe),
            **_routing_outputs(call, ROUTING),
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

    return Replay(baseline, variants, intermediates, _few(call))


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
        cause, value = _DIVISION[recipe.token_scale]
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
    groups = quantize_fp8_groups(_hidden(call), recipe)
    assert groups.exponents is not None
    found: Outputs = {"shared_x": groups.codes, "shared_words": formats.pack_scale_words(groups.exponents)}
    _place_pages(call, found)
    return placed(call, found)


def _activation_scale(call: Call) -> Tensor:
    return torch.tensor(float(call.params.get("l2_activation_scale") or 1.0))


def _shared_variants(call: Call) -> Iterator[Variant]:
    if not _shared_outputs(call, staging.MXFP8):
        return
    for variant in _fp8_variants(staging.MXFP8, _shared_outputs):
        if (
            variant.cause in {cause for cause, *_ in _FP8_KNOBS} | {"negative_zero"}
            and "the payload" not in variant.detail
        ):
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


# ---- routing


@replays("prepare_megamoe_bf16_inputs", "eplb_map_to_physical_and_record")
def _routing_only(call: Call) -> Replay | None:
    if not ({"topk_ids", "topk_idx_in"} & set(call.inputs)):
        return None
    return Replay(lambda c: _routing_outputs(c, ROUTING), _routing_variants, few_tokens=_ALL)


_ROUTING_KNOBS: list[tuple[str, str, dict[str, Any], int]] = [
    ("padded_tokens_counted", "", {"count_padded_tokens": True}, 1),
    ("replica_hash_width", "signed 32 bits", {"replica_hash_signed": True}, 1),
    (
        "replica_hash_width",
        "signed 32 bits, floor remainder",
        {"replica_hash_signed": True, "replica_remainder": "floor"},
        2,
    ),
    *[("replica_hash_width", f"{bits} bits", {"replica_hash_bits": bits}, 2) for bits in (16, 24, 31, 62)],
    ("replica_by_slot", "hash of the flat slot", {"replica_hash_by": "slot"}, 1),
    (
        "replica_by_slot",
        "flat slot modulo replicas",
        {"replica_hash_by": "slot", "replica_hash_multiplier": 1},
        1,
    ),
    ("invalid_id_kept", "", {"invalid_id": "keep"}, 1),
]


def _routing_variants(call: Call) -> Iterator[Variant]:
    is_mapped = "logical_to_physical_map" in call.inputs
    if is_mapped:
        for cause, detail, knobs, cost in _ROUTING_KNOBS:
            changed = turned(ROUTING, knobs)
            if changed is not None:
                yield Variant(
                    cause,
                    detail,
                    bound(_routing_outputs, changed),
                    cost,
                    by_token=False,
                )
        yield Variant(
            "id_width",
            "ids cut to 32 bits before mapping",
            bound(_routing_outputs, ROUTING, narrow=True),
            2,
            by_token=False,
        )
    if "is_padding" in call.inputs:
        for what in (("ids", "weights"), ("ids",), ("weights",)):
            yield Variant(
                "padding_not_masked",
                " and ".join(what),
                bound(_routing_outputs, ROUTING, unmasked=what),
                by_token=False,
            )
        for sentinel in (0, -2, *_INT_MAX):
            changed = turned(ROUTING, {"padding_id": sentinel})
            yield Variant(
                "padding_sentinel",
                f"id {sentinel}",
                bound(_routing_outputs, changed),
                2,
                by_token=False,
            )
        for weight in (1.0, float("nan"), -1.0):
            changed = turned(ROUTING, {"padding_weight": weight})
            yield Variant(
                "padding_sentinel",
                f"weight {weight}",
                bound(_routing_outputs, changed),
                2,
                by_token=False,
            )


def _routing_outputs(
    call: Call, recipe: RoutingRecipe, *, unmasked: tuple[str, ...] = (), narrow: bool = False
) -> Outputs:
    inputs = call.inputs
    ids = inputs.get("topk_ids", inputs.get("topk_idx_in"))
    weights = inputs.get("topk_weights", inputs.get("topk_weights_in"))
    if ids is None:
        return {}
    weights = torch.ones(ids.shape) if weights is None else weights
    masked = routing.repack_topk(ids, weights, inputs.get("is_padding"), recipe)
    plain = routing.repack_topk(ids, weights, None, recipe)
    routed_ids = plain.ids if "ids" in unmasked else masked.ids
    routed_weights = plain.weights if "weights" in unmasked else masked.weights
    factor = call.params.get("routed_scaling_factor")
    if factor is not None:
        routed_weights = routed_weights * torch.tensor(float(factor))
    found: Outputs = {}
    if "logical_to_physical_map" in inputs:
        if narrow:
            routed_ids = routed_ids.to(torch.int32).to(torch.int64)
        unpadded = call.params.get("num_unpadded_tokens")
        load = inputs.get("expert_load")
        mapping = eplb.map_experts(
            routed_ids.to(torch.int32).to(torch.int64)
            if call.op == "eplb_map_to_physical_and_record"
            else routed_ids,
            inputs["logical_to_physical_map"],
            inputs["logical_replica_count"],
            0 if load is None else load.numel(),
            None if unpadded is None else int(unpadded),
            recipe,
        )
        routed_ids = mapping.ids
        if load is not None:
            records = call.params.get("record", call.params.get("eplb", "record"))
            added = mapping.load.to(load.dtype) if records in (True, "record") else torch.zeros_like(load)
            found["expert_load"] = load + added
        if "physical_ids" in call.outputs:
            found["physical_ids"] = routed_ids.to(call.outputs["physical_ids"].dtype)
    for name in ("topk_idx_out", "topk_idx"):
        found[name] = routed_ids
    for name in ("topk_weights_out", "topk_weights"):
        found[name] = routed_weights
    return placed(call, found)


# ---- decoding


@replays("ue8m0_uint8_to_float")
def _ue8m0(call: Call) -> Replay | None:
    if "sf" not in call.inputs:
        return None

    def decoded(call: Call, function: Callable[[Tensor], Tensor]) -> Outputs:
        values = function(call.inputs["sf"].view(torch.uint8))
        return {name: values for name in call.outputs if not name.startswith("actual/")}

    def variants(_: Call) -> Iterator[Variant]:
        as_format = bound(decoded, lambda codes: formats.decode(codes, "ue8m0"))
        yield Variant("special_codes", "", as_format, by_token=False)

    return Replay(bound(decoded, formats.decode_ue8m0_shift), variants, few_tokens=_ALL)
