"""Tensors as integers of their width, so that moving them is no conversion and makes no NaN canonical."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory, shape and strides, as integers of the dtype's width (1, 2, 4 or 8 bytes)."""
    return tensor.view(INTEGER_OF_BYTES[tensor.dtype.itemsize])
