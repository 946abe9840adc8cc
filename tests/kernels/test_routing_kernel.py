"""The routing programs of the staging kernels: every way to map, to count and to stand in the grid."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import kernel_calls as calls
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_calls import poisoned

from megamoe import staging
from megamoe.eplb import EplbLayerState
from megamoe.kernels import routing, tuning
from megamoe.kernels.interpreter import interpret
from megamoe.kernels.tuning import RoutingPlan

EXPERTS, SLOTS, PHYSICAL = 24, 6, 300  # two parts of a load
GUARD = 8  # counters behind the load that nobody may touch
COUNTS = [*range(10), -1, -(2**32) + 3]  # zero, above the slots, negative
TOKENS = [1, 8, 64, 128, 129, 256, 512, 1024, 2047, 2048, 4096, 8192, 32768]


class Sizes(NamedTuple):
    """Of a mapping, for a plan."""

    num_physical: int
    num_replicas: int


def _state(limit: int, counts: list[int], slots: int = SLOTS) -> EplbLayerState:
    generator = torch.Generator().manual_seed(11)
    repeated = list(itertools.islice(itertools.cycle(counts), EXPERTS))
    return EplbLayerState(
        torch.zeros(PHYSICAL + GUARD, dtype=torch.int32)[:PHYSICAL],
        torch.randint(-1, PHYSICAL + 3, (EXPERTS, slots), generator=generator),
        torch.tensor(repeated),
        torch.tensor(True),
        [torch.tensor(limit)],
    )


def _check(arguments: dict[str, Any], state: EplbLayerState, limit: int) -> None:
    """Ids and load of a call, against the definition slot by slot."""
    assert state.logical_to_physical_map is not None
    assert state.logical_replica_count is not None
    assert state.expert_load_view is not None
    load = torch.zeros_like(state.expert_load_view)
    expected = torch.full_like(arguments["topk_idx_out"], -1)
    for (token, slot), expert in np.ndenumerate(arguments["topk_ids"].numpy()):
        if arguments["is_padding"][token] or not 0 <= expert < EXPERTS:
            continue
        count = max(int(state.logical_replica_count[expert]), 1)
        replica = token * 2654435769 % 2**32 % count
        if replica < state.logical_to_physical_map.shape[1]:
            physical = int(state.logical_to_physical_map[expert, replica])
            expected[token, slot] = physical
            if token < limit and 0 <= physical < load.shape[0]:
                load[physical] += 1
    assert torch.equal(arguments["topk_idx_out"], expected)
    assert torch.equal(state.expert_load_view, load)
    assert not state.expert_load_view.as_strided((GUARD,), (1,), load.shape[0]).any()


@pytest.mark.parametrize(
    ("tokens", "ahead", "parts", "shift", "apart", "fetch"),
    [
        (1, 4, 0, 0, False, False),
        (1, 4, 0, 1, False, False),
        (4, 4, 0, 1, False, False),
        (4, 4, 0, 0, False, True),
        (4, 0, 0, 2, False, False),
        (2, 0, 2, 1, False, False),
        (2, 0, 2, 1, True, True),
        (16, 0, 2, 0, False, True),
    ],
    ids=[
        "ahead1",
        "ahead1_spread",
        "ahead4_spread",
        "ahead4_fetched",
        "direct4_spread",
        "counted2_spread",
        "counted2_spread_apart_fetched",
        "counted16_fetched",
    ],
)
@pytest.mark.parametrize("operation", ["fp8", "token"])
def test_every_plan_maps_and_records_the_same(
    operation: str,
    tokens: int,
    ahead: int,
    parts: int,
    shift: int,
    apart: bool,
    fetch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, limit = 13, 9
    plan = RoutingPlan(-(-count // tokens), tokens, 32 if ahead else 4, shift, ahead, parts, apart, fetch)
    plain = replace(plan, fetch=False)
    monkeypatch.setattr(tuning, "routing_plan", lambda *given: plain if given[2] is None else plan)
    # One row a program, so that there are enough of them to stand between.
    monkeypatch.setattr(tuning, "_interpreted_rows", lambda *_: 1)
    make, function = {
        "fp8": (calls.fp8_inputs, staging.prepare_megamoe_inputs),
        "token": (calls.token_inputs, staging.prepare_megamoe_nvfp4_inputs),
    }[operation]
    given = make(tokens=count, size=128)
    for counts in ([1, 2, 3, 4], COUNTS):
        arguments = {**given, **calls.routing(count, topk=3, experts=EXPERTS + 2)}
        state = _state(limit, counts)
        x = arguments["x"] = poisoned(*given["x"].shape, dtype=given["x"].dtype)
        function(**{**arguments, "eplb_state": state})
        _check(arguments, state, limit)
        unmapped = {**arguments, "x": poisoned(*x.shape, dtype=x.dtype), "eplb_state": None}
        function(**unmapped)
        assert torch.equal(x.view(torch.uint8), unmapped["x"].view(torch.uint8))


@pytest.mark.parametrize("slots", range(1, 7))
def test_maps_of_any_width(slots: int) -> None:
    """Few tokens load up to four replicas ahead, a narrow map has fewer; counts go beyond its width."""
    count = limit = 5
    arguments = {
        **calls.fp8_inputs(tokens=count, size=128),
        **calls.routing(count, topk=3, experts=EXPERTS + 2),
    }
    assert tuning.routing_plan(3, count, Sizes(PHYSICAL, slots), 1, 7, False, tuning.GROUP_EPLB).ahead == min(
        slots, 4
    )
    for counts in (list(range(slots + 1)), COUNTS):
        state = _state(limit, counts, slots)
        arguments["x"] = poisoned(count, 128, dtype=arguments["x"].dtype)
        staging.prepare_megamoe_inputs(**{**arguments, "eplb_state": state})
        _check(arguments, state, limit)


@triton.jit
def _turns(kinds, indices, num_routing_programs, routing_shift):
    program = tl.program_id(0)
    before = routing.routing_programs_before(program, num_routing_programs, routing_shift)
    if routing.is_routing_program(program, num_routing_programs, routing_shift):
        tl.store(kinds + program, 1)
        tl.store(indices + program, program >> routing_shift)
    else:
        tl.store(kinds + program, 0)
        tl.store(indices + program, program - before)


@pytest.mark.parametrize(
    ("routers", "others", "shift"),
    [
        (routers, others, shift)
        for routers, others in ((1, 0), (1, 40), (3, 47), (7, 8), (5, 90))
        for shift in range(5)
        if (routers - 1) << shift < routers + others
    ],
)
def test_every_program_has_a_turn(routers: int, others: int, shift: int) -> None:
    """Routing programs and others are each numbered from 0 without a gap, wherever routing programs stand."""
    total = routers + others
    kinds, indices = torch.full((total,), -1), torch.full((total,), -1)
    interpret(_turns, (total,), (kinds, indices, routers, shift), {})
    assert indices[kinds == 1].tolist() == list(range(routers))
    assert indices[kinds == 0].tolist() == list(range(others))


@pytest.mark.parametrize("num_physical", [0, 1, 256, 257, 643, 2048, 5000])
@pytest.mark.parametrize("topk", [1, 3, 8, 33])
@pytest.mark.parametrize("style", [tuning.GROUP_EPLB, tuning.TOKEN_EPLB], ids=["group", "token"])
def test_plans_cover_every_token_inside_the_grid(
    style: tuning.EplbStyle, topk: int, num_physical: int
) -> None:
    eplb = Sizes(num_physical, 5) if num_physical else None
    for num_tokens in TOKENS:
        for warps, others in ((1, num_tokens), (4, num_tokens * 3), (8, max(num_tokens // 4, 1))):
            plan = tuning.routing_plan(topk, num_tokens, eplb, warps, others, False, style)
            assert plan.programs * plan.tokens >= num_tokens > (plan.programs - 1) * plan.tokens
            assert plan.slots >= topk
            assert (plan.programs - 1) << plan.shift < plan.programs + others
            assert plan.load_parts in (0, -(-num_physical // tuning.LOAD_BINS))
            assert not (plan.ahead and plan.load_parts)
            in_groups = num_physical > 0 and style is tuning.GROUP_EPLB
            assert plan.fetch == (in_groups and 512 <= num_tokens < 4096)
            if num_physical == 0:
                assert (plan.shift, plan.ahead, plan.load_parts, plan.fetch) == (0, 0, 0, False)


def test_no_tokens_need_no_routing_program() -> None:
    plan = tuning.routing_plan(8, 0, Sizes(288, 4), 4, 0, False, tuning.GROUP_EPLB)
    assert (plan.programs, plan.shift) == (0, 0)


def test_a_load_too_long_to_count_is_no_call_of_few_tokens() -> None:
    plan = tuning.routing_plan(8, 32768, Sizes(2049, 4), 8, 57344, False, tuning.GROUP_EPLB)
    assert (plan.ahead, plan.load_parts) == (0, 0)


def test_more_slots_than_an_interpreted_tile_holds() -> None:
    tokens, topk = 131073, 8
    arguments = calls.bf16_inputs(tokens=tokens, size=16)
    arguments |= {
        "topk_weights": torch.rand(tokens, topk),
        "topk_ids": torch.randint(0, 99, (tokens, topk)),
        "topk_idx_out": poisoned(tokens, topk, dtype=torch.int64),
        "topk_weights_out": poisoned(tokens, topk, dtype=torch.float32),
        "is_padding": None,
    }
    staging.prepare_megamoe_bf16_inputs(**arguments)
    assert torch.equal(arguments["topk_idx_out"], arguments["topk_ids"])
    assert torch.equal(arguments["topk_weights_out"], arguments["topk_weights"])


def test_slots_far_apart_are_addressed_in_64_bits() -> None:
    """Of a map whose slots are fetched ahead of their count; untouched memory between them costs nothing."""
    stride = 2**31 // 3 + 1
    far = torch.empty(3 * stride + 2, dtype=torch.int32).as_strided((2, 4), (1, stride))
    for slot in range(4):
        far[:, slot] = torch.tensor([slot, 4 + slot])
    arguments = {**calls.fp8_inputs(tokens=8, size=128), **calls.routing(8, topk=2, experts=2)}
    arguments["is_padding"] = None
    load = torch.zeros(8, dtype=torch.int32)
    state = EplbLayerState(load, far, torch.tensor([4, 3]), torch.tensor(True), [torch.tensor(8)])
    staging.prepare_megamoe_inputs(**{**arguments, "eplb_state": state})
    expected = torch.empty(8, 2, dtype=torch.int64)
    for (token, slot), expert in np.ndenumerate(arguments["topk_ids"].numpy()):
        expected[token, slot] = 4 * expert + token * 2654435769 % 2**32 % (4, 3)[expert]
    assert torch.equal(arguments["topk_idx_out"], expected)
    assert load.tolist() == expected.flatten().bincount(minlength=8).tolist()


def test_columns_far_apart_are_addressed_in_64_bits() -> None:
    """Slot 7 is 7 * 2^29 elements behind slot 0: the untouched memory between them costs nothing."""
    apart, topk = 2**29, 8
    arguments = calls.bf16_inputs(tokens=2, size=16)
    far = torch.empty((topk - 1) * apart + 2, dtype=torch.bfloat16).as_strided((2, topk), (1, apart))
    far.copy_(torch.arange(2 * topk).view(2, topk))
    arguments |= {
        "topk_weights": far,
        "topk_ids": torch.zeros(2, topk, dtype=torch.int64),
        "topk_idx_out": poisoned(2, topk, dtype=torch.int64),
        "topk_weights_out": poisoned(2, topk, dtype=torch.float32),
        "is_padding": None,
    }
    staging.prepare_megamoe_bf16_inputs(**arguments)
    assert torch.equal(arguments["topk_weights_out"], far.float())


def test_one_offset_for_all_only_where_strides_are_the_same_and_offsets_short() -> None:
    """The kernels then compute one offset of 32 bits; strides of the other tensors are left out."""
    whole = torch.empty(5, 3)
    packed = routing.pack_topk(whole, whole, whole, whole, None)
    assert packed[1:3] == (3, 1)
    assert packed[7:13] == (None,) * 6
    other = torch.empty(5, 4)[:, :3]
    assert routing.pack_topk(whole, other, whole, whole, None)[7:13] == (4, 1, 3, 1, 3, 1)
    fits, beyond = (torch.empty_strided((5, 3), ((1 << 30) - 1 + far, 1), device="meta") for far in (0, 1))
    assert routing.pack_topk(fits, fits, fits, fits, None)[7:13] == (None,) * 6
    assert routing.pack_topk(beyond, beyond, beyond, beyond, None)[7:13] == (1 << 30, 1) * 3
