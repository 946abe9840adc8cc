"""`megamoe list`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from megamoe.suite.commands import output
from megamoe.suite.operation import TIERS, Operation


@click.command("list")
@click.option("--op", "pattern", default="*", metavar="GLOB")
@click.option("--cases", "show_cases", is_flag=True, help="List the ids of the cases.")
@click.option(
    "--tier", type=click.Choice(TIERS), default="default", show_default=True, help="Tier of --cases."
)
@click.option("--markdown", is_flag=True, help="The table of docs/operations.md.")
@click.option("--json", "as_json", is_flag=True)
def list_operations(pattern: str, show_cases: bool, tier: str, markdown: bool, as_json: bool) -> None:
    """The operations: what implements them, recipes, outputs, number of cases, contract."""
    from rich.table import Table

    from megamoe.suite.operation import Tier
    from megamoe.suite.table import select

    operations = select(pattern)
    if not operations:
        output.stop(f"no operation matches {pattern!r}")
    chosen: Tier = tier  # type: ignore[assignment]  # click has checked it
    if as_json:
        output.write_json(
            {
                "operations": [
                    {
                        "name": row.name,
                        "reference": row.reference,
                        "implementations": [
                            {"name": i.name, "target": i.target, "needs": list(i.needs)}
                            for i in row.implementations
                        ],
                        "recipes": list(row.recipes),
                        "outputs": {
                            name: {"layout": found.layout, "padding": found.padding}
                            for name, found in row.outputs.items()
                        },
                        "cases": {name: len(row.cases(name)) for name in TIERS},
                        "contract": row.contract,
                        "because": row.because,
                        "source": row.source,
                        **({"ids": [case.id for case in row.cases(chosen)]} if show_cases else {}),
                    }
                    for row in operations
                ]
            },
            "-",
        )
        return
    if markdown:
        click.echo(markdown_table(operations), nl=False)
        return
    if show_cases:
        for row in operations:
            for case in row.cases(chosen):
                click.echo(case.id)
        return
    table = Table(caption=f"cases: {'/'.join(TIERS)}", caption_justify="left")
    table.add_column("operation", no_wrap=True)
    for heading in ("implementations", "recipes", "outputs", "cases", "contract", "source"):
        table.add_column(heading, overflow="fold")
    for row in operations:
        table.add_row(
            row.name,
            "\n".join(output.needs_words(implementation) for implementation in row.implementations),
            "\n".join(row.recipes),
            ", ".join(row.outputs),
            "/".join(str(len(row.cases(name))) for name in TIERS),
            row.contract + (f"\nbecause {row.because}" if row.because else ""),
            row.source,
            end_section=True,
        )
    output.console().print(table)


def markdown_table(operations: Sequence[Operation]) -> str:
    """What the table says of its operations, without the number of cases."""
    lines = [
        "# Operations",
        "",
        "Written by `megamoe list --markdown`. Number of cases: `megamoe list`.",
        "",
        "| operation | implementations | recipes | outputs: layouts | contract | source |",
        "|---|---|---|---|---|---|",
    ]
    for row in operations:
        words = [output.needs_words(implementation) for implementation in row.implementations]
        by_layout: dict[str, list[str]] = {}
        for name, found in row.outputs.items():
            by_layout.setdefault(found.layout, []).append(name)
        layouts = [f"{', '.join(names)}: {layout}" for layout, names in by_layout.items()]
        contract = row.contract + (f", because {row.because}" if row.because else "")
        cells = (
            f"`{row.name}`",
            "; ".join(words),
            ", ".join(row.recipes),
            "; ".join(layouts),
            contract,
            row.source,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
