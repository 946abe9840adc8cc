"""What an output is: its layout, the role of its units and their format, from operation, name, dtype and shape.

``describe`` never fails: an output that it does not know is a plain tensor of its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from megamoe.explain.subject import PlainLayout, Role

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8)
_FLOAT_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
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
    """layout: None means that the tensor is taken in logical order. word_bytes: bytes of a word of several units."""

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
        if usual == "e4m3fn":
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
    shape = tuple(tensor.shape)
    size = tensor.element_size()
    is_scale = "sf" in output.split("_") or "scale" in output
    if dtype_name == "e2m1x2":
        return Description(PlainLayout(shape, 4, 2), "payload", "e2m1", 4)
    if dtype_name == "float8_e4m3fn":
        return Description(
            PlainLayout(shape, 8), "scale" if is_scale else "payload", "ue4m3" if is_scale else "e4m3fn", 8
        )
    if tensor.dtype == torch.float8_e8m0fnu or (tensor.dtype == torch.uint8 and is_scale):
        code = "ue4m3" if op is not None and "nvfp4" in op else "ue8m0"
        return Description(PlainLayout(shape, 8), "scale", code, 8)
    if tensor.dtype == torch.int32 and is_scale:
        code = "ue4m3" if op is not None and "nvfp4" in op and "shared" not in output else "ue8m0"
        return Description(PlainLayout(shape, 8, 4), "scale", code, 8, 4)
    if tensor.dtype in _FLOAT_NAMES:
        role: Role = (
            "scale" if is_scale else "weights" if "weights" in output and "topk" in output else "values"
        )
        return Description(PlainLayout(shape, 8 * size), role, _FLOAT_NAMES[tensor.dtype], 8 * size)
    if tensor.dtype in _INTEGERS and size > 1:
        is_ids = "idx" in output or output.endswith("ids")
        role = "ids" if is_ids else "load" if "load" in output or "stats" in output else "values"
        return Description(
            PlainLayout(shape, 8 * size), cast(Role, role), str(tensor.dtype).removeprefix("torch."), 8 * size
        )
    return Description(PlainLayout(shape, 8 * size), "values", dtype_name, 8 * size)


def _family(
    op: str | None,
    output: str,
    tensor: Tensor,
    dtype_name: str,
    params: Mapping[str, Any],
    inputs: Mapping[str, Tensor],
) -> tuple[str, dict[str, Any], str | None] | None:
    """(layout name, its parameters, format of the units if not the layout's usual one), or None."""
    shape = tuple(tensor.shape)
    nvfp4 = op is not None and "nvfp4" in op
    if len(shape) == 2 and 0 not in shape:
        stride = {"row_stride": tensor.stride(0)} if tensor.stride(0) != shape[1] else {}
        if output in ("x", "shared_x", "buf_x", "l1_acts", "l2_acts") and dtype_name == "float8_e4m3fn":
            return "fp8_rows", {"tokens": shape[0], "columns": shape[1], **stride}, None
        if output in ("x", "buf_x") and (
            dtype_name == "e2m1x2" or (nvfp4 and tensor.dtype in (torch.uint8, torch.int8))
        ):
            return "e2m1_rows", {"tokens": shape[0], "columns": 2 * shape[1], **stride}, None
        if output in ("x_sf", "buf_x_sf") and tensor.dtype == torch.int32:
            group = 16 if nvfp4 else _fp8_group(params)
            full = 4 if nvfp4 else min(4, 128 // group)
            packed = op is not None and "pre_dispatch" in op
            full = 4 if packed else full
            sizes = {
                "tokens": shape[0],
                "groups": shape[1] * full,
                "groups_per_word": full,
                "group_size": group,
            }
            return "packed_scale_rows", {**sizes, **stride}, "ue4m3" if nvfp4 else "ue8m0"
        if output == "shared_x_sf" and params.get("shared_block_m") and "hidden_states" in inputs:
            tokens = inputs["hidden_states"].shape[0]
            # A tensor of one row or one column has both orders; the contiguous one is what torch says then.
            major = "_row_major" if tensor.stride(1) == 1 and shape[0] > 1 else ""
            group = 32 if nvfp4 else _fp8_group(params)
            sizes = {"tokens": tokens, "groups": shape[1] * 4, "block_m": int(params["shared_block_m"])}
            return f"shared_scale_pages{major}", {**sizes, "rows": shape[0], "group_size": group}, None
        if (
            output in ("topk_idx_out", "topk_idx", "buf_topk_idx", "physical_ids")
            and tensor.dtype == torch.int64
        ):
            return "topk_ids", {"tokens": shape[0], "topk": shape[1], **stride}, None
        if (
            output in ("topk_weights_out", "topk_weights", "buf_topk_weights")
            and tensor.dtype == torch.float32
        ):
            return "topk_weights", {"tokens": shape[0], "topk": shape[1], **stride}, None
    return _weight_family(op, output, tensor, inputs)


def _fp8_group(params: Mapping[str, Any]) -> int:
    name = str(params.get("recipe", ""))
    for part in name.split("_"):
        if part.startswith("g") and part[1:].isdigit():
            return int(part[1:])
    return int(params.get("group_size", 32) or 32)


def _weight_family(
    op: str | None, output: str, tensor: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[str, dict[str, Any], str | None] | None:
    if op is None or tensor.dim() not in (2, 3):
        return None
    batch = {"batch": tensor.shape[0]} if tensor.dim() == 3 else {}
    rows, columns = tensor.shape[-2:]
    if (
        op in ("get_mn_major_tma_aligned_tensor", "transform_sf_into_required_layout")
        and tensor.dtype == torch.float32
    ):
        return "mn_major_tma_aligned", {"mn": rows, "groups": columns, **batch}, None
    if op in ("get_mn_major_tma_aligned_packed_ue8m0_tensor", "transform_sf_into_required_layout"):
        groups = 4 * columns
        if (
            "sf" in inputs
            and inputs["sf"].dtype == torch.float32
            and -(-inputs["sf"].shape[-1] // 4) == columns
        ):
            groups = inputs["sf"].shape[-1]
        return "mn_major_packed_ue8m0", {"mn": rows, "groups": groups, **batch}, None
    if op == "transform_weights_for_mega_moe" and "sf" in output.split("_"):
        name = "gate_up_utccp_scales" if output.startswith("l1") else "utccp_scales"
        return name, {"mn": rows, "groups": 4 * columns, **batch}, None
    if op.startswith("transform_weights_for_mega_moe") and output.startswith("l1"):
        dtype = str(tensor.dtype).removeprefix("torch.")
        return "gate_up_interleaved_8", {"rows": rows, "columns": columns, "dtype": dtype, **batch}, None
    return None
