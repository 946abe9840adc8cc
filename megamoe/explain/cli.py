"""`megamoe explain` and `megamoe layout`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click


def _params(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name or not text:
            raise click.BadParameter(f"expected NAME=VALUE, got {value!r}")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


@click.command()
@click.argument("expected", type=click.Path(path_type=Path))
@click.argument("actual", type=click.Path(path_type=Path))
@click.option("--op", help="Operation in the table (a bundle says its own).")
@click.option("--output", help="Compare only this output or tensor.")
@click.option("--layout", "layout_name", help="Layout of the tensor, from `megamoe layout`.")
@click.option(
    "--param",
    "params",
    multiple=True,
    callback=_params,
    metavar="NAME=VALUE",
    help="A size of the layout or a parameter of the operation.",
)
@click.option("--case", default="*", metavar="GLOB", help="Cases of a bundle.")
@click.option("--padding", type=click.Choice(["undefined"]), help="Bytes between elements mean nothing.")
@click.option(
    "--code",
    type=click.Choice(["ue8m0", "ue4m3", "e4m3fn", "e2m1"]),
    help="Format of the codes, if the layout's usual one is wrong.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page that needs no network.",
)
def explain(
    expected: Path,
    actual: Path,
    op: str | None,
    output: str | None,
    layout_name: str | None,
    params: dict[str, Any],
    case: str,
    padding: str | None,
    code: str | None,
    as_json: bool,
    html_path: Path | None,
) -> None:
    """Where two packed tensors differ, and which single change explains it.

    EXPECTED and ACTUAL are bundles (then the arithmetic is replayed from the recorded inputs), or
    .safetensors, .pt or .npy files. Exit code: 0 if every byte agrees, 1 if any differs, 2 if they cannot be
    compared.
    """
    from dataclasses import replace

    from megamoe.explain.engine import explain_cases
    from megamoe.explain.files import InputError, Request, load_pair

    request = Request(op, output, layout_name, params, case, padding, code)
    try:
        loaded = load_pair(expected, actual, request)
        command = shlex.join(["megamoe", *sys.argv[1:]]) if sys.argv[1:2] == ["explain"] else ""
        report = explain_cases(loaded.cases, replay=command)
        report = replace(report, findings=(*loaded.findings, *report.findings))
        if html_path is not None:
            html_path.parent.mkdir(parents=True, exist_ok=True)
            html_path.write_text(report.html(), encoding="utf-8")
    except (InputError, OSError) as error:
        click.echo(f"megamoe explain: {error}", err=True)
        sys.exit(2)
    except ValueError as error:  # a bundle that contradicts itself, an operation without its parameters
        click.echo(f"megamoe explain: {error}", err=True)
        sys.exit(2)
    click.echo(json.dumps(report.to_json()) if as_json else report.text())
    sys.exit(0 if report.equal else 1)


@click.command()
@click.argument("name", required=False)
@click.option("--shape", help="Logical sizes in the layout's order, e.g. 200x8.")
@click.option(
    "--param",
    "params",
    multiple=True,
    callback=_params,
    metavar="NAME=VALUE",
    help="A size by name, e.g. block_m=64.",
)
@click.option(
    "--svg",
    "svg_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw into this file instead of the terminal.",
)
@click.option("--from", "first_row", type=int, default=0, help="First row of memory to draw.")
@click.option("--rows", type=int, default=32, help="Rows of memory to draw.")
@click.option(
    "--memory", is_flag=True, help="Draw lines of memory, alignment included, instead of the tensor's rows."
)
@click.option("--json", "as_json", is_flag=True, help="Print the layout as JSON.")
def layout(
    name: str | None,
    shape: str | None,
    params: dict[str, Any],
    svg_path: Path | None,
    first_row: int,
    rows: int,
    memory: bool,
    as_json: bool,
) -> None:
    """Draws a layout: which byte holds which element, what is padding. Without a name, lists them."""
    from megamoe.explain.draw import draw_svg, draw_terminal, list_layouts
    from megamoe.explain.files import InputError
    from megamoe.explain.sizes import layout_of_shape

    if name is None and (shape or params or svg_path or first_row or memory):
        raise click.UsageError(
            "expected the NAME of a layout beside the options; without one, they are listed"
        )
    try:
        if name is None:
            list_layouts(as_json)
            return
        found = layout_of_shape(name, shape, params)
        if as_json:
            click.echo(json.dumps(found.describe()))
        elif svg_path is not None:
            svg_path.parent.mkdir(parents=True, exist_ok=True)
            svg_path.write_text(draw_svg(found, first_row, rows, memory=memory), encoding="utf-8")
            click.echo(str(svg_path))
        else:
            draw_terminal(found, first_row, rows, memory=memory)
    except (InputError, OSError) as error:
        click.echo(f"megamoe layout: {error}", err=True)
        sys.exit(2)
