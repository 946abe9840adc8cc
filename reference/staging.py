"""Staging: hidden states and routing into the buffers that a MegaMoE launch reads.

Each ``prepare_*`` has the production signature: it checks everything, then writes the caller's buffers and
returns None; when it refuses, nothing has been written. The pure ``stage_*`` forms are those of
reference.stages.

Sources: NUMERICS 2.7 (FP8), 3a (NVFP4 two-level), 3b (one-level), 3d (norm-fused), 4 (pages), 6 (routing,
EPLB).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference._float32 import constant
from reference._quant_key import fp8_recipe_of_key, kMxfp8Dynamic
from reference._staging_checks import (
    check_eplb_state,
    check_fp8_buffers,
    check_hidden_states,
    check_l2_alpha,
    check_number,
    check_nvfp4_buffers,
    check_nvfp4_shared,
    check_routing,
    check_shared_pages,
    check_unquantized,
    has_no_tokens,
)
from reference.scale_pages import write_scale_pages
from reference.stages import (
    MXFP8,
    NVFP4_BLOCK,
    NVFP4_TOKEN,
    StagedFp8,
    StagedNvfp4,
    StagedRouting,
    convert_hidden,
    stage_fp8,
    stage_nvfp4,
    stage_nvfp4_with_norm,
    stage_routing,
    ue8m0_tile_words,
)

__all__ = [
    "MXFP8",
    "NVFP4_BLOCK",
    "NVFP4_TOKEN",
    "StagedFp8",
    "StagedNvfp4",
    "StagedRouting",
    "convert_hidden",
    "prepare_megamoe_bf16_inputs",
    "prepare_megamoe_inputs",
    "prepare_megamoe_nvfp4_block_inputs",
    "prepare_megamoe_nvfp4_inputs",
    "prepare_megamoe_nvfp4_with_norm",
    "stage_fp8",
    "stage_nvfp4",
    "stage_nvfp4_with_norm",
    "stage_routing",
    "ue8m0_tile_words",
]

_TILE = 128


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
    shape or device. TypeError: a wrong dtype. Source: NUMERICS 2.6, 2.7, 4, 6.
    """
    if has_no_tokens(hidden_states):
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
    columns in bits 3..0. x_sf: int32 [M, H / 64], four E4M3 bytes a word. x_scales: float32 [M].
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
    if has_no_tokens(hidden_states):
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
    check_number("norm_eps", norm_eps)
    check_number("gain_center", gain_center)
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
    if has_no_tokens(hidden_states):
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
