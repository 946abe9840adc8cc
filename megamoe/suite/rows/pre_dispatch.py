"""DeepGEMM's own staging kernels, for SM100 and for SM90. Source: NUMERICS 2.8 and 6.1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.buffers import BufferSpec
from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, Sweep
from megamoe.suite.values import Target, generate

_FILLS = ("fill_x", "fill_x_sf", "fill_topk_idx", "fill_topk_weights")
_BUFFERS = ("x", "x_sf", "topk_idx", "topk_weights")
_ARGUMENTS = {"hidden_states": "x", "topk_idx_in": "topk_idx", "topk_weights_in": "topk_weights"}
_OUTPUTS = {
    "x": Output("row_major"),
    "x_sf": Output("packed_scale_rows"),
    "topk_idx": Output("topk_ids"),
    "topk_weights": Output("topk_weights"),
}
_HIDDENS = (128, 640, 2304, 7168)
_LARGE = ("random", "position")
_DEFAULTS: Params = {
    "values": "position",
    "tokens": 5,
    "rows": 7,  # of the buffers: 2 past the tokens by default
    "hidden": 512,
    "topk": 6,
    "experts": 24,
    **dict.fromkeys(_FILLS),
}


def _inputs(params: Params, rng: np.random.Generator, target: Target) -> dict[str, Tensor]:
    tokens, topk = params["tokens"], params["topk"]
    ids = np.array([rng.permutation(params["experts"])[:topk] for _ in range(tokens)], dtype=np.int32)
    ids = np.where(rng.random((tokens, topk)) < 0.2, np.int32(-1), ids.reshape(tokens, topk))
    weights = (rng.permutation(tokens * topk) + 1).reshape(tokens, topk) / (tokens * topk + 1)
    return {
        "hidden_states": generate(params["values"], (tokens, params["hidden"]), target, rng, torch.bfloat16),
        "topk_idx_in": torch.from_numpy(ids),
        "topk_weights_in": torch.from_numpy(weights.astype(np.float32)),
    }


def _buffers(params: Params, topk: int, scales: tuple[int, int], scale: torch.dtype) -> dict[str, BufferSpec]:
    """The four buffers, poisoned, or full of what a recorded case says that they held."""
    rows = params["rows"]
    shapes = {
        "x": (rows, params["hidden"]),
        "x_sf": scales,
        "topk_idx": (rows, topk),
        "topk_weights": (rows, topk),
    }
    dtypes = {"x": torch.float8_e4m3fn, "x_sf": scale, "topk_idx": torch.int64, "topk_weights": torch.float32}
    found = {}
    for name, fill in zip(_BUFFERS, _FILLS, strict=True):
        value, initial = params[fill], None
        if value is not None:
            plain = torch.uint8 if name == "x" else dtypes[name]  # fill_x is a byte
            initial = torch.full(shapes[name], value, dtype=plain).view(dtypes[name])
        found[name] = BufferSpec(shapes[name], dtypes[name], initial=initial)
    return found


def _bind(arguments: dict[str, Any], views: dict[str, Tensor]) -> dict[str, Any]:
    renamed = {_ARGUMENTS.get(name, name): value for name, value in arguments.items()}
    return renamed | {f"buf_{name}": view for name, view in views.items()}


def _golden(operation: Operation, case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    known = {name: value for name, value in case.params.items() if name in operation.defaults}
    tokens, hidden = case.inputs["hidden_states"].shape
    shape = {"tokens": tokens, "hidden": hidden, "rows": case.outputs["x"].shape[0]}
    return operation.defaults | known | shape, dict(case.inputs)


# ---- mega_moe_pre_dispatch


def _sm100_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return _inputs(params, rng, Target("e4m3fn", "ue8m0", params["group_size"]))


def _sm100_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    scales = (params["rows"], params["hidden"] // (4 * params["group_size"]))
    buffers = _buffers(params, inputs["topk_idx_in"].shape[1], scales, torch.int32)
    values = {"num_tokens": params["tokens"], "group_size": params["group_size"]}
    return Call({**inputs, **values}, buffers, bind=_bind)


MEGA_MOE_PRE_DISPATCH: Operation = Operation(
    name="mega_moe_pre_dispatch",
    reference="reference.pre_dispatch:mega_moe_pre_dispatch",
    implementations=(
        Implementation(
            "deep_gemm", "deep_gemm:mega_moe_pre_dispatch", ("cuda", "deep_gemm.mega_moe_pre_dispatch")
        ),
    ),
    outputs=_OUTPUTS,
    defaults={**_DEFAULTS, "group_size": 32},
    sweeps=(
        Sweep("smoke", {"values": ("position", "specials")}),
        Sweep("default", {"values": ("ties", "edges", "codes", "random", "tiny", "saturating", "outliers")}),
        Sweep("default", {"tokens": (1, 33), "rows": (33, 40), "hidden": _HIDDENS, "topk": (1, 8)}),
        Sweep("default", {"group_size": (64, 128), "values": ("position", "specials")}),
        Sweep("full", {"tokens": (257, 2048), "rows": (2055,), "hidden": (4096, 7168), "values": _LARGE}),
    ),
    inputs=_sm100_inputs,
    call=_sm100_call,
    golden=lambda case: _golden(MEGA_MOE_PRE_DISPATCH, case),
    source="NUMERICS 2.8 and 6.1",
)


# ---- mega_moe_pre_dispatch_sm90


def _sm90_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return _inputs(params, rng, Target("e4m3fn", "fp32", params["group_size"]))


def _sm90_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    scales = (params["rows"], params["hidden"] // params["group_size"])
    buffers = _buffers(params, inputs["topk_idx_in"].shape[1], scales, torch.float32)
    values = {name: params[name] for name in ("group_size", "routed_scaling_factor")}
    return Call({**inputs, "num_tokens": params["tokens"], **values}, buffers, bind=_bind)


MEGA_MOE_PRE_DISPATCH_SM90: Operation = Operation(
    name="mega_moe_pre_dispatch_sm90",
    reference="reference.pre_dispatch:mega_moe_pre_dispatch_sm90",
    implementations=(
        Implementation(
            "deep_gemm",
            "deep_gemm:mega_moe_pre_dispatch_sm90",
            ("cuda", "deep_gemm.mega_moe_pre_dispatch_sm90"),
        ),
    ),
    outputs={**_OUTPUTS, "x_sf": Output("row_major")},
    defaults={**_DEFAULTS, "group_size": 128, "routed_scaling_factor": 1.0},
    sweeps=(
        Sweep("smoke", {"values": ("position", "specials")}),
        Sweep("default", {"values": ("ties", "edges", "codes", "random", "tiny", "saturating", "outliers")}),
        Sweep("default", {"tokens": (1, 33), "rows": (33, 40), "hidden": _HIDDENS, "topk": (1, 8)}),
        Sweep("default", {"routed_scaling_factor": (2.7,)}),
        Sweep("full", {"tokens": (257, 2048), "rows": (2055,), "hidden": (4096, 7168), "values": _LARGE}),
    ),
    inputs=_sm90_inputs,
    call=_sm90_call,
    golden=lambda case: _golden(MEGA_MOE_PRE_DISPATCH_SM90, case),
    source="NUMERICS 2.8 and 6.1",
)

ROWS = (MEGA_MOE_PRE_DISPATCH, MEGA_MOE_PRE_DISPATCH_SM90)
