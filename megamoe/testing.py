"""For tests of other projects: one line compares two tensors bit for bit and says where and why they differ.

    from megamoe.testing import assert_bitwise
    assert_bitwise(x_sf, expected, layout="packed_scale_rows", params={"tokens": 64, "groups": 224})

With ``artifacts=DIR``, the environment variable MEGAMOE_ARTIFACTS, or the pytest plugin
megamoe.testing_plugin, a failure also leaves two bundles and a page there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class BitwiseError(AssertionError):
    """Two tensors differ. report: the megamoe.explain.Report, whose message the error's text is."""

    def __init__(self, report: Any, left: Path | None = None, not_left: str = "") -> None:
        text = report.text()
        super().__init__(
            "\n".join([text, *([f"page: {left}"] if left else []), *([not_left] if not_left else [])])
        )
        self.report = report
        self.page = left


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
    artifacts: str | Path | None = None,
) -> None:
    """Raises BitwiseError (an AssertionError) unless dtype, shape, strides and every byte agree.

    Both sides may be on any device; nothing but the comparison is computed when they agree.

    actual, expected: two tensors, or the outputs of a call by name. layout: a layout of reference.layouts or
    its name, with its sizes in ``params``; for several outputs, by name. op, output, inputs, params:
    operation, output and what it was called with; then the arithmetic is replayed. before: what the buffers
    held before the call. dtype: of byte tensors that stand for something else ("e2m1x2", "float8_e4m3fn").
    padding: "undefined" if bytes between elements mean nothing. code: format of scale bytes. message: a
    title. artifacts: a folder for the page and the bundles of a failure.

    TypeError for what is not a tensor; ValueError for outputs that only one side has, for unknown names, and
    for a layout that does not fit the tensor. A page that cannot be written is said in the message, and
    hides nothing. The message has at most 25 lines, and one that names the page.
    """
    from megamoe.explain.api import explain

    if padding not in (None, "undefined"):
        raise ValueError(f'padding: expected None or "undefined", got {padding!r}')
    actual, expected = _plain("actual", actual), _plain("expected", expected)
    report = explain(
        actual,
        expected,
        layout=layout,
        op=op,
        output=output,
        params=params,
        inputs=inputs,
        before=before,
        dtype=dtype,
        padding=padding,
        code=code,
        title=message,
    )
    if report.equal:
        return
    folder = artifacts or os.environ.get("MEGAMOE_ARTIFACTS")
    page = None
    if folder:
        name = message or os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0] or op or "difference"
        try:
            page = leave_behind(Path(folder), name, report, actual, expected, op, output, params, inputs)
        except Exception as error:  # whatever keeps the files from being written, the difference is the news
            raise BitwiseError(
                report, not_left=f"page: not written ({type(error).__name__}: {error})"
            ) from None
    raise BitwiseError(report, page)


def _plain(side: str, value: Any) -> Any:
    """The same tensors without lazy conjugations. TypeError for one that has no bytes of its own."""
    if isinstance(value, Mapping):
        if not value:
            raise ValueError(f"{side}: expected at least one output, got an empty mapping")
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{side}: expected outputs by name, got a key {name!r}")
        return {name: _plain(f"{side}[{name!r}]", tensor) for name, tensor in value.items()}
    if not isinstance(value, Tensor):
        raise TypeError(f"{side}: expected a tensor, got {type(value).__name__}")
    if value.is_quantized or value.is_nested or value.layout != torch.strided or value.device.type == "meta":
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else f"{value.layout}"
        where = " on the meta device" if value.device.type == "meta" else ""
        raise TypeError(f"{side}: expected a dense tensor with memory of its own, got a {kind} one{where}")
    return value.detach().resolve_conj().resolve_neg()


def leave_behind(
    folder: Path,
    name: str,
    report: Any,
    actual: Tensor | Mapping[str, Tensor],
    expected: Tensor | Mapping[str, Tensor],
    op: str | None = None,
    output: str | None = None,
    params: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes NAME.html, NAME.expected.safetensors and NAME.actual.safetensors; returns the page's path."""
    from megamoe.bundle import Case, RecordedOutput, dtype_name, write_bundle

    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.=-]+", "_", name).strip("_")[:150]
    kept = {
        key: value
        for key, value in (params or {}).items()
        if isinstance(value, (bool, int, float, str, list, type(None)))
    }
    for side, value in (("expected", expected), ("actual", actual)):
        tensors = value if isinstance(value, Mapping) else {output or "output": value}
        recorded = {
            key: RecordedOutput(
                tensor.detach().cpu(), dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()
            )
            for key, tensor in tensors.items()
        }
        given = {key: tensor.detach().cpu() for key, tensor in (inputs or {}).items()}
        case = Case(stem, op or "", kept, given, recorded)
        write_bundle(folder / f"{stem}.{side}.safetensors", [case], producer=side)
    page = folder / f"{stem}.html"
    page.write_text(report.html(), encoding="utf-8")
    return page
