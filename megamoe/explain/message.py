"""The message: at most 25 lines for an assertion or a terminal."""

from __future__ import annotations

from megamoe.explain.findings import Finding, Report


def render(report: Report, max_lines: int = 25) -> str:
    if report.equal:
        total = sum(report.compared.values())
        return f"equal: {total:,} bytes of {len(report.compared)} outputs"
    lines = [report.title] if report.title else []
    tail = [f"note: {note}" for note in report.notes[:2]]
    if report.replay:
        tail.append(f"replay: {report.replay}")
    groups = _by_output(report.findings)
    room = max_lines - len(lines) - len(tail)
    shown = 0
    for number, findings in enumerate(groups):
        left = len(groups) - number
        space = room - (1 if left > 1 else 0)
        most = (5, 2, 1)[number] if number < 3 else 0
        block = _block(findings, most)
        if len(block) > space:
            block = block[: max(0, space)] if number == 0 else _block(findings, 0)[: max(0, space)]
        if len(block) < min(3, len(_block(findings, 0))):
            break
        lines.extend(block)
        room -= len(block)
        shown += 1
    if shown < len(groups):
        lines.append(
            f"... and {len(groups) - shown} more outputs: "
            f"{', '.join(_label(group[0]) for group in groups[shown : shown + 6])}"
        )
    return "\n".join([*lines, *tail][:max_lines])


def _by_output(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    found: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.case, finding.output), []).append(finding)
    return list(found.values())


def _label(finding: Finding) -> str:
    return f"{finding.case}/{finding.output}" if finding.case else finding.output


def _block(findings: list[Finding], examples: int) -> list[str]:
    first = findings[0]
    share = 100 * first.count / max(1, first.total)
    lines = [f"{_label(first)}: {first.count:,} of {first.total:,} {first.unit} differ ({share:.3g}%)"]
    lines.append(f"  where: {first.where}")
    for number, finding in enumerate(findings):
        detail = f" [{finding.detail}]" if finding.detail and number == 0 else ""
        word = "why:  " if number == 0 else "and:  "
        lines.append(f"  {word} {finding.cause} ({finding.confidence}): {finding.meaning}{detail}")
    if first.cause != "unknown" and first.examples:
        rest = f"all but {first.residue:,} unrelated {first.unit}" if first.residue else "every byte"
        lines.append(f"         reproduces {rest}")
    if first.alternatives:
        lines.append(f"         or: {', '.join(first.alternatives)}; would decide: {first.decide}")
    lines.extend(f"    {example}" for example in first.examples[:examples])
    return lines
