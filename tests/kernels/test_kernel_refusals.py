"""Every argument that must be refused, each with proof that no byte of any output changed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kernel_calls as calls
import pytest
import torch
from kernel_calls import E4M3, FUNCTIONS, fp8_key, poisoned

from megamoe.eplb import eplb_map_to_physical_and_record, micro_batch
from megamoe.quant_keys import GroupShape, QuantKey, ScaleDesc, kNvfp4DynamicToken

Bend = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Refusal:
    """A valid call, bent in one place: which error, and what its message must name."""

    id: str
    function: str
    bend: Bend
    error: type[Exception]
    names: str


def put(**values: Any) -> Bend:
    return lambda arguments: arguments.update(values)


def turn(name: str, change: Callable[[Any], Any]) -> Bend:
    def bend(arguments: dict[str, Any]) -> None:
        arguments[name] = change(arguments[name])

    return bend


def retype(name: str, dtype: torch.dtype) -> Bend:
    return turn(name, lambda tensor: poisoned(*tensor.shape, dtype=dtype))


def no_experts(arguments: dict[str, Any]) -> None:
    for name in ("topk_ids", "topk_weights"):
        arguments[name] = arguments[name][:, :0]


def state(**values: Any) -> Bend:
    return turn("eplb_state", lambda old: replace(old, **values))


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def self_overlapping(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape)


# Argument -> (a wrong dtype, functions that have it). Every tensor argument gets five mistakes: not a
# tensor, wrong dtype, wrong device, a row too many, a dimension too many.
ROUTED = ("fp8", "token", "block", "bf16")
ALL = (*ROUTED, "norm")
TENSORS: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "hidden_states": (torch.float64, ALL),
    "topk_weights": (torch.float64, ROUTED),
    "topk_ids": (torch.int16, ROUTED),
    "topk_idx_out": (torch.int32, ROUTED),
    "topk_weights_out": (torch.float64, ROUTED),
    "is_padding": (torch.uint8, ROUTED),
    "x": (torch.float64, ALL),
    "x_sf": (torch.int64, ALL),
    "x_scales": (torch.float64, ("token",)),
    "shared_x": (torch.float64, ("token",)),
    "shared_x_sf": (torch.int64, ("fp8", "token")),
    "w2_global_scale": (torch.float64, ("token",)),
    "l2_alpha": (torch.float64, ("token",)),
    "norm_weight": (torch.float64, ("norm",)),
}
INPUTS = ("hidden_states", "topk_weights", "topk_ids", "is_padding", "w2_global_scale", "norm_weight")


def tensor_refusals() -> list[Refusal]:
    rows = []
    for name, (wrong, functions) in TENSORS.items():
        for function in functions:
            if name not in FUNCTIONS[function][1]():
                continue  # prepare_megamoe_bf16_inputs has no x_sf
            here = f"{function}-{name}"
            rows += [
                Refusal(f"{here}-list", function, put(**{name: [1, 2]}), TypeError, name),
                Refusal(f"{here}-dtype", function, retype(name, wrong), TypeError, name),
                Refusal(f"{here}-device", function, turn(name, meta), ValueError, "device"),
                Refusal(f"{here}-ndim", function, turn(name, lambda t: t[None]), ValueError, name),
            ]
            if name != "hidden_states":
                rows.append(
                    Refusal(f"{here}-shape", function, turn(name, lambda t: t[1:]), ValueError, "expected")
                )
            if name not in INPUTS:
                rows.append(Refusal(f"{here}-self", function, turn(name, self_overlapping), ValueError, name))
                rows.append(Refusal(f"{here}-none", function, put(**{name: None}), Exception, name))
    return rows


def key_refusals() -> list[Refusal]:
    def key(id: str, bad: Any, error: type[Exception] = ValueError) -> Refusal:
        return Refusal(f"fp8-key-{id}", "fp8", put(hidden_quant=bad), error, "hidden_quant")

    per_token, per_block = GroupShape(1, -1), GroupShape(128, 128)
    return [
        key("not-a-key", "mxfp8", TypeError),
        key("dtype", fp8_key(32, dtype=torch.float8_e5m2)),
        key("asymmetric", fp8_key(32, symmetric=False)),
        key("two-level", fp8_key(32, scale2=ScaleDesc(torch.float32, False, per_token))),
        key("static", fp8_key(32, scale=ScaleDesc(torch.uint8, True, GroupShape(1, 32)))),
        key("per-token", fp8_key(32, scale=ScaleDesc(torch.float32, False, per_token))),
        key("per-block", fp8_key(32, scale=ScaleDesc(torch.float32, False, per_block))),
        key("group-96", fp8_key(96)),
        key("group-256", fp8_key(256, torch.float32)),
        key("scale-bf16", fp8_key(128, torch.bfloat16)),
        key("ue8m0-16", fp8_key(16)),
        key("ue8m0-8", fp8_key(8, torch.float8_e8m0fnu)),
        key("nvfp4", kNvfp4DynamicToken),
        Refusal("fp8-key-none-with-sf", "fp8", put(hidden_quant=None), ValueError, "x_sf"),
        Refusal("fp8-sf-none-with-key", "fp8", put(x_sf=None), ValueError, "x_sf"),
        Refusal("fp8-fp32-words", "fp8", put(hidden_quant=fp8_key(128, torch.float32)), TypeError, "x_sf"),
    ]


def narrow(columns: int) -> Bend:
    def bend(arguments: dict[str, Any]) -> None:
        arguments["hidden_states"] = arguments["hidden_states"][:, :columns]

    return bend


def share(output: str, source: str) -> Bend:
    """`output` becomes a view of `source`'s memory with its own dtype and shape."""

    def bend(arguments: dict[str, Any]) -> None:
        old, other = arguments[output], arguments[source]
        size = old.numel() * old.element_size()
        room = torch.zeros(max(size, other.numel() * other.element_size()), dtype=torch.uint8)
        arguments[output] = room[:size].view(old.dtype).reshape(old.shape)
        other_size = other.numel() * other.element_size()
        arguments[source] = room[:other_size].view(other.dtype).reshape(other.shape)

    return bend


