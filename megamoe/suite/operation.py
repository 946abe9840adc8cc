"""What a row of the table is. docs/adding_an_operation.md shows how to write one."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from megamoe import bundle
from megamoe.suite.buffers import BufferSpec

Tier = Literal["smoke", "default", "full"]
TIERS: tuple[Tier, ...] = ("smoke", "default", "full")
Params = dict[str, Any]


@dataclass(frozen=True)
class Implementation:
    """One thing to compare with the reference.

    target: "module:function", imported when first called. needs: capabilities (megamoe.capability); with
    "cuda" or anything that implies it among them, the implementation runs on that device only. supports: says
    of a case's parameters why the implementation does not take them, or None if it does.
    """

    name: str
    target: str
    needs: tuple[str, ...] = ()
    supports: Callable[[Params], str | None] | None = None


@dataclass(frozen=True)
class Output:
    """layout: name of the output's layout in reference.layouts. padding: what holds for bytes that no element
    of the output owns: "kept" (a caller's buffer: they must not change), "compared" (returned memory: equal
    to the reference's) or "undefined"."""

    layout: str
    padding: Literal["kept", "compared", "undefined"] = "kept"


@dataclass(frozen=True)
class Sweep:
    """Cases as data: the cartesian product of ``axes`` over the operation's defaults, from ``tier``
    upwards."""

    tier: Tier
    axes: Mapping[str, tuple[Any, ...]]


def _sweep(tier: Tier, **axes: Any) -> Sweep:
    """A sweep whose axes may be single values; an axis of several values is a tuple."""
    return Sweep(tier, {name: axis if isinstance(axis, tuple) else (axis,) for name, axis in axes.items()})


smoke = functools.partial(_sweep, "smoke")
default = functools.partial(_sweep, "default")
full = functools.partial(_sweep, "full")


@dataclass(frozen=True)
class Call:
    """One call, ready to be made on any device and any number of times.

    arguments: keyword arguments that are only read; tensors are copied for each run and must come back
    unchanged. buffers: outputs that the call writes into, passed under their names. bind: builds the keyword
    arguments from arguments and buffers where they are not simply merged (an output inside a state object,
    say). returns: names for the tensors that the call returns (one, a tuple in this order, or a dict with
    these keys).
    """

    arguments: Mapping[str, Any]
    buffers: Mapping[str, BufferSpec] = field(default_factory=dict)
    bind: Callable[[dict[str, Any], dict[str, Tensor]], dict[str, Any]] | None = None
    returns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    name: of the function, the same on both sides. reference: its "module:function". implementations: what is
    compared. outputs: by name. recipes: names in reference.recipes, the values of the parameter "recipe".
    defaults: value of every parameter. sweeps: which cases exist in which tier. inputs: (params, generator)
    -> tensors by name, as recorded in bundles. call: (params, inputs) -> the call. contract: "bitwise", or
    another comparison of megamoe.suite.contracts and then ``because`` says why. golden: rewrites a recorded
    case into this row's params and inputs; None if the recorded names are the row's own. source: where the
    arithmetic comes from.
    """

    name: str
    reference: str
    implementations: tuple[Implementation, ...]
    outputs: Mapping[str, Output]
    defaults: Params
    sweeps: tuple[Sweep, ...]
    inputs: Callable[[Params, np.random.Generator], dict[str, Tensor]]
    call: Callable[[Params, dict[str, Tensor]], Call]
    source: str
    recipes: tuple[str, ...] = ()
    contract: str = "bitwise"
    because: str = ""
    golden: Callable[[bundle.Case], tuple[Params, dict[str, Tensor]]] | None = None

    def cases(self, tier: Tier = "default") -> list[Case]:
        """The cases of a tier, which includes the tiers below it; without duplicates, in a stable order."""
        found: dict[str, Case] = {}
        for sweep in self.sweeps:
            if TIERS.index(sweep.tier) <= TIERS.index(tier):
                for params in self._product(sweep):
                    case = Case(self, params)
                    found.setdefault(case.id, case)
        return list(found.values())

    def words(self, name: str) -> set[str]:
        """The words that some case of the row has for a parameter."""
        values = [
            self.defaults.get(name),
            *(one for sweep in self.sweeps for one in sweep.axes.get(name, ())),
        ]
        return {one for one in values if isinstance(one, str)}

    def _product(self, sweep: Sweep) -> Iterator[Params]:
        unknown = set(sweep.axes) - set(self.defaults)
        if unknown:
            raise ValueError(f"{self.name}: a sweep names unknown parameters {sorted(unknown)}")
        for values in itertools.product(*sweep.axes.values()):
            yield self.defaults | dict(zip(sweep.axes, values, strict=True))


@dataclass(frozen=True)
class Case:
    """One case of one operation. Equal parameters give equal ids, inputs and poison, on every machine."""

    operation: Operation
    params: Params

    @property
    def id(self) -> str:
        """``operation.recipe.param=value...``, naming the parameters that differ from the row's defaults."""
        return (
            ".".join([self.operation.name, *self.short_id.split(".")])
            if self.short_id
            else self.operation.name
        )

    @property
    def short_id(self) -> str:
        words = [str(self.params["recipe"])] if "recipe" in self.params else []
        for name, default in self.operation.defaults.items():
            value = self.params[name]
            if name != "recipe" and _plain(value) != _plain(default):
                words.append(_word(name, value))
        return ".".join(words)

    @property
    def recipe(self) -> str:
        return str(self.params.get("recipe", ""))

    @property
    def seed(self) -> int:
        return stable_seed(self.id)

    def inputs(self) -> dict[str, Tensor]:
        return self.operation.inputs(self.params, np.random.default_rng(self.seed))


def stable_seed(text: str) -> int:
    """A seed that is the same in every process and every Python, unlike hash()."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def load(target: str) -> Callable[..., Any]:
    """The function of "module:function". ImportError or AttributeError say what is missing."""
    module, _, function = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    return found


def _plain(value: Any) -> Any:
    """A tuple is what JSON makes of it, a list."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _word(name: str, value: Any) -> str:
    if value is True:
        return name
    if value is None or value is False:
        return f"no_{name}"
    if name == "values":
        return str(value)
    if isinstance(value, str):
        return f"{name}_{value}"
    if isinstance(value, (list, tuple)):
        return name + "x".join(map(str, value))
    return f"{name}{value}"
