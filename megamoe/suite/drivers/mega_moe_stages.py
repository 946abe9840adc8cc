"""Compares one rank's stages of a launch with the reference's, byte for byte, in the reference's row order.

Order inside an expert's run is a launch's own: its source metadata says which row is whose. Only rows that
hold a token count; with ``poison`` given, rows that dispatch must not touch are compared with it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.mega_moe import RankResult, get_family
from reference.mega_moe.dispatch import Pool
from reference.mega_moe.match import rows_by_source
from reference.mega_moe.stages import scale_rows

__all__ = ["StageDifference", "compare_stages", "pool_order"]

_POOL_STAGES = ("l1_acts", "l2_acts")
_SCALE_STAGES = ("l1_acts_sf", "l2_acts_sf")


@dataclass(frozen=True)
class StageDifference:
    """One stage: bytes compared and differing, and the first differing elements in words."""

    stage: str
    bytes_compared: int
    bytes_differing: int
    examples: str = ""


def pool_order(family: str, pool: Pool, stages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of every pool stage that hold a token, in the order of ``pool``. stages: a launch's, with its
    token_src_metadata, which say where it put each route.

    ValueError if they do not name the pool's routes, each in its expert's run.
    """
    order = rows_by_source(pool, stages["token_src_metadata"])
    scale = scale_rows(get_family(family), pool)
    rows = {name: stages[name][order] for name in _POOL_STAGES}
    return rows | {name: stages[name][scale[order]] for name in _SCALE_STAGES if name in stages}


def compare_stages(
    family: str,
    expected: RankResult,
    actual: Mapping[str, Tensor],
    y: Tensor,
    stats: Tensor,
    poison: int | None = None,
) -> list[StageDifference]:
    """Stage by stage in the order of the data flow: token_src_metadata, l1_acts ... combine, y, stats."""
    pool = expected.pool
    try:
        theirs = pool_order(family, pool, actual)
    except ValueError as error:
        live = int(pool.live.sum())
        return [StageDifference("token_src_metadata", live * 12, live * 12, str(error))]
    found = [StageDifference("token_src_metadata", int(pool.live.sum()) * 12, 0)]
    ours = pool_order(family, pool, expected.stages)
    order = ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")
    found += [_difference(name, ours[name], theirs[name]) for name in order if name in ours]
    if poison is not None:
        found.append(_untouched(expected, actual, poison))
    if "combine" in actual:
        slots = expected.stages["combine"]
        used, tokens = expected.used.t(), slots.shape[1]
        found.append(_difference("combine", slots[used], actual["combine"][:, :tokens][used]))
    found.append(_difference("y", expected.y, y))
    found.append(_difference("stats", expected.stats, stats))
    return found


def _untouched(expected: RankResult, actual: Mapping[str, Tensor], poison: int) -> StageDifference:
    """Rows of l1_acts that no route has: dispatch leaves them alone."""
    acts = actual["l1_acts"]
    idle = torch.ones(len(acts), dtype=torch.bool, device=acts.device)
    idle[: expected.pool.rows] = ~expected.pool.live
    rows = acts[idle]
    return _difference("l1_acts (idle rows)", torch.full_like(rows, poison), rows)


def _difference(stage: str, expected: Tensor, actual: Tensor) -> StageDifference:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        words = f"{list(expected.shape)} {expected.dtype}, got {list(actual.shape)} {actual.dtype}"
        size = expected.numel() * expected.element_size()
        return StageDifference(stage, size, size, f"expected {words}")
    a, b = expected.contiguous(), actual.contiguous()
    size = a.element_size()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    differ = a.view(width) != b.view(width)
    count = int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) if bool(differ.any()) else 0
    examples = ""
    if count:
        where = differ.nonzero()
        worst = [tuple(index) for index in where[:4].tolist()]
        examples = f"{len(where)} elements, first " + "; ".join(
            f"{index}: expected {_show(a[index])}, got {_show(b[index])}" for index in worst
        )
    return StageDifference(stage, a.numel() * size, count, examples)


def _show(value: Tensor) -> str:
    number = value.item()
    return (
        f"{number:#04x}"
        if value.dtype == torch.uint8
        else f"{number:.9g}"
        if value.is_floating_point()
        else str(number)
    )
