"""What `megamoe bench` shows: tables, JSON lines, a plot, ratios to an earlier run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from megamoe.suite.measurement import DEFAULTS, Measurement
from megamoe.suite.operation import Params
from megamoe.suite.table import table
from megamoe.suite.timing import ROTATION_BYTES

FORMAT = "megamoe-bench/1"
_AXES = ("recipe", "tokens", "hidden", "rows")
Earlier = Mapping[tuple[str, str], float]  # (case, implementation) -> microseconds


def groups(found: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Measurements by everything but the number of tokens, under a title."""
    result: dict[str, list[Measurement]] = {}
    for one in found:
        result.setdefault(title(one), []).append(one)
    return result


def title(one: Measurement) -> str:
    """Operation, recipe, hidden size, and what differs from the default parameters."""
    words = [one.op]
    if "recipe" in one.params:
        words.append(str(one.params["recipe"]))
    if "hidden" in one.params:
        words.append(f"hidden {one.params['hidden']}")
    return ", ".join([*words, *_unusual(one.op, one.params)])


def _unusual(op: str, params: Params) -> list[str]:
    usual = table()[op].defaults | DEFAULTS
    return [f"{k} {v}" for k, v in params.items() if k not in _AXES and v != usual[k]]


def as_table(name: str, group: Sequence[Measurement], earlier: Earlier) -> Table:
    """A row a number of tokens; for each implementation its time, its share of the copy limit, its time
    relative to the first implementation's, and relative to its own time in an earlier run."""
    names = list(dict.fromkeys(one.implementation for one in group))
    made = Table(title=name, title_justify="left")
    columns = ["tokens", "MB", "copy us", "TB/s"]
    for index, implementation in enumerate(names):
        columns += [f"{implementation} us", "of copy"]
        columns += [f"/ {names[0]}"] if index else []
        columns += ["/ earlier"] if earlier else []
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for tokens in dict.fromkeys(one.params["tokens"] for one in group):
        row = {one.implementation: one for one in group if one.params["tokens"] == tokens}
        made.add_row(*_cells(tokens, names, row, earlier))
    return made


def _cells(tokens: int, names: Sequence[str], row: Mapping[str, Measurement], earlier: Earlier) -> list[str]:
    timed = [one for one in row.values() if one.us is not None]
    moved = max(one.bytes_moved for one in row.values())
    copy_us = timed[0].copy_us if timed else None
    cells = [
        str(tokens),
        f"{moved / 1e6:.2f}",
        _number(copy_us),
        _number(moved / copy_us / 1e6 if copy_us else None),
    ]
    for index, name in enumerate(names):
        one = row.get(name)
        us = one.us if one is not None else None
        cells.append(_number(us) if us is not None or one is None else one.status)
        cells.append(_number(one.share_of_copy if one is not None else None))
        if index:
            cells.append(_ratio(us, row[names[0]].us if names[0] in row else None))
        if earlier:
            cells.append(_ratio(us, earlier.get((one.case, name)) if one is not None else None))
    return cells


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _ratio(us: float | None, other: float | None) -> str:
    return "-" if us is None or not other else f"{us / other:.2f}"


def not_timed(found: Iterable[Measurement]) -> list[str]:
    """A line for each implementation, status and reason: what was not timed, and on how many cases."""
    reasons: dict[tuple[str, str, str, str], list[Measurement]] = {}
    for one in found:
        if one.us is None:
            reasons.setdefault((one.op, one.implementation, one.status, one.detail), []).append(one)
    return [
        f"{status}: {name} on {len(ones)} case(s) of {op}, first {ones[0].case}: {detail}"
        for (op, name, status, detail), ones in reasons.items()
    ]


def conditions(device: str, rotation_mib: int | None) -> str:
    """What has to be the same for the times of two runs to be set against each other."""
    return device if rotation_mib is None else f"{device}, rotating over {rotation_mib} MiB"


def as_lines(
    found: Iterable[Measurement], environment: Mapping[str, str], rotation_mib: int | None
) -> list[str]:
    """A JSON object a line, each complete in itself. rotation_mib: None on a CPU."""
    return [
        json.dumps(
            {
                "format": FORMAT,
                **asdict(one),
                "share_of_copy": one.share_of_copy,
                "rotation_mib": rotation_mib,
                "environment": dict(environment),
            }
        )
        for one in found
    ]


def read_lines(path: Path) -> tuple[Earlier, set[str]]:
    """Times of an earlier run, and the `conditions` of it. ValueError for a file that is none."""
    found: dict[tuple[str, str], float] = {}
    measured_on: set[str] = set()
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line: Any = json.loads(text)
            if line["format"] != FORMAT:
                raise ValueError(f"format {line['format']!r}")
            measured_on.add(_conditions_of(line))
            if line["us"] is not None:
                found[line["case"], line["implementation"]] = float(line["us"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path}:{number}: expected a line of {FORMAT} ({error})") from None
    if not found:
        raise ValueError(f"{path}: has no times")
    return found, measured_on


def _conditions_of(line: Any) -> str:
    """`conditions` of a line. Early runs on a GPU do not say what they rotated over: it was the default."""
    device = line["environment"]["device"]
    if not isinstance(device, str):
        raise TypeError(f"device: expected a string, got {device!r}")
    early = ROTATION_BYTES >> 20 if line["device"] == "cuda" else None
    rotation_mib = line.get("rotation_mib", early)
    if rotation_mib is not None and (type(rotation_mib) is not int or rotation_mib < 1):
        raise TypeError(f"rotation_mib: expected a positive integer or null, got {rotation_mib!r}")
    return conditions(device, rotation_mib)


def plot(found: Sequence[Measurement], path: Path, subtitle: str) -> None:
    """Time against tokens, a panel a group, with the copy limit. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: group for name, group in groups(found).items() if any(one.us is not None for one in group)}
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure: Any
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 4 * rows), layout="constrained", squeeze=False
    )
    for axis, (name, group) in zip(axes.flat, shown.items(), strict=False):
        timed = [one for one in group if one.us is not None]
        limit = {one.params["tokens"]: one.copy_us for one in timed}
        axis.plot(list(limit), list(limit.values()), "--", color="0.4", label="device copy of as many bytes")
        for implementation in dict.fromkeys(one.implementation for one in timed):
            own = [one for one in timed if one.implementation == implementation]
            places = [one.params["tokens"] for one in own]
            axis.plot(places, [one.us for one in own], "o-", label=implementation)
            axis.fill_between(places, [one.low_us for one in own], [one.high_us for one in own], alpha=0.2)
        axis.set_title(name, fontsize="small")
        axis.set(xlabel="tokens", ylabel="microseconds", xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    for axis in list(axes.flat)[len(shown) :]:
        axis.remove()
    figure.suptitle(subtitle)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
