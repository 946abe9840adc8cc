"""Explaining tensors from Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megamoe.bundle import DTYPES, dtype_name
from megamoe.explain.engine import explain_cases
from megamoe.explain.findings import Report
from megamoe.explain.pairs import CasePair, OutputPair


def explain(
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
    title: str = "",
    replay: str = "",
) -> Report:
    """Compares two tensors, or all outputs of a call by name, and explains the differences.

    layout: of reference.layouts, or its name (sizes from ``params``), or name -> layout for several outputs.
    op, output: the operation and the output's name in the table; with ``inputs`` (and ``params``) the
    arithmetic is replayed. before: what the buffers held before the call. dtype: the real dtype of byte
    tensors ("e2m1x2", "float8_e4m3fn"). padding: "undefined" if bytes between elements mean nothing. code:
    format of scale bytes ("ue8m0", "ue4m3").

    TypeError for anything that is not a tensor; ValueError for outputs that only one side has, for an unknown
    operation, output, dtype, code or layout, and for sizes that a layout does not have.
    """
    _check_names(op, output, dtype, code)
    many = isinstance(expected, Mapping)
    if many != isinstance(actual, Mapping):
        raise TypeError("actual and expected: both tensors, or both mappings of tensors by output name")
    left: Mapping[str, Tensor] = expected if isinstance(expected, Mapping) else {output or "output": expected}
    right: Mapping[str, Tensor] = actual if isinstance(actual, Mapping) else {output or "output": actual}
    if set(left) != set(right):
        raise ValueError(f"actual: expected the outputs {sorted(left)}, got {sorted(right)}")
    pairs = []
    for name in left:
        for side, tensor in (("expected", left[name]), ("actual", right[name])):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{side}: expected a tensor for {name}, got {type(tensor).__name__}")
        wanted = _of(dtype, name, many)
        pairs.append(
            OutputPair(
                name,
                left[name].detach().cpu(),
                right[name].detach().cpu(),
                wanted or _named_dtype(left[name], op, name),
                wanted or _named_dtype(right[name], op, name),
                padding,
                _layout(_of(layout, name, many), params, left[name]),
                _before(_of(before, name, many)),
                code=code,
            )
        )
    cpu = {name: tensor.detach().cpu() for name, tensor in (inputs or {}).items()}
    return explain_cases([CasePair(tuple(pairs), op, dict(params or {}), cpu)], title=title, replay=replay)


def _check_names(
    op: str | None, output: str | None, dtype: str | Mapping[str, str] | None, code: str | None
) -> None:
    """ValueError for a name that would otherwise only make the explanation poorer."""
    from megamoe.explain.variants import all_replays
    from megamoe.suite.table import table
    from reference.formats import FORMATS

    if op is not None:
        operation = table().get(op)
        if operation is None and op not in all_replays():
            raise ValueError(f"op: expected one of {sorted({*table(), *all_replays()})}, got {op!r}")
        if operation is not None and output is not None and output not in operation.outputs:
            raise ValueError(f"output: expected one of {sorted(operation.outputs)} of {op}, got {output!r}")
    single = () if dtype is None else (dtype,)
    for name in dtype.values() if isinstance(dtype, Mapping) else single:
        if name not in DTYPES:
            raise ValueError(f"dtype: expected one of {sorted(DTYPES)}, got {name!r}")
    if code is not None and code not in FORMATS:
        raise ValueError(f"code: expected one of {sorted(FORMATS)}, got {code!r}")


def _of(value: Any, name: str, many: bool) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    return value if not many or isinstance(value, str) else None


def _before(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def _named_dtype(tensor: Tensor, op: str | None, output: str) -> str:
    packed = op is not None and "nvfp4" in op and output in ("x", "buf_x") and tensor.element_size() == 1
    return "e2m1x2" if packed else dtype_name(tensor.dtype)


def _layout(layout: Any, params: Mapping[str, Any] | None, tensor: Tensor) -> Any:
    """A layout given by name takes its sizes from params. ValueError if the tensor is not stored so."""
    if layout is None:
        return None
    if isinstance(layout, str):
        from reference.layouts import LAYOUTS, get_layout

        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {sorted(LAYOUTS)}, got {layout!r}")
        sizes = {k: v for k, v in (params or {}).items() if k in LAYOUTS[layout].params}
        layout = get_layout(layout, **sizes)
    if (
        tuple(layout.storage_shape) != tuple(tensor.shape)
        or layout.storage_dtype.itemsize != tensor.element_size()
    ):
        raise ValueError(
            f"layout: {layout.name} is stored as {list(layout.storage_shape)} of {layout.storage_dtype}, "
            f"got {list(tensor.shape)} of {tensor.dtype}"
        )
    return layout
