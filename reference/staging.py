"""Staging: hidden states and routing into the buffers that a MegaMoE launch reads.

Each operation has two forms. ``stage_*`` is pure: tensors in, a frozen dataclass out, with the intermediates
of the quantization when asked for. ``prepare_*`` has the production signature: it checks everything, then
writes the caller's buffers and returns None; when it refuses, nothing has been written.

Sources: NUMERICS 2.7 (FP8), 3a (NVFP4 two-level), 3b (one-level), 3d (norm-fused), 4 (pages), 6 (routing,
EPLB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference._groups import constant
from reference._quant_key import fp8_recipe_of_key, kMxfp8Dynamic
from reference._staging_checks import (
    check_eplb_state,
    check_fp8_buffers,
    check_hidden_states,
    check_l2_alpha,
    check_nvfp4_buffers,
    check_nvfp4_shared,
    check_routing,
    check_shared_pages,
    check_unquantized,
)
from reference.eplb import EplbMapping, map_experts
from reference.formats import pack_scale_words
from reference.fp8 import Fp8Groups, quantize_fp8_groups
from reference.nvfp4 import Nvfp4Groups, RmsNorm, quantize_nvfp4, rms_norm_bf16
from reference.recipes import RECIPES, Fp8GroupRecipe, Nvfp4Recipe, RoutingRecipe
from reference.routing import ROUTING, repack_topk
from reference.scale_pages import write_scale_pages

MXFP8 = cast(Fp8GroupRecipe, RECIPES["fp8_ue8m0_g32"])
NVFP4_TOKEN = cast(Nvfp4Recipe, RECIPES["nvfp4_token"])
NVFP4_BLOCK = cast(Nvfp4Recipe, RECIPES["nvfp4_block"])

_TILE = 128


@dataclass(frozen=True)
class StagedFp8:
    """x: uint8 [M, H] E4M3 codes. x_sf: int32 [M, H / 128] words, or float32 [M, H / group]. groups: how they
    came."""

    x: Tensor
    x_sf: Tensor
    groups: Fp8Groups


@dataclass(frozen=True)
class StagedNvfp4:
    """x: uint8 [M, H / 2]. x_sf: int32 [M, H / 64] words ("token") or uint8 [M, H / 16] ("block"). x_scales:
    float32 [M]
    or None. groups: how they came. norm: the normalization before it, if there was one."""

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
    """UE8M0 bytes [M, H / group] -> int32 [M, H / 128], one word per 128 columns; bytes without a group are
    zero."""
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
        int(eplb_state.num_unpadded_tokens_tensors[0]),
        recipe,
    )
    return StagedRouting(mapping.ids, routing.weights, mapping)


def convert_hidden(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden converted to a float dtype through float32: the same bits for the same dtype, and otherwise
    round to
    nearest even with every NaN becoming 0x7FFF in the 16-bit formats, as the PTX conversions do."""
    if hidden.dtype == dtype:
        return hidden
    converted = hidden.float().to(dtype)
    if dtype == torch.float32:
        return converted
    nan = torch.tensor(0x7FFF, dtype=torch.int16, device=hidden.device).view(dtype)
    return torch.where(hidden.isnan(), nan, converted)


