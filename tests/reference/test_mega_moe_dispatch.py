"""Pool order, counters, unequal and empty ranks, refusals, devices, and processes."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from mega_moe_inputs import Drawn, draw_launch

from reference.mega_moe import Activation, LaunchConfig, RankResult, SharedExpert, forward
from reference.mega_moe.dispatch import build_pool
from reference.mega_moe.distributed import forward_rank
from reference.mega_moe.match import match_rows, rows_by_source

FAST = Activation()


def launches(drawn: Drawn, tile: int = 64) -> list[LaunchConfig]:
    return [LaunchConfig(tile, drawn.weights[0].l1.shape[2]) for _ in drawn.inputs]


def round_robin(counts: list[int]) -> list[int]:
    """Ranks in the order in which they are served: one token each, those with tokens left, ascending."""
    left, order = list(counts), []
    while any(left):
        for rank, n in enumerate(left):
            if n:
                order.append(rank)
                left[rank] -= 1
    return order


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([8, 16, 64]),
    st.integers(0, 2**20),
)
def test_pool_is_expert_by_expert_and_round_robin(
    tokens: list[int], local: int, tile: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    ranks, topk = len(tokens), min(2, local * len(tokens))
    ids = [torch.rand(n, local * ranks, generator=g).topk(topk, dim=1).indices - (n % 2) for n in tokens]
    for rank in range(ranks):
        pool = build_pool(ids, rank, local * ranks, tile)
        row = 0
        for expert in range(local):
            assert pool.starts[expert] == row
            wanted = [(each == rank * local + expert).sum().item() for each in ids]
            assert pool.counts[expert] == sum(wanted)
            meta = pool.token_src_metadata[pool.expert_rows(expert)]
            assert meta[:, 0].tolist() == round_robin(wanted)
            for source in range(ranks):
                mine = meta[meta[:, 0] == source]
                assert mine[:, 1:].tolist() == (ids[source] == rank * local + expert).nonzero().tolist()
            row += -(-sum(wanted) // tile) * tile
        assert pool.rows == row
        assert int(pool.live.sum()) == sum(pool.counts)


def equal(a: RankResult, b: RankResult) -> bool:
    pairs = [(a.y, b.y), (a.stats, b.stats)] + [(a.stages[name], b.stages[name]) for name in a.stages]
    return a.stages.keys() == b.stages.keys() and all(
        x.shape == y.shape
        and bool((x.contiguous().view(torch.uint8) == y.contiguous().view(torch.uint8)).all())
        for x, y in pairs
    )


@pytest.mark.parametrize("name", ["sm90_fp8xfp8", "sm100_fp8xfp4", "sm100_nvfp4"])
def test_ranks_do_not_change_a_token(name: str) -> None:
    """The same tokens and experts on one rank or spread over three give the same rows of y."""
    drawn = draw_launch(name, (4, 0, 3), experts=6, topk=3, seed=5)
    spread = forward(name, drawn.inputs, drawn.weights, launches(drawn), FAST)

    def joined(parts):  # type: ignore[no-untyped-def]
        first = parts[0]
        fields = {
            field: torch.cat([getattr(part, field) for part in parts])
            for field in first.__dataclass_fields__
            if getattr(first, field) is not None
        }
        return replace(first, **fields)

    alone = Drawn([joined(drawn.inputs)], [joined(drawn.weights)], None)
    (together,) = forward(name, alone.inputs, alone.weights, launches(alone), FAST)
    rows = torch.cat([result.y for result in spread])
    assert torch.equal(rows.view(torch.int16), together.y.view(torch.int16))
    assert torch.equal(torch.cat([result.stats for result in spread]), together.stats)


def test_empty_launch_and_masked_tokens() -> None:
    drawn = draw_launch("sm90_fp8xfp8", (0, 2), masked=1.0)
    results = forward("sm90_fp8xfp8", drawn.inputs, drawn.weights, launches(drawn), FAST)
    assert [result.pool.rows for result in results] == [0, 0]
    assert [tuple(result.y.shape) for result in results] == [(0, 256), (2, 256)]
    assert int(results[1].y.view(torch.int16).abs().sum()) == 0
    assert all(int(result.stats.sum()) == 0 for result in results)


def test_ids_are_checked() -> None:
    drawn = draw_launch("sm90_fp8xfp8", (3,))
    bad = drawn.inputs[0].topk_idx.clone()
    bad[1, 1] = 4
    with pytest.raises(
        ValueError, match=r"topk_idx of rank 0: expected ids below 4, got 4 at token 1, slot 1"
    ):
        forward(
            "sm90_fp8xfp8", [replace(drawn.inputs[0], topk_idx=bad)], drawn.weights, launches(drawn), FAST
        )
    bad = drawn.inputs[0].topk_idx.clone()
    bad[2] = 3
    with pytest.raises(ValueError, match="expected distinct experts, got 3 twice at token 2"):
        forward(
            "sm90_fp8xfp8", [replace(drawn.inputs[0], topk_idx=bad)], drawn.weights, launches(drawn), FAST
        )


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x_sf", {"x_sf": None}),
        ("x_sf", {"x_sf": torch.ones(3, 3)}),
        ("topk_weights", {"topk_weights": torch.ones(3, 1)}),
        ("x", {"x": torch.zeros(3, 128, dtype=torch.uint8)}),
    ],
)
def test_shapes_are_checked(argument: str, change: dict[str, torch.Tensor | None]) -> None:
    drawn = draw_launch("sm90_fp8xfp8", (3,))
    with pytest.raises(ValueError, match=f"{argument} of rank 0: expected"):
        forward("sm90_fp8xfp8", [replace(drawn.inputs[0], **change)], drawn.weights, launches(drawn), FAST)


def test_unknown_combinations_are_refused() -> None:
    drawn = draw_launch("sm90_fp8xfp8", (3,))
    arguments = ("sm90_fp8xfp8", drawn.inputs, drawn.weights, launches(drawn))
    with pytest.raises(ValueError, match="activation: expected one of"):
        forward(*arguments, Activation("situ"))
    with pytest.raises(ValueError, match="shared: expected one of"):
        forward(*arguments, FAST, shared=[SharedExpert("sm100_bf16", drawn.weights[0])])
    with pytest.raises(ValueError, match="weights: expected one entry for each of 1 ranks"):
        forward("sm90_fp8xfp8", drawn.inputs, drawn.weights * 2, launches(drawn), FAST)
    with pytest.raises(ValueError, match="family: expected one of"):
        forward("sm80", *arguments[1:], FAST)


def test_garbage_in_unused_slots_is_not_read() -> None:
    """Weights of masked routes may be NaN, ids any negative number."""
    drawn = draw_launch("sm90_fp8xfp8", (6,), masked=0.5, seed=2)
    own = drawn.inputs[0]
    masked = own.topk_idx < 0
    assert bool(masked.any())
    odd = replace(
        own,
        topk_weights=torch.where(masked, float("nan"), own.topk_weights),
        topk_idx=torch.where(masked, -(2**31) - 7, own.topk_idx),
    )
    (clean,) = forward("sm90_fp8xfp8", [own], drawn.weights, launches(drawn), FAST)
    (dirty,) = forward("sm90_fp8xfp8", [odd], drawn.weights, launches(drawn), FAST)
    assert equal(clean, dirty)


@pytest.mark.parametrize("by_content", [True, False])
def test_rows_are_found_again(by_content: bool) -> None:
    drawn = draw_launch("sm90_fp8xfp8", (40,), topk=3, seed=9)
    (result,) = forward("sm90_fp8xfp8", drawn.inputs, drawn.weights, launches(drawn), FAST)
    pool = result.pool
    order = torch.arange(pool.rows)
    for start, count in zip(pool.starts, pool.counts, strict=True):
        order[start : start + count] = start + torch.randperm(
            count, generator=torch.Generator().manual_seed(start)
        )
    live = pool.live
    if by_content:
        found = match_rows(pool, [result.stages["l1_acts"]], [result.stages["l1_acts"][order]])[live]
    else:
        found = rows_by_source(pool, pool.token_src_metadata[order])
    assert torch.equal(order[found], torch.arange(pool.rows)[live])


def test_foreign_source_metadata_are_refused() -> None:
    drawn = draw_launch("sm90_fp8xfp8", (5,), masked=0.0)
    (result,) = forward("sm90_fp8xfp8", drawn.inputs, drawn.weights, launches(drawn), FAST)
    metadata = result.pool.token_src_metadata.clone()
    metadata[result.pool.live] += torch.tensor([0, 1, 0], dtype=torch.int32)
    with pytest.raises(ValueError, match="token_src_metadata"):
        rows_by_source(result.pool, metadata)


def rank_process(rank: int, port: int, name: str, tokens: tuple[int, ...], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(tokens))
    drawn = draw_launch(name, tokens, experts=6, topk=2, seed=13)
    result = forward_rank(
        name, drawn.inputs[rank], drawn.weights[rank], launches(drawn)[rank], FAST, dist.group.WORLD
    )
    torch.save({"y": result.y, "stats": result.stats, "stages": result.stages}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("tokens", [(3, 5), (4, 0, 2)])
def test_processes_give_the_bytes_of_one_process(tokens: tuple[int, ...], tmp_path) -> None:  # type: ignore[no-untyped-def]
    name = "sm90_fp8xfp8"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_process, (port, name, tokens, str(tmp_path)), nprocs=len(tokens))
    drawn = draw_launch(name, tokens, experts=6, topk=2, seed=13)
    results = forward(name, drawn.inputs, drawn.weights, launches(drawn), FAST)
    for rank, result in enumerate(results):
        there = torch.load(tmp_path / f"{rank}.pt")
        assert equal(result, replace(result, y=there["y"], stats=there["stats"], stages=there["stages"]))
