"""What the documentation tells people to type exists, and so does what it links to."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from megamoe.cli import main
from megamoe.suite.commands.list import markdown_table
from megamoe.suite.operation import Operation, load
from megamoe.suite.table import table

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _commands():
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:^|&& |; )(?:\$ )?(megamoe [a-z]+(?: .*)?)$", line.strip())
                if found:
                    yield pytest.param(
                        found[1].split("  #")[0].split(" && ")[0], id=f"{page.name}:{found[1][:60]}"
                    )


@pytest.mark.parametrize("line", list(_commands()))
def test_command_parses(line):
    """The subcommand exists and has every option; values and arguments are the reader's."""
    words = [re.sub(r"[\[\]]", "", word) for word in shlex.split(line)][1:]
    context = click.Context(main)
    command = main.get_command(context, words[0])
    assert command is not None, words[0]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words[1:]:
        if word.startswith("-") and word != "-":
            assert word.split("=")[0] in options | {"--help", "-h"}, word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """`dir/file.py` in a page is a file of the project, or says that it is an example."""
    text = page.read_text(encoding="utf-8")
    for path in re.findall(
        r"`((?:megamoe|reference|tests|docs|benchmarks)/[\w./]+\.(?:py|md|json|safetensors))`", text
    ):
        assert (ROOT / path).exists(), path


def test_the_readme_has_what_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((torch, tests),) = re.findall(
        r'^pip install (torch==\S+) "\.\[test\]" && (pytest.*)$', readme, re.MULTILINE
    )
    assert f"\n{tests} " in ci
    assert f'"{torch}"' in ci


def test_the_table_of_operations_is_current():
    """`megamoe list --markdown > docs/operations.md` writes it."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert page == markdown_table(list(table().values()))


def test_the_example_row_has_the_fields_of_a_row():
    text = (ROOT / "docs" / "adding_an_operation.md").read_text(encoding="utf-8")
    block = next(block for block in BLOCK.findall(text) if "Operation(" in block)
    named = set(re.findall(r"^    (\w+)=", block, re.MULTILINE))
    assert named <= set(Operation.__dataclass_fields__)
    assert load("megamoe.suite.operation:smoke")
