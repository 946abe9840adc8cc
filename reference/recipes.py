"""Named arithmetic: which floor, which division, which rounding. One field a knob, one entry a kernel.

A recipe is data: turning one knob is ``dataclasses.replace(recipe, knob=value)``, and ``KNOBS`` lists what
each knob can be turned to. Every entry names its source in NUMERICS.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

ScaleFormat = Literal["ue8m0", "fp32"]
Division = Literal["divide", "multiply_reciprocal"]
ScaleRounding = Literal["ceil", "floor", "nearest"]
InfReciprocal = Literal["subnormal", "zero"]
ElementRounding = Literal["even", "away", "toward_zero", "half_to_zero"]
BlockDivision = Literal["divide", "multiply_reciprocal", "divide_by_product", "multiply_reciprocals"]
BlockElementDivision = Literal["divide", "compare_scaled", "multiply_reciprocal", "divide_by_product"]
Overflow = Literal["saturate", "nan"]
NegativeZero = Literal["keep", "drop"]
Subnormals = Literal["keep", "flush"]


@dataclass(frozen=True)
class Fp8GroupRecipe:
    """One scale per group of consecutive columns; elements are E4M3 or, for ``element_format`` "e2m1", E2M1.

    amax_floor: lower bound of a group's largest magnitude, rounded to float32.
    scale_division: raw scale = amax / largest element value, or amax * fl(1 / largest element value).
    scale_rounding: to a power of two (ue8m0 only). scale_min_exponent: smallest UE8M0 byte.
    element_division: value * (1 / scale), or value / scale.
    inf_reciprocal: 1 / 2^127 (byte 254) as the subnormal 2^-127, or as the zero of (254 - byte) << 23.
    nan_amax: "ignore" NaN elements in the group's amax, as GPU max instructions do, or "propagate" them.
    element_rounding, overflow, negative_zero, subnormals: see reference.formats.encode.
    scale_rounded_after_quantization: elements are divided by the raw scale and only the stored scale is
    rounded.
    """

    name: str
    group: int
    scale_format: ScaleFormat
    amax_floor: float = 1e-4
    scale_division: Division = "multiply_reciprocal"
    scale_rounding: ScaleRounding = "ceil"
    scale_min_exponent: int = 1
    element_format: Literal["e4m3fn", "e2m1"] = "e4m3fn"
    element_division: Division = "multiply_reciprocal"
    inf_reciprocal: InfReciprocal = "subnormal"
    nan_amax: Literal["ignore", "propagate"] = "ignore"
    element_rounding: ElementRounding = "even"
    overflow: Overflow = "saturate"
    negative_zero: NegativeZero = "keep"
    subnormals: Subnormals = "keep"
    scale_rounded_after_quantization: bool = False
    source: str = ""


@dataclass(frozen=True)
class Nvfp4Recipe:
    """E2M1 elements, one E4M3 scale per ``group`` columns and, at level "token", one float32 scale a token.

    token_floor: lower bound of a row's largest magnitude; token_scale: how it is divided by 2688 = 448 * 6.
    The outer scale o below is the token scale, or at level "block" a global scale handed in with the values
    (1 if none).
    block_division: block scale = a * fl(1/6) ("multiply_reciprocal") or a / 6 ("divide"), where a is the
        group's amax after division by o; or amax / fl(6 o) ("divide_by_product"), or
        fl(amax * fl(1/6)) * fl(1/o) ("multiply_reciprocals"), with the amax of the original values.
    block_floor, block_ceiling: bounds before rounding to E4M3; 0 and inf switch them off.
    element_division: value / o / S ("divide"); the value, divided by o, against the boundaries times S,
        exactly ("compare_scaled"); value / fl(S o) ("divide_by_product"); value * (1 / fl(S o))
        ("multiply_reciprocal").
    zero_scale: what elements become where S is 0: "zero" codes, or IEEE arithmetic ("ieee").
    element_rounding, negative_zero, nan_code: of the E2M1 conversion.
    """

    name: str
    levels: Literal["token", "block"]
    group: int = 16
    token_floor: float = 1e-12
    token_scale: Division = "multiply_reciprocal"
    block_division: BlockDivision = "multiply_reciprocal"
    block_floor: float = 2.0**-9
    block_ceiling: float = 448.0
    element_division: BlockElementDivision = "divide"
    zero_scale: Literal["ieee", "zero"] = "ieee"
    element_rounding: ElementRounding = "even"
    negative_zero: NegativeZero = "drop"
    nan_code: int = 0
    source: str = ""


@dataclass(frozen=True)
class RoutingRecipe:
    """Repacking of top-k ids and weights, and the mapping of logical experts to replicas.

    padding_id, padding_weight: what the slots of a padding token hold.
    count_padded_tokens: record load for tokens at or past the number of unpadded tokens too.
    replica_hash_multiplier: hash of token t is t * multiplier, reduced to replica_hash_bits bits, as a signed
        number if replica_hash_signed.
    replica_hash_by: hash the token's row, so that all its slots share one, or the flat slot.
    replica_remainder: of floor division, or of truncating division as in C.
    invalid_id: what an id outside the logical experts becomes: -1, or "keep".
    """

    name: str
    padding_id: int = -1
    padding_weight: float = 0.0
    count_padded_tokens: bool = False
    replica_hash_multiplier: int = 2654435769
    replica_hash_bits: int = 32
    replica_hash_signed: bool = False
    replica_hash_by: Literal["token", "slot"] = "token"
    replica_remainder: Literal["floor", "truncate"] = "truncate"
    invalid_id: Literal["minus_one", "keep"] = "minus_one"
    source: str = ""


Recipe = Fp8GroupRecipe | Nvfp4Recipe | RoutingRecipe

_VLLM_FP8 = "NUMERICS 2, 2.3 and 2.4 (vLLM 0.33 staging, measured on an H200)"
_VLLM_UE8M0 = [
    Fp8GroupRecipe(f"fp8_ue8m0_g{group}", group, "ue8m0", source=_VLLM_FP8) for group in (32, 64, 128)
]
_VLLM_FP32 = [
    Fp8GroupRecipe(f"fp8_fp32_g{group}", group, "fp32", source=_VLLM_FP8) for group in (16, 32, 64, 128)
]
_PRE_DISPATCH = "NUMERICS 2.8 (DeepGEMM pre_dispatch for SM100: IEEE division, reciprocal (254 - b) << 23)"
_PRE_DISPATCH_FP8 = [
    Fp8GroupRecipe(
        f"fp8_ue8m0_g{group}_pre_dispatch",
        group,
        "ue8m0",
        scale_division="divide",
        inf_reciprocal="zero",
        source=_PRE_DISPATCH,
    )
    for group in (32, 64, 128)
]
_PRE_DISPATCH_FP4 = [
    Fp8GroupRecipe(
        f"mxfp4_g{group}_pre_dispatch",
        group,
        "ue8m0",
        scale_division="divide",
        element_format="e2m1",
        inf_reciprocal="zero",
        element_rounding="half_to_zero",
        negative_zero="drop",
        source=_PRE_DISPATCH + "; E2M1 ties toward zero (sgl-deep-gemm 0.1.5)",
    )
    for group in (32, 64, 128)
]

_ALL: list[Recipe] = [
    *_VLLM_UE8M0,
    *_VLLM_FP32,
    *_PRE_DISPATCH_FP8,
    *_PRE_DISPATCH_FP4,
    Fp8GroupRecipe(
        "fp8_fp32_g128_divide",
        128,
        "fp32",
        amax_floor=1e-10,
        scale_division="divide",
        source="NUMERICS 2.8 and 17 (DeepGEMM pre_dispatch for SM90, measured on an H200)",
    ),
    Fp8GroupRecipe(
        "fp8_ue8m0_g32_helper",
        32,
        "ue8m0",
        scale_division="divide",
        nan_amax="propagate",
        source="NUMERICS 2.8 (DeepGEMM per_token_cast_to_fp8 on a CPU; on CUDA the division is a product)",
    ),
    Fp8GroupRecipe(
        "fp8_ue8m0_g32_no_floor",
        32,
        "ue8m0",
        amax_floor=0.0,
        scale_min_exponent=0,
        source="NUMERICS 8.7 (DeepGEMM 0.2.5 in-kernel requantization: a zero group has byte 0)",
    ),
    Fp8GroupRecipe(
        "mxfp4_g32",
        32,
        "ue8m0",
        scale_division="divide",
        element_format="e2m1",
        negative_zero="drop",
        source="NUMERICS 3e (per_token_cast_to_fp4)",
    ),
    Nvfp4Recipe("nvfp4_token", "token", source="NUMERICS 3a (vLLM prepare_megamoe_nvfp4_inputs)"),
    Nvfp4Recipe(
        "nvfp4_block",
        "block",
        block_ceiling=float("inf"),
        element_division="compare_scaled",
        source="NUMERICS 3b (MuseSpark one-level)",
    ),
    Nvfp4Recipe(
        "nvfp4_token_pre_dispatch",
        "token",
        token_floor=1e-4,
        token_scale="divide",
        block_division="divide_by_product",
        block_floor=0.0,
        block_ceiling=float("inf"),
        element_division="multiply_reciprocal",
        zero_scale="zero",
        source="NUMERICS 3c (DeepGEMM pre_dispatch, NVFP4)",
    ),
    Nvfp4Recipe(
        "nvfp4_block_reciprocal",
        "block",
        block_division="divide",
        block_floor=0.0,
        block_ceiling=float("inf"),
        element_division="multiply_reciprocal",
        zero_scale="zero",
        source="NUMERICS 3c (sgl-deep-gemm utils.math.per_token_cast_to_nvfp4)",
    ),
    Nvfp4Recipe(
        "nvfp4_global_divide",
        "block",
        block_division="divide_by_product",
        element_division="divide_by_product",
        source="NUMERICS 3c (DeepGEMM in vLLM, utils.nvfp4.per_token_cast_to_nvfp4)",
    ),
    Nvfp4Recipe(
        "nvfp4_global_reciprocal",
        "block",
        block_division="multiply_reciprocals",
        block_ceiling=float("inf"),
        element_division="divide_by_product",
        source="NUMERICS 3c (DeepGEMM in vLLM, utils.math.per_token_cast_to_nvfp4)",
    ),
    RoutingRecipe("routing", source="NUMERICS 6.1, 6.3, 6.4 (vLLM staging and map-and-record)"),
    RoutingRecipe(
        "routing_slot_hash",
        replica_hash_multiplier=1,
        replica_hash_by="slot",
        count_padded_tokens=True,
        source="NUMERICS 6.6 (older vLLM: replica by flat slot, no unpadded limit)",
    ),
    RoutingRecipe(
        "routing_keep_invalid", invalid_id="keep", source="NUMERICS 6.6 (SGLang keeps invalid ids)"
    ),
]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def get_recipe(name: str) -> Recipe:
    """A recipe by name. ValueError for an unknown one."""
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {sorted(RECIPES)}, got {name!r}")
    return RECIPES[name]


def _choices(kind: type) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for field, hint in get_type_hints(kind).items():
        if hint is bool:
            found[field] = (False, True)
        elif get_args(hint):
            found[field] = get_args(hint)
    return found


KNOBS: dict[type, dict[str, tuple[object, ...]]] = {
    kind: _choices(kind) for kind in (Fp8GroupRecipe, Nvfp4Recipe, RoutingRecipe)
}
"""Kind of recipe -> field -> the values that it can take, for the fields that have a closed list of them."""
