"""Whole launches. Source: NUMERICS 8 and 17; recorded launches of the SM90 kernel.

``tokens`` has one entry a rank, so one row covers any number of them. ``routing`` says where tokens go:
"uniform", "one_rank" (all to the last rank's experts), "one_expert", or "replicas" (an EPLB map spreads a
logical expert's tokens over ranks).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.drivers.mega_moe import POOL_STAGES, STAGES
from megamoe.suite.drivers.mega_moe_inputs import draw_launch
from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, Sweep

_SMALL: Params = {
    "values": "random",
    "tokens": (5,),
    "experts": 4,
    "topk": 2,
    "hidden": 512,
    "intermediate": 256,
    "clamp": None,
    "fast_math": True,
    "masked": 0.0,
    "routing": "uniform",
}


def _inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    return draw_launch(params, int(rng.integers(1 << 31)))


def _call(params: Params, inputs: dict[str, Tensor]) -> Call:
    recorded = [inputs[f"recorded_{name}"] for name in POOL_STAGES if f"recorded_{name}" in inputs]
    arguments: dict[str, Any] = {
        name: tensor for name, tensor in inputs.items() if not name.startswith("recorded_")
    }
    arguments |= {
        "tokens": list(params["tokens"]),
        "activation_clamp": params["clamp"],
        "fast_math": params["fast_math"],
        "recorded": recorded or None,
    }
    return Call(arguments, returns=STAGES)


def _golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    """A recording of one rank: its pool stages are whole buffers in the launch's own row order."""
    given = case.inputs
    experts, hidden, intermediate = given["l2_w"].shape
    tokens, topk = given["topk_idx"].shape
    params = _SMALL | {
        "values": "recorded_pool",
        "tokens": (tokens,),
        "experts": experts,
        "topk": topk,
        "hidden": hidden,
        "intermediate": intermediate,
        "clamp": case.params["activation_clamp"],
        "fast_math": case.params["fast_math"],
    }
    inputs = {name: _codes(tensor) for name, tensor in given.items()}
    return params, inputs | {f"recorded_{name}": _codes(case.outputs[name].tensor) for name in POOL_STAGES}


def _codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _enough_devices(params: Params) -> str | None:
    if params["values"] == "recorded_pool":
        return "a recording's row order cannot be launched again"
    ranks = len(params["tokens"])
    if ranks > 1 and torch.cuda.device_count() < ranks:
        return f"{ranks} ranks need {ranks} devices"
    return None


def _several_ranks(params: Params) -> str | None:
    return (
        None
        if len(params["tokens"]) > 1 and params["values"] != "recorded_pool"
        else "one rank has no processes to spread over"
    )


ROWS = (
    Operation(
        name="fp8_mega_moe",
        reference="megamoe.suite.drivers.mega_moe:expected_fp8_mega_moe",
        implementations=(
            Implementation(
                "deep_gemm",
                "megamoe.suite.drivers.mega_moe:deep_gemm_fp8_mega_moe",
                needs=("sm90", "deep_gemm.fp8_mega_moe"),
                supports=_enough_devices,
            ),
            Implementation(
                "processes",
                "megamoe.suite.drivers.mega_moe_processes:process_fp8_mega_moe",
                supports=_several_ranks,
            ),
        ),
        outputs={name: Output("row_major", "compared") for name in STAGES},
        defaults=_SMALL,
        sweeps=(
            Sweep("smoke", {"tokens": ((5,), (37,)), "fast_math": (False, True)}),
            Sweep("default", {"tokens": ((1,), (130,)), "clamp": (None, 10.0), "masked": (0.0, 0.3)}),
            Sweep("default", {"values": ("exact", "specials"), "tokens": ((16,), (130,))}),
            Sweep("default", {"tokens": ((6, 3), (0, 5), (140, 4)), "masked": (0.2,)}),
            Sweep("default", {"tokens": ((6, 3),), "routing": ("replicas",)}),
            Sweep("full", {"tokens": ((6, 3),), "routing": ("one_rank", "one_expert")}),
            Sweep("full", {"tokens": ((5, 0, 7), (300, 90)), "experts": (6,), "masked": (0.2,)}),
            Sweep(
                "full",
                {"tokens": ((300,),), "experts": (16,), "topk": (8,), "hidden": (1024,), "clamp": (10.0,)},
            ),
            Sweep(
                "full", {"tokens": ((8,), (16,)), "experts": (2,), "hidden": (7168,), "intermediate": (2048,)}
            ),
            Sweep(
                "full", {"tokens": ((70,),), "experts": (2,), "hidden": (7168,), "fast_math": (False, True)}
            ),
        ),
        inputs=_inputs,
        call=_call,
        source="NUMERICS 8.8, 17 (sgl-deep-gemm 0.1.5)",
        golden=_golden,
    ),
)
