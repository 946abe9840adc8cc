"""FP8 and unquantized staging. Source: NUMERICS 2, 4 and 6."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.buffers import BufferSpec
from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, default, full, smoke
from megamoe.suite.routing_inputs import DTYPES, output_stride
from megamoe.suite.rows._staging import (
    BLOCK_MS,
    EPLB,
    FP8_RECIPES,
    ROUTING,
    ROUTING_OUTPUTS,
    SHARED,
    UNQUANTIZED,
    recorded_shared,
    shared_pages,
    staging_call,
    staging_inputs,
    supply_routing,
    target_of,
)


def _fp8_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return staging_inputs(params, rng, params["recipe"])


def _fp8_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    tokens, hidden = inputs["hidden_states"].shape
    kind = params["strides"]
    values: dict[str, Any] = {"hidden_quant": _hidden_quant(params["recipe"])}
    buffers = {}
    if params["recipe"] == UNQUANTIZED:
        buffers["x"] = BufferSpec(
            (tokens, hidden), DTYPES[params["x_dtype"]], output_stride((tokens, hidden), kind)
        )
        values["x_sf"] = None
    else:
        target = target_of(params["recipe"])
        ue8m0 = target.scale == "ue8m0"
        scales = (tokens, hidden // (128 if ue8m0 else target.group))
        buffers["x"] = BufferSpec(
            (tokens, hidden), torch.float8_e4m3fn, output_stride((tokens, hidden), kind)
        )
        buffers["x_sf"] = BufferSpec(
            scales, torch.int32 if ue8m0 else torch.float32, output_stride(scales, kind)
        )
    if params["shared_block_m"] is not None:
        buffers["shared_x_sf"] = shared_pages(params, tokens, hidden)
        values["shared_block_m"] = params["shared_block_m"]
    return staging_call(params, inputs, buffers, **values)


def _hidden_quant(recipe: str) -> Any:
    if recipe == UNQUANTIZED:
        return None
    from megamoe.quant_keys import GroupShape, QuantKey, ScaleDesc

    target = target_of(recipe)
    dtype = torch.uint8 if target.scale == "ue8m0" else torch.float32
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(dtype, False, GroupShape(1, target.group)))


def _fp8_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    recipes = {"mxfp8": "fp8_ue8m0_g32", "fp8_g128_f32": "fp8_fp32_g128"}
    params = PREPARE_MEGAMOE_INPUTS.defaults | recorded_shared(case)
    params["recipe"] = recipes[case.params["hidden_quant"]]
    return params, supply_routing(case, params)


PREPARE_MEGAMOE_INPUTS = Operation(
    name="prepare_megamoe_inputs",
    reference="reference.staging:prepare_megamoe_inputs",
    implementations=(Implementation("triton", "megamoe.staging:prepare_megamoe_inputs", ("triton",)),),
    outputs={
        "x": Output("row_major"),
        "x_sf": Output("packed_scale_rows"),
        "shared_x_sf": Output("shared_scale_pages"),
        **ROUTING_OUTPUTS,
        "expert_load": Output("row_major"),
    },
    recipes=(*FP8_RECIPES, UNQUANTIZED),
    defaults={"recipe": "fp8_ue8m0_g32", **ROUTING, **SHARED, **EPLB, "x_dtype": "bf16"},
    sweeps=(
        smoke(recipe=("fp8_ue8m0_g32", "fp8_fp32_g128", "fp8_fp32_g32"), hidden=256),
        smoke(padding="tail", shared_block_m=16, eplb="record", tokens=33, hidden=128),
        default(recipe=FP8_RECIPES, values=("position", "ties", "edges", "specials", "codes", "random")),
        default(recipe=("fp8_ue8m0_g32", "fp8_fp32_g128"), values=("tiny", "saturating", "outliers")),
        default(
            recipe=UNQUANTIZED,
            values=("specials", "random"),
            dtype=("bf16", "fp32"),
            x_dtype=("bf16", "fp32"),
        ),
        default(recipe=UNQUANTIZED, values="specials", dtype="fp16", x_dtype=("bf16", "fp16")),
        default(recipe=("fp8_ue8m0_g32", "fp8_fp32_g64"), tokens=2, hidden=(128, 256, 640, 2304)),
        default(recipe=("fp8_ue8m0_g32", "fp8_fp32_g128"), tokens=1, hidden=7168),
        default(tokens=(0, 1, 63, 64, 65, 130), hidden=128),
        default(recipe=("fp8_ue8m0_g32", "fp8_fp32_g16"), values=("edges", "ties"), dtype=("fp16", "fp32")),
        default(padding=("none", "tail", "random", "all"), garbage=("nan", "448", "0"), hidden=128),
        default(ids=("i32", "i64"), weights=("fp32", "bf16", "fp16"), wild_ids=True, hidden=128),
        default(topk=(1, 2, 8), padding=(None, "tail"), hidden=128),
        default(shared_block_m=BLOCK_MS, tokens=(1, 200), hidden=128),
        default(recipe=("fp8_ue8m0_g64", "fp8_ue8m0_g128"), shared_block_m=16, tokens=40, hidden=256),
        default(
            eplb=("record", "map"),
            num_unpadded_tokens=(None, 0, 7, 40),
            tokens=21,
            hidden=128,
            ids=("i32", "i64"),
            wild_ids=True,
        ),
        default(eplb="record", padding="random", garbage="nan", tokens=21, hidden=128, ids=("i32", "i64")),
        default(eplb="record_many", num_unpadded_tokens=(None, 7), tokens=(3, 21), hidden=128, wild_ids=True),
        default(
            recipe=("fp8_ue8m0_g32", "fp8_fp32_g32", UNQUANTIZED),
            strides=("rows", "columns", "step"),
            padding="random",
        ),
        default(strides=("rows", "columns"), shared_block_m=32, tokens=40, hidden=256),
        full(recipe=FP8_RECIPES, values="every_amax", tokens=255, hidden=4096),
        full(
            recipe=FP8_RECIPES,
            values=("random", "position"),
            tokens=(1, 8, 64, 512),
            hidden=(2304, 4096, 7168),
        ),
        full(
            recipe=("fp8_ue8m0_g32", "fp8_fp32_g128"),
            values="random",
            tokens=(2048, 8192),
            hidden=7168,
            topk=8,
        ),
        full(values=("specials", "edges", "ties"), recipe=FP8_RECIPES, tokens=512, hidden=1024),
        full(shared_block_m=BLOCK_MS, tokens=(300, 1000), hidden=(256, 7168), padding="tail"),
        full(
            eplb="record",
            num_unpadded_tokens=(None, 1000),
            tokens=1024,
            hidden=256,
            experts=256,
            topk=8,
            wild_ids=True,
        ),
        full(
            eplb=("record", "record_many", "map"),
            num_unpadded_tokens=(None, 500),
            tokens=(64, 512, 2048, 4096),
            hidden=2304,
            experts=256,
            topk=(3, 8),
            wild_ids=True,
        ),
    ),
    inputs=_fp8_inputs,
    call=_fp8_call,
    golden=_fp8_golden,
    source="NUMERICS 2, 4 and 6",
)


def _bf16_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return staging_inputs(params, rng, UNQUANTIZED)


def _bf16_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    shape = tuple(inputs["hidden_states"].shape)
    return staging_call(
        params, inputs, {"x": BufferSpec(shape, torch.bfloat16, output_stride(shape, params["strides"]))}
    )


PREPARE_MEGAMOE_BF16_INPUTS = Operation(
    name="prepare_megamoe_bf16_inputs",
    reference="reference.staging:prepare_megamoe_bf16_inputs",
    implementations=(Implementation("triton", "megamoe.staging:prepare_megamoe_bf16_inputs", ("triton",)),),
    outputs={
        "x": Output("row_major"),
        **ROUTING_OUTPUTS,
    },
    defaults=ROUTING,
    sweeps=(
        smoke(values="specials", hidden=256),
        default(values=("specials", "random"), tokens=(0, 1, 33), hidden=(128, 384, 2304)),
        default(padding=("tail", "random"), garbage="nan", ids=("i32", "i64")),
        default(strides=("rows", "columns", "step"), padding="random"),
        full(values="random", tokens=(512, 8192), hidden=7168),
    ),
    inputs=_bf16_inputs,
    call=_bf16_call,
    source="NUMERICS 6.1 and 8.9",
)


ROWS = (PREPARE_MEGAMOE_INPUTS, PREPARE_MEGAMOE_BF16_INPUTS)
