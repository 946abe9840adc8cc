"""What the staging rows share: parameters, inputs, pages, calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.buffers import BufferSpec
from megamoe.suite.operation import Call, Output, Params
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
ALL_VALUES = ("position", "ties", "edges", "specials", "codes", "random", "tiny", "saturating", "outliers")
UNQUANTIZED = "unquantized"
ROUTING_OUTPUTS = {"topk_idx_out": Output("topk_ids"), "topk_weights_out": Output("topk_weights")}
BLOCK_MS = (8, 16, 32, 64, 96, 128, 192, 240)
_LOCAL_EXPERTS = 9
_PAGE_ROWS_PAST = 4

ROUTING: Params = {
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
# eplb: None, "record", "map" (records nothing) or "record_many" (up to seven replicas an expert, not four)
EPLB: Params = {"eplb": None, "num_unpadded_tokens": None}
SHARED: Params = {"shared_block_m": None, "page_rows": None, "fill_byte": None}


def target_of(recipe: str) -> Target:
    if recipe.startswith("nvfp4"):
        return Target("e2m1", "e4m3", 16, two_level=recipe.startswith("nvfp4_token"))
    if recipe.startswith("fp8"):
        _, scale, group = recipe.split("_")[:3]
        return Target("e4m3fn", scale, int(group[1:]))
    return Target("e4m3fn", "fp32", 128)


def staging_inputs(params: Params, rng: np.random.Generator, recipe: str) -> dict[str, Tensor]:
    """hidden_states and the routing, with whatever the parameters ask for around them."""
    tokens, topk = params["tokens"], params["topk"]
    shape = (tokens, params["hidden"])
    padding = padding_mask(tokens, params["padding"], rng)
    hidden = generate(params["values"], shape, target_of(recipe), rng, DTYPES[params["dtype"]])
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
        found |= eplb_tensors(params["experts"], 7 if params["eplb"] == "record_many" else 4, rng)
    if params.get("l2_activation_scale") is not None:
        scales = rng.uniform(1e-5, 1e-3, _LOCAL_EXPERTS).astype(np.float32)
        found["w2_global_scale"] = torch.from_numpy(scales)
    return found


def staging_call(
    params: Params, inputs: dict[str, Tensor], buffers: dict[str, BufferSpec], **values: Any
) -> Call:
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
        "record": torch.tensor(params["eplb"] != "map"),
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


def row_stride(shape: tuple[int, int], params: Params) -> tuple[int, ...] | None:
    """NVFP4 buffers are row-major by contract: only their rows may be apart."""
    return output_stride(shape, "dense" if params["strides"] == "dense" else "rows")


def shared_pages(params: Params, tokens: int, hidden: int) -> BufferSpec:
    block_m = params["shared_block_m"]
    rows = params["page_rows"]
    if rows is None:
        rows = -(-tokens // block_m) * (-(-block_m // 128) * 128) + _PAGE_ROWS_PAST
    # MN-major, as in the symmetric buffer; a recorded case says what the buffer held
    stride = (1, rows) if params["strides"] != "rows" else (hidden // 128 + 3, 1)
    return BufferSpec((rows, hidden // 128), torch.int32, stride, fill=params["fill_byte"])


def supply_routing(case: bundle.Case, params: Params) -> dict[str, Tensor]:
    """The recorded inputs, and some routing where the recording has none (its outputs do not depend on
    it)."""
    inputs = dict(case.inputs)
    tokens = inputs["hidden_states"].shape[0]
    if "topk_ids" not in inputs:
        inputs["topk_ids"] = torch.zeros(tokens, params["topk"], dtype=torch.int64)
        inputs["topk_weights"] = torch.ones(tokens, params["topk"])
    return inputs


def recorded_shared(case: bundle.Case) -> Params:
    pages = case.outputs.get("shared_x_sf")
    return {
        "shared_block_m": case.params.get("shared_block_m"),
        "fill_byte": case.params.get("fill_byte"),
        "page_rows": None if pages is None else pages.shape[0],
        # the recording does not say how the pages lay in memory; row-major is how it was stored
        "strides": "dense",
    }
