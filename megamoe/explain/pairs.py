"""Two recordings of one call, output by output: what is compared, in which form, and the subjects that the
search works on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamoe.bundle import dtype_name, raw_memory
from megamoe.explain.outputs import Description, describe, describe_layout, plain
from megamoe.explain.subject import PlainLayout, Subject, flat_of, storage_dims, to_units


@dataclass(frozen=True)
class OutputPair:
    """expected, actual: tensors with their strides. dtypes: names as in a manifest (two FP4 codes a byte:
    "e2m1x2"). padding: "undefined" where bytes between elements mean nothing. layout: of reference.layouts,
    where it is known. before: the buffer before the call. earlier: label -> the same output of other calls.
    """

    name: str
    expected: Tensor
    actual: Tensor
    expected_dtype: str = ""
    actual_dtype: str = ""
    padding: str | None = None
    layout: Any = None
    before: Tensor | None = None
    earlier: Mapping[str, Tensor] = field(default_factory=dict)
    code: str | None = None


@dataclass(frozen=True)
class CasePair:
    """One call on both sides. op may be None: then only what the tensors say is known."""

    outputs: tuple[OutputPair, ...]
    op: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    case: str = ""


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits; fast when they do."""
    return torch.equal(_wide(left), _wide(right))


def _wide(tensor: Tensor) -> Tensor:
    """The bits as the widest integers that they can be viewed as: few comparisons, and none of floats."""
    flat = flat_of(tensor)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    size = flat.numel() * flat.element_size()
    if size % 8 == 0 and (flat.storage_offset() * flat.element_size()) % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(torch.uint8)


def form_problem(pair: OutputPair) -> tuple[str, str] | None:
    """(cause, detail) where dtype or shape keep the bytes from being compared; None otherwise."""
    expected, actual = pair.expected, pair.actual
    left, right = (
        pair.expected_dtype or dtype_name(expected.dtype),
        pair.actual_dtype or dtype_name(actual.dtype),
    )
    if tuple(expected.shape) != tuple(actual.shape):
        return "shape_differs", f"expected {list(expected.shape)}, actual {list(actual.shape)}"
    if (
        expected.element_size() != actual.element_size()
        or expected.is_floating_point() != actual.is_floating_point()
    ):
        integers = (
            not expected.is_floating_point()
            and not actual.is_floating_point()
            and expected.element_size() > 1
        )
        if (
            integers
            and actual.element_size() > 1
            and torch.equal(expected.to(torch.int64), actual.to(torch.int64))
        ):
            return "id_width", f"the values agree, as {left} and {right}"
        if {left, right} & {
            "e2m1x2",
            "float8_e4m3fn",
            "float8_e8m0fnu",
        } and expected.element_size() == actual.element_size() == 1:
            return None  # FP8 handed over as bytes, or the reverse
        return "dtype_differs", f"expected {left}, actual {right}"
    return None


def subject_of(pair: OutputPair, case: CasePair) -> Subject:
    """The subject of an output whose form allows it."""
    name = pair.expected_dtype or dtype_name(pair.expected.dtype)
    if pair.layout is not None:
        description = describe_layout(pair.layout, name, pair.code)
    else:
        description = describe(case.op, pair.name, pair.expected, name, case.params, case.inputs)
        description = _pitched(pair, description)
    memory = not isinstance(description.layout, PlainLayout)
    bits = description.unit_bits
    expected = to_units(pair.expected, bits, memory=memory)
    in_place = not memory or pair.actual.stride() == pair.expected.stride()
    actual = to_units(pair.actual, bits, memory=memory) if in_place else _relaid(pair, bits)
    compared = None
    subject = Subject(
        pair.name,
        expected,
        actual,
        bits,
        description.layout,
        description.role,
        description.code,
        storage_dims(description.layout),
        description.word_bytes,
    )
    if memory and (pair.padding == "undefined" or not in_place) and subject.is_padding is not None:
        compared = ~subject.is_padding
        subject.padding_known = False
    subject.compared = compared
    if pair.before is not None and tuple(pair.before.shape) == tuple(pair.expected.shape):
        subject.before = to_units(
            pair.before, bits, memory=memory and pair.before.stride() == pair.expected.stride()
        )
    subject.earlier = {
        label: to_units(tensor, bits, memory=memory)
        for label, tensor in pair.earlier.items()
        if tuple(tensor.shape) == tuple(pair.expected.shape)
        and tensor.stride() == pair.expected.stride()
        and tensor.element_size() == pair.expected.element_size()
    }
    return subject


def _pitched(pair: OutputPair, description: Description) -> Description:
    """A plain matrix whose rows are further apart than they are long has a layout of its own."""
    tensor = pair.expected
    if (
        not isinstance(description.layout, PlainLayout)
        or tensor.dim() != 2
        or tensor.is_contiguous()
        or pair.padding == "undefined"
    ):
        return description
    shape, (row_stride, step) = tuple(tensor.shape), tensor.stride()
    if step != 1 or row_stride < shape[1] or description.word_bytes > 1 or description.unit_bits < 8:
        return description
    from reference.layouts import DTYPES, get_layout

    integers = {8: "uint8", 16: "bfloat16", 32: "int32", 64: "int64"}
    dtype = integers[description.unit_bits]
    assert dtype in DTYPES
    layout = get_layout("row_major", rows=shape[0], columns=shape[1], dtype=dtype, row_stride=row_stride)
    return Description(layout, description.role, description.code, description.unit_bits)


def _relaid(pair: OutputPair, bits: int) -> Tensor:
    """The actual elements at the places of the expected ones."""
    memory = raw_memory(pair.expected).clone()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = memory.view(kinds[memory.element_size()]).as_strided(
        tuple(pair.expected.shape), pair.expected.stride()
    )
    view.copy_(pair.actual.view(kinds[pair.actual.element_size()]))
    return to_units(memory, bits, memory=False)


def memory_like(subject: Subject, tensor: Tensor) -> Tensor:
    """A logical or strided output of a replay as units in the subject's memory."""
    if isinstance(subject.layout, PlainLayout):
        return to_units(tensor, subject.unit_bits, memory=False)
    layout = subject.layout
    storage = tuple(layout.storage_shape)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integers = kinds[tensor.element_size()]
    memory = torch.zeros(layout.storage_bytes // tensor.element_size(), dtype=integers)
    memory.as_strided(storage, tuple(layout.storage_strides)).copy_(tensor.view(integers).reshape(storage))
    return to_units(memory, subject.unit_bits, memory=False)[: subject.expected.numel()]


__all__ = ["CasePair", "OutputPair", "form_problem", "memory_like", "plain", "same_bytes", "subject_of"]
