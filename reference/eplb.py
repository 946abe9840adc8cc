"""Expert-parallel load balancing: logical experts to physical replicas, and the load of each.

For token row t with logical id e in one of its slots:

    valid   = 0 <= e < E
    replica = ((t * 2654435769) mod 2^32) mod max(replica_count[e], 1)
    id      = map[e, replica], or -1 if not valid
    load[id] += 1 if recording, t < num_unpadded_tokens and 0 <= id < number of physical experts

Easy to get wrong: the hash is of the token's row, not of the slot, and is unsigned; recording is limited to
unpadded tokens, mapping is not; a map entry may be -1; a slot mapped to -1 keeps its weight.

Source: NUMERICS 6.2 to 6.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference.recipes import RoutingRecipe
from reference.routing import ROUTING

_INTEGERS = (torch.int32, torch.int64)


class EplbState(Protocol):
    """What staging reads of an EplbLayerState; inert (no mapping) when logical_to_physical_map is None.

    expert_load_view: int32 [P], counts per physical expert, added to.
    logical_to_physical_map: integer [E, slots]. logical_replica_count: integer [E].
    should_record_tensor: scalar bool tensor. num_unpadded_tokens_tensors: one scalar integer tensor per
    micro-batch, of which the first is used.
    """

    expert_load_view: Tensor | None
    logical_to_physical_map: Tensor | None
    logical_replica_count: Tensor | None
    should_record_tensor: Tensor | None
    num_unpadded_tokens_tensors: list[Tensor] | None


def unpadded_tokens(state: Any) -> Tensor:
    """The count of the micro-batch in progress: ``state.num_unpadded_tokens`` if there, else the first."""
    found = getattr(state, "num_unpadded_tokens", None)
    return cast(Tensor, state.num_unpadded_tokens_tensors[0] if found is None else found)


@dataclass(frozen=True)
class EplbMapping:
    """ids: int64 [T, K], physical experts or -1. replicas: int64 [T, K], the slot of the map that was read.
    counted: bool [T, K], which slots count as load. load: int64 [P], what is added to the load view."""

    ids: Tensor
    replicas: Tensor
    counted: Tensor
    load: Tensor


def replica_hash(tokens: Tensor, recipe: RoutingRecipe = ROUTING) -> Tensor:
    """Hash of token rows (or flat slots), int64. Source: NUMERICS 6.3."""
    bits = recipe.replica_hash_bits
    hashed = (tokens.to(torch.int64) * recipe.replica_hash_multiplier) & ((1 << bits) - 1)
    if recipe.replica_hash_signed:
        hashed = torch.where(hashed >= 1 << (bits - 1), hashed - (1 << bits), hashed)
    return hashed


def choose_replica(tokens: Tensor, replica_count: Tensor, recipe: RoutingRecipe = ROUTING) -> Tensor:
    """Replica index of each token given its expert's replica count (same shape); a count of 0 counts as 1."""
    mode = "floor" if recipe.replica_remainder == "floor" else "trunc"
    hashed, count = replica_hash(tokens, recipe), replica_count.to(torch.int64).clamp_min(1)
    return hashed - torch.div(hashed, count, rounding_mode=mode) * count


def map_experts(
    ids: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    num_physical: int,
    num_unpadded_tokens: int | None = None,
    recipe: RoutingRecipe = ROUTING,
) -> EplbMapping:
    """Maps logical ids int64 [T, K] and says what load that makes; pure. Source: NUMERICS 6.3, 6.4."""
    num_tokens, num_topk = ids.shape
    valid = (ids >= 0) & (ids < logical_replica_count.shape[0])
    logical = torch.where(valid, ids, torch.zeros_like(ids))
    tokens = torch.arange(num_tokens, device=ids.device).unsqueeze(1).expand(-1, num_topk)
    slots = torch.arange(num_topk, device=ids.device)
    hashed = tokens if recipe.replica_hash_by == "token" else tokens * num_topk + slots
    counts = logical_replica_count.to(torch.int64)[logical]
    replicas = choose_replica(hashed, torch.where(valid, counts, torch.ones_like(counts)), recipe)
    mapped = logical_to_physical_map.to(torch.int64)[logical, replicas]
    invalid = ids if recipe.invalid_id == "keep" else torch.full_like(ids, -1)
    physical = torch.where(valid, mapped, invalid)
    counted = valid & (physical >= 0) & (physical < num_physical)
    if num_unpadded_tokens is not None and not recipe.count_padded_tokens:
        counted = counted & (tokens < num_unpadded_tokens)
    load = torch.bincount(physical[counted], minlength=num_physical)
    return EplbMapping(physical, replicas, counted, load)


