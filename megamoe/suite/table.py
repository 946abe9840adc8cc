"""The table: every operation that is checked, collected from megamoe.suite.rows."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import pkgutil
from dataclasses import fields

from megamoe.suite import rows
from megamoe.suite.contracts import CONTRACTS
from megamoe.suite.operation import Case, Implementation, Operation, Tier
from megamoe.suite.runner import is_module

__all__ = ["implementation_names", "is_module", "select", "select_cases", "select_implementations", "table"]

MAX_FIELDS = 15
assert len(fields(Operation)) <= MAX_FIELDS, "a row that needs more is more than one operation"


@functools.cache
def table() -> dict[str, Operation]:
    """Operation by name, in the order of the row modules' names."""
    found: dict[str, Operation] = {}
    modules = sorted(
        info.name for info in pkgutil.iter_modules(rows.__path__) if not info.name.startswith("_")
    )
    for module in modules:
        for operation in importlib.import_module(f"{rows.__name__}.{module}").ROWS:
            _check(operation)
            if operation.name in found:
                raise ValueError(f"two rows are called {operation.name}")
            found[operation.name] = operation
    return found


def select(pattern: str = "*") -> list[Operation]:
    """Rows whose name matches a glob, or one of several separated by commas."""
    patterns = pattern.split(",")
    return [row for row in table().values() if any(fnmatch.fnmatchcase(row.name, p) for p in patterns)]


def select_cases(pattern: str = "*", tier: Tier = "default") -> list[Case]:
    return [case for operation in select(pattern) for case in operation.cases(tier)]


def select_implementations(operation: Operation, name: str | None, device: str) -> list[Implementation]:
    """What to compare: the row's implementations, or the one called ``name``.

    The reference is an implementation too: on a GPU it is compared with itself on the CPU. ``package.module``
    or ``package.module:prefix_`` names somebody's own functions: ``prefix_`` + the operation's name in that
    module.
    """
    reference = Implementation("reference", operation.reference, ("cuda",) if device == "cuda" else ())
    if name is None:
        return [*operation.implementations, *([reference] if device == "cuda" else [])]
    if is_module(name):
        module, _, prefix = name.partition(":")
        return [Implementation(name, f"{module}:{prefix}{operation.name}")]
    return [row for row in (*operation.implementations, reference) if row.name == name]


def implementation_names() -> list[str]:
    """Every name that a row uses, and "reference"."""
    names = {row.name for operation in table().values() for row in operation.implementations}
    return sorted(names | {"reference"})


def _check(operation: Operation) -> None:
    if operation.contract not in CONTRACTS:
        raise ValueError(f"{operation.name}: unknown contract {operation.contract!r}")
    if (operation.contract == "bitwise") != (operation.because == ""):
        raise ValueError(f"{operation.name}: a contract other than bitwise, and only that, says because=...")
    if operation.recipes and "recipe" not in operation.defaults:
        raise ValueError(f"{operation.name}: has recipes but no parameter 'recipe'")
