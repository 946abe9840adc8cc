"""For tests of other projects: one line that compares two tensors bit for bit and says where and why they differ.

from megamoe.testing import assert_bitwise
assert_bitwise(x_sf, expected, layout="packed_scale_rows", params={"tokens": 64, "groups": 224})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class BitwiseError(AssertionError):
    """Two tensors differ. report: the megamoe.explain.Report; ``str`` of the error is its message."""

    def __init__(self, report: Any) -> None:
        super().__init__(report.text())
        self.report = report


def assert_bitwise(
    actual: Tensor | Mapping[str, Tensor],
    expected: Tensor | Mapping[str, Tensor],
    *,
    layout: Any = None,
    op: str | None = None,
    output: str | None = None,
    params: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    before: Tensor | Mapping[str, Tensor] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    padding: str | None = None,
    code: str | None = None,
    message: str = "",
) -> None:
    """Raises BitwiseError (an AssertionError) unless dtype, shape, strides and every byte agree.

    Arguments as for megamoe.explain.explain; both sides may be on any device. Nothing but the comparison is computed when
    they agree. The message has at most 25 lines: what, how many, where, why, and decoded examples.
    """
    from megamoe.explain.api import explain

    report = explain(actual, expected, layout=layout, op=op, output=output, params=params, inputs=inputs, before=before,
                     dtype=dtype, padding=padding, code=code, title=message)  # fmt: skip
    if not report.equal:
        raise BitwiseError(report)
