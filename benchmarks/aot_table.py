"""What the compiler makes of the staging kernels, for both targets, without the hardware.

    python benchmarks/aot_table.py            print the table
    python benchmarks/aot_table.py --write    put it into docs/performance.md

A row is one launch of the table's operations, compiled ahead of time and disassembled.
tests/kernels/test_aot_table.py compares the document with a table made anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from performance_tables import DOCUMENT, MARKERS, replaced

from megamoe.kernels import aot
from megamoe.kernels.launch import Launch, record
from megamoe.suite.buffers import allocate
from megamoe.suite.measurement import cases_of
from megamoe.suite.operation import load
from megamoe.suite.table import table

SECTION = "ahead-of-time table"
COLUMNS = (
    "kernel", "tokens", "target", "warps", "registers", "spills", "shared bytes", "instructions",
    "loads (bytes x count)", "stores (bytes x count)",
)  # fmt: skip
_SOME_TOKENS = 37  # made by the row's generator; no other axis has this size


@dataclass(frozen=True)
class Row:
    """A launch to compile: an operation of the table, and the parameters that bench does not set."""

    name: str
    op: str
    tokens: int = 8192
    hidden: int = 7168
    params: dict[str, Any] = field(default_factory=dict)


ROWS = (
    Row("FP8, UE8M0 per 32", "prepare_megamoe_inputs", 8),
    Row("FP8, UE8M0 per 32", "prepare_megamoe_inputs"),
    Row("FP8, EPLB", "prepare_megamoe_inputs", 8, params={"eplb": "record"}),
    Row("FP8, EPLB", "prepare_megamoe_inputs", params={"eplb": "record"}),
    Row("FP8, shared pages, padding", "prepare_megamoe_inputs",
        params={"shared_block_m": 64, "padding": "tail"}),
    Row("FP8, fp32 per 128", "prepare_megamoe_inputs", params={"recipe": "fp8_fp32_g128"}),
    Row("NVFP4, two levels", "prepare_megamoe_nvfp4_inputs", 8),
    Row("NVFP4, two levels", "prepare_megamoe_nvfp4_inputs"),
    Row("NVFP4, two levels, EPLB", "prepare_megamoe_nvfp4_inputs", params={"eplb": "record"}),
    Row("NVFP4, two levels, MXFP8 pages", "prepare_megamoe_nvfp4_inputs",
        params={"shared": "mxfp8", "shared_block_m": 64, "l2_activation_scale": 0.5}),
    Row("NVFP4, one level", "prepare_megamoe_nvfp4_block_inputs", 8),
    Row("NVFP4, one level", "prepare_megamoe_nvfp4_block_inputs"),
    Row("RMSNorm, NVFP4", "prepare_megamoe_nvfp4_with_norm", hidden=4096),
    Row("bf16", "prepare_megamoe_bf16_inputs"),
)  # fmt: skip


def launches(row: Row) -> list[Launch]:
    """What a call of the row starts. Contents do not matter, shapes, strides and alignment do."""
    axes = {"tokens": [row.tokens], "hidden": [row.hidden]} | {k: [v] for k, v in row.params.items()}
    (case,) = cases_of(table()[row.op], (), axes)
    made = case.operation.inputs(case.params | {"tokens": _SOME_TOKENS}, np.random.default_rng(0))
    inputs = {
        name: torch.empty((row.tokens, *one.shape[1:]), dtype=one.dtype)
        if one.shape[0] == _SOME_TOKENS
        else one
        for name, one in made.items()
    }
    call = case.operation.call(case.params, inputs)
    arguments = dict(call.arguments)
    views = {name: allocate(spec, 0).view for name, spec in call.buffers.items()}
    (implementation,) = case.operation.implementations
    with record() as found:
        load(implementation.target)(**(call.bind(arguments, views) if call.bind else {**arguments, **views}))
    return found


def facts(row: Row, target: str) -> tuple[Launch, aot.Facts]:
    """The row's one launch, and what the compiler made of it. ValueError if a call starts more than one."""
    found = launches(row)
    if len(found) != 1:
        raise ValueError(f"{row.name}: expected one launch a call, got {len(found)}")
    return found[0], aot.describe(aot.compile_launch(found[0], aot.TARGETS[target]))


def cells(row: Row, launch: Launch, found: aot.Facts) -> str:
    """A line of the table."""
    spills = f"{found.stack_bytes} B in {found.local_accesses}" if found.stack_bytes else "0"
    numbers = (launch.num_warps, found.registers, spills, found.shared_bytes)
    accesses = (_accesses(found.loads), _accesses(found.stores))
    words = (row.name, row.tokens, found.target, *numbers, found.instructions, *accesses)
    return "| " + " | ".join(map(str, words)) + " |"


def _accesses(counts: dict[int, int]) -> str:
    return ", ".join(f"{size} x {counts[size]}" for size in sorted(counts, reverse=True))


def lines() -> Iterator[str]:
    yield f"Triton {triton.__version__}, hidden 7168 (norm-fused: 4096), top-k 8, 256 experts."
    yield ""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" * 3 + "|--:" * (len(COLUMNS) - 5) + "|---|---|"
    for row in ROWS:
        for target in aot.TARGETS:
            yield cells(row, *facts(row, target))


def documented(text: str) -> str:
    """The table that the document shows."""
    begin, end = (marker.format(SECTION) for marker in MARKERS)
    return text.partition(begin)[2].partition(end)[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    made = "\n".join(lines())
    if not parser.parse_args().write:
        print(made)
        return 0
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8"), {SECTION: made}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
