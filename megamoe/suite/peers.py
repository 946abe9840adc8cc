"""Implementations by others that `megamoe bench` times beside ours where they are installed.

A peer that gives other bytes for some inputs by design says so in ``supports``; on all others it must agree
with the reference like anything else that is timed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megamoe.suite.operation import Implementation, Params


def mega_moe_pre_dispatch(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    x: Tensor,
    x_sf: Tensor,
    topk_idx_out: Tensor,
    topk_weights_out: Tensor,
    hidden_quant: Any,
) -> None:
    """DeepGEMM's staging kernel under the arguments of prepare_megamoe_inputs."""
    import deep_gemm

    group = hidden_quant.scale.group_shape.col
    deep_gemm.mega_moe_pre_dispatch(
        hidden_states,
        topk_ids,
        topk_weights,
        x,
        x_sf,
        topk_idx_out,
        topk_weights_out,
        hidden_states.shape[0],
        group,
    )


def _pre_dispatch_supports(params: Params) -> str | None:
    if params["recipe"] != "fp8_ue8m0_g32":
        return "takes UE8M0 scales per 32 columns"
    if params["values"] == "specials":
        return "gives other bytes for infinities, by design"
    plain = params["padding"] is None and params["shared_block_m"] is None and params["strides"] == "dense"
    if not plain or params["eplb"] is not None:
        return "knows no padding, shared experts, EPLB or strides"
    if (params["dtype"], params["ids"], params["weights"]) != ("bf16", "i32", "fp32"):
        return "takes bfloat16, int32 and float32"
    return None


PEERS: dict[str, tuple[Implementation, ...]] = {
    "prepare_megamoe_inputs": (
        Implementation(
            "deep_gemm",
            "megamoe.suite.peers:mega_moe_pre_dispatch",
            ("deep_gemm.mega_moe_pre_dispatch",),
            _pre_dispatch_supports,
        ),
    ),
}


def parse_peer(text: str) -> Implementation:
    """NAME=module:callable. Raises ValueError for another form."""
    name, equals, target = text.partition("=")
    module, colon, function = target.partition(":")
    if not (name and equals and module and colon and function):
        raise ValueError(f"expected NAME=module:callable, got {text!r}")
    return Implementation(name, target)
