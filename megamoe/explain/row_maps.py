"""Orders of rows as tables: entry ``x`` is where logical row ``x`` is stored.

Written from their definitions, because an explanation needs them for any size and in any combination:
NUMERICS 4.1 (scale pages), 4.6 (UTCCP), 5.1 and 5.2 (gate/up).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_M = (8, 16, 32, 64, 96, 128, 192, 240)
GRANULARITIES = (1, 2, 4, 8, 16, 32, 64, 128)


def utccp(rows: int) -> Tensor:
    row = torch.arange(rows)
    return row // 128 * 128 + row % 32 * 4 + row % 128 // 32


def interleaved(rows: int, granularity: int) -> Tensor:
    half, row = torch.arange(rows) // (rows // 2), torch.arange(rows) % (rows // 2)
    return row // granularity * 2 * granularity + granularity * half + row % granularity


def interleaved_even_odd(rows: int) -> Tensor:
    half, row = torch.arange(rows) // (rows // 2), torch.arange(rows) % (rows // 2)
    return row // 16 * 32 + row % 2 * 16 + half * 8 + row % 16 // 2


def halves_swapped(rows: int) -> Tensor:
    return (torch.arange(rows) + rows // 2) % rows


def pages(tokens: int, block_m: int, *, permuted: bool = True) -> Tensor:
    token = torch.arange(tokens)
    page, member = token // block_m, token % block_m
    inside = utccp(-(-block_m // 128) * 128)[member] if permuted else member
    return page * (-(-block_m // 128) * 128) + inside


def inverse(table: Tensor) -> Tensor:
    found = torch.empty_like(table)
    found[table] = torch.arange(table.numel())
    return found


def moved(right: Tensor, wrong: Tensor, rows: int) -> Tensor:
    """Storage row -> storage row that it was read from, where logical x belongs at right[x] and was stored at
    wrong[x]. -1 where nothing was stored; rows past the end fall away."""
    table = torch.full((rows,), -1, dtype=torch.int64)
    fits = wrong < rows
    table[wrong[fits]] = right[fits]
    return table
