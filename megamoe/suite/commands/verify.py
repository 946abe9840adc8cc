"""`megamoe verify`."""

from __future__ import annotations

import fnmatch
import sys
import time
from pathlib import Path

import click

from megamoe.suite.commands import output
from megamoe.suite.operation import TIERS, Tier


@click.command()
@click.option(
    "--impl", help="An implementation of the table, or package.module[:prefix] with your own functions."
)
@click.option("--op", "pattern", default="*", metavar="GLOB", help="Operations, e.g. 'prepare_*' or 'a,b'.")
@click.option("--case", "case_pattern", default="*", metavar="GLOB", help="Cases by id.")
@click.option("--tier", type=click.Choice(TIERS), default="default", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one.")
@click.option(
    "--require", "required", multiple=True, metavar="CAP", help="A skip for lack of CAP is a failure."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Processes. Default: one a core, at most 8; half of that on a GPU.",
)
@click.option(
    "--bundle-dir", type=click.Path(path_type=Path, file_okay=False), help="Write failures here as bundles."
)
@click.option(
    "--json", "json_target", metavar="FILE", help="Write the results as JSON, to standard output for -."
)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the results as one page."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
def verify(
    impl: str | None, pattern: str, case_pattern: str, tier: Tier, device: str | None, required: tuple[str,
    ...], jobs: int | None, bundle_dir: Path | None, json_target: str | None, html: Path | None, quiet: bool,
) -> None:  # fmt: skip
    """Compare implementations with the reference, byte for byte.

    Exit code: 0 if every byte agrees, 1 if any differs, 2 if nothing could run.
    """
    from megamoe.capability import probe
    from megamoe.suite import session, table
    from megamoe.suite.environment import short_environment
    from megamoe.suite.report import as_html, as_json
    from megamoe.suite.report import require as require_results
    from megamoe.suite.runner import prepare_process

    operations = table.select(pattern)
    cases = [case for case in table.select_cases(pattern, tier) if fnmatch.fnmatchcase(case.id, case_pattern)]
    if not cases:
        output.stop(f"no case matches --op {pattern!r} --case {case_pattern!r} in tier {tier}")
    output.check_required(required)
    if device == "cuda" and not probe("cuda").ok:
        output.stop(f"--device cuda: {probe('cuda').reason}")
    device = device or session.default_device()
    prepare_process(device, impl)
    output.check_implementation(impl, operations)

    started = time.perf_counter()
    jobs = jobs or session.default_jobs(device, len(cases))
    with output.progress(len(cases), "verify", show=not quiet and json_target != "-") as advance:
        results = session.run_cases(cases, impl, device, jobs, bundle_dir, advance)
    seconds = time.perf_counter() - started
    results = require_results(results, required)
    failed = any(result.status == "failed" for result in results)

    environment = short_environment(device)
    title = f"megamoe verify, tier {tier}, {environment['device']}, torch {environment['torch']}"
    if json_target != "-":
        commands = _explain_commands(bundle_dir) if failed else []
        output.print_results(results, seconds, title, commands)
    if json_target:
        document = as_json(
            results, tier=tier, device=device, environment=environment, seconds=round(seconds, 3)
        )
        output.write_json(document, json_target)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(as_html(results, title, environment), encoding="utf-8")
    if failed:
        sys.exit(1)
    if not any(result.status == "passed" for result in results):
        output.stop("nothing ran: every case was skipped")


def _explain_commands(bundle_dir: Path | None) -> list[str]:
    if bundle_dir is None:
        return ["Write the failures as bundles with --bundle-dir DIR, and explain them with megamoe explain."]
    actual = sorted(bundle_dir.glob("*.actual.safetensors"))
    shown = actual[:3]
    return [f"megamoe explain {str(path).replace('.actual.', '.expected.')} {path}" for path in shown]
