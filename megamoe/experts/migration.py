"""Experts that change places."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def permute_rows(tensor: torch.Tensor, order: Sequence[int]) -> None:
    """tensor[s] = old tensor[order[s]] for every s, in place; rows that others still need are kept until
    then.
    """
    readers = [0] * len(order)
    for source in order:
        readers[source] += 1
    saved: dict[int, torch.Tensor] = {}
    for slot, source in enumerate(order):
        if source == slot:
            readers[slot] -= 1
            continue
        if readers[slot] and slot not in saved:
            saved[slot] = tensor[slot].clone()
        tensor[slot].copy_(saved.get(source, tensor[source]))
        readers[source] -= 1
        if not readers[source]:
            saved.pop(source, None)
