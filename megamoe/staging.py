"""Staging: hidden states and routing into the buffers that the MegaMoE kernels read.

Every function checks all of its arguments, then starts one kernel that writes caller-owned buffers, and
returns None. A refusal (TypeError, ValueError) names the argument and leaves every buffer as it was. CUDA
tensors run the compiled kernel, CPU tensors the same kernel under Triton's interpreter.

Arithmetic: docs and sources are in the kernel modules (`megamoe.kernels.numerics`, `.fp8_groups`,
`.nvfp4`, `.routing`). M = tokens, H = hidden size, K = top-k, L = local experts. Strides are free unless
a function says otherwise. No output may overlap an input, another output or itself.
"""

from typing import Any

import torch

from megamoe.eplb import EplbLayerState, EplbTensors, active_tensors
from megamoe.kernels import checks, tuning
from megamoe.kernels.arguments import (
    BYTE_DTYPES,
    K_BLOCK,
    check_block_outputs,
    check_hidden,
    check_pages,
    check_routing,
    page_rows,
    resolve_hidden_quant,
)
from megamoe.kernels.launch import is_interpreted, launch
from megamoe.kernels.views import as_bytes, as_pairs, as_words, strides_of
from megamoe.quant_keys import QuantKey, kMxfp8Dynamic

__all__ = [
    "prepare_megamoe_bf16_inputs",
    "prepare_megamoe_inputs",
    "prepare_megamoe_nvfp4_block_inputs",
    "prepare_megamoe_nvfp4_inputs",
    "prepare_megamoe_nvfp4_with_norm",
]


# ------------------------------------------------------------------------------------------ launches


def _num_physical(eplb: EplbTensors | None) -> int:
    return 0 if eplb is None else eplb.load.shape[0]


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
        num_topk,
        num_tokens,
        _num_physical(eplb),
        tile.num_warps,
        tiles,
        interpreted,
        tuning.GROUP_EPLB,
    )
    block_m = shared_block_m or 1
    launch(
        stage_groups_kernel,
        routing.programs + tiles,
        hidden.device,
        (
            hidden,
            *hidden.stride(),
            x,
            *x.stride(),
            x_sf,
            *strides_of(x_sf),
            shared_x_sf,
            *strides_of(shared_x_sf),
            block_m,
            page_rows(block_m),
            num_tokens,
            routing.programs,
            routing.shift,
            topk,
            pack_eplb(eplb),
        ),
        {
            "MODE": mode,
            "GROUP": group,
            "COLUMN_TILES": column_tiles,
            "BLOCK_M": tile.block_m,
            "BLOCK_H": tile.block_h,
            "HIDDEN": size,
            **routing.constants(num_topk),
        },
        num_warps=tile.num_warps,
    )


