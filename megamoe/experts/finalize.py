"""From checkpoint layout to kernel layout, expert by expert, and the proof that what is dropped is not still
in use.

The launch wants L1 weights interleaved, which a transform returns as a copy. For all experts at once that
would take half a layer of memory more; a few at a time, the copy goes back over the rows it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Weight bytes of L1 transformed in one go.
CHUNK_BYTES = 4 << 20

Pair = tuple[torch.Tensor, torch.Tensor | None]


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the two tensors live in one storage (a storage without bytes is shared with nothing)."""
    first, second = a.untyped_storage(), b.untyped_storage()
    return first.data_ptr() != 0 and first.data_ptr() == second.data_ptr()


def prove_dropped(dropped: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
    """AssertionError naming the first pair of a dropped and a kept tensor that share storage."""
    for name, tensor in dropped.items():
        for other, keeper in kept.items():
            if shares_storage(tensor, keeper):
                raise AssertionError(f"{name} is dropped but {other} still lives in its storage")


def _split(weights: Any) -> Pair:
    return weights if isinstance(weights, tuple) else (weights, None)


def _join(weight: Any, scale: torch.Tensor | None) -> Any:
    return weight if scale is None else (weight, scale)


def _like_chunk(chunk: torch.Tensor, experts: int) -> torch.Tensor:
    """An uninitialised [experts, ...] whose experts are laid out like those of ``chunk``, one after the
    other.
    """
    expert_size = chunk[0].numel()
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(chunk.shape[1:], chunk.stride()[1:], strict=True)
    )
    return torch.empty_strided(
        (experts, *chunk.shape[1:]),
        (max(span, expert_size), *chunk.stride()[1:]),
        dtype=chunk.dtype,
        device=chunk.device,
    )


def transform_in_place(
    backend: Any,
    *,
    w13_weight: torch.Tensor,
    w13_weight_scale: torch.Tensor | None,
    w2_weight: torch.Tensor,
    w2_weight_scale: torch.Tensor | None,
    hidden_size: int,
    intermediate_size: int,
    activation: str | None = None,
) -> tuple[Any, Any]:
    """(L1, L2) of ``backend.transform_weights`` for all experts, with at most CHUNK_BYTES of weights
    copied at once.

    The L1 weight takes w13_weight's storage over and L2's stays w2_weight's; scales are new tensors.
    AssertionError if the backend's L2 weight is not w2_weight's storage, or if its L1 weight does not fit
    where it came from.
    """
    experts = w13_weight.shape[0]
    per_expert = w13_weight[0].numel() * w13_weight.element_size()
    step = max(1, min(experts, CHUNK_BYTES // max(per_expert, 1)))
    l1_weight: torch.Tensor | None = None
    l2_weight: torch.Tensor | None = None
    l1_scale: torch.Tensor | None = None
    l2_scale: torch.Tensor | None = None
    for start in range(0, experts, step):
        part = slice(start, min(start + step, experts))
        l1, l2 = backend.transform_weights(
            w13_weight=w13_weight[part],
            w13_weight_scale=None if w13_weight_scale is None else w13_weight_scale[part],
            w2_weight=w2_weight[part],
            w2_weight_scale=None if w2_weight_scale is None else w2_weight_scale[part],
            num_local_experts=part.stop - part.start,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation=activation,
        )
        (w1, sf1), (w2, sf2) = _split(l1), _split(l2)
        if l1_weight is None or l2_weight is None:
            if w1.shape[1:] != w13_weight.shape[1:] or w1.element_size() != w13_weight.element_size():
                raise AssertionError(
                    f"the transformed L1 weight {tuple(w1.shape)} does not fit w13_weight's storage"
                )
            l1_weight, l2_weight = w13_weight.view(w1.dtype), w2_weight.view(w2.dtype)
            l1_scale = None if sf1 is None else _like_chunk(sf1, experts)
            l2_scale = None if sf2 is None else _like_chunk(sf2, experts)
        if w2.data_ptr() != w2_weight[part].data_ptr() or w2.stride() != w2_weight.stride():
            raise AssertionError("the transformed L2 weight does not share storage with w2_weight")
        l1_weight[part].copy_(w1)
        for whole, piece in ((l1_scale, sf1), (l2_scale, sf2)):
            if whole is not None and piece is not None:
                whole[part].copy_(piece)
    return _join(l1_weight, l1_scale), _join(l2_weight, l2_scale)
