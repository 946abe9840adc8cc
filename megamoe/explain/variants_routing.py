"""Knobs of routing: padding, replicas of experts, load, widths of ids; and of decoding scale bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megamoe.explain.variants import (
    Call,
    Outputs,
    Replay,
    Variant,
    bound,
    placed,
    replays,
    turned,
)
from reference import eplb, formats, routing
from reference.recipes import RoutingRecipe
from reference.routing import ROUTING

ALL_TOKENS = 1 << 62  # routing is cheap, and replicas are chosen by row: never on some rows only
_INT_MAX = (2**31 - 1, 2**63 - 1)


@replays("prepare_megamoe_bf16_inputs", "eplb_map_to_physical_and_record")
def routing_only(call: Call) -> Replay | None:
    if not ({"topk_ids", "topk_idx_in"} & set(call.inputs)):
        return None
    return Replay(lambda c: routing_outputs(c, ROUTING), routing_variants, few_tokens=ALL_TOKENS)


_ROUTING_KNOBS: list[tuple[str, str, dict[str, Any], int]] = [
    ("padded_tokens_counted", "", {"count_padded_tokens": True}, 1),
    ("replica_hash_width", "signed 32 bits", {"replica_hash_signed": True}, 1),
    (
        "replica_hash_width",
        "signed 32 bits, floor remainder",
        {"replica_hash_signed": True, "replica_remainder": "floor"},
        2,
    ),
    *[("replica_hash_width", f"{bits} bits", {"replica_hash_bits": bits}, 2) for bits in (16, 24, 31, 62)],
    ("replica_by_slot", "hash of the flat slot", {"replica_hash_by": "slot"}, 1),
    (
        "replica_by_slot",
        "flat slot modulo replicas",
        {"replica_hash_by": "slot", "replica_hash_multiplier": 1},
        1,
    ),
    ("invalid_id_kept", "", {"invalid_id": "keep"}, 1),
]


def routing_variants(call: Call) -> Iterator[Variant]:
    is_mapped = "logical_to_physical_map" in call.inputs
    if is_mapped:
        for cause, detail, knobs, cost in _ROUTING_KNOBS:
            changed = turned(ROUTING, knobs)
            if changed is not None:
                yield Variant(
                    cause,
                    detail,
                    bound(routing_outputs, changed),
                    cost,
                    by_token=False,
                )
        yield Variant(
            "id_width",
            "ids cut to 32 bits before mapping",
            bound(routing_outputs, ROUTING, narrow=True),
            2,
            by_token=False,
        )
    if "is_padding" in call.inputs:
        for what in (("ids", "weights"), ("ids",), ("weights",)):
            yield Variant(
                "padding_not_masked",
                " and ".join(what),
                bound(routing_outputs, ROUTING, unmasked=what),
                by_token=False,
            )
        for sentinel in (0, -2, *_INT_MAX):
            changed = turned(ROUTING, {"padding_id": sentinel})
            yield Variant(
                "padding_sentinel",
                f"id {sentinel}",
                bound(routing_outputs, changed),
                2,
                by_token=False,
            )
        for weight in (1.0, float("nan"), -1.0):
            changed = turned(ROUTING, {"padding_weight": weight})
            yield Variant(
                "padding_sentinel",
                f"weight {weight}",
                bound(routing_outputs, changed),
                2,
                by_token=False,
            )


def routing_outputs(
    call: Call, recipe: RoutingRecipe, *, unmasked: tuple[str, ...] = (), narrow: bool = False
) -> Outputs:
    inputs = call.inputs
    ids = inputs.get("topk_ids", inputs.get("topk_idx_in"))
    weights = inputs.get("topk_weights", inputs.get("topk_weights_in"))
    if ids is None:
        return {}
    weights = torch.ones(ids.shape) if weights is None else weights
    masked = routing.repack_topk(ids, weights, inputs.get("is_padding"), recipe)
    plain = routing.repack_topk(ids, weights, None, recipe)
    routed_ids = plain.ids if "ids" in unmasked else masked.ids
    routed_weights = plain.weights if "weights" in unmasked else masked.weights
    factor = call.params.get("routed_scaling_factor")
    if factor is not None:
        routed_weights = routed_weights * torch.tensor(float(factor))
    found: Outputs = {}
    if "logical_to_physical_map" in inputs:
        if narrow:
            routed_ids = routed_ids.to(torch.int32).to(torch.int64)
        unpadded = call.params.get("num_unpadded_tokens")
        load = inputs.get("expert_load")
        mapping = eplb.map_experts(
            routed_ids.to(torch.int32).to(torch.int64)
            if call.op == "eplb_map_to_physical_and_record"
            else routed_ids,
            inputs["logical_to_physical_map"],
            inputs["logical_replica_count"],
            0 if load is None else load.numel(),
            None if unpadded is None else int(unpadded),
            recipe,
        )
        routed_ids = mapping.ids
        if load is not None:
            records = call.params.get("record", call.params.get("eplb", "record"))
            added = mapping.load.to(load.dtype) if records in (True, "record") else torch.zeros_like(load)
            found["expert_load"] = load + added
        if "physical_ids" in call.outputs:
            found["physical_ids"] = routed_ids.to(call.outputs["physical_ids"].dtype)
    for name in ("topk_idx_out", "topk_idx"):
        found[name] = routed_ids
    for name in ("topk_weights_out", "topk_weights"):
        found[name] = routed_weights
    return placed(call, found)


@replays("ue8m0_uint8_to_float")
def _ue8m0(call: Call) -> Replay | None:
    if "sf" not in call.inputs:
        return None

    def decoded(call: Call, function: Callable[[Tensor], Tensor]) -> Outputs:
        values = function(call.inputs["sf"].view(torch.uint8))
        return {name: values for name in call.outputs if not name.startswith("actual/")}

    def variants(_: Call) -> Iterator[Variant]:
        as_format = bound(decoded, lambda codes: formats.decode(codes, "ue8m0"))
        yield Variant("special_codes", "", as_format, by_token=False)

    return Replay(bound(decoded, formats.decode_ue8m0_shift), variants, few_tokens=ALL_TOKENS)
