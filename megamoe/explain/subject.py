"""One output under explanation: its memory as a row of units, what each unit is, and where it lies.

A unit is the smallest thing with a meaning of its own: an FP4 code, an FP8 code or scale byte, or a whole
float or integer. Everything else in this package (steps, fits, places) speaks of unit positions from the
start of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megamoe.bundle import raw_memory

Role = Literal["payload", "scale", "ids", "weights", "load", "values"]
MOST_POSITIONS = 1 << 20
FLOAT_CODES = ("e4m3fn", "e2m1", "bfloat16", "float16", "float32")  # formats with a sign and rounding
_STRETCH = 256
UNIT_DTYPES = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_PLAIN_NAMES = {0: (), 1: ("index",), 2: ("row", "column"), 3: ("batch", "row", "column")}


@dataclass(frozen=True)
class PlainAxis:
    name: str
    size: int


class PlainLayout:
    """A tensor in C order of which nothing is known but its shape; the last axis may hold several units an
    element.
    """

    name = "plain"

    def __init__(
        self,
        shape: tuple[int, ...],
        element_bits: int,
        units_per_element: int = 1,
        names: tuple[str, ...] | None = None,
    ) -> None:
        if names is None:
            names = _PLAIN_NAMES.get(len(shape), tuple(f"axis_{i}" for i in range(len(shape))))
        sizes = list(shape)
        if units_per_element > 1 and sizes:
            sizes[-1] *= units_per_element
        self.axes = tuple(PlainAxis(name, size) for name, size in zip(names, sizes, strict=True))
        self.params: dict[str, Any] = {}
        self.element_bits = element_bits
        self.elements = 1
        for size in sizes:
            self.elements *= size

    def locate_elements(self, positions: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        rest = positions
        for axis in reversed(self.axes):
            found[axis.name] = rest % max(axis.size, 1)
            rest = rest // max(axis.size, 1)
        return {axis.name: found[axis.name] for axis in self.axes}


@dataclass(frozen=True)
class StorageDim:
    """One dimension of the memory: ``size`` entries that are ``stride`` units apart; ``room`` of them fit."""

    name: str
    size: int
    stride: int
    room: int


@dataclass
class Subject:
    """name: of the output. expected, actual: 1-D units (nibbles and bytes as uint8, wider ones as integers of
    their width). compared: bool per unit, None if all count. code: name of the units' format in
    reference.formats, or a dtype's name. before: units that the buffer held before the call. earlier: label
    -> units of the same output from other calls. word_bytes: width of the words that units are packed into.
    """

    name: str
    expected: Tensor
    actual: Tensor
    unit_bits: int
    layout: Any
    role: Role
    code: str
    dims: tuple[StorageDim, ...]
    word_bytes: int = 1
    compared: Tensor | None = None
    before: Tensor | None = None
    earlier: Mapping[str, Tensor] = field(default_factory=dict)
    padding_known: bool = (
        True  # units between elements keep what they held, so the expected side shows the fill
    )

    @property
    def total(self) -> int:
        return self.expected.numel() if self.compared is None else count_true(self.compared)

    @cached_property
    def different(self) -> Tensor:
        """bool per unit."""
        mask = self.expected != self.actual
        return mask if self.compared is None else mask & self.compared

    @cached_property
    def count(self) -> int:
        return count_true(self.different)

    @cached_property
    def positions(self) -> Tensor:
        """int64, the units that differ, ascending; of more than MOST_POSITIONS, those in stretches spread
        over all of them, the first and the last included."""
        if self.count <= MOST_POSITIONS:
            return self.different.nonzero().reshape(-1)
        number = -(-self.different.numel() // _STRETCH)
        g = torch.Generator().manual_seed(number)
        # Stretches at irregular distances, so that no period of the data hides between them.
        wanted = max(1, number * MOST_POSITIONS // self.count)
        chosen = torch.randperm(number, generator=g)[:wanted].sort().values
        index = (chosen[:, None] * _STRETCH + torch.arange(_STRETCH)).reshape(-1)
        index = index[index < self.different.numel()]
        found = index[self.different[index]]
        return torch.cat([self._ends[:1], found, self._ends[1:]]).unique()

    @cached_property
    def _ends(self) -> Tensor:
        """The first and the last unit that differ."""
        mask = self.different.to(torch.uint8)
        return torch.stack([mask.argmax(), mask.numel() - 1 - mask.flip(0).argmax()])

    def locate(self, positions: Tensor) -> dict[str, Tensor]:
        return self.layout.locate_elements(positions)

    @cached_property
    def is_padding(self) -> Tensor | None:
        """bool per unit: no element lies there; None if every unit belongs to one."""
        live = 1
        for axis in self.layout.axes:
            live *= axis.size
        if live == self.expected.numel():
            return None
        mask = self.layout.padding_mask()
        if self.unit_bits < 8:
            mask = mask.repeat_interleave(8 // self.unit_bits)
        elif self.unit_bits > 8:
            mask = mask[:: self.unit_bits // 8]
        return mask[: self.expected.numel()]

    @cached_property
    def fill(self) -> int | None:
        """The unit that all padding of the expected side holds, if it is one and says what buffers held."""
        padding = self.is_padding
        if padding is None or not self.padding_known:
            return None
        units = self.expected[padding]
        return int(units[0]) if units.numel() and bool((units == units[0]).all()) else None


def count_true(mask: Tensor) -> int:
    """NumPy counts bytes; torch would widen them to int64 first."""
    return int(np.count_nonzero(mask.numpy()))


def spread(number: int, wanted: int) -> Tensor:
    """At most ``wanted`` of the indices 0 ... number - 1, evenly spread, both ends included; int64."""
    if number <= wanted:
        return torch.arange(number)
    return torch.arange(wanted) * (number - 1) // max(1, wanted - 1)


def flat_of(tensor: Tensor) -> Tensor:
    """The elements in logical order, 1-D, stride 1 (which torch does not insist on for one element)."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided((flat.numel(),), (1,))


def to_units(tensor: Tensor, unit_bits: int, *, memory: bool) -> Tensor:
    """A tensor's units in memory order (gaps included), or in logical order."""
    flat = flat_of(raw_memory(tensor)) if memory else flat_of(tensor)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    if unit_bits >= 8:
        return flat.view(UNIT_DTYPES[unit_bits])
    # The even column is the low nibble: one int16 per byte, low byte first.
    pairs = flat.view(torch.uint8).to(torch.int16)
    return ((pairs & 15) | ((pairs & 0xF0) << 4)).view(torch.uint8)


def storage_dims(layout: Any) -> tuple[StorageDim, ...]:
    """The memory's dimensions, slowest first, in units; the last may be the units inside one word."""
    if isinstance(layout, PlainLayout):
        dims: list[StorageDim] = []
        stride = 1
        for axis in reversed(layout.axes):
            dims.insert(0, StorageDim(axis.name, axis.size, stride, axis.size))
            stride *= axis.size
        return tuple(dims)
    found = [StorageDim("/".join(d.digits), d.size, d.stride, d.room) for d in layout.dimensions]
    inner = found[-1].stride if found else 1
    if inner > 1:
        found.append(StorageDim("in_word", inner, 1, inner))
    return tuple(found)
