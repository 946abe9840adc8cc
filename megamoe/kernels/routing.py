"""Top-k repack, padding, and EPLB: logical to physical experts and load recording.

The fused form is one device function that every staging kernel calls from programs of its own, so that
the chain id -> replica count -> physical id runs beside the quantization, not after it.

A tile of slots is one-dimensional: loads through the map and the counts have no order that a compiler could
use, and a second dimension only makes it move the tile between layouts.

The order of a staging kernel's arguments matters to calls of few tokens. They reach a program through a cache
with lines of 64 bytes, and the first use of each line waits about as long as a load does. So: what quantizing
needs comes first, then `mapping`, then the two numbers that every program reads at once, which fetch their
line while the first one is on its way, then the routing, last what only some calls have.
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
def load_record_flags(mapping):
    """(is the load recorded, number of tokens whose load counts).

    Asked for before the ids are mapped: nothing waits for them until then.
    """
    record, num_unpadded = mapping[2:4]
    recording = tl.load(record) != 0
    limit = tl.full((), 1 << 62, tl.int64)
    if num_unpadded is not None:
        limit = tl.load(num_unpadded)
    return recording, limit


@triton.jit
def unsigned(value):
    """The same bits, so that one comparison refuses what is negative too."""
    if value.dtype == tl.int32:
        result = value.to(tl.uint32, bitcast=True)
    else:
        result = value.to(tl.uint64, bitcast=True)
    return result


@triton.jit
def offset_of(index, stride):
    """index * stride in 64 bits, of a uint32 and a stride that is not negative: one instruction."""
    step = stride + tl.zeros((), tl.int32)  # a tensor, even where the stride is a constant
    if step.dtype == tl.int32:
        step = unsigned(step)
    return index.to(tl.uint64) * step.to(tl.uint64)


@triton.jit
def close_offset_of(index, stride):
    """`offset_of` what is known to fit 32 bits: a pointer and it are one instruction."""
    step = stride + tl.zeros((), tl.int32)
    return index * unsigned(step)


@triton.jit
def slot_offset(rows, stride_m, slots, stride_k):
    return offset_of(rows, stride_m) + offset_of(slots, stride_k)


@triton.jit
def short_count(count):
    """A replica count below 2^32 as uint32; a negative one becomes larger than 4."""
    if count.dtype == tl.int32:
        short = unsigned(count)
    else:
        short = count.to(tl.uint32) | ((count >> 32).to(tl.uint32) & 0x80000000)
    return short


@triton.jit
def hash_of(tokens):
    """What chooses a token's replica, in unsigned 32-bit arithmetic: the remainder by the replica count."""
    return tokens.to(tl.uint32) * REPLICA_HASH_MULTIPLIER


@triton.jit
def load_slot(row, slot, slot_stride, valid):
    """Physical experts (int64) in a slot (int64, as is its offset) of rows of the map; -1 where not valid."""
    return tl.load(row + slot * slot_stride, mask=valid, other=-1).to(tl.int64)


@triton.jit
def map_replica(row, slot_stride, num_slots, count, tokens, valid):
    """Physical experts of rows of the map; -1 beyond a row, whose slots end earlier than its count says."""
    replica = hash_of(tokens) % tl.maximum(count, 1).to(tl.uint32)
    return load_slot(row, replica.to(tl.int64), slot_stride, valid & (replica < num_slots))


@triton.jit
def load_ahead(row, slot_stride, valid, SLOT: tl.constexpr, AHEAD: tl.constexpr):
    physical = tl.full(row.shape, -1, tl.int64)
    if SLOT < AHEAD:
        physical = load_slot(row, tl.full((), SLOT, tl.int64), slot_stride, valid)
    return physical


@triton.jit
def map_ahead(row, slot_stride, count, tokens, valid, AHEAD: tl.constexpr):
    """(counts, what `map_replica` finds for counts up to 4); `count` points to them.

    The first replicas are loaded beside the count, not after it: AHEAD, four or as many as the map has slots.
    Remainders by 2, 3 and 4 are computed meanwhile. It halves the way from id to physical id, at five loads a
    slot: for few tokens.
    """
    first = load_ahead(row, slot_stride, valid, 0, AHEAD)
    second = load_ahead(row, slot_stride, valid, 1, AHEAD)
    third = load_ahead(row, slot_stride, valid, 2, AHEAD)
    fourth = load_ahead(row, slot_stride, valid, 3, AHEAD)
    counts = tl.load(count, mask=valid, other=1)
    token_hash = hash_of(tokens)
    is_even = token_hash % 2 == 0
    of_two = tl.where(is_even, first, second)
    of_three = tl.where(token_hash % 3 == 0, first, tl.where(token_hash % 3 == 1, second, third))
    of_four = tl.where(token_hash % 4 < 2, of_two, tl.where(is_even, third, fourth))
    short = short_count(counts)
    several = tl.where(short == 2, of_two, tl.where(short == 3, of_three, of_four))
    return counts, tl.where(short < 2, first, several)


