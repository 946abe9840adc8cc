"""The result tables of docs/performance.md, from the JSON lines of `megamoe bench` and of references.py.

    python benchmarks/performance_tables.py [--write] [FILE]

FILE is by default benchmarks/results/h200.jsonl, the run that the document shows (a test compares them). The
figures of vLLM 0.33 are no part of that run: they were measured earlier on an H200, the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200.jsonl"
REFERENCES = ROOT / "benchmarks" / "results" / "references.json"
MARKERS = ("<!-- {}: begin -->", "<!-- {}: end -->")

TOKENS = (1, 8, 64, 512, 2048, 8192, 32768)
FP8, NVFP4, BLOCK = (
    "prepare_megamoe_inputs", "prepare_megamoe_nvfp4_inputs", "prepare_megamoe_nvfp4_block_inputs",
)  # fmt: skip
NAMES = {FP8: "FP8 per 32", NVFP4: "NVFP4, two levels", BLOCK: "NVFP4, one level"}
# vLLM 0.33, hidden 7168, top-k 8, H200: graph of 20 launches, median of 15; microseconds
VLLM = {
    FP8: (1.78, 2.10, 2.31, 4.61, 13.0, 49.4, 202),
    NVFP4: (37.7, 38.0, 56.7, 69.3, 86.2, 175.7, 544),
    BLOCK: (1.41, 1.53, 2.40, 7.67, 26.2, 97.0, 381),
}
Key = tuple[str, int, int, bool, str]  # operation, hidden, tokens, with EPLB, implementation


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """The lines that hold a time."""
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["us"] is not None:
            params = line["params"]
            mapped = params.get("eplb") is not None
            found[line["op"], params["hidden"], params["tokens"], mapped, line["implementation"]] = line
    return found


def tables(lines: dict[Key, dict[str, Any]]) -> Iterator[str]:
    environment = next(iter(lines.values()))["environment"]
    versions = f"torch {environment['torch']}, triton {environment['triton']}"
    yield f"{environment['device']}, {versions}; microseconds."
    for hidden in (7168, 4096):
        for op in (FP8, NVFP4, BLOCK):
            yield f"\n**{NAMES[op]}, hidden {hidden}**\n"
            yield from one_table(lines, op, hidden)


def one_table(lines: dict[Key, dict[str, Any]], op: str, hidden: int) -> Iterator[str]:
    columns = ["tokens", "MB", "copy", "TB/s", "ours", "of copy"]
    columns += ["with EPLB", "EPLB costs"] if op != BLOCK else []
    columns += ["DeepGEMM", "DeepGEMM / ours"] if op == FP8 else []
    columns += ["vLLM 0.33, earlier", "vLLM / ours"] if hidden == 7168 else []
    yield "| " + " | ".join(columns) + " |"
    yield "|--:" * len(columns) + "|"
    for index, tokens in enumerate(TOKENS):
        ours = lines.get((op, hidden, tokens, False, "triton"))
        if ours is None:  # of a run that was cut short
            continue
        us, copy = ours["us"], ours["copy_us"]
        moved = ours["bytes_moved"]
        cells = [str(tokens), f"{moved / 1e6:.2f}", number(copy), f"{moved / copy / 1e6:.2f}", number(us)]
        cells.append(f"{copy / us:.0%}")
        if op != BLOCK:
            mapped = lines.get((op, hidden, tokens, True, "triton"))
            cells += [number(mapped["us"]), f"{mapped['us'] / us - 1:+.1%}"] if mapped else ["-", "-"]
        if op == FP8:
            peer = lines.get((op, hidden, tokens, False, "deep_gemm"))
            cells += [number(peer["us"]), f"{peer['us'] / us:.2f}"] if peer else ["-", "-"]
        if hidden == 7168:
            cells += [number(VLLM[op][index]), f"{VLLM[op][index] / us:.2f}"]
        yield "| " + " | ".join(cells) + " |"


def number(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def reference_table(path: Path) -> Iterator[str]:
    """What benchmarks/references.py --json wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield f"{found['what']}; seconds."
    yield "\n| format | implementation | seconds | ours / this | bytes |"
    yield "|---|---|--:|--:|---|"
    ours = {}
    for row in found["rows"]:
        ours.setdefault(row["format"], row["seconds"])  # the first of its format
        ratio = ours[row["format"]] / row["seconds"]
        words = (row["format"], row["implementation"], f"{row['seconds']:.3f}", f"{ratio:.2f}", row["note"])
        yield "| " + " | ".join(words) + " |"
    yield "".join(f"\nMissing: `{line}`." for line in found["missing"])


def sections(results: Path) -> dict[str, str]:
    """Text by marker."""
    found = {"results": "\n".join(tables(read(results)))}
    if REFERENCES.exists():
        found["references"] = "\n".join(reference_table(REFERENCES)).rstrip()
    return found


def replaced(document: str, made: dict[str, str]) -> str:
    """The document with these sections between their markers."""
    for name, text in made.items():
        begin, end = (marker.format(name) for marker in MARKERS)
        before, _, rest = document.partition(begin)
        _, _, after = rest.partition(end)
        document = f"{before}{begin}\n{text}\n{end}{after}"
    return document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="into the document")
    options = parser.parse_args(arguments)
    made = sections(options.file)
    if options.write:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print("\n\n".join(made.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