SPECIFIC = [
    Refusal("fp8-hidden-192", "fp8", narrow(192), ValueError, "multiple of 128"),
    Refusal("token-hidden-64", "token", narrow(64), ValueError, "multiple of 128"),
    Refusal("block-hidden-96", "block", narrow(96), ValueError, "multiple of 64"),
    Refusal("norm-hidden-96", "norm", narrow(96), ValueError, "multiple of 64"),
    Refusal(
        "bf16-hidden-fp32", "bf16", turn("hidden_states", torch.Tensor.float), TypeError, "hidden_states"
    ),
    *(
        Refusal(f"{f}-weights-shape", f, turn("topk_weights", lambda t: t[:, :2]), ValueError, "topk_weights")
        for f in ROUTED
    ),
    *(Refusal(f"{f}-no-experts", f, no_experts, ValueError, "topk_ids") for f in ROUTED),
    Refusal("fp8-pages-without-block", "fp8", put(shared_block_m=None), ValueError, "shared_block_m"),
    Refusal("fp8-block-without-pages", "fp8", put(shared_x_sf=None), ValueError, "shared_x_sf"),
    Refusal("fp8-block-0", "fp8", put(shared_block_m=0), ValueError, "shared_block_m"),
    Refusal("fp8-block-negative", "fp8", put(shared_block_m=-8), ValueError, "shared_block_m"),
    Refusal("fp8-block-float", "fp8", put(shared_block_m=64.0), TypeError, "shared_block_m"),
    Refusal("fp8-block-bool", "fp8", put(shared_block_m=True), TypeError, "shared_block_m"),
    Refusal("fp8-pages-columns", "fp8", turn("shared_x_sf", lambda t: t[:, :1]), ValueError, "columns"),
    Refusal("fp8-pages-rows", "fp8", turn("shared_x_sf", lambda t: t[:-1]), ValueError, "rows"),
    Refusal("token-pages-rows", "token", turn("shared_x_sf", lambda t: t[:-1]), ValueError, "rows"),
    Refusal(
        "fp8-pages-with-fp32",
        "fp8",
        put(hidden_quant=fp8_key(128, torch.float32), x_sf=poisoned(5, 2, dtype=torch.float32)),
        ValueError,
        "shared_x_sf",
    ),
    Refusal("token-mxfp8-no-pages", "token", put(shared_x_sf=None), ValueError, "shared_x_sf"),
    Refusal("token-mxfp8-no-block", "token", put(shared_block_m=None), ValueError, "shared_block_m"),
    Refusal(
        "token-bf16-pages",
        "token",
        put(shared_x=poisoned(5, 256, dtype=torch.bfloat16)),
        ValueError,
        "shared_x_sf",
    ),
    Refusal("token-pages-no-x", "token", put(shared_x=None), ValueError, "shared_x_sf"),
    Refusal("token-alpha-alone", "token", put(w2_global_scale=None), ValueError, "w2_global_scale"),
    Refusal("token-scale-alone", "token", put(l2_alpha=None), ValueError, "l2_alpha"),
    Refusal(
        "token-activation-scale", "token", put(l2_activation_scale="1"), TypeError, "l2_activation_scale"
    ),
    Refusal(
        "token-x-columns", "token", put(x=poisoned(128, 5, dtype=torch.uint8).t()), ValueError, "row-major"
    ),
    Refusal(
        "token-sf-columns", "token", put(x_sf=poisoned(4, 5, dtype=torch.int32).t()), ValueError, "row-major"
    ),
    Refusal(
        "token-shared-columns",
        "token",
        put(shared_x=poisoned(256, 5, dtype=E4M3).t()),
        ValueError,
        "row-major",
    ),
    Refusal(
        "block-x-columns", "block", put(x=poisoned(96, 5, dtype=torch.uint8).t()), ValueError, "row-major"
    ),
    Refusal("norm-x-columns", "norm", put(x=poisoned(96, 3, dtype=torch.uint8).t()), ValueError, "row-major"),
    Refusal("norm-eps", "norm", put(norm_eps=torch.tensor(1e-5)), TypeError, "norm_eps"),
    Refusal("norm-gain", "norm", put(gain_center=None), TypeError, "gain_center"),
    Refusal("fp8-x-is-hidden", "fp8", share("x", "hidden_states"), ValueError, "hidden_states"),
    Refusal("fp8-ids-in-place", "fp8", share("topk_idx_out", "topk_ids"), ValueError, "topk_ids"),
    Refusal("token-x-is-sf", "token", share("x_sf", "x"), ValueError, "x"),
    Refusal(
        "bf16-x-is-hidden", "bf16", lambda a: a.update(x=a["hidden_states"]), ValueError, "hidden_states"
    ),
    Refusal("fp8-state-type", "fp8", put(eplb_state=object()), TypeError, "eplb_state"),
    *(
        Refusal(f"{f}-state-{field}", f, state(**{field: None}), ValueError, field)
        for f in ("fp8", "token")
        for field in (
            "expert_load_view",
            "logical_replica_count",
            "should_record_tensor",
            "num_unpadded_tokens_tensors",
        )
    ),
    Refusal("fp8-state-counts", "fp8", state(num_unpadded_tokens_tensors=[]), ValueError, "micro-batch 0"),
    Refusal(
        "fp8-state-counts-tensor",
        "fp8",
        state(num_unpadded_tokens_tensors=torch.tensor([3])),
        TypeError,
        "num_unpadded",
    ),
    Refusal("fp8-state-count-int", "fp8", state(num_unpadded_tokens_tensors=[3]), TypeError, "num_unpadded"),
    Refusal(
        "fp8-state-count-float",
        "fp8",
        state(num_unpadded_tokens_tensors=[torch.tensor(3.0)]),
        TypeError,
        "num_unpadded",
    ),
    Refusal(
        "fp8-state-count-vector",
        "fp8",
        state(num_unpadded_tokens_tensors=[torch.tensor([3, 4])]),
        ValueError,
        "num_unpadded",
    ),
    Refusal(
        "fp8-state-map-dtype",
        "fp8",
        state(logical_to_physical_map=torch.zeros(8, 3)),
        TypeError,
        "logical_to_physical_map",
    ),
    Refusal(
        "fp8-state-map-shape",
        "fp8",
        state(logical_to_physical_map=torch.zeros(8, dtype=torch.int32)),
        ValueError,
        "logical_to_physical_map",
    ),
    Refusal(
        "fp8-state-map-empty",
        "fp8",
        state(logical_to_physical_map=torch.zeros(8, 0, dtype=torch.int32)),
        ValueError,
        "logical_to_physical_map",
    ),
    Refusal(
        "fp8-state-replicas",
        "fp8",
        state(logical_replica_count=torch.ones(7, dtype=torch.int32)),
        ValueError,
        "logical_replica_count",
    ),
    Refusal(
        "fp8-state-load-dtype", "fp8", state(expert_load_view=torch.zeros(14)), TypeError, "expert_load_view"
    ),
    Refusal(
        "fp8-state-load-shape",
        "fp8",
        state(expert_load_view=torch.zeros(2, 7, dtype=torch.int32)),
        ValueError,
        "expert_load_view",
    ),
    Refusal(
        "fp8-state-load-device",
        "fp8",
        state(expert_load_view=torch.zeros(14, dtype=torch.int32, device="meta")),
        ValueError,
        "device",
    ),
    Refusal(
        "fp8-state-load-expanded",
        "fp8",
        state(expert_load_view=torch.zeros(1, dtype=torch.int32).expand(14)),
        ValueError,
        "expert_load_view",
    ),
    Refusal(
        "fp8-state-record",
        "fp8",
        state(should_record_tensor=torch.tensor(1)),
        TypeError,
        "should_record_tensor",
    ),
    Refusal(
        "fp8-state-records",
        "fp8",
        state(should_record_tensor=torch.tensor([True, True])),
        ValueError,
        "should_record_tensor",
    ),
]

