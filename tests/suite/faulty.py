"""Implementations with one fault planted, for every operation: ``--impl faulty:FAULT__OUTPUT__`` names one.

The function is the operation's reference with its output ``OUTPUT`` spoiled: ``flip`` one bit of its last
element, ``unwritten`` (left as it was before the call), ``between`` (a byte that no element owns), ``past``
(a byte behind the last one), and for returned tensors ``dtype``, ``stride`` and ``copy`` (not the memory of
an argument).
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from megamoe.bundle import as_bytes, raw_memory
from megamoe.suite.buffers import byte_mask
from megamoe.suite.operation import load
from megamoe.suite.table import table


def __getattr__(name: str) -> Any:
    parts = name.split("__")
    if len(parts) != 3 or parts[2] not in table():
        raise AttributeError(f"no operation in {name}")
    fault, output, operation = parts

    def spoiled(**arguments: Any) -> Any:
        return _call(fault, output, operation, arguments)

    return spoiled


def _call(fault: str, output: str, operation: str, arguments: dict[str, Any]) -> Any:
    function = load(table()[operation].reference)
    if fault == "raise":
        raise RuntimeError("planted")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    buffer = _buffer(output, arguments)
    if buffer is None:
        returned = function(**arguments)
        return _replace(returned, output, operation, fault)
    before = buffer.clone()
    result = function(**arguments)
    if fault == "flip":
        _flip(buffer)
    elif fault == "unwritten":
        as_bytes(buffer).copy_(as_bytes(before))
    elif fault == "between":
        memory = _storage(buffer)
        first, size = buffer.storage_offset() * buffer.element_size(), buffer.element_size()
        own = byte_mask(memory.numel(), buffer)[first : first + raw_memory(buffer).numel() * size]
        memory[first + int(torch.nonzero(~own)[0])] ^= 0x55
    elif fault == "past":
        end = (buffer.storage_offset() + raw_memory(buffer).numel()) * buffer.element_size()
        _storage(buffer)[end] ^= 0x55
    else:
        raise ValueError(fault)
    return result


def _buffer(output: str, arguments: dict[str, Any]) -> torch.Tensor | None:
    if output == "expert_load":
        state = arguments.get("eplb_state")
        return arguments["expert_load_view"] if state is None else state.expert_load_view
    found = arguments.get(f"buf_{output}", arguments.get(output))
    return found if isinstance(found, torch.Tensor) else None


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _flip(tensor: torch.Tensor) -> None:
    last = (tensor.storage_offset() + raw_memory(tensor).numel()) * tensor.element_size()
    _storage(tensor)[last - tensor.element_size()] ^= 1


def _replace(returned: Any, output: str, operation: str, fault: str) -> Any:
    if isinstance(returned, dict):
        return {name: _spoil(value, fault) if name == output else value for name, value in returned.items()}
    if isinstance(returned, torch.Tensor):
        return _spoil(returned, fault)
    names = list(table()[operation].outputs)
    flat = _flatten(returned)
    index = names.index(output) if len(names) == len(flat) else None
    if index is None:
        raise ValueError(f"{operation} returns {len(flat)} tensors for {len(names)} outputs")
    return [_spoil(value, fault) if i == index else value for i, value in enumerate(flat)]


def _flatten(value: Any) -> list[Any]:
    return (
        [leaf for item in value for leaf in _flatten(item)] if isinstance(value, (list, tuple)) else [value]
    )


def _spoil(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    as_bytes(copied).copy_(as_bytes(tensor))
    if fault == "flip":
        _flip(copied)
        return copied
    if fault == "copy":
        return copied
    if fault == "dtype":
        other = {1: torch.int8, 2: torch.int16, 4: torch.float32, 8: torch.float64}[tensor.element_size()]
        return copied.view(torch.int32 if tensor.dtype == other else other)
    if fault == "stride":
        wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
        view = (
            wide[..., :-1] if tensor.dim() > 1 else torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        )
        as_bytes(view).copy_(as_bytes(tensor))
        return view
    raise ValueError(fault)
