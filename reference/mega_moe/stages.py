"""Stages as the buffers hold them: pool rows, scale rows in their pages, packed codes and words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.formats import pack_e2m1, pack_scale_words
from reference.mega_moe.dispatch import Pool
from reference.mega_moe.families import MegaMoeFamily
from reference.mega_moe.inputs import RankInputs
from reference.scale_pages import page_row_of_token, page_rows

__all__ = ["Routes", "StageWriter", "pool_rows", "scale_rows"]


class Routes:
    """Reads pool rows out of per-rank tensors; rows that are not live get row 0 of nothing: zeros."""

    def __init__(self, pool: Pool, inputs: Sequence[RankInputs]) -> None:
        sizes = torch.tensor([len(each.topk_idx) for each in inputs], device=pool.live.device)
        first = sizes.cumsum(0) - sizes
        meta = pool.token_src_metadata[pool.live].long()
        self.live = pool.live
        self.token = first[meta[:, 0]] + meta[:, 1]
        self.slot = meta[:, 2]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Per-token tensors [T_r, ...] of all ranks -> [rows, ...]."""
        everything = torch.cat(list(tensors))
        out = torch.zeros(
            len(self.live), *everything.shape[1:], dtype=everything.dtype, device=everything.device
        )
        out[self.live] = everything[self.token]
        return out

    def gather_slots(self, tensors: Sequence[Tensor]) -> Tensor:
        """Per-slot tensors [T_r, K] of all ranks -> [rows]."""
        everything = torch.cat(list(tensors))
        out = torch.zeros(len(self.live), dtype=everything.dtype, device=everything.device)
        out[self.live] = everything[self.token, self.slot]
        return out


class StageWriter:
    """Puts pool-ordered tensors into ``stages`` as the buffers hold them."""

    def __init__(
        self, family: MegaMoeFamily, pool: Pool, stages: dict[str, Tensor], live: dict[str, Tensor]
    ) -> None:
        self.family, self.pool, self.stages, self.live = family, pool, stages, live

    def acts(self, name: str, rows: Tensor, fmt: str) -> None:
        self.stages[name] = pack_e2m1(rows) if fmt == "e2m1" else rows
        self.live[name] = self.pool.live

    def scales(self, name: str, rows: Tensor | None) -> None:
        if rows is None:
            return
        words = rows if rows.dtype == torch.float32 else pack_scale_words(rows)
        where = scale_rows(self.family, self.pool)
        size = self.pool.rows // self.pool.tile * page_rows(self.pool.tile)
        paged = torch.zeros(size, words.shape[1], dtype=words.dtype, device=words.device)
        live = torch.zeros(size, dtype=torch.bool, device=words.device)
        paged[where], live[where] = words, self.pool.live
        self.stages[name], self.live[name] = paged, live


def scale_rows(family: MegaMoeFamily, pool: Pool) -> Tensor:
    """Row of the scale tensors that belongs to each pool row, int64 [rows]: a page of align(tile, 128) rows
    a tile, permuted for UTCCP on SM100 and straight on SM90."""
    row = torch.arange(pool.rows, device=pool.live.device)
    if family.utccp:
        return page_row_of_token(row, pool.tile)
    return row // pool.tile * page_rows(pool.tile) + row % pool.tile


def pool_rows(pool: Pool, runs: Sequence[Tensor], columns: int, like: Tensor) -> Tensor:
    """Expert runs (those with tokens, in order) laid into the pool; other rows 0. ``like`` gives dtype and
    device."""
    out = torch.zeros(pool.rows, columns, dtype=like.dtype, device=like.device)
    busy = [expert for expert, count in enumerate(pool.counts) if count]
    for expert, run in zip(busy, runs, strict=True):
        out[pool.expert_rows(expert)] = run
    return out
