"""Staging in two-level NVFP4 (`megamoe.staging` says what holds for all of it)."""

import torch

from megamoe.eplb import EplbLayerState, active_tensors
from megamoe.kernels import checks, tuning
from megamoe.kernels.arguments import (
    BYTE_DTYPES,
    K_BLOCK,
    check_hidden,
    check_pages,
    check_routing,
    page_rows,
)
from megamoe.kernels.launch import is_interpreted, launch
from megamoe.kernels.views import as_bytes, as_pairs, as_words, strides_of


def prepare_megamoe_nvfp4_inputs(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    x: torch.Tensor,
    x_sf: torch.Tensor,
    x_scales: torch.Tensor,
    topk_idx_out: torch.Tensor,
    topk_weights_out: torch.Tensor,
    is_padding: torch.Tensor | None = None,
    shared_x: torch.Tensor | None = None,
    shared_x_sf: torch.Tensor | None = None,
    shared_block_m: int | None = None,
    w2_global_scale: torch.Tensor | None = None,
    l2_alpha: torch.Tensor | None = None,
    l2_activation_scale: float = 1.0,
    eplb_state: EplbLayerState | None = None,
) -> None:
    """Quantize hidden states to two-level NVFP4 (E4M3 per 16 columns, float32 per token), repack the routing.

    hidden_states, routing, is_padding, eplb_state: as in `prepare_megamoe_inputs`; H a multiple of 128.
    x: [M, H / 2], one byte for two E2M1 codes, even column low; any one-byte dtype, row-major.
    x_sf: [M, H / 64] int32, four E4M3 bytes a word, row-major. x_scales: [M] float32.
    shared_x: [M, H] row-major: float8_e4m3fn gets MXFP8 of the hidden states, its words go to the pages
    shared_x_sf (both page arguments are then required); bfloat16 gets a copy (both must be None).
    l2_alpha [L] = w2_global_scale [L] * l2_activation_scale in float32 (only together), written even where
    M = 0. Raises TypeError and ValueError as the module says. Source: NUMERICS 3a.
    """
    hidden = check_hidden(hidden_states)
    size = checks.require_multiple("hidden_states", hidden, K_BLOCK)
    num_tokens, device = hidden.shape[0], hidden.device
    topk = check_routing(hidden, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    checks.require("x", x, BYTE_DTYPES, (num_tokens, size // 2), "tokens, hidden / 2", device)
    checks.require("x_sf", x_sf, (torch.int32,), (num_tokens, size // 64), "tokens, hidden / 64", device)
    checks.require("x_scales", x_scales, (torch.float32,), (num_tokens,), "tokens", device)
    checks.require_row_major("x", x)
    checks.require_row_major("x_sf", x_sf)
    if shared_x is not None:
        dtypes = (torch.float8_e4m3fn, torch.bfloat16)
        checks.require("shared_x", shared_x, dtypes, (num_tokens, size), "tokens, hidden", device)
        checks.require_row_major("shared_x", shared_x)
    mxfp8 = shared_x is not None and shared_x.dtype == torch.float8_e4m3fn
    for name, value in (("shared_x_sf", shared_x_sf), ("shared_block_m", shared_block_m)):
        if mxfp8 != (value is not None):
            raise ValueError(
                f"{name}: expected {'a value' if mxfp8 else 'None'} with "
                f"{'float8_e4m3fn shared_x' if mxfp8 else 'shared_x that is not float8_e4m3fn'}, "
                f"got {'None' if value is None else 'a value'}"
            )
    if mxfp8:
        check_pages(shared_x_sf, shared_block_m, num_tokens, size, device)
    if (w2_global_scale is None) != (l2_alpha is None):
        raise ValueError(
            "w2_global_scale and l2_alpha: expected both or neither, got "
            f"{'only l2_alpha' if w2_global_scale is None else 'only w2_global_scale'}"
        )
    l2_activation_scale = checks.require_number("l2_activation_scale", l2_activation_scale)
    num_experts = 0
    if w2_global_scale is not None:
        vector = checks.require_tensor("w2_global_scale", w2_global_scale)
        if vector.ndim != 1:
            raise ValueError(f"w2_global_scale: expected 1 dimension, got shape {tuple(vector.shape)}")
        num_experts = vector.shape[0]
        shape, meaning = (num_experts,), "local experts"
        checks.require("w2_global_scale", vector, (torch.float32,), shape, meaning, device)
        checks.require("l2_alpha", l2_alpha, (torch.float32,), shape, meaning, device)
    eplb = active_tensors(eplb_state, device)
    checks.require_disjoint(
        [
            ("x", x),
            ("x_sf", x_sf),
            ("x_scales", x_scales),
            ("topk_idx_out", topk_idx_out),
            ("topk_weights_out", topk_weights_out),
            ("shared_x", shared_x),
            ("shared_x_sf", shared_x_sf),
            ("l2_alpha", l2_alpha),
            *([eplb.output] if eplb else []),
        ],
        [
            ("hidden_states", hidden),
            ("topk_weights", topk_weights),
            ("topk_ids", topk_ids),
            ("is_padding", is_padding),
            ("w2_global_scale", w2_global_scale),
            *(eplb.inputs if eplb else []),
        ],
    )
    if num_tokens == 0 and num_experts == 0:
        return
    from megamoe.kernels.nvfp4 import stage_nvfp4_token_kernel
    from megamoe.kernels.routing import pack_eplb, pack_topk

    interpreted = is_interpreted(device)
    rules = tuning.TOKEN_RULES if shared_x is None else tuning.SHARED_TOKEN_RULES
    tile = tuning.row_tile(rules, num_tokens, size, interpreted)
    tiles = -(-num_tokens // tile.block_m)
    routing = tuning.routing_plan(
        topk, num_tokens, eplb, tile.num_warps, tiles, interpreted, tuning.TOKEN_EPLB
    )
    # The first routing program also writes l2_alpha, so there is one even without tokens.
    routing_programs = max(1, routing.programs)
    source, pairs = as_pairs(hidden)
    words, x_stride, x_words = as_words(x)
    scale_bytes = as_bytes(x_sf)  # little-endian words: byte g of a row is the scale of group g
    block_m = shared_block_m or 1
    mapping, load = pack_eplb(eplb)
    launch(
        stage_nvfp4_token_kernel,
        routing_programs + tiles,
        device,
        (
            source,
            words,
            scale_bytes,
            x_scales,
            *source.stride(),
            x_stride,
            scale_bytes.stride(0),
            x_scales.stride(0),
            num_tokens,
            mapping,
            routing_programs,
            routing.shift,
            pack_topk(topk_ids, topk_weights, topk_idx_out, topk_weights_out, is_padding, eplb),
            load,
            as_bytes(shared_x) if shared_x is not None and mxfp8 else shared_x,
            shared_x_sf,
            strides_of(shared_x)[0],
            *strides_of(shared_x_sf),
            block_m,
            page_rows(block_m),
            w2_global_scale,
            l2_alpha if num_experts else None,
            w2_global_scale.stride(0) if w2_global_scale is not None else 0,
            l2_alpha.stride(0) if l2_alpha is not None else 0,
            l2_activation_scale,
            num_experts,
        ),
        {
            "HIDDEN": size,
            "CHUNKS": -(-size // tile.block_h),
            "BLOCK_M": tile.block_m,
            "BLOCK_H": tile.block_h,
            "PAIRS": pairs,
            "DTYPE": str(hidden.dtype).removeprefix("torch."),
            "X_WORDS": x_words,
            "EXPERTS_PADDED": tuning.power_of_two(max(num_experts, 1)),
            "ROUTING": routing.constants(topk),
        },
        num_warps=tile.num_warps,
    )
