"""Top-k repack, padding, and EPLB: logical to physical experts and load recording.

The fused form is one device function that every staging kernel calls from programs of its own, so that
the chain id -> replica count -> physical id runs beside the quantization, not after it.

A tile of slots is one-dimensional: loads through the map and the counts have no order that a compiler could
use, and a second dimension only makes it move the tile between layouts.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls, allow-incomplete-defs
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megamoe.eplb import EplbTensors
from megamoe.kernels import constants, tuning

PADDING_EXPERT_ID = tl.constexpr(constants.PADDING_EXPERT_ID)
PADDING_WEIGHT = tl.constexpr(constants.PADDING_WEIGHT)
REPLICA_HASH_MULTIPLIER = tl.constexpr(constants.REPLICA_HASH_MULTIPLIER)
LOAD_BINS = tl.constexpr(tuning.LOAD_BINS)

# Arguments that change from call to call: a compiled kernel must not depend on their value being 1 or a
# multiple of 16.
UNSPECIALIZED_ROUTED = ["num_tokens", "num_routing_programs", "routing_shift"]
UNSPECIALIZED = [*UNSPECIALIZED_ROUTED, "shared_block_m", "shared_page_rows"]


@triton.jit
def routing_programs_before(program, num_routing_programs, routing_shift):
    """How many routing programs have a lower number: every 2^routing_shift-th is one, from 0 on."""
    return tl.minimum((program + (1 << routing_shift) - 1) >> routing_shift, num_routing_programs)


@triton.jit
def is_routing_program(program, num_routing_programs, routing_shift):
    turn = program >> routing_shift
    return (turn << routing_shift == program) & (turn < num_routing_programs)


@triton.jit
def load_record_flags(eplb):
    """(is the load recorded, number of tokens whose load counts as int64).

    Asked for before the ids are mapped: nothing waits for them until then.
    """
    record, num_unpadded = eplb[7], eplb[8]
    recording = tl.load(record) != 0
    limit = tl.full((), 1 << 62, tl.int64)
    if num_unpadded is not None:
        limit = tl.load(num_unpadded).to(tl.int64)
    return recording, limit


@triton.jit
def replica_of(token_hash, count):
    return token_hash % tl.maximum(count, 1).to(tl.uint32)


@triton.jit
def map_replica(row, slot_stride, num_slots, replica, valid):
    """The physical expert in slot `replica` of a map's row; -1 beyond its slots, which must not be read."""
    offset = replica.to(tl.int64) * slot_stride
    return tl.load(row + offset, mask=valid & (replica < num_slots), other=-1)


@triton.jit
def map_to_physical(ids, tokens, mask, eplb, AHEAD: tl.constexpr):
    """Physical ids (int64) of logical ids, -1 for ids outside [0, num_logical), empty slots and masked ones.

    The replica is hash(token) modulo the replica count, with the hash in unsigned 32-bit arithmetic.
    AHEAD loads the first four replicas beside the count, not after it, and divides only for higher counts.
    It halves the way from id to physical id, at five loads a slot: for few tokens.
    """
    expert_map, expert_map_stride, slot_stride = eplb[0], eplb[1], eplb[2]
    replica_count, replica_count_stride = eplb[3], eplb[4]
    num_logical, num_slots = eplb[9], eplb[10]
    valid = mask & (ids >= 0) & (ids < num_logical)
    safe_ids = tl.where(valid, ids, 0).to(tl.int64)
    count = tl.load(replica_count + safe_ids * replica_count_stride, mask=valid, other=1)
    row = expert_map + safe_ids * expert_map_stride
    token_hash = tokens.to(tl.uint32) * REPLICA_HASH_MULTIPLIER
    if AHEAD:
        slot = tl.zeros(ids.shape, tl.uint32)
        first = map_replica(row, slot_stride, num_slots, slot, valid)
        second = map_replica(row, slot_stride, num_slots, slot + 1, valid)
        third = map_replica(row, slot_stride, num_slots, slot + 2, valid)
        fourth = map_replica(row, slot_stride, num_slots, slot + 3, valid)
        is_even = token_hash % 2 == 0
        of_two = tl.where(is_even, first, second)
        of_three = tl.where(token_hash % 3 == 0, first, tl.where(token_hash % 3 == 1, second, third))
        of_four = tl.where(token_hash % 4 < 2, of_two, tl.where(is_even, third, fourth))
        several = tl.where(count == 2, of_two, tl.where(count == 3, of_three, of_four))
        physical = tl.where(count < 2, first, several)
        if tl.max((count > 4).to(tl.int32), 0) != 0:
            physical = map_replica(row, slot_stride, num_slots, replica_of(token_hash, count), valid)
    else:
        physical = map_replica(row, slot_stride, num_slots, replica_of(token_hash, count), valid)
    return physical.to(tl.int64)


