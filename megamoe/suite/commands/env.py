"""`megamoe env`."""

from __future__ import annotations

import click

from megamoe.suite.commands import output


@click.command()
@click.option("--json", "as_json", is_flag=True)
def env(as_json: bool) -> None:
    """Versions, devices, and what this machine can run, with reasons."""
    from rich.table import Table

    from megamoe.suite.environment import environment

    found = environment()
    if as_json:
        output.write_json(found, "-")
        return
    screen = output.console()
    for name, version in found["versions"].items():
        screen.print(f"{name:14} {version}")
    for device in found["devices"]:
        screen.print(device)
    table = Table("capability", "", "reason")
    for name, answer in found["capabilities"].items():
        table.add_row(name, "[green]yes[/green]" if answer["ok"] else "[dim]no[/dim]", answer["reason"])
    screen.print(table)
