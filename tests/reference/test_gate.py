"""The router: a scalar transcription of every step, ties, specials, fixed and masked tokens, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.gate import bf16_mega_gate, gate_logits, gate_scores, renormalized_weights, select_experts

F = np.float32
KWARGS = {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 2.5, "ep_rank": 0}


def pick(ranks: list[float], topk: int) -> list[int]:
    """K rounds over the row, strictly larger wins, from -inf."""
    left = dict(enumerate(ranks))
    chosen = []
    for _ in range(topk):
        best, best_rank = -1, -math.inf
        for expert, rank in left.items():
            if rank > best_rank:
                best, best_rank = expert, rank
        chosen.append(max(best, 0))
        left.pop(best, None)
    return chosen


def weigh(scores: list[float], factor: float) -> list[float]:
    lanes = next(width for width in (8, 16, 32) if len(scores) <= width)
    sums = [F(score) for score in scores] + [F(0)] * (lanes - len(scores))
    distance = lanes // 2
    while distance:
        sums = [sums[lane] + sums[lane ^ distance] for lane in range(lanes)]
        distance //= 2
    total = F(sums[0] + F(1e-20))
    return [float(F(F(F(score) / total) * F(factor))) for score in scores]


def problem(tokens: int, experts: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, 256, generator=generator).bfloat16()
    return x, torch.randn(experts, 256, generator=generator).bfloat16() / 16


ROWS = st.integers(4, 24).flatmap(
    lambda experts: st.tuples(
        st.just(experts),
        st.lists(
            st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1.5, 2.0, -3.0, 7.0]),
            min_size=experts,
            max_size=experts,
        ),
        st.integers(1, experts),
    )
)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_selection(row):
    """Ties, infinities, NaN and more rounds than selectable experts."""
    _, ranks, topk = row
    assert select_experts(torch.tensor([ranks]), topk).tolist() == [pick(ranks, topk)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 2.0**10, width=32), min_size=1, max_size=32), st.sampled_from([1.0, 2.5, 0.1]))
def test_weights(scores, factor):
    actual = renormalized_weights(torch.tensor([scores], dtype=torch.float32), factor)
    assert actual.tolist() == [weigh(scores, factor)]


def test_weight_vector():
    weights = renormalized_weights(torch.tensor([[1.5, 1.25, 1.0, 0.75, 0.5, 0.25]]), 2.5)
    printed = [0.7142857313, 0.5952380896, 0.4761904776, 0.3571428657, 0.2380952388, 0.1190476194]
    assert [round(weight, 10) for weight in weights[0].tolist()] == printed
    zeros = renormalized_weights(torch.zeros(1, 4), 1.0)
    assert zeros.tolist() == [[0.0] * 4]


def test_scores():
    logits = torch.cat([torch.linspace(-30, 40, 2001), torch.tensor([20.0, 20.000002, -85.0])])
    exact = np.sqrt(
        np.where(logits.numpy() > 20, logits.double().numpy(), np.log1p(np.exp(logits.double().numpy())))
    )
    actual = gate_scores(logits).double().numpy()
    assert np.abs(actual / exact - 1).max() < 2**-22
    specials = gate_scores(torch.tensor([math.inf, -math.inf, math.nan, 30.0, -120.0]))
    assert specials[[0, 1, 4]].tolist() == [math.inf, 0.0, 0.0]  # expf(-120) is 0
    assert specials[2].isnan()
    assert specials[3] == np.sqrt(F(30))


def test_logits(generator):
    x, weight = problem(3, 8, generator)
    exact = x.double() @ weight.double().T
    assert torch.equal(gate_logits(x, weight), exact.float())
    halves = [
        (x[:, part].double() @ weight[:, part].double().T).float()
        for part in (slice(0, 128), slice(128, 256))
    ]
    assert torch.equal(gate_logits(x, weight, num_splits=2), halves[0] + halves[1])
    model = gate_logits(x, weight, accumulation="blackwell_bf16")
    assert 0 < (model - exact.float()).abs().max() < 1e-5
    with pytest.raises(ValueError, match="num_splits"):
        gate_logits(x, weight, num_splits=3)


def test_without_bias_logits_are_ranked(generator):
    """Two logits whose scores round to the same value keep the order of the logits."""
    x, weight = problem(1, 8, generator)
    logits = torch.full((1, 8), -50.0)
    logits[0, 2], logits[0, 5] = -1000.0, -999.0  # both scores are 0
    logits[0, :2] = -math.inf
    logits[0, 3:5] = logits[0, 6:] = -math.inf
    scores = gate_scores(logits)
    assert scores[0, 2] == scores[0, 5] == 0
    _, ids = bf16_mega_gate(x, weight, 2, **KWARGS, logits=logits)
    assert ids.tolist() == [[5, 2]]
    _, ids = bf16_mega_gate(x, weight, 2, **KWARGS, logits=logits, bias=torch.zeros(8))
    assert ids.tolist() == [[0, 1]]  # all scores are 0 now: the smaller id


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("topk", [1, 6, 8, 9, 17])
def test_bias_and_images(topk, with_bias, generator):
    x, weight = problem(7, 20, generator)
    bias = torch.randn(20, generator=generator) if with_bias else None
    image_bias = torch.randn(20, generator=generator)
    is_image = torch.tensor([True, False, True, False, False, True, True])
    logits = gate_logits(x, weight)
    scores = gate_scores(logits)
    weights, ids = bf16_mega_gate(
        x, weight, topk, **KWARGS, bias=bias, image_bias=image_bias, image_token_mask=is_image
    )
    for token in range(7):
        added = image_bias if is_image[token] else bias if with_bias else torch.zeros(20)
        expected = pick((scores[token] + added).tolist(), topk)
        assert ids[token].tolist() == expected
        assert weights[token].tolist() == weigh(scores[token, expected].tolist(), 2.5)


def test_fixed_and_masked_tokens(generator):
    """Fixed tokens keep their experts in the given order; the table is overwritten for every token."""
    x, weight = problem(4, 8, generator)
    table = torch.tensor([[7, 0, 3], [-5, 99, 0], [1, 2, 3], [4, 4, 4]])
    fixed = torch.tensor([True, False, True, False])
    mask = torch.tensor([True, True, False, True])
    bias = torch.randn(8, generator=generator)
    scores = gate_scores(gate_logits(x, weight))
    free = select_experts(scores + bias, 3)
    weights, ids = bf16_mega_gate(
        x, weight, 3, **KWARGS, bias=bias, fix_routing_mask=fixed, unmapped_topk_idx=table, mask=mask
    )
    assert ids.tolist() == table.tolist() == [[7, 0, 3], free[1].tolist(), [-1] * 3, free[3].tolist()]
    assert weights[2].tolist() == [0.0] * 3
    assert weights[0].tolist() == weigh(scores[0, [7, 0, 3]].tolist(), 2.5)


def test_physical_experts(generator):
    x, weight = problem(6, 8, generator)
    mapping = torch.arange(24).reshape(8, 3) + 100
    count = torch.tensor([1, 2, 3, 3, 0, 2, 1, 3])
    unmapped = torch.zeros(6, 4, dtype=torch.int64)
    options = {**KWARGS, "ep_rank": 3}
    _, logical = bf16_mega_gate(x, weight, 4, **options)
    _, physical = bf16_mega_gate(
        x,
        weight,
        4,
        **options,
        unmapped_topk_idx=unmapped,
        logical_to_physical_map=mapping,
        logical_replica_count=count,
    )
    assert torch.equal(unmapped, logical)
    for token in range(6):
        for slot in range(4):
            expert = int(logical[token, slot])
            replica = (3 + token * 23333) % 2**32 % max(int(count[expert]), 1)
            assert int(physical[token, slot]) == int(mapping[expert, replica])


def test_no_tokens():
    weights, ids = bf16_mega_gate(
        torch.zeros(0, 256, dtype=torch.bfloat16), torch.zeros(8, 256, dtype=torch.bfloat16), 3, **KWARGS
    )
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(4, 256)}, TypeError, "x: expected dtype bfloat16"),
        ({"x": torch.zeros(4, 128, dtype=torch.bfloat16)}, ValueError, "weight: expected 128 columns"),
        ({"x": torch.zeros(256, 4, dtype=torch.bfloat16).T}, ValueError, "x: expected a contiguous tensor"),
        ({"weight": torch.zeros(6, 256, dtype=torch.bfloat16)}, ValueError, "weight: expected 4 to 512 rows"),
        (
            {"weight": torch.zeros(516, 256, dtype=torch.bfloat16)},
            ValueError,
            "weight: expected 4 to 512 rows",
        ),
        ({"num_topk": 0}, ValueError, "num_topk: expected 1 to 8"),
        ({"num_topk": 9}, ValueError, "num_topk: expected 1 to 8"),
        ({"scoring_func": "sigmoid"}, ValueError, "scoring_func: expected 'sqrtsoftplus'"),
        ({"routed_scaling_factor": math.inf}, ValueError, "routed_scaling_factor: expected a finite number"),
        ({"ep_rank": -1}, ValueError, "ep_rank: expected"),
        ({"bias": torch.zeros(7)}, ValueError, "bias: expected shape"),
        ({"bias": torch.zeros(8, dtype=torch.float64)}, TypeError, "bias: expected dtype float32"),
        ({"image_bias": torch.zeros(8)}, ValueError, "image_bias: expected"),
        ({"image_token_mask": torch.zeros(4, dtype=torch.bool)}, ValueError, "image_bias: expected"),
        ({"fix_routing_mask": torch.zeros(4, dtype=torch.bool)}, ValueError, "unmapped_topk_idx: expected"),
        (
            {"unmapped_topk_idx": torch.zeros(4, 2, dtype=torch.int64)},
            ValueError,
            "unmapped_topk_idx: expected shape",
        ),
        (
            {"unmapped_topk_idx": torch.zeros(4, 3, dtype=torch.int32)},
            TypeError,
            "unmapped_topk_idx: expected dtype",
        ),
        ({"unmapped_topk_idx": torch.zeros(3, 4, dtype=torch.int64).T}, ValueError, "rows of stride 1"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ValueError, "mask: expected shape"),
        ({"logical_replica_count": torch.ones(8, dtype=torch.int32)}, ValueError, "logical_to_physical_map"),
    ],
)
def test_refused(changes, error, message):
    arguments = {
        "x": torch.zeros(4, 256, dtype=torch.bfloat16),
        "weight": torch.zeros(8, 256, dtype=torch.bfloat16),
        "num_topk": 3,
        **KWARGS,
    } | changes
    with pytest.raises(error, match=message):
        bf16_mega_gate(**arguments)


def test_wrong_fixed_experts_write_nothing(generator):
    x, weight = problem(2, 8, generator)
    table = torch.tensor([[7, 0], [8, 1]])
    before = table.clone()
    with pytest.raises(ValueError, match=r"unmapped_topk_idx: expected ids in \[0, 8\)"):
        bf16_mega_gate(
            x, weight, 2, **KWARGS, fix_routing_mask=torch.ones(2, dtype=torch.bool), unmapped_topk_idx=table
        )
    assert torch.equal(table, before)
