"""What the group quantizers share: rows in cache-sized chunks, exact widening, amax without NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# 4 MiB of float32: chunk and temporaries stay in the last-level cache, and an operation on them takes far
# longer than its launch does.
_CHUNK_ELEMENTS = 1 << 20
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


def row_chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Slices of rows that hold about _CHUNK_ELEMENTS elements each, and at least one row."""
    step = max(1, _CHUNK_ELEMENTS // max(num_columns, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def check_hidden(hidden: Tensor, group: int) -> None:
    """TypeError unless bf16, fp16 or fp32; ValueError unless [T, H] with H a multiple of the group."""
    if hidden.dtype not in HIDDEN_DTYPES:
        raise TypeError(f"hidden: expected bfloat16, float16 or float32, got {hidden.dtype}")
    if hidden.dim() != 2 or hidden.shape[1] % group:
        raise ValueError(f"hidden: expected [T, H] with H a multiple of {group}, got {list(hidden.shape)}")


def group_amax(values: Tensor, *, propagate_nan: bool = False) -> Tensor:
    """Largest magnitude over the last dimension, float32; NaN elements are ignored (all NaN: 0.0).

    The comparison is one of integers: float32 magnitudes order as their bits do, NaN above everything.
    """
    magnitudes = values.view(torch.int32) & _MAGNITUDE
    amax = magnitudes.amax(dim=-1)
    if not propagate_nan and bool((amax > _INFINITY).any()):
        amax = magnitudes.masked_fill_(magnitudes > _INFINITY, 0).amax(dim=-1)
    return amax.view(torch.float32)
