"""Drawings of a layout: which byte holds which element, and what is padding. In a terminal, or as SVG."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

_TINTED = ("half", "page", "tile", "strip", "j", "block", "batch")
_TERMINAL = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_FILLS = ("#dbe7fb", "#d9f0e2", "#fdeccb", "#ecdff8", "#d5eff5", "#fbdde7", "#e6f2d2", "#fde0d0")
_INKS = ("#1d4aa3", "#19703e", "#8a5a00", "#6a349b", "#0f6476", "#a02455", "#4c6a12", "#9a3d0e")


@dataclass(frozen=True)
class Cell:
    """One unit of memory. label: its logical coordinates, "" for padding. tint: which colour. byte: its
    offset.
    """

    label: str
    tint: int
    byte: int
    starts_word: bool


@dataclass(frozen=True)
class Drawing:
    """rows: (index of the row, its cells). hidden_rows, hidden_columns: how many are not drawn."""

    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    columns: tuple[str, ...]
    hidden_rows: int
    hidden_columns: int
    tinted_by: str
    coordinates: str


def cells(layout: Any, first_row: int, rows: int, most_columns: int, *, memory: bool = False) -> Drawing:
    """A matrix of units. memory: lines of memory, labelled with their byte offsets, alignment included;
    otherwise the storage tensor, all dimensions but the last down, the last one and what is inside its
    elements across."""
    per = layout.storage_dtype.itemsize * 8 // layout.element_bits
    if memory:
        columns = _line(layout)
        total_rows = -(-layout.elements // columns)
    else:
        columns = layout.storage_shape[-1] * per
        total_rows = math.prod(layout.storage_shape[:-1])
    shown = min(columns, most_columns)
    if per > 1 and shown >= per:
        shown = shown // per * per
    first_row = max(0, min(first_row, total_rows - 1))
    last = min(total_rows, first_row + rows)
    axes = [axis.name for axis in layout.axes if axis.size > 1] or [axis.name for axis in layout.axes]
    tinted = next((n for n in _TINTED if any(d.name == n and d.size > 1 for d in layout.digits)), axes[0])
    drawn = []
    column = torch.arange(shown)
    for row in range(first_row, last):
        if memory:
            positions, name = row * columns + column, f"{row * columns * layout.element_bits // 8:#06x}"
        else:
            positions, name = _stored_row(layout, row, column, per)
        found = layout.locate_elements(positions)
        line = []
        for number in range(shown):
            is_padding = int(found[axes[0]][number]) < 0
            label = "" if is_padding else ",".join(str(int(found[name][number])) for name in axes)
            tint = -1 if is_padding else int(found[tinted][number])
            byte = int(positions[number]) * layout.element_bits // 8
            line.append(Cell(label, tint, byte, number % per == 0))
        drawn.append((name, tuple(line)))
    names = tuple(f"{number // per}" if number % per == 0 else "" for number in range(shown))
    if memory:
        names = tuple(f"+{int(n) * layout.storage_dtype.itemsize}" if n else "" for n in names)
    hidden = total_rows - (last - first_row)
    return Drawing(tuple(drawn), names, hidden, columns - shown, tinted, ",".join(axes))


def _line(layout: Any) -> int:
    """Units in a line of memory: a dimension's room where that is a readable length, else 32."""
    lengths = [dim.stride for dim in layout.dimensions if 16 <= dim.stride <= 64]
    return lengths[0] if lengths else 32


def _stored_row(layout: Any, row: int, column: Tensor, per: int) -> tuple[Tensor, str]:
    """Positions of one row of the storage tensor, and its index in words."""
    shape, strides = layout.storage_shape, layout.storage_strides
    index: list[int] = []
    rest = row
    for size in reversed(shape[:-1]):
        index.insert(0, rest % size)
        rest //= size
    start = sum(i * step for i, step in zip(index, strides[:-1], strict=True))
    return (start + column // per * strides[-1]) * per + column % per, ",".join(map(str, index))


def facts(layout: Any) -> list[tuple[str, str]]:
    """What one wants to know of a layout before looking at its cells."""
    padding = int(layout.padding_mask().sum()) if layout.storage_bytes <= 1 << 24 else -1
    share = f" ({100 * padding / layout.storage_bytes:.1f}%)" if padding > 0 else ""
    dtype = str(layout.storage_dtype).removeprefix("torch.")
    inside = layout.storage_dtype.itemsize * 8 // layout.element_bits
    return [
        ("logical", " × ".join(f"{axis.name} {axis.size}" for axis in layout.axes)),
        (
            "stored as",
            f"{dtype} {list(layout.storage_shape)}, strides {list(layout.storage_strides)}, "
            f"{layout.storage_bytes:,} bytes",
        ),
        (
            "element",
            f"{layout.element_bits} bits"
            + (f", {inside} in each {dtype}, lowest bits first" if inside > 1 else ""),
        ),
        (
            "padding",
            "too large to count" if padding < 0 else "none" if padding == 0 else f"{padding:,} bytes{share}",
        ),
        ("expression", layout.expression),
        ("source", layout.source),
    ]


def draw_terminal(layout: Any, first_row: int, rows: int, *, memory: bool = False) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(layout.name, style="bold"), Text(_params(layout), style="dim"))
    grid = Table.grid(padding=(0, 2))
    for name, value in facts(layout):
        grid.add_row(Text(name, style="dim"), Text(value))
    console.print(grid)
    probe = cells(layout, first_row, rows, 64, memory=memory)
    width = max((len(cell.label) for _, line in probe.rows for cell in line), default=1)
    gutter = max((len(index) for index, _ in probe.rows), default=1) + 1
    per = layout.storage_dtype.itemsize * 8 // layout.element_bits
    room = max(1, int((console.width - gutter - 2) / (width + 1 + 1 / per)))
    drawing = cells(layout, first_row, rows, room, memory=memory)
    console.print()
    header = Text(" " * gutter + " ")
    for number, name in enumerate(drawing.columns):
        header.append(
            (" " if number and drawing.rows and drawing.rows[0][1][number].starts_word else "")
            + name.ljust(width + 1),
            style="dim",
        )
    console.print(header, soft_wrap=True)
    for index, line in drawing.rows:
        text = Text(index.rjust(gutter) + " ", style="dim")
        for number, cell in enumerate(line):
            if number and cell.starts_word:
                text.append(" ")
            style = "bright_black" if not cell.label else _TERMINAL[cell.tint % len(_TERMINAL)]
            text.append((cell.label or "·" * min(width, 2)).ljust(width) + " ", style=style)
        console.print(text, soft_wrap=True)
    hidden = [
        f"{n:,} more {what}"
        for n, what in ((drawing.hidden_rows, "rows"), (drawing.hidden_columns, "columns"))
        if n > 0
    ]
    note = f"cells: {drawing.coordinates}; colour: {drawing.tinted_by}; ·· padding"
    console.print(
        Text(
            note + (f"; not shown: {', '.join(hidden)} (--from, --rows, --svg)" if hidden else ""),
            style="dim",
        ),
        soft_wrap=True,
    )


