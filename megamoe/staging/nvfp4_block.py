"""Staging in one-level NVFP4, after an RMSNorm or not (`megamoe.staging` says what holds for all of it)."""

import torch

from megamoe.kernels import checks, tuning
from megamoe.kernels.arguments import check_block_outputs, check_hidden, check_routing
from megamoe.kernels.launch import is_interpreted, launch
from megamoe.kernels.views import as_bytes, as_pairs, as_words


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
    row_tiles = -(-num_tokens // tile.block_m)
    steps = tuning.block_steps(row_tiles * column_tiles)
    tiles = -(-row_tiles // steps) * column_tiles
    routing = tuning.routing_plan(
        topk, num_tokens, None, tile.num_warps, tiles, interpreted, tuning.TOKEN_EPLB
    )
    source, pairs = as_pairs(hidden)
    words, x_stride, x_words = as_words(x)
    scales = as_bytes(x_sf)
    launch(
        stage_nvfp4_block_kernel,
        routing.programs + tiles,
        hidden.device,
        (
            source,
            words,
            scales,
            *source.stride(),
            x_stride,
            *scales.stride(),
            num_tokens,
            None,
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
            "ROUTING": routing.constants(topk),
            "STEPS": steps,
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