ROWS = [*tensor_refusals(), *key_refusals(), *SPECIFIC]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_refusal_names_the_argument_and_writes_nothing(row: Refusal) -> None:
    function, build = FUNCTIONS[row.function]
    arguments = build()
    row.bend(arguments)
    outputs = {n: t for n, t in calls.written(arguments).items() if t.device.type == "cpu"}
    before = {name: calls.storage_bytes(tensor) for name, tensor in outputs.items()}
    with pytest.raises(row.error) as caught:
        function(**arguments)
    assert isinstance(caught.value, TypeError | ValueError)
    assert row.names in str(caught.value)
    assert "expected" in str(caught.value)
    assert "got" in str(caught.value)
    for name, tensor in outputs.items():
        assert torch.equal(before[name], calls.storage_bytes(tensor)), f"{name} was written"


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_unbent_call_is_valid_and_writes(name: str) -> None:
    function, build = FUNCTIONS[name]
    arguments = build()
    before = {n: calls.storage_bytes(t) for n, t in calls.written(arguments).items()}
    function(**arguments)
    for output, tensor in calls.written(arguments).items():
        assert not torch.equal(before[output], calls.storage_bytes(tensor)), f"{output} was not written"


def test_a_micro_batch_without_a_count_is_refused() -> None:
    arguments = calls.fp8_inputs()
    with micro_batch(1), pytest.raises(ValueError, match="micro-batch 1"):
        FUNCTIONS["fp8"][0](**arguments)


