"""Top-k repack: ids to int64, weights to float32, padding tokens to (-1, 0.0).

A padding token's weights are replaced, not multiplied, so that a NaN there vanishes. Ids are not checked
against a number of experts. Only the rows of this call's tokens are written; later rows of the buffers keep
what they held.

Source: NUMERICS 6.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from reference.recipes import RECIPES, RoutingRecipe

ROUTING = cast(RoutingRecipe, RECIPES["routing"])


@dataclass(frozen=True)
class Routing:
    """ids: int64 [T, K]. weights: float32 [T, K]."""

    ids: Tensor
    weights: Tensor


def repack_topk(
    topk_ids: Tensor, topk_weights: Tensor, is_padding: Tensor | None = None, recipe: RoutingRecipe = ROUTING
) -> Routing:
    """ids [T, K] (int32 or int64) and weights [T, K] (any float) with is_padding bool [T] -> what staging
    stores."""
    ids = topk_ids.to(torch.int64, copy=True)
    weights = topk_weights.to(torch.float32, copy=True)
    if is_padding is not None:
        ids[is_padding] = recipe.padding_id
        weights[is_padding] = recipe.padding_weight
    return Routing(ids, weights)


def routing_problems(ids: Tensor, weights: Tensor, num_experts: int) -> list[str]:
    """What a launch would not survive in ids [T, K] and weights [T, K], in words; empty if there is nothing.

    Reported: ids at or above num_experts or below -1, an expert listed twice by one token, NaN weights of
    live slots.
    Source: NUMERICS 8.1 and trap 38; CASES 25.
    """
    problems: list[str] = []
    live = ids >= 0
    for token, slot in ((ids >= num_experts) | (ids < -1)).nonzero().tolist():
        problems.append(
            f"token {token}, slot {slot}: expert {int(ids[token, slot])} is not in [-1, {num_experts})"
        )
    order = ids.sort(dim=1).values
    for token, slot in ((order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)).nonzero().tolist():
        problems.append(f"token {token}: expert {int(order[token, slot])} is listed more than once")
    for token, slot in (weights.isnan() & live).nonzero().tolist():
        problems.append(f"token {token}, slot {slot}: weight is NaN")
    return problems
