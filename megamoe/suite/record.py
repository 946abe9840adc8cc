"""``megamoe record``: runs an implementation on rows of the table and writes bundles of what it produced.

A bundle travels: whoever has the hardware records, anybody replays (``megamoe replay FILE``) and explains.
Cases that differ from the reference are recorded like the others: they are what one wants to look at.
"""

from __future__ import annotations

import fnmatch
import sys
import time
from pathlib import Path

import click

from megamoe.suite.commands import output
from megamoe.suite.operation import TIERS, Tier

# Megabytes after which another file is begun: a file of this size is easily sent.
FILE_MB = 256


@click.command()
@click.option("--impl", required=True, help="Implementations of the table (a,b), or package.module[:prefix].")
@click.option("--op", "pattern", default="*", metavar="GLOB", help="Operations, e.g. 'prepare_*' or 'a,b'.")
@click.option("--case", "case_pattern", default="*", metavar="GLOB", help="Cases by id.")
@click.option("--tier", type=click.Choice(TIERS), default="default", show_default=True)
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The bundle to write."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one.")
@click.option("--require", "required", multiple=True, metavar="CAP", help="Stop if CAP is not there.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs that must agree."
)
@click.option(
    "--file-mb", type=click.IntRange(min=1), default=FILE_MB, show_default=True, help="Size of a file."
)
@click.option("--isolate/--no-isolate", default=None, help="A process a kernel. Default: on cuda.")
@click.option("--json", "json_target", metavar="FILE", help="Write the results as JSON.")
def record(
    impl: str, pattern: str, case_pattern: str, tier: Tier, out: Path, device: str | None,
    required: tuple[str, ...], repeat: int, file_mb: int, isolate: bool | None, json_target: str | None,
) -> None:  # fmt: skip
    """Run an implementation here and write bundles of what it produced.

    Exit code: 0 if every recorded case equals the reference, 1 if one differs, fails or is not repeatable (it
    is in the bundle if it produced outputs), 2 if nothing could be recorded.
    """
    from megamoe.capability import probe
    from megamoe.suite import recording, session, table
    from megamoe.suite.environment import short_environment
    from megamoe.suite.report import as_json
    from megamoe.suite.runner import prepare_process

    operations = table.select(pattern)
    if not operations:
        output.stop(f"no operation matches --op {pattern!r}")
    output.check_required(required)
    names = list(dict.fromkeys(impl.split(",")))
    for name in names:
        output.check_implementation(name, operations)
    if device == "cuda" and not probe("cuda").ok:
        output.stop(f"--device cuda: {probe('cuda').reason}")
    device = device or session.default_device()
    prepare_process(device)
    pairs = [
        (case, implementation)
        for operation in operations
        for name in names
        for implementation in table.select_implementations(operation, name, device)
        for case in operation.cases(tier)
        if fnmatch.fnmatchcase(case.id, case_pattern)
    ]
    if not pairs:
        output.stop(
            f"no case matches --op {pattern!r} --case {case_pattern!r} with --impl {impl!r} in tier {tier}"
        )

    environment = short_environment(device)
    producer = ", ".join(map(recording.describe_producer, names))
    writer = recording.BundleWriter(out, producer, environment["device"], file_mb << 20)
    started = time.perf_counter()
    groups = recording.groups_of(pairs, device)
    if (device == "cuda" and len(groups) > 1) if isolate is None else isolate:
        arguments = [
            "--impl",
            impl,
            "--case",
            case_pattern,
            "--tier",
            tier,
            "--device",
            device,
            "--repeat",
            str(repeat),
        ]
        # What cannot run here needs no process to say so.
        idle = [pair for pair in pairs if pair[0].operation.name in _names(groups, runnable=False)]
        documents = [as_json(recording.record_cases(idle, writer, device))] if idle else []
        running = [names for names, runnable in groups if runnable]
        documents += recording.record_in_processes(running, writer, arguments, click.echo)
        totals = {
            key: sum(document.get(key, 0) for document in documents)
            for key in ("cases", "passed", "failed", "skipped", "bytes_compared", "bytes_differing")
        }
        document = totals | {"operations": documents}
    else:
        with output.progress(len(pairs), "record", show=json_target != "-") as advance:
            results = recording.record_cases(pairs, writer, device, repeat, advance)
        document = as_json(results)
        title = f"megamoe record, tier {tier}, {environment['device']}, torch {environment['torch']}"
        if json_target != "-":
            output.print_results(results, time.perf_counter() - started, title)
    seconds = round(time.perf_counter() - started, 1)
    document |= {
        "producer": producer,
        "environment": environment,
        "tier": tier,
        "seconds": seconds,
        "files": writer.files,
    }
    if json_target:
        output.write_json(document, json_target)
    if json_target != "-":
        for name in writer.files:
            click.echo(f"wrote {name} ({Path(name).stat().st_size:,} bytes)")
        click.echo(
            f"{document['passed']} cases equal the reference, {document['failed']} do not, "
            f"{document['skipped']} skipped; "
            f"{document['bytes_differing']:,} of {document['bytes_compared']:,} bytes differ; {seconds} s"
        )
    if document["failed"]:
        sys.exit(1)
    if not writer.files:
        output.stop("nothing was recorded: every case was skipped")


def _names(groups: list[tuple[str, bool]], *, runnable: bool) -> set[str]:
    return {name for names, runs in groups if runs == runnable for name in names.split(",")}
