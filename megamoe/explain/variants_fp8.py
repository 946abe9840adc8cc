"""Knobs of FP8 (and MXFP4) group quantization and its scale pages.

A table says which cause a changed field of a recipe is; what no field expresses (a second rounding, an
exponent through log2) is a small function beside it.
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
from megamoe.explain.variants_routing import routing_only, routing_outputs, routing_variants
from reference import formats, scale_pages, staging
from reference.fp8 import Fp8Groups, group_scales, quantize_fp8_groups
from reference.recipes import RECIPES, Fp8GroupRecipe
from reference.routing import ROUTING

FLOORS = (0.0, 1e-30, 1e-12, 1e-10, 4.48e-8, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, 448.0)

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
    *[("amax_floor", f"{floor:g}", {"amax_floor": floor}, 2) for floor in FLOORS],
    ("amax_floor", "none, and scale bytes from 0", {"amax_floor": 0.0, "scale_min_exponent": 0}, 2),
]
FP8_CAUSES = frozenset(cause for cause, *_ in _FP8_KNOBS)
DIVISION = {
    "divide": ("reciprocal_instead_of_division", "multiply_reciprocal"),
    "multiply_reciprocal": ("division_instead_of_reciprocal", "divide"),
}


@replays("prepare_megamoe_inputs", "mega_moe_pre_dispatch", "mega_moe_pre_dispatch_sm90")
def _fp8(call: Call) -> Replay | None:
    if "hidden_states" not in call.inputs or not {"x", "x_sf", "x_scales", "shared_x_sf", "l2_alpha"} & set(
        call.outputs
    ):
        return routing_only(call)
    recipe = _fp8_recipe(call)
    if recipe is None:
        return routing_only(call)

    def outputs(call: Call, changed: Fp8GroupRecipe) -> Outputs:
        return _place_fp8(call, changed, quantize_fp8_groups(hidden_of(call), changed))

    def variants(call: Call) -> Iterator[Variant]:
        yield from fp8_variants(recipe, outputs)
        yield from routing_variants(call)

    def intermediates(call: Call, output: str) -> Intermediates | None:
        if output not in ("x", "x_sf"):
            return None
        groups = quantize_fp8_groups(hidden_of(call), recipe, intermediates=True)
        assert groups.scaled is not None
        return Intermediates(groups.scaled, groups.scales, recipe.group)

    baseline = lambda c: {**outputs(c, recipe), **routing_outputs(c, ROUTING)}  # noqa: E731
    return Replay(baseline, variants, intermediates, few_tokens(call))


def few_tokens(call: Call) -> int:
    """Tokens that are quick to quantize forty times over."""
    return max(64, (1 << 19) // call.inputs["hidden_states"].shape[-1])


def hidden_of(call: Call) -> Tensor:
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
        fp4 = "x" in call.outputs and call.outputs["x"].shape[-1] * 2 == hidden_of(call).shape[-1]
        names.append(
            "fp8_fp32_g128_divide"
            if "sm90" in call.op
            else f"{'mxfp4' if fp4 else 'fp8_ue8m0'}_g{params.get('group_size', 32)}_pre_dispatch"
        )
    known = [r for r in RECIPES.values() if isinstance(r, Fp8GroupRecipe)]
    named = [
        cast(Fp8GroupRecipe, RECIPES[name]) for name in names if isinstance(RECIPES.get(name), Fp8GroupRecipe)
    ]
    number = hidden_of(call).shape[0]
    few = call if number <= 32 else call.tokens(spread(number, 32))
    for recipe in [*named, *known]:
        if hidden_of(few).shape[-1] % recipe.group == 0 and _reproduces(
            few, _place_fp8(few, recipe, quantize_fp8_groups(hidden_of(few), recipe))
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
    place_pages(call, found)
    return placed(call, found)


def place_pages(call: Call, found: Outputs) -> None:
    """shared_x_sf from the words of ``found``; rows of no token keep what the expected side shows."""
    pages, block_m = call.outputs.get("shared_x_sf"), call.params.get("shared_block_m")
    words = found.get("shared_words", found.get("x_sf"))
    found.pop("shared_words", None)
    if pages is None or block_m is None or words is None or words.dtype != torch.int32:
        return
    whole = pages.clone(memory_format=torch.preserve_format)
    scale_pages.write_scale_pages(words, int(block_m), whole)
    found["shared_x_sf"] = whole


def fp8_variants(
    recipe: Fp8GroupRecipe, outputs: Callable[[Call, Fp8GroupRecipe], Outputs]
) -> Iterator[Variant]:
    knobs = list(_FP8_KNOBS)
    for field, what in (("scale_division", "scale"), ("element_division", "elements")):
        cause, value = DIVISION[getattr(recipe, field)]
        knobs.append((cause, what, {field: value}, 1))
    both = {field: DIVISION[getattr(recipe, field)][1] for field in ("scale_division", "element_division")}
    knobs.append((DIVISION[recipe.scale_division][0], "scale and elements", both, 2))
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
        return lambda call: _place_fp8(call, recipe, make(hidden_of(call), recipe, *values))

    if recipe.scale_format == "ue8m0":
        # Where the unrounded scale divides, how it was computed shows too.
        division = DIVISION[recipe.scale_division][1]
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
