"""Regions of the symmetric buffer: their sizes and order, kind by kind. See `reference.symm_buffer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.heuristics import BUILDS, get_ring_tokens, get_token_alignment_for_mega_moe

DEFAULT_SMS = 132


@dataclass(frozen=True)
class Field:
    """One region. shape None: no tensor of it is handed out. stride in elements of dtype, dtype None for raw
    bytes.
    """

    name: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def view(self, buffer: Tensor) -> Tensor:
        """The region as a tensor into the buffer (int8 or uint8 [bytes])."""
        if self.shape is None or self.stride is None or self.dtype is None:
            raise ValueError(f"{self.name} has no tensor")
        region = buffer[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return region.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class BufferSizes:
    """What the regions depend on. num_max_tokens_per_rank must be aligned already; num_sms matters to the
    ring only.
    """

    num_ranks: int
    num_experts: int
    num_max_tokens_per_rank: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    num_shared_experts: int = 0
    num_sms: int = DEFAULT_SMS
    shared_bf16: bool = False  # nvfp4 only: the shared expert takes bf16 rather than fp8 inputs

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def ring_tokens(self) -> int:
        return get_ring_tokens(
            self.num_ranks,
            self.num_experts,
            self.num_max_tokens_per_rank,
            self.num_topk,
            self.hidden,
            self.intermediate_hidden,
            self.num_sms,
        )

    def pool_tokens(self, build: str) -> int:
        """Rows that all tokens of all ranks can take, every expert's run padded to the largest tile."""
        largest, alignment = max(BUILDS[build].candidate_block_m), BUILDS[build].alignment
        received = self.num_ranks * self.num_max_tokens_per_rank * min(self.num_topk, self.experts_per_rank)
        return align(received + self.experts_per_rank * (largest - 1), alignment)


@dataclass(frozen=True)
class Kind:
    """Operand widths of an mma_type. bits, group: of routed activations; shared_bits: of the shared
    expert's.
    """

    api: str
    bits: int
    group: int | None
    shared_bits: int | None
    dtype: torch.dtype
    has_norm: bool = False


KINDS = {
    "fp8xfp4": Kind("main", 8, 32, 8, torch.float8_e4m3fn),
    "fp8xfp8": Kind("main", 8, 32, 8, torch.float8_e4m3fn),
    "bf16xbf16": Kind("main", 16, None, 16, torch.bfloat16, has_norm=True),
    "fp4xfp4": Kind("main", 4, 16, 16, torch.uint8, has_norm=True),
    "nvfp4": Kind("nvfp4", 4, 16, None, torch.int8),
    "sm90": Kind("sm90", 8, 128, None, torch.float8_e4m3fn),
}


