"""Layouts by name and shape, as a command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamoe.explain.files import InputError


def layout_of_shape(name: str, shape: str | None, params: Mapping[str, Any]) -> Any:
    """The named layout with these sizes.

    shape: sizes of the logical axes in their order ("200x8"); a missing batch axis may be left out. params:
    sizes by name. InputError for an unknown name, a shape of another number of axes, and sizes that the
    layout does not take.
    """
    from reference.layouts import LAYOUTS, get_layout

    if name not in LAYOUTS:
        raise InputError(f"no layout {name!r}; there are {', '.join(sorted(LAYOUTS))}")
    family = LAYOUTS[name]
    sizes: dict[str, Any] = dict(params)
    axes = axis_params(family.expression)
    if shape is not None:
        numbers = shape.lower().replace(",", "x").split("x")
        if not all(number.strip().isdigit() for number in numbers):
            raise InputError(f"--shape: expected sizes like 200x8, got {shape!r}")
        if len(numbers) not in (len(axes), len(axes) - ("batch" in axes)):
            raise InputError(f"--shape: {name} has the axes {' x '.join(axes)}, got {shape!r}")
        for axis, number in zip(axes[-len(numbers) :], numbers, strict=True):
            sizes[axis] = int(number)
    missing = [p for p in family.params if p not in sizes and p not in family.defaults]
    if missing:
        wanted = ", ".join(f"--param {p}=..." for p in missing)
        raise InputError(f"{name} also needs {wanted} (its axes: {' x '.join(axes)})")
    try:
        return get_layout(name, **sizes)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: {error}") from error


def axis_params(expression: str) -> list[str]:
    """Names of the parameters that are sizes of logical axes, in order."""
    found = []
    for clause in expression.partition("->")[0].split(","):
        _, colon, size = clause.split("=")[0].strip().partition(":")
        if colon:
            found.append(size)
    return found
