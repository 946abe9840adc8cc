"""Staging: hidden states and routing into the buffers that a launch reads. Source: NUMERICS 2, 3, 4 and 6."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.buffers import BufferSpec
from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, Sweep
from megamoe.suite.routing_inputs import (
    DTYPES,
    eplb_tensors,
    fill_padding,
    output_stride,
    padding_mask,
    strided,
    topk_ids,
    topk_weights,
)
from megamoe.suite.values import Target, generate

FP8_RECIPES = tuple(
    [f"fp8_ue8m0_g{group}" for group in (32, 64, 128)] + [f"fp8_fp32_g{group}" for group in (16, 32, 64, 128)]
)
UNQUANTIZED = "unquantized"
BLOCK_MS = (8, 16, 32, 64, 96, 128, 192, 240)
_LOCAL_EXPERTS = 9
_PAGE_ROWS_PAST = 4

_ROUTING: Params = {
    "values": "position",
    "tokens": 5,
    "hidden": 384,
    "topk": 6,
    "dtype": "bf16",
    "ids": "i64",
    "weights": "fp32",
    "experts": 24,
    "wild_ids": False,
    "padding": None,
    "garbage": None,
    "strides": "dense",
}
_EPLB: Params = {"eplb": None, "num_unpadded_tokens": None}
_SHARED: Params = {"shared_block_m": None, "page_rows": None, "fill_byte": None}


def _target(recipe: str) -> Target:
    if recipe.startswith("nvfp4"):
        return Target("e2m1", "e4m3", 16, two_level=recipe.startswith("nvfp4_token"))
    if recipe.startswith("fp8"):
        _, scale, group = recipe.split("_")[:3]
        return Target("e4m3fn", scale, int(group[1:]))
    return Target("e4m3fn", "fp32", 128)


def _inputs(params: Params, rng: np.random.Generator, recipe: str) -> dict[str, Tensor]:
    """hidden_states and the routing, with whatever the parameters ask for around them."""
    tokens, topk = params["tokens"], params["topk"]
    shape = (tokens, params["hidden"])
    padding = padding_mask(tokens, params["padding"], rng)
    hidden = generate(params["values"], shape, _target(recipe), rng, DTYPES[params["dtype"]])
    hidden = fill_padding(hidden, padding, params["garbage"])
    found = {
        "hidden_states": hidden,
        "topk_ids": topk_ids(tokens, topk, params["experts"], params["ids"], rng, params["wild_ids"]),
        "topk_weights": topk_weights(tokens, topk, params["weights"], rng, padding),
    }
    if padding is not None:
        found["is_padding"] = padding
    found = {name: strided(tensor, params["strides"]) for name, tensor in found.items()}
    if params.get("eplb"):
        found |= eplb_tensors(params["experts"], 4, rng)
    if params.get("l2_activation_scale") is not None:
        found["w2_global_scale"] = torch.from_numpy(rng.uniform(1e-5, 1e-3, _LOCAL_EXPERTS).astype(np.float32))
    return found


def _call(params: Params, inputs: dict[str, Tensor], buffers: dict[str, BufferSpec], **values: Any) -> Call:
    """The call of a prepare_* function: ``buffers`` and the two routing outputs, inputs and plain values."""
    shape = tuple(inputs["topk_ids"].shape)
    stride = output_stride(shape, params["strides"])
    buffers = {
        **buffers,
        "topk_idx_out": BufferSpec(shape, torch.int64, stride),
        "topk_weights_out": BufferSpec(shape, torch.float32, stride),
    }
    if not params.get("eplb"):
        return Call({**inputs, **values}, buffers)
    unpadded = params["num_unpadded_tokens"]
    unpadded = shape[0] if unpadded is None else unpadded
    arguments = {name: tensor for name, tensor in inputs.items() if name != "expert_load"}
    arguments |= values
    arguments |= {
        "record": torch.tensor(params["eplb"] == "record"),
        "unpadded": torch.tensor(unpadded, dtype=torch.int32),
    }
    load = inputs["expert_load"]
    buffers["expert_load"] = BufferSpec(tuple(load.shape), load.dtype, initial=load)
    return Call(arguments, buffers, bind=_bind_eplb)


def _bind_eplb(arguments: dict[str, Any], views: dict[str, Tensor]) -> dict[str, Any]:
    from megamoe.eplb import EplbLayerState

    state = EplbLayerState(
        expert_load_view=views.pop("expert_load"),
        logical_to_physical_map=arguments.pop("logical_to_physical_map"),
        logical_replica_count=arguments.pop("logical_replica_count"),
        should_record_tensor=arguments.pop("record"),
        num_unpadded_tokens_tensors=[arguments.pop("unpadded")],
    )
    return {**arguments, **views, "eplb_state": state}


def _row_stride(shape: tuple[int, int], params: Params) -> tuple[int, ...] | None:
    """NVFP4 buffers are row-major by contract: only their rows may be apart."""
    return output_stride(shape, "dense" if params["strides"] == "dense" else "rows")


def _pages(params: Params, tokens: int, hidden: int) -> BufferSpec:
    block_m = params["shared_block_m"]
    rows = params["page_rows"]
    if rows is None:
        rows = -(-tokens // block_m) * (-(-block_m // 128) * 128) + _PAGE_ROWS_PAST
    # MN-major, as in the symmetric buffer; a recorded case says what the buffer held
    stride = (1, rows) if params["strides"] != "rows" else (hidden // 128 + 3, 1)
    return BufferSpec((rows, hidden // 128), torch.int32, stride, fill=params["fill_byte"])


# ---- prepare_megamoe_inputs


def _fp8_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return _inputs(params, rng, params["recipe"])


def _fp8_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    tokens, hidden = inputs["hidden_states"].shape
    kind = params["strides"]
    values: dict[str, Any] = {"hidden_quant": _hidden_quant(params["recipe"])}
    buffers = {}
    if params["recipe"] == UNQUANTIZED:
        buffers["x"] = BufferSpec((tokens, hidden), DTYPES[params["x_dtype"]], output_stride((tokens, hidden), kind))
        values["x_sf"] = None
    else:
        target = _target(params["recipe"])
        ue8m0 = target.scale == "ue8m0"
        scales = (tokens, hidden // (128 if ue8m0 else target.group))
        buffers["x"] = BufferSpec((tokens, hidden), torch.float8_e4m3fn, output_stride((tokens, hidden), kind))
        buffers["x_sf"] = BufferSpec(
            scales, torch.int32 if ue8m0 else torch.float32, output_stride(scales, kind)
        )
    if params["shared_block_m"] is not None:
        buffers["shared_x_sf"] = _pages(params, tokens, hidden)
        values["shared_block_m"] = params["shared_block_m"]
    return _call(params, inputs, buffers, **values)


def _hidden_quant(recipe: str) -> Any:
    if recipe == UNQUANTIZED:
        return None
    from megamoe.quant_keys import GroupShape, QuantKey, ScaleDesc

    target = _target(recipe)
    dtype = torch.uint8 if target.scale == "ue8m0" else torch.float32
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(dtype, False, GroupShape(1, target.group)))


def _supply_routing(case: bundle.Case, params: Params) -> dict[str, Tensor]:
    """The recorded inputs, and some routing where the recording has none (its outputs do not depend on it)."""
    inputs = dict(case.inputs)
    tokens = inputs["hidden_states"].shape[0]
    if "topk_ids" not in inputs:
        inputs["topk_ids"] = torch.zeros(tokens, params["topk"], dtype=torch.int64)
        inputs["topk_weights"] = torch.ones(tokens, params["topk"])
    return inputs


def _recorded_shared(case: bundle.Case) -> Params:
    pages = case.outputs.get("shared_x_sf")
    return {
        "shared_block_m": case.params.get("shared_block_m"),
        "fill_byte": case.params.get("fill_byte"),
        "page_rows": None if pages is None else pages.shape[0],
        # the recording does not say how the pages lay in memory; row-major is how it was stored
        "strides": "dense",
    }


def _fp8_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    recipes = {"mxfp8": "fp8_ue8m0_g32", "fp8_g128_f32": "fp8_fp32_g128"}
    params = PREPARE_MEGAMOE_INPUTS.defaults | _recorded_shared(case)
    params["recipe"] = recipes[case.params["hidden_quant"]]
    return params, _supply_routing(case, params)


PREPARE_MEGAMOE_INPUTS = Operation(
    name="prepare_megamoe_inputs",
    reference="reference.staging:prepare_megamoe_inputs",
    implementations=(Implementation("triton", "megamoe.staging:prepare_megamoe_inputs", ("triton",)),),
    outputs={
        "x": Output("row_major"),
        "x_sf": Output("packed_scale_rows"),
        "shared_x_sf": Output("shared_scale_pages"),
        "topk_idx_out": Output("topk_ids"),
        "topk_weights_out": Output("topk_weights"),
        "expert_load": Output("row_major"),
    },
    recipes=(*FP8_RECIPES, UNQUANTIZED),
    defaults={"recipe": "fp8_ue8m0_g32", **_ROUTING, **_SHARED, **_EPLB, "x_dtype": "bf16"},
    sweeps=(
        Sweep("smoke", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g128", "fp8_fp32_g32"), "hidden": (256,)}),
        Sweep("smoke", {"padding": ("tail",), "shared_block_m": (16,), "eplb": ("record",), "tokens": (33,), "hidden": (128,)}),
        Sweep("default", {"recipe": FP8_RECIPES, "values": ("position", "ties", "edges", "specials", "codes", "random")}),
        Sweep("default", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g128"), "values": ("tiny", "saturating", "outliers")}),
        Sweep("default", {"recipe": (UNQUANTIZED,), "values": ("specials", "random"), "dtype": ("bf16", "fp32"), "x_dtype": ("bf16", "fp32")}),
        Sweep("default", {"recipe": (UNQUANTIZED,), "values": ("specials",), "dtype": ("fp16",), "x_dtype": ("bf16", "fp16")}),
        Sweep("default", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g64"), "tokens": (2,), "hidden": (128, 256, 640, 2304)}),
        Sweep("default", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g128"), "tokens": (1,), "hidden": (7168,)}),
        Sweep("default", {"tokens": (0, 1, 63, 64, 65, 130), "hidden": (128,)}),
        Sweep("default", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g16"), "values": ("edges", "ties"), "dtype": ("fp16", "fp32")}),
        Sweep("default", {"padding": ("none", "tail", "random", "all"), "garbage": ("nan", "448", "0"), "hidden": (128,)}),
        Sweep("default", {"ids": ("i32", "i64"), "weights": ("fp32", "bf16", "fp16"), "wild_ids": (True,), "hidden": (128,)}),
        Sweep("default", {"topk": (1, 2, 8), "padding": (None, "tail"), "hidden": (128,)}),
        Sweep("default", {"shared_block_m": BLOCK_MS, "tokens": (1, 200), "hidden": (128,)}),
        Sweep("default", {"recipe": ("fp8_ue8m0_g64", "fp8_ue8m0_g128"), "shared_block_m": (16,), "tokens": (40,), "hidden": (256,)}),
        Sweep("default", {"eplb": ("record", "map"), "num_unpadded_tokens": (None, 0, 7, 40), "tokens": (21,), "hidden": (128,), "ids": ("i32", "i64"), "wild_ids": (True,)}),
        Sweep("default", {"eplb": ("record",), "padding": ("random",), "garbage": ("nan",), "tokens": (21,), "hidden": (128,), "ids": ("i32", "i64")}),
        Sweep("default", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g32", UNQUANTIZED), "strides": ("rows", "columns", "step"), "padding": ("random",)}),
        Sweep("default", {"strides": ("rows", "columns"), "shared_block_m": (32,), "tokens": (40,), "hidden": (256,)}),
        Sweep("full", {"recipe": FP8_RECIPES, "values": ("every_amax",), "tokens": (255,), "hidden": (4096,)}),
        Sweep("full", {"recipe": FP8_RECIPES, "values": ("random", "position"), "tokens": (1, 8, 64, 512), "hidden": (2304, 4096, 7168)}),
        Sweep("full", {"recipe": ("fp8_ue8m0_g32", "fp8_fp32_g128"), "values": ("random",), "tokens": (2048, 8192), "hidden": (7168,), "topk": (8,)}),
        Sweep("full", {"values": ("specials", "edges", "ties"), "recipe": FP8_RECIPES, "tokens": (512,), "hidden": (1024,)}),
        Sweep("full", {"shared_block_m": BLOCK_MS, "tokens": (300, 1000), "hidden": (256, 7168), "padding": ("tail",)}),
        Sweep("full", {"eplb": ("record",), "num_unpadded_tokens": (None, 1000), "tokens": (1024,), "hidden": (256,), "experts": (256,), "topk": (8,), "wild_ids": (True,)}),
    ),
    inputs=_fp8_inputs,
    call=_fp8_call,
    golden=_fp8_golden,
    source="NUMERICS 2, 4 and 6",
)


# ---- prepare_megamoe_nvfp4_inputs


def _nvfp4_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return _inputs(params, rng, "nvfp4_token")


def _nvfp4_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    tokens, hidden = inputs["hidden_states"].shape

    def rows(columns: int, dtype: torch.dtype) -> BufferSpec:
        return BufferSpec((tokens, columns), dtype, _row_stride((tokens, columns), params))

    buffers = {
        "x": rows(hidden // 2, torch.uint8),
        "x_sf": rows(hidden // 64, torch.int32),
        "x_scales": BufferSpec((tokens,), torch.float32, output_stride((tokens,), params["strides"])),
    }
    values: dict[str, Any] = {}
    if params["shared"] is not None:
        buffers["shared_x"] = rows(hidden, {"mxfp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}[params["shared"]])
    if params["shared"] == "mxfp8":
        buffers["shared_x_sf"] = _pages(params, tokens, hidden)
        values["shared_block_m"] = params["shared_block_m"]
    if params["l2_activation_scale"] is not None:
        values["l2_activation_scale"] = params["l2_activation_scale"]
        buffers["l2_alpha"] = BufferSpec(tuple(inputs["w2_global_scale"].shape), torch.float32)
    return _call(params, inputs, buffers, **values)


def _nvfp4_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    params = PREPARE_MEGAMOE_NVFP4_INPUTS.defaults | _recorded_shared(case)
    params["shared"] = case.params.get("shared")
    params["l2_activation_scale"] = case.params.get("l2_activation_scale")
    return params, _supply_routing(case, params)


PREPARE_MEGAMOE_NVFP4_INPUTS = Operation(
    name="prepare_megamoe_nvfp4_inputs",
    reference="reference.staging:prepare_megamoe_nvfp4_inputs",
    implementations=(Implementation("triton", "megamoe.staging:prepare_megamoe_nvfp4_inputs", ("triton",)),),
    outputs={
        "x": Output("e2m1_rows"),
        "x_sf": Output("packed_scale_rows"),
        "x_scales": Output("row_major"),
        "shared_x": Output("row_major"),
        "shared_x_sf": Output("shared_scale_pages"),
        "l2_alpha": Output("row_major"),
        "topk_idx_out": Output("topk_ids"),
        "topk_weights_out": Output("topk_weights"),
        "expert_load": Output("row_major"),
    },
    recipes=("nvfp4_token",),
    defaults={"recipe": "nvfp4_token", **_ROUTING, "shared": None, **_SHARED, "l2_activation_scale": None, **_EPLB},
    sweeps=(
        Sweep("smoke", {"hidden": (128, 384), "tokens": (3,)}),
        Sweep("smoke", {"shared": ("mxfp8",), "shared_block_m": (16,), "tokens": (20,), "hidden": (128,), "l2_activation_scale": (0.37,)}),
        Sweep("default", {"values": ("position", "ties", "edges", "specials", "codes", "random", "tiny", "saturating", "outliers")}),
        Sweep("default", {"values": ("position", "random"), "tokens": (2,), "hidden": (128, 256, 640, 2304)}),
        Sweep("default", {"tokens": (1,), "hidden": (7168,)}),
        Sweep("default", {"tokens": (0, 1, 64, 65), "hidden": (128,), "l2_activation_scale": (0.37,)}),
        Sweep("default", {"values": ("edges", "random"), "dtype": ("fp16", "fp32")}),
        Sweep("default", {"shared": ("bf16",), "values": ("specials",), "dtype": ("bf16", "fp32")}),
        Sweep("default", {"shared": ("mxfp8",), "shared_block_m": (8, 64, 192), "values": ("random", "specials"), "tokens": (70,), "hidden": (128,)}),
        Sweep("default", {"padding": ("none", "tail", "all"), "garbage": ("nan", "448"), "ids": ("i32",), "hidden": (128,)}),
        Sweep("default", {"eplb": ("record", "map"), "num_unpadded_tokens": (None, 7), "tokens": (21,), "hidden": (128,), "wild_ids": (True,)}),
        Sweep("default", {"strides": ("rows", "columns", "step"), "padding": ("random",), "l2_activation_scale": (1.0,)}),
        Sweep("default", {"strides": ("rows",), "shared": ("bf16", "mxfp8"), "shared_block_m": (32,), "tokens": (40,), "hidden": (256,)}),
        Sweep("full", {"values": ("every_amax",), "tokens": (255,), "hidden": (4096,)}),
        Sweep("full", {"values": ("random", "position", "edges", "specials"), "tokens": (1, 8, 64, 512), "hidden": (2304, 7168)}),
        Sweep("full", {"values": ("random",), "tokens": (2048, 8192), "hidden": (7168,), "topk": (8,)}),
        Sweep("full", {"shared": ("mxfp8",), "shared_block_m": BLOCK_MS, "tokens": (300,), "hidden": (1024,)}),
        Sweep("full", {"shared": ("bf16",), "tokens": (300,), "hidden": (7168,), "values": ("random",)}),
    ),
    inputs=_nvfp4_inputs,
    call=_nvfp4_call,
    golden=_nvfp4_golden,
    source="NUMERICS 3a, 2, 4 and 6",
)


# ---- prepare_megamoe_nvfp4_block_inputs


def _nvfp4_block_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return _inputs(params, rng, "nvfp4_block")


def _nvfp4_block_buffers(params: Params, inputs: dict[str, Tensor]) -> dict[str, BufferSpec]:
    tokens, hidden = inputs["hidden_states"].shape
    return {
        name: BufferSpec((tokens, columns), torch.uint8, _row_stride((tokens, columns), params))
        for name, columns in (("x", hidden // 2), ("x_sf", hidden // 16))
    }


def _nvfp4_block_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    return _call(params, inputs, _nvfp4_block_buffers(params, inputs))


def _nvfp4_block_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    params = dict(PREPARE_MEGAMOE_NVFP4_BLOCK_INPUTS.defaults)
    return params, _supply_routing(case, params)


PREPARE_MEGAMOE_NVFP4_BLOCK_INPUTS = Operation(
    name="prepare_megamoe_nvfp4_block_inputs",
    reference="reference.staging:prepare_megamoe_nvfp4_block_inputs",
    implementations=(
        Implementation("triton", "megamoe.staging:prepare_megamoe_nvfp4_block_inputs", ("triton",)),
    ),
    outputs={
        "x": Output("e2m1_rows"),
        "x_sf": Output("row_major"),
        "topk_idx_out": Output("topk_ids"),
        "topk_weights_out": Output("topk_weights"),
    },
    recipes=("nvfp4_block",),
    defaults={"recipe": "nvfp4_block", **_ROUTING},
    sweeps=(
        Sweep("smoke", {"hidden": (64, 384), "tokens": (3,)}),
        Sweep("default", {"values": ("position", "ties", "edges", "specials", "codes", "random", "tiny", "saturating", "outliers")}),
        Sweep("default", {"values": ("position", "random"), "tokens": (2,), "hidden": (64, 192, 640, 1024, 2304)}),
        Sweep("default", {"tokens": (1,), "hidden": (7168,)}),
        Sweep("default", {"tokens": (0, 1, 64, 65), "hidden": (128,)}),
        Sweep("default", {"values": ("edges", "random"), "dtype": ("fp16", "fp32")}),
        Sweep("default", {"padding": ("none", "random", "all"), "garbage": ("nan", "0"), "ids": ("i32", "i64"), "hidden": (128,)}),
        Sweep("default", {"strides": ("rows", "columns", "step"), "padding": ("random",)}),
        Sweep("full", {"values": ("every_amax",), "tokens": (255,), "hidden": (2048,)}),
        Sweep("full", {"values": ("random", "position", "edges", "specials"), "tokens": (1, 8, 64, 512), "hidden": (2304, 7168)}),
        Sweep("full", {"values": ("random",), "tokens": (2048, 8192), "hidden": (7168,), "topk": (8,)}),
    ),
    inputs=_nvfp4_block_inputs,
    call=_nvfp4_block_call,
    golden=_nvfp4_block_golden,
    source="NUMERICS 3b and 6",
)


# ---- prepare_megamoe_nvfp4_with_norm


def _norm_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    shape = (params["tokens"], params["hidden"])
    hidden = generate(params["values"], shape, _target("nvfp4_block"), rng, torch.bfloat16)
    weight = torch.from_numpy(rng.normal(0.0, 0.3, params["hidden"]).astype(np.float32))
    return {"hidden_states": hidden, "norm_weight": weight.to(DTYPES[params["weights"]])}


def _norm_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    return Call(
        {**inputs, "norm_eps": params["norm_eps"], "gain_center": params["gain_center"]},
        _nvfp4_block_buffers(params, inputs),
    )


def _norm_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    return PREPARE_MEGAMOE_NVFP4_WITH_NORM.defaults | case.params, dict(case.inputs)


PREPARE_MEGAMOE_NVFP4_WITH_NORM = Operation(
    name="prepare_megamoe_nvfp4_with_norm",
    reference="reference.staging:prepare_megamoe_nvfp4_with_norm",
    implementations=(
        Implementation("triton", "megamoe.staging:prepare_megamoe_nvfp4_with_norm", ("triton",)),
    ),
    outputs={"x": Output("e2m1_rows"), "x_sf": Output("row_major")},
    recipes=("nvfp4_block",),
    defaults={
        "recipe": "nvfp4_block",
        "values": "random",
        "tokens": 3,
        "hidden": 1024,
        "weights": "bf16",
        "norm_eps": 1e-5,
        "gain_center": 1.0,
        "strides": "dense",
    },
    sweeps=(
        Sweep("smoke", {"hidden": (256,)}),
        Sweep("default", {"values": ("random", "outliers"), "hidden": (64, 640, 1024, 4096)}),
        Sweep("default", {"weights": ("fp32", "fp16"), "gain_center": (0.0, 1.0), "norm_eps": (1e-6,)}),
        Sweep("default", {"tokens": (0, 1)}),
        Sweep("default", {"strides": ("rows",)}),
        Sweep("full", {"values": ("random", "outliers"), "tokens": (512,), "hidden": (4096, 7168)}),
    ),
    inputs=_norm_inputs,
    call=_norm_call,
    golden=_norm_golden,
    source="NUMERICS 3d",
)


# ---- prepare_megamoe_bf16_inputs


def _bf16_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return _inputs(params, rng, UNQUANTIZED)


def _bf16_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    shape = tuple(inputs["hidden_states"].shape)
    return _call(params, inputs, {"x": BufferSpec(shape, torch.bfloat16, output_stride(shape, params["strides"]))})


PREPARE_MEGAMOE_BF16_INPUTS = Operation(
    name="prepare_megamoe_bf16_inputs",
    reference="reference.staging:prepare_megamoe_bf16_inputs",
    implementations=(Implementation("triton", "megamoe.staging:prepare_megamoe_bf16_inputs", ("triton",)),),
    outputs={
        "x": Output("row_major"),
        "topk_idx_out": Output("topk_ids"),
        "topk_weights_out": Output("topk_weights"),
    },
    defaults=_ROUTING,
    sweeps=(
        Sweep("smoke", {"values": ("specials",), "hidden": (256,)}),
        Sweep("default", {"values": ("specials", "random"), "tokens": (0, 1, 33), "hidden": (128, 384, 2304)}),
        Sweep("default", {"padding": ("tail", "random"), "garbage": ("nan",), "ids": ("i32", "i64")}),
        Sweep("default", {"strides": ("rows", "columns", "step"), "padding": ("random",)}),
        Sweep("full", {"values": ("random",), "tokens": (512, 8192), "hidden": (7168,)}),
    ),
    inputs=_bf16_inputs,
    call=_bf16_call,
    source="NUMERICS 6.1 and 8.9",
)


# ---- eplb_map_to_physical_and_record


def _eplb_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    ids = topk_ids(params["tokens"], params["topk"], params["experts"], params["ids"], rng, params["wild_ids"])
    return {
        "topk_ids": strided(ids, params["strides"]),
        **eplb_tensors(params["experts"], params["slots"], rng, params["map_dtype"]),
    }


def _eplb_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    arguments: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if name != "expert_load"}
    arguments["record_enabled"] = torch.tensor(params["record"])
    if params["num_unpadded_tokens"] is not None:
        arguments["num_unpadded_tokens"] = torch.tensor(params["num_unpadded_tokens"], dtype=torch.int32)
    load = inputs["expert_load"]
    buffers = {"expert_load": BufferSpec(tuple(load.shape), load.dtype, initial=load)}
    return Call(arguments, buffers, bind=_bind_load, returns=("physical_ids",))


def _bind_load(arguments: dict[str, Any], views: dict[str, Tensor]) -> dict[str, Any]:
    return {**arguments, "expert_load_view": views["expert_load"]}


def _eplb_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    return EPLB_MAP.defaults | case.params, dict(case.inputs)


EPLB_MAP = Operation(
    name="eplb_map_to_physical_and_record",
    reference="reference.eplb:eplb_map_to_physical_and_record",
    implementations=(Implementation("triton", "megamoe.eplb:eplb_map_to_physical_and_record", ("triton",)),),
    outputs={"expert_load": Output("row_major"), "physical_ids": Output("topk_ids", "compared")},
    defaults={
        "tokens": 21,
        "topk": 6,
        "ids": "i64",
        "experts": 24,
        "slots": 4,
        "map_dtype": "i64",
        "wild_ids": True,
        "record": True,
        "num_unpadded_tokens": None,
        "strides": "dense",
    },
    sweeps=(
        Sweep("smoke", {"record": (True, False), "ids": ("i32", "i64")}),
        Sweep("default", {"record": (True, False), "num_unpadded_tokens": (None, 0, 7, 40), "ids": ("i32", "i64")}),
        Sweep("default", {"tokens": (0, 1, 130), "topk": (1, 8), "experts": (1, 64), "slots": (1, 3)}),
        Sweep("default", {"map_dtype": ("i32",), "ids": ("i32", "i64"), "wild_ids": (True, False)}),
        Sweep("default", {"strides": ("rows", "columns", "step")}),
        Sweep("full", {"tokens": (4096,), "topk": (8,), "experts": (256,), "slots": (2, 8), "num_unpadded_tokens": (None, 1000)}),
    ),
    inputs=_eplb_inputs,
    call=_eplb_call,
    golden=_eplb_golden,
    source="NUMERICS 6.3 and 6.4",
)

ROWS = (
    PREPARE_MEGAMOE_INPUTS,
    PREPARE_MEGAMOE_NVFP4_INPUTS,
    PREPARE_MEGAMOE_NVFP4_BLOCK_INPUTS,
    PREPARE_MEGAMOE_NVFP4_WITH_NORM,
    PREPARE_MEGAMOE_BF16_INPUTS,
    EPLB_MAP,
)
