"""Whole launches in one form: the row ``fp8_mega_moe`` compares functions that all have this signature.

    (x, x_sf, topk_idx, topk_weights, l1_w, l1_w_sf, l2_w, l2_w_sf, tokens, activation_clamp, fast_math,
    recorded)
        -> {stage: tensor}

x uint8 [T, H] (E4M3 codes), x_sf float32 [T, H / 128], ids int64 and weights float32 [T, K]: the tokens of
all ranks, rank after rank; ``tokens`` says how many each has. Weights are those of all experts as in the
checkpoint: codes uint8 [E, 2I, H] and [E, H, I], scales float32 per 128x128. Pool stages come back as the
rows that hold a token, in the reference's order, rank after rank: what order a launch's atomics made of
them is no difference. ``recorded`` (l1_acts, l1_acts_sf, l2_acts, l2_acts_sf of a recording): then they
come back in that recording's own order, laid over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.suite.drivers.mega_moe_stages import pool_order
from reference.mega_moe import (
    Activation,
    ExpertWeights,
    LaunchConfig,
    RankInputs,
    RankResult,
    forward,
    get_family,
    sm90_launch_config,
)
from reference.mega_moe.dispatch import Pool, build_pool
from reference.mega_moe.match import match_rows
from reference.mega_moe.stages import scale_rows

__all__ = [
    "POOL_STAGES",
    "STAGES",
    "WholeLaunch",
    "deep_gemm_fp8_mega_moe",
    "expected_fp8_mega_moe",
    "join_ranks",
    "split_ranks",
    "whole_launch",
]

FAMILY = "sm90_fp8xfp8"
POOL_STAGES = ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")
STAGES = (*POOL_STAGES, "combine", "y", "stats")


@dataclass(frozen=True)
class WholeLaunch:
    """The arguments of a row's function: tensors x, x_sf, topk_idx, topk_weights, l1_w, l1_w_sf, l2_w,
    l2_w_sf."""

    tensors: tuple[Tensor, ...]
    tokens: tuple[int, ...]
    clamp: float | None
    fast_math: bool
    recorded: Sequence[Tensor] | None

    @property
    def activation(self) -> Activation:
        return Activation(clamp=self.clamp, fast_math=self.fast_math)


def whole_launch(body: Callable[[WholeLaunch], dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """``body`` under the signature that all functions of the row have."""

    def call(
        x: Tensor,
        x_sf: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        l1_w: Tensor,
        l1_w_sf: Tensor,
        l2_w: Tensor,
        l2_w_sf: Tensor,
        tokens: Sequence[int],
        activation_clamp: float | None = None,
        fast_math: bool = True,
        recorded: Sequence[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        tensors = (x, x_sf, topk_idx, topk_weights, l1_w, l1_w_sf, l2_w, l2_w_sf)
        return body(WholeLaunch(tensors, tuple(tokens), activation_clamp, fast_math, recorded))

    call.__name__, call.__doc__, call.__module__ = body.__name__, body.__doc__, body.__module__
    return call


@whole_launch
def expected_fp8_mega_moe(launch: WholeLaunch) -> dict[str, Tensor]:
    """The reference: all ranks in this process."""
    inputs, weights, launches = split_ranks(launch.tensors, launch.tokens)
    results = forward(FAMILY, inputs, weights, launches, launch.activation)
    if launch.recorded is None:
        return join_ranks([(each.pool, each.used, each.stages, each.y, each.stats) for each in results])
    if len(results) != 1:
        raise ValueError(f"recorded: expected a recording of one rank, got {len(results)} ranks")
    return _over_recording(results[0], launch.recorded)


@whole_launch
def deep_gemm_fp8_mega_moe(launch: WholeLaunch) -> dict[str, Tensor]:
    """The library's kernel: one rank in this process, several in one process a GPU."""
    from megamoe.suite.drivers.sm90_ranks import RankedLaunch, launch_ranks

    if launch.recorded is not None:
        raise ValueError("recorded: a launch has an order of its own")
    launched = launch_ranks([RankedLaunch(launch.tensors, launch.tokens, launch.clamp, launch.fast_math)])[0]
    topk_idx, experts = launch.tensors[2], len(launch.tensors[4])
    ids, device = torch.split(topk_idx, list(launch.tokens)), topk_idx.device
    _, _, launches = split_ranks(launch.tensors, launch.tokens)
    joined = []
    for rank, left in enumerate(launched):
        pool = build_pool(ids, rank, experts, launches[rank].tile)
        stages = {name: stage.to(device) for name, stage in left.stages.items()}
        joined.append((pool, ids[rank] >= 0, stages, left.y.to(device), left.stats.to(device)))
    return join_ranks(joined)


