"""Row matching: a recorded pool's rows in the order of the reference's.

Inside an expert's run the order of one rank's tokens is whatever a launch's atomics made it. A row is found
again by its content: the bytes of l1_acts and their scales (and the source metadata, where a launch's was
read back). Rows with equal content are paired by their outputs, which equal inputs and weights make equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference.mega_moe.dispatch import Pool

__all__ = ["match_rows", "rows_by_source"]


def rows_by_source(pool: Pool, token_src_metadata: Tensor) -> Tensor:
    """int64 [live rows]: for each live row of ``pool``, in order, the row where a launch put the same route.

    token_src_metadata int32 [at least pool.rows, 3]: the launch's own. ValueError unless it names every
    route once, in the run of the route's expert.
    """
    live = pool.live.nonzero()[:, 0]
    theirs = token_src_metadata.to(live.device)[live].long()
    mine = pool.token_src_metadata[live].long()
    base = 1 + max(0, *(int(each.max()) for each in (mine, theirs))) if len(live) else 1
    factors = torch.tensor([base * base, base, 1], device=live.device)
    runs = torch.bucketize(live, torch.tensor(pool.starts[1:], device=live.device), right=True)
    routes = torch.cat((mine.mul(factors).sum(1)[None], theirs.mul(factors).sum(1)[None]))
    order = [(run * base**3 + route).argsort() for run, route in zip((runs, runs), routes, strict=True)]
    if not torch.equal(mine[order[0]], theirs[order[1]]) or not torch.equal(runs[order[0]], runs[order[1]]):
        raise ValueError(
            "token_src_metadata: expected the routes of the pool, each in its expert's run, got others"
        )
    found = torch.empty_like(live)
    found[order[0]] = live[order[1]]
    return found


def match_rows(
    pool: Pool,
    expected_keys: Sequence[Tensor],
    actual_keys: Sequence[Tensor],
    tie_breakers: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """int64 [rows]: for each live row of ``pool`` the actual row with its content, in the same expert; -1
    where none is.

    expected_keys, actual_keys: tensors [rows, ...] in pool order (scale tensors already brought into it);
    all of their bytes count. tie_breakers: (expected, actual) pairs that decide among rows of equal
    content.
    """
    found = torch.full((pool.rows,), -1, dtype=torch.int64)
    expected, actual = _as_bytes(expected_keys), _as_bytes(actual_keys)
    expected_tie = _as_bytes([pair[0] for pair in tie_breakers]) if tie_breakers else None
    actual_tie = _as_bytes([pair[1] for pair in tie_breakers]) if tie_breakers else None
    for expert, count in enumerate(pool.counts):
        rows = range(pool.starts[expert], pool.starts[expert] + count)
        waiting: dict[bytes, list[int]] = {}
        for row in rows:
            waiting.setdefault(actual[row].tobytes(), []).append(row)
        wanted: dict[bytes, list[int]] = {}
        for row in rows:
            wanted.setdefault(expected[row].tobytes(), []).append(row)
        for key, mine in wanted.items():
            theirs = waiting.get(key, [])
            if len(mine) > 1 and expected_tie is not None and actual_tie is not None:
                mine.sort(key=lambda row: expected_tie[row].tobytes())
                theirs.sort(key=lambda row: actual_tie[row].tobytes())
            for row, other in zip(mine, theirs, strict=False):
                found[row] = other
    return found


def _as_bytes(tensors: Sequence[Tensor]) -> np.ndarray:
    """[rows, bytes] as a numpy array: each row's bytes side by side."""
    parts = [tensor.cpu().contiguous().view(tensor.shape[0], -1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts, dim=1).numpy()
