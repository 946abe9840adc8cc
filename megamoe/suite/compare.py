"""Comparing outputs: dtype, shape, stride, then raw bytes. Never values: +0 is not -0, and a NaN is its
bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.bundle import as_bytes, raw_memory
from megamoe.suite.buffers import Buffer


@dataclass(frozen=True)
class Observed:
    """An output after a call. buffer: where it is a caller's buffer. aliases: the argument whose memory it
    is."""

    tensor: Tensor
    buffer: Buffer | None = None
    aliases: str | None = None


@dataclass(frozen=True)
class OutputComparison:
    """problem: "" where equal, else what differs, in words. Bytes between elements count, guard bytes do not:
    those are in bytes_outside."""

    output: str
    problem: str = ""
    bytes_compared: int = 0
    bytes_differing: int = 0
    bytes_outside: int = 0

    @property
    def equal(self) -> bool:
        return not self.problem


def compare_bitwise(name: str, expected: Observed, actual: Observed, padding: str) -> OutputComparison:
    """The same dtype, shape, stride, aliasing and bytes."""
    form = _compare_form(expected, actual)
    if form:
        size = expected.tensor.numel() * expected.tensor.element_size()
        return OutputComparison(name, form, size, size)
    if expected.buffer is not None and actual.buffer is not None:
        return _compare_buffers(name, expected.buffer, actual.buffer, padding)
    return compare_memory(name, expected.tensor, actual.tensor.cpu(), padding != "undefined")


def compare_memory(name: str, expected: Tensor, actual: Tensor, with_padding: bool) -> OutputComparison:
    """Bytes of two CPU tensors of one dtype, shape and stride; with_padding: those between the elements
    too."""
    differing, total = count_differing_bytes(expected, actual)
    problem = describe_difference(differing, total, expected, actual)
    if with_padding:
        all_differing, total = count_differing_bytes(raw_memory(expected), raw_memory(actual))
        if all_differing > differing:
            between = f"{all_differing - differing} bytes between the elements differ"
            problem, differing = "; ".join(filter(None, (problem, between))), all_differing
    return OutputComparison(name, problem, total, differing)


def count_differing_bytes(expected: Tensor, actual: Tensor) -> tuple[int, int]:
    """(bytes that differ, bytes) of two tensors of one shape and dtype, any strides, any devices."""
    left, right = flat_bytes(expected).cpu(), flat_bytes(actual).cpu()
    return int((left != right).sum()), left.numel()


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of the logical elements in logical order, uint8, 1-D."""
    dense = as_bytes(tensor).contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def _compare_form(expected: Observed, actual: Observed) -> str:
    for what, left, right in (
        ("dtype", expected.tensor.dtype, actual.tensor.dtype),
        ("shape", tuple(expected.tensor.shape), tuple(actual.tensor.shape)),
        ("stride", expected.tensor.stride(), actual.tensor.stride()),
        ("aliased argument", expected.aliases, actual.aliases),
    ):
        if left != right:
            return f"{what}: expected {left}, got {right}"
    return ""


def _compare_buffers(name: str, expected: Buffer, actual: Buffer, padding: str) -> OutputComparison:
    element_bytes = expected.view.numel() * expected.view.element_size()
    body_bytes = raw_memory(expected.view).numel() * expected.view.element_size()
    compared = element_bytes if padding == "undefined" else body_bytes
    left, right = expected.memory, actual.memory.to(expected.memory.device)
    if torch.equal(left, right):
        return OutputComparison(name, "", compared)
    different = left != right
    inside = expected.logical_mask()
    start = expected.view.storage_offset() * expected.view.element_size()
    body = torch.zeros_like(inside)
    body[start : start + body_bytes] = True
    in_elements = int((different & inside).sum())
    between = int((different & body & ~inside).sum())
    outside = int((different & ~body).sum())
    problems = []
    if in_elements:
        problems.append(describe_difference(in_elements, element_bytes, expected.view, actual.view.cpu()))
    if between and padding != "undefined":
        problems.append(f"{between} bytes between the rows changed")
    if outside:
        problems.append(f"{outside} bytes outside the output were written")
    differing = in_elements + (0 if padding == "undefined" else between)
    return OutputComparison(name, "; ".join(problems), compared, differing, outside)


def describe_difference(differing: int, total: int, expected: Tensor, actual: Tensor) -> str:
    if not differing:
        return ""
    left, right = _integers(expected), _integers(actual)
    index = tuple(int(i) for i in torch.nonzero(left != right)[0])
    width = expected.element_size() * 2
    mask = (1 << 4 * width) - 1
    shown = [f"0x{int(side[index]) & mask:0{width}x}" for side in (left, right)]
    return f"{differing} of {total} bytes differ, first at {list(index)}: expected {shown[0]}, got {shown[1]}"


def _integers(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return as_bytes(tensor.cpu()).contiguous().view(kinds[tensor.element_size()])
