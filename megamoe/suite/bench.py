"""`megamoe bench`."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe.suite.commands import output

if TYPE_CHECKING:
    from megamoe.suite.measurement import Measurement
    from megamoe.suite.operation import Case, Implementation, Operation

DEFAULT_TOKENS = {"cuda": "1,8,64,512,2048,8192,32768", "cpu": "1,64,512"}


@click.command()
@click.option("--op", "pattern", default="prepare_*", show_default=True, metavar="GLOB", help="Operations.")
@click.option("--recipe", "recipes", metavar="GLOB", help="Recipes. Default: each operation's first.")
@click.option("--tokens", metavar="N,N...", help="Default: 1 to 32768 on a GPU, 1 to 512 on a CPU.")
@click.option("--hidden", default="7168", show_default=True, metavar="N,N...")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=V,V...", help="Other parameters, as JSON or words."
)
@click.option(
    "--impl", "names", multiple=True, metavar="NAME", help="Of the table, or package.module[:prefix]."
)
@click.option("--peer", "peers", multiple=True, metavar="NAME=module:callable",
              help="Somebody else's function with the operation's arguments, beside ours.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one.")
@click.option("--rounds", type=click.IntRange(min=2), help="Default: 15 on a GPU, 5 on a CPU.")
@click.option("--rotate", "rotation_mib", type=click.IntRange(min=1), metavar="MIB",
              help="On a GPU: what buffers that calls rotate over may hold. Default: 256.")  # fmt: skip
@click.option(
    "--against", type=click.Path(path_type=Path, dir_okay=False), help="JSON lines of an earlier run."
)
@click.option("--json", "json_target", metavar="FILE", help="Write JSON lines, to standard output for -.")
@click.option(
    "--plot", "plot_target", type=click.Path(path_type=Path, dir_okay=False), help="Needs matplotlib."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def bench(
    pattern: str, recipes: str | None, tokens: str | None, hidden: str, settings: tuple[str, ...],
    names: tuple[str, ...], peers: tuple[str, ...], device: str | None, rounds: int | None,
    rotation_mib: int | None, against: Path | None, json_target: str | None, plot_target: Path | None,
    quiet: bool,
) -> None:  # fmt: skip
    """Time implementations side by side, next to a device copy of the bytes that must move.

    Cases that differ in what --set says alone are timed in the same rounds too, up to four at a time in the
    order of the options, and share the memory of what is the same. Calls on a GPU rotate over as many sets of
    buffers as --rotate allows, from two to 20: by default more than the cache holds, unless a call is small.
    With few, they find their inputs there.

    Nothing is timed that does not compare equal on the very shape. On a GPU the implementations of the table
    and the peers that are installed run; on a CPU, where kernels are only interpreted, the references.

    Exit code: 0 if all was timed, 1 if something differs, 2 if nothing could be timed.
    """
    from megamoe.capability import probe
    from megamoe.suite import bench_report, measurement, session
    from megamoe.suite.environment import short_environment
    from megamoe.suite.timing import ROTATION_BYTES

    if device == "cuda" and not probe("cuda").ok:
        output.stop(f"--device cuda: {probe('cuda').reason}")
    device = device or session.default_device()
    if device == "cpu" and rotation_mib is not None:
        output.stop("--rotate: on a CPU calls rotate over two sets of buffers, whatever they hold")
    if device == "cuda" and rotation_mib is None:
        rotation_mib = ROTATION_BYTES >> 20
    if plot_target is not None and importlib.util.find_spec("matplotlib") is None:
        output.stop("--plot: needs matplotlib (pip install megamoe[report])")
    operations = _operations(pattern)
    axes = _axes(operations, tokens or DEFAULT_TOKENS[device], hidden, settings)
    chosen = _implementations(operations, names, peers, device)
    cases = _cases(operations, recipes, axes)
    varied = {setting.partition("=")[0] for setting in settings}
    earlier, earlier_conditions = _read_earlier(against)
    environment = short_environment(device)
    conditions = bench_report.conditions(environment["device"], rotation_mib)

    found: list[Measurement] = []
    with (
        output.progress(len(cases), "bench", show=not quiet and json_target != "-") as advance,
        _lines(json_target) as write,
    ):
        # Lines are written as soon as they are measured: an interrupted run leaves what it has.
        for group in measurement.together(cases, varied):
            measured = measurement.measure_cases(
                group, chosen[group[0].operation.name], device, rounds, (rotation_mib or 0) << 20
            )
            lines = bench_report.as_lines(measured, environment, rotation_mib)
            write("".join(f"{line}\n" for line in lines))
            found += measured
            advance(len(group))
    if json_target != "-":
        _print(found, device, environment, earlier, conditions, earlier_conditions)
    timed = any(one.us is not None for one in found)
    if plot_target is not None and timed:
        subtitle = f"megamoe bench, {environment['device']}, torch {environment['torch']}"
        bench_report.plot(found, plot_target, subtitle)
    if any(one.status in ("differs", "failed") for one in found):
        sys.exit(1)
    if not timed:
        output.stop("nothing was timed: every implementation was skipped")


@contextmanager
def _lines(target: str | None) -> Iterator[Callable[[str], object]]:
    """A function that writes to the file (standard output for ``-``, nowhere for None)."""
    if target is None:
        yield lambda text: None
    elif target == "-":
        yield lambda text: click.echo(text, nl=False)
    else:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", buffering=1) as stream:
            yield stream.write


def _print(
    found: Sequence[Measurement],
    device: str,
    environment: dict[str, str],
    earlier: Any,
    conditions: str,
    earlier_conditions: set[str],
) -> None:
    from megamoe.suite import bench_report

    screen = output.console()
    screen.print(
        f"megamoe bench on {environment['device']}, "
        f"torch {environment['torch']}, triton {environment['triton']}"
    )
    if device == "cpu":
        screen.print("On a CPU kernels are only interpreted: these are the references, by wall clock.")
    if earlier_conditions - {conditions}:
        listed = "; ".join(sorted(earlier_conditions))
        text = f"Measured on: {conditions}. The earlier run: {listed}"
        screen.print(text, style="yellow", markup=False, soft_wrap=True)
    for name, group in bench_report.groups(found).items():
        if any(one.us is not None for one in group):
            shown = [one for one in group if one.status != "skipped"]
            screen.print(bench_report.as_table(name, shown, earlier))
    for line in bench_report.not_timed(found):
        screen.print(line, style="dim" if line.startswith("skipped") else "red", markup=False, soft_wrap=True)
    equal = sum(one.bytes_compared for one in found if one.us is not None)
    screen.print(f"{equal:,} bytes compared equal before they were timed")


def _operations(pattern: str) -> list[Operation]:
    from megamoe.suite import table

    found = table.select(pattern)
    if not found:
        output.stop(f"no operation matches --op {pattern!r}")
    swept = [operation for operation in found if type(operation.defaults.get("tokens")) is int]
    if not swept:
        output.stop(
            f"--op {pattern!r}: {', '.join(row.name for row in found)} "
            "cannot be swept over a number of tokens"
        )
    return swept


def _axes(
    operations: Sequence[Operation], tokens: str, hidden: str, settings: Sequence[str]
) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for option, text, name in (("--tokens", tokens, "tokens"), ("--hidden", hidden, "hidden")):
        words = text.split(",")
        if not all(word.isdigit() and int(word) > 0 for word in words):
            output.stop(f"{option}: expected positive integers separated by commas, got {text!r}")
        axes[name] = [int(word) for word in words]
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not any(name in operation.defaults for operation in operations):
            known = sorted({name for operation in operations for name in operation.defaults})
            output.stop(
                f"--set {setting!r}: expected NAME=VALUE[,VALUE...] with a name of {', '.join(known)}"
            )
        if name in ("tokens", "hidden", "recipe"):
            output.stop(f"--set {setting!r}: expected another parameter; this one is --{name}")
        axes[name] = [_value(word) for word in text.split(",")]
        words = sorted({word for operation in operations for word in operation.words(name)})
        for value in axes[name]:
            if isinstance(value, str) and value not in words:
                expected = f"a word of {', '.join(words)}" if words else "no words"
                output.stop(
                    f"--set {setting!r}: expected {expected}, numbers, true, false or none, got {value!r}"
                )
    return axes


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return None if word == "none" else word


def _cases(operations: Sequence[Operation], recipes: str | None, axes: dict[str, list[Any]]) -> list[Case]:
    from megamoe.suite.measurement import cases_of

    found: list[Case] = []
    for operation in operations:
        matching = [name for name in operation.recipes if recipes and fnmatch.fnmatchcase(name, recipes)]
        if recipes is None or matching:
            found += cases_of(operation, matching, axes)
    if not found:
        output.stop(f"no recipe of {', '.join(row.name for row in operations)} matches --recipe {recipes!r}")
    return found


def _implementations(
    operations: Sequence[Operation], names: Sequence[str], peers: Sequence[str], device: str
) -> dict[str, list[Implementation]]:
    """What to time for each operation: what was asked for, or what runs at speed here; then the peers."""
    from megamoe.suite import table
    from megamoe.suite.operation import load
    from megamoe.suite.peers import PEERS, parse_peer

    extra = []
    for text in peers:
        try:
            extra.append(parse_peer(text))
            load(extra[-1].target)
        except (ValueError, ImportError, AttributeError) as error:
            output.stop(f"--peer {text!r}: {error}")
    for name in names:
        output.check_implementation(name, operations)
    found = {}
    for operation in operations:
        wanted = names or (
            ("reference",) if device == "cpu" else tuple(i.name for i in operation.implementations)
        )
        own = [one for name in wanted for one in table.select_implementations(operation, name, device)]
        if device == "cpu" and any("triton" in one.needs for one in own):
            output.stop("--impl: on a CPU kernels are only interpreted, which says nothing about their speed")
        known = () if names else PEERS.get(operation.name, ())
        found[operation.name] = [*own, *known, *extra]
        names_taken = [one.name for one in found[operation.name]]
        if twice := {name for name in names_taken if names_taken.count(name) > 1}:
            output.stop(
                f"--impl, --peer: expected one implementation a name for {operation.name}, "
                f"got several of {', '.join(sorted(twice))}"
            )
    return found


def _read_earlier(path: Path | None) -> tuple[Any, set[str]]:
    from megamoe.suite.bench_report import read_lines

    if path is None:
        return {}, set()
    try:
        return read_lines(path)
    except (OSError, ValueError) as error:
        output.stop(f"--against: {error}")
