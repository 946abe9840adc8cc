"""Logical to physical experts, and their load. Source: NUMERICS 6.3 and 6.4."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.buffers import BufferSpec
from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, default, full, smoke
from megamoe.suite.routing_inputs import eplb_tensors, strided, topk_ids


def _eplb_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    ids = topk_ids(
        params["tokens"], params["topk"], params["experts"], params["ids"], rng, params["wild_ids"]
    )
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
        smoke(record=(True, False), ids=("i32", "i64")),
        default(record=(True, False), num_unpadded_tokens=(None, 0, 7, 40), ids=("i32", "i64")),
        default(tokens=(0, 1, 130), topk=(1, 8), experts=(1, 64), slots=(1, 3)),
        default(map_dtype="i32", ids=("i32", "i64"), wild_ids=(True, False)),
        default(strides=("rows", "columns", "step")),
        default(tokens=130, topk=8, slots=7),
        full(tokens=4096, topk=8, experts=256, slots=(2, 8), num_unpadded_tokens=(None, 1000)),
    ),
    inputs=_eplb_inputs,
    call=_eplb_call,
    golden=_eplb_golden,
    source="NUMERICS 6.3 and 6.4",
)


ROWS = (EPLB_MAP,)
