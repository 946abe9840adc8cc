"""The command line. Exit codes: 0 all good, 1 a difference, 2 usage or environment."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import sys
from typing import Any

import click

# name -> (module, function); a command appears when its module exists
COMMANDS = {
    "verify": ("megamoe.suite.commands.verify", "verify"),
    "replay": ("megamoe.suite.commands.replay", "replay"),
    "list": ("megamoe.suite.commands.list", "list_operations"),
    "env": ("megamoe.suite.commands.env", "env"),
    "explain": ("megamoe.explain.cli", "explain"),
    "layout": ("megamoe.explain.cli", "layout"),
    "record": ("megamoe.suite.record", "record"),
    "bench": ("megamoe.suite.bench", "bench"),
}


class LazyGroup(click.Group):
    """Imports a subcommand's module only when the subcommand is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, function = COMMANDS[cmd_name]
        command: Any = getattr(importlib.import_module(module), function)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """A file that cannot be read or written is the environment's fault: a message and exit code 2."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has gone; click ends quietly
                raise
            click.echo(f"megamoe: {error}", err=True)
            sys.exit(2)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="megamoe")
def main() -> None:
    """Numerical validation of MegaMoE kernels, to the byte.

    Exit codes: 0 all good, 1 a difference, 2 usage or environment.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal without the characters of a drawing still shows it
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
