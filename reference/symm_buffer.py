"""The symmetric buffer of a MegaMoE launch: a list of regions, one behind the other, and views into them.

Three kinds share the order of their tensors but not of their bytes: ``main`` (fp8xfp4, fp8xfp8, bf16xbf16,
fp4xfp4), ``nvfp4`` (its own storage for the shared expert's input, per-token scales at the end) and ``sm90``
(fp32 scales, the whole pool instead of a ring). `symm_buffer_fields` lists every region of a kind; offsets
are running sums, nothing is padded between regions.

Easy to get wrong: tokens per rank are rounded up before anything else; the ring, and with it every offset
behind it, depends on the number of SMs; scales are MN-major except x_sf; fp8 and bf16 kinds have the shared
expert's input in x.

Sources: DeepGEMM of vLLM 0.33, layout/mega_moe.cuh, layout/nvfp4_mega_moe.cuh and csrc/apis (all recorded
sizes and views of the host tables); sgl-deep-gemm 0.1.5, layout/mega_moe.cuh and impls/sm90_fp8_mega_moe.cuh
for sm90.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference._symm_buffer_fields import (
    DEFAULT_SMS,
    KINDS,
    BufferSizes,
    Field,
    align,
    sm90_library_refusal,
    symm_buffer_fields,
    symm_buffer_num_bytes,
)
from reference.heuristics import (
    get_block_m_for_mega_moe,
    get_block_m_for_nvfp4_mega_moe,
    get_token_alignment_for_mega_moe,
)

__all__ = [
    "VIEW_NAMES",
    "BufferSizes",
    "Field",
    "SymmBuffer",
    "get_block_m_for_mega_moe",
    "get_block_m_for_nvfp4_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_token_alignment_for_mega_moe",
    "sm90_library_refusal",
    "symm_buffer_fields",
    "symm_buffer_num_bytes",
]

VIEW_NAMES = (
    "x",
    "x_sf",
    "topk_idx",
    "topk_weights",
    "shared_l1_acts",
    "shared_l1_acts_sf",
    "shared_l2_acts",
    "shared_l2_acts_sf",
    "l1_acts",
    "l1_acts_sf",
    "l2_acts",
    "l2_acts_sf",
)


class SymmBuffer:
    """One rank's buffer with the tensors of the real one as attributes (None where the kind has none).

    group: anything with size() and rank(). num_max_tokens_per_rank is rounded up and kept so. base: another
    SymmBuffer whose storage this one uses from its start; nothing is cleared then, and the two must not be
    in use at once. Beyond the real signature: num_sms (the ring depends on it), shared_bf16 (nvfp4), device.

    Attributes: the arguments, buffer (int8 [bytes]), fields, and x, x_sf, topk_idx, topk_weights,
    shared_l1_acts, shared_l1_acts_sf, shared_l2_acts, shared_l2_acts_sf, l1_acts, l1_acts_sf, l2_acts,
    l2_acts_sf, x_scales.

    ValueError: what `symm_buffer_fields` refuses; a base of another group, destroyed or too small.
    """

    x: Tensor
    x_sf: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    shared_l1_acts: Tensor | None
    shared_l1_acts_sf: Tensor | None
    shared_l2_acts: Tensor | None
    shared_l2_acts_sf: Tensor | None
    l1_acts: Tensor
    l1_acts_sf: Tensor | None
    l2_acts: Tensor
    l2_acts_sf: Tensor | None
    x_scales: Tensor | None

    def __init__(
        self,
        group: object,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
        base: SymmBuffer | None = None,
        *,
        num_sms: int = DEFAULT_SMS,
        shared_bf16: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if mma_type not in KINDS:
            raise ValueError(f"mma_type must be one of {sorted(KINDS)}, got {mma_type!r}")
        if num_max_tokens_per_rank <= 0:
            raise ValueError(f"num_max_tokens_per_rank must be positive, got {num_max_tokens_per_rank}")
        known = ("swiglu", "swiglustep", "situ")
        if activation not in known:
            raise ValueError(f"activation must be one of {known}, got {activation!r}")
        alignment = get_token_alignment_for_mega_moe("sgl" if mma_type == "sm90" else "vllm")
        sizes = BufferSizes(
            num_ranks=int(group.size()),  # type: ignore[attr-defined]
            num_experts=num_experts,
            num_max_tokens_per_rank=align(num_max_tokens_per_rank, alignment),
            num_topk=num_topk,
            hidden=hidden,
            intermediate_hidden=intermediate_hidden,
            num_shared_experts=num_shared_experts,
            num_sms=num_sms,
            shared_bf16=shared_bf16,
        )
        self.fields = symm_buffer_fields(sizes, mma_type)
        self.num_bytes = self.fields[-1].offset + self.fields[-1].num_bytes
        self.group = group
        self.sizes = sizes
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = sizes.num_max_tokens_per_rank
        self.num_topk = num_topk
        self.hidden = hidden
        self.intermediate_hidden = intermediate_hidden
        self.num_shared_experts = num_shared_experts
        self.mma_type = mma_type
        self.activation = activation
        self.buffer: Tensor | None = (
            torch.zeros(self.num_bytes, dtype=torch.int8, device=device)
            if base is None
            else _shared_storage(base, group, self.num_bytes)
        )
        self._set_views(self.buffer)

    def _set_views(self, buffer: Tensor | None) -> None:
        by_name = {field.name: field for field in self.fields}
        for name in (*VIEW_NAMES, "x_scales"):
            field = by_name.get(name)
            setattr(self, name, field.view(buffer) if buffer is not None and field else None)
        if _shares_input(self.mma_type, self.num_shared_experts):
            self.shared_l1_acts = self.x

    def destroy(self) -> None:
        """Drop the storage and every view; a destroyed buffer cannot be a base."""
        self.buffer = None
        self._set_views(None)


def _shares_input(mma_type: str, num_shared_experts: int) -> bool:
    """Whether shared_l1_acts is the tensor x itself."""
    if mma_type == "nvfp4":
        return num_shared_experts == 0
    return mma_type in ("fp8xfp4", "fp8xfp8", "bf16xbf16")


def _shared_storage(base: SymmBuffer, group: object, num_bytes: int) -> Tensor:
    if base.buffer is None:
        raise ValueError("base must not be destroyed")
    if base.group is not group:
        raise ValueError("base must belong to the same group object")
    if num_bytes > base.buffer.numel():
        raise ValueError(f"base must have at least {num_bytes} bytes, got {base.buffer.numel()}")
    return base.buffer


def get_symm_buffer_for_mega_moe(
    group: object,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
    *,
    num_sms: int = DEFAULT_SMS,
    shared_bf16: bool = False,
    device: torch.device | str = "cpu",
) -> SymmBuffer:
    """A `SymmBuffer` with storage of its own."""
    return SymmBuffer(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        num_shared_experts,
        mma_type,
        activation,
        num_sms=num_sms,
        shared_bf16=shared_bf16,
        device=device,
    )
