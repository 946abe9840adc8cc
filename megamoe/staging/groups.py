"""Staging in FP8 groups and as a plain copy (`megamoe.staging` says what holds for all of it)."""

from typing import Any

import torch

from megamoe.eplb import EplbLayerState, EplbTensors, active_tensors
from megamoe.kernels import checks, tuning
from megamoe.kernels.arguments import (
    K_BLOCK,
    check_hidden,
    check_pages,
    check_routing,
    page_rows,
    resolve_hidden_quant,
)
from megamoe.kernels.launch import is_interpreted, launch
from megamoe.kernels.views import as_bytes, strides_of
from megamoe.quant_keys import QuantKey, kMxfp8Dynamic


def _launch_groups(
    hidden: torch.Tensor,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    shared_x_sf: torch.Tensor | None,
    shared_block_m: int | None,
    mode: str,
    group: int,
    topk: tuple[Any, ...],
    num_topk: int,
    eplb: EplbTensors | None,
) -> None:
    from megamoe.kernels.fp8_groups import stage_groups_kernel
    from megamoe.kernels.routing import pack_eplb

    num_tokens, size = hidden.shape
    interpreted = is_interpreted(hidden.device)
    rules = tuning.GROUP_RULES if eplb is None else tuning.GROUP_EPLB_RULES
    tile = tuning.column_tile(rules, num_tokens, size, interpreted)
    column_tiles = -(-size // tile.block_h)
    tiles = -(-num_tokens // tile.block_m) * column_tiles
    routing = tuning.routing_plan(
        num_topk, num_tokens, eplb, tile.num_warps, tiles, interpreted, tuning.GROUP_EPLB
    )
    block_m = shared_block_m or 1
    mapping, load = pack_eplb(eplb)
    launch(
        stage_groups_kernel,
        routing.programs + tiles,
        hidden.device,
        (
            hidden,
            x,
            x_sf,
            *hidden.stride(),
            *x.stride(),
            *strides_of(x_sf),
            num_tokens,
            mapping,
            routing.programs,
            routing.shift,
            topk,
            load,
            shared_x_sf,
            *strides_of(shared_x_sf),
            block_m,
            page_rows(block_m),
        ),
        {
            "MODE": mode,
            "GROUP": group,
            "COLUMN_TILES": column_tiles,
            "BLOCK_M": tile.block_m,
            "BLOCK_H": tile.block_h,
            "HIDDEN": size,
            "ROUTING": routing.constants(num_topk),
        },
        num_warps=tile.num_warps,
    )


def prepare_megamoe_inputs(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx_out: torch.Tensor,
    topk_weights_out: torch.Tensor,
    is_padding: torch.Tensor | None = None,
    shared_x_sf: torch.Tensor | None = None,
    shared_block_m: int | None = None,
    hidden_quant: QuantKey | None = kMxfp8Dynamic,
    eplb_state: EplbLayerState | None = None,
) -> None:
    """Quantize hidden states to FP8 groups (or copy them) and repack the routing.

    hidden_states: [M, H] bfloat16, float16 or float32, H a multiple of 128. topk_weights: [M, K] bfloat16,
    float16 or float32. topk_ids: [M, K] int32 or int64.
    x: [M, H] float8_e4m3fn; for `hidden_quant=None` bfloat16, float16 or float32.
    x_sf: [M, H / 128] int32 with UE8M0 bytes little-endian by group (group 32, 64 or 128; unused upper bytes
    are zero), or [M, H / group] float32 (any group that divides 128); None iff hidden_quant is None.
    topk_idx_out: [M, K] int64. topk_weights_out: [M, K] float32. is_padding: [M] bool; such tokens get
    id -1 and weight 0.
    shared_x_sf: [rows, H / 128] int32 pages for shared experts, rows >= ceil(M / block_m) *
    align(block_m, 128), with shared_block_m > 0; only the rows of tokens are written.
    eplb_state: maps ids to physical experts and records the load (`megamoe.eplb`).

    M = 0 returns at once, without checks. Raises TypeError and ValueError as the module says.

    UE8M0: exponent = ceil(log2(amax / 448)) with amax >= fl(1e-4), element = E4M3(h * 2^-exponent).
    float32: scale = amax * fl(1/448), element = E4M3(h * (1 / scale)). Source: NUMERICS 2.
    """
    hidden = check_hidden(hidden_states)
    num_tokens = hidden.shape[0]
    if num_tokens == 0:
        return
    size = checks.require_multiple("hidden_states", hidden, K_BLOCK)
    if (hidden_quant is None) != (x_sf is None):
        raise ValueError(
            "x_sf: expected None exactly where hidden_quant is None, got "
            f"x_sf {'None' if x_sf is None else 'given'} with hidden_quant {hidden_quant}"
        )
    device = hidden.device
    x_dtypes: tuple[torch.dtype, ...] = checks.FLOAT_DTYPES
    mode, group = "copy", K_BLOCK
    if hidden_quant is not None:
        group, ue8m0 = resolve_hidden_quant(hidden_quant)
        mode = "ue8m0" if ue8m0 else "fp32"
        x_dtypes = (torch.float8_e4m3fn,)
        columns = size // (K_BLOCK if ue8m0 else group)
        sf_dtype = torch.int32 if ue8m0 else torch.float32
        checks.require("x_sf", x_sf, (sf_dtype,), (num_tokens, columns), "tokens, scale columns", device)
    topk = check_routing(hidden, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    checks.require("x", x, x_dtypes, (num_tokens, size), "tokens, hidden", device)
    if (shared_x_sf is None) != (shared_block_m is None):
        raise ValueError(
            "shared_x_sf and shared_block_m: expected both or neither, got "
            f"{'no ' if shared_x_sf is None else ''}shared_x_sf with shared_block_m {shared_block_m}"
        )
    if shared_x_sf is not None:
        if mode != "ue8m0":
            raise ValueError(f"shared_x_sf: expected UE8M0 scales for pages, got hidden_quant {hidden_quant}")
        check_pages(shared_x_sf, shared_block_m, num_tokens, size, device)
    eplb = active_tensors(eplb_state, device)
    checks.require_disjoint(
        [
            ("x", x),
            ("x_sf", x_sf),
            ("topk_idx_out", topk_idx_out),
            ("topk_weights_out", topk_weights_out),
            ("shared_x_sf", shared_x_sf),
            *([eplb.output] if eplb else []),
        ],
        [
            ("hidden_states", hidden),
            ("topk_weights", topk_weights),
            ("topk_ids", topk_ids),
            ("is_padding", is_padding),
            *(eplb.inputs if eplb else []),
        ],
    )
    from megamoe.kernels.routing import pack_topk

    _launch_groups(
        hidden,
        as_bytes(x) if mode != "copy" else x,
        x_sf,
        shared_x_sf,
        shared_block_m,
        mode,
        group,
        pack_topk(topk_ids, topk_weights, topk_idx_out, topk_weights_out, is_padding, eplb),
        topk,
        eplb,
    )


def prepare_megamoe_bf16_inputs(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    x: torch.Tensor,
    topk_idx_out: torch.Tensor,
    topk_weights_out: torch.Tensor,
    is_padding: torch.Tensor | None = None,
) -> None:
    """Copy bfloat16 hidden states [M, H] to x [M, H] bfloat16, bit by bit, and repack the routing.

    Other arguments as in `prepare_megamoe_inputs`; H is any size. M = 0 returns at once. Raises TypeError
    and ValueError as the module says.
    """
    hidden = check_hidden(hidden_states)
    if hidden.shape[0] == 0:
        return
    checks.require_dtype("hidden_states", hidden, (torch.bfloat16,))
    checks.require_multiple("hidden_states", hidden, 1)
    topk = check_routing(hidden, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    checks.require("x", x, (torch.bfloat16,), tuple(hidden.shape), "tokens, hidden", hidden.device)
    checks.require_disjoint(
        [("x", x), ("topk_idx_out", topk_idx_out), ("topk_weights_out", topk_weights_out)],
        [
            ("hidden_states", hidden),
            ("topk_weights", topk_weights),
            ("topk_ids", topk_ids),
            ("is_padding", is_padding),
        ],
    )
    from megamoe.kernels.routing import pack_topk

    packed = pack_topk(topk_ids, topk_weights, topk_idx_out, topk_weights_out, is_padding)
    _launch_groups(hidden, x, None, None, None, "copy", K_BLOCK, packed, topk, None)
