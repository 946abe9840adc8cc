"""Whole passes through the backends, one row an MMA type: kernel layout, staging, launch, stage buffers,
outputs.

On an SM100 machine these are what docs/sm100.md records. ``values`` "exact" draws operands for which no sum
is ever rounded, so that the outputs do not depend on how the hardware adds; "random" does depend on it, and
compares the tensor-core models of NUMERICS 17 with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, Sweep
from reference.exact_inputs import draw_exact
from reference.formats import pack_e2m1, pack_scale_words

_DEFAULTS: Params = {
    "values": "random",
    "tokens": 5,
    "experts": 4,
    "topk": 2,
    "hidden": 512,
    "intermediate": 256,
    "clamp": None,
    "fast_math": True,
    "masked": 0.0,
    "norm": False,
}


@dataclass(frozen=True)
class _Family:
    """What a row needs to know of an MMA type. group: columns that share a weight scale; 0 without scales."""

    name: str
    mma_type: str
    reference_family: str
    capability: str
    launch: str
    group: int
    has_norm: bool = False
    has_stages: bool = True


_FAMILIES = (
    _Family("fp8xfp4", "fp8xfp4", "sm100_fp8xfp4", "sm100", "fp8_fp4_mega_moe", 32),
    _Family("mxfp8", "fp8xfp8", "sm100_fp8xfp8", "sm100", "fp8_fp4_mega_moe", 32),
    _Family("nvfp4", "nvfp4", "sm100_nvfp4", "sm100", "nvfp4_mega_moe", 16),
    _Family("fp4xfp4", "fp4xfp4", "sm100_fp4xfp4", "sm100", "fp4_fp4_mega_moe", 16, has_norm=True),
    _Family("bf16xbf16", "bf16xbf16", "sm100_bf16", "sm100", "bf16_mega_moe", 0, has_norm=True),
    _Family("fp8xfp8", "fp8xfp8", "sm90_fp8xfp8", "sm90", "fp8_mega_moe", 128, has_stages=False),
)


def _inputs(family: _Family, params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    seed = int(rng.integers(1 << 31))
    if params["values"] == "exact":
        return _exact_inputs(family, params, seed)
    g = torch.Generator().manual_seed(seed)
    tokens, experts, topk = params["tokens"], params["experts"], params["topk"]
    hidden, inter = params["hidden"], params["intermediate"]
    ids = torch.rand(tokens, experts, generator=g).topk(topk, dim=1).indices
    found = {
        "hidden_states": _spread(tokens, hidden, g),
        "topk_ids": torch.where(torch.rand(ids.shape, generator=g) < params["masked"], -1, ids),
        "topk_weights": torch.rand(tokens, topk, generator=g) + 0.01,
    }
    found |= _weights(family, experts, hidden, inter, g)
    if family.mma_type == "fp4xfp4":
        found |= {
            "l1_alphas": torch.rand(experts, 2, generator=g) + 0.5,
            "l2_alphas": torch.rand(experts, generator=g) + 0.5,
            "a2_scales": torch.rand(experts, generator=g) + 0.5,
        }
    if family.mma_type == "nvfp4":
        found |= {
            "l1_alpha": torch.rand(experts, generator=g) + 0.5,
            "l2_alpha": torch.rand(experts, generator=g) + 0.5,
        }
    if params["norm"]:
        found["post_expert_norm_gamma"] = torch.rand(hidden, generator=g) + 0.5
    return found


def _spread(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Normal values, each row times a power of two of its own."""
    scale = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=g).float())
    return (torch.randn(rows, columns, generator=g) * scale).to(torch.bfloat16)


def _codes(shape: tuple[int, ...], low: int, high: int, g: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)


