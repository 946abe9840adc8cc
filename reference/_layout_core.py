"""What follows from a layout expression: positions, tensors in memory, coordinates, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from reference._bits import INTEGER_OF_BYTES, as_integers
from reference._layout_expression import Digit, parse

__all__ = ["DTYPES", "Layout", "LayoutFamily"]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
    )
}


@dataclass(frozen=True)
class LayoutFamily:
    """A named layout before its sizes are known.

    params: name -> what it is; ``defaults`` has the optional ones. ``derive`` may add names for the
    expression. padding: what the padding of an axis holds, where that is defined; all other padding keeps
    what was there. scaled_axes: coordinate -> (axis, parameter): `Layout.locate` adds coordinate = index *
    parameter.
    """

    name: str
    expression: str
    params: Mapping[str, str]
    source: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    derive: Callable[[dict[str, object]], dict[str, object]] | None = None
    padding: Mapping[str, int] = field(default_factory=dict)
    scaled_axes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    multiples: Mapping[str, int] = field(default_factory=dict)


class Layout:
    """One layout with its sizes: ``get_layout(name, **params)`` makes it.

    Attributes
        name, params, source: what it is and where it comes from.
        expression: the line everything is derived from.
        axes: the logical tensor's axes in order, each (name, size).
        digits: every digit with its axis, size, weight (in the axis index) and stride (in memory); see
        `Digit`. dimensions: the storage tensor's dimensions in memory order; see `Dimension`.
        element_bits: width of one element; positions count elements of that width from the start of the
        storage. storage_dtype, storage_shape, storage_strides: the tensor that callers hold; strides in its
        own elements. storage_bytes: size of the memory, padding included.
    """

    def __init__(self, family: LayoutFamily, params: dict[str, object], names: Mapping[str, object]) -> None:
        self.name = family.name
        self.params = params
        self.source = family.source
        self.expression = family.expression.format(**names)
        self._family = family
        self._parsed = parse(family.expression, names)
        self.axes = self._parsed.axes
        self.digits = self._parsed.digits
        self.dimensions = self._parsed.dimensions
        self.storage_dtype = DTYPES[self._parsed.storage_dtype]
        per_element = self._parsed.elements_per_storage_element
        self.element_bits = self.storage_dtype.itemsize * 8 // per_element
        self.elements = self._parsed.total_elements
        self.storage_bytes = self.elements * self.element_bits // 8
        by_index = sorted(self.dimensions, key=lambda dimension: dimension.index)
        self.storage_shape = tuple(dimension.size for dimension in by_index)
        self.storage_strides = tuple(dimension.stride // per_element for dimension in by_index)

    def __repr__(self) -> str:
        params = ", ".join(f"{key}={value!r}" for key, value in self.params.items())
        return f"get_layout({self.name!r}, {params})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.name, self.params) == (other.name, other.params)

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.params.items(), key=lambda item: item[0]))))

    # ---- the logical side

    @property
    def logical_shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def logical_dtype(self) -> torch.dtype:
        """Of the logical tensor: the storage's own, or uint8 where one storage element holds several."""
        return self.storage_dtype if self._parsed.elements_per_storage_element == 1 else torch.uint8

    def axis_positions(self, axis: str) -> Tensor:
        """int64 [size of the axis]: its share of the position, which is the sum over the axes."""
        size = next(entry.size for entry in self.axes if entry.name == axis)
        index = torch.arange(size, dtype=torch.int64)
        position = torch.zeros_like(index)
        for digit in self._parsed.leaves():
            if digit.axis == axis:
                position += self._digit_value(digit, index) * digit.stride
        return position

    def _digit_value(self, digit: Digit, index: Tensor) -> Tensor:
        """The digit's value at these axis indices: down from the axis, as the splits are nested."""
        if digit.parent in (digit.axis, digit.name):
            return index // digit.weight % digit.size
        parent = self._parsed.digit(digit.parent)
        return self._digit_value(parent, index) // (digit.weight // parent.weight) % digit.size

    def offsets(self, **indices: Tensor | int) -> Tensor:
        """int64 positions, in units of `element_bits` from the start of the storage.

        Without arguments: those of the whole logical tensor, in its shape. With an index (an integer or an
        int64 tensor) for every axis: those of that subset, broadcast; nothing larger is made.
        """
        if not indices:
            total = torch.zeros((), dtype=torch.int64)
            for number, axis in enumerate(self.axes):
                shape = [1] * len(self.axes)
                shape[number] = axis.size
                total = total + self.axis_positions(axis.name).reshape(shape)
            return total
        names = [axis.name for axis in self.axes]
        if sorted(indices) != sorted(names):
            raise ValueError(f"{self.name} has the axes {names}, got indices for {sorted(indices)}")
        total = torch.zeros((), dtype=torch.int64)
        for axis in self.axes:
            index = torch.as_tensor(indices[axis.name], dtype=torch.int64)
            if index.numel() and (int(index.min()) < 0 or int(index.max()) >= axis.size):
                raise ValueError(f"{axis.name} must lie in [0, {axis.size}), got {index.tolist()}")
            total = total + self.axis_positions(axis.name).to(index.device)[index]
        return total

    # ---- memory

    def pack(self, logical: Tensor, out: Tensor | None = None, fill: int = 0) -> Tensor:
        """Put a logical tensor into storage.

        logical: `logical_shape`, of `logical_dtype` (or any dtype of its width: bits are moved). out: a
        storage tensor to write into, any strides; what is undefined padding here keeps its contents.
        Otherwise a new one in this layout's strides whose undefined padding holds the byte ``fill``.
        """
        if tuple(logical.shape) != self.logical_shape:
            raise ValueError(f"{self.name} holds {self.logical_shape}, got a tensor {tuple(logical.shape)}")
        if logical.dtype.itemsize != self.logical_dtype.itemsize:
            raise TypeError(f"{self.name} holds {self.logical_dtype}, got {logical.dtype}")
        raw = torch.full((self.storage_bytes,), fill, dtype=torch.uint8, device=logical.device)
        if out is not None:
            self._check_storage(out)
            self._as_integers(raw).copy_(as_integers(out))
        elements = self._spread(raw)
        for positions, value in self._defined_padding():
            elements[positions.to(raw.device)] = value
        self._scatter(elements, as_integers(logical))
        self._gather_bits(elements, raw)
        if out is None:
            return self.view(raw)
        as_integers(out).copy_(self._as_integers(raw))
        return out

    def unpack(self, storage: Tensor) -> Tensor:
        """The logical tensor of a storage tensor (any strides), or of the raw memory as uint8 [bytes].

        Raw memory may end with the last storage element instead of with its alignment.
        """
        raw = torch.zeros(self.storage_bytes, dtype=torch.uint8, device=storage.device)
        if storage.dtype == torch.uint8 and storage.ndim == 1 and len(self.storage_shape) != 1:
            if not self._bytes_shown <= storage.numel() <= self.storage_bytes:
                raise ValueError(
                    f"{self.name} takes {self._bytes_shown} to {self.storage_bytes} bytes, "
                    f"got {storage.numel()}"
                )
            raw[: storage.numel()] = storage
        else:
            self._check_storage(storage)
            self._as_integers(raw).copy_(as_integers(storage))
        return self._gather(self._spread(raw)).view(self.logical_dtype)

    def view(self, raw: Tensor) -> Tensor:
        """The storage tensor (`storage_shape`, `storage_strides`, `storage_dtype`) in raw memory uint8
        [storage_bytes].
        """
        return self._as_integers(raw).view(self.storage_dtype)

    def padding_mask(self, *, undefined_only: bool = False) -> Tensor:
        """bool [storage_bytes]: bytes that no element owns; undefined_only: without those of known value."""
        is_padding = torch.ones(self.elements, dtype=torch.bool)
        self._scatter(is_padding, torch.zeros((), dtype=torch.bool).expand(self.logical_shape))
        if undefined_only:
            for positions, _ in self._defined_padding():
                is_padding[positions] = False
        if self.element_bits < 8:
            return is_padding.reshape(-1, 8 // self.element_bits).all(1)
        return is_padding.repeat_interleave(self.element_bits // 8)

    @property
    def _bytes_shown(self) -> int:
        """Bytes up to and with the last storage element that the tensor shows."""
        last = sum(
            (size - 1) * stride for size, stride in zip(self.storage_shape, self.storage_strides, strict=True)
        )
        return (last + 1) * self.storage_dtype.itemsize

    def _check_storage(self, storage: Tensor) -> None:
        if tuple(storage.shape) != self.storage_shape:
            raise ValueError(f"{self.name} is stored as {self.storage_shape}, got {tuple(storage.shape)}")
        if storage.dtype.itemsize != self.storage_dtype.itemsize:
            raise TypeError(f"{self.name} is stored as {self.storage_dtype}, got {storage.dtype}")

    def _as_integers(self, raw: Tensor) -> Tensor:
        return raw.view(INTEGER_OF_BYTES[self.storage_dtype.itemsize]).as_strided(
            self.storage_shape, self.storage_strides
        )

    def _spread(self, raw: Tensor) -> Tensor:
        """One entry an element: the memory itself, or its nibbles spread out."""
        if self.element_bits >= 8:
            return raw.view(INTEGER_OF_BYTES[self.element_bits // 8])
        return torch.stack((raw & 15, raw >> 4), 1).reshape(-1)

    def _gather_bits(self, elements: Tensor, raw: Tensor) -> None:
        if self.element_bits < 8:
            raw.copy_((elements[0::2] & 15) | (elements[1::2] << 4))

    def _defined_padding(self) -> list[tuple[Tensor, int]]:
        """(positions, value) of padding of known value: past the end of one axis, where others are live."""
        found = []
        for axis, value in self._family.padding.items():
            past_the_end = torch.zeros(1, dtype=torch.int64)
            for digit in self._parsed.leaves():
                if digit.axis == axis:
                    room = digit.room if digit.name in self._parsed.inner else digit.size
                    steps = torch.arange(room, dtype=torch.int64) * digit.stride
                    past_the_end = (past_the_end[:, None] + steps).reshape(-1)
            live = self.axis_positions(axis)
            past_the_end = past_the_end[~torch.isin(past_the_end, live)]
            others = torch.zeros(1, dtype=torch.int64)
            for other in self.axes:
                if other.name != axis:
                    others = (others[:, None] + self.axis_positions(other.name)).reshape(-1)
            found.append(((others[:, None] + past_the_end).reshape(-1), value))
        return found

    def _rows(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Positions of the logical rows, positions inside a row, and a pitch to cut memory at (0: no pitch).

        Where a row is contiguous and all rows start at multiples of a pitch, whole rows move at once.
        """
        inside = self.axis_positions(self.axes[-1].name)
        starts = torch.zeros(1, dtype=torch.int64)
        for axis in self.axes[:-1]:
            starts = (starts[:, None] + self.axis_positions(axis.name)).reshape(-1)
        pitch = 0
        if torch.equal(inside, torch.arange(inside.numel())):
            pitch = math.gcd(self.elements, int(np.gcd.reduce(starts.numpy())))
        return starts.to(device), inside.to(device), pitch if pitch >= inside.numel() else 0

    def _scatter(self, elements: Tensor, values: Tensor) -> None:
        starts, inside, pitch = self._rows(elements.device)
        rows = values.reshape(starts.numel(), inside.numel())
        if pitch:
            elements.view(-1, pitch)[:, : inside.numel()].index_copy_(0, starts // pitch, rows)
            return
        for chosen in _row_blocks(starts, inside):
            elements[starts[chosen, None] + inside] = rows[chosen]

    def _gather(self, elements: Tensor) -> Tensor:
        starts, inside, pitch = self._rows(elements.device)
        if pitch:
            rows = elements.view(-1, pitch)[:, : inside.numel()].index_select(0, starts // pitch)
            return rows.reshape(self.logical_shape)
        rows = elements.new_empty((starts.numel(), inside.numel()))
        for chosen in _row_blocks(starts, inside):
            rows[chosen] = elements[starts[chosen, None] + inside]
        return rows.reshape(self.logical_shape)

    # ---- the way back

    def locate(self, byte_offsets: Tensor, *, nibble: Tensor | int = 0) -> dict[str, Tensor]:
        """What the bytes at these offsets (int64, any shape) belong to.

        Returns int64 tensors of the same shape: the index on every axis, the value of every digit, derived
        coordinates (such as the first column of a scale's group, where the layout knows the group's size),
        and ``element_byte``, the byte inside an element of several. -1 everywhere where the byte is padding
        or outside the storage. Where a byte holds two elements, ``nibble`` says which one.
        """
        byte_offsets = torch.as_tensor(byte_offsets, dtype=torch.int64)
        if self.element_bits < 8:
            positions = byte_offsets * (8 // self.element_bits) + nibble
        else:
            positions = byte_offsets // (self.element_bits // 8)
        coordinates = self.locate_elements(positions)
        if self.element_bits > 8:
            inside = byte_offsets % (self.element_bits // 8)
            coordinates["element_byte"] = torch.where(coordinates[self.axes[0].name] < 0, -1, inside)
        return coordinates

    def locate_elements(self, positions: Tensor) -> dict[str, Tensor]:
        """`locate` for element positions, as `offsets` gives them."""
        positions = torch.as_tensor(positions, dtype=torch.int64)
        valid = (positions >= 0) & (positions < self.elements)
        values: dict[str, Tensor] = {}
        for names, dim_stride, dim_room in self._memory():
            within = positions // dim_stride % dim_room
            for name in names:
                digit = self._parsed.digit(name)
                value = within // (digit.stride // dim_stride)
                if name != names[0]:
                    value = value % digit.room
                values[name] = value
                valid = valid & (value < digit.size)
        for digit in reversed(self.digits):  # parts before the digits they make up
            parts = [part for part in self.digits if part.parent == digit.name and part.name != digit.name]
            if parts:
                total = sum(
                    (values[part.name] * (part.weight // digit.weight) for part in parts), torch.zeros(())
                )
                values[digit.name] = total.to(torch.int64)
                valid = valid & (total < digit.size)
        for axis in self.axes:
            roots = [digit for digit in self.digits if digit.parent == axis.name]
            index = torch.zeros_like(positions)
            for digit in roots:
                index = index + values[digit.name] * digit.weight
            values[axis.name] = index
            valid = valid & (index < axis.size)
        for name, (axis_name, factor) in self._family.scaled_axes.items():
            if self.params.get(factor) is not None:
                values[name] = values[axis_name] * int(str(self.params[factor]))
        order = [axis.name for axis in self.axes]
        return {
            name: torch.where(valid, values[name], -1)
            for name in (*order, *(key for key in values if key not in order))
        }

    def _memory(self) -> list[tuple[tuple[str, ...], int, int]]:
        """(digits, stride, room) of every dimension, slowest first; last those inside a storage element."""
        memory = [(dim.digits, dim.stride, dim.room) for dim in self.dimensions]
        if self._parsed.inner:
            memory.append((self._parsed.inner, 1, self._parsed.elements_per_storage_element))
        return memory

    # ---- description

    def describe(self) -> dict[str, object]:
        """Plain data for drawing: axes, digits and dimensions with their sizes and strides."""
        return {
            "name": self.name,
            "params": dict(self.params),
            "expression": self.expression,
            "source": self.source,
            "axes": [{"name": axis.name, "size": axis.size} for axis in self.axes],
            "digits": [
                {
                    "name": digit.name,
                    "axis": digit.axis,
                    "part_of": digit.parent,
                    "size": digit.size,
                    "weight": digit.weight,
                    "room": digit.room,
                    "stride": digit.stride,
                    "stored": digit.is_leaf,
                }
                for digit in self.digits
            ],
            "memory": [
                {"digits": list(names), "stride": stride, "room": room}
                for names, stride, room in self._memory()
            ],
            "element_bits": self.element_bits,
            "storage": {
                "dtype": self._parsed.storage_dtype,
                "shape": list(self.storage_shape),
                "strides": list(self.storage_strides),
                "bytes": self.storage_bytes,
            },
            "padding": dict(self._family.padding),
        }


def _row_blocks(starts: Tensor, inside: Tensor) -> list[slice]:
    """Blocks of rows whose positions take at most 32 MiB."""
    step = max(1, (1 << 22) // inside.numel())
    return [slice(first, first + step) for first in range(0, starts.numel(), step)]
