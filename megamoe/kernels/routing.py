"""Top-k repack, padding, and EPLB: logical to physical experts and load recording.

The fused form is one device function that every staging kernel calls from programs of its own, so that
the chain id -> replica count -> physical id runs beside the quantization, not after it.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.eplb import EplbTensors
from megamoe.kernels import constants

PADDING_EXPERT_ID = tl.constexpr(constants.PADDING_EXPERT_ID)
PADDING_WEIGHT = tl.constexpr(constants.PADDING_WEIGHT)
REPLICA_HASH_MULTIPLIER = tl.constexpr(constants.REPLICA_HASH_MULTIPLIER)

# Arguments that change from call to call: a compiled kernel must not depend on their value being 1 or a
# multiple of 16.
UNSPECIALIZED_ROUTED = ["num_tokens", "num_routing_programs"]
UNSPECIALIZED = [*UNSPECIALIZED_ROUTED, "shared_block_m", "shared_page_rows"]


@triton.jit
def map_and_record(ids, tokens, mask, eplb, found, LOAD_BINS: tl.constexpr):
    """(physical ids of logical ids [tokens, K], load counted so far).

    The replica is hash(token) modulo the replica count, with the hash in unsigned 32-bit arithmetic.
    Ids outside [0, num_logical) become -1. `record` points to the record flag; `num_unpadded` points
    to the number of tokens whose load counts, or is None where all do.
    LOAD_BINS: a power of two not below num_physical to count in `found` [LOAD_BINS] for `add_load`; 0 to
    add to the load slot by slot, which is slow where many slots meet in few counters.
    """
    (
        expert_map,
        expert_map_stride,
        slot_stride,
        replica_count,
        replica_count_stride,
        load,
        load_stride,
        record,
        num_unpadded,
        num_logical,
        num_slots,
        num_physical,
    ) = eplb
    valid = mask & (ids >= 0) & (ids < num_logical)
    safe_ids = tl.where(valid, ids, 0).to(tl.int64)
    count = tl.load(replica_count + safe_ids * replica_count_stride, mask=valid, other=1)
    count = tl.maximum(count, 1).to(tl.uint32)
    token_hash = tokens.to(tl.uint32) * REPLICA_HASH_MULTIPLIER
    replica = (token_hash % count).to(tl.int64)
    mapped = valid & (replica < num_slots)  # a count above the map's slots must not read past the row
    physical = tl.load(
        expert_map + safe_ids * expert_map_stride + replica * slot_stride, mask=mapped, other=-1
    ).to(tl.int64)
    if tl.load(record) != 0:
        counts = mapped & (physical >= 0) & (physical < num_physical)
        if num_unpadded is not None:
            counts = counts & (tokens < tl.load(num_unpadded))
        if LOAD_BINS == 0:
            # The order of the additions does not matter and nothing waits for them.
            tl.atomic_add(load + physical * load_stride, 1, mask=counts, sem="relaxed")
        else:
            flat = tl.reshape(tl.where(counts, physical, 0).to(tl.int32), (physical.numel,))
            found += tl.histogram(flat, LOAD_BINS, mask=tl.reshape(counts, (physical.numel,)))
    return physical, found


@triton.jit
def add_load(eplb, found, LOAD_BINS: tl.constexpr):
    """Adds what a program counted; zero where nothing is to be recorded."""
    load, load_stride, num_physical = eplb[5], eplb[6], eplb[11]
    expert = tl.arange(0, LOAD_BINS)
    hit = (found > 0) & (expert < num_physical)
    tl.atomic_add(load + expert.to(tl.int64) * load_stride, found, mask=hit, sem="relaxed")


@triton.jit
def store_topk(
    program,
    num_tokens,
    topk,
    eplb,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    LOAD_BINS: tl.constexpr,
):
    """Repacks the routing of TILES times TOKENS tokens: int64 ids, float32 weights, padding as -1 and 0.

    `topk` is `pack_topk(...)`, `eplb` is `pack_eplb(...)` or None.
    """
    (
        topk_ids,
        ids_stride_m,
        ids_stride_k,
        topk_weights,
        weights_stride_m,
        weights_stride_k,
        topk_idx_out,
        idx_out_stride_m,
        idx_out_stride_k,
        topk_weights_out,
        weights_out_stride_m,
        weights_out_stride_k,
        is_padding,
        is_padding_stride,
    ) = topk
    slots = tl.arange(0, TOPK_PADDED)[None, :]
    found = tl.zeros((LOAD_BINS if LOAD_BINS else 1,), tl.int32)
    for tile in range(TILES):
        tokens = (program * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        live = tokens < num_tokens
        mask = live[:, None] & (slots < TOPK)
        rows = tokens.to(tl.int64)[:, None]
        ids = tl.load(topk_ids + rows * ids_stride_m + slots * ids_stride_k, mask=mask, other=0).to(tl.int64)
        weights = tl.load(
            topk_weights + rows * weights_stride_m + slots * weights_stride_k, mask=mask, other=0.0
        ).to(tl.float32)
        if is_padding is not None:
            padded = tl.load(is_padding + tokens.to(tl.int64) * is_padding_stride, mask=live, other=0) != 0
            ids = tl.where(padded[:, None], PADDING_EXPERT_ID, ids)
            weights = tl.where(padded[:, None], PADDING_WEIGHT, weights)
        if eplb is not None:
            token_of_slot = tl.broadcast_to(tokens[:, None], (TOKENS, TOPK_PADDED))
            ids, found = map_and_record(ids, token_of_slot, mask, eplb, found, LOAD_BINS)
        tl.store(topk_idx_out + rows * idx_out_stride_m + slots * idx_out_stride_k, ids, mask=mask)
        tl.store(
            topk_weights_out + rows * weights_out_stride_m + slots * weights_out_stride_k, weights, mask=mask
        )
    if LOAD_BINS != 0:
        add_load(eplb, found, LOAD_BINS)


@triton.jit(do_not_specialize=["num_ids"])
def eplb_kernel(
    topk_ids, physical_ids, num_ids, num_slots, eplb, BLOCK: tl.constexpr, LOAD_BINS: tl.constexpr
):
    """The stand-alone form on contiguous ids; ids wrap to int32 first, as in production."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < num_ids
    ids = tl.load(topk_ids + position, mask=mask, other=-1).to(tl.int32)
    found = tl.zeros((LOAD_BINS if LOAD_BINS else 1,), tl.int32)
    tokens = (position // num_slots).to(tl.int32)
    physical, found = map_and_record(ids, tokens, mask, eplb, found, LOAD_BINS)
    tl.store(physical_ids + position, physical, mask=mask)
    if LOAD_BINS != 0:
        add_load(eplb, found, LOAD_BINS)


def pack_topk(
    topk_ids: Tensor,
    topk_weights: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None,
) -> tuple[Any, ...]:
    """The `topk` argument of the kernels: tensors, each followed by its strides; flags go as bytes."""
    padding = (None, 0) if is_padding is None else (is_padding.view(torch.uint8), is_padding.stride(0))
    packed: tuple[Any, ...] = ()
    for tensor in (topk_ids, topk_weights, topk_idx_out, topk_weights_out):
        packed += (tensor, *tensor.stride())
    return packed + padding


def pack_eplb(tensors: EplbTensors | None) -> tuple[Any, ...] | None:
    """The `eplb` argument of the kernels; None where nothing is mapped."""
    if tensors is None:
        return None
    return (
        tensors.expert_map,
        *tensors.expert_map.stride(),
        tensors.replica_count,
        tensors.replica_count.stride(0),
        tensors.load,
        tensors.load.stride(0),
        tensors.record.view(torch.uint8),
        tensors.num_unpadded,
        *tensors.expert_map.shape,
        tensors.load.shape[0],
    )