def _weights(family: _Family, experts: int, hidden: int, inter: int, g: torch.Generator) -> dict[str, Tensor]:
    shapes = {"w13": (experts, 2 * inter, hidden), "w2": (experts, hidden, inter)}
    found: dict[str, Tensor] = {}
    for name, (count, rows, columns) in shapes.items():
        size = columns**-0.5
        if family.mma_type == "bf16xbf16":
            found[f"{name}_weight"] = (torch.randn(count, rows, columns, generator=g) * size).to(
                torch.bfloat16
            )
        elif family.name == "fp8xfp8":
            values = torch.randn(count, rows, columns, generator=g) * 16
            found[f"{name}_weight"] = values.clamp(-448, 448).to(torch.float8_e4m3fn)
            blocks = torch.rand(count, rows // 128, columns // 128, generator=g)
            found[f"{name}_weight_scale"] = (blocks + 0.5) * size / 16
        else:
            if family.name == "mxfp8":
                values = torch.randn(count, rows, columns, generator=g)
                found[f"{name}_weight"] = values.to(torch.float8_e4m3fn)
            else:
                found[f"{name}_weight"] = _codes((count, rows, columns // 2), 0, 256, g)
            # Scale bytes around 2^-5 (UE8M0) or from 2^-4 to 2^0 (E4M3): each exponent and, there, each
            # mantissa.
            low, high = (119, 126) if family.group == 32 else (0x18, 0x3A)
            scale = _codes((count, rows, columns // family.group), low, high, g)
            found[f"{name}_weight_scale"] = scale if family.group == 32 else scale.view(torch.float8_e4m3fn)
    return found


def _exact_inputs(family: _Family, params: Params, seed: int) -> dict[str, Tensor]:
    sizes = {name: params[name] for name in ("topk", "hidden", "intermediate", "masked")}
    drawn = draw_exact(
        family.reference_family, [params["tokens"]], num_experts=params["experts"], seed=seed, **sizes
    )
    (tokens,), (weights,) = drawn.inputs, drawn.weights
    found = {"topk_ids": tokens.topk_idx, "topk_weights": tokens.topk_weights}
    packed = family.mma_type != "fp8xfp8" and family.group
    pack = pack_e2m1 if packed else _same
    found["x"] = pack_e2m1(tokens.x) if family.group == 16 else tokens.x
    if tokens.x_sf is not None:
        found["x_sf"] = pack_scale_words(tokens.x_sf) if tokens.x_sf.dtype == torch.uint8 else tokens.x_sf
    fp8 = torch.float8_e4m3fn
    for name, weight, scale in (("w13", weights.l1, weights.l1_sf), ("w2", weights.l2, weights.l2_sf)):
        found[f"{name}_weight"] = weight.view(fp8) if family.mma_type == "fp8xfp8" else pack(weight)
        if scale is not None:
            found[f"{name}_weight_scale"] = scale.view(fp8) if family.group == 16 else scale
    if family.mma_type == "nvfp4":
        found["x_scales"] = torch.exp2(-(torch.arange(params["tokens"]) % 2).float())
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


_STAGED = ("hidden_states", "x", "x_sf", "x_scales")
_OPTIONS = (
    *("l1_alphas", "l2_alphas", "a2_scales", "post_expert_norm_gamma", "post_expert_norm_eps"),
    *("l1_alpha", "l2_alpha", "l2_activation_scale", "use_x_scales"),
)


def _call(family: _Family, params: Params, inputs: dict[str, Tensor]) -> Call:
    arguments: dict[str, Any] = {
        "mma_type": family.mma_type,
        "architecture": family.capability.upper(),
        "activation_clamp": params["clamp"],
        "fast_math": params["fast_math"],
        **inputs,
    }
    if params["norm"]:
        arguments["post_expert_norm_eps"] = 1e-5
    if family.mma_type == "nvfp4":
        arguments |= {"l2_activation_scale": 0.5, "use_x_scales": True}
    return Call(arguments, bind=_bind, returns=tuple(_outputs(family)))


def _bind(arguments: dict[str, Any], _: dict[str, Tensor]) -> dict[str, Any]:
    """Weights, inputs and options of the launch into a dictionary each, as the driver takes them."""
    groups: dict[str, dict[str, Any]] = {"weights": {}, "inputs": {}, "options": {}}
    plain = {}
    for name, value in arguments.items():
        if name.startswith(("w13_", "w2_")):
            groups["weights"][name] = value
        elif name in _STAGED:
            groups["inputs"][name] = value
        elif name in _OPTIONS:
            groups["options"][name] = value
        else:
            plain[name] = value
    return plain | groups


def _outputs(family: _Family) -> dict[str, Output]:
    names = ["l1_weight", "l2_weight", "staged_x", "staged_topk_idx", "staged_topk_weights", "y"]
    if family.group:
        names += ["l1_scale", "l2_scale", "staged_x_sf"]
    if family.mma_type == "nvfp4":
        names.append("staged_x_scales")
    if family.has_stages:
        names += ["found", "l1_acts", "l2_acts"]
        if family.group:
            names += ["l1_acts_sf", "l2_acts_sf"]
    # Alignment rows of scale layouts hold whatever the allocator left.
    return {
        name: Output("row_major", "undefined" if name.endswith("_scale") else "compared") for name in names
    }


def _row(family: _Family) -> Operation:
    sweeps = [
        Sweep("smoke", {"tokens": (5,), "fast_math": (True, False)}),
        Sweep("default", {"tokens": (1, 40), "clamp": (None, 1.0)}),
        Sweep("default", {"values": ("exact",), "tokens": (16,), "masked": (0.0, 0.3)}),
        Sweep(
            "full",
            {"tokens": (130,), "experts": (8,), "topk": (4,), "hidden": (1024,), "intermediate": (512,)},
        ),
        Sweep("full", {"values": ("exact",), "tokens": (300,), "experts": (8,), "hidden": (2048,)}),
    ]
    if family.has_norm:
        sweeps.append(Sweep("default", {"norm": (True,), "tokens": (16,)}))
    return Operation(
        name=f"run_mega_moe_{family.name}",
        reference="megamoe.suite.drivers.backends:emulated_run_mega_moe",
        implementations=(
            Implementation(
                "deep_gemm",
                "megamoe.suite.drivers.backends:real_run_mega_moe",
                needs=(family.capability, f"deep_gemm.{family.launch}", "triton"),
            ),
        ),
        outputs=_outputs(family),
        defaults=_DEFAULTS,
        sweeps=tuple(sweeps),
        inputs=lambda params, rng: _inputs(family, params, rng),
        call=lambda params, inputs: _call(family, params, inputs),
        source="NUMERICS 5, 7, 8, 11, 17",
    )


ROWS = tuple(_row(family) for family in _FAMILIES)
