"""Output buffers that tell on a kernel: poisoned before the call, between rows and past both ends too,
compared whole."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megamoe.bundle import as_bytes, contiguous_stride, extent

GUARD_BYTES = 256  # on either side; a multiple of every alignment that a kernel may assume
_POISON_PERIOD = 8191  # prime, so that no row length is a multiple of it: each row is poisoned differently


@dataclass(frozen=True)
class BufferSpec:
    """A caller-owned output: a strided tensor inside a larger, poisoned allocation.

    stride: in elements; None is row-major. fill: a byte that every byte holds before the call, instead of
    varying poison. initial: values to start from, for outputs that the call adds to.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    fill: int | None = None
    initial: Tensor | None = None

    def strides(self) -> tuple[int, ...]:
        return contiguous_stride(self.shape) if self.stride is None else self.stride


@dataclass(frozen=True)
class Buffer:
    """memory: uint8, the whole allocation. view: the tensor handed to the call."""

    memory: Tensor
    view: Tensor

    def logical_mask(self) -> Tensor:
        """bool, like memory: True where a byte belongs to an element of the view."""
        return byte_mask(self.memory.numel(), self.view)


def byte_mask(num_bytes: int, view: Tensor) -> Tensor:
    """bool [num_bytes] on the view's device: the bytes of its elements, counted from the start of its
    storage."""
    size = view.element_size()
    mask = torch.zeros(num_bytes, dtype=torch.bool, device=view.device)
    shape, stride = (*view.shape, size), (*(step * size for step in view.stride()), 1)
    if view.numel():
        mask.as_strided(shape, stride, view.storage_offset() * size).fill_(True)
    return mask


def allocate(spec: BufferSpec, seed: int, device: str = "cpu") -> Buffer:
    """A fresh buffer. The same spec and seed give the same bytes, on every device."""
    size = spec.dtype.itemsize
    body = extent(spec.shape, spec.strides()) * size
    memory = torch.from_numpy(_poison(seed, spec.fill, 2 * GUARD_BYTES + -(-body // 16) * 16))
    view = memory.view(spec.dtype).as_strided(spec.shape, spec.strides(), GUARD_BYTES // size)
    if spec.initial is not None:
        as_bytes(view).copy_(as_bytes(spec.initial))
    if device != "cpu":
        memory = memory.to(device)
        view = memory.view(spec.dtype).as_strided(spec.shape, spec.strides(), GUARD_BYTES // size)
    return Buffer(memory, view)


def _poison(seed: int, fill: int | None, num_bytes: int) -> np.ndarray:
    if fill is not None:
        return np.full(num_bytes, fill, dtype=np.uint8)
    return np.resize(_poison_tile(seed), num_bytes)


@functools.lru_cache(maxsize=8)
def _poison_tile(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, _POISON_PERIOD, dtype=np.uint8)
