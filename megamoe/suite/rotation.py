"""Memory for the calls that `megamoe bench` times: sets of buffers that calls rotate over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.suite.buffers import allocate
from megamoe.suite.operation import Call
from megamoe.suite.runner import copy_arguments, copy_tensor, storage_bytes


class Rotation:
    """Sets of buffers for the cases that are timed in the same rounds.

    Where its tensors lie makes up to a tenth of a call of few tokens, on one GPU and with one kernel. So what
    is the same in several cases (name, layout and every byte of its storage) is the same memory, and they
    differ in time by what they do.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._copies: dict[str, list[tuple[Tensor, list[Tensor]]]] = {}

    def keywords(self, call: Call, count: int) -> list[dict[str, Any]]:
        """Keyword arguments of ``count`` equal calls, each with memory of its own."""
        arguments = copy_arguments(call.arguments, self._device)
        views = {name: allocate(spec, 0, self._device).view for name, spec in call.buffers.items()}
        own_arguments = self._sets("argument", arguments, count)
        own_views = self._sets("buffer", views, count)
        bind = call.bind or (lambda one, other: {**one, **other})
        return [bind(one, other) for one, other in zip(own_arguments, own_views, strict=True)]

    def _sets(self, kind: str, values: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        copies = {
            name: self._copies_of(f"{kind} {name}", one, count) if isinstance(one, Tensor) else [one] * count
            for name, one in values.items()
        }
        return [{name: found[i] for name, found in copies.items()} for i in range(count)]

    def _copies_of(self, name: str, tensor: Tensor, count: int) -> Sequence[Tensor]:
        """At least ``count`` copies, which calls may write to; the tensor itself is kept to compare with."""
        known = self._copies.setdefault(name, [])
        copies = next((made for other, made in known if _is_same(tensor, other)), None)
        if copies is None:
            copies = []
            known.append((tensor, copies))
        copies += [copy_tensor(tensor, self._device) for _ in range(count - len(copies))]
        return copies


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    def layout(one: Tensor) -> tuple[Any, ...]:
        return one.dtype, one.shape, one.stride(), one.storage_offset()

    return layout(tensor) == layout(other) and torch.equal(storage_bytes(tensor), storage_bytes(other))
