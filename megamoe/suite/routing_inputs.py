"""Routing, padding and EPLB inputs for the staging rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "e4m3": torch.float8_e4m3fn,
}


def topk_ids(
    tokens: int, topk: int, experts: int, dtype: str, rng: np.random.Generator, wild: bool
) -> Tensor:
    """[tokens, topk] expert ids, distinct within a token. wild: -1, the number of experts and the largest
    integers too."""
    rows = [rng.permutation(max(experts, topk))[:topk] for _ in range(tokens)]
    ids = np.array(rows, dtype=np.int64).reshape(tokens, topk)
    if wild and ids.size:
        odd = [-1, experts, -2, INT32_MAX, -(2**31)] + (
            [2**32, 2**40 + 1, -INT64_MAX - 1] if dtype == "i64" else []
        )
        where = rng.random(ids.shape) < 0.4
        ids = np.where(where, rng.choice(np.array(odd, dtype=np.int64), ids.shape), ids)
    return torch.from_numpy(ids).to(DTYPES[dtype])


def topk_weights(
    tokens: int, topk: int, dtype: str, rng: np.random.Generator, padding: Tensor | None
) -> Tensor:
    """[tokens, topk] weights, each distinct; those of padding tokens are NaN, infinite or negative zero."""
    count = tokens * topk
    weights = (rng.permutation(count) + 1).reshape(tokens, topk) / (count + 1)
    tensor = torch.from_numpy(weights.astype(np.float32))
    if padding is not None and count:
        garbage = torch.from_numpy(
            rng.choice(np.array([np.nan, np.inf, -0.0], dtype=np.float32), (tokens, topk))
        )
        tensor = torch.where(padding[:, None], garbage, tensor)
    return tensor.to(DTYPES[dtype])


def padding_mask(tokens: int, kind: str | None, rng: np.random.Generator) -> Tensor | None:
    """bool [tokens]: "tail" (the last third), "random", "all", "none" (given, but all False); None: no mask
    at all."""
    if kind is None:
        return None
    mask = {
        "tail": np.arange(tokens) >= tokens - -(-tokens // 3),
        "random": rng.random(tokens) < 0.4,
        "all": np.ones(tokens, dtype=bool),
        "none": np.zeros(tokens, dtype=bool),
    }[kind]
    return torch.from_numpy(mask)


def fill_padding(hidden: Tensor, padding: Tensor | None, garbage: str | None) -> Tensor:
    """hidden with the padding rows full of NaN ("nan"), 448 ("448") or zeros ("0")."""
    if padding is None or garbage is None:
        return hidden
    value = {"nan": float("nan"), "448": 448.0, "0": 0.0}[garbage]
    return torch.where(padding[:, None], torch.full_like(hidden, value), hidden)


def eplb_tensors(experts: int, slots: int, rng: np.random.Generator, dtype: str = "i64") -> dict[str, Tensor]:
    """A logical -> physical map with 0 to ``slots`` replicas an expert, holes of -1 inside the count among
    them, and a load that is not zero. The map is a slice of a wider tensor: its row stride is not its
    width."""
    counts = rng.integers(1, slots + 1, experts)
    counts[rng.integers(0, experts)] = 0  # treated as one replica
    physical = int(counts.sum()) + 3  # the last three are never mapped to
    order = rng.permutation(physical - 3)
    wide = np.full((experts, slots + 2), -1, dtype=np.int64)
    used = 0
    for expert, count in enumerate(counts):
        wide[expert, :count] = order[used : used + count]
        used += int(count)
    if experts > 2:
        busiest = int(np.argmax(counts))
        wide[busiest, 0] = -1  # a hole that is hit
        wide[(busiest + 1) % experts, 0] = physical  # just beyond the load: mapped, never counted
    kind = DTYPES[dtype]
    return {
        "logical_to_physical_map": torch.from_numpy(wide).to(kind)[:, :slots],
        "logical_replica_count": torch.from_numpy(counts).to(kind),
        "expert_load": torch.from_numpy(rng.integers(0, 100, physical).astype(np.int32)),
    }


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same values as a slice of a larger tensor ("rows": wider rows; "columns": column-major; "step":
    every second column), everything around them garbage. "dense" returns the tensor."""
    if kind == "dense" or tensor.dim() == 0:
        return tensor
    if tensor.dim() == 1:
        wide = _garbage((tensor.shape[0], 3), tensor.dtype)
        view = wide[:, 1]
    elif kind == "rows":
        view = _garbage((tensor.shape[0] + 1, tensor.shape[1] + 16), tensor.dtype)[:-1, : tensor.shape[1]]
    elif kind == "columns":
        view = _garbage((tensor.shape[1], tensor.shape[0] + 3), tensor.dtype)[:, : tensor.shape[0]].T
    else:
        view = _garbage((tensor.shape[0], tensor.shape[1] * 2), tensor.dtype)[:, ::2]
    view.copy_(tensor)
    return view


def output_stride(shape: tuple[int, ...], kind: str) -> tuple[int, ...] | None:
    """Strides of an output buffer of the same kinds."""
    if kind == "dense":
        return None
    if len(shape) == 1:
        return (3,)
    return {"rows": (shape[1] + 16, 1), "columns": (1, shape[0] + 3), "step": (2 * shape[1] + 2, 2)}[kind]


def _garbage(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """True, 7, or a value large enough to move every scale: what a kernel that reads past a row would see."""
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.full(shape, 3e4 if dtype.is_floating_point else 7, dtype=dtype)
