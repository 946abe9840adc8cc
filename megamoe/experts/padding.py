"""Which rows of this rank are padding."""

from __future__ import annotations

import torch


def padding_mask_for_rank(
    is_padding: torch.Tensor | None, num_tokens: int, *, tp_size: int = 1, tp_rank: int = 0
) -> torch.Tensor | None:
    """The mask [num_tokens] bool of this rank's rows, from the mask of all tokens; None if there is no mask.

    With sequence parallelism (``tp_size`` > 1) the tokens are split evenly, ``num_tokens`` a rank, and what
    is missing at the end is padding.
    """
    if is_padding is None:
        return None
    if is_padding.dtype != torch.bool or is_padding.dim() != 1:
        raise TypeError(
            f"is_padding must be a bool tensor [tokens], got {is_padding.dtype} {tuple(is_padding.shape)}"
        )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank must be in [0, {tp_size}), got {tp_rank}")
    if tp_size == 1:
        if is_padding.shape[0] < num_tokens:
            raise ValueError(f"is_padding must have at least {num_tokens} entries, got {is_padding.shape[0]}")
        return is_padding[:num_tokens]
    total = num_tokens * tp_size
    padded = torch.nn.functional.pad(is_padding[:total], (0, max(total - is_padding.shape[0], 0)), value=True)
    return padded[tp_rank * num_tokens : (tp_rank + 1) * num_tokens]