def prepare_megamoe_inputs(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x: Tensor,
    x_sf: Tensor | None,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None = None,
    shared_x_sf: Tensor | None = None,
    shared_block_m: int | None = None,
    hidden_quant: Any = kMxfp8Dynamic,
    eplb_state: Any = None,
) -> None:
    """Stages hidden states as FP8 groups (or converted, for ``hidden_quant=None``) with their routing.

    hidden_states: bf16, fp16 or fp32 [M, H]. topk_weights: float [M, K]. topk_ids: int32 or int64 [M, K].
    x: e4m3fn [M, H], or a bf16, fp16 or fp32 buffer for ``hidden_quant=None``. x_sf: int32 [M, H / 128] words
    of UE8M0 bytes, or float32 [M, H / group] scales, each at its own column; None iff hidden_quant is None.
    topk_idx_out: int64 [M, K]. topk_weights_out: float32 [M, K]. is_padding: bool [M], tokens that get -1 and
    0.0.
    shared_x_sf: int32 [rows, H / 128] scale pages for tiles of shared_block_m tokens; rows without a token
    are left.
    eplb_state: an object with EplbLayerState's fields; its load view is counted into. Any strides. M = 0
    returns at once.

    ValueError: H not a positive multiple of 128; x_sf given other than iff quantized; a key that is not
    accepted (see reference._quant_key); shapes of weights and ids differ; one of the shared pair alone, or
    with other scales than UE8M0; block_m not positive; pages with other columns or too few rows; a wrong
    shape or device. TypeError: a wrong
    dtype. Source: NUMERICS 2.6, 2.7, 4, 6.
    """
    num_tokens = hidden_states.shape[0]
    if num_tokens == 0:
        return
    check_hidden_states(hidden_states, _TILE)
    require(
        (hidden_quant is None) == (x_sf is None),
        "x_sf",
        "scales to be given if and only if hidden_quant is",
        f"hidden_quant {hidden_quant!r} with x_sf {'None' if x_sf is None else 'given'}",
    )
    recipe = None if hidden_quant is None else fp8_recipe_of_key(hidden_quant)
    check_routing(hidden_states, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    check_shared_pages(
        hidden_states, shared_x_sf, shared_block_m, None if recipe is None else recipe.scale_format
    )
    if recipe is None:
        check_unquantized(hidden_states, x)
    else:
        check_fp8_buffers(hidden_states, x, x_sf, recipe)
    check_eplb_state(eplb_state, hidden_states.device)

    if recipe is None:
        x.copy_(convert_hidden(hidden_states, x.dtype))
    else:
        staged = stage_fp8(hidden_states, recipe)
        _write_bytes(x, staged.x)
        assert x_sf is not None
        x_sf.copy_(staged.x_sf)
        if shared_x_sf is not None and shared_block_m is not None:
            write_scale_pages(staged.x_sf, shared_block_m, shared_x_sf)
    _write_routing(topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding, eplb_state)


def prepare_megamoe_nvfp4_inputs(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x: Tensor,
    x_sf: Tensor,
    x_scales: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None = None,
    shared_x: Tensor | None = None,
    shared_x_sf: Tensor | None = None,
    shared_block_m: int | None = None,
    w2_global_scale: Tensor | None = None,
    l2_alpha: Tensor | None = None,
    l2_activation_scale: float = 1.0,
    eplb_state: Any = None,
) -> None:
    """Stages hidden states as two-level NVFP4 with their routing, and optionally for a shared expert.

    hidden_states, topk_*, is_padding, eplb_state: as for prepare_megamoe_inputs. x: bytes [M, H / 2], even
    columns in
    bits 3..0. x_sf: int32 [M, H / 64], four E4M3 bytes a word. x_scales: float32 [M].
    shared_x: e4m3fn [M, H], written with MXFP8 of the same hidden states and with its pages shared_x_sf for
    tiles of shared_block_m (both required then), or bf16 [M, H], a copy (both None then). x, x_sf and
    shared_x row-major.
    l2_alpha: float32 [L] = w2_global_scale [L] * l2_activation_scale, written even when M = 0; both or
    neither.

    ValueError: H not a positive multiple of 128; shapes that do not fit; the shared arguments not as above;
    one of the l2 pair alone; an inner stride other than 1. TypeError: a wrong dtype. Source: NUMERICS 3a, 2,
    4, 6.
    """
    check_hidden_states(hidden_states, _TILE)
    check_routing(hidden_states, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    check_nvfp4_shared(hidden_states, shared_x, shared_x_sf, shared_block_m)
    check_l2_alpha(hidden_states.device, w2_global_scale, l2_alpha, l2_activation_scale)
    check_nvfp4_buffers(hidden_states, x, x_sf, torch.int32, row_major=True)
    check_tensor(
        "x_scales",
        x_scales,
        dtypes=(torch.float32,),
        shape=(hidden_states.shape[0],),
        device=hidden_states.device,
        written=True,
    )
    check_eplb_state(eplb_state, hidden_states.device)

    if w2_global_scale is not None and l2_alpha is not None:
        l2_alpha.copy_(w2_global_scale * constant(w2_global_scale, l2_activation_scale))
    staged = stage_nvfp4(hidden_states)
    _write_bytes(x, staged.x)
    x_sf.copy_(staged.x_sf)
    assert staged.x_scales is not None
    x_scales.copy_(staged.x_scales)
    if shared_x is not None and shared_x_sf is not None and shared_block_m is not None:
        shared = stage_fp8(hidden_states)
        _write_bytes(shared_x, shared.x)
        write_scale_pages(shared.x_sf, shared_block_m, shared_x_sf)
    elif shared_x is not None:
        shared_x.copy_(convert_hidden(hidden_states, shared_x.dtype))
    _write_routing(topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding, eplb_state)


def prepare_megamoe_nvfp4_block_inputs(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x: Tensor,
    x_sf: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None = None,
) -> None:
    """Stages hidden states as one-level NVFP4 (one E4M3 scale per 16 columns) with their routing.

    hidden_states: bf16, fp16 or fp32 [M, H]. x: bytes [M, H / 2]. x_sf: E4M3 bytes [M, H / 16], linear. The
    rest as for prepare_megamoe_inputs. Any strides. M = 0 returns at once.
    ValueError: H not a positive multiple of 64; shapes that do not fit. TypeError: a wrong dtype. Source:
    NUMERICS 3b.
    """
    if hidden_states.shape[0] == 0:
        return
    check_hidden_states(hidden_states, 64)
    check_routing(hidden_states, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    check_nvfp4_buffers(hidden_states, x, x_sf, torch.uint8)
    _write_nvfp4_block(x, x_sf, stage_nvfp4(hidden_states, NVFP4_BLOCK))
    _write_routing(topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding, None)


def prepare_megamoe_nvfp4_with_norm(
    hidden_states: Tensor, norm_weight: Tensor, norm_eps: float, gain_center: float, x: Tensor, x_sf: Tensor
) -> None:
    """RMSNorm of hidden_states bf16 [M, H], rounded to bf16, then one-level NVFP4 into x [M, H / 2] and x_sf
    [M, H / 16].

    norm_weight: bf16, fp16 or fp32 [H]; the factor of a column is its weight plus gain_center. Writes no
    routing. Exact given the row's reciprocal deviation (see rms_norm_bf16). M = 0 returns after the checks.
    ValueError: H not a positive multiple of 64; shapes that do not fit. TypeError: a wrong dtype. Source:
    NUMERICS 3d.
    """
    check_hidden_states(hidden_states, 64, dtypes=(torch.bfloat16,))
    check_tensor(
        "norm_weight",
        norm_weight,
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        shape=(hidden_states.shape[1],),
        device=hidden_states.device,
    )
    check_nvfp4_buffers(hidden_states, x, x_sf, torch.uint8)
    _write_nvfp4_block(x, x_sf, stage_nvfp4_with_norm(hidden_states, norm_weight, norm_eps, gain_center))


def prepare_megamoe_bf16_inputs(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None = None,
) -> None:
    """Copies hidden_states bf16 [M, H] to x bf16 [M, H], bit for bit, and stages the routing. M = 0 returns
    at once.

    ValueError: shapes that do not fit. TypeError: a wrong dtype. Source: NUMERICS 8.9.
    """
    if hidden_states.shape[0] == 0:
        return
    check_hidden_states(hidden_states, 1, dtypes=(torch.bfloat16,))
    check_routing(hidden_states, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    check_unquantized(hidden_states, x, dtypes=(torch.bfloat16,))
    x.copy_(hidden_states)
    _write_routing(topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding, None)


def _write_bytes(destination: Tensor, codes: Tensor) -> None:
    destination.view(torch.uint8).copy_(codes)


def _write_nvfp4_block(x: Tensor, x_sf: Tensor, staged: StagedNvfp4) -> None:
    _write_bytes(x, staged.x)
    _write_bytes(x_sf, staged.x_sf)


def _write_routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None,
    eplb_state: Any,
) -> None:
    staged = stage_routing(topk_weights, topk_ids, is_padding, eplb_state)
    topk_idx_out.copy_(staged.topk_idx)
    topk_weights_out.copy_(staged.topk_weights)
    if staged.mapping is not None and bool(eplb_state.should_record_tensor):
        eplb_state.expert_load_view += staged.mapping.load.to(eplb_state.expert_load_view.dtype)
