"""docs/performance.md shows what the recorded run says, and `bench --against` reads the record."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from megamoe.suite.bench_report import read_lines
from megamoe.suite.measurement import cases_of
from megamoe.suite.table import table

ROOT = Path(__file__).resolve().parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    script: Any = importlib.import_module("performance_tables")


def test_document_shows_the_recorded_run() -> None:
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert script.replaced(text, script.sections(script.RESULTS)) == text, (
        "python benchmarks/performance_tables.py --write"
    )


def test_record_holds_every_size_of_every_table() -> None:
    lines = script.read(script.RESULTS)
    for op in (script.FP8, script.NVFP4, script.BLOCK):
        for hidden in (7168, 4096):
            for tokens in script.TOKENS:
                assert (op, hidden, tokens, False, "triton") in lines
                assert op == script.BLOCK or (op, hidden, tokens, True, "triton") in lines
                assert op != script.FP8 or (op, hidden, tokens, False, "deep_gemm") in lines


def test_record_can_be_compared_with_a_new_run() -> None:
    times, _ = read_lines(script.RESULTS)
    axes = {"tokens": [8192], "hidden": [7168], "eplb": [None, "record"]}
    for case in cases_of(table()[script.FP8], (), axes):
        assert (case.id, "triton") in times


def test_replaced_sections_stay_replaceable() -> None:
    begin, end = (marker.format("results") for marker in script.MARKERS)
    document = f"before\n{begin}\nold\n{end}\nafter\n"
    once = script.replaced(document, {"results": "new"})
    assert once == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert script.replaced(once, {"results": "new"}) == once


def test_a_run_that_was_cut_short_still_makes_tables(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    kept = [
        text for text in script.RESULTS.read_text().splitlines() if json.loads(text)["params"]["tokens"] < 512
    ]
    path.write_text("\n".join(kept))
    made = "\n".join(script.tables(script.read(path)))
    assert "| 64 |" in made
    assert "| 8192 |" not in made
