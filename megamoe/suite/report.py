"""What happened, as a summary, JSON, a page, or lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from megamoe.suite.runner import Result


@dataclass(frozen=True)
class Line:
    """A line of the table: one operation, implementation and recipe."""

    op: str
    implementation: str
    recipe: str
    device: str
    cases: int
    passed: int
    failed: int
    skipped: int
    bytes_compared: int
    bytes_differing: int
    seconds: float
    skips: tuple[tuple[str, int], ...]

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"{self.failed} FAILED"
        return "ok" if self.passed else "skipped"


def summarize(results: Iterable[Result]) -> list[Line]:
    """One line for each operation, implementation and recipe, in order of first appearance."""
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.implementation, result.recipe, result.device), []).append(result)
    return [_line(key, group) for key, group in groups.items()]


def _line(key: tuple[str, str, str, str], group: list[Result]) -> Line:
    op, implementation, recipe, device = key
    status = Counter(result.status for result in group)
    skips = Counter(str(result.skip) for result in group if result.skip is not None)
    return Line(
        op,
        implementation,
        recipe,
        device,
        len(group),
        status["passed"],
        status["failed"],
        status["skipped"],
        sum(result.bytes_compared for result in group),
        sum(result.bytes_differing for result in group),
        sum(result.seconds for result in group),
        tuple(skips.items()),
    )


def skips_by_reason(results: Iterable[Result]) -> dict[tuple[str, str, str], int]:
    """(operation, implementation, reason) -> cases that did not run."""
    return dict(
        Counter(
            (result.op, result.implementation, str(result.skip))
            for result in results
            if result.skip is not None
        )
    )


def require(results: Sequence[Result], required: Sequence[str]) -> list[Result]:
    """The results with skips for lack of a required capability turned into failures."""

    def strict(result: Result) -> Result:
        skip = result.skip
        for name in required:
            if skip is not None and (skip.capability == name or skip.capability.startswith(f"{name}.")):
                return replace(result, status="failed", error=f"required: {skip}", skip=None)
        return result

    return [strict(result) for result in results]


def as_json(results: Sequence[Result], **extra: Any) -> dict[str, Any]:
    """The document of --json: totals, then every result."""
    status = Counter(result.status for result in results)
    return {
        "cases": len(results),
        "passed": status["passed"],
        "failed": status["failed"],
        "skipped": status["skipped"],
        "bytes_compared": sum(result.bytes_compared for result in results),
        "bytes_differing": sum(result.bytes_differing for result in results),
        **extra,
        "results": [_result_json(result) for result in results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {
        "case": result.case,
        "op": result.op,
        "recipe": result.recipe,
        "implementation": result.implementation,
        "device": result.device,
        "status": result.status,
        "bytes_compared": result.bytes_compared,
        "bytes_differing": result.bytes_differing,
        "seconds": round(result.seconds, 6),
        "outputs": [
            {
                "output": output.output,
                "equal": output.equal,
                "problem": output.problem,
                "bytes_compared": output.bytes_compared,
                "bytes_differing": output.bytes_differing,
                "bytes_outside": output.bytes_outside,
            }
            for output in result.outputs
        ],
    }
    if result.unrecorded:
        found["unrecorded"] = list(result.unrecorded)
    if result.error:
        found["error"] = result.error
    if result.skip is not None:
        found["skip"] = {
            "reason": result.skip.reason,
            "capability": result.skip.capability,
            "detail": result.skip.detail,
        }
    return found


def as_html(results: Sequence[Result], title: str, environment: dict[str, Any]) -> str:
    """One page that needs nothing else: the table, the failures, what was skipped, every case."""
    import jinja2

    source = (files("megamoe.suite") / "templates" / "report.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(
        title=title,
        environment=environment,
        lines=summarize(results),
        results=results,
        failures=[result for result in results if result.status == "failed"],
        skips=skips_by_reason(results),
        totals=as_json(results),
    )