def split_ranks(
    tensors: Sequence[Tensor], tokens: Sequence[int]
) -> tuple[list[RankInputs], list[ExpertWeights], list[LaunchConfig]]:
    """One entry a rank. tensors: x ... topk_weights, l1_w ... l2_w_sf of all ranks."""
    topk_idx, weights = tensors[2], tensors[4:]
    ranks = len(tokens)
    parts = [torch.split(tensor, list(tokens)) for tensor in tensors[:4]]
    inputs = [RankInputs(*row) for row in zip(*parts, strict=True)]
    shares = [tensor.chunk(ranks) for tensor in weights]
    experts, hidden, intermediate = weights[2].shape
    launches = [
        sm90_launch_config(
            num_ranks=ranks,
            num_experts=experts,
            num_topk=topk_idx.shape[1],
            num_tokens=count,
            hidden=hidden,
            intermediate_hidden=intermediate,
        )
        for count in tokens
    ]
    return inputs, [ExpertWeights(l1, l2, s1, s2) for l1, s1, l2, s2 in zip(*shares, strict=True)], launches


def join_ranks(
    ranks: Sequence[tuple[Pool, Tensor, Mapping[str, Tensor], Tensor, Tensor]],
) -> dict[str, Tensor]:
    """(pool, used slots, stages, y, stats) of every rank -> the stages in the row's form, rank after rank."""
    joined: dict[str, list[Tensor]] = {name: [] for name in STAGES}
    for pool, used, stages, y, stats in ranks:
        rows = pool_order(FAMILY, pool, stages)
        for name in POOL_STAGES:
            joined[name].append(rows[name])
        joined["combine"].append(stages["combine"][:, : len(y)][used.t()])
        joined["y"].append(y)
        joined["stats"].append(stats)
    return {name: torch.cat(parts).contiguous() for name, parts in joined.items()}


def _over_recording(result: RankResult, recorded: Sequence[Tensor]) -> dict[str, Tensor]:
    """The pool stages in a recording's own row order: each live row where the recording has its token."""
    pool = result.pool
    scale = scale_rows(get_family(FAMILY), pool)
    before = dict(zip(POOL_STAGES, recorded, strict=True))
    place = {name: scale if name.endswith("_sf") else torch.arange(pool.rows) for name in POOL_STAGES}
    keys = ("l1_acts", "l1_acts_sf")
    ours = [result.stages[name][place[name]] for name in keys]
    theirs = [_codes(before[name])[place[name]] for name in keys]
    found = match_rows(pool, ours, theirs)
    live = (pool.live & (found >= 0)).nonzero()[:, 0]
    stages = {}
    for name in POOL_STAGES:
        stages[name] = _codes(before[name]).clone()
        # A route that the recording lacks has no place in it: its rows stay as recorded, and the count says
        # so.
        stages[name][place[name][found[live]]] = result.stages[name][place[name][live]]
    if int(pool.live.sum()) != len(live):
        raise ValueError(
            f"recorded: {int(pool.live.sum()) - len(live)} dispatched rows are not in the recording"
        )
    used = result.used.t()
    return stages | {"combine": result.stages["combine"][used], "y": result.y, "stats": result.stats}


def _codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
