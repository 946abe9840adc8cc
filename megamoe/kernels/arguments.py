"""Arguments that several staging functions share: hidden states, routing, keys, scale pages.

Each function raises TypeError or ValueError as megamoe.kernels.checks does, before anything is written.
"""

import torch

from megamoe.kernels import checks, constants
from megamoe.quant_keys import UE8M0_DTYPES, QuantKey

K_BLOCK = 128
BYTE_DTYPES = tuple(
    getattr(torch, name)
    for name in ("uint8", "int8", "float8_e4m3fn", "float4_e2m1fn_x2")
    if hasattr(torch, name)
)


def check_hidden(hidden_states: object) -> torch.Tensor:
    hidden = checks.require_matrix("hidden_states", hidden_states)
    checks.require_dtype("hidden_states", hidden, checks.FLOAT_DTYPES)
    checks.require_supported_device("hidden_states", hidden)
    return hidden


def check_routing(
    hidden: torch.Tensor,
    topk_weights: object,
    topk_ids: object,
    topk_idx_out: object,
    topk_weights_out: object,
    is_padding: object,
) -> int:
    """Checks the routing tensors against M = hidden.shape[0]; returns K."""
    num_tokens, device = hidden.shape[0], hidden.device
    weights = checks.require_matrix("topk_weights", topk_weights)
    ids = checks.require_matrix("topk_ids", topk_ids)
    if weights.shape != ids.shape:
        raise ValueError(
            f"topk_weights: expected the shape of topk_ids {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )
    topk = ids.shape[1]
    if topk == 0:
        raise ValueError(f"topk_ids: expected at least one expert a token, got shape {tuple(ids.shape)}")
    shape, meaning = (num_tokens, topk), "tokens, top-k"
    checks.require("topk_weights", weights, checks.FLOAT_DTYPES, shape, meaning, device)
    checks.require("topk_ids", ids, checks.INDEX_DTYPES, shape, meaning, device)
    checks.require("topk_idx_out", topk_idx_out, (torch.int64,), shape, meaning, device)
    checks.require("topk_weights_out", topk_weights_out, (torch.float32,), shape, meaning, device)
    if is_padding is not None:
        checks.require("is_padding", is_padding, (torch.bool,), (num_tokens,), "tokens", device)
    return topk


def resolve_hidden_quant(hidden_quant: object) -> tuple[int, bool]:
    """(group, scales are UE8M0) of an accepted key."""
    if not isinstance(hidden_quant, QuantKey):
        raise TypeError(f"hidden_quant: expected a QuantKey or None, got {type(hidden_quant).__name__}")
    scale = hidden_quant.scale
    group = scale.group_shape
    ue8m0 = scale.dtype in UE8M0_DTYPES
    if (
        hidden_quant.dtype != torch.float8_e4m3fn
        or not hidden_quant.symmetric
        or hidden_quant.scale2 is not None
        or scale.static
        or not group.is_per_group()
        or K_BLOCK % group.col != 0
        or not (ue8m0 or scale.dtype == torch.float32)
    ):
        raise ValueError(
            "hidden_quant: expected a symmetric dynamic float8_e4m3fn key with one UE8M0 or float32 scale "
            f"per group of columns that divides {K_BLOCK}, got {hidden_quant}"
        )
    if ue8m0 and group.col < constants.UE8M0_MIN_GROUP:
        raise ValueError(
            f"hidden_quant: expected UE8M0 groups of at least {constants.UE8M0_MIN_GROUP} columns (four "
            f"bytes a word of {K_BLOCK} columns), got {group.col}"
        )
    return group.col, ue8m0


def check_pages(
    shared_x_sf: object, shared_block_m: object, num_tokens: int, size: int, device: torch.device
) -> None:
    block_m = checks.require_positive_int("shared_block_m", shared_block_m)
    pages = checks.require_matrix("shared_x_sf", shared_x_sf)
    checks.require_dtype("shared_x_sf", pages, (torch.int32,))
    checks.require_device("shared_x_sf", pages, device)
    words = size // constants.UE8M0_WORD_COLUMNS
    if pages.shape[1] != words:
        raise ValueError(f"shared_x_sf: expected {words} columns (hidden / 128), got {pages.shape[1]}")
    rows = -(-num_tokens // block_m) * page_rows(block_m)
    if pages.shape[0] < rows:
        raise ValueError(
            f"shared_x_sf: expected at least {rows} rows ({num_tokens} tokens in pages of {block_m}), "
            f"got {pages.shape[0]}"
        )


def page_rows(block_m: int) -> int:
    return -(-block_m // constants.PAGE_ROWS) * constants.PAGE_ROWS


def check_block_outputs(hidden: torch.Tensor, size: int, x: object, x_sf: object) -> None:
    num_tokens, device = hidden.shape[0], hidden.device
    packed = checks.require("x", x, BYTE_DTYPES, (num_tokens, size // 2), "tokens, hidden / 2", device)
    checks.require_row_major("x", packed)
    dtypes = (torch.uint8, torch.float8_e4m3fn)
    checks.require("x_sf", x_sf, dtypes, (num_tokens, size // 16), "tokens, hidden / 16", device)
