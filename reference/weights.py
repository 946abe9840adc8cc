"""From checkpoint scales and weights to what MegaMoE kernels read.

Scales: one scale per (row, group of k) becomes a UE8M0 byte, four consecutive groups an int32 word (little
endian), and the words an MN-major tensor whose columns start at multiples of 16 bytes. For SM90 the scales
stay fp32. Weights: gate and up rows alternate in runs of 8, so that one MMA tile holds both halves of a
column; scale rows follow their weights and are then permuted for UTCCP (row 32j + i of every 128 goes to 4i
+ j).

Easy to get wrong: packing takes exponents and never rounds, so a scale that is not a power of two is
refused; the interleaving comes before the UTCCP permutation; L2 weights are not copied; results keep the
strides of their inputs.

Sources: DeepGEMM (vLLM 0.33 build) mega/__init__.py and csrc/apis/layout.hpp, sgl-deep-gemm for the variants
named there. The permutations themselves are the layouts of `reference.layouts`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference._bits import as_integers
from reference._weight_scales import (
    check_power_of_two_scales,
    check_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    pack_e4m3_scales,
    transform_sf_into_required_layout,
    transform_ue4m3_sf_into_required_layout,
    ue8m0_uint8_to_float,
)
from reference.layouts import get_layout

__all__ = [
    "ACTIVATIONS",
    "check_power_of_two_scales",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "interleave_gate_up",
    "pack_e4m3_scales",
    "transform_scales_for_mega_moe",
    "transform_sf_into_required_layout",
    "transform_ue4m3_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "transpose_sf_for_utccp",
    "ue8m0_uint8_to_float",
]

Weights = Tensor | tuple[Tensor, Tensor]

# By mma_type: the layout of L1 rows and the activations that the build's transform accepts.
_VLLM_ACTIVATIONS = ("swiglu", "swiglustep", "situ")
_SGL_ACTIVATIONS = ("swiglu", "swigluoai", "situ")
_L1_LAYOUT = {
    "fp8xfp4": "gate_up_interleaved_8",
    "fp8xfp8": "gate_up_interleaved_8",
    "bf16xbf16": "gate_up_interleaved_8",
    "fp4xfp4": "gate_up_interleaved_8",
    "nvfp4": "gate_up_interleaved_8",
    "mxf4xmxf4": "gate_up_interleaved_16_even_odd",
    "nvfp4xnvfp4": "gate_up_interleaved_16_even_odd",
}
ACTIVATIONS = {
    mma_type: _SGL_ACTIVATIONS if layout.endswith("even_odd") else _VLLM_ACTIVATIONS
    for mma_type, layout in _L1_LAYOUT.items()
}


def _move_rows(tensor: Tensor, layout_name: str) -> Tensor:
    """The rows (second last dimension) in the order of the named layout, in a new tensor like the input."""
    rows = tensor.shape[-2]
    sizes = {"mn": rows, "groups": 4} if layout_name == "utccp_scales" else {"rows": rows, "columns": 1}
    layout = get_layout(layout_name, **sizes)
    destination = layout.axis_positions("row")
    if layout_name == "utccp_scales":
        destination = destination // 4  # four bytes a word
    result = torch.empty_like(tensor)
    as_integers(result).index_copy_(tensor.ndim - 2, destination.to(tensor.device), as_integers(tensor))
    return result


def interleave_gate_up(weights: Tensor, mma_type: str = "fp8xfp4") -> Tensor:
    """[experts,] 2I rows (gate, then up), columns -> gate and up rows in alternation, a copy with the
    input's strides.

    Runs of 8 rows; for the packed-FP4 kinds of sgl-deep-gemm (mxf4xmxf4, nvfp4xnvfp4) the even rows of 16
    first. Any dtype of 1, 2 or 4 bytes: weights and their scale words alike.
    """
    if mma_type not in _L1_LAYOUT:
        raise ValueError(f"mma_type must be one of {sorted(_L1_LAYOUT)}, got {mma_type!r}")
    if weights.ndim not in (2, 3):
        raise ValueError(f"weights must have 2 or 3 dimensions, got shape {tuple(weights.shape)}")
    return _move_rows(weights, _L1_LAYOUT[mma_type])


def transpose_sf_for_utccp(sf: Tensor) -> Tensor:
    """int32 scale words [experts,] mn, words with row 32j + i of every 128 at 4i + j; a copy with the
    input's strides.

    mn must be a multiple of 128.
    """
    check_tensor("sf", sf, (torch.int32,), (2, 3))
    return _move_rows(sf, "utccp_scales")


def transform_scales_for_mega_moe(
    l1_sf: Tensor, l2_sf: Tensor, mma_type: str = "fp8xfp4"
) -> tuple[Tensor, Tensor]:
    """L1 scale words interleaved and permuted, L2 scale words permuted; both copies."""
    return transpose_sf_for_utccp(interleave_gate_up(l1_sf, mma_type)), transpose_sf_for_utccp(l2_sf)


def transform_weights_for_mega_moe(
    l1_weights: Weights, l2_weights: Weights, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> tuple[Weights, Weights]:
    """Weights of one layer in the kernels' order.

    l1_weights: (weights [experts,] 2I, H (packed FP4: H / 2), scale words int32 [experts,] 2I, H / 128), or
    for bf16 the weights alone; gate rows first. l2_weights likewise with H rows. Two dimensions for a shared
    expert. Returns the same structure. The L2 weight is the input tensor itself; everything else is a copy
    with the strides of its input (so scale words must come MN-major).
    ValueError: an activation that the kind does not have, rows that do not fit (2I a multiple of 16, scale
    rows of 128), weights and scales of different row counts. TypeError: one layer with scales and one
    without, wrong dtypes.
    """
    if mma_type not in _L1_LAYOUT:
        raise ValueError(f"mma_type must be one of {sorted(_L1_LAYOUT)}, got {mma_type!r}")
    if activation not in ACTIVATIONS[mma_type]:
        raise ValueError(f"activation must be one of {ACTIVATIONS[mma_type]}, got {activation!r}")
    if isinstance(l1_weights, Tensor) and isinstance(l2_weights, Tensor):
        if activation == "situ":
            raise ValueError("activation 'situ' needs scaled weights: (weights, scales) pairs")
        return interleave_gate_up(l1_weights, mma_type), l2_weights
    if isinstance(l1_weights, Tensor) or isinstance(l2_weights, Tensor):
        raise TypeError("l1_weights and l2_weights must both be tensors or both (weights, scales) pairs")
    for name, (weight, scales) in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
        check_tensor(f"{name}[1]", scales, (torch.int32,), (weight.ndim,))
        if weight.shape[:-1] != scales.shape[:-1]:
            raise ValueError(
                f"{name}: scales must have the rows of the weights, {tuple(weight.shape[:-1])}, "
                f"got {tuple(scales.shape[:-1])}"
            )
    l1_sf, l2_sf = transform_scales_for_mega_moe(l1_weights[1], l2_weights[1], mma_type)
    return (interleave_gate_up(l1_weights[0], mma_type), l1_sf), (l2_weights[0], l2_sf)


def transform_weights_for_mega_moe_sm90(
    l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """SM90: e4m3 weights [experts, rows, K] with fp32 scales per 128x128 block. Only the L1 weight rows move.

    The L1 scales and both L2 tensors are the inputs themselves: blocks of 128 rows hold 64 gate and 64 up
    rows after the interleaving, and the kernel looks their scales up in the unmoved tensor.
    """
    (l1_weight, l1_sf), (l2_weight, l2_sf) = l1_weights, l2_weights
    for name, weight in (("l1_weights[0]", l1_weight), ("l2_weights[0]", l2_weight)):
        check_tensor(name, weight, (torch.float8_e4m3fn,), (2, 3))
    for name, scales in (("l1_weights[1]", l1_sf), ("l2_weights[1]", l2_sf)):
        check_tensor(name, scales, (torch.float32,), (2, 3))
    return (interleave_gate_up(l1_weight, "fp8xfp8"), l1_sf), l2_weights
