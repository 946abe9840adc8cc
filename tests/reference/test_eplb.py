"""EPLB: hash, mapping and load against a scalar loop, and the inputs that no recording exercises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.eplb import choose_replica, eplb_map_to_physical_and_record, map_experts, replica_hash
from reference.recipes import RECIPES

ROUTING = RECIPES["routing"]


def scalar_mapping(
    ids: list[list[int]],
    expert_map: list[list[int]],
    counts: list[int],
    num_physical: int,
    unpadded: int | None,
) -> tuple[list[list[int]], list[int]]:
    load, mapped = [0] * num_physical, []
    for token, row in enumerate(ids):
        mapped.append([])
        for logical in row:
            physical = -1
            if 0 <= logical < len(counts):
                physical = expert_map[logical][(token * 2654435769) % 2**32 % max(counts[logical], 1)]
            mapped[-1].append(physical)
            if 0 <= physical < num_physical and (unpadded is None or token < unpadded):
                load[physical] += 1
    return mapped, load


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_against_a_scalar_loop(data: st.DataObject) -> None:
    tokens, topk, experts, slots = (data.draw(st.integers(1, n)) for n in (40, 6, 9, 4))
    counts = data.draw(st.lists(st.integers(0, slots), min_size=experts, max_size=experts))
    num_physical = data.draw(st.integers(1, 30))
    cell = st.integers(-1, num_physical + 3)
    row = st.lists(cell, min_size=slots, max_size=slots)
    expert_map = data.draw(st.lists(row, min_size=experts, max_size=experts))
    id_row = st.lists(st.integers(-3, experts + 2), min_size=topk, max_size=topk)
    ids = data.draw(st.lists(id_row, min_size=tokens, max_size=tokens))
    unpadded = data.draw(st.one_of(st.none(), st.integers(0, tokens + 5)))
    record = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    map_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    load = torch.arange(num_physical, dtype=torch.int32)
    mapped, added = scalar_mapping(ids, expert_map, counts, num_physical, unpadded)
    actual = eplb_map_to_physical_and_record(
        torch.tensor(ids, dtype=dtype),
        load,
        torch.tensor(expert_map, dtype=map_dtype),
        torch.tensor(counts, dtype=map_dtype),
        torch.tensor(record),
        None if unpadded is None else torch.tensor(unpadded, dtype=torch.int32),
    )
    assert actual.dtype == dtype
    assert actual.tolist() == mapped
    expected_load = torch.arange(num_physical) + torch.tensor(added) * record
    assert load.tolist() == expected_load.tolist()


def test_hash_vectors() -> None:
    """NUMERICS 6.3."""
    assert replica_hash(torch.arange(4)).tolist() == [0, 2654435769, 1013904242, 3668340011]
    expected = {2: [0, 1, 0, 1, 0, 1], 3: [0, 0, 2, 2, 1, 0, 0, 2, 2, 1, 0, 0], 4: [0, 1, 2, 3, 0, 1, 2, 3]}
    for count, replicas in expected.items():
        tokens = torch.arange(len(replicas))
        assert choose_replica(tokens, torch.full_like(tokens, count)).tolist() == replicas


def test_hash_width() -> None:
    """CASES 23."""
    tokens, count = torch.arange(8), torch.full((8,), 3)
    assert choose_replica(tokens, count).tolist() == [0, 0, 2, 2, 1, 0, 0, 2]
    signed = replace(ROUTING, replica_hash_signed=True)
    assert choose_replica(tokens, count, signed).tolist() == [0, -1, 2, -2, 1, 0, -1, 2]
    wide = replace(ROUTING, replica_hash_bits=63)
    assert choose_replica(tokens, count, wide).tolist() == [t * 2654435769 % 3 for t in range(8)]


def test_padded_tokens_are_not_load() -> None:
    """CASES 22."""
    ids = torch.tensor([[2, 3], [2, 1], [3, 2]] + [[0, 1]] * 5)
    identity = torch.arange(4).unsqueeze(1)
    ones = torch.ones(4, dtype=torch.int64)
    right = map_experts(ids, identity, ones, 4, num_unpadded_tokens=3)
    assert right.load.tolist() == [0, 1, 3, 2]
    wrong = map_experts(ids, identity, ones, 4, 3, replace(ROUTING, count_padded_tokens=True))
    assert wrong.load.tolist() == [5, 6, 3, 2]
    assert torch.equal(right.ids, ids)
    above = map_experts(ids, identity, ones, 4, num_unpadded_tokens=1000)
    assert above.load.tolist() == [5, 6, 3, 2]


def test_example_of_numerics_14_6() -> None:
    expert_map = torch.full((6, 3), -1)
    expert_map[5] = torch.tensor([12, 40, -1])
    counts = torch.zeros(6, dtype=torch.int64)
    counts[5] = 2
    load = torch.zeros(41, dtype=torch.int32)
    ids = torch.tensor([[5, -1], [5, 6], [5, 0], [5, 1]])
    actual = eplb_map_to_physical_and_record(ids, load, expert_map, counts, torch.tensor(True))
    assert actual.tolist() == [[12, -1], [40, -1], [12, -1], [40, -1]]
    assert load.nonzero().flatten().tolist() == [12, 40]


def test_ids_beyond_int32_wrap_in_the_stand_alone_operation() -> None:
    ids = torch.tensor([[2**32 + 1, 2**32 - 1]])
    identity, ones = torch.arange(4).unsqueeze(1), torch.ones(4, dtype=torch.int64)
    load = torch.zeros(4, dtype=torch.int32)
    actual = eplb_map_to_physical_and_record(ids, load, identity, ones, torch.tensor(True))
    assert actual.tolist() == [[1, -1]]


def test_strided_map_ids_and_load(generator: torch.Generator) -> None:
    ids = torch.randint(-1, 8, (10, 8), generator=generator)[:, ::2]
    expert_map = torch.randint(0, 16, (6, 8), generator=generator)[:, ::2]
    counts = torch.randint(1, 5, (12,), generator=generator)[::2]
    storage = torch.zeros(32, dtype=torch.int32)
    mapped, load = scalar_mapping(ids.tolist(), expert_map.tolist(), counts.tolist(), 16, None)
    actual = eplb_map_to_physical_and_record(ids, storage[::2], expert_map, counts, torch.tensor(True))
    assert actual.tolist() == mapped
    assert storage[::2].tolist() == load
    assert not bool(storage[1::2].any())


def test_empty_ids_are_returned_as_they_are() -> None:
    ids = torch.empty(0, 4, dtype=torch.int32)
    identity, ones = torch.arange(4).unsqueeze(1), torch.ones(4, dtype=torch.int64)
    assert (
        eplb_map_to_physical_and_record(ids, torch.zeros(4).int(), identity, ones, torch.tensor(True)) is ids
    )


def test_other_recipes() -> None:
    """NUMERICS 6.6: replica by flat slot; invalid ids passed through."""
    expert_map = torch.tensor([[0, 1], [2, 3]])
    counts = torch.tensor([2, 2])
    ids = torch.tensor([[0, 1, 0], [1, 0, -1]])
    by_slot = map_experts(ids, expert_map, counts, 4, recipe=RECIPES["routing_slot_hash"])
    assert by_slot.ids.tolist() == [[0, 3, 0], [3, 0, -1]]
    kept = map_experts(
        torch.tensor([[7, -1, 0]]), expert_map, counts, 4, recipe=RECIPES["routing_keep_invalid"]
    )
    assert kept.ids.tolist() == [[7, -1, 0]]
    assert kept.load.tolist() == [1, 0, 0, 0]


GOOD = {
    "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
    "expert_load_view": torch.zeros(4, dtype=torch.int32),
    "logical_to_physical_map": torch.zeros(4, 2, dtype=torch.int64),
    "logical_replica_count": torch.ones(4, dtype=torch.int64),
    "record_enabled": torch.tensor(True),
    "num_unpadded_tokens": torch.tensor(2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("topk_ids", torch.zeros(3, 2), TypeError),
        ("topk_ids", torch.tensor(1), ValueError),
        ("expert_load_view", torch.zeros(4), TypeError),
        ("expert_load_view", torch.zeros(4, 1, dtype=torch.int32), ValueError),
        ("expert_load_view", torch.zeros(1, dtype=torch.int32).expand(4), ValueError),
        ("logical_to_physical_map", torch.zeros(8, dtype=torch.int64), ValueError),
        ("logical_to_physical_map", torch.zeros(4, 2), TypeError),
        ("logical_to_physical_map", [[0, 1]], TypeError),
        ("logical_replica_count", torch.ones(3, dtype=torch.int64), ValueError),
        ("logical_replica_count", torch.tensor([1, 3, 1, 1]), ValueError),
        ("logical_replica_count", torch.ones(4), TypeError),
        ("record_enabled", torch.tensor(1), TypeError),
        ("record_enabled", torch.tensor([True, False]), ValueError),
        ("num_unpadded_tokens", torch.tensor(2.0), TypeError),
        ("num_unpadded_tokens", torch.tensor([1, 2]), ValueError),
    ],
)
def test_refusals_name_the_argument_and_count_nothing(
    name: str, value: object, error: type[Exception]
) -> None:
    arguments = {key: tensor.clone() for key, tensor in GOOD.items()}
    arguments[name] = value
    with pytest.raises(error, match=f"^{name}: expected"):
        eplb_map_to_physical_and_record(**arguments)
    if name != "expert_load_view":
        assert not bool(arguments["expert_load_view"].any())
