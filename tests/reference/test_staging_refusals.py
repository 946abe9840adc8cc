"""Every refusal of the prepare_* references: the argument is named, and no output byte has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from staging_calls import CALLS, E4M3, eplb_state, key, poisoned, raw_bytes

import reference
from reference._quant_key import GroupShape, ScaleDesc, kFp8Dynamic128


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


PAGES = {"shared_x_sf": tensor(128, 2, dtype=torch.int32), "shared_block_m": 64}
ROUTING_REFUSALS = [
    ("topk_weights", {"topk_weights": tensor(9, 5)}, ValueError),
    ("topk_weights", {"topk_weights": tensor(9, 6, dtype=torch.int32)}, TypeError),
    ("topk_ids", {"topk_ids": tensor(9, 6)}, TypeError),
    ("topk_ids", {"topk_ids": tensor(8, 6).long(), "topk_weights": tensor(8, 6)}, ValueError),
    ("topk_ids", {"topk_ids": tensor(9).long(), "topk_weights": tensor(9)}, ValueError),
    ("topk_ids", {"topk_ids": tensor(9, 6).long().to("meta")}, ValueError),
    ("topk_idx_out", {"topk_idx_out": tensor(9, 6).int()}, TypeError),
    ("topk_idx_out", {"topk_idx_out": tensor(9, 5).long()}, ValueError),
    ("topk_idx_out", {"topk_idx_out": tensor(9, 1).long().expand(9, 6)}, ValueError),
    ("topk_weights_out", {"topk_weights_out": tensor(9, 6).bfloat16()}, TypeError),
    ("topk_weights_out", {"topk_weights_out": tensor(10, 6)}, ValueError),
    ("is_padding", {"is_padding": tensor(9, dtype=torch.int32)}, TypeError),
    ("is_padding", {"is_padding": tensor(8, dtype=torch.bool)}, ValueError),
]
HIDDEN_REFUSALS = [
    ("hidden_states", {"hidden_states": tensor(9, 256, dtype=torch.float64)}, TypeError),
    ("hidden_states", {"hidden_states": tensor(9, 2, 128)}, ValueError),
]
EPLB_REFUSALS = [
    ("expert_load_view", {"expert_load_view": None}, ValueError),
    ("logical_replica_count", {"logical_replica_count": None}, ValueError),
    ("should_record_tensor", {"should_record_tensor": None}, ValueError),
    ("num_unpadded_tokens_tensors", {"num_unpadded_tokens_tensors": None}, ValueError),
    ("num_unpadded_tokens_tensors", {"num_unpadded_tokens_tensors": []}, ValueError),
    ("logical_replica_count", {"logical_replica_count": tensor(3).long()}, ValueError),
    ("logical_replica_count", {"logical_replica_count": tensor(64).long() + 4}, ValueError),
    ("should_record_tensor", {"should_record_tensor": tensor(1)}, TypeError),
    ("expert_load_view", {"expert_load_view": tensor(80)}, TypeError),
]
REFUSALS: dict[str, list[tuple[str, dict[str, Any], type[Exception]]]] = {
    "fp8": [
        *ROUTING_REFUSALS,
        *HIDDEN_REFUSALS,
        ("hidden_states", {"hidden_states": tensor(9, 192).bfloat16()}, ValueError),
        ("hidden_states", {"hidden_states": tensor(9, 0).bfloat16()}, ValueError),
        ("x_sf", {"x_sf": None}, ValueError),
        ("x_sf", {"hidden_quant": None}, ValueError),
        ("x_sf", {"x_sf": tensor(9, 2)}, TypeError),
        ("x_sf", {"x_sf": tensor(9, 3).int()}, ValueError),
        ("x_sf", {"hidden_quant": key(32, torch.float32), "x_sf": tensor(9, 2)}, ValueError),
        ("x_sf", {"hidden_quant": kFp8Dynamic128}, TypeError),
        ("x", {"x": tensor(9, 256).bfloat16()}, TypeError),
        ("x", {"x": tensor(9, 255).to(E4M3)}, ValueError),
        ("x", {"x": tensor(9, 256).to(E4M3), "hidden_quant": None, "x_sf": None}, TypeError),
        ("x", {"x": tensor(9, 128), "hidden_quant": None, "x_sf": None}, ValueError),
        *[
            ("hidden_quant", {"hidden_quant": bad}, ValueError)
            for bad in (
                key(32, torch.uint8, static=True),
                key(32, torch.uint8, row=128),
                key(-1, torch.float32),
                key(0, torch.float32),
                key(256, torch.float32),
                key(48, torch.float32),
                key(8, torch.float32),
                key(16, torch.uint8),
                key(16, torch.float8_e8m0fnu),
                key(32, torch.bfloat16),
                key(32, torch.uint8, dtype=torch.uint8),
                key(32, torch.uint8, symmetric=False),
                key(32, torch.uint8, scale2=ScaleDesc(torch.float32, False, GroupShape(1, -1))),
                "mxfp8",
            )
        ],
        ("shared_block_m", {"shared_x_sf": PAGES["shared_x_sf"]}, ValueError),
        ("shared_block_m", {"shared_block_m": 64}, ValueError),
        ("shared_x_sf", {**PAGES, "hidden_quant": kFp8Dynamic128, "x_sf": tensor(9, 2)}, ValueError),
        ("shared_x_sf", {**PAGES, "hidden_quant": None, "x_sf": None, "x": tensor(9, 256)}, ValueError),
        ("shared_block_m", {**PAGES, "shared_block_m": 0}, ValueError),
        ("shared_block_m", {**PAGES, "shared_block_m": -8}, ValueError),
        ("shared_block_m", {**PAGES, "shared_block_m": 64.0}, TypeError),
        ("shared_x_sf", {**PAGES, "shared_x_sf": tensor(128, 3).int()}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_x_sf": tensor(127, 2).int()}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_block_m": 8}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_x_sf": tensor(128).int()}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_x_sf": tensor(128, 2)}, TypeError),
    ],
    "nvfp4": [
        *ROUTING_REFUSALS,
        *HIDDEN_REFUSALS,
        ("hidden_states", {"hidden_states": tensor(9, 192).bfloat16()}, ValueError),
        ("x", {"x": tensor(9, 128)}, TypeError),
        ("x", {"x": tensor(9, 256).to(torch.uint8)}, ValueError),
        ("x", {"x": tensor(128, 9).to(torch.uint8).t()}, ValueError),
        ("x_sf", {"x_sf": tensor(9, 4)}, TypeError),
        ("x_sf", {"x_sf": tensor(9, 2).int()}, ValueError),
        ("x_sf", {"x_sf": tensor(4, 9).int().t()}, ValueError),
        ("x_scales", {"x_scales": tensor(9, 1)}, ValueError),
        ("x_scales", {"x_scales": tensor(9).double()}, TypeError),
        ("shared_x_sf", {"shared_x": tensor(9, 256).to(E4M3)}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_x": tensor(9, 256).bfloat16()}, ValueError),
        ("shared_x_sf", PAGES, ValueError),
        ("shared_x_sf", {"shared_block_m": 64}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_x": tensor(9, 256).to(E4M3), "shared_block_m": None}, ValueError),
        ("shared_block_m", {**PAGES, "shared_x": tensor(9, 256).to(E4M3), "shared_block_m": 0}, ValueError),
        ("shared_x_sf", {**PAGES, "shared_x": tensor(9, 256).to(E4M3), "shared_block_m": 8}, ValueError),
        ("shared_x", {"shared_x": tensor(9, 256).half()}, TypeError),
        ("shared_x", {"shared_x": tensor(9, 128).bfloat16()}, ValueError),
        ("shared_x", {"shared_x": tensor(256, 9).bfloat16().t()}, ValueError),
        ("l2_alpha", {"w2_global_scale": tensor(3)}, ValueError),
        ("l2_alpha", {"l2_alpha": tensor(3)}, ValueError),
        ("l2_alpha", {"w2_global_scale": tensor(3), "l2_alpha": tensor(4)}, ValueError),
        ("w2_global_scale", {"w2_global_scale": tensor(3).half(), "l2_alpha": tensor(3)}, TypeError),
        ("l2_activation_scale", {"l2_activation_scale": tensor(1)}, TypeError),
    ],
    "block": [
        *ROUTING_REFUSALS,
        *HIDDEN_REFUSALS,
        ("hidden_states", {"hidden_states": tensor(9, 96).bfloat16()}, ValueError),
        ("x", {"x": tensor(9, 95).to(torch.uint8)}, ValueError),
        ("x_sf", {"x_sf": tensor(9, 12).int()}, TypeError),
        ("x_sf", {"x_sf": tensor(9, 11).to(torch.uint8)}, ValueError),
    ],
    "norm": [
        ("hidden_states", {"hidden_states": tensor(9, 192)}, TypeError),
        ("hidden_states", {"hidden_states": tensor(9, 96).bfloat16()}, ValueError),
        ("norm_weight", {"norm_weight": tensor(191).bfloat16()}, ValueError),
        ("norm_weight", {"norm_weight": tensor(192).int()}, TypeError),
        ("x", {"x": tensor(8, 96).to(torch.uint8)}, ValueError),
        ("x_sf", {"x_sf": tensor(9, 3).to(torch.uint8)}, ValueError),
    ],
    "bf16": [
        *ROUTING_REFUSALS,
        ("hidden_states", {"hidden_states": tensor(9, 200)}, TypeError),
        ("x", {"x": tensor(9, 200)}, TypeError),
        ("x", {"x": tensor(9, 199).bfloat16()}, ValueError),
    ],
}
CASES = [
    pytest.param(op, name, change, error, id=f"{op}-{name}-{index}")
    for op, refusals in REFUSALS.items()
    for index, (name, change, error) in enumerate(refusals)
] + [
    pytest.param(op, f"eplb_state.{name}", {"eplb_state": change}, error, id=f"{op}-eplb-{name}-{index}")
    for op in ("fp8", "nvfp4")
    for index, (name, change, error) in enumerate(EPLB_REFUSALS)
]


@pytest.mark.parametrize(("op", "name", "change", "error"), CASES)
def test_refusals_name_the_argument_and_write_nothing(
    op: str, name: str, change: dict[str, Any], error: type[Exception], generator: torch.Generator
) -> None:
    call = CALLS[op](generator)
    if op == "nvfp4":  # so that its write, too, would be seen
        call.arguments |= {"w2_global_scale": tensor(3) + 1, "l2_alpha": poisoned((3,), torch.float32)}
        call.outputs.append("l2_alpha")
        if name == "l2_alpha" and len(change) == 1:
            call.arguments |= dict.fromkeys(("w2_global_scale", "l2_alpha"))
    changed = {
        k: v.clone() if isinstance(v, torch.Tensor) and 0 not in v.stride() else v for k, v in change.items()
    }
    if "eplb_state" in changed:
        changed["eplb_state"] = eplb_state(generator, **change["eplb_state"])
    call.arguments |= changed
    outputs = [
        t for n in call.outputs if isinstance(t := call.arguments.get(n), torch.Tensor) and not t.is_meta
    ]
    before = [raw_bytes(output).clone() for output in outputs]
    with pytest.raises(error, match=rf"^{name.replace('.', '[.]')}\S*: expected .*got"):
        getattr(reference, call.name)(**call.arguments)
    assert all(torch.equal(b, raw_bytes(output)) for b, output in zip(before, outputs, strict=True))
