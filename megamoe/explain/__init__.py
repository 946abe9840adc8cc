"""Where two packed tensors differ, and which single change explains it.

    >>> report = explain(expected, actual, layout=get_layout("packed_scale_rows", tokens=4, groups=8))
    >>> print(report)          # at most 25 lines
    >>> report.to_json()       # {"equal": ..., "findings": [...]}

``explain`` takes tensors; ``megamoe explain`` takes files; ``megamoe.testing.assert_bitwise`` raises with the
message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe.explain.api import explain as explain
    from megamoe.explain.findings import Finding as Finding
    from megamoe.explain.findings import Report as Report

_MODULES = {
    "explain": "api",
    "Finding": "findings",
    "Report": "findings",
    "Example": "findings",
    "CAUSES": "causes",
}

__all__ = ["CAUSES", "Example", "Finding", "Report", "explain"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