@triton.jit
def map_to_physical(ids, tokens, mask, mapping, AHEAD: tl.constexpr, CLOSE: tl.constexpr):
    """Physical ids (int64) of logical ids, -1 for ids outside [0, num_logical), empty slots and masked ones.

    The replica is hash(token) modulo the replica count. AHEAD: `map_ahead`, or 0 to ask for the count first.
    CLOSE: offsets of the map's rows fit 32 bits.
    """
    expert_map, replica_count = mapping[0:2]
    expert_map_stride, slot_stride, num_logical, num_slots, replica_count_stride = mapping[4:9]
    valid = mask & (unsigned(ids) < num_logical)
    safe_ids = tl.where(valid, ids, 0).to(tl.uint32)
    count = replica_count + offset_of(safe_ids, replica_count_stride)
    if CLOSE:
        row = expert_map + close_offset_of(safe_ids, expert_map_stride).to(tl.uint64)
    else:
        row = expert_map + offset_of(safe_ids, expert_map_stride)
    if AHEAD == 0:
        counts = tl.load(count, mask=valid, other=1)
        physical = map_replica(row, slot_stride, num_slots, counts, tokens, valid)
    else:
        counts, physical = map_ahead(row, slot_stride, count, tokens, valid, AHEAD)
        if tl.max(short_count(counts), 0) > 4:
            physical = map_replica(row, slot_stride, num_slots, counts, tokens, valid)
    return physical


@triton.jit
def record_load(
    program, physical, tokens, load, recording, limit, LOAD_PARTS: tl.constexpr, APART: tl.constexpr
):
    """Adds a tile's slots to the load, where it is recorded; the order of the additions does not matter.

    LOAD_PARTS: how many times LOAD_BINS counters the load has, to count in shared memory first; 0 to add slot
    by slot. Additions to the same 32 bytes of the load wait for each other (about 10 ns on an H200), whether
    of one counter or of all eight. Programs begin with different parts, so that they do not meet.
    APART: neighbouring counters belong to neighbouring threads, so that a warp adds to 32 bytes once.
    Otherwise Triton 3.6 gives threads of few warps runs of counters: a warp adds as often as a run is long.
    """
    counters, counters_stride, num_physical = load
    counts = (unsigned(physical) < num_physical) & (tokens < limit)
    if LOAD_PARTS == 0:
        counts = tl.where(recording, counts, False)  # a branch took longer
        tl.atomic_add(counters + physical * counters_stride, 1, mask=counts, sem="relaxed")
    elif recording:
        expert = tl.where(counts, physical, -1).to(tl.int32)
        if APART:  # neighbours in memory may become one thread's: of this stride the compiler knows nothing
            counters_stride = counters_stride * tl.minimum(num_physical, 1)
        for step in range(LOAD_PARTS):
            first = ((program + step) % LOAD_PARTS) * LOAD_BINS
            inside = (expert >= first) & (expert < first + LOAD_BINS)
            found = tl.histogram(tl.where(inside, expert - first, 0), LOAD_BINS, mask=inside)
            bins = first + tl.arange(0, LOAD_BINS)
            hit = (found > 0) & (bins < num_physical)
            tl.atomic_add(counters + bins.to(tl.int64) * counters_stride, found, mask=hit, sem="relaxed")


