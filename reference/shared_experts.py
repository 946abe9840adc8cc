"""Shared experts in block FP8: their scales expanded to one per 32 columns, and both layers in kernel order.

A checkpoint has one UE8M0 scale per block (of 128 x 128 mostly), as bytes, or already repeated over rows and
packed into int32 words. The kernel wants one per row and 32 columns, packed and permuted. Scales are only
repeated, so nothing is rounded. What does not fit is not an error: the caller then runs the shared experts
unfused. It gets None and one warning that says why.

Easy to get wrong: int32 scales may be MN-major and are read in logical order; a row's bytes beyond the
blocks of k are padding of the last word; gate and up of several shared experts are each concatenated, gate
first.

Source: vLLM 0.33 ``_prepare_shared_expert_scale`` and ``transform_shared_expert_weights``, behaviour
restated.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference.formats import unpack_scale_words
from reference.weights import (
    transform_sf_into_required_layout,
    transform_weights_for_mega_moe,
    ue8m0_uint8_to_float,
)

__all__ = ["expand_block_scale", "prepare_shared_expert_scale", "transform_shared_expert_weights"]

_UE8M0_DTYPES = (torch.float8_e8m0fnu, torch.uint8, torch.int32)


def expand_block_scale(scale: Tensor, block: Sequence[int] | None, mn: int, k: int) -> Tensor:
    """Block scales as fp32 [mn, k // 32].

    scale: float8_e8m0fnu or uint8 [cdiv(mn, rows), cdiv(k, columns)], or int32 [mn, cdiv(blocks of k, 4)]
    with four bytes a word, any strides. block: (rows, columns), columns a multiple of 32. ValueError if they
    do not fit, TypeError for another dtype.
    """
    if scale.dtype not in _UE8M0_DTYPES:
        raise TypeError(f"scale must be UE8M0 (uint8, float8_e8m0fnu or int32 words), got {scale.dtype}")
    if block is None or len(block) != 2:
        raise ValueError(f"weight_block_size must be (rows, columns), got {block!r}")
    rows, columns = block
    if rows <= 0 or columns <= 0 or columns % 32:
        raise ValueError(f"weight_block_size must have columns that 32 divides, got {tuple(block)}")
    blocks = -(-k // columns)
    shape = (mn, -(-blocks // 4)) if scale.dtype == torch.int32 else (-(-mn // rows), blocks)
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"scale must be {shape} for mn={mn}, k={k} and blocks {tuple(block)}, got {tuple(scale.shape)}"
        )
    if scale.dtype == torch.int32:
        codes = unpack_scale_words(scale)[:, :blocks]
    else:
        codes = scale.view(torch.uint8).repeat_interleave(rows, 0)[:mn]
    return ue8m0_uint8_to_float(codes.repeat_interleave(columns // 32, 1)[:, : k // 32].contiguous())


def prepare_shared_expert_scale(scale: Tensor, block: Sequence[int] | None, mn: int, k: int) -> Tensor:
    """`expand_block_scale` packed: MN-major int32 [mn, cdiv(k, 128)], strides (1, align(mn, 4))."""
    expanded = expand_block_scale(scale, block, mn, k)
    return transform_sf_into_required_layout(expanded[None], mn, k, (1, 32), 1).squeeze(0)


def _scale_of(linear: Any) -> Tensor:
    scale: Tensor | None = getattr(linear, "weight_scale", None)
    if scale is None:
        scale = linear.weight_scale_inv
    return scale


def transform_shared_expert_weights(
    *,
    shared_experts: Any,
    num_shared_experts: int,
    hidden_size: int,
    intermediate_size: int,
    prefix: str = "",
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """((L1 weight, L1 scales), (L2 weight, L2 scales)) of the shared experts in kernel order, or None with
    one warning.

    shared_experts: has gate_up_proj and down_proj, each with weight (e4m3 [2 * I * S, H] and [H, I * S]),
    weight_scale or weight_scale_inv, and weight_block_size. On success ``gate_up_proj.weight.data`` is the
    interleaved storage that is returned, and the L2 weight is ``down_proj.weight.data`` itself; otherwise
    nothing is changed.
    """
    inner = intermediate_size * num_shared_experts
    gate_up, down = shared_experts.gate_up_proj, shared_experts.down_proj
    try:
        l1, l2 = transform_weights_for_mega_moe(
            _checked_layer("gate_up_proj", gate_up, 2 * inner, hidden_size),
            _checked_layer("down_proj", down, hidden_size, inner),
        )
    except (TypeError, ValueError) as reason:
        label = f"{prefix}: " if prefix else ""
        warnings.warn(f"{label}shared experts are not fused: {reason}", stacklevel=2)
        return None
    assert isinstance(l1, tuple)
    assert isinstance(l2, tuple)
    gate_up.weight.data = l1[0]
    return (gate_up.weight.data, l1[1]), l2


def _checked_layer(name: str, linear: Any, mn: int, k: int) -> tuple[Tensor, Tensor]:
    """Weight and packed scales of one linear layer. ValueError or TypeError naming what does not fit."""
    weight: Tensor = linear.weight.data
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}.weight must be float8_e4m3fn, got {weight.dtype}")
    if tuple(weight.shape) != (mn, k):
        raise ValueError(f"{name}.weight must be {(mn, k)}, got {tuple(weight.shape)}")
    try:
        words = prepare_shared_expert_scale(
            _scale_of(linear), getattr(linear, "weight_block_size", None), mn, k
        )
    except (TypeError, ValueError) as reason:
        raise type(reason)(f"{name}: {reason}") from reason
    return weight, words
