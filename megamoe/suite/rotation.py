"""Memory for the calls that `megamoe bench` times: sets of buffers that calls rotate over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.suite.buffers import allocate
from megamoe.suite.operation import Call
from megamoe.suite.runner import copy_arguments


class Rotation:
    """``count`` sets of buffers for each of the cases that are timed in the same rounds.

    Where its tensors lie makes up to a tenth of a call of few tokens, on one GPU and with one kernel. So what
    is the same in several cases (name, layout and every byte of its storage) is the same memory, and they
    differ in time by what they do.
    """

    def __init__(self, count: int, device: str) -> None:
        self._count, self._device = count, device
        self._copies: dict[str, list[tuple[Tensor, Sequence[Tensor]]]] = {}

    def keywords(self, call: Call) -> list[dict[str, Any]]:
        """Keyword arguments of equal calls, one a set."""
        arguments = copy_arguments(call.arguments, self._device)
        views = {name: allocate(spec, 0, self._device).view for name, spec in call.buffers.items()}
        own_arguments, own_views = self._sets("argument", arguments), self._sets("buffer", views)
        bind = call.bind or (lambda one, other: {**one, **other})
        return [bind(one, other) for one, other in zip(own_arguments, own_views, strict=True)]

    def _sets(self, kind: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        copies = {
            name: self._copies_of(f"{kind} {name}", one) if isinstance(one, Tensor) else [one] * self._count
            for name, one in values.items()
        }
        return [{name: found[i] for name, found in copies.items()} for i in range(self._count)]

    def _copies_of(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        known = self._copies.setdefault(name, [])
        for other, copies in known:
            if _is_same(tensor, other):
                return copies
        made = [_clone(tensor) for _ in range(self._count)]
        known.append((tensor, made))
        return made


def _bytes(tensor: Tensor) -> Tensor:
    """uint8: all of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    def layout(one: Tensor) -> tuple[Any, ...]:
        return one.dtype, one.shape, one.stride(), one.storage_offset(), one.untyped_storage().nbytes()

    return layout(tensor) == layout(other) and torch.equal(_bytes(tensor), _bytes(other))


def _clone(tensor: Tensor) -> Tensor:
    storage: Any = tensor.untyped_storage()
    typed = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return typed.set_(storage.clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
