"""`megamoe replay`."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megamoe.suite.commands import output

if TYPE_CHECKING:
    from megamoe.bundle import Case
    from megamoe.suite.runner import Result


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--impl", default="reference", show_default=True, help="An implementation, or package.module[:prefix]."
)
@click.option("--case", "pattern", default="*", metavar="GLOB", help="Cases by name.")
@click.option("--op", "operation", default="*", metavar="GLOB", help="Cases by operation.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Default: cpu for the reference, else cuda if there is one.",
)
@click.option(
    "--require", "required", multiple=True, metavar="CAP", help="A skip for lack of CAP is a failure."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def replay(
    bundles: tuple[Path, ...], impl: str, pattern: str, operation: str, device: str | None,
    required: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Run recorded cases again and compare with what was recorded.

    Exit code: 0 if every byte agrees, 1 if any differs, 2 if a bundle or a case cannot be run.
    """
    from megamoe import bundle
    from megamoe.suite import report, session, table
    from megamoe.suite.replay import CannotReplay
    from megamoe.suite.runner import prepare_process

    cases = []
    for path in bundles:
        try:
            cases += [
                case
                for case in bundle.read_bundle(path).cases
                if fnmatch.fnmatchcase(case.case, pattern) and fnmatch.fnmatchcase(case.op, operation)
            ]
        except (OSError, bundle.BundleError) as error:
            output.stop(str(error))
    if not cases:
        output.stop(f"no case matches --case {pattern!r} --op {operation!r}")
    output.check_required(required)
    device = device or ("cpu" if impl == "reference" else session.default_device())
    prepare_process(device, impl)
    operations = [row for row in table.table().values() if any(case.op == row.name for case in cases)]
    if not operations:
        output.stop(f"the table has none of the operations {sorted({case.op for case in cases})}")
    output.check_implementation(impl, operations)

    started = time.perf_counter()
    results: list[Result] = []
    refused: list[str] = []
    with output.progress(len(cases), "replay", show=not as_json) as advance:
        for case in cases:
            try:
                results += _replay(case, impl, device)
            except CannotReplay as error:
                refused.append(str(error))
            advance(1)
    results = report.require(results, required)
    if as_json:
        output.write_json(report.as_json(results, device=device, refused=refused), "-")
    else:
        title = f"megamoe replay with {impl} on {device}"
        output.print_results(results, time.perf_counter() - started, title)
        for line in _unrecorded(results):
            click.echo(line)
    if any(result.status == "failed" for result in results):
        sys.exit(1)
    if refused:
        output.stop(f"{len(refused)} of {len(cases)} cases cannot be run; first: {refused[0]}")
    if not any(result.status == "passed" for result in results):
        output.stop("nothing ran: every case was skipped")


def _unrecorded(results: list[Result]) -> list[str]:
    """A line an operation: its outputs that were produced but are in no recording, and in how many cases."""
    found = Counter((result.op, name) for result in results for name in result.unrecorded)
    return [f"not recorded, not compared: {name} of {op} in {n} case(s)" for (op, name), n in found.items()]


def _replay(case: Case, impl: str, device: str) -> list[Result]:
    from megamoe.suite.replay import CannotReplay, replay_case, restore
    from megamoe.suite.runner import Result, Skip
    from megamoe.suite.table import select_implementations

    operation, _, _ = restore(case)
    found = select_implementations(operation, impl, device)
    if not found:
        skip = Skip("not provided", f"{operation.name} has no implementation {impl}")
        return [Result(case.case, case.op, "", impl, device, "skipped", skip=skip)]
    if len(found) > 1:
        raise CannotReplay(f"{operation.name} has several implementations called {impl}")
    return [replay_case(case, found[0], device).without_tensors()]
