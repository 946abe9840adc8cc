"""Which expected row does each wrong row of the actual memory hold? Steps read off the data: shifted,
swapped, copied.

Rows are recognized by several short stretches of units, so that scattered noise does not hide them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megamoe.explain.fit import Step
from megamoe.explain.layout_steps import TILE_SIZES, table_step
from megamoe.explain.subject import StorageDim, Subject, spread

_STRETCHES, _LENGTH = 8, 16
_MOST_ROWS = 1 << 16


def row_steps(subject: Subject) -> Iterator[Step]:
    for dim in subject.dims:
        if dim.name != "in_word" and 1 < dim.size <= _MOST_ROWS and dim.stride * _outer(subject, dim) >= 8:
            yield from _dim_steps(subject, dim)


def _outer(subject: Subject, dim: StorageDim) -> int:
    return max(1, subject.expected.numel() // (dim.stride * dim.room))


def _dim_steps(subject: Subject, dim: StorageDim) -> Iterator[Step]:
    rows = torch.arange(dim.size)
    stretches = _stretches(subject, dim)
    positions = rows[:, None, None] * dim.stride + stretches[None]
    inside = positions < subject.expected.numel()
    positions = positions.clamp_max(subject.expected.numel() - 1)
    expected = torch.where(inside, subject.expected[positions], 0)
    actual = torch.where(inside, subject.actual[positions], 0)
    suspicious = ((expected != actual).any(2).float().mean(1) > 0.5).nonzero().reshape(-1)
    if suspicious.numel() == 0:
        return
    source = torch.full((dim.size,), -1, dtype=torch.int64)
    source[suspicious] = _match(expected, actual[suspicious])
    matched = suspicious[source[suspicious] >= 0]
    if matched.numel() < 0.6 * suspicious.numel():
        return
    yield from _classify(dim, source, matched)


def _stretches(subject: Subject, dim: StorageDim) -> Tensor:
    """Offsets [stretch, unit] of the units that a row is recognized by, spread over the row."""
    outer = _outer(subject, dim)
    length = min(_LENGTH, dim.stride)
    per_outer = max(1, min(_STRETCHES, dim.stride // length))
    starts = (
        (torch.arange(per_outer) * (dim.stride - length)) // max(1, per_outer - 1)
        if per_outer > 1
        else torch.zeros(1)
    )
    outers = spread(outer, max(1, _STRETCHES // per_outer)) * dim.stride * dim.room
    inner = starts.long()[:, None] + torch.arange(length)
    found = (outers[:, None, None] + inner[None]).reshape(-1, length)
    if length < 8:  # narrow rows: all of their units together are one signature
        found = found.reshape(1, -1)
    return found


def _match(expected: Tensor, actual: Tensor) -> Tensor:
    """For every row of ``actual`` [rows, stretch, unit] the row of ``expected`` that most stretches agree
    with, or -1.
    """
    votes: list[np.ndarray] = []
    for stretch in range(expected.shape[1]):
        known, wanted = _hash(expected[:, stretch]), _hash(actual[:, stretch])
        order = np.argsort(known, kind="stable")
        place = np.searchsorted(known[order], wanted)
        place = np.minimum(place, len(known) - 1)
        row = order[place]
        following = order[np.minimum(place + 1, len(known) - 1)]
        is_unique = (known[following] != wanted) | (following == row)
        votes.append(np.where((known[row] == wanted) & is_unique, row, -1))
    table = np.stack(votes, 1)
    best = np.full(table.shape[0], -1, dtype=np.int64)
    most = np.zeros(table.shape[0], dtype=np.int64)
    for column in range(table.shape[1]):
        agree = (table == table[:, column : column + 1]).sum(1) * (table[:, column] >= 0)
        best = np.where(agree > most, table[:, column], best)
        most = np.maximum(most, agree)
    return torch.from_numpy(np.where(most * 2 >= (table >= 0).sum(1), best, -1))


def _hash(units: Tensor) -> np.ndarray:
    weights = (torch.arange(1, units.shape[1] + 1, dtype=torch.int64) * 0x9E3779B97F4A7C1) % (
        (1 << 61) - 1
    ) | 1
    return (units.to(torch.int64) * weights).sum(1).numpy()


def _classify(dim: StorageDim, source: Tensor, matched: Tensor) -> Iterator[Step]:
    offsets = matched - source[matched]
    table = torch.arange(dim.size)
    table[matched] = source[matched]
    moved = matched[offsets != 0]
    if moved.numel() == 0:
        return
    name = _row_name(dim)
    common = int(torch.mode(offsets[offsets != 0]).values)
    is_shift = bool((offsets[offsets != 0] == common).all())
    changed = set(moved.tolist())
    is_copied = all(int(table[s]) == int(s) and int(s) not in changed for s in source[moved].tolist())
    mutual = bool((table[table[moved]] == moved).all())
    few = _few(moved.tolist())
    if is_copied:
        pairs = ", ".join(f"{int(source[r])} at {r}" for r in moved[:4].tolist())
        detail = f"{name} {pairs}{_more(moved.numel(), 4)}"
        yield table_step("duplicated_rows", detail, dim, table, 3, min_hits=4)
    elif mutual and not (is_shift and moved.numel() > 2):
        pairs = ", ".join(f"{r} and {int(table[r])}" for r in moved.tolist() if r < int(table[r]))
        yield table_step("swapped_rows", f"{name} {_shorten(pairs)}", dim, table, 3, min_hits=4)
    elif is_shift:
        cause = "off_by_one_tile" if abs(common) in TILE_SIZES else "row_shift"
        yield table_step(cause, f"{name} {few} by {common:+d}", dim, table, 3, min_hits=8)
    elif _is_rotation(offsets, dim.size, moved.numel()):
        yield table_step("row_shift", f"{name}s rotated by {common:+d}", dim, table, 2, min_hits=8)
    else:
        detail = f"{moved.numel()} {name}s in another order"
        yield table_step("rows_permuted", detail, dim, table, 4, min_hits=8)


def _is_rotation(offsets: Tensor, size: int, moved: int) -> bool:
    return moved >= 0.9 * size and bool((offsets % size == offsets[0] % size).all())


def _row_name(dim: StorageDim) -> str:
    return {"batch": "expert", "": "row"}.get(
        dim.name, dim.name.split("/")[0] if "/" not in dim.name else "row"
    )


def _few(rows: list[int]) -> str:
    if len(rows) > 2 and rows[-1] - rows[0] == len(rows) - 1:
        return f"{rows[0]} to {rows[-1]}"
    return ", ".join(map(str, rows[:4])) + _more(len(rows), 4)


def _more(number: int, shown: int) -> str:
    return f" and {number - shown} more" if number > shown else ""


def _shorten(text: str) -> str:
    return text if len(text) < 60 else text[:57] + "..."
