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

    written: the tensor is an output, whose elements must not share memory with each other. Sparse and nested
    tensors have no memory to speak of, and a leaf that requires grad, or an inference tensor outside of
    inference mode, cannot be written: torch would refuse them halfway.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
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
        tracked = tensor.requires_grad and torch.is_grad_enabled()
        require(not tracked, name, "an output that does not require grad", "requires_grad True")
        frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
        require(not frozen, name, "an output that can be written here", "an inference tensor")
        shared = any(
            stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        require(
            not shared,
            name,
            "an output with an element of memory for each of its own",
            f"stride {tensor.stride()}",
        )
