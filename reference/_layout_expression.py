"""The language of the named layouts: one line says where every element of a tensor lies.

    row:rows = tile j:4 i:32, group:groups = word byte:4  ->  int32[1: word; 0: (tile i j); byte]

Left of the arrow, every logical axis with its size, and how its index splits into digits, highest first. One
digit of a split may leave its size open; it takes as many values as the axis needs. A digit may be split
again by a later clause (``member:block_m = tile j:4 i:32``). Right of the arrow, the storage: its dtype,
then its dimensions in memory order, slowest first, each as ``dimension number: digits``, and last the digits
inside one storage element, if it holds several (a word of four bytes, a byte of two nibbles; the lowest bits
first).

Sizes are integers or names of parameters. After a digit or a dimension,

    ``..n``   it takes the room of n values in memory, though only its own are stored (a row pitch),
    ``~n``    the same, rounded up to a multiple of n (an alignment),
    ``=n``    the dimension has n entries, and the tensor shows all of them (a buffer longer than its
    contents).

Everything else follows: where the product of a split's digits exceeds the axis, where a digit has more room
than values, there is padding. An axis whose size is None is absent, and its dimension with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Axis", "Digit", "Dimension", "ParsedLayout", "parse"]

Size = int | str


@dataclass(frozen=True)
class Digit:
    """One digit of an axis. ``weight`` is what one step of it adds to the axis index, ``stride`` to the
    position.
    """

    name: str
    axis: str
    parent: str  # the axis, or the digit that this one is a part of
    size: int
    weight: int
    is_leaf: bool
    room: int = 0  # values that memory has room for; 0 until the storage side is known
    stride: int = 0  # in elements

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


@dataclass(frozen=True)
class Axis:
    name: str
    size: int


@dataclass(frozen=True)
class Dimension:
    """One dimension of the storage tensor; strides are in elements of the layout, not of the storage
    dtype.
    """

    index: int
    digits: tuple[str, ...]
    size: int  # entries that the tensor shows
    room: int  # entries that memory has room for
    stride: int


@dataclass(frozen=True)
class ParsedLayout:
    axes: tuple[Axis, ...]
    digits: tuple[Digit, ...]  # all of them, parents before parts
    dimensions: tuple[Dimension, ...]  # slowest first
    inner: tuple[str, ...]  # digits inside one storage element, slowest first
    storage_dtype: str
    elements_per_storage_element: int
    total_elements: int

    def leaves(self) -> tuple[Digit, ...]:
        return tuple(digit for digit in self.digits if digit.is_leaf)

    def digit(self, name: str) -> Digit:
        return next(digit for digit in self.digits if digit.name == name)


_DIGIT = re.compile(r"(?P<name>[a-z_]+)(?::(?P<size>\w+))?(?:(?P<mode>\.\.|~)(?P<room>\w+))?$")
_DIMENSION = re.compile(
    r"(?P<index>\d+):\s*(?:\((?P<many>[^)]*)\)|(?P<one>[^\s=]+))(?:(?P<mode>\.\.|~|=)(?P<room>\w+))?$"
)


def _value(size: Size, params: Mapping[str, object], where: str) -> int | None:
    if isinstance(size, str) and not size.isdigit():
        value = params[size]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{where}: {size} must be an integer, got {value!r}")
        return value
    return int(size)


def _room(mode: str | None, room: str | None, size: int, params: Mapping[str, object], what: str) -> int:
    if mode is None or room is None:
        return size
    number = _value(room, params, what)
    if number is None:
        return size
    extent = -(-size // number) * number if mode == "~" else number
    if extent < size:
        raise ValueError(f"{room} must be at least {size} (the size of {what}), got {number}")
    return extent


@lru_cache(maxsize=256)
def _clauses(expression: str) -> tuple[tuple[tuple[str, ...], ...], str, tuple[str, ...]]:
    logical, arrow, storage = expression.partition("->")
    head, bracket, body = storage.strip().partition("[")
    if not arrow or not bracket or not body.endswith("]"):
        raise ValueError(f"expected 'axes -> dtype[dimensions]', got {expression!r}")
    splits = []
    for clause in logical.split(","):
        left, _, right = clause.partition("=")
        splits.append((left.strip(), *right.split()))
    return tuple(splits), head, tuple(part.strip() for part in body[:-1].split(";"))


def _split(
    parent: str, axis: str, size: int, weight: int, parts: tuple[str, ...], params: Mapping[str, object]
) -> list[Digit]:
    """The digits of one split, highest first. The open digit takes what the others leave."""
    names, sizes = [], []
    for part in parts:
        match = _DIGIT.match(part)
        if match is None:
            raise ValueError(f"{part!r} is not a digit")
        names.append(match["name"])
        sizes.append(_value(match["size"], params, match["name"]) if match["size"] else None)
    known = 1
    for digit_size in sizes:
        known *= digit_size or 1
    if sizes.count(None) > 1:
        raise ValueError(f"only one digit of {parent} may leave its size open: {parts}")
    is_open = None in sizes
    if is_open:
        if sizes[0] is not None and size % known:
            raise ValueError(f"{axis} must be a multiple of {known}, got {size}")
        sizes[sizes.index(None)] = -(-size // known)
    elif known < size:
        raise ValueError(f"{parent} has {size} values but its digits {parts} only {known}")
    digits: list[Digit] = []
    step = weight
    for name, digit_size in zip(reversed(names), reversed(sizes), strict=True):
        assert digit_size is not None
        digits.insert(0, Digit(name, axis, parent, digit_size, step, is_leaf=True))
        step *= digit_size
    return digits


def _read_logical(
    splits: tuple[tuple[str, ...], ...], params: Mapping[str, object]
) -> tuple[list[Axis], dict[str, Digit], set[str]]:
    axes: list[Axis] = []
    digits: dict[str, Digit] = {}
    absent: set[str] = set()
    for left, *parts in splits:
        name, _, size_text = left.partition(":")
        if size_text:
            size = _value(size_text, params, name)
            if size is None:
                absent.add(name)
                continue
            axes.append(Axis(name, size))
            parent, weight, axis = name, 1, name
        else:
            axis, size, weight = digits[name].axis, digits[name].size, digits[name].weight
            parent = name
            old = digits[name]
            digits[name] = Digit(old.name, old.axis, old.parent, old.size, old.weight, is_leaf=False)
        for digit in _split(parent, axis, size, weight, tuple(parts) or (name,), params):
            digits[digit.name] = digit
    return axes, digits, absent


def parse(expression: str, params: Mapping[str, object]) -> ParsedLayout:
    """Read one layout expression with its parameters filled in."""
    splits, dtype, dims = _clauses(expression)
    axes, digits, absent = _read_logical(splits, params)

    def place(text: str, stride: int) -> tuple[list[str], int]:
        """Give the digits of one dimension their strides, fastest last; returns names and the room of all."""
        names: list[str] = []
        start = stride
        for part in reversed(text.split()):
            match = _DIGIT.match(part)
            if match is None or match["name"] not in digits:
                raise ValueError(f"{part!r} in {expression!r} is not a digit of a logical axis")
            old = digits[match["name"]]
            room = _room(match["mode"], match["room"], old.size, params, old.name)
            digits[old.name] = Digit(
                old.name, old.axis, old.parent, old.size, old.weight, old.is_leaf, room, stride
            )
            names.insert(0, old.name)
            stride *= room
        return names, stride // start

    inner: list[str] = []
    stride = 1
    if not dims[-1][0].isdigit():
        inner, stride = place(dims[-1], 1)
        dims = dims[:-1]
    elements = stride
    dimensions: list[Dimension] = []
    for text in reversed(dims):
        match = _DIMENSION.match(text)
        if match is None:
            raise ValueError(f"{text!r} in {expression!r} is not 'number: digits'")
        digit_text = match["many"] or match["one"]
        if digit_text.split()[0] in absent:
            continue
        names, natural = place(digit_text, stride)
        # A single digit's extra room is a pitch that the tensor does not show.
        shown = digits[names[0]].size if len(names) == 1 else natural
        if match["mode"] == "=":
            room = shown = _room("..", match["room"], natural, params, " ".join(names))
        else:
            room = _room(match["mode"], match["room"], natural, params, " ".join(names))
        dimensions.insert(0, Dimension(int(match["index"]), tuple(names), shown, room, stride))
        stride *= room
    placed = {name for dimension in dimensions for name in dimension.digits} | set(inner)
    missing = [digit.name for digit in digits.values() if digit.is_leaf and digit.name not in placed]
    if missing:
        raise ValueError(f"{expression!r} does not store the digits {missing}")
    return ParsedLayout(
        tuple(axes),
        tuple(digits.values()),
        tuple(dimensions),
        tuple(inner),
        dtype.format(**params),
        elements,
        stride,
    )
