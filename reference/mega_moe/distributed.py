"""One rank a process: the forward's steps with a torch.distributed group (gloo or NCCL) in place of
symmetric memory.

The processes exchange what the kernel reads from its peers' buffers, tokens before dispatch and L2 outputs
before the combine, and run the same functions as ``reference.mega_moe.forward`` does for all ranks: the
bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from reference.mega_moe.checks import check_inputs, check_options, check_weights
from reference.mega_moe.epilogue import Activation
from reference.mega_moe.families import MegaMoeFamily, get_family
from reference.mega_moe.forward import RankResult, combine_tokens, run_experts
from reference.mega_moe.inputs import ExpertWeights, PostNorm, RankInputs, SharedExpert
from reference.mega_moe.launch import LaunchConfig

__all__ = ["Group", "forward_rank", "gather_rows"]


class Group(Protocol):
    """What a process group has; a group of one rank needs no more than this."""

    def size(self) -> int: ...

    def rank(self) -> int: ...


def forward_rank(
    family: MegaMoeFamily | str,
    inputs: RankInputs,
    weights: ExpertWeights,
    launch: LaunchConfig,
    activation: Activation,
    group: Group,
    *,
    shared: SharedExpert | None = None,
    norm: PostNorm | None = None,
    l2_activation_scale: float = 1.0,
) -> RankResult:
    """This process's rank of a launch; collective over ``group``. Arguments and result as in ``forward``,
    for one rank.

    Bad arguments are refused before anything is exchanged, by the rank that has them; the others then wait
    for it.
    """
    family = get_family(family)
    size, rank = group.size(), group.rank()
    check_options(family, activation, None if shared is None else [shared], norm)
    check_weights(family, [weights], 0)
    check_inputs(family, [inputs], 0, weights.l1.shape[2], len(weights.l1) * size)
    everyone = [
        RankInputs(**dict(zip(_GATHERED, row, strict=True)))
        for row in zip(*(_gather_optional(getattr(inputs, name), group) for name in _GATHERED), strict=True)
    ]
    experts = run_experts(
        family, everyone, weights, rank, launch, activation,
        weighted=norm is None, l2_activation_scale=l2_activation_scale,
    )  # fmt: skip
    pool = experts.pool
    metadata = gather_rows(pool.token_src_metadata[pool.live], group)
    rows = gather_rows(experts.outputs[pool.live], group)
    y, stages = combine_tokens(
        family, inputs, rank, list(zip(metadata, rows, strict=True)), activation, shared=shared, norm=norm
    )
    used = inputs.topk_idx >= 0
    return RankResult(y, experts.stats, used, pool, experts.stages | stages, experts.live)


# A shared expert reads its own rank's tokens only.
_GATHERED = tuple(field.name for field in fields(RankInputs) if not field.name.startswith("shared"))


def _gather_optional(tensor: Tensor | None, group: Group) -> Sequence[Tensor | None]:
    return [None] * group.size() if tensor is None else gather_rows(tensor, group)


def gather_rows(tensor: Tensor, group: Group) -> list[Tensor]:
    """Every rank's tensor [n_r, ...] (n_r may differ, also be 0), in rank order, on every rank."""
    if group.size() == 1:
        return [tensor]
    assert isinstance(group, dist.ProcessGroup)
    device = tensor.device
    count = torch.tensor([len(tensor)], device=device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    sizes = [int(each) for each in counts]
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    padded = torch.zeros(max(sizes), row_bytes, dtype=torch.uint8, device=device)
    if len(tensor):
        padded[: len(tensor)] = tensor.contiguous().view(len(tensor), -1).view(torch.uint8)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [
        each[:size].contiguous().view(tensor.dtype).view(size, *tensor.shape[1:])
        for each, size in zip(received, sizes, strict=True)
    ]
