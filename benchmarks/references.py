"""Speed of the references beside DeepGEMM's own PyTorch helpers: one run, the same data, equal bytes first.

    OMP_NUM_THREADS=2 python benchmarks/references.py [--tokens 8192] [--hidden 7168] [--json FILE]

Peers, by name from `deep_gemm.utils.math` wherever that file is on the path (it is loaded by itself: the
package around it needs a GPU):

* per_token_cast_to_fp8, groups of 32, packed UE8M0;
* per_token_cast_to_nvfp4, groups of 16, which only later builds have;
* per_token_cast_to_fp4, groups of 16 with float32 scales: less work than NVFP4, whose scales are E4M3.

"formula" is written here, as plain vectorized PyTorch after the published formula of NVFP4 (amax / 6 to E4M3
by torch's own conversion, quotients compared with the seven midpoints), and does the same work as
per_token_cast_to_nvfp4. It is nobody's library. Threads that have to share their cores wait for each other:
measure on a machine that does nothing else.

Exit codes: 0 measured, 1 bytes differ, 2 a peer is missing (the others are still measured).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megamoe.suite import timing
from reference.formats import pack_scale_words
from reference.fp8 import quantize_fp8_groups
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES

HELPERS = "deep_gemm.utils.math"
Pair = tuple[Tensor, Tensor]
Helper = Callable[[Tensor], Pair]
Row = tuple[str, str, float, str]


def load_helpers() -> ModuleType | None:
    """The module of that name, without running the package that contains it; None if it is not installed."""
    package, *inner = HELPERS.split(".")
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder).joinpath(*inner).with_suffix(".py")
        if path.exists():
            spec = importlib.util.spec_from_file_location(HELPERS, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None


# Ours, with the outputs of the helpers: element bytes, scales.


def fp8(x: Tensor) -> Pair:
    found = quantize_fp8_groups(x, RECIPES["fp8_ue8m0_g32"])  # type: ignore[arg-type]
    assert found.exponents is not None
    return found.codes, pack_scale_words(found.exponents)


def nvfp4(x: Tensor, recipe: str = "nvfp4_block") -> Pair:
    found = quantize_nvfp4(x, RECIPES[recipe])  # type: ignore[arg-type]
    return found.packed, found.scale_codes


def nvfp4_token(x: Tensor) -> Pair:
    return nvfp4(x, "nvfp4_token")


# Theirs.


def formula(x: Tensor) -> Pair:
    """NVFP4, one level, of finite values."""
    groups = x.float().view(x.shape[0], -1, 16)
    raw = groups.abs().amax(dim=2) / torch.tensor(6.0)
    scales = raw.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    scaled = groups / scales.float().unsqueeze(2)
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    # a value on a midpoint goes to the even code: from below for every other midpoint
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += ((magnitude >= middle) if index % 2 else (magnitude > middle)).to(torch.uint8)
    codes |= ((scaled < 0) & (codes != 0)).to(torch.uint8) << 3
    pairs = codes.view(x.shape[0], -1, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4), scales


def peers(helpers: ModuleType | None) -> tuple[dict[str, dict[str, Helper]], list[str]]:
    """What to time for each format, and what is missing."""
    found: dict[str, dict[str, Helper]] = {"FP8": {"ours": fp8}, "NVFP4": {"ours": nvfp4}}
    missing = []
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("FP8", "per_token_cast_to_fp8", {"use_ue8m0": True, "gran_k": 32, "use_packed_ue8m0": True}),
        ("NVFP4", "per_token_cast_to_nvfp4", {}),
        ("NVFP4", "per_token_cast_to_fp4", {"use_ue8m0": False, "gran_k": 16}),
    )
    for family, name, options in calls:
        function: Any = getattr(helpers, name, None)
        if function is None:
            missing.append(f"{HELPERS}.{name}: not in this installation")
        else:
            found[family][name] = partial(function, **options)
    found["NVFP4"]["formula"] = formula
    found["NVFP4"]["ours, two levels"] = nvfp4_token
    return found, missing


UNCOMPARED = {"per_token_cast_to_fp4": "other scales", "ours, two levels": "another recipe"}


def differing_bytes(expected: Pair, actual: Pair) -> int:
    """Bytes that differ, elements and scales together."""
    sides = [
        [tensor.contiguous().view(torch.uint8).reshape(-1) for tensor in pair] for pair in (expected, actual)
    ]
    return sum(
        left.numel() if left.shape != right.shape else int((left != right).sum())
        for left, right in zip(*sides, strict=True)
    )


def measure(family: str, functions: dict[str, Helper], x: Tensor, rounds: int) -> tuple[list[Row], int]:
    """Rows of (format, name, seconds, note), and how many bytes differ; nothing is timed if any does."""
    expected = functions["ours"](x)
    wrong = 0
    for name, function in functions.items():
        count = 0 if name in UNCOMPARED else differing_bytes(expected, function(x))
        wrong += count
        if count:
            print(f"{family} {name}: {count} bytes differ, nothing is timed")
    if wrong:
        return [], wrong
    calls = {name: [partial(function, x)] for name, function in functions.items()}
    timings = timing.measure(calls, "cpu", rounds)
    return [(family, n, t.median_us / 1e6, UNCOMPARED.get(n, "equal bytes")) for n, t in timings.items()], 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS["cpu"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.tokens, options.hidden, generator=generator).bfloat16()
    what = (
        f"[{options.tokens}, {options.hidden}] bfloat16, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), median of {options.rounds}"
    )
    print(what)
    families, missing = peers(load_helpers())
    found: list[Row] = []
    wrong = 0
    for family, functions in families.items():
        rows, count = measure(family, functions, x, options.rounds)
        found += rows
        wrong += count
        for _, name, seconds, note in rows:
            print(f"{family:6} {name:26} {seconds:7.3f} s  ours / this {rows[0][2] / seconds:5.2f}  {note}")
    for line in missing:
        print(f"missing: {line}")
    if options.json is not None:
        keys = ("format", "implementation", "seconds", "note")
        document = {"what": what, "rows": [dict(zip(keys, row, strict=True)) for row in found]}
        options.json.write_text(json.dumps(document | {"missing": missing}, indent=1) + "\n")
    return 1 if wrong else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
