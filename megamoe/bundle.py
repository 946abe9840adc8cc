"""Bundles: the one file format of recorded goldens and of failures (``megamoe-bundle/1``).

A bundle is a safetensors file of cases. Case ``c`` has tensors ``c/in/<name>`` and ``c/out/<name>``; the
file's metadata holds ``format``, ``producer``, ``device``, ``torch``, ``triton`` and ``manifest``, a JSON
list with one entry a case::

    {"case", "op", "params", "inputs":  {name: {"dtype", "shape", "stride"?}},
                             "outputs": {name: {"dtype", "shape", "stride"?, "padding"?, "aliases"?}}}

Bytes that safetensors has no type for travel as uint8 and keep their real dtype in the manifest: every float8
dtype, and ``e2m1x2``, two E2M1 codes a byte with the even column in bits 3..0. An input is stored in logical
order and laid out with its ``stride`` when read. An output with a ``stride`` is stored as raw memory, from
its first to its last logical element. ``padding: undefined`` says that the bytes between logical elements
mean nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = "megamoe-bundle/1"
PADDINGS = ("undefined",)

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
    )
}
DTYPES["e2m1x2"] = torch.uint8
_STORED_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
_METADATA = ("producer", "device", "torch", "triton")


class BundleError(ValueError):
    """A file is not a bundle, or its manifest and its tensors contradict each other."""


@dataclass(frozen=True)
class RecordedOutput:
    """What one output held after the call.

    tensor: the logical tensor, with the recorded strides over its raw memory. dtype: the name in the
    manifest. stride: the recorded strides, or None where the recording says nothing about them. padding: None
    (every byte between logical elements counts) or "undefined". aliases: name of the input whose memory this
    is, or None.
    """

    tensor: Tensor
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    padding: str | None = None
    aliases: str | None = None


@dataclass(frozen=True)
class Case:
    """One recorded call. ``inputs`` are laid out as the manifest says, FP8 tensors with their real dtype."""

    case: str
    op: str
    params: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, RecordedOutput]
    input_dtypes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A file's metadata (without the manifest) and its cases, in the order of the manifest."""

    metadata: dict[str, str]
    cases: list[Case]
    path: Path | None = None

    def __getitem__(self, case: str) -> Case:
        for candidate in self.cases:
            if candidate.case == case:
                return candidate
        raise KeyError(f"no case {case!r} in {self.path}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in a manifest."""
    return str(dtype).removeprefix("torch.")


def extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last logical element of a strided tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, the ones that torch gives a new tensor."""
    return torch.empty(shape, device="meta").stride()


def raw_memory(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` from its first to its last logical element, as a 1-D tensor of the same
    dtype."""
    length = extent(tuple(tensor.shape), tensor.stride())
    return torch.as_strided(tensor, (length,), (1,), tensor.storage_offset())


def lay_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of ``tensor`` with the given strides; bytes between its elements are zero."""
    memory = torch.zeros(extent(tuple(tensor.shape), stride), dtype=tensor.dtype)
    view = memory.as_strided(tuple(tensor.shape), stride)
    as_bytes(view).copy_(as_bytes(tensor)) if tensor.dtype in _STORED_AS_BYTES else view.copy_(tensor)
    return view


def as_bytes(tensor: Tensor) -> Tensor:
    """One-byte floats as uint8, so that copying and comparing never converts a value; anything else as it
    is."""
    return tensor.view(torch.uint8) if tensor.dtype in _STORED_AS_BYTES else tensor


def read_bundle(path: str | Path) -> Bundle:
    """Read and check a bundle. Raises BundleError, naming file, case and field, or OSError if there is no
    such file."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such bundle: {path}")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise BundleError(f"{path}: not a safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        raise BundleError(f"{path}: metadata 'format' must be {FORMAT!r}, got {metadata.get('format')!r}")
    try:
        manifest = json.loads(metadata.pop("manifest"))
    except KeyError:
        raise BundleError(f"{path}: metadata has no 'manifest'") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise BundleError(f"{path}: the manifest is not JSON ({error})") from error
    if not isinstance(manifest, list):
        raise BundleError(f"{path}: the manifest must be a list of cases, got {type(manifest).__name__}")
    cases: list[Case] = []
    seen: set[str] = set()
    for entry in manifest:
        case = _read_case(path, entry, tensors)
        if case.case in seen:
            raise BundleError(f"{path}: case {case.case!r} appears twice")
        seen.add(case.case)
        cases.append(case)
    return Bundle(metadata, cases, path)


def write_bundle(
    path: str | Path,
    cases: list[Case],
    *,
    producer: str,
    device: str | None = None,
    triton: str | None = None,
) -> Path:
    """Write ``cases`` as one bundle. Strided inputs and outputs keep their strides. Raises BundleError for
    what the format cannot hold."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    manifest = []
    for case in cases:
        entry: dict[str, Any] = {"case": case.case, "op": case.op, "params": case.params}
        entry["inputs"] = {}
        for name, tensor in case.inputs.items():
            strided = tensor.stride() != contiguous_stride(tuple(tensor.shape))
            entry["inputs"][name] = _describe(case.input_dtypes.get(name), tensor, keep_stride=strided)
            tensors[f"{case.case}/in/{name}"] = as_bytes(tensor.detach().cpu()).contiguous().clone()
        entry["outputs"] = {}
        for name, output in case.outputs.items():
            described = _describe(output.dtype, output.tensor, keep_stride=output.stride is not None)
            if "stride" in described:
                stored = raw_memory(as_bytes(output.tensor.detach().cpu()))
            else:
                stored = as_bytes(output.tensor.detach().cpu()).contiguous()
            for key in ("padding", "aliases"):
                if getattr(output, key) is not None:
                    described[key] = getattr(output, key)
            entry["outputs"][name] = described
            tensors[f"{case.case}/out/{name}"] = stored.clone()
        manifest.append(entry)
    if len({entry["case"] for entry in manifest}) != len(manifest):
        raise BundleError(f"{path}: two cases have the same name")
    metadata = {
        "format": FORMAT,
        "producer": producer,
        "device": device or "cpu",
        "torch": torch.__version__,
        "triton": triton or "",
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, str(path), metadata | {"manifest": json.dumps(manifest, sort_keys=True)})
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error
    return path


def _describe(name: str | None, tensor: Tensor, *, keep_stride: bool) -> dict[str, Any]:
    name = name or dtype_name(tensor.dtype)
    if name not in DTYPES:
        raise BundleError(f"a bundle cannot hold dtype {name}")
    described: dict[str, Any] = {"dtype": name, "shape": list(tensor.shape)}
    if keep_stride:
        described["stride"] = list(tensor.stride())
    return described


def _read_case(path: Path, entry: Any, tensors: dict[str, Tensor]) -> Case:
    name = entry.get("case") if isinstance(entry, dict) else None
    where = f"{path}: case {name!r}"
    if not isinstance(entry, dict):
        raise BundleError(f"{path}: a manifest entry must be an object, got {type(entry).__name__}")
    for key, kind in (("case", str), ("op", str), ("params", dict), ("inputs", dict), ("outputs", dict)):
        if not isinstance(entry.get(key), kind):
            raise BundleError(f"{where}: {key!r} must be a {kind.__name__}, got {entry.get(key)!r}")
    inputs: dict[str, Tensor] = {}
    dtypes: dict[str, str] = {}
    for key, described in entry["inputs"].items():
        label = f"{where}, input {key!r}"
        dtype, shape, stride = _check_description(label, described)
        tensor = _typed(label, tensors.get(f"{name}/in/{key}"), dtype, shape)
        if stride is not None:
            try:
                tensor = lay_out(tensor, stride)
            # Elements that share memory, or more memory than there is.
            except (RuntimeError, TypeError, OverflowError) as error:
                reason = str(error).partition("\n")[0]
                raise BundleError(
                    f"{label}: cannot be laid out with 'stride' {list(stride)} ({reason})"
                ) from error
        inputs[key] = tensor
        dtypes[key] = described["dtype"]
    outputs: dict[str, RecordedOutput] = {}
    for key, described in entry["outputs"].items():
        label = f"{where}, output {key!r}"
        dtype, shape, stride = _check_description(label, described)
        padding, aliases = described.get("padding"), described.get("aliases")
        if padding is not None and padding not in PADDINGS:
            raise BundleError(f"{label}: 'padding' must be one of {PADDINGS}, got {padding!r}")
        if aliases is not None and not (isinstance(aliases, str) and aliases in inputs):
            raise BundleError(f"{label}: aliases {aliases!r}, which is not an input of the case")
        stored = tensors.get(f"{name}/out/{key}")
        if stride is None:
            tensor = _typed(label, stored, dtype, shape)
        else:
            memory = _typed(label, stored, dtype, (extent(shape, stride),))
            tensor = memory.as_strided(shape, stride)
        outputs[key] = RecordedOutput(tensor, described["dtype"], shape, stride, padding, aliases)
    return Case(entry["case"], entry["op"], entry["params"], inputs, outputs, dtypes)


def _check_description(
    label: str, described: Any
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]:
    if not isinstance(described, dict):
        raise BundleError(f"{label}: must be described by an object, got {type(described).__name__}")
    dtype = DTYPES.get(str(described.get("dtype")))
    if dtype is None:
        raise BundleError(f"{label}: unknown dtype {described.get('dtype')!r}")
    shape: Any = described.get("shape")
    stride: Any = described.get("stride")
    if not _is_sizes(shape):
        raise BundleError(f"{label}: 'shape' must be a list of non-negative integers, got {shape!r}")
    if stride is not None and not (_is_sizes(stride) and len(stride) == len(shape)):
        raise BundleError(
            f"{label}: 'stride' must be a list of {len(shape)} non-negative integers, got {stride!r}"
        )
    return dtype, tuple(shape), None if stride is None else tuple(stride)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _typed(label: str, stored: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if stored is None:
        raise BundleError(f"{label}: the file has no such tensor")
    if tuple(stored.shape) != shape:
        raise BundleError(
            f"{label}: the manifest says shape {list(shape)}, the file holds {list(stored.shape)}"
        )
    if stored.dtype == dtype:
        return stored
    if dtype.itemsize != 1 or stored.dtype not in (torch.uint8, torch.int8):
        raise BundleError(f"{label}: the manifest says {dtype_name(dtype)}, the file holds {stored.dtype}")
    return stored.view(dtype)
