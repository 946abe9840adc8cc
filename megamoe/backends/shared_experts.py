"""Shared experts inside the launch: their block-FP8 weights, expanded and transformed (NUMERICS 5.6, 5.7).

Whatever does not fit is no error: the caller runs the shared experts separately. ``prepare`` says why.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.backends.scales import E8M0_DTYPES, expand_block_scale

EXPANDABLE = (*E8M0_DTYPES, torch.int32)


def _scale_of(linear: Any) -> torch.Tensor | None:
    scale = getattr(linear, "weight_scale", None)
    return scale if scale is not None else getattr(linear, "weight_scale_inv", None)


def _expand(linear: Any, name: str, scale: torch.Tensor, mn: int, k: int, library: Any) -> tuple[Any, str]:
    values, why = expand_block_scale(scale, getattr(linear, "weight_block_size", None), mn, k)
    if values is None:
        return None, f"{name}: {why}"
    return library.transform_sf_into_required_layout(values[None], mn, k, (1, 32), 1).squeeze(0), ""


def prepare(
    shared_experts: Any, num_shared_experts: int, hidden_size: int, intermediate_size: int, library: Any
) -> tuple[tuple[Any, Any] | None, str]:
    """((gate_up weight, scale), (down weight, scale)) ready for the transform, or (None, why not).

    ``shared_experts`` has ``gate_up_proj`` and ``down_proj``, each with weight, weight_scale (or
    weight_scale_inv) and weight_block_size. UE8M0 block scales (uint8, float8_e8m0fnu, or packed int32)
    become int32 words [rows, K / 128], MN-major; others are left alone and refused unless they already are
    such words.
    """
    width = intermediate_size * num_shared_experts
    linears = {
        "gate_up_proj": (shared_experts.gate_up_proj, 2 * width, hidden_size),
        "down_proj": (shared_experts.down_proj, hidden_size, width),
    }
    scales = {name: _scale_of(linear) for name, (linear, _, _) in linears.items()}
    for name, scale in scales.items():
        if scale is None:
            return None, f"{name} has neither weight_scale nor weight_scale_inv"
    # Shapes and dtypes first: an expansion would repeat scales of a weight that is refused anyway.
    for name, (linear, mn, k) in linears.items():
        if linear.weight.dtype != torch.float8_e4m3fn:
            return None, f"{name}.weight should be float8_e4m3fn, got {linear.weight.dtype}"
        if tuple(linear.weight.shape) != (mn, k):
            return None, f"{name}.weight should have shape {(mn, k)}, got {tuple(linear.weight.shape)}"
    if all(scale.dtype in EXPANDABLE for scale in scales.values()):  # type: ignore[union-attr]
        for name, (linear, mn, k) in linears.items():
            expanded, why = _expand(linear, name, scales[name], mn, k, library)  # type: ignore[arg-type]
            if expanded is None:
                return None, why
            scales[name] = expanded
    for name, scale in scales.items():
        if scale.dtype != torch.int32:  # type: ignore[union-attr]
            return None, f"the scales of {name} should be UE8M0 (bytes or int32 words), got {scale.dtype}"  # type: ignore[union-attr]
    pairs = tuple((linear.weight, scales[name]) for name, (linear, _, _) in linears.items())
    return pairs, ""  # type: ignore[return-value]


def transform(
    shared_experts: Any, num_shared_experts: int, hidden_size: int, intermediate_size: int, library: Any
) -> tuple[tuple[Any, Any] | None, str]:
    """Shared-expert weights in the launch's layout, or (None, why not).

    The gate/up parameter is pointed at the interleaved storage, so that one copy exists: whoever calls the
    linear layer afterwards gets interleaved rows.
    """
    pairs, why = prepare(shared_experts, num_shared_experts, hidden_size, intermediate_size, library)
    if pairs is None:
        return None, why
    (gate_up, gate_up_scale), (down, down_scale) = pairs
    l1, l2 = library.transform_weights_for_mega_moe((gate_up.data, gate_up_scale), (down.data, down_scale))
    shared_experts.gate_up_proj.weight.data = l1[0]
    return ((shared_experts.gate_up_proj.weight.data, l1[1]), (l2[0], l2[1])), ""