@triton.jit
def record_load(program, physical, tokens, eplb, recording, limit, LOAD_PARTS: tl.constexpr):
    """Adds a tile's slots to the load, where it is recorded; the order of the additions does not matter.

    LOAD_PARTS: how many times LOAD_BINS counters the load has, to count in shared memory first; 0 to add slot
    by slot. Additions to the same 32 bytes of the load wait for each other (about 10 ns on an H200), whether
    of one counter or of all eight. Programs begin with different parts, so that they do not meet.
    """
    load, load_stride, num_physical = eplb[5], eplb[6], eplb[11]
    if recording:
        counts = (physical >= 0) & (physical < num_physical) & (tokens < limit)
        if LOAD_PARTS == 0:
            tl.atomic_add(load + physical * load_stride, 1, mask=counts, sem="relaxed")
        else:
            expert = tl.where(counts, physical, -1).to(tl.int32)
            for step in range(LOAD_PARTS):
                first = ((program + step) % LOAD_PARTS) * LOAD_BINS
                inside = (expert >= first) & (expert < first + LOAD_BINS)
                found = tl.histogram(tl.where(inside, expert - first, 0), LOAD_BINS, mask=inside)
                counter = first + tl.arange(0, LOAD_BINS)
                hit = (found > 0) & (counter < num_physical)
                tl.atomic_add(load + counter.to(tl.int64) * load_stride, found, mask=hit, sem="relaxed")


@triton.jit
def store_topk(
    program,
    num_tokens,
    topk,
    eplb,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    LOAD_PARTS: tl.constexpr,
):
    """Repacks the routing of TOKENS tokens: int64 ids, float32 weights, padding as -1 and 0.

    `topk` is `pack_topk(...)`, `eplb` is `pack_eplb(...)` or None. SLOTS: a power of two not below TOPK.
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
    position = tl.arange(0, TOKENS * SLOTS)
    slots = (position % SLOTS).to(tl.int64)
    tokens = program * TOKENS + position // SLOTS
    mask = (tokens < num_tokens) & (slots < TOPK)
    rows = tokens.to(tl.int64)
    ids = tl.load(topk_ids + rows * ids_stride_m + slots * ids_stride_k, mask=mask, other=0)
    weights = tl.load(
        topk_weights + rows * weights_stride_m + slots * weights_stride_k, mask=mask, other=0.0
    ).to(tl.float32)
    if eplb is not None:
        recording, limit = load_record_flags(eplb)
    if is_padding is not None:
        padded = tl.load(is_padding + rows * is_padding_stride, mask=mask, other=0) != 0
        ids = tl.where(padded, PADDING_EXPERT_ID, ids)
        weights = tl.where(padded, PADDING_WEIGHT, weights)
    id_pointers = topk_idx_out + rows * idx_out_stride_m + slots * idx_out_stride_k
    weight_pointers = topk_weights_out + rows * weights_out_stride_m + slots * weights_out_stride_k
    if eplb is None:
        tl.store(id_pointers, ids.to(tl.int64), mask=mask)
        tl.store(weight_pointers, weights, mask=mask)
    else:
        physical = map_to_physical(ids, tokens, mask, eplb, AHEAD)
        tl.store(weight_pointers, weights, mask=mask)
        tl.store(id_pointers, physical, mask=mask)
        record_load(program, physical, tokens, eplb, recording, limit, LOAD_PARTS)


@triton.jit(do_not_specialize=["num_ids"])
def eplb_kernel(
    topk_ids, physical_ids, num_ids, num_slots, eplb, BLOCK: tl.constexpr, LOAD_PARTS: tl.constexpr
):
    """The stand-alone form on contiguous ids; ids wrap to int32 first, as in production."""
    program = tl.program_id(0)
    position = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < num_ids
    recording, limit = load_record_flags(eplb)
    ids = tl.load(topk_ids + position, mask=mask, other=-1).to(tl.int32)
    tokens = (position // num_slots).to(tl.int32)
    physical = map_to_physical(ids, tokens, mask, eplb, False)
    tl.store(physical_ids + position, physical, mask=mask)
    record_load(program, physical, tokens, eplb, recording, limit, LOAD_PARTS)


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
        tensors.num_physical,
    )
