"""What a failing comparison leaves behind: bundles that travel, and an explanation."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megamoe.bundle import write_bundle
from megamoe.capability import probe
from megamoe.suite.operation import Case
from megamoe.suite.replay import record_case
from megamoe.suite.runner import Result


@dataclass(frozen=True)
class FailureFiles:
    """Two bundles of the same case: each holds the inputs, so either replays by itself."""

    expected: Path
    actual: Path

    def command(self) -> str:
        return f"megamoe explain {self.expected} {self.actual}"


def write_failure(
    case: Case, result: Result, directory: Path, inputs: dict[str, Tensor] | None = None
) -> FailureFiles:
    """Write the two bundles of a failed result that kept its tensors."""
    stem = re.sub(r"[^\w.=-]", "_", f"{case.id}.{result.implementation}")
    device = probe("cuda").reason if result.device == "cuda" else "cpu"
    paths = []
    for side, producer, outputs in (
        ("expected", "reference", result.expected),
        ("actual", result.implementation, result.actual),
    ):
        path = directory / f"{stem}.{side}.safetensors"
        recorded = record_case(case, outputs, inputs)
        paths.append(
            write_bundle(path, [recorded], producer=producer, device=device, triton=probe("triton").reason)
        )
    return FailureFiles(*paths)


def explain_failure(files: FailureFiles, html: Path | None = None) -> str:
    """The explanation of a written failure in at most 25 lines, and its page; "" if the explainer finds
    nothing to say."""
    explain: Any = importlib.import_module("megamoe.explain.files")
    engine: Any = importlib.import_module("megamoe.explain.engine")
    loaded = explain.load_pair(files.expected, files.actual, explain.Request())
    report = engine.explain_cases(loaded.cases, replay=files.command())
    if html is not None and not report.equal:
        html.write_text(report.html(), encoding="utf-8")
    return "" if report.equal else str(report.text())