# -------------------------------------------------------------------------------------------- public


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
        pack_topk(topk_ids, topk_weights, topk_idx_out, topk_weights_out, is_padding),
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
    tile = tuning.row_tile(num_tokens, size, interpreted)
    tiles = -(-num_tokens // tile.block_m)
    routing = tuning.routing_plan(
        topk,
        num_tokens,
        _num_physical(eplb),
        tile.num_warps,
        tiles,
        interpreted,
        tuning.TOKEN_EPLB,
    )
    # The first routing program also writes l2_alpha, so there is one even without tokens.
    routing_programs = max(1, routing.programs)
    source, pairs = as_pairs(hidden)
    words, x_stride, x_words = as_words(x)
    scale_bytes = as_bytes(x_sf)  # little-endian words: byte g of a row is the scale of group g
    block_m = shared_block_m or 1
    launch(
        stage_nvfp4_token_kernel,
        routing_programs + tiles,
        device,
        (
            source,
            *source.stride(),
            words,
            x_stride,
            scale_bytes,
            scale_bytes.stride(0),
            x_scales,
            x_scales.stride(0),
            as_bytes(shared_x) if shared_x is not None and mxfp8 else shared_x,
            strides_of(shared_x)[0],
            shared_x_sf,
            *strides_of(shared_x_sf),
            block_m,
            page_rows(block_m),
            w2_global_scale,
            w2_global_scale.stride(0) if w2_global_scale is not None else 0,
            l2_alpha if num_experts else None,
            l2_alpha.stride(0) if l2_alpha is not None else 0,
            l2_activation_scale,
            num_experts,
            num_tokens,
            routing_programs,
            routing.shift,
            pack_topk(topk_ids, topk_weights, topk_idx_out, topk_weights_out, is_padding),
            pack_eplb(eplb),
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
            **routing.constants(topk),
        },
        num_warps=tile.num_warps,
    )


def prepare_megamoe_nvfp4_block_inputs(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx_out: torch.Tensor,
    topk_weights_out: torch.Tensor,
    is_padding: torch.Tensor | None = None,
) -> None:
    """Quantize hidden states to one-level NVFP4 (E4M3 per 16 columns), repack the routing.

    hidden_states [M, H], routing, is_padding: as in `prepare_megamoe_inputs`; H a multiple of 64.
    x: [M, H / 2], one byte for two E2M1 codes, row-major. x_sf: [M, H / 16] uint8 (E4M3 codes, linear;
    float8_e4m3fn is taken too). M = 0 returns at once. Raises TypeError and ValueError as the module says.
    Source: NUMERICS 3b.
    """
    hidden = check_hidden(hidden_states)
    num_tokens = hidden.shape[0]
    if num_tokens == 0:
        return
    size = checks.require_multiple("hidden_states", hidden, 64)
    topk = check_routing(hidden, topk_weights, topk_ids, topk_idx_out, topk_weights_out, is_padding)
    check_block_outputs(hidden, size, x, x_sf)
    checks.require_disjoint(
        [("x", x), ("x_sf", x_sf), ("topk_idx_out", topk_idx_out), ("topk_weights_out", topk_weights_out)],
        [
            ("hidden_states", hidden),
            ("topk_weights", topk_weights),
            ("topk_ids", topk_ids),
            ("is_padding", is_padding),
        ],
    )
    from megamoe.kernels.nvfp4 import stage_nvfp4_block_kernel
    from megamoe.kernels.routing import pack_topk

    interpreted = is_interpreted(hidden.device)
    tile = tuning.column_tile(tuning.BLOCK_RULES, num_tokens, size, interpreted)
    column_tiles = -(-size // tile.block_h)
    tiles = -(-num_tokens // tile.block_m) * column_tiles
    routing = tuning.routing_plan(topk, num_tokens, 0, tile.num_warps, tiles, interpreted, tuning.TOKEN_EPLB)
    source, pairs = as_pairs(hidden)
    words, x_stride, x_words = as_words(x)
    scales = as_bytes(x_sf)
    launch(
        stage_nvfp4_block_kernel,
        routing.programs + tiles,
        hidden.device,
        (
            source,
            *source.stride(),
            words,
            x_stride,
            scales,
            *scales.stride(),
            num_tokens,
            routing.programs,
            routing.shift,
            pack_topk(topk_ids, topk_weights, topk_idx_out, topk_weights_out, is_padding),
            None,
        ),
        {
            "HIDDEN": size,
            "COLUMN_TILES": column_tiles,
            "BLOCK_M": tile.block_m,
            "BLOCK_H": tile.block_h,
            "PAIRS": pairs,
            "DTYPE": str(hidden.dtype).removeprefix("torch."),
            "X_WORDS": x_words,
            **routing.constants(topk),
        },
        num_warps=tile.num_warps,
    )


def prepare_megamoe_nvfp4_with_norm(
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    gain_center: float,
    x: torch.Tensor,
    x_sf: torch.Tensor,
) -> None:
    """RMSNorm, bfloat16 rounding, then one-level NVFP4 as `prepare_megamoe_nvfp4_block_inputs`.

    hidden_states: [M, H] bfloat16, float16 or float32, H a multiple of 64. norm_weight: [H] bfloat16,
    float16 or float32. x: [M, H / 2] bytes, row-major. x_sf: [M, H / 16] uint8 or float8_e4m3fn.

    y = bfloat16((h * rstd) * (norm_weight + gain_center)), rstd = 1 / sqrt(sum(h^2) * fl(1/H) + norm_eps),
    all in float32. Two things are chosen here, because the recorded kernel left them to its compiler:

    * The order of the sum: lane t of 256 adds the squares of columns 2048 c + 8 t + e in ascending (c, e),
      then the lanes are added pairwise 16, 8, 4, 2, 1 apart inside each 32, then the 32s 4, 2, 1 apart.
      This is the order of the recorded kernel's code for H = 4096.
    * rstd is the IEEE square root and quotient, the same on every device. The recorded kernel uses the
      hardware's approximate rsqrt, which can differ by an ulp or two: a byte differs from it only where
      that moves a bfloat16 rounding and then a code.

    M = 0 returns after the checks. Raises TypeError and ValueError as the module says. Source: NUMERICS 3d.
    """
    hidden = check_hidden(hidden_states)
    size = checks.require_multiple("hidden_states", hidden, 64)
    num_tokens, device = hidden.shape[0], hidden.device
    checks.require("norm_weight", norm_weight, checks.FLOAT_DTYPES, (size,), "hidden", device)
    norm_eps = checks.require_number("norm_eps", norm_eps)
    gain_center = checks.require_number("gain_center", gain_center)
    check_block_outputs(hidden, size, x, x_sf)
    checks.require_disjoint(
        [("x", x), ("x_sf", x_sf)], [("hidden_states", hidden), ("norm_weight", norm_weight)]
    )
    if num_tokens == 0:
        return
    from megamoe.kernels.nvfp4_norm import stage_nvfp4_norm_kernel

    tile = tuning.norm_tile(num_tokens, size, is_interpreted(device))
    tiles, pairs = as_pairs(hidden)
    weights, weight_pairs = as_pairs(norm_weight[None])
    words, x_stride, x_words = as_words(x)
    scales = as_bytes(x_sf)
    launch(
        stage_nvfp4_norm_kernel,
        -(-num_tokens // tile.block_m),
        device,
        (
            hidden,
            *hidden.stride(),
            tiles,
            *tiles.stride(),
            weights,
            weights.stride(1),
            norm_eps,
            gain_center,
            1.0 / size,
            words,
            x_stride,
            scales,
            *scales.stride(),
            num_tokens,
        ),
        {
            "HIDDEN": size,
            "BLOCK_M": tile.block_m,
            "BLOCK_H": tile.block_h,
            "PAIRS": pairs,
            "DTYPE": str(hidden.dtype).removeprefix("torch."),
            "WEIGHT_PAIRS": weight_pairs,
            "WEIGHT_DTYPE": str(norm_weight.dtype).removeprefix("torch."),
            "X_WORDS": x_words,
        },
        num_warps=tile.num_warps,
    )