def eplb_map_to_physical_and_record(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    num_unpadded_tokens: Tensor | None = None,
) -> Tensor:
    """Maps logical expert ids to physical ones and records the load.

    topk_ids: int32 or int64 [..., K]; reduced to int32 first, as the kernel does, so a larger id wraps.
    expert_load_view: int32 [P], counted into in place. logical_to_physical_map: integer [E, slots].
    logical_replica_count: integer [E]. record_enabled: scalar bool tensor. num_unpadded_tokens: scalar
    integer tensor; None records every token.
    Returns the physical ids, same shape and dtype as topk_ids, row-major; topk_ids itself if it is empty.
    TypeError, ValueError: a wrong dtype, shape or device, or more replicas than the map has slots; nothing is
    counted.
    Source: NUMERICS 6.3, 6.4.
    """
    check_tensor("topk_ids", topk_ids, dtypes=_INTEGERS)
    require(topk_ids.dim() >= 1, "topk_ids", "at least one dimension", topk_ids.dim())
    check_eplb_tensors(
        expert_load_view,
        logical_to_physical_map,
        logical_replica_count,
        record_enabled,
        num_unpadded_tokens,
        device=topk_ids.device,
    )
    if topk_ids.numel() == 0:
        return topk_ids
    ids = topk_ids.reshape(-1, topk_ids.shape[-1]).to(torch.int32).to(torch.int64)
    mapping = map_experts(
        ids,
        logical_to_physical_map,
        logical_replica_count,
        expert_load_view.numel(),
        None if num_unpadded_tokens is None else int(num_unpadded_tokens),
    )
    if bool(record_enabled):
        expert_load_view += mapping.load.to(expert_load_view.dtype)
    return mapping.ids.reshape(topk_ids.shape).to(topk_ids.dtype).contiguous()


def check_eplb_tensors(
    load: Tensor,
    expert_map: Tensor,
    replica_count: Tensor,
    record: Tensor,
    num_unpadded: Tensor | None,
    *,
    device: torch.device,
    prefix: str = "",
) -> None:
    """Refuses tensors that the mapping could not use; prefix: of the names in the messages."""
    record_name = "should_record_tensor" if prefix else "record_enabled"
    unpadded_name = "num_unpadded_tokens_tensors[0]" if prefix else "num_unpadded_tokens"
    check_tensor(prefix + "expert_load_view", load, dtypes=_INTEGERS, dim=1, device=device, written=True)
    check_tensor(prefix + "logical_to_physical_map", expert_map, dtypes=_INTEGERS, dim=2, device=device)
    num_logical = expert_map.shape[0]
    check_tensor(
        prefix + "logical_replica_count", replica_count, dtypes=_INTEGERS, shape=(num_logical,), device=device
    )
    check_tensor(prefix + record_name, record, dtypes=(torch.bool,), device=device)
    require(record.numel() == 1, prefix + record_name, "one element", list(record.shape))
    if num_unpadded is not None:
        check_tensor(prefix + unpadded_name, num_unpadded, dtypes=_INTEGERS, device=device)
        require(num_unpadded.numel() == 1, prefix + unpadded_name, "one element", list(num_unpadded.shape))
    require(
        num_logical > 0,
        prefix + "logical_to_physical_map",
        "at least one logical expert",
        list(expert_map.shape),
    )
    most = int(replica_count.max())
    slots = expert_map.shape[1]
    require(
        max(most, 1) <= slots,
        prefix + "logical_replica_count",
        f"at most {slots} replicas, the slots of the map",
        most,
    )
