"""Staging as pure functions: tensors in, a frozen dataclass out, with the intermediates when asked for.

``reference.staging`` writes these results into the caller's buffers, under the production signatures.

Sources: NUMERICS 2 (FP8), 3a (NVFP4 two-level), 3b (one-level), 3d (norm-fused), 6 (routing, EPLB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from reference._float32 import to_half
from reference.eplb import EplbMapping, map_experts, unpadded_tokens
from reference.formats import pack_scale_words
from reference.fp8 import Fp8Groups, quantize_fp8_groups
from reference.nvfp4 import Nvfp4Groups, RmsNorm, quantize_nvfp4, rms_norm_bf16
from reference.recipes import RECIPES, Fp8GroupRecipe, Nvfp4Recipe, RoutingRecipe
from reference.routing import ROUTING, repack_topk

MXFP8 = cast(Fp8GroupRecipe, RECIPES["fp8_ue8m0_g32"])
NVFP4_TOKEN = cast(Nvfp4Recipe, RECIPES["nvfp4_token"])
NVFP4_BLOCK = cast(Nvfp4Recipe, RECIPES["nvfp4_block"])

_TILE = 128


@dataclass(frozen=True)
class StagedFp8:
    """x: uint8 [M, H] E4M3 codes. x_sf: int32 [M, H / 128] words, or float32 [M, H / group].
    groups: how they came."""

    x: Tensor
    x_sf: Tensor
    groups: Fp8Groups


@dataclass(frozen=True)
class StagedNvfp4:
    """x: uint8 [M, H / 2]. x_sf: int32 [M, H / 64] words ("token") or uint8 [M, H / 16] ("block"). x_scales:
    float32 [M] or None. groups: how they came. norm: the normalization before it, if there was one."""

    x: Tensor
    x_sf: Tensor
    x_scales: Tensor | None
    groups: Nvfp4Groups
    norm: RmsNorm | None = None


@dataclass(frozen=True)
class StagedRouting:
    """topk_idx: int64 [M, K], topk_weights: float32 [M, K]. mapping: of the replicas, None without EPLB."""

    topk_idx: Tensor
    topk_weights: Tensor
    mapping: EplbMapping | None


def stage_fp8(hidden: Tensor, recipe: Fp8GroupRecipe = MXFP8, *, intermediates: bool = False) -> StagedFp8:
    """Quantizes hidden [M, H] and packs its scales as staging stores them. Source: NUMERICS 2 and 1.5."""
    groups = quantize_fp8_groups(hidden, recipe, intermediates=intermediates)
    scales = groups.scales if groups.exponents is None else ue8m0_tile_words(groups.exponents, recipe.group)
    return StagedFp8(groups.codes, scales, groups)


def ue8m0_tile_words(exponents: Tensor, group: int) -> Tensor:
    """UE8M0 bytes [M, H / group] -> int32 [M, H / 128]: a word a tile, bytes without a group zero."""
    per_tile = _TILE // group
    tiles = exponents.view(exponents.shape[0], -1, per_tile)
    return pack_scale_words(tiles).squeeze(-1)


def stage_nvfp4(
    hidden: Tensor, recipe: Nvfp4Recipe = NVFP4_TOKEN, *, intermediates: bool = False
) -> StagedNvfp4:
    """Quantizes hidden [M, H] to NVFP4 as staging stores it. Source: NUMERICS 3a, 3b."""
    groups = quantize_nvfp4(hidden, recipe, intermediates=intermediates)
    scales = pack_scale_words(groups.scale_codes) if recipe.levels == "token" else groups.scale_codes
    return StagedNvfp4(groups.packed, scales, groups.token_scales, groups)


def stage_nvfp4_with_norm(
    hidden: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    gain_center: float,
    recipe: Nvfp4Recipe = NVFP4_BLOCK,
    *,
    rstd: Tensor | None = None,
    intermediates: bool = False,
) -> StagedNvfp4:
    """RMSNorm of hidden [M, H], rounded to bf16, then quantized. rstd: float32 [M], to replace the computed
    one.

    Source: NUMERICS 3d.
    """
    norm = rms_norm_bf16(hidden, norm_weight, norm_eps, gain_center, rstd=rstd)
    groups = quantize_nvfp4(norm.normalized, recipe, intermediates=intermediates)
    return StagedNvfp4(groups.packed, groups.scale_codes, None, groups, norm)


def stage_routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    is_padding: Tensor | None = None,
    eplb_state: Any = None,
    recipe: RoutingRecipe = ROUTING,
) -> StagedRouting:
    """Repacks routing and maps experts to replicas; counts nothing (mapping.load is what would be added).

    Source: NUMERICS 6.1, 6.5.
    """
    routing = repack_topk(topk_ids, topk_weights, is_padding, recipe)
    if eplb_state is None or eplb_state.logical_to_physical_map is None:
        return StagedRouting(routing.ids, routing.weights, None)
    mapping = map_experts(
        routing.ids,
        eplb_state.logical_to_physical_map,
        eplb_state.logical_replica_count,
        eplb_state.expert_load_view.numel(),
        int(unpadded_tokens(eplb_state)),
        recipe,
    )
    return StagedRouting(mapping.ids, routing.weights, mapping)


def convert_hidden(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden converted to a float dtype through float32, same shape: the same bits for the same dtype, and
    otherwise to nearest even, every NaN becoming 0x7FFF in the 16-bit formats, as the PTX conversions do."""
    if hidden.dtype == dtype:
        return hidden
    values = hidden.float()
    return values if dtype == torch.float32 else to_half(values, dtype)
