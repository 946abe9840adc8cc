"""The launch's configuration: the host's model, the printed line and the generated source agree."""

from __future__ import annotations

import pytest

from reference.mega_moe import (
    LaunchConfig,
    launch_config,
    parse_generated_source,
    parse_printed_configs,
    sm90_launch_config,
)

SOURCE = """
#include <deep_gemm/impls/sm90_fp8_mega_moe.cuh>
using namespace deep_gemm;
static void __instantiate_kernel() {
    auto ptr = reinterpret_cast<void*>(&sm90_fp8_mega_moe_impl<
        384,
        7168, 2048,
        8, 8,
        8,
        128, 256, 128,
        5376,
        86016,
        3,
        64, 64, 512,
        132, 1,
        cute::numeric_limits<float>::infinity(),
        true,
        112,
        true,
        true,
        false,
        true,
        false
    >);
};
"""
KEY = (
    "num_ranks=1, num_experts=8, hidden=512, intermediate_hidden=256, num_max_tokens_per_rank=384, "
    "num_tokens=37, num_topk=2, swap_ab=1"
)
CHOICE = (
    "block_m=64, block_n=128, block_k=128, cluster_size=1, num_max_pool_tokens=2304, "
    "num_padded_sf_pool_tokens=36864, swizzle_acts_mode=128, swizzle_weights_mode=128, "
    "num_experts_per_wave=8, num_stages=6, smem_size=200000, num_dispatch_threads=64, "
    "num_non_epilogue_threads=64, num_epilogue_threads=256"
)
PRINTED = f"MegaMoESM90Config({KEY}): MegaMoESM90Config({CHOICE})\n"


def config(tokens: int, experts: int, topk: int, hidden: int = 512, intermediate: int = 256) -> LaunchConfig:
    return sm90_launch_config(
        num_ranks=1,
        num_experts=experts,
        num_topk=topk,
        num_tokens=tokens,
        hidden=hidden,
        intermediate_hidden=intermediate,
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "tile"),
    [
        (0, 8, 2, 64),
        (5, 4, 2, 64),
        (37, 8, 2, 64),
        (127, 4, 2, 64),
        (128, 4, 2, 128),
        (64, 4, 4, 128),
        (130, 4, 2, 128),
    ],
)
def test_tile_height(tokens: int, experts: int, topk: int, tile: int) -> None:
    assert config(tokens, experts, topk).tile == tile


def test_accumulation_follows_tile_and_hidden() -> None:
    assert config(8, 8, 8, hidden=7168).accumulation == "promote"
    assert config(64, 8, 8, hidden=7168).accumulation == "rescale_ratio"
    assert config(64, 8, 8, hidden=7040).accumulation == "rescale"


def test_ranks_count_in_the_threshold() -> None:
    def tile(ranks: int) -> int:
        return sm90_launch_config(
            num_ranks=ranks, num_experts=64, num_topk=4, num_tokens=512, hidden=512, intermediate_hidden=256
        ).tile

    assert (tile(1), tile(2)) == (64, 128)


def test_generated_source() -> None:
    fields = parse_generated_source(SOURCE)
    assert fields["activation_clamp"] == float("inf")
    assert fields["num_epilogue_threads"] == 512
    assert launch_config(fields) == config(300, 8, 8, 7168, 2048)


def test_clamp_of_a_generated_source() -> None:
    assert (
        parse_generated_source(SOURCE.replace("cute::numeric_limits<float>::infinity()", "10.000000f"))[
            "activation_clamp"
        ]
        == 10.0
    )


def test_printed_line() -> None:
    (fields,) = parse_printed_configs("noise\n" + PRINTED)
    assert fields["num_tokens"] == 37
    assert launch_config(fields) == config(37, 8, 2)


@pytest.mark.parametrize("text", ["", "sm90_other_impl<1, 2>", SOURCE.replace("132, 1,", "132,")])
def test_other_sources_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="source: expected"):
        parse_generated_source(text)


@pytest.mark.parametrize("name", ["num_ranks", "num_experts", "num_topk", "num_tokens"])
def test_impossible_counts_are_refused(name: str) -> None:
    counts = {"num_ranks": 1, "num_experts": 4, "num_topk": 2, "num_tokens": 8} | {name: -1}
    with pytest.raises(ValueError, match=name):
        sm90_launch_config(**counts, hidden=512, intermediate_hidden=256)
