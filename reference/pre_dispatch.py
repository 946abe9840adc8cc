"""DeepGEMM's own staging kernels: ``mega_moe_pre_dispatch`` (SM100) and ``mega_moe_pre_dispatch_sm90``.

They quantize like the vLLM kernels for ordinary values, and otherwise not: true division, a reciprocal of 0
for a group with Inf (SM100), a floor of 1e-10 (SM90); and they fill the top-k slots past the last token with
(-1, 0.0), leaving those rows of x and x_sf alone.

Source: NUMERICS 2.8 and 6.1; goldens of sgl-deep-gemm 0.1.5.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference._float32 import constant
from reference.formats import pack_e2m1, pack_scale_words
from reference.fp8 import quantize_fp8_groups
from reference.recipes import RECIPES, Fp8GroupRecipe


def mega_moe_pre_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
    group_size: int = 32,
    use_fp4_acts: bool = False,
) -> None:
    """Stages the first num_tokens rows of x into a buffer of P rows for SM100.

    x: bf16 [M, H]. topk_idx: int32 [M, K]. topk_weights: float32 [M, K]. buf_x: e4m3fn [P, H], or bytes [P, H
    / 2] of E2M1 pairs with use_fp4_acts. buf_x_sf: int32 [P, H / (4 * group_size)], UE8M0 bytes group after
    group. buf_topk_idx: int64 [P, K]. buf_topk_weights: float32 [P, K]; their rows past num_tokens become
    (-1, 0.0).

    ValueError: a group size other than 32, 64, 128; H not a multiple of 4 groups; num_tokens above M or P;
    shapes or devices that do not fit. TypeError: a wrong dtype. Source: NUMERICS 2.8, 6.1; 3e for E2M1.
    """
    require(group_size in (32, 64, 128), "group_size", "32, 64 or 128", group_size)
    width, dtypes = (2, (torch.int8, torch.uint8)) if use_fp4_acts else (1, (torch.float8_e4m3fn,))
    name = f"mxfp4_g{group_size}_pre_dispatch" if use_fp4_acts else f"fp8_ue8m0_g{group_size}_pre_dispatch"
    _check_inputs(x, topk_idx, topk_weights, num_tokens, multiple=4 * group_size)
    check_tensor("buf_x", buf_x, dtypes=dtypes, dim=2, device=x.device, written=True)
    _check_buffers(x, topk_idx, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, num_tokens)
    require(
        buf_x.shape[1] == x.shape[1] // width, "buf_x", f"{x.shape[1] // width} columns", list(buf_x.shape)
    )
    words = x.shape[1] // (4 * group_size)
    check_tensor("buf_x_sf", buf_x_sf, dtypes=(torch.int32,), shape=(buf_x.shape[0], words), device=x.device)

    groups = quantize_fp8_groups(x[:num_tokens], cast(Fp8GroupRecipe, RECIPES[name]))
    codes = pack_e2m1(groups.codes) if use_fp4_acts else groups.codes
    assert groups.exponents is not None
    buf_x[:num_tokens].view(torch.uint8).copy_(codes)
    buf_x_sf[:num_tokens] = pack_scale_words(groups.exponents)
    _write_routing(topk_idx, topk_weights, buf_topk_idx, buf_topk_weights, num_tokens)


def mega_moe_pre_dispatch_sm90(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
    group_size: int = 128,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Stages the first num_tokens rows of x into a buffer of P rows for SM90, with one float32 scale per 128
    columns.

    As mega_moe_pre_dispatch, but buf_x: e4m3fn [P, H], buf_x_sf: float32 [P, H / 128], and the weights are
    multiplied by routed_scaling_factor (rounded to float32).

    ValueError: a group size other than 128; H not a multiple of it; num_tokens above M or P; shapes or
    devices that do not fit. TypeError: a wrong dtype. Source: NUMERICS 2.8, 6.1, 17.
    """
    require(group_size == 128, "group_size", "128", group_size)
    _check_inputs(x, topk_idx, topk_weights, num_tokens, multiple=group_size)
    check_tensor("buf_x", buf_x, dtypes=(torch.float8_e4m3fn,), dim=2, device=x.device, written=True)
    _check_buffers(x, topk_idx, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, num_tokens)
    require(buf_x.shape[1] == x.shape[1], "buf_x", f"{x.shape[1]} columns", list(buf_x.shape))
    shape = (buf_x.shape[0], x.shape[1] // group_size)
    check_tensor("buf_x_sf", buf_x_sf, dtypes=(torch.float32,), shape=shape, device=x.device)

    groups = quantize_fp8_groups(x[:num_tokens], cast(Fp8GroupRecipe, RECIPES["fp8_fp32_g128_divide"]))
    buf_x[:num_tokens].view(torch.uint8).copy_(groups.codes)
    buf_x_sf[:num_tokens] = groups.scales
    weights = topk_weights * constant(topk_weights, routed_scaling_factor)
    _write_routing(topk_idx, weights, buf_topk_idx, buf_topk_weights, num_tokens)


def _check_inputs(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_tokens: int, *, multiple: int
) -> None:
    check_tensor("x", x, dtypes=(torch.bfloat16,), dim=2)
    columns = x.shape[1]
    require(
        columns > 0 and columns % multiple == 0,
        "x",
        f"a hidden size that is a multiple of {multiple}",
        columns,
    )
    check_tensor("topk_idx", topk_idx, dtypes=(torch.int32,), dim=2, device=x.device)
    require(topk_idx.shape[0] == x.shape[0], "topk_idx", f"{x.shape[0]} rows", list(topk_idx.shape))
    shape = tuple(topk_idx.shape)
    check_tensor("topk_weights", topk_weights, dtypes=(torch.float32,), shape=shape, device=x.device)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens: expected an int, got {type(num_tokens).__name__}")
    require(0 <= num_tokens <= x.shape[0], "num_tokens", f"0 to {x.shape[0]}, the rows of x", num_tokens)


def _check_buffers(
    x: Tensor,
    topk_idx: Tensor,
    buf_x: Tensor,
    buf_x_sf: Tensor,
    buf_topk_idx: Tensor,
    buf_topk_weights: Tensor,
    num_tokens: int,
) -> None:
    rows = buf_x.shape[0]
    require(num_tokens <= rows, "buf_x", f"at least {num_tokens} rows", list(buf_x.shape))
    check_tensor(
        "buf_x_sf", buf_x_sf, dtypes=(torch.int32, torch.float32), dim=2, device=x.device, written=True
    )
    shape = (rows, topk_idx.shape[1])
    check_tensor(
        "buf_topk_idx", buf_topk_idx, dtypes=(torch.int64,), shape=shape, device=x.device, written=True
    )
    check_tensor(
        "buf_topk_weights",
        buf_topk_weights,
        dtypes=(torch.float32,),
        shape=shape,
        device=x.device,
        written=True,
    )


def _write_routing(
    topk_idx: Tensor, topk_weights: Tensor, buf_topk_idx: Tensor, buf_topk_weights: Tensor, num_tokens: int
) -> None:
    buf_topk_idx[:num_tokens] = topk_idx[:num_tokens].to(torch.int64)
    buf_topk_weights[:num_tokens] = topk_weights[:num_tokens]
    buf_topk_idx[num_tokens:] = -1
    buf_topk_weights[num_tokens:] = 0.0
