"""Staging kernels of several checkouts, side by side in one process.

    git worktree add ../other some-branch
    python benchmarks/staging_versions.py . ../other [--operation fp8] [--tokens 1 8 ...] [--hidden 7168 4096]

Two runs of one version differ by up to 3% at few tokens: buffers lie elsewhere, or it is another card. Here
versions take turns within every round (`megamoe.suite.timing`), with inputs, calls and clock of the first
checkout. Nothing is timed unless all of them write the same bytes. Microseconds per call, and the difference
to the first version without EPLB, so that two rows of "record" say which mapping costs less.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE = "megamoe"
Tensors = dict[str, torch.Tensor]
Made = dict[str, Sequence[Callable[[], object]]]


@dataclass(frozen=True)
class Version:
    """The package of one checkout: its modules, and this directory's `staging_kernels` on top of them."""

    name: str
    modules: dict[str, ModuleType]

    @contextmanager
    def imported(self) -> Iterator[None]:
        """What the package imports while it runs is its own."""
        kept = _package_modules()
        _replace(kept, self.modules)
        try:
            yield
        finally:
            _replace(self.modules, kept)

    def call(self, function: Callable[[], object]) -> None:
        with self.imported():
            function()


def _package_modules() -> dict[str, ModuleType]:
    names = [n for n in sys.modules if n in (PACKAGE, "staging_kernels") or n.startswith(f"{PACKAGE}.")]
    return {name: sys.modules[name] for name in names}


def _replace(old: dict[str, ModuleType], new: dict[str, ModuleType]) -> None:
    for name in old:
        sys.modules.pop(name, None)
    sys.modules.update(new)


def load_version(directory: Path) -> Version:
    """The package of a checkout, imported beside those that are there. ValueError where it holds none."""
    if not (directory / PACKAGE / "__init__.py").is_file():
        raise ValueError(f"{directory}: expected a checkout with {PACKAGE}/__init__.py in it")
    kept = _package_modules()
    _replace(kept, {})
    sys.path.insert(0, str(directory.resolve()))
    try:
        import staging_kernels  # noqa: F401

        from megamoe.kernels import fp8_groups, nvfp4, routing  # noqa: F401

        found = _package_modules()
    finally:
        sys.path.pop(0)
        _replace(_package_modules(), kept)
    return Version(str(directory), found)


def calls(
    versions: Sequence[Version], operation: str, sets: Sequence[Tensors], states: Sequence[dict[str, Any]]
) -> Made:
    """Calls on the same buffers and EPLB states (by kind) of the sets, by version and kind."""
    found: Made = {}
    for index, version in enumerate(versions, 1):
        scripts: Any = version.modules["staging_kernels"]
        function = scripts.FUNCTIONS[operation]
        for kind in states[0]:
            found[f"{index} {version.name}, {kind}"] = [
                partial(version.call, partial(function, **buffers, **state[kind]))
                for buffers, state in zip(sets, states, strict=True)
            ]
    return found


def layer_states(version: Version, operation: str, count: int) -> list[dict[str, Any]]:
    """For each of `count` sets the EPLB argument of a call by kind, which all versions share."""
    scripts: Any = version.modules["staging_kernels"]
    mapped = operation in scripts.STYLES
    return [
        {"no EPLB": {}} | ({"record": {"eplb_state": scripts.layer_state("record")}} if mapped else {})
        for _ in range(count)
    ]


def written_by(buffers: Tensors, state: dict[str, Any]) -> dict[str, Tensors]:
    """By kind what a call writes: its output buffers, and the load of its EPLB state."""
    outputs = {key: one for key, one in buffers.items() if key.startswith("x") or key.endswith("_out")}
    loads = {kind: one["eplb_state"].expert_load_view for kind, one in state.items() if one}
    return {kind: outputs | ({"load": loads[kind]} if kind in loads else {}) for kind in state}


def differing(made: Made, written: dict[str, Tensors]) -> list[str]:
    """The outputs in which a version differs from the first one of its kind. `written`: see `written_by`."""
    expected: dict[str, Tensors] = {}
    found = []
    for name, (call, *_) in made.items():
        kind = name.rsplit(", ", 1)[1]
        for one in written[kind].values():
            one.view(torch.uint8).fill_(0x25)
        call()
        actual = {key: one.view(torch.uint8).clone() for key, one in written[kind].items()}
        first = expected.setdefault(kind, actual)
        found += [f"{name}: {key}" for key, one in actual.items() if not torch.equal(one, first[key])]
    return found


def warm(arguments: argparse.Namespace, versions: Sequence[Version], share: tuple[int, int]) -> None:
    """Compile a share of the kernels into Triton's cache."""
    scripts: Any = versions[0].modules["staging_kernels"]
    sizes = [(h, t) for h in arguments.hidden for t in arguments.tokens]
    index = 0
    for hidden, tokens in sizes:
        sets = [scripts.buffers(arguments.operation, tokens, hidden)]
        states = layer_states(versions[0], arguments.operation, 1)
        for call, *_ in calls(versions, arguments.operation, sets, states).values():
            if index % share[1] == share[0]:
                call()
            index += 1
    torch.cuda.synchronize()


def report(arguments: argparse.Namespace, versions: Sequence[Version], hidden: int) -> None:
    scripts: Any = versions[0].modules["staging_kernels"]
    operation, tokens = arguments.operation, arguments.tokens
    rows: dict[str, list[float]] = {}
    for count in tokens:
        sets = scripts.rotating_buffers(operation, count, hidden)
        states = layer_states(versions[0], operation, len(sets))
        made = calls(versions, operation, sets, states)
        if problems := differing(made, written_by(sets[0], states[0])):
            raise SystemExit(f"{count} tokens, hidden {hidden}: other bytes: {'; '.join(problems)}")
        for name, timing in scripts.measure(made, "cuda").items():
            rows.setdefault(name, []).append(timing.median_us)
        del sets, states, made
        torch.cuda.empty_cache()
    print(f"\n{operation} hidden {hidden}, us a call; tokens: " + " ".join(f"{t:>14}" for t in tokens))
    base = next(iter(rows.values()))
    for name, values in rows.items():
        cells = (f"{one:7.3f} {100 * (one / b - 1):+5.1f}%" for one, b in zip(values, base, strict=True))
        print(f"{name:>40} " + " ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+")
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048])
    parser.add_argument("--operation", default="fp8", choices=["fp8", "token", "block"])
    parser.add_argument("--warm", help="i/n: only compile share i of n")
    arguments = parser.parse_args()
    versions = [load_version(one) for one in arguments.checkouts]
    if arguments.warm:
        index, count = map(int, arguments.warm.split("/"))
        warm(arguments, versions, (index, count))
        return
    scripts: Any = versions[0].modules["staging_kernels"]
    scripts.run_warm_shares()
    for hidden in arguments.hidden:
        report(arguments, versions, hidden)


if __name__ == "__main__":
    main()
