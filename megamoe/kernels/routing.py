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

from megamoe.bundle import extent
from megamoe.eplb import EplbTensors
from megamoe.kernels import constants
from megamoe.kernels.addresses import close_slot_offset, offset_of, slot_offset
from megamoe.kernels.replicas import (
    fetch_tables,
    load_record_flags,
    map_by_count,
    record_load,
    store_physical,
)

PADDING_EXPERT_ID = tl.constexpr(constants.PADDING_EXPERT_ID)
PADDING_WEIGHT = tl.constexpr(constants.PADDING_WEIGHT)

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
def store_topk(program, num_tokens, mapping, topk, load, ROUTING: tl.constexpr):
    """Repacks the routing of one program's tokens: int64 ids, float32 weights, padding as -1 and 0.

    `topk` is `pack_topk(...)`, `mapping` and `load` are `pack_eplb(...)`, ROUTING is that of a
    `RoutingPlan`.
    """
    TOPK: tl.constexpr = ROUTING[0]
    SLOTS: tl.constexpr = ROUTING[1]
    TOKENS: tl.constexpr = ROUTING[2]
    FETCH: tl.constexpr = ROUTING[6]
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
        ids_offset = close_slot_offset(rows, ids_stride_m, slots, ids_stride_k)
        weights_offset = ids_offset
        idx_out_offset = ids_offset
        weights_out_offset = ids_offset
    else:
        ids_offset = slot_offset(rows, ids_stride_m, slots, ids_stride_k)
        weights_offset = slot_offset(rows, weights_stride_m, slots, weights_stride_k)
        idx_out_offset = slot_offset(rows, idx_out_stride_m, slots, idx_out_stride_k)
        weights_out_offset = slot_offset(rows, weights_out_stride_m, slots, weights_out_stride_k)
    if FETCH:
        fetch_tables(program, mapping, load, TOKENS * SLOTS)
    ids = tl.load(topk_ids + ids_offset, mask=mask, other=0, volatile=FETCH)
    weights = tl.load(topk_weights + weights_offset, mask=mask, other=0.0).to(tl.float32)
    if mapping is not None:
        flags = load_record_flags(mapping)
    if is_padding is not None:
        padded = tl.load(is_padding + offset_of(rows, is_padding_stride), mask=mask, other=0) != 0
        ids = tl.where(padded, PADDING_EXPERT_ID, ids)
        weights = tl.where(padded, PADDING_WEIGHT, weights)
    id_pointers, weight_pointers = topk_idx_out + idx_out_offset, topk_weights_out + weights_out_offset
    if mapping is None:
        tl.store(id_pointers, ids.to(tl.int64), mask=mask)
        tl.store(weight_pointers, weights, mask=mask)
    else:
        pointers = (id_pointers, weight_pointers)
        store_physical(program, ids, tokens, mask, pointers, weights, mapping, load, flags, CLOSE, ROUTING)


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
    physical = map_by_count(ids, tokens, mask, mapping, False)
    tl.store(physical_ids + position, physical, mask=mask)
    record_load(program, physical, mask & (tokens < limit), load, recording, LOAD_PARTS, False)


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
    elements = extent(tuple(topk_ids.shape), topk_ids.stride())
    if eplb is not None:
        elements = max(elements, extent(tuple(eplb.expert_map.shape[:1]), eplb.expert_map.stride()[:1]))
    if strides == [*topk_ids.stride()] * 3 and elements <= 1 << 32:
        strides = [None] * 6
    return (topk_ids, *topk_ids.stride(), *others, flags, *strides, 0 if flags is None else flags.stride(0))


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
