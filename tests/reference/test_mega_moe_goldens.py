"""Recorded launches of the real SM90 kernel, stage by stage, 0 bytes apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe.bundle import Case, read_bundle
from reference.mega_moe import (
    Activation,
    ExpertWeights,
    RankInputs,
    RankResult,
    forward,
    get_family,
    sm90_launch_config,
)
from reference.mega_moe.match import match_rows
from reference.mega_moe.stages import scale_rows

GOLDENS = Path(__file__).parents[1] / "goldens" / "sm90_mega_moe.safetensors"
CASES = {case.case: case for case in read_bundle(GOLDENS).cases if case.op == "fp8_mega_moe"}


def codes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def run(case: Case) -> RankResult:
    given = {name: codes(tensor) for name, tensor in case.inputs.items()}
    tokens, topk = given["topk_idx"].shape
    experts, hidden, intermediate = given["l2_w"].shape
    launch = sm90_launch_config(
        num_ranks=1,
        num_experts=experts,
        num_topk=topk,
        num_tokens=tokens,
        hidden=hidden,
        intermediate_hidden=intermediate,
    )
    assert launch.tile == case.params["tile"]
    return forward(
        "sm90_fp8xfp8",
        [RankInputs(given["x"], given["x_sf"], given["topk_idx"], given["topk_weights"])],
        [ExpertWeights(given["l1_w"], given["l2_w"], given["l1_w_sf"], given["l2_w_sf"])],
        [launch],
        Activation(clamp=case.params["activation_clamp"], fast_math=case.params["fast_math"]),
    )[0]


def live_stages(case: Case, result: RankResult) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(expected, recorded) rows of every stage, live rows only, each recorded row found by its content."""
    recorded = {name: codes(output.tensor) for name, output in case.outputs.items()}
    pool = result.pool
    scale = scale_rows(get_family("sm90_fp8xfp8"), pool)
    pooled = {
        name: (result.stages[name], recorded[name][: pool.rows])
        if not name.endswith("_sf")
        else (result.stages[name][scale], recorded[name][scale])
        for name in ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")
    }
    keys = ("l1_acts", "l1_acts_sf")
    order = match_rows(pool, [pooled[name][0] for name in keys], [pooled[name][1] for name in keys])
    live = pool.live
    assert bool((order[live] >= 0).all()), "a dispatched row is missing from the recorded pool"
    stages = {name: (mine[live], theirs[order[live]]) for name, (mine, theirs) in pooled.items()}
    return stages | {"y": (result.y, recorded["y"]), "stats": (result.stats, recorded["stats"])}


def differing(pair: tuple[torch.Tensor, torch.Tensor]) -> int:
    expected, actual = pair
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    return int((expected.contiguous().view(torch.uint8) != actual.contiguous().view(torch.uint8)).sum())


@pytest.mark.parametrize("name", sorted(CASES))
def test_stages(name: str) -> None:
    case = CASES[name]
    stages = live_stages(case, run(case))
    assert {stage: differing(pair) for stage, pair in stages.items()} == dict.fromkeys(stages, 0)


@pytest.mark.parametrize("name", sorted(CASES))
def test_float32_accumulation_would_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with exact sums rounded to float32 instead of the tensor core's, outputs
    differ."""
    from reference.formats import decode

    def exact(family, a, b, *, a_format, b_format, accumulator=None):  # type: ignore[no-untyped-def]
        product = decode(a, "e4m3fn").double() @ decode(b, "e4m3fn").double().transpose(-1, -2)
        return (product if accumulator is None else product + accumulator).float()

    monkeypatch.setattr("reference.mega_moe.linear.matmul", exact)
    case = CASES[name]
    assert differing(live_stages(case, run(case))["y"]) > 0
