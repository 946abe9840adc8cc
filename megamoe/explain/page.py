"""The HTML page: findings, and each differing output drawn unit by unit. One file, no network.

Everything small is embedded whole. Of a large output the page has a density map of everything, and the units
of those stretches of memory where differences lie, up to a budget.
"""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.explain.causes import CAUSES
from megamoe.explain.findings import Finding, Report
from megamoe.explain.subject import PlainLayout, Subject, spread
from megamoe.explain.where import patterns

_CHUNK = 1024  # units that are embedded together
_BUDGET_BYTES = 384 << 10  # of each side, over all outputs
_BINS = 160
_MOST_OUTPUTS = 12


def render(report: Report) -> str:
    """The page as text."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    subjects = report.subjects[:_MOST_OUTPUTS]
    budget = _BUDGET_BYTES // max(1, len(subjects))
    data = [drawing(subject, budget) for subject in subjects]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.case, finding.output), []).append(finding)
    return environment.get_template("page.html.j2").render(
        report=report,
        title=report.title or "Two recordings compared",
        groups=list(groups.values()),
        causes=CAUSES,
        bytes_compared=sum(report.compared.values()),
        hidden=len(report.subjects) - len(subjects),
        data=_script_json({"drawings": data}),
    )


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def drawing(subject: Subject, budget: int) -> dict[str, Any]:
    """One output as the page's script wants it."""
    chunks = _chunks(subject, budget)
    return {
        "name": subject.name,
        "code": subject.code,
        "bits": subject.unit_bits,
        "units": subject.expected.numel(),
        "count": subject.count,
        "layout": _layout_json(subject),
        "values": _values(subject.code),
        "chunk": _CHUNK,
        "chunks": {str(c): [_packed(subject.expected, c), _packed(subject.actual, c)] for c in chunks},
        "density": _density(subject),
        "axes": _axes(subject),
        "padding": bool((subject.locate(subject.positions)[subject.layout.axes[0].name] < 0).any())
        if subject.layout.axes
        else False,
        "first": [int(p) for p in subject.positions[:256]],
    }


def _layout_json(subject: Subject) -> dict[str, Any]:
    if isinstance(subject.layout, PlainLayout):
        axes: list[dict[str, Any]] = [
            {"name": axis.name, "size": axis.size} for axis in subject.layout.axes
        ] or [{"name": "index", "size": 1}]
        digits: list[dict[str, Any]] = []
        memory: list[dict[str, Any]] = []
        stride = 1
        for axis in reversed(axes):
            digits.insert(
                0,
                {
                    "name": axis["name"],
                    "axis": axis["name"],
                    "part_of": axis["name"],
                    "size": axis["size"],
                    "weight": 1,
                    "room": axis["size"],
                    "stride": stride,
                    "stored": True,
                },
            )
            memory.insert(0, {"digits": [axis["name"]], "stride": stride, "room": axis["size"]})
            stride *= int(axis["size"])
        sizes = [int(axis["size"]) for axis in axes]
        return {
            "name": "plain",
            "axes": axes,
            "digits": digits,
            "memory": memory,
            "expression": "",
            "params": {},
            "shape": sizes,
            "strides": _strides(sizes),
            "per": 1,
        }
    found = subject.layout.describe()
    per = subject.layout.storage_dtype.itemsize * 8 // subject.unit_bits
    return {
        **{key: found[key] for key in ("name", "axes", "digits", "memory", "expression")},
        "params": {k: v for k, v in found["params"].items() if v is not None},
        "shape": list(subject.layout.storage_shape),
        "strides": [step * per for step in subject.layout.storage_strides],
        "per": per,
    }


def _strides(sizes: list[int]) -> list[int]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _values(code: str) -> list[Any] | None:
    """What each code of an 8-bit or narrower format is worth."""
    from reference import formats

    if code not in formats.FORMATS:
        return None
    number = 16 if code == "e2m1" else 256
    values = formats.decode(torch.arange(number, dtype=torch.uint8), code).tolist()
    return [value if math.isfinite(value) else str(value) for value in values]


def _chunks(subject: Subject, budget: int) -> list[int]:
    """Stretches of memory to embed: all, or those with differences, spread over all of them."""
    number = -(-subject.expected.numel() // _CHUNK)
    affordable = max(8, budget // (_CHUNK * subject.expected.element_size()))
    if number <= affordable:
        return list(range(number))
    with_differences = (subject.positions // _CHUNK).unique()
    if with_differences.numel() > affordable:
        # The first ones whole, so that there is something to pan through, the rest spread out.
        head = with_differences[: affordable // 2]
        tail = with_differences[affordable // 2 :]
        tail = tail[spread(tail.numel(), affordable - affordable // 2)]
        with_differences = torch.cat([head, tail]).unique()
    return [int(chunk) for chunk in with_differences]


def _packed(units: Tensor, chunk: int) -> str:
    part = units[chunk * _CHUNK : (chunk + 1) * _CHUNK].contiguous()
    return base64.b64encode(part.view(torch.uint8).numpy().tobytes()).decode()


def _density(subject: Subject) -> dict[str, Any]:
    """Counts of differing units over the logical matrix (all axes but the last, by the last), binned."""
    axes = list(subject.layout.axes)
    rows = 1
    for axis in axes[:-1]:
        rows *= axis.size
    columns = axes[-1].size if axes else 1
    row_bins, column_bins = min(rows, _BINS), min(columns, _BINS)
    places = subject.locate(subject.positions)
    row = torch.zeros_like(subject.positions)
    for axis in axes[:-1]:
        row = row * axis.size + places[axis.name]
    column = places[axes[-1].name] if axes else row
    inside = (row >= 0) & (column >= 0)
    cell = (row[inside] * row_bins // rows) * column_bins + column[inside] * column_bins // columns
    counts = torch.bincount(cell, minlength=row_bins * column_bins) * (
        subject.count / subject.positions.numel()
    )
    full = max(1.0, rows / row_bins * (columns / column_bins))
    shades = (counts.float() / full * 255).ceil().clamp(0, 255).to(torch.uint8)
    return {
        "rows": row_bins,
        "columns": column_bins,
        "shades": base64.b64encode(shades.numpy().tobytes()).decode(),
    }


def _axes(subject: Subject) -> list[dict[str, Any]]:
    """Differences along every axis, binned, with what stands out in words."""
    places = subject.locate(subject.positions)
    words = {pattern.axis: pattern.words for pattern in patterns(subject, subject.positions)}
    found = []
    for axis in subject.layout.axes:
        bins = min(axis.size, 128)
        index = places[axis.name]
        index = index[index >= 0]
        bin_of = torch.arange(axis.size) * bins // max(1, axis.size)
        counts = torch.bincount(bin_of[index], minlength=bins) / torch.bincount(
            bin_of, minlength=bins
        ).clamp_min(1)
        found.append(
            {
                "name": axis.name,
                "size": axis.size,
                "counts": [round(float(c), 2) for c in counts],
                "words": words.get(axis.name, ""),
            }
        )
    return found
