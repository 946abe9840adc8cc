"""What an output is: its layout, the role of its units and their format, from operation, name, dtype and
shape.

``describe`` never fails: an output that it does not know is a plain tensor of its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.explain.subject import PlainLayout, Role

_INTEGERS = (torch.int32, torch.int64, torch.int16)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LAYOUT_CODES: dict[str, tuple[Role, str]] = {
    "fp8_rows": ("payload", "e4m3fn"),
    "e2m1_rows": ("payload", "e2m1"),
    "topk_ids": ("ids", "int64"),
    "topk_weights": ("weights", "float32"),
    "packed_scale_rows": ("scale", "ue8m0"),
    "mn_major_packed_ue8m0": ("scale", "ue8m0"),
    "shared_scale_pages": ("scale", "ue8m0"),
    "shared_scale_pages_row_major": ("scale", "ue8m0"),
    "utccp_scales": ("scale", "ue8m0"),
    "gate_up_utccp_scales": ("scale", "ue8m0"),
    "swizzle_128x4": ("scale", "ue4m3"),
    "mn_major_tma_aligned": ("scale", "float32"),
    "sm90_activation_scales": ("scale", "float32"),
}


@dataclass(frozen=True)
class Description:
    """layout: None means that the tensor is taken in logical order. word_bytes: bytes of a word of several
    units.
    """

    layout: Any
    role: Role
    code: str
    unit_bits: int
    word_bytes: int = 1


def describe_layout(layout: Any, dtype_name: str = "", code: str | None = None) -> Description:
    """The description of a tensor whose layout is given."""
    role, usual = _LAYOUT_CODES.get(layout.name, ("values", ""))
    storage = str(layout.storage_dtype).removeprefix("torch.")
    if not usual:
        usual = {"e2m1x2": "uint8", "float8_e4m3fn": "e4m3fn"}.get(
            dtype_name or storage, dtype_name or storage
        )
        usual = {"float8_e4m3fn": "e4m3fn"}.get(usual, usual)
    if (code or usual) in ("e4m3fn", "e2m1"):
        role = "payload"
    if layout.name == "packed_scale_rows" and code is None and layout.params.get("group_size") == 16:
        usual = "ue4m3"
    return Description(layout, role, code or usual, layout.element_bits, layout.storage_dtype.itemsize)


def describe(
    op: str | None,
    output: str,
    tensor: Tensor,
    dtype_name: str,
    params: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
) -> Description:
    """The description of an operation's output. dtype_name: as in a bundle's manifest."""
    family = _family(op, output, tensor, dtype_name, params, inputs)
    if family is not None:
        name, sizes, code = family
        from reference.layouts import get_layout

        try:
            layout = get_layout(name, **sizes)
        except (ValueError, TypeError):
            layout = None  # sizes that the layout does not have: a plain tensor then
        if (
            layout is not None
            and layout.storage_strides == tuple(tensor.stride())
            and layout.storage_shape == tuple(tensor.shape)
        ):
            return describe_layout(layout, dtype_name, code)
    found = plain(output, tensor, dtype_name, op)
    names = _AXES.get(output)
    if names is not None and len(names) == tensor.dim() and len(found.layout.axes) == len(names):
        return replace(found, layout=PlainLayout(tuple(tensor.shape), found.unit_bits, 1, names))
    return found


_AXES = {
    "y": ("token", "column"),
    "x_sf": ("token", "group"),
    "x_scales": ("token",),
    "l2_alpha": ("expert",),
    "expert_load": ("expert",),
    "stats": ("expert",),
    "x": ("token", "column"),
    "shared_x": ("token", "column"),
    "combine": ("slot", "token", "column"),
    "physical_ids": ("token", "slot"),
}


def plain(output: str, tensor: Tensor, dtype_name: str, op: str | None = None) -> Description:
    """A tensor of which only name, dtype and shape are known."""
    dtype, bits = tensor.dtype, 8 * tensor.element_size()
    name = str(dtype).removeprefix("torch.")
    is_scale = "sf" in output.split("_") or "scale" in output
    scale_code = "ue4m3" if op is not None and "nvfp4" in op and "shared" not in output else "ue8m0"
    role: Role = "values"
    code, units = name, 1
    if dtype_name == "e2m1x2":
        role, code, bits, units = "payload", "e2m1", 4, 2
    elif dtype_name == "float8_e4m3fn":
        role, code = ("scale", "ue4m3") if is_scale else ("payload", "e4m3fn")
    elif dtype == torch.float8_e8m0fnu or (is_scale and dtype in (torch.uint8, torch.int32)):
        role, code, bits, units = "scale", scale_code, 8, tensor.element_size()
    elif dtype in _FLOATS:
        role = "scale" if is_scale else "weights" if "topk_weights" in output else "values"
    elif dtype in _INTEGERS:
        is_load = "load" in output or "stats" in output
        role = "ids" if "idx" in output or output.endswith("ids") else "load" if is_load else "values"
    words = tensor.element_size() if units > 1 and bits == 8 else 1
    return Description(PlainLayout(tuple(tensor.shape), bits, units), role, code, bits, words)


Family = tuple[str, dict[str, Any], str | None]  # layout, its sizes, format of the units if not the usual one


def _family(
    op: str | None,
    output: str,
    tensor: Tensor,
    dtype_name: str,
    params: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
) -> Family | None:
    if tensor.dim() != 2 or tensor.numel() == 0:
        return _weight_family(op, output, tensor, inputs)
    rows, columns = tensor.shape
    pitch = {"row_stride": tensor.stride(0)} if tensor.stride(0) != columns else {}
    nvfp4 = op is not None and "nvfp4" in op
    is_byte = tensor.element_size() == 1
    is_fp8 = dtype_name == "float8_e4m3fn" or (op == "fp8_mega_moe" and is_byte)
    found: Family | None = None
    if output in ("x", "shared_x", "buf_x") and is_fp8:
        found = "fp8_rows", {"tokens": rows, "columns": columns, **pitch}, None
    elif output in ("l1_acts", "l2_acts") and is_fp8:
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = "row_major", {"rows": rows, "columns": columns, "dtype": dtype, **pitch}, "e4m3fn"
    elif output in ("x", "buf_x") and is_byte and (dtype_name == "e2m1x2" or nvfp4):
        found = "e2m1_rows", {"tokens": rows, "columns": 2 * columns, **pitch}, None
    elif output in ("x_sf", "buf_x_sf") and tensor.dtype == torch.int32:
        group = 16 if nvfp4 else _fp8_group(params)
        full = 4 if nvfp4 or (op is not None and "pre_dispatch" in op) else min(4, 128 // group)
        sizes = {"tokens": rows, "groups": columns * full, "groups_per_word": full, "group_size": group}
        found = "packed_scale_rows", {**sizes, **pitch}, "ue4m3" if nvfp4 else "ue8m0"
    elif output == "shared_x_sf" and params.get("shared_block_m") and "hidden_states" in inputs:
        # A tensor of one row or one column has both orders; the contiguous one is what torch says then.
        name = "shared_scale_pages" + ("_row_major" if tensor.stride(1) == 1 and rows > 1 else "")
        sizes = {"tokens": inputs["hidden_states"].shape[0], "groups": columns * 4, "rows": rows}
        sizes |= {"block_m": int(params["shared_block_m"]), "group_size": 32 if nvfp4 else _fp8_group(params)}
        found = name, sizes, None
    elif output in _IDS and tensor.dtype == torch.int64:
        found = "topk_ids", {"tokens": rows, "topk": columns, **pitch}, None
    elif output in _WEIGHTS and tensor.dtype == torch.float32:
        found = "topk_weights", {"tokens": rows, "topk": columns, **pitch}, None
    return found or _weight_family(op, output, tensor, inputs)


_IDS = ("topk_idx_out", "topk_idx", "buf_topk_idx", "physical_ids")
_WEIGHTS = ("topk_weights_out", "topk_weights", "buf_topk_weights")


def _fp8_group(params: Mapping[str, Any]) -> int:
    name = str(params.get("recipe", ""))
    for part in name.split("_"):
        if part.startswith("g") and part[1:].isdigit():
            return int(part[1:])
    return int(params.get("group_size", 32) or 32)


def _weight_family(
    op: str | None, output: str, tensor: Tensor, inputs: Mapping[str, Tensor]
) -> Family | None:
    if op is None or tensor.dim() not in (2, 3):
        return None
    batch = {"batch": tensor.shape[0]} if tensor.dim() == 3 else {}
    rows, columns = tensor.shape[-2:]
    found: Family | None = None
    if op in _MN_MAJOR and tensor.dtype == torch.float32:
        found = "mn_major_tma_aligned", {"mn": rows, "groups": columns, **batch}, None
    elif op in _MN_MAJOR:
        given = inputs.get("sf")
        known = given is not None and given.dtype == torch.float32 and -(-given.shape[-1] // 4) == columns
        groups = given.shape[-1] if known and given is not None else 4 * columns
        found = "mn_major_packed_ue8m0", {"mn": rows, "groups": groups, **batch}, None
    elif op == "transform_weights_for_mega_moe" and "sf" in output.split("_"):
        name = "gate_up_utccp_scales" if output.startswith("l1") else "utccp_scales"
        found = name, {"mn": rows, "groups": 4 * columns, **batch}, None
    elif op.startswith("transform_weights_for_mega_moe") and output.startswith("l1"):
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = "gate_up_interleaved_8", {"rows": rows, "columns": columns, "dtype": dtype, **batch}, None
    return found


_MN_MAJOR = (
    "get_mn_major_tma_aligned_tensor",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "transform_sf_into_required_layout",
)
