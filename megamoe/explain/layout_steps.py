"""Named changes of layout, as steps from one memory to another: which place each unit was read from.

``layout_steps`` lists those that make sense for a subject: all of them where nothing is known of it, and
otherwise those that its layout allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megamoe.explain import row_maps
from megamoe.explain.fit import Step
from megamoe.explain.subject import PlainLayout, StorageDim, Subject

TILE_SIZES = (16, 32, 64, 96, 128, 192, 240, 256)
_PAGES = ("shared_scale_pages", "shared_scale_pages_row_major")
_UTCCP = ("utccp_scales", "gate_up_utccp_scales")
_GATE_UP = ("gate_up_interleaved_8", "gate_up_interleaved_16_even_odd", "gate_up_utccp_scales")
_MN_MAJOR = (
    "mn_major_tma_aligned",
    "mn_major_packed_ue8m0",
    "utccp_scales",
    "gate_up_utccp_scales",
    "shared_scale_pages",
    "sm90_activation_scales",
)


def layout_steps(subject: Subject) -> list[Step]:
    """The single changes to try, without those that leave every unit in its place."""
    found: list[Step] = []
    for make in (_units_in_words, _page_steps, _gate_up_steps, _swizzle_steps, _exchanges, _strides, _shifts):
        found.extend(make(subject))
    return found


def dim_map(dim: StorageDim, table: Tensor) -> Callable[[Tensor], Tensor]:
    """A source that exchanges the entries of one dimension of the memory."""
    offset = torch.where(table < 0, table, (table - torch.arange(table.numel())) * dim.stride)
    gone = table < 0
    size = table.numel()

    def source(positions: Tensor) -> Tensor:
        row = positions // dim.stride % dim.room
        inside = row < size
        row = row.clamp_max(size - 1)
        moved = torch.where(inside, positions + offset.to(positions.dtype)[row], positions)
        return torch.where(inside & gone[row], -1, moved)

    return source


def dim_whole(dim: StorageDim, table: Tensor, fill: int | None = None) -> Callable[[Tensor], Tensor] | None:
    """dim_map on a whole memory; fill: what entries hold that are not written."""
    gone = table < 0
    any_gone = bool(gone.any())
    if table.numel() != dim.room or (any_gone and fill is None):
        return None

    def whole(units: Tensor) -> Tensor:
        block = dim.room * dim.stride
        if units.numel() % block:
            return whole(torch.nn.functional.pad(units, (0, -units.numel() % block)))[: units.numel()]
        moved = units.view(-1, dim.room, dim.stride).index_select(1, table.clamp_min(0))
        return (moved.masked_fill_(gone[None, :, None], fill) if any_gone else moved).reshape(-1)  # type: ignore[arg-type]

    return whole


def table_step(
    cause: str,
    detail: str,
    dim: StorageDim,
    table: Tensor,
    cost: int = 1,
    min_hits: int = 1,
    fill: int | None = None,
) -> Step:
    return Step(
        cause, detail, cost, dim_map(dim, table), min_hits=min_hits, whole=dim_whole(dim, table, fill)
    )


def _table_step(
    subject: Subject, cause: str, detail: str, dim: StorageDim, table: Tensor, cost: int = 1
) -> Iterator[Step]:
    if not bool((table == torch.arange(table.numel())).all()):
        yield table_step(
            cause, detail, dim, table, cost, fill=None if subject.before is not None else subject.fill
        )


def _is_plain(subject: Subject) -> bool:
    return isinstance(subject.layout, PlainLayout)


def _row_dims(subject: Subject) -> list[StorageDim]:
    """Dimensions that may hold rows: all that have something inside them."""
    return [dim for dim in subject.dims if dim.size > 1 and dim.stride > 1 and dim.name != "in_word"]


def _units_in_words(subject: Subject) -> Iterator[Step]:
    if subject.unit_bits == 4:
        yield Step("nibble_order", "", 1, _xor(1), whole=_reversed_runs(2))
        for width in (2, 4, 8):
            yield Step(
                "byte_order", f"in words of {width} bytes", 1 if width == 4 else 2, _xor((width - 1) << 1)
            )
    elif subject.unit_bits == 8:
        if _is_plain(subject) and subject.role in ("payload", "values"):
            yield Step("nibble_order", "", 1, value=lambda u: ((u << 4) | (u >> 4)).to(torch.uint8))
        widths = (subject.word_bytes,) if subject.word_bytes > 1 else (2, 4, 8)
        for width in widths:
            yield Step(
                "byte_order",
                f"in words of {width} bytes",
                1 if width == 4 else 2,
                _xor(width - 1),
                whole=_reversed_runs(width),
            )
    else:
        width = subject.unit_bits // 8

        def swap(units: Tensor) -> Tensor:
            return (
                units.contiguous()
                .view(torch.uint8)
                .view(-1, width)
                .flip(1)
                .contiguous()
                .view(units.dtype)
                .view(-1)
            )

        yield Step("byte_order", f"in words of {width} bytes", 1, value=swap)


def _xor(bits: int) -> Callable[[Tensor], Tensor]:
    return lambda positions: positions ^ bits


def _reversed_runs(length: int) -> Callable[[Tensor], Tensor]:
    def whole(units: Tensor) -> Tensor:
        if units.numel() % length:
            return whole(torch.nn.functional.pad(units, (0, -units.numel() % length)))[: units.numel()]
        return units.view(-1, length).flip(1).reshape(-1)

    return whole


def _page_steps(subject: Subject) -> Iterator[Step]:
    name, params = subject.layout.name, subject.layout.params
    if name in _PAGES:
        dim = next(d for d in subject.dims if d.name.startswith("page"))
        tokens, block_m = int(params["tokens"]), int(params["block_m"])
        right = row_maps.pages(tokens, block_m)
        for other in row_maps.BLOCK_M:
            if other != block_m:
                table = row_maps.moved(right, row_maps.pages(tokens, other), dim.size)
                yield from _table_step(
                    subject, "wrong_block_m", f"{other} instead of {block_m}", dim, table, 2
                )
        dense = row_maps.moved(right, torch.arange(tokens), dim.size)
        yield from _table_step(
            subject, "page_permutation_missing", "rows in token order, without pages", dim, dense, 2
        )
        no_order = row_maps.moved(right, row_maps.pages(tokens, block_m, permuted=False), dim.size)
        yield from _table_step(subject, "page_permutation_missing", "", dim, no_order)
    elif name in _UTCCP:
        dim = next(d for d in subject.dims if d.name.startswith("tile"))
        yield from _table_step(subject, "page_permutation_missing", "", dim, row_maps.utccp(dim.size))
    elif _is_plain(subject) and subject.unit_bits in (8, 32) and subject.role in ("scale", "values"):
        for dim in subject.dims:
            if dim.size % 128 == 0 and dim.size > 1:
                table = row_maps.utccp(dim.size)
                yield from _table_step(subject, "page_permutation_missing", "", dim, table)
                yield from _table_step(subject, "page_permutation_twice", "", dim, row_maps.inverse(table))
        return
    else:
        return
    rows = dim.size // 128 * 128
    twice = torch.arange(dim.size)
    twice[:rows] = row_maps.inverse(row_maps.utccp(rows))
    yield from _table_step(subject, "page_permutation_twice", "", dim, twice)


def _gate_up_steps(subject: Subject) -> Iterator[Step]:
    name = subject.layout.name
    if name in _GATE_UP:
        dims = [d for d in subject.dims if d.name.startswith(("block", "tile"))]
    elif _is_plain(subject) and subject.role in ("payload", "scale", "values"):
        dims = [d for d in _row_dims(subject) if d.size % 32 == 0 or d.size == 48]
    else:
        return
    for dim in dims:
        rows = dim.size
        if rows % 16:
            continue
        wrap = row_maps.utccp(rows) if name == "gate_up_utccp_scales" else torch.arange(rows)
        even_odd = name == "gate_up_interleaved_16_even_odd"
        order = row_maps.interleaved_even_odd(rows) if even_odd else row_maps.interleaved(rows, 8)
        right = wrap[order]
        changes = [("interleave_missing", "", wrap, 1), ("interleave_twice", "", wrap[order[order]], 1)]
        for granularity in row_maps.GRANULARITIES:
            if granularity != 8 and rows % (2 * granularity) == 0 and rows > 2 * granularity:
                wrong = wrap[row_maps.interleaved(rows, granularity)]
                changes.append(("interleave_granularity", f"blocks of {granularity} instead of 8", wrong, 2))
        if rows % 32 == 0 and not even_odd:
            changes.append(
                (
                    "interleave_granularity",
                    "even rows before odd ones, of 16",
                    wrap[row_maps.interleaved_even_odd(rows)],
                    2,
                )
            )
        changes.append(("gate_up_swapped", "", wrap[order[row_maps.halves_swapped(rows)]], 1))
        for cause, detail, wrong, cost in changes:
            yield from _table_step(subject, cause, detail, dim, row_maps.moved(right, wrong, rows), cost)
        if _is_plain(subject):
            yield from _table_step(subject, "gate_up_swapped", "halves", dim, row_maps.halves_swapped(rows))


def _swizzle_steps(subject: Subject) -> Iterator[Step]:
    if subject.unit_bits != 8:
        return
    total = subject.expected.numel()
    sizes = [d.size for d in subject.dims]
    widths: list[int] = []
    if subject.layout.name == "swizzle_128x4":
        widths = [sizes[1] * 4]
        live = int(subject.layout.params["groups"])
        if live != widths[0]:
            yield Step("swizzle_128x4_missing", f"rows of {live} bytes", 1, _swizzled(widths[0], live))
    elif _is_plain(subject) and subject.role in ("scale", "values"):
        if len(sizes) == 2:
            widths = [sizes[1]]
        elif len(sizes) == 4 and sizes[2:] == [32, 16]:
            widths = [sizes[1] * 4]
    for width in widths:
        if width % 4 == 0 and total % (128 * width) == 0:
            # Tile, strip, 32 rows, 4 quarters, byte in memory; tile, quarter, row, strip, byte in order of
            # rows.
            there = _reordered((-1, width // 4, 32, 4, 4), (0, 3, 2, 1, 4))
            back = _reordered((-1, 4, 32, width // 4, 4), (0, 3, 2, 1, 4))
            yield Step("swizzle_128x4_missing", "", 1, _swizzled(width, width), whole=there)
            yield Step("swizzle_128x4_twice", "", 1, _unswizzled(width), whole=back)


def _reordered(shape: tuple[int, ...], order: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda units: units.view(shape).permute(order).reshape(-1)


def _swizzled(width: int, pitch: int) -> Callable[[Tensor], Tensor]:
    """Row-major position of (row, group), rows ``pitch`` apart -> position in tiles of 128 x 4."""

    def source(positions: Tensor) -> Tensor:
        row, group = positions // pitch, positions % pitch
        tile = row // 128 * (width // 4) + group // 4
        return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4

    return source


def _unswizzled(width: int) -> Callable[[Tensor], Tensor]:
    def source(positions: Tensor) -> Tensor:
        tile, inside = positions // 512, positions % 512
        row = tile // (width // 4) * 128 + inside // 16 + inside % 16 // 4 * 32
        return row * width + tile % (width // 4) * 4 + inside % 4

    return source


def _exchanges(subject: Subject) -> Iterator[Step]:
    """Two neighbouring dimensions written in the other order, dense."""
    dims = [d for d in subject.dims if d.name != "in_word" and d.size > 1]
    wanted = "mn_major_missing" if subject.layout.name in _MN_MAJOR else "transposed"
    for slow, fast in itertools.pairwise(dims):
        is_tight = (
            slow.stride == fast.size * fast.stride
            and subject.expected.numel() % (slow.size * slow.stride) == 0
        )
        shortcut = (
            _reordered((-1, slow.size, fast.size, fast.stride), (0, 2, 1, 3))
            if is_tight and slow.size == slow.room
            else None
        )
        yield Step(wanted, "", 1, _exchanged(slow, fast), whole=shortcut)
        if wanted == "transposed" and slow.size != fast.size:
            back = StorageDim(slow.name, fast.size, slow.size * fast.stride, fast.size)
            yield Step(
                "transposed",
                "of the other shape",
                2,
                _exchanged(back, StorageDim("", slow.size, fast.stride, slow.size)),
            )
    inner = subject.dims[-1] if subject.dims else None
    if (
        inner is not None
        and inner.name == "in_word"
        and dims
        and dims[-1].stride == inner.size
        and len(dims) > 1
    ):
        slow, units = dims[-2], dims[-1].size * inner.size
        if slow.stride == units:
            yield Step("transposed", "unit by unit", 2, _exchanged(slow, StorageDim("", units, 1, units)))


def _exchanged(slow: StorageDim, fast: StorageDim) -> Callable[[Tensor], Tensor]:
    block = slow.stride * slow.room  # what one outer index covers
    used = slow.size * fast.size * fast.stride

    def source(positions: Tensor) -> Tensor:
        outer, inside = positions // block, positions % block
        cell, unit = inside // fast.stride, inside % fast.stride
        at_fast, at_slow = cell // slow.size, cell % slow.size
        found = outer * block + at_slow * slow.stride + at_fast * fast.stride + unit
        return torch.where(inside < used, found, -1)

    return source


def _strides(subject: Subject) -> Iterator[Step]:
    """Rows at another distance: the live length, its usual alignments, and what the data shows."""
    for row, live in _rows_with_length(subject):
        pitch = row.stride
        unit_bytes = max(1, subject.unit_bits // 8)
        per_byte = 2 if subject.unit_bits == 4 else 1
        candidates = {live}
        for alignment in (4, 8, 16, 32, 64, 128, 256):
            step = max(1, alignment // unit_bytes) * per_byte
            candidates.add(-(-live // step) * step)
        candidates.update(_observed_pitches(subject, row, live))
        for other in sorted(candidates - {pitch}):
            yield Step(
                "row_stride",
                f"{_bytes(other, subject)} instead of {_bytes(pitch, subject)} bytes",
                2,
                _strided(row, live, other),
            )
        if subject.unit_bits >= 8 and subject.role == "scale":
            for per_tile in (2, 4, 8):
                columns = live
                if columns % per_tile == 0 and columns // per_tile > 1:
                    yield Step(
                        "tile_stride",
                        f"tiles of {per_tile} scales one scale apart",
                        2,
                        _overlapping(row, columns, per_tile),
                    )


def _rows_with_length(subject: Subject) -> Iterator[tuple[StorageDim, int]]:
    dims = [d for d in subject.dims if d.size > 1 or d.name == "in_word"]
    for row, inner in itertools.pairwise(dims):
        if row.name != "in_word" and inner.name != "in_word":
            yield row, inner.size * inner.stride
    if len(dims) == 2 and dims[1].name == "in_word":
        return


def _bytes(units: int, subject: Subject) -> str:
    return f"{units * subject.unit_bits / 8:g}"


def _strided(row: StorageDim, live: int, pitch: int) -> Callable[[Tensor], Tensor]:
    block = row.stride * row.room

    def source(positions: Tensor) -> Tensor:
        outer, inside = positions // block, positions % block
        at, column = inside // pitch, inside % pitch
        found = outer * block + at * row.stride + column
        return torch.where((column < live) & (at < row.size), found, -1)

    return source


def _overlapping(row: StorageDim, columns: int, per_tile: int) -> Callable[[Tensor], Tensor]:
    tiles = columns // per_tile
    column = torch.arange(columns)
    tile = column.clamp_max(tiles - 1)
    table = torch.where(column - tile < per_tile, tile * per_tile + column - tile, -1)
    inner = StorageDim("column", columns, 1, row.stride)
    return dim_map(inner, table)


def _observed_pitches(subject: Subject, row: StorageDim, live: int) -> set[int]:
    """Where the beginning of the second and third row is found in the actual memory."""
    width = min(live, 24)
    if width < 8 or row.size < 3:
        return set()
    found: set[int] = set()
    for number in (1, 2):
        start = number * row.stride
        wanted = subject.expected[start : start + width]
        if wanted.numel() < width or wanted.unique().numel() < 4:
            continue
        window = subject.actual[: min(subject.actual.numel(), (number + 2) * (row.stride + 256))]
        if window.numel() < width or window.numel() > 1 << 20:
            continue
        agree = (window.unfold(0, width, 1) == wanted).sum(1) >= width - 1
        for place in agree.nonzero().reshape(-1)[:4].tolist():
            if place % number == 0 and place // number >= live:
                found.add(place // number)
    return found


def _shifts(subject: Subject) -> Iterator[Step]:
    scale_tiles = {"word", "group"}
    for dim in subject.dims:
        if dim.name == "in_word" or dim.size < 2:
            continue
        is_column = dim is subject.dims[-1] or dim.name in ("column", "byte", *scale_tiles)
        if is_column and dim.name not in ("word",):
            steps: tuple[int, ...] = tuple(s // (2 if dim.name == "byte" else 1) for s in TILE_SIZES)
            if subject.role == "scale" and subject.unit_bits >= 8:
                steps = (*steps, 4, 8)
        else:
            steps = (1, 2, 3, 4, 8, *TILE_SIZES)
        for size in sorted({s for s in steps if 0 < s <= dim.size // 2}):
            for shift in (size, -size):
                yield shift_step(dim, shift, is_column)


def shift_step(dim: StorageDim, shift: int, is_column: bool = False) -> Step:
    """Entries of a dimension stored ``shift`` entries later; what would come from outside is not written."""

    def source(positions: Tensor) -> Tensor:
        row = positions // dim.stride % dim.room - shift
        moved = torch.where((row >= 0) & (row < dim.size), positions - shift * dim.stride, -1)
        return torch.where(row + shift < dim.size, moved, positions)

    by_tile = is_column or abs(shift) in TILE_SIZES
    cause = "off_by_one_tile" if by_tile else "row_shift"
    return Step(cause, f"{dim.name or 'row'} {shift:+d}", 2, source)
