"""Top-k repack: padding, dtypes, and what the checker of routings reports."""

from __future__ import annotations

import pytest
import torch

from reference.routing import repack_topk, routing_problems


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_repack(id_dtype: torch.dtype, weight_dtype: torch.dtype, generator: torch.Generator) -> None:
    ids = torch.randint(-1, 64, (9, 6), generator=generator).to(id_dtype)
    weights = torch.rand(9, 6, generator=generator).to(weight_dtype)
    is_padding = torch.arange(9) % 3 == 1
    before = ids.clone(), weights.clone()
    routing = repack_topk(ids, weights, is_padding)
    assert routing.ids.dtype == torch.int64
    assert routing.weights.dtype == torch.float32
    live = ~is_padding
    assert torch.equal(routing.ids[live], ids[live].long())
    assert torch.equal(routing.weights[live], weights[live].float())
    assert set(routing.ids[is_padding].flatten().tolist()) == {-1}
    assert torch.equal(routing.weights[is_padding].view(torch.int32), torch.zeros(3, 6, dtype=torch.int32))
    assert torch.equal(ids, before[0])
    assert torch.equal(weights, before[1])


def test_nan_weights_of_padding_vanish() -> None:
    """CASES 24, 26: replaced by 0.0, not multiplied."""
    weights = torch.full((2, 3), float("nan"))
    routing = repack_topk(torch.zeros(2, 3, dtype=torch.int32), weights, torch.tensor([True, False]))
    assert routing.weights[0].tolist() == [0.0] * 3
    assert bool(routing.weights[1].isnan().all())


def test_problems_are_named() -> None:
    """CASES 25: duplicates, ids out of range, NaN weights; -1 slots are nobody's duplicates."""
    ids = torch.tensor([[0, 0, 0], [1, 2, 3], [-1, -1, 8], [4, -2, 5], [6, 7, 1]])
    weights = torch.ones(5, 3)
    weights[4, 1] = float("nan")
    problems = routing_problems(ids, weights, 8)
    assert problems == [
        "token 2, slot 2: expert 8 is not in [-1, 8)",
        "token 3, slot 1: expert -2 is not in [-1, 8)",
        "token 0: expert 0 is listed more than once",
        "token 0: expert 0 is listed more than once",
        "token 4, slot 1: weight is NaN",
    ]
    assert routing_problems(ids[1:2], weights[1:2], 8) == []


def test_argmax_loop_over_nan_logits_is_reported() -> None:
    """CASES 25: picking the largest of NaN logits and masking it with -inf picks index 0 again."""
    logits, picked = torch.full((8,), float("nan")), []
    for _ in range(3):
        best = 0
        for expert in range(8):
            if logits[expert] > logits[best]:
                best = expert
        picked.append(best)
        logits[best] = float("nan")
    assert routing_problems(torch.tensor([picked]), torch.ones(1, 3), 8) != []