STAND_ALONE = {
    "ids-list": (0, [[1]], TypeError),
    "ids-float": (0, torch.zeros(2, 2), TypeError),
    "ids-vector": (0, torch.zeros(2, dtype=torch.int32), ValueError),
    "ids-meta": (0, torch.zeros(2, 2, dtype=torch.int32, device="meta"), ValueError),
    "load-float": (1, torch.zeros(4), TypeError),
    "load-matrix": (1, torch.zeros(2, 2, dtype=torch.int32), ValueError),
    "load-expanded": (1, torch.zeros(1, dtype=torch.int32).expand(4), ValueError),
    "map-float": (2, torch.zeros(4, 2), TypeError),
    "map-vector": (2, torch.zeros(4, dtype=torch.int32), ValueError),
    "count-length": (3, torch.ones(3, dtype=torch.int32), ValueError),
    "count-none": (3, None, TypeError),
    "record-bool": (4, True, TypeError),
    "record-int": (4, torch.tensor(1), TypeError),
    "limit-int": (5, 3, TypeError),
    "limit-vector": (5, torch.tensor([1, 2]), ValueError),
}


@pytest.mark.parametrize("case", list(STAND_ALONE))
def test_stand_alone_eplb_refuses_and_leaves_the_load(case: str) -> None:
    position, bad, error = STAND_ALONE[case]
    load = torch.zeros(4, dtype=torch.int32)
    arguments: list[Any] = [
        torch.zeros(2, 2, dtype=torch.int32),
        load,
        torch.zeros(4, 2, dtype=torch.int32),
        torch.ones(4, dtype=torch.int32),
        torch.tensor(True),
        torch.tensor(2),
    ]
    arguments[position] = bad
    with pytest.raises(error, match="expected"):
        eplb_map_to_physical_and_record(*arguments)
    assert load.tolist() == [0, 0, 0, 0]


def test_keys_are_frozen_and_compare_by_value() -> None:
    assert fp8_key(32) == QuantKey(E4M3, ScaleDesc(torch.uint8, False, GroupShape(1, 32)))
    with pytest.raises(AttributeError):
        fp8_key(32).dtype = torch.uint8  # type: ignore[misc]
