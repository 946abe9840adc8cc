"""Argument checks of the backends: one message form, naming the argument, what was expected and what came."""

from __future__ import annotations

import torch


def check_tensor(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """``tensor``, if it has this shape and one of these dtypes; TypeError or ValueError otherwise."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a {wanted} tensor {shape}, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    return tensor
