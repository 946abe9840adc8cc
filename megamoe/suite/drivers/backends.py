"""Whole passes through a backend: weights into kernel layout, staging, launch, and what each left behind.

Both sides run the same steps, the reference on the emulated backend and the implementation on the one that
the device's architecture selects. Pool rows come back by token and slot, because a launch's atomics decide
their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megamoe.backends import EmulatedMegaMoEBackend, LocalGroup, get_deep_gemm_mega_moe_backend
from megamoe.backends.base import DeepGemmMegaMoEBackend

__all__ = ["emulated_run_mega_moe", "real_run_mega_moe"]

STAGED = ("x", "x_sf", "x_scales")


def emulated_run_mega_moe(
    mma_type: str,
    architecture: str,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: dict[str, Tensor],
    inputs: dict[str, Tensor],
    activation_clamp: float | None,
    fast_math: bool,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """The pass on the emulated backend. weights: w13_weight, w2_weight and their scales as in a checkpoint.
    inputs: hidden_states, or x and x_sf if they are staged already. options: the family's own launch
    arguments.
    """
    backend = EmulatedMegaMoEBackend(mma_type, architecture)
    return _run(
        backend, LocalGroup(), topk_weights, topk_ids, weights, inputs, activation_clamp, fast_math, options
    )


def real_run_mega_moe(
    mma_type: str,
    architecture: str,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: dict[str, Tensor],
    inputs: dict[str, Tensor],
    activation_clamp: float | None,
    fast_math: bool,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """The pass on the backend of this device's architecture. RuntimeError if that is another one."""
    from megamoe.suite.drivers.deep_gemm_sm90 import single_rank_group

    hidden, inter = weights["w2_weight"].shape[1], weights["w13_weight"].shape[1] // 2
    backend = get_deep_gemm_mega_moe_backend(topk_ids.device, hidden, inter, mma_type=mma_type)
    if backend.architecture != architecture:
        raise RuntimeError(f"this device's backend is {backend.name}, for {backend.architecture}")
    group = single_rank_group()
    return _run(backend, group, topk_weights, topk_ids, weights, inputs, activation_clamp, fast_math, options)


def _run(
    backend: DeepGemmMegaMoEBackend,
    group: Any,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: dict[str, Tensor],
    inputs: dict[str, Tensor],
    activation_clamp: float | None,
    fast_math: bool,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    experts, hidden = weights["w2_weight"].shape[:2]
    inter = weights["w13_weight"].shape[1] // 2
    tokens, topk = topk_ids.shape
    l1, l2 = backend.transform_weights(
        w13_weight=weights["w13_weight"],
        w13_weight_scale=weights.get("w13_weight_scale"),
        w2_weight=weights["w2_weight"],
        w2_weight_scale=weights.get("w2_weight_scale"),
        num_local_experts=experts,
        hidden_size=hidden,
        intermediate_size=inter,
    )
    buffer = backend.get_symm_buffer(
        group,
        num_experts=experts,
        num_max_tokens_per_rank=tokens,
        num_topk=topk,
        hidden=hidden,
        intermediate_hidden=inter,
        device=topk_ids.device,
    )
    try:
        _stage(backend, buffer, topk_weights, topk_ids, inputs)
        y = torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16, device=topk_ids.device)
        backend.run_mega_moe(
            y=y,
            l1_weights=l1,
            l2_weights=l2,
            symm_buffer=buffer,
            activation_clamp=activation_clamp,
            fast_math=fast_math,
            **options,
        )
        if y.is_cuda:
            torch.cuda.synchronize()
        found = _named("l1", l1) | _named("l2", l2) | _staged(buffer, tokens) | {"y": y}
        # The SM90 launch picks its tile by a heuristic that the library does not export: fp8_mega_moe has its
        # stages.
        if hasattr(backend, "get_block_m"):
            found |= _stages_by_route(buffer, topk_ids, experts, backend.get_block_m(buffer, tokens))
    finally:
        buffer.destroy()
    return found


def _named(prefix: str, weights: Any) -> dict[str, Tensor]:
    weight, scale = weights if isinstance(weights, tuple) else (weights, None)
    return {f"{prefix}_weight": weight} | ({} if scale is None else {f"{prefix}_scale": scale})


def _stage(
    backend: Any, buffer: Any, topk_weights: Tensor, topk_ids: Tensor, inputs: dict[str, Tensor]
) -> None:
    if "hidden_states" in inputs:
        backend.prepare_inputs(buffer, inputs["hidden_states"], topk_weights, topk_ids)
        return
    rows = slice(len(topk_ids))
    for name, tensor in inputs.items():
        view = getattr(buffer, name)[rows]
        view.copy_(tensor.view(view.dtype))
    buffer.topk_idx[rows] = topk_ids
    buffer.topk_weights[rows] = topk_weights


def _staged(buffer: Any, tokens: int) -> dict[str, Tensor]:
    names = [
        name for name in (*STAGED, "topk_idx", "topk_weights") if getattr(buffer, name, None) is not None
    ]
    return {f"staged_{name}": _bytes(getattr(buffer, name)[:tokens]).clone() for name in names}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _stages_by_route(buffer: Any, topk_ids: Tensor, experts: int, block_m: int) -> dict[str, Tensor]:
    """l1_acts, l2_acts and their scales as [T, K, ...]: the pool row that holds each route, found by its
    content.

    ``found`` bool [T, K] says which routes have one; rows of the others are zero.
    """
    rows = _pool_rows(buffer, topk_ids, experts, block_m)
    found = rows >= 0
    stages = {"found": found}
    page = -(-block_m // 128) * 128
    inside = rows % block_m
    permuted = (inside // 128) * 128 + (inside % 32) * 4 + (inside % 128) // 32
    scale_rows = (rows // block_m) * page + permuted
    for name in ("l1_acts", "l2_acts", "l1_acts_sf", "l2_acts_sf"):
        view = getattr(buffer, name, None)
        if view is None:
            continue
        place = (scale_rows if name.endswith("_sf") else rows).clamp(min=0)
        taken = _bytes(view)[place.flatten()].reshape(*rows.shape, -1)
        stages[name] = torch.where(found[..., None], taken, torch.zeros_like(taken))
    return stages


def _pool_rows(buffer: Any, topk_ids: Tensor, experts: int, block_m: int) -> Tensor:
    """int64 [T, K]: pool row of each route, -1 where an expert's run does not hold the token's bytes."""
    ids = topk_ids.to("cpu", torch.int64)
    tokens = [bytes(row) for row in buffer.x[: len(ids)].contiguous().view(torch.uint8).cpu().numpy()]
    rows = torch.full(ids.shape, -1)
    start = 0
    for expert in range(experts):
        routes = (ids == expert).nonzero().tolist()
        count = len(routes)
        run = buffer.l1_acts[start : start + count].contiguous().view(torch.uint8).cpu().numpy()
        places: dict[bytes, list[int]] = {}
        for offset, row in enumerate(run):
            places.setdefault(bytes(row), []).append(start + offset)
        for token, slot in routes:
            candidates = places.get(tokens[token])
            rows[token, slot] = candidates.pop(0) if candidates else -1
        start += -(-count // block_m) * block_m
    return rows.to(topk_ids.device)
