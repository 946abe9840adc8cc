"""The refusals of the prepare_* functions, in the order in which production checks. Source: NUMERICS 2.7,
3a."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference._groups import HIDDEN_DTYPES
from reference.eplb import check_eplb_tensors, unpadded_tokens
from reference.recipes import Fp8GroupRecipe
from reference.scale_pages import required_rows

_TILE = 128
_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)


def check_hidden_states(hidden: Tensor, multiple: int, dtypes: Sequence[torch.dtype] = HIDDEN_DTYPES) -> None:
    check_tensor("hidden_states", hidden, dtypes=dtypes, dim=2)
    columns = hidden.shape[1]
    require(
        columns > 0 and columns % multiple == 0,
        "hidden_states",
        f"a hidden size that is a positive multiple of {multiple}",
        columns,
    )


def has_no_tokens(hidden: Tensor) -> bool:
    """Whether M = 0, where there is nothing to do; refuses what has no rows to count."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"hidden_states: expected a tensor, got {type(hidden).__name__}")
    require(hidden.dim() == 2, "hidden_states", "2 dimensions", list(hidden.shape))
    return hidden.shape[0] == 0


def check_number(name: str, value: object) -> None:
    """TypeError unless an int or a float; ValueError for an int that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    require(isinstance(value, float) or abs(value) < 1 << 1023, name, "a float", "an int beyond its range")


def check_routing(
    hidden: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None,
) -> None:
    num_tokens, device = hidden.shape[0], hidden.device
    check_tensor("topk_ids", topk_ids, dtypes=(torch.int32, torch.int64), dim=2, device=device)
    check_tensor("topk_weights", topk_weights, dtypes=HIDDEN_DTYPES, dim=2, device=device)
    require(
        topk_weights.shape == topk_ids.shape,
        "topk_weights",
        f"the shape of topk_ids, {list(topk_ids.shape)}",
        list(topk_weights.shape),
    )
    require(topk_ids.shape[0] == num_tokens, "topk_ids", f"{num_tokens} rows", list(topk_ids.shape))
    shape = (num_tokens, topk_ids.shape[1])
    check_tensor(
        "topk_idx_out", topk_idx_out, dtypes=(torch.int64,), shape=shape, device=device, written=True
    )
    check_tensor(
        "topk_weights_out",
        topk_weights_out,
        dtypes=(torch.float32,),
        shape=shape,
        device=device,
        written=True,
    )
    if is_padding is not None:
        check_tensor("is_padding", is_padding, dtypes=(torch.bool,), shape=(num_tokens,), device=device)


def check_shared_pages(
    hidden: Tensor, shared_x_sf: Tensor | None, shared_block_m: int | None, scale_format: str | None
) -> None:
    """shared_x_sf and shared_block_m: both or neither, with UE8M0 scales, and large enough."""
    require(
        (shared_x_sf is None) == (shared_block_m is None),
        "shared_block_m",
        "shared_x_sf and shared_block_m both or neither",
        f"shared_x_sf {'None' if shared_x_sf is None else 'given'}, shared_block_m {shared_block_m}",
    )
    if shared_x_sf is None or shared_block_m is None:
        return
    require(scale_format == "ue8m0", "shared_x_sf", "a hidden_quant with UE8M0 scales", scale_format)
    if isinstance(shared_block_m, bool) or not isinstance(shared_block_m, int):
        raise TypeError(f"shared_block_m: expected an int, got {type(shared_block_m).__name__}")
    require(shared_block_m > 0, "shared_block_m", "a positive tile height", shared_block_m)
    check_tensor("shared_x_sf", shared_x_sf, dtypes=(torch.int32,), device=hidden.device, written=True)
    words = hidden.shape[1] // _TILE
    rows = required_rows(hidden.shape[0], shared_block_m)
    require(
        shared_x_sf.dim() == 2 and shared_x_sf.shape[1] == words and shared_x_sf.shape[0] >= rows,
        "shared_x_sf",
        f"at least {rows} rows (whole pages of {shared_block_m} tokens) and {words} columns",
        list(shared_x_sf.shape),
    )


def check_unquantized(hidden: Tensor, x: Tensor, dtypes: Sequence[torch.dtype] = HIDDEN_DTYPES) -> None:
    check_tensor("x", x, dtypes=dtypes, shape=tuple(hidden.shape), device=hidden.device, written=True)


def check_fp8_buffers(hidden: Tensor, x: Tensor, x_sf: Tensor | None, recipe: Fp8GroupRecipe) -> None:
    rows, columns = hidden.shape
    device = hidden.device
    check_tensor("x", x, dtypes=(torch.float8_e4m3fn,), shape=(rows, columns), device=device, written=True)
    if recipe.scale_format == "ue8m0":
        dtype, per_row = torch.int32, columns // _TILE
    else:
        dtype, per_row = torch.float32, columns // recipe.group
    check_tensor("x_sf", x_sf, dtypes=(dtype,), shape=(rows, per_row), device=device, written=True)


def check_nvfp4_buffers(
    hidden: Tensor, x: Tensor, x_sf: Tensor, scale_dtype: torch.dtype, *, row_major: bool = False
) -> None:
    """x [M, H / 2] bytes and x_sf: int32 [M, H / 64] words, or [M, H / 16] bytes."""
    rows, columns = hidden.shape
    device = hidden.device
    check_tensor("x", x, dtypes=_BYTES, shape=(rows, columns // 2), device=device, written=True)
    dtypes: tuple[torch.dtype, ...]
    if scale_dtype == torch.int32:
        dtypes, per_row = (torch.int32,), columns // 64
    else:
        dtypes, per_row = (torch.uint8, torch.float8_e4m3fn), columns // 16
    check_tensor("x_sf", x_sf, dtypes=dtypes, shape=(rows, per_row), device=device, written=True)
    if row_major:
        check_row_major("x", x)
        check_row_major("x_sf", x_sf)


def check_row_major(name: str, tensor: Tensor) -> None:
    require(tensor.stride(-1) == 1, name, "an inner stride of 1", f"strides {list(tensor.stride())}")


def check_nvfp4_shared(
    hidden: Tensor, shared_x: Tensor | None, shared_x_sf: Tensor | None, shared_block_m: int | None
) -> None:
    """An e4m3fn shared_x with its pages, a bf16 one without, or nothing."""
    if shared_x is not None and not isinstance(shared_x, Tensor):
        raise TypeError(f"shared_x: expected a tensor, got {type(shared_x).__name__}")
    mxfp8 = shared_x is not None and shared_x.dtype == torch.float8_e4m3fn
    given = f"shared_x_sf {'None' if shared_x_sf is None else 'given'}, shared_block_m {shared_block_m}"
    require(
        (shared_x_sf is not None) == mxfp8 and (shared_block_m is not None) == mxfp8,
        "shared_x_sf",
        "shared_x_sf and shared_block_m with an e4m3fn shared_x, and only then",
        given,
    )
    if shared_x is None:
        return
    check_tensor(
        "shared_x",
        shared_x,
        dtypes=(torch.float8_e4m3fn, torch.bfloat16),
        shape=tuple(hidden.shape),
        device=hidden.device,
        written=True,
    )
    check_row_major("shared_x", shared_x)
    if mxfp8:
        check_shared_pages(hidden, shared_x_sf, shared_block_m, "ue8m0")


def check_l2_alpha(
    device: torch.device, w2_global_scale: Tensor | None, l2_alpha: Tensor | None, l2_activation_scale: float
) -> None:
    """Both float32 [L], or neither."""
    require(
        (w2_global_scale is None) == (l2_alpha is None),
        "l2_alpha",
        "w2_global_scale and l2_alpha both or neither",
        f"w2_global_scale {'None' if w2_global_scale is None else 'given'}",
    )
    check_number("l2_activation_scale", l2_activation_scale)
    if w2_global_scale is None or l2_alpha is None:
        return
    check_tensor("w2_global_scale", w2_global_scale, dtypes=(torch.float32,), dim=1, device=device)
    shape = tuple(w2_global_scale.shape)
    check_tensor("l2_alpha", l2_alpha, dtypes=(torch.float32,), shape=shape, device=device, written=True)


def check_eplb_state(state: Any, device: torch.device) -> None:
    """None, inert (no map), or a state with every tensor that the mapping needs."""
    if state is None:
        return
    if not hasattr(state, "logical_to_physical_map"):
        raise TypeError(f"eplb_state: expected an EplbLayerState, got {type(state).__name__}")
    if state.logical_to_physical_map is None:
        return
    for field in (
        "expert_load_view",
        "logical_replica_count",
        "should_record_tensor",
        "num_unpadded_tokens_tensors",
    ):
        require(
            getattr(state, field) is not None, f"eplb_state.{field}", "a value together with the map", "None"
        )
    require(
        len(state.num_unpadded_tokens_tensors) > 0,
        "eplb_state.num_unpadded_tokens_tensors",
        "at least one",
        0,
    )
    check_eplb_tensors(
        state.expert_load_view,
        state.logical_to_physical_map,
        state.logical_replica_count,
        state.should_record_tensor,
        unpadded_tokens(state),
        device=device,
        prefix="eplb_state.",
    )