def _params(layout: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.params.items() if value is not None)


def draw_svg(
    layout: Any, first_row: int = 0, rows: int = 32, most_columns: int = 64, *, memory: bool = False
) -> str:
    """The drawing as an SVG document that needs nothing else."""
    drawing = cells(layout, first_row, rows, most_columns, memory=memory)
    widest = max((len(cell.label) for _, line in drawing.rows for cell in line), default=1)
    width, height, gap = max(26, 8 * widest + 8), 22, 6
    gutter = 12 + 8 * max((len(index) for index, _ in drawing.rows), default=1)
    per = layout.storage_dtype.itemsize * 8 // layout.element_bits
    lines = facts(layout)
    top = 58 + 18 * len(lines)

    def left(number: int) -> int:
        return 20 + gutter + number * width + (number // per * gap if per > 1 else 0)

    hidden = [
        f"{n:,} more {what}"
        for n, what in ((drawing.hidden_rows, "rows"), (drawing.hidden_columns, "columns"))
        if n > 0
    ]
    note = f"cells: {drawing.coordinates}; colour: {drawing.tinted_by}; grey: padding; titles: bytes"
    note += f"; not shown: {', '.join(hidden)}" if hidden else ""
    texts = [note, *(" " * 13 + value for _, value in lines)]
    total_width = max(640, left(len(drawing.columns)) + 20, 40 + round(7.3 * max(map(len, texts))))
    total_height = top + 22 + height * len(drawing.rows) + 46
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
        f'width="{total_width}" height="{total_height}" '
        'font-family="ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12">',
        f'<rect width="{total_width}" height="{total_height}" fill="#ffffff"/>',
        f'<text x="20" y="32" font-size="17" font-weight="600" fill="#1b2230">{escape(layout.name)}</text>',
        f'<text x="{34 + 10.4 * len(layout.name):.0f}" y="32" font-size="12.5" fill="#5c677a">'
        f"{escape(_params(layout))}</text>",
    ]
    for number, (name, value) in enumerate(lines):
        y = 56 + 18 * number
        out.append(
            f'<text x="20" y="{y}" fill="#5c677a">{escape(name)}</text>'
            f'<text x="110" y="{y}" fill="#1b2230">{escape(value)}</text>'
        )
    for number, name in enumerate(drawing.columns):
        if name:
            out.append(f'<text x="{left(number)}" y="{top + 14}" fill="#5c677a">{name}</text>')
    for row, (index, line) in enumerate(drawing.rows):
        y = top + 22 + row * height
        out.append(f'<text x="{16 + gutter}" y="{y + 15}" text-anchor="end" fill="#5c677a">{index}</text>')
        for number, cell in enumerate(line):
            x = left(number)
            title = f"byte {cell.byte}: {cell.label or 'padding'}"
            fill = "#eef0f3" if not cell.label else _FILLS[cell.tint % len(_FILLS)]
            out.append(
                f'<g><title>{title}</title><rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" '
                f'rx="3" fill="{fill}"/>'
            )
            if cell.label:
                ink = _INKS[cell.tint % len(_INKS)]
                out.append(
                    f'<text x="{x + (width - 2) / 2:g}" y="{y + 14.5}" text-anchor="middle" fill="{ink}">'
                    f"{cell.label}</text>"
                )
            out.append("</g>")
    out.append(f'<text x="20" y="{total_height - 16}" fill="#5c677a">{escape(note)}</text></svg>')
    return "\n".join(out)


def list_layouts(as_json: bool) -> None:
    """All names with their axes and what they take."""
    from megamoe.explain.sizes import axis_params
    from reference.layouts import LAYOUTS

    if as_json:
        found = [
            {"name": f.name, "axes": axis_params(f.expression), "params": dict(f.params), "source": f.source}
            for f in LAYOUTS.values()
        ]
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for family in LAYOUTS.values():
        axes = axis_params(family.expression)
        others = [n for n in family.params if n not in axes]
        line = Text(family.name, style="bold")
        line.append(f"  --shape {'x'.join(axes)}", style="cyan")
        for name in others:
            line.append(
                f"  [{name}]" if name in family.defaults else f"  --param {name}=...",
                style="dim" if name in family.defaults else "cyan",
            )
        console.print(line, soft_wrap=True)
        console.print(Text("    " + family.source, style="dim"))