def align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class _Regions:
    """Regions appended one behind the other."""

    def __init__(self, start: int) -> None:
        self.fields = [Field("workspace", 0, start)]

    @property
    def end(self) -> int:
        return self.fields[-1].offset + self.fields[-1].num_bytes

    def rows(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
        """A row-major tensor [rows, columns]."""
        num_bytes = rows * columns * dtype.itemsize
        self.fields.append(Field(name, self.end, num_bytes, (rows, columns), (columns, 1), dtype))

    def mn_major(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
        """An MN-major tensor [rows, columns]: consecutive rows of a column are neighbours."""
        num_bytes = rows * columns * dtype.itemsize
        self.fields.append(Field(name, self.end, num_bytes, (rows, columns), (1, rows), dtype))

    def vector(self, name: str, rows: int, dtype: torch.dtype) -> None:
        self.fields.append(Field(name, self.end, rows * dtype.itemsize, (rows,), (1,), dtype))

    def raw(self, name: str, num_bytes: int) -> None:
        self.fields.append(Field(name, self.end, num_bytes))


# The signal block of vLLM's build; ring and shared blocks have fixed maxima, so it does not depend on the
# launch.
_MAX_RANKS, _MAX_EXPERTS, _MAX_EXPERTS_PER_RANK = 72, 2048, 512
_MAX_RING_BLOCKS, _MAX_SHARED_BLOCKS = 1 << 20, 1 << 15


def _signal_bytes() -> int:
    counters = align((4 + 1 + 2 + 4 * 2) * 4, 128)  # grid, NVLink, task counters
    per_rank = align(_MAX_RANKS * 8, 128)  # combine_ready, and as much for peer_grid_idx
    experts = 2 * _MAX_EXPERTS * 8 + _MAX_EXPERTS_PER_RANK * 8  # sent, received, their sums
    ring = _MAX_RING_BLOCKS * (4 + 4 + 8 + 4)  # l1_full, l1_empty, l2_full_mask, l2_empty
    return counters + 2 * per_rank + experts + ring + _MAX_SHARED_BLOCKS * 4


def _workspace_bytes(sizes: BufferSizes) -> int:
    """Signals, then the source slot of every received token, then (rank, token, slot) of every pool row."""
    sources = sizes.num_experts * sizes.num_max_tokens_per_rank * 4
    return align(_signal_bytes() + sources + 12 * sizes.pool_tokens("vllm"), 16)


def _sm90_workspace_bytes(sizes: BufferSizes) -> int:
    pool = sizes.pool_tokens("sgl")
    blocks = pool // min(BUILDS["sgl"].candidate_block_m)
    counts = 32 + 16 * sizes.num_experts + 8 * sizes.experts_per_rank
    arrivals = align(blocks, 2) * 4 + blocks * 8
    received = sizes.num_ranks * sizes.num_max_tokens_per_rank
    sources = sizes.experts_per_rank * sizes.num_ranks * received * 4
    return align(counts + arrivals + sources + 12 * pool, 16)


def _inputs(regions: _Regions, sizes: BufferSizes, kind: Kind) -> None:
    tokens, topk = sizes.num_max_tokens_per_rank, sizes.num_topk
    regions.rows("x", tokens, _columns(sizes.hidden, kind), kind.dtype)
    if kind.api == "sm90":
        regions.rows("x_sf", tokens, sizes.hidden // 128, torch.float32)
    elif kind.group:
        regions.rows("x_sf", tokens, sizes.hidden // (4 * kind.group), torch.int32)
    regions.rows("topk_idx", tokens, topk, torch.int64)
    regions.rows("topk_weights", tokens, topk, torch.float32)


def _columns(values: int, kind: Kind) -> int:
    return values // 2 if kind.bits == 4 else values


def _shared(regions: _Regions, sizes: BufferSizes, bits: int, *, own_input: bool) -> None:
    """Regions of the shared expert: fp8 with scale pages or bf16."""
    if not sizes.num_shared_experts:
        return
    tokens = sizes.num_max_tokens_per_rank
    inner = sizes.intermediate_hidden * sizes.num_shared_experts
    dtype = torch.float8_e4m3fn if bits == 8 else torch.bfloat16
    page_rows = -(-tokens // min(BUILDS["vllm"].candidate_block_m)) * 128
    if own_input:
        regions.rows("shared_l1_acts", tokens, sizes.hidden, dtype)
    if bits == 8:
        regions.mn_major("shared_l1_acts_sf", page_rows, sizes.hidden // 128, torch.int32)
    regions.rows("shared_l2_acts", tokens, inner, dtype)
    if bits == 8:
        regions.mn_major("shared_l2_acts_sf", page_rows, inner // 128, torch.int32)


def _routed(regions: _Regions, sizes: BufferSizes, kind: Kind) -> None:
    """The rings between dispatch, L1 and L2."""
    ring = sizes.ring_tokens
    scale_rows = max(ring // block * align(block, 128) for block in BUILDS["vllm"].candidate_block_m)
    for name, values in (("l1_acts", sizes.hidden), ("l2_acts", sizes.intermediate_hidden)):
        regions.rows(name, ring, _columns(values, kind), kind.dtype)
        if kind.group:
            regions.mn_major(f"{name}_sf", scale_rows, values // (4 * kind.group), torch.int32)
        if name == "l1_acts" and kind.api == "main":
            regions.raw("l1_topk_weights", ring * 4)


def _combine(regions: _Regions, sizes: BufferSizes) -> None:
    slots = sizes.num_topk + (sizes.num_shared_experts > 0)
    regions.raw("combine", slots * sizes.num_max_tokens_per_rank * sizes.hidden * 2)


def _main_regions(sizes: BufferSizes, kind: Kind) -> _Regions:
    regions = _Regions(_workspace_bytes(sizes))
    _inputs(regions, sizes, kind)
    _shared(regions, sizes, kind.shared_bits or 8, own_input=False)
    _routed(regions, sizes, kind)
    _combine(regions, sizes)
    if kind.has_norm:
        regions.raw(
            "combine_norm", sizes.num_topk * sizes.num_max_tokens_per_rank * (sizes.hidden // 128) * 4
        )
    return regions


def _nvfp4_regions(sizes: BufferSizes, kind: Kind) -> _Regions:
    regions = _Regions(_workspace_bytes(sizes))
    _inputs(regions, sizes, kind)
    _shared(regions, sizes, 16 if sizes.shared_bf16 else 8, own_input=True)
    _routed(regions, sizes, kind)
    _combine(regions, sizes)
    regions.vector("x_scales", sizes.num_max_tokens_per_rank, torch.float32)
    regions.raw("l1_x_scales", sizes.ring_tokens * 4)
    return regions


def _sm90_regions(sizes: BufferSizes, kind: Kind) -> _Regions:
    regions = _Regions(_sm90_workspace_bytes(sizes))
    _inputs(regions, sizes, kind)
    pool = sizes.pool_tokens("sgl")
    scale_rows = max(pool // block * align(block, 128) for block in BUILDS["sgl"].candidate_block_m)
    regions.rows("l1_acts", pool, sizes.hidden, kind.dtype)
    regions.mn_major("l1_acts_sf", scale_rows, sizes.hidden // 128, torch.float32)
    regions.raw("l1_topk_weights", pool * 4)
    regions.rows("l2_acts", pool, sizes.intermediate_hidden, kind.dtype)
    regions.mn_major("l2_acts_sf", scale_rows, sizes.intermediate_hidden // 64, torch.float32)
    _combine(regions, sizes)
    return regions


_BUILDERS: dict[str, Callable[[BufferSizes, Kind], _Regions]] = {
    "main": _main_regions,
    "nvfp4": _nvfp4_regions,
    "sm90": _sm90_regions,
}


def _check_sizes(sizes: BufferSizes, mma_type: str) -> None:
    positive = (
        "num_ranks",
        "num_experts",
        "num_max_tokens_per_rank",
        "num_topk",
        "hidden",
        "intermediate_hidden",
    )
    for name in positive:
        if getattr(sizes, name) <= 0:
            raise ValueError(f"{name} must be positive, got {getattr(sizes, name)}")
    if sizes.num_experts % sizes.num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of num_ranks={sizes.num_ranks}, got {sizes.num_experts}"
        )
    if sizes.num_shared_experts < 0:
        raise ValueError(f"num_shared_experts must not be negative, got {sizes.num_shared_experts}")
    if sizes.num_topk > sizes.num_experts:
        raise ValueError(f"num_topk must be at most num_experts={sizes.num_experts}, got {sizes.num_topk}")
    alignment = get_token_alignment_for_mega_moe("sgl" if mma_type == "sm90" else "vllm")
    if sizes.num_max_tokens_per_rank % alignment:
        raise ValueError(
            f"num_max_tokens_per_rank must be a multiple of {alignment}, got {sizes.num_max_tokens_per_rank}"
        )
    if mma_type == "sm90":
        if sizes.num_shared_experts:
            raise ValueError(f"num_shared_experts must be 0 on SM90, got {sizes.num_shared_experts}")
        if sizes.hidden % 128 or sizes.intermediate_hidden % 128:
            raise ValueError(
                "hidden and intermediate_hidden must be multiples of 128, "
                f"got {sizes.hidden} and {sizes.intermediate_hidden}"
            )
        return
    limits = (
        ("num_ranks", sizes.num_ranks, _MAX_RANKS),
        ("num_experts", sizes.num_experts, _MAX_EXPERTS),
        ("experts of a rank", sizes.experts_per_rank, _MAX_EXPERTS_PER_RANK),
        ("shared blocks", sizes.num_max_tokens_per_rank // 8, _MAX_SHARED_BLOCKS),
        ("ring blocks", sizes.ring_tokens // 8, _MAX_RING_BLOCKS),
    )
    for name, value, limit in limits:
        if value > limit:
            raise ValueError(f"{name} must be at most {limit}, got {value}")


def symm_buffer_fields(sizes: BufferSizes, mma_type: str = "fp8xfp4") -> tuple[Field, ...]:
    """Every region of the buffer in memory order, the workspace first. mma_type also names the kinds nvfp4
    and sm90.

    ValueError: an unknown mma_type, sizes out of the kernels' limits, unaligned tokens, hidden sizes that
    tiles do not divide.
    """
    if mma_type not in KINDS:
        raise ValueError(f"mma_type must be one of {sorted(KINDS)}, got {mma_type!r}")
    _check_sizes(sizes, mma_type)
    kind = KINDS[mma_type]
    return tuple(_BUILDERS[kind.api](sizes, kind).fields)


def sm90_library_refusal(hidden: int, intermediate_hidden: int) -> str | None:
    """Why sgl-deep-gemm 0.1.5 makes no SM90 buffer of these sizes, or None.

    A token's scales (hidden / 128 and intermediate / 64 fp32 values) must be whole TMA units of 16 bytes. The
    arithmetic does not need it, so buffers of other sizes exist here; a launch on the hardware must ask this.
    """
    if hidden % 512 or intermediate_hidden % 256:
        return (
            "hidden must be a multiple of 512 and intermediate_hidden of 256 on SM90, "
            f"got {hidden} and {intermediate_hidden}"
        )
    return None


def symm_buffer_num_bytes(sizes: BufferSizes, mma_type: str = "fp8xfp4") -> int:
    last = symm_buffer_fields(sizes, mma_type)[-1]
    return last.offset + last.num_bytes
