"""Between a symmetric buffer and the forward: staged tokens out of it, a launch's stages into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference._bits import as_integers
from reference.formats import pack_scale_words, unpack_e2m1, unpack_scale_words
from reference.mega_moe.families import MegaMoeFamily
from reference.mega_moe.forward import RankResult
from reference.mega_moe.inputs import RankInputs
from reference.scale_pages import page_rows, write_scale_pages

__all__ = ["read_inputs", "write_results"]


def read_inputs(family: MegaMoeFamily, buffer: Any, tokens: int) -> RankInputs:
    """This rank's staged tokens, copied out of the buffer and unpacked."""
    x = buffer.x[:tokens].clone()
    if family.act_format != "bf16":
        x = x.view(torch.uint8)
    x_sf = None
    if family.act_group is not None:
        x_sf = buffer.x_sf[:tokens].clone()
        x_sf = x_sf if family.scale_format is None else unpack_scale_words(x_sf)
    return RankInputs(
        x=unpack_e2m1(x) if family.act_format == "e2m1" else x,
        x_sf=x_sf,
        topk_idx=buffer.topk_idx[:tokens].clone(),
        topk_weights=buffer.topk_weights[:tokens].clone(),
    )


def write_results(
    family: MegaMoeFamily, result: RankResult, y: Tensor, buffer: Any, stats: Tensor | None
) -> None:
    """Writes what the launch leaves. The pool is stored modulo the buffer's ring, block after block."""
    y.copy_(result.y)
    if stats is not None:
        stats += result.stats
    tile = result.pool.tile
    blocks = buffer.l1_acts.shape[0] // tile
    for name in ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf"):
        if name not in result.stages:
            continue
        block_rows = page_rows(tile) if name.endswith("_sf") else tile
        _write_ring(getattr(buffer, name), result.stages[name], result.live[name], blocks * block_rows)
    if "shared_l2_acts" in result.stages:
        rows = result.stages["shared_l2_acts"]
        buffer.shared_l2_acts[: len(rows)].copy_(rows.view(buffer.shared_l2_acts.dtype))
    if "shared_l2_acts_sf" in result.stages:
        write_scale_pages(
            pack_scale_words(result.stages["shared_l2_acts_sf"]), tile, buffer.shared_l2_acts_sf
        )


def _write_ring(target: Tensor, rows: Tensor, live: Tensor, ring_rows: int) -> None:
    """Live rows to their place modulo ring_rows; where the ring comes round, the later row stays."""
    target, rows = as_integers(target), as_integers(rows)  # float8 cannot be indexed everywhere
    for start in range(0, len(rows), ring_rows):
        here = live[start : start + ring_rows].nonzero()[:, 0]
        target[here] = rows[start + here]
