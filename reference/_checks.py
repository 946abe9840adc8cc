"""Refusals: ValueError or TypeError that names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def require(holds: bool, name: str, expected: str, got: object) -> None:
    """ValueError unless ``holds``."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def check_tensor(
    name: str,
    tensor: object,
    *,
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...] | None = None,
    dim: int | None = None,
    device: torch.device | None = None,
    written: bool = False,
) -> None:
    """TypeError unless a tensor of one of ``dtypes``; ValueError for another shape, rank or device.

    written: the tensor is an output, whose elements must not share memory with each other.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {names}, got {str(tensor.dtype).removeprefix('torch.')}")
    if shape is not None:
        require(tuple(tensor.shape) == shape, name, f"shape {list(shape)}", list(tensor.shape))
    if dim is not None:
        require(tensor.dim() == dim, name, f"{dim} dimensions", list(tensor.shape))
    if device is not None:
        require(tensor.device == device, name, f"device {device}", tensor.device)
    if written:
        shared = any(
            stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        require(
            not shared,
            name,
            "an output with an element of memory for each of its own",
            f"stride {tensor.stride()}",
        )
