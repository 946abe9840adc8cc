"""Symmetric buffers, one a group, device and configuration, shared by all layers that agree on these.

Layers that share a buffer must run one after the other: a launch uses the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

# The group is kept beside its buffers: an id is only unique while its object lives.
_BUFFERS: dict[Hashable, tuple[Any, Any]] = {}
_LAUNCHED: dict[Hashable, Any] = {}


def device_key(device: torch.device) -> tuple[str, int]:
    """Type and index; a CUDA device without index is the current one."""
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    return device.type, index


def cached_buffers(group: Any, device: torch.device, sizes: Hashable, create: Callable[[], Any]) -> Any:
    """What ``create`` made the first time that this group, device and sizes were asked for."""
    key = (id(group), device_key(device), sizes)
    if key not in _BUFFERS:
        _BUFFERS[key] = (group, create())
    return _BUFFERS[key][1]


def forget_buffers() -> None:
    """Drop every cached buffer: for tests, and before a process group is destroyed."""
    _BUFFERS.clear()
    _LAUNCHED.clear()


def meet_before_first_launch(group: Any, device: torch.device) -> None:
    """Before a group's first launch on a device, wait until every rank is there with its work done.

    The launch's own barriers assume that all ranks start it, and a rank that is still compiling would let
    them time out.
    """
    key = (id(group), device_key(device))
    if key in _LAUNCHED:
        return
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    group.barrier()
    _LAUNCHED[key] = group