@triton.jit
def store_topk(program, num_tokens, mapping, topk, load, ROUTING: tl.constexpr):
    """Repacks the routing of one program's tokens: int64 ids, float32 weights, padding as -1 and 0.

    `topk` is `pack_topk(...)`, `mapping` and `load` are `pack_eplb(...)`, ROUTING is that of a
    `RoutingPlan`.
    """
    TOPK: tl.constexpr = ROUTING[0]
    SLOTS: tl.constexpr = ROUTING[1]
    TOKENS: tl.constexpr = ROUTING[2]
    AHEAD: tl.constexpr = ROUTING[3]
    LOAD_PARTS: tl.constexpr = ROUTING[4]
    APART: tl.constexpr = ROUTING[5]
    topk_ids, ids_stride_m, ids_stride_k, topk_weights, topk_idx_out, topk_weights_out, is_padding = topk[:7]
    weights_stride_m, weights_stride_k, idx_out_stride_m, idx_out_stride_k = topk[7:11]
    weights_out_stride_m, weights_out_stride_k, is_padding_stride = topk[11:14]
    position = tl.arange(0, TOKENS * SLOTS)
    slots = (position % SLOTS).to(tl.uint32)
    tokens = program * TOKENS + position // SLOTS
    mask = (tokens < num_tokens) & (slots < TOPK)
    rows = tokens.to(tl.uint32)
    CLOSE: tl.constexpr = weights_stride_m is None
    if CLOSE:  # instructions count where few tokens wait for their physical ids
        close = close_offset_of(rows, ids_stride_m) + close_offset_of(slots, ids_stride_k)
        ids_offset = close.to(tl.uint64)
        weights_offset = ids_offset
        idx_out_offset = ids_offset
        weights_out_offset = ids_offset
    else:
        ids_offset = slot_offset(rows, ids_stride_m, slots, ids_stride_k)
        weights_offset = slot_offset(rows, weights_stride_m, slots, weights_stride_k)
        idx_out_offset = slot_offset(rows, idx_out_stride_m, slots, idx_out_stride_k)
        weights_out_offset = slot_offset(rows, weights_out_stride_m, slots, weights_out_stride_k)
    ids = tl.load(topk_ids + ids_offset, mask=mask, other=0)
    weights = tl.load(topk_weights + weights_offset, mask=mask, other=0.0).to(tl.float32)
    if mapping is not None:
        recording, limit = load_record_flags(mapping)
    if is_padding is not None:
        padded = tl.load(is_padding + offset_of(rows, is_padding_stride), mask=mask, other=0) != 0
        ids = tl.where(padded, PADDING_EXPERT_ID, ids)
        weights = tl.where(padded, PADDING_WEIGHT, weights)
    id_pointers, weight_pointers = topk_idx_out + idx_out_offset, topk_weights_out + weights_out_offset
    if mapping is None:
        tl.store(id_pointers, ids.to(tl.int64), mask=mask)
        tl.store(weight_pointers, weights, mask=mask)
    else:
        physical = map_to_physical(ids, tokens, mask, mapping, AHEAD, CLOSE)
        tl.store(weight_pointers, weights, mask=mask)
        tl.store(id_pointers, physical, mask=mask)
        record_load(program, physical, tokens, load, recording, limit, LOAD_PARTS, APART)


@triton.jit(do_not_specialize=["num_ids"])
def eplb_kernel(
    topk_ids, physical_ids, num_ids, num_slots, mapping, load, BLOCK: tl.constexpr, LOAD_PARTS: tl.constexpr
):
    """The stand-alone form on contiguous ids; ids wrap to int32 first, as in production."""
    program = tl.program_id(0)
    position = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < num_ids
    recording, limit = load_record_flags(mapping)
    ids = tl.load(topk_ids + position, mask=mask, other=-1).to(tl.int32)
    tokens = (position // num_slots).to(tl.int32)
    physical = map_to_physical(ids, tokens, mask, mapping, 0, False)
    tl.store(physical_ids + position, physical, mask=mask)
    record_load(program, physical, tokens, load, recording, limit, LOAD_PARTS, False)


def pack_topk(
    topk_ids: Tensor,
    topk_weights: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    is_padding: Tensor | None,
    eplb: EplbTensors | None = None,
) -> tuple[Any, ...]:
    """The `topk` argument of the kernels: the ids, as the first to be read, the other tensors, strides; flags
    go as bytes.

    Strides of the others are None where they are those of the ids, and no offset in them or between rows of
    the map of `eplb` takes more than 32 bits: kernels then have one offset for all.
    """
    flags = None if is_padding is None else is_padding.view(torch.uint8)
    others = (topk_weights, topk_idx_out, topk_weights_out)
    strides: list[int | None] = [stride for tensor in others for stride in tensor.stride()]
    farthest = [_farthest(topk_ids), 0 if eplb is None else _farthest(eplb.expert_map[:, :1])]
    if strides == [*topk_ids.stride()] * 3 and max(farthest) < 1 << 32:
        strides = [None] * 6
    return (topk_ids, *topk_ids.stride(), *others, flags, *strides, 0 if flags is None else flags.stride(0))


def _farthest(tensor: Tensor) -> int:
    """The offset of the last element, in elements; 0 where there is none."""
    return sum(max(size - 1, 0) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def pack_eplb(tensors: EplbTensors | None) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """The `mapping` and `load` arguments of the kernels; None where nothing is mapped."""
    if tensors is None:
        return None, None
    mapping = (
        tensors.expert_map,
        tensors.replica_count,
        tensors.record.view(torch.uint8),
        tensors.num_unpadded,
        *tensors.expert_map.stride(),
        *tensors.expert_map.shape,
        tensors.replica_count.stride(0),
    )
    return mapping, (tensors.load, tensors.load.stride(0), tensors.num_physical)
