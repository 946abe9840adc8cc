"""EPLB in front of staging functions that do not map expert ids themselves (NUMERICS 6.3, 6.5)."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.eplb import current_micro_batch


def map_experts(
    eplb: Any, topk_ids: torch.Tensor, is_padding: torch.Tensor | None, state: Any | None
) -> torch.Tensor:
    """Physical ids of ``topk_ids`` [M, K], load recorded; the ids themselves without EPLB.

    Padding tokens become -1 first, so that they are never counted as load.
    """
    if state is None or state.logical_to_physical_map is None:
        return topk_ids
    if is_padding is not None:
        topk_ids = torch.where(is_padding[: topk_ids.shape[0], None], -1, topk_ids)
    counts = state.num_unpadded_tokens_tensors
    mapped: torch.Tensor = eplb.eplb_map_to_physical_and_record(
        topk_ids,
        state.expert_load_view,
        state.logical_to_physical_map,
        state.logical_replica_count,
        state.should_record_tensor,
        counts[current_micro_batch()] if counts else None,
    )
    return mapped
