"""Launch heuristics: every recorded value, their defining inequalities in exact arithmetic, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from reference.heuristics import (
    BUILDS,
    get_block_m_for_mega_moe,
    get_block_m_for_mega_moe_upstream,
    get_block_m_for_nvfp4_mega_moe,
    get_ring_tokens,
    get_token_alignment_for_mega_moe,
)

TABLES = json.loads((Path(__file__).parents[1] / "goldens" / "host_tables.json").read_text())


def table_id(row: dict) -> str:
    return f"{row['mma_type']}-r{row['num_ranks']}-e{row['num_experts']}-k{row['num_topk']}"


@pytest.mark.parametrize("row", TABLES["block_m"], ids=table_id)
def test_recorded_block_m(row):
    recorded = {int(tokens): block_m for tokens, block_m in row["tokens_to_block_m"].items()}
    assert recorded
    fixed = row["num_ranks"], row["num_experts"], row["num_max_tokens_per_rank"]
    actual = {}
    for tokens in recorded:
        call = *fixed, tokens, row["num_topk"]
        if row["mma_type"] == "nvfp4":
            actual[tokens] = get_block_m_for_nvfp4_mega_moe(*call)
        else:
            actual[tokens] = get_block_m_for_mega_moe(*call, row["mma_type"])
    assert actual == recorded


def test_alignment():
    assert get_token_alignment_for_mega_moe() == TABLES["token_alignment"] == 1920
    assert get_token_alignment_for_mega_moe("sgl") == get_token_alignment_for_mega_moe("upstream") == 384
    for build in BUILDS.values():
        assert all(build.alignment % block == 0 for block in build.candidate_block_m)
    with pytest.raises(ValueError, match="build must be one of"):
        get_token_alignment_for_mega_moe("other")


def test_thresholds_are_fp32():
    """One token an expert: x = tokens. The steps lie at exactly representable tokens, c between them."""
    at = {tokens: get_block_m_for_mega_moe(1, 1, 4096, tokens, 1, "fp8xfp4") for tokens in range(4097)}
    assert [at[tokens] for tokens in (0, 10, 11, 24, 25)] == [16, 16, 32, 32, 64]
    for tokens in range(25, 4097):
        c = float(np.float32(tokens) + np.sqrt(np.float32(tokens)))
        blocks = math.ceil(c / 240)
        blocks = 2 if blocks == 1 and c > 192 else blocks  # one expert on the rank: fewer than 14
        fitting = [block for block in (64, 128, 192, 240) if block * blocks >= c]
        assert at[tokens] == (fitting[0] if fitting else 240)


def test_thirds_round_in_fp32():
    """Counts that 3, 9 and 49 experts do not divide: the order of the operations decides at the steps."""
    for ranks, experts, topk in ((1, 3, 1), (3, 9, 2), (7, 49, 6)):
        for tokens in range(2000):
            x = np.float32(
                np.float32(np.float32(tokens) * np.float32(ranks)) * np.float32(topk)
            ) / np.float32(experts)
            block_m = get_block_m_for_mega_moe(ranks, experts, 1920 * 2, tokens, topk, "bf16xbf16")
            assert (block_m == 16) == bool(x <= np.float32(10))
            assert (block_m <= 32) == bool(x <= np.float32(24))


@pytest.mark.parametrize(
    ("tokens", "block_m"),
    [
        (8, 16),
        (9, 32),
        (16, 32),
        (17, 64),
        (32, 64),
        (33, 96),
        (64, 96),
        (65, 128),
        (96, 128),
        (97, 192),
        (4096, 192),
    ],
)
def test_upstream(tokens, block_m):
    assert get_block_m_for_mega_moe_upstream(1, 1, 4096, tokens, 1) == block_m


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((0, 8, 1920, 1, 2, "fp8xfp4"), "num_ranks must be positive"),
        ((2, 9, 1920, 1, 2, "fp8xfp4"), "num_experts must be a multiple"),
        ((1, 8, 1920, 1921, 2, "fp8xfp4"), "num_tokens must lie in"),
        ((1, 8, 1920, -1, 2, "fp8xfp4"), "num_tokens must lie in"),
        ((1, 8, 1920, 1, 2, "nvfp4"), "mma_type must be one of"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        get_block_m_for_mega_moe(*call)


def test_ring():
    """The worked example, growth with the SM count, the cap by the pool, refusals."""
    assert get_ring_tokens(1, 8, 1920, 2, 512, 256, 132) == 5760
    sizes = [get_ring_tokens(8, 256, 1920, 8, 7168, 2048, sms) for sms in (78, 132, 148, 160)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 1
    assert all(size % 1920 == 0 for size in sizes)
    # every candidate's blocks together are the most that can be alive
    tokens, experts = 1920 * 2, 8
    worst = max((-(-tokens // block) + experts) * block for block in BUILDS["vllm"].candidate_block_m)
    assert get_ring_tokens(1, 8, 1920, 2, 512, 256, 10**6) == -(-worst // 1920) * 1920
    with pytest.raises(ValueError, match="multiples of 256"):
        get_ring_tokens(1, 8, 1920, 2, 384, 256, 132)
    with pytest.raises(ValueError, match="num_sms must be at least 2"):
        get_ring_tokens(1, 8, 1920, 2, 512, 256, 1)
