"""Dispatch: which token goes to which row of which rank's pool, and the counters.

A rank's pool holds the tokens routed to its experts: expert after expert, each expert's run starting at a
multiple of the tile height. Inside a run the source ranks take turns (round robin, a rank leaves when its
tokens are used up); in which order one rank's own tokens come is decided by a launch's atomics. Here it is
the order of (token, slot), so a comparison with a recorded launch matches rows first
(``reference.mega_moe.match``). No other byte depends on it.

Source: NUMERICS 7.6, 8.1; on SM90 also measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Pool", "build_pool", "check_routing"]


@dataclass(frozen=True)
class Pool:
    """One rank's pool.

    rows: pool rows in use, each expert's run rounded up to the tile. live [rows] bool: a token lies here.
    token_src_metadata [rows, 3] int32: source rank, token and slot (-1 where not live). starts, counts:
    first row and number of tokens of each local expert.
    """

    tile: int
    rows: int
    live: Tensor
    token_src_metadata: Tensor
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    def expert_rows(self, expert: int) -> slice:
        """The live rows of a local expert."""
        return slice(self.starts[expert], self.starts[expert] + self.counts[expert])


def check_routing(topk_idx: Tensor, num_experts: int, name: str = "topk_idx") -> None:
    """ValueError for ids at or past num_experts, and for a token that lists an expert twice.

    The kernel checks neither: it writes past its counters, or two routes into one slot. Any negative id
    means no route.
    """
    ids = topk_idx
    if ids.numel() == 0:
        return
    if bool((ids >= num_experts).any()):
        token, slot = (ids >= num_experts).nonzero()[0].tolist()
        got = f"{int(ids[token, slot])} at token {token}, slot {slot}"
        raise ValueError(f"{name}: expected ids below {num_experts}, got {got}")
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token, position = twice.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expected distinct experts, got {int(ordered[token, position])} twice at token {token}"
        )


def build_pool(topk_idx: Sequence[Tensor], rank: int, num_experts: int, tile: int) -> Pool:
    """The pool of ``rank``: ``topk_idx`` [T_r, K] int64 of every rank r, ``num_experts`` over all ranks.

    Counts are over all ranks; ranks without tokens, and experts without any, take no rows.
    """
    num_ranks = len(topk_idx)
    local = num_experts // num_ranks
    device = topk_idx[rank].device
    sources = []
    for source, ids in enumerate(topk_idx):
        token, slot = (ids.div(local, rounding_mode="floor") == rank).nonzero(as_tuple=True)
        expert = ids[token, slot] - rank * local
        sources.append(torch.stack((expert, torch.full_like(expert, source), token, slot), dim=1))
    routes = torch.cat(sources)
    # Turn of a route: how many routes of its own rank precede it in its expert. Turn by turn, ranks
    # ascending, is the round robin among ranks that are not used up.
    order = (routes[:, 0] * num_ranks + routes[:, 1]).argsort(stable=True)
    routes = routes[order]
    run = routes[:, 0] * num_ranks + routes[:, 1]
    position = torch.arange(len(routes), device=device)
    sizes = torch.bincount(run, minlength=local * num_ranks)
    turn = position - (sizes.cumsum(0) - sizes)[run]
    order = ((routes[:, 0] * (len(routes) + 1) + turn) * num_ranks + routes[:, 1]).argsort()
    routes = routes[order]

    counts = sizes.view(local, num_ranks).sum(1)
    blocks = (counts + tile - 1) // tile
    starts = (blocks.cumsum(0) - blocks) * tile
    rows = int(blocks.sum()) * tile
    within = position - (counts.cumsum(0) - counts)[routes[:, 0]]
    row = starts[routes[:, 0]] + within
    metadata = torch.full((rows, 3), -1, dtype=torch.int32, device=device)
    metadata[row] = routes[:, 1:].int()
    return Pool(
        tile=tile,
        rows=rows,
        live=metadata[:, 0] >= 0,
        token_src_metadata=metadata,
        starts=tuple(starts.tolist()),
        counts=tuple(counts.tolist()),
    )
