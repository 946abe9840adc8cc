"""What the commands print: progress, tables, and why something cannot run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from megamoe.capability import probe
from megamoe.suite.operation import Implementation, Operation
from megamoe.suite.report import Line, skips_by_reason, summarize
from megamoe.suite.runner import Result
from megamoe.suite.table import implementation_names, is_module

_PLAIN_WIDTH = 132
_SHOWN_FAILURES = 20


def console(*, stderr: bool = False) -> Console:
    """A console; plain and wide where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _PLAIN_WIDTH, highlight=False)


def stop(message: str) -> NoReturn:
    """Usage or environment: exit code 2."""
    click.echo(f"megamoe: {message}", err=True)
    sys.exit(2)


def check_implementation(name: str | None, operations: Sequence[Operation]) -> None:
    """Stop unless --impl names an implementation of the table or an importable module with one of the
    functions."""
    if name is None:
        return
    if not is_module(name):
        if name not in implementation_names():
            stop(
                f"--impl {name!r}: expected one of {', '.join(implementation_names())}, "
                "or package.module[:prefix] with functions named like the operations"
            )
        return
    import importlib

    module, _, prefix = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        stop(f"--impl {name!r}: cannot import {module} ({error})")
    if not any(hasattr(loaded, prefix + operation.name) for operation in operations):
        wanted = ", ".join(prefix + operation.name for operation in operations[:4])
        stop(f"--impl {name!r}: {module} has none of the selected operations ({wanted}, ...)")


def check_required(names: Sequence[str]) -> None:
    """Stop if a required capability is not there at all."""
    for name in names:
        try:
            found = probe(name)
        except ValueError as error:
            stop(str(error))
        if not found.ok:
            stop(f"--require {name}: {found.reason}")


@contextmanager
def progress(total: int, what: str, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line every tenth elsewhere, on stderr."""
    screen = console(stderr=True)
    if not show:
        yield lambda done: None
        return
    if screen.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.advance(task, done)
        return
    finished = printed = 0

    def advance(done: int) -> None:
        nonlocal finished, printed
        finished += done
        if finished * 10 // max(total, 1) > printed:
            printed = finished * 10 // max(total, 1)
            screen.print(f"{what}: {finished} of {total} cases")

    yield advance


def print_results(
    results: Sequence[Result], seconds: float, title: str, commands: Sequence[str] = ()
) -> None:
    """The table, what differs, what did not run and why, and the totals."""
    screen = console()
    screen.print(_table(summarize(results), title))
    failures = [result for result in results if result.status == "failed"]
    for result in failures[:_SHOWN_FAILURES]:
        screen.print(
            f"[red]FAILED[/red] {result.case} ({result.implementation}, {result.device})", soft_wrap=True
        )
        for problem in result.problems():
            screen.print(f"  {problem}", markup=False, soft_wrap=True)
    if len(failures) > _SHOWN_FAILURES:
        screen.print(f"... and {len(failures) - _SHOWN_FAILURES} more")
    for command in commands:
        screen.print(f"  {command}", markup=False, soft_wrap=True)
    skips = skips_by_reason(results)
    if skips:
        screen.print("Not run:")
        for (op, implementation, reason), count in skips.items():
            screen.print(
                f"  {count:4} cases of {op} with {implementation}: {reason}", markup=False, soft_wrap=True
            )
    skipped = sum(skips.values())
    screen.print(
        f"{len(results) - skipped} cases, {sum(r.bytes_compared for r in results):,} bytes compared, "
        f"{sum(r.bytes_differing for r in results):,} differ; {len(failures)} failed, {skipped} skipped; "
        f"{seconds:.1f} s",
        style="red" if failures else "green",
    )


def _table(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name, justify in (
        ("operation", "left"),
        ("implementation", "left"),
        ("recipe", "left"),
        ("cases", "right"),
        ("bytes compared", "right"),
        ("seconds", "right"),
        ("result", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name == "operation")  # type: ignore[arg-type]
    previous = ""
    for line in lines:
        style = "red" if line.failed else "green" if line.passed else "dim"
        notes = f" ({line.skipped} skipped)" if line.skipped and line.passed else ""
        table.add_row(
            "" if line.op == previous else line.op,
            line.implementation,
            line.recipe,
            str(line.cases - line.skipped),
            f"{line.bytes_compared:,}",
            f"{line.seconds:.1f}",
            f"[{style}]{line.verdict}[/{style}]{notes}",
        )
        previous = line.op
    return table


def write_json(document: dict[str, Any], target: str) -> None:
    """To a file, or to standard output for ``-``."""
    text = json.dumps(document, indent=2)
    if target == "-":
        click.echo(text)
    else:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def needs_words(implementation: Implementation) -> str:
    """``name`` or ``name (needs a, b)``."""
    if not implementation.needs:
        return implementation.name
    return f"{implementation.name} (needs {', '.join(implementation.needs)})"
