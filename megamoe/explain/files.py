"""What `megamoe explain` is given: bundles, safetensors, .pt and .npy files, as pairs of outputs."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.bundle import FORMAT, Bundle, Case, dtype_name, read_bundle
from megamoe.explain.findings import Finding
from megamoe.explain.pairs import CasePair, OutputPair

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy")


class InputError(ValueError):
    """A file, an option or a combination of them that cannot be explained; the message says which and why."""


@dataclass(frozen=True)
class Request:
    """The options of `megamoe explain`, all optional. params: of the layout and of the operation."""

    op: str | None = None
    output: str | None = None
    layout: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    case: str = "*"
    padding: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Loaded:
    """Cases to explain, and findings that need no comparison (outputs that only one side has)."""

    cases: tuple[CasePair, ...]
    findings: tuple[Finding, ...] = ()


def load_pair(expected: Path, actual: Path, request: Request) -> Loaded:
    """Reads both files and pairs what they hold. InputError for what cannot be read or does not fit."""
    left, right = _read(expected), _read(actual)
    if isinstance(left, Bundle) and isinstance(right, Bundle):
        return _pair_bundles(left, right, expected, actual, request)
    return _pair_tensors(_flat(left, expected), _flat(right, actual), expected, actual, request)


def _read(path: Path) -> Bundle | dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".npy":
            return {"output": _read_npy(path)}
        if path.suffix in (".pt", ".pth"):
            return _read_pt(path)
        return _read_safetensors(path)
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path}: cannot be read ({reason})") from error


def _read_npy(path: Path) -> Tensor:
    import numpy as np

    array = np.load(path, allow_pickle=False)
    if array.dtype.kind == "V":  # ml_dtypes arrays come back as void of their width
        array = array.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize])
    unsigned = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}
    if array.dtype.name in unsigned:
        array = array.view(unsigned[array.dtype.name])
    if array.dtype.kind not in "biuf":
        raise InputError(f"{path}: expected numbers, got dtype {array.dtype}")
    return torch.from_numpy(np.array(array))


def _read_pt(path: Path) -> dict[str, Tensor]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, Tensor):
        return {"output": loaded}
    if isinstance(loaded, (list, tuple)) and loaded and all(isinstance(t, Tensor) for t in loaded):
        return {f"output_{number}": tensor for number, tensor in enumerate(loaded)}
    if isinstance(loaded, Mapping) and loaded and all(isinstance(t, Tensor) for t in loaded.values()):
        return {str(name): tensor for name, tensor in loaded.items()}
    raise InputError(f"{path}: expected a tensor, a list or a dict of tensors, got {type(loaded).__name__}")


def _read_safetensors(path: Path) -> Bundle | dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") == FORMAT:
            return read_bundle(path)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _pair_bundles(left: Bundle, right: Bundle, expected: Path, actual: Path, request: Request) -> Loaded:
    names = [case.case for case in left.cases if fnmatch.fnmatchcase(case.case, request.case)]
    if not names:
        raise InputError(
            f"{expected}: no case matches {request.case!r}; there are {_some([c.case for c in left.cases])}"
        )
    theirs = {case.case: case for case in right.cases}
    cases: list[CasePair] = []
    findings: list[Finding] = []
    for name in names:
        if name not in theirs:
            raise InputError(f"{actual}: has no case {name!r}; there are {_some(list(theirs))}")
        case, found = pair_cases(left[name], theirs[name], left, request)
        cases.append(case)
        findings.extend(found)
    return Loaded(tuple(cases), tuple(findings))


def pair_cases(left: Case, right: Case, bundle: Bundle, request: Request) -> tuple[CasePair, list[Finding]]:
    wanted = [name for name in left.outputs if request.output in (None, name)]
    if not wanted:
        raise InputError(
            f"case {left.case!r}: no output {request.output!r}; there are {sorted(left.outputs)}"
        )
    pairs: list[OutputPair] = []
    findings: list[Finding] = []
    for name in wanted:
        if name not in right.outputs:
            findings.append(_missing(left.case, name, left.outputs[name].tensor, "actual"))
            continue
        mine, other = left.outputs[name], right.outputs[name]
        earlier = {
            f"what case {case.case} left": case.outputs[name].tensor
            for case in bundle.cases
            if case.case != left.case and case.op == left.op and name in case.outputs
        }
        before = next(
            (left.inputs[key] for key in (f"{name}_before", f"before_{name}") if key in left.inputs), None
        )
        if before is None:
            before = _filled(left.params, name, mine.tensor)
        pairs.append(
            OutputPair(
                name,
                mine.tensor,
                other.tensor,
                mine.dtype,
                other.dtype,
                mine.padding or other.padding,
                _layout(request, mine.tensor) if len(wanted) == 1 else None,
                before,
                earlier,
                request.code,
            )
        )
    for name in right.outputs:
        if name not in left.outputs and request.output in (None, name):
            findings.append(_missing(left.case, name, right.outputs[name].tensor, "expected"))
    params = {**left.params, **request.params}
    return CasePair(tuple(pairs), request.op or left.op, params, left.inputs, left.case), findings


def _filled(params: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor | None:
    """The buffer before the call, where the parameters say what every element or byte of it was."""
    value = params.get(f"fill_{name}")
    if value is None and name == "shared_x_sf" and params.get("fill_byte") is not None:
        byte = int(params["fill_byte"])
        value = int.from_bytes(bytes([byte] * 4), "little", signed=True)
    if value is None:
        return None
    before = torch.empty_like(tensor)
    if tensor.element_size() == 1:
        before.view(torch.uint8).fill_(int(value) & 255)
    else:
        before.fill_(value)
    return before


def _pair_tensors(
    left: dict[str, Tensor], right: dict[str, Tensor], expected: Path, actual: Path, request: Request
) -> Loaded:
    if request.output is not None:
        for side, path in ((left, expected), (right, actual)):
            if len(side) > 1 and request.output not in side:
                raise InputError(f"{path}: no tensor {request.output!r}; there are {_some(list(side))}")
        left = {request.output: left.get(request.output, next(iter(left.values())))}
        right = {request.output: right.get(request.output, next(iter(right.values())))}
    elif len(left) == 1 and len(right) == 1:
        name = next(iter(left))
        right = {name: next(iter(right.values()))}
    shared = [name for name in left if name in right]
    if not shared:
        raise InputError(
            f"{expected} and {actual} share no tensor: {_some(list(left))} and {_some(list(right))}"
        )
    if request.layout is not None and len(shared) > 1:
        raise InputError(f"--layout needs one tensor: name it with --output; there are {_some(shared)}")
    pairs = [
        OutputPair(
            name,
            left[name],
            right[name],
            _dtype(request, name, left[name]),
            _dtype(request, name, right[name]),
            request.padding,
            _layout(request, left[name]),
            code=request.code,
        )
        for name in shared
    ]
    findings = [_missing("", name, left[name], "actual") for name in left if name not in right]
    findings += [_missing("", name, right[name], "expected") for name in right if name not in left]
    return Loaded((CasePair(tuple(pairs), request.op, dict(request.params)),), tuple(findings))


def _dtype(request: Request, name: str, tensor: Tensor) -> str:
    packed = (
        request.op is not None
        and "nvfp4" in request.op
        and name in ("x", "buf_x")
        and tensor.element_size() == 1
    )
    return "e2m1x2" if packed else dtype_name(tensor.dtype)


def _flat(side: Bundle | dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    if not isinstance(side, Bundle):
        return side
    if len(side.cases) != 1:
        raise InputError(
            f"{path}: a bundle of {len(side.cases)} cases can only be compared with another bundle"
        )
    return {name: output.tensor for name, output in side.cases[0].outputs.items()}


def _layout(request: Request, tensor: Tensor) -> Any:
    """The layout by name. Sizes that are not given are read off the tensor where it shows them."""
    if request.layout is None:
        return None
    from reference.layouts import LAYOUTS, get_layout

    if request.layout not in LAYOUTS:
        raise InputError(f"--layout: expected one of {', '.join(sorted(LAYOUTS))}; got {request.layout!r}")
    family = LAYOUTS[request.layout]
    sizes = {name: value for name, value in request.params.items() if name in family.params}
    for name, value in _sizes_of(tensor).items():
        if name in family.params and name not in sizes:
            sizes[name] = value
    missing = [name for name in family.params if name not in sizes and name not in family.defaults]
    if missing:
        raise InputError(
            f"--layout {request.layout} also needs {', '.join(f'--param {name}=...' for name in missing)}"
        )
    try:
        layout = get_layout(request.layout, **sizes)
    except (ValueError, TypeError) as error:
        raise InputError(f"--layout {request.layout}: {error}") from error
    shape = tuple(layout.storage_shape)
    if shape != tuple(tensor.shape) or layout.storage_dtype.itemsize != tensor.element_size():
        raise InputError(
            f"--layout {request.layout} with {sizes} is stored as {list(shape)} of {layout.storage_dtype}; "
            f"the file holds {list(tensor.shape)} of {tensor.dtype}"
        )
    return layout


def _sizes_of(tensor: Tensor) -> dict[str, Any]:
    """Sizes under all the names that layouts have for them, as far as a tensor's shape tells."""
    if tensor.dim() not in (2, 3):
        return {}
    rows, columns = int(tensor.shape[-2]), int(tensor.shape[-1])
    units = 4 if tensor.dtype == torch.int32 else 1
    sizes: dict[str, Any] = {
        "rows": rows,
        "mn": rows,
        "columns": columns,
        "groups": columns * units,
        "topk": columns,
        "dtype": dtype_name(tensor.dtype),
        "tokens": rows,
    }
    if tensor.dim() == 3:
        sizes["batch"] = int(tensor.shape[0])
    if not tensor.is_contiguous() and tensor.stride(-1) == 1 and tensor.dim() == 2:
        sizes["row_stride"] = tensor.stride(0)
    return sizes


def _missing(case: str, name: str, tensor: Tensor, side: str) -> Finding:
    number = tensor.numel()
    return Finding(
        name,
        "missing_output",
        "unique",
        (),
        number,
        number,
        "the whole tensor",
        (),
        f"the {side} side has none",
        case=case,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
