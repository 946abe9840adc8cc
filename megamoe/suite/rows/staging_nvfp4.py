"""NVFP4 staging: two-level, one-level, norm-fused. Source: NUMERICS 3."""

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
    ALL_VALUES,
    BLOCK_MS,
    EPLB,
    ROUTING,
    ROUTING_OUTPUTS,
    SHARED,
    recorded_shared,
    row_stride,
    shared_pages,
    staging_call,
    staging_inputs,
    supply_routing,
    target_of,
)
from megamoe.suite.values import generate


def _nvfp4_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return staging_inputs(params, rng, "nvfp4_token")


def _nvfp4_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    tokens, hidden = inputs["hidden_states"].shape

    def rows(columns: int, dtype: torch.dtype) -> BufferSpec:
        return BufferSpec((tokens, columns), dtype, row_stride((tokens, columns), params))

    buffers = {
        "x": rows(hidden // 2, torch.uint8),
        "x_sf": rows(hidden // 64, torch.int32),
        "x_scales": BufferSpec((tokens,), torch.float32, output_stride((tokens,), params["strides"])),
    }
    values: dict[str, Any] = {}
    if params["shared"] is not None:
        buffers["shared_x"] = rows(
            hidden, {"mxfp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}[params["shared"]]
        )
    if params["shared"] == "mxfp8":
        buffers["shared_x_sf"] = shared_pages(params, tokens, hidden)
        values["shared_block_m"] = params["shared_block_m"]
    if params["l2_activation_scale"] is not None:
        values["l2_activation_scale"] = params["l2_activation_scale"]
        buffers["l2_alpha"] = BufferSpec(tuple(inputs["w2_global_scale"].shape), torch.float32)
    return staging_call(params, inputs, buffers, **values)


def _nvfp4_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    params = PREPARE_MEGAMOE_NVFP4_INPUTS.defaults | recorded_shared(case)
    params["shared"] = case.params.get("shared")
    params["l2_activation_scale"] = case.params.get("l2_activation_scale")
    return params, supply_routing(case, params)


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
        **ROUTING_OUTPUTS,
        "expert_load": Output("row_major"),
    },
    recipes=("nvfp4_token",),
    defaults={
        "recipe": "nvfp4_token",
        **ROUTING,
        "shared": None,
        **SHARED,
        "l2_activation_scale": None,
        **EPLB,
    },
    sweeps=(
        smoke(hidden=(128, 384), tokens=3),
        smoke(shared="mxfp8", shared_block_m=16, tokens=20, hidden=128, l2_activation_scale=0.37),
        default(values=ALL_VALUES),
        default(values=("position", "random"), tokens=2, hidden=(128, 256, 640, 2304)),
        default(tokens=1, hidden=7168),
        default(tokens=(0, 1, 64, 65), hidden=128, l2_activation_scale=0.37),
        default(values=("edges", "random"), dtype=("fp16", "fp32")),
        default(shared="bf16", values="specials", dtype=("bf16", "fp32")),
        default(
            shared="mxfp8", shared_block_m=(8, 64, 192), values=("random", "specials"), tokens=70, hidden=128
        ),
        default(padding=("none", "tail", "all"), garbage=("nan", "448"), ids="i32", hidden=128),
        default(eplb=("record", "map"), num_unpadded_tokens=(None, 7), tokens=21, hidden=128, wild_ids=True),
        default(eplb="record_many", tokens=(3, 21), hidden=128, wild_ids=True),
        default(strides=("rows", "columns", "step"), padding="random", l2_activation_scale=1.0),
        default(strides="rows", shared=("bf16", "mxfp8"), shared_block_m=32, tokens=40, hidden=256),
        full(values="every_amax", tokens=255, hidden=4096),
        full(values=("random", "position", "edges", "specials"), tokens=(1, 8, 64, 512), hidden=(2304, 7168)),
        full(values="random", tokens=(2048, 8192), hidden=7168, topk=8),
        full(shared="mxfp8", shared_block_m=BLOCK_MS, tokens=300, hidden=1024),
        full(
            eplb=("record", "record_many", "map"),
            num_unpadded_tokens=(None, 500),
            tokens=(64, 1024, 4096),
            hidden=2304,
            experts=256,
            topk=(3, 8),
            wild_ids=True,
        ),
        full(shared="bf16", tokens=300, hidden=7168, values="random"),
    ),
    inputs=_nvfp4_inputs,
    call=_nvfp4_call,
    golden=_nvfp4_golden,
    source="NUMERICS 3a, 2, 4 and 6",
)


def _nvfp4_block_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return staging_inputs(params, rng, "nvfp4_block")


def _nvfp4_block_buffers(params: Params, inputs: dict[str, Tensor]) -> dict[str, BufferSpec]:
    tokens, hidden = inputs["hidden_states"].shape
    return {
        name: BufferSpec((tokens, columns), torch.uint8, row_stride((tokens, columns), params))
        for name, columns in (("x", hidden // 2), ("x_sf", hidden // 16))
    }


def _nvfp4_block_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    return staging_call(params, inputs, _nvfp4_block_buffers(params, inputs))


def _nvfp4_block_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    params = dict(PREPARE_MEGAMOE_NVFP4_BLOCK_INPUTS.defaults)
    return params, supply_routing(case, params)


PREPARE_MEGAMOE_NVFP4_BLOCK_INPUTS = Operation(
    name="prepare_megamoe_nvfp4_block_inputs",
    reference="reference.staging:prepare_megamoe_nvfp4_block_inputs",
    implementations=(
        Implementation("triton", "megamoe.staging:prepare_megamoe_nvfp4_block_inputs", ("triton",)),
    ),
    outputs={
        "x": Output("e2m1_rows"),
        "x_sf": Output("row_major"),
        **ROUTING_OUTPUTS,
    },
    recipes=("nvfp4_block",),
    defaults={"recipe": "nvfp4_block", **ROUTING},
    sweeps=(
        smoke(hidden=(64, 384), tokens=3),
        default(values=ALL_VALUES),
        default(values=("position", "random"), tokens=2, hidden=(64, 192, 640, 1024, 2304)),
        default(tokens=1, hidden=7168),
        default(tokens=(0, 1, 64, 65), hidden=128),
        default(values=("edges", "random"), dtype=("fp16", "fp32")),
        default(padding=("none", "random", "all"), garbage=("nan", "0"), ids=("i32", "i64"), hidden=128),
        default(strides=("rows", "columns", "step"), padding="random"),
        full(values="every_amax", tokens=255, hidden=2048),
        full(values=("random", "position", "edges", "specials"), tokens=(1, 8, 64, 512), hidden=(2304, 7168)),
        full(values="random", tokens=(2048, 8192), hidden=7168, topk=8),
    ),
    inputs=_nvfp4_block_inputs,
    call=_nvfp4_block_call,
    golden=_nvfp4_block_golden,
    source="NUMERICS 3b and 6",
)


def _norm_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    shape = (params["tokens"], params["hidden"])
    hidden = generate(params["values"], shape, target_of("nvfp4_block"), rng, torch.bfloat16)
    weight = torch.from_numpy(rng.normal(0.0, 0.3, (params["hidden"],)).astype(np.float32))
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
        smoke(hidden=256),
        default(values=("random", "outliers"), hidden=(64, 640, 1024, 4096)),
        default(weights=("fp32", "fp16"), gain_center=(0.0, 1.0), norm_eps=(1e-6,)),
        default(tokens=(0, 1)),
        default(strides="rows"),
        full(values=("random", "outliers"), tokens=512, hidden=(4096, 7168)),
    ),
    inputs=_norm_inputs,
    call=_norm_call,
    golden=_norm_golden,
    contract="bitwise_given_rstd",
    because="a row's squares are added in an order that a compiler chose: rstd may be off by 2 ulp",
    source="NUMERICS 3d",
)


ROWS = (PREPARE_MEGAMOE_NVFP4_INPUTS, PREPARE_MEGAMOE_NVFP4_BLOCK_INPUTS, PREPARE_MEGAMOE_NVFP4_WITH_NORM)
