"""The production calls over a symmetric buffer: what they read, what they write, what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from mega_moe_inputs import Drawn, draw_launch
from torch import Tensor

from reference import mega_moe
from reference.formats import pack_e2m1, pack_scale_words
from reference.heuristics import get_block_m_for_mega_moe, get_block_m_for_nvfp4_mega_moe
from reference.mega_moe import (
    FAMILIES,
    Activation,
    ExpertWeights,
    LaunchConfig,
    PostNorm,
    RankResult,
    forward,
    sm90_launch_config,
)
from reference.mega_moe.stages import scale_rows
from reference.scale_pages import write_scale_pages
from reference.symm_buffer import SymmBuffer
from reference.weights import transform_weights_for_mega_moe, transform_weights_for_mega_moe_sm90

STATS = "cumulative_local_expert_recv_stats"
SHARED = ("shared_l1_weights", "shared_l2_weights")
TOKENS, EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 9, 4, 2, 512, 256
CALLS = {
    "sm90_fp8xfp8": ("fp8_mega_moe", "sm90"),
    "sm100_fp8xfp4": ("fp8_fp4_mega_moe", "fp8xfp4"),
    "sm100_fp8xfp8": ("fp8_fp4_mega_moe", "fp8xfp8"),
    "sm100_bf16": ("bf16_mega_moe", "bf16xbf16"),
    "sm100_fp4xfp4": ("fp4_fp4_mega_moe", "fp4xfp4"),
    "sm100_nvfp4": ("nvfp4_mega_moe", "nvfp4"),
}


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def draw(name: str, tokens: int = TOKENS, shared: str | None = None) -> Drawn:
    return draw_launch(
        name,
        (tokens,),
        experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        shared=shared,
        seed=21,
    )


def mn_major(words: Tensor) -> Tensor:
    return words.transpose(-1, -2).contiguous().transpose(-1, -2)


def kernel_layout(name: str, weights: ExpertWeights, two_dimensional: bool = False) -> tuple[Any, Any]:
    """Weights as a launch gets them."""
    family = FAMILIES[name]
    layers = []
    for codes, scales in ((weights.l1, weights.l1_sf), (weights.l2, weights.l2_sf)):
        values = codes
        if family.weight_format == "e2m1":
            values = pack_e2m1(codes).view(torch.int8)
        elif family.weight_format == "e4m3":
            values = codes.view(torch.float8_e4m3fn)
        words = scales if family.scale_format is None else mn_major(pack_scale_words(scales))
        if two_dimensional:
            values, words = values[0], None if words is None else words[0]
        layers.append(values if words is None else (values, words))
    if name == "sm90_fp8xfp8":
        return transform_weights_for_mega_moe_sm90(*layers)
    return transform_weights_for_mega_moe(*layers, mma_type=family.mma_type)


def make_buffer(name: str, drawn: Drawn, shared: str | None = None) -> SymmBuffer:
    """A buffer with the drawn tokens staged, and noise wherever a launch must not read."""
    family = FAMILIES[name]
    buffer = SymmBuffer(
        OneRank(),
        EXPERTS,
        64,
        TOPK,
        HIDDEN,
        INTERMEDIATE,
        num_shared_experts=0 if shared is None else 2,
        mma_type=CALLS[name][1],
        shared_bf16=shared == "sm100_bf16",
    )
    buffer.buffer.view(torch.uint8).fill_(0xA5)
    own = drawn.inputs[0]
    count = len(own.x)
    staged = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights, "x": own.x}
    if family.act_format == "e2m1":
        staged["x"] = pack_e2m1(own.x)
    if own.x_sf is not None:
        staged["x_sf"] = own.x_sf if family.scale_format is None else pack_scale_words(own.x_sf)
    if own.x_scales is not None:
        staged["x_scales"] = own.x_scales
    for field, value in staged.items():
        view = getattr(buffer, field)[:count]
        view.copy_(value.view(view.dtype) if field == "x" else value)
    if shared is not None and buffer.shared_l1_acts_sf is not None:
        sf = own.x_sf if own.shared_x is None else own.shared_x_sf
        write_scale_pages(pack_scale_words(sf), launch_config(name, count).tile, buffer.shared_l1_acts_sf)
    if shared is not None and name == "sm100_nvfp4":
        buffer.shared_l1_acts[:count].copy_(own.shared_x.view(buffer.shared_l1_acts.dtype))
    return buffer


def launch_config(name: str, count: int) -> LaunchConfig:
    if name == "sm90_fp8xfp8":
        return sm90_launch_config(
            num_ranks=1,
            num_experts=EXPERTS,
            num_topk=TOPK,
            num_tokens=count,
            hidden=HIDDEN,
            intermediate_hidden=INTERMEDIATE,
        )
    if name == "sm100_nvfp4":
        return LaunchConfig(get_block_m_for_nvfp4_mega_moe(1, EXPERTS, 1920, count, TOPK), HIDDEN)
    return LaunchConfig(get_block_m_for_mega_moe(1, EXPERTS, 1920, count, TOPK, CALLS[name][1]), HIDDEN)


def options(name: str, drawn: Drawn, shared: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    weights = drawn.weights[0]
    if name == "sm100_fp4xfp4":
        found = {
            "l1_alphas": weights.l1_alphas,
            "l2_alphas": weights.l2_alphas,
            "a2_scales": weights.a2_scales,
        }
    if name == "sm100_nvfp4":
        found = {
            "l1_alpha": weights.l1_alphas,
            "l2_alpha": weights.l2_alphas,
            "l2_activation_scale": 0.5,
            "use_x_scales": True,
        }
    if shared is not None:
        l1, l2 = kernel_layout(shared, drawn.shared[0].weights, two_dimensional=True)
        found |= {"shared_l1_weights": l1, "shared_l2_weights": l2}
        if name == "sm100_fp4xfp4":
            found["x_bf16"] = drawn.inputs[0].shared_x
    return found


def call(
    name: str, buffer: SymmBuffer, drawn: Drawn, y: Tensor, shared: str | None = None, **more: Any
) -> None:
    function = getattr(mega_moe, CALLS[name][0])
    function(y, *kernel_layout(name, drawn.weights[0]), buffer, **options(name, drawn, shared), **more)


def expected(name: str, drawn: Drawn, count: int, **more: Any) -> RankResult:
    (result,) = forward(
        name,
        drawn.inputs,
        drawn.weights,
        [launch_config(name, count)],
        more.pop("activation", Activation()),
        shared=drawn.shared,
        l2_activation_scale=0.5 if name == "sm100_nvfp4" else 1.0,
        **more,
    )
    return result


def same(a: Tensor, b: Tensor) -> bool:
    a, b = (each.contiguous().view(torch.uint8) for each in (a, b))
    return a.shape == b.shape and bool((a == b).all())


CASES = [(name, None) for name in CALLS] + [
    (name, shared) for name in CALLS for shared in FAMILIES[name].shared
]


@pytest.mark.parametrize(("name", "shared"), CASES)
def test_launch(name: str, shared: str | None) -> None:
    drawn = draw(name, shared=shared)
    buffer = make_buffer(name, drawn, shared)
    before = buffer.buffer.clone()
    y = torch.full((TOKENS, HIDDEN), 7.0, dtype=torch.bfloat16)
    stats = torch.full((EXPERTS,), 100, dtype=torch.int32)
    call(name, buffer, drawn, y, shared, cumulative_local_expert_recv_stats=stats)
    result = expected(name, drawn, TOKENS)
    assert same(y, result.y)
    assert torch.equal(stats, result.stats + 100)
    pool = result.pool
    live = pool.live.nonzero()[:, 0]
    places = {"l1_acts": live, "l2_acts": live}
    if buffer.l1_acts_sf is not None:
        places |= {"l1_acts_sf": scale_rows(FAMILIES[name], pool)[live]}
        places |= {"l2_acts_sf": places["l1_acts_sf"]}
    for stage, rows in places.items():
        view = getattr(buffer, stage)
        bits = view.view(torch.uint8) if view.element_size() == 1 else view
        assert same(bits[rows], result.stages[stage][rows].view(bits.dtype)), stage
    # Nothing but live rows and the shared expert's output was written.
    changed = (before != buffer.buffer).nonzero()[:, 0]
    fields = {field.name: field for field in buffer.fields}
    written = set(places) | {each for each in ("shared_l2_acts", "shared_l2_acts_sf") if shared is not None}
    spans = [
        (fields[each].offset, fields[each].offset + fields[each].num_bytes)
        for each in written
        if each in fields
    ]
    assert all(any(start <= byte < end for start, end in spans) for byte in changed[::97].tolist())


@pytest.mark.parametrize("name", [name for name in CALLS if FAMILIES[name].has_norm])
def test_post_expert_norm(name: str) -> None:
    drawn = draw(name)
    gamma = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.5
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    call(name, make_buffer(name, drawn), drawn, y, post_expert_norm_gamma=gamma, post_expert_norm_eps=1e-5)
    assert same(y, expected(name, drawn, TOKENS, norm=PostNorm(gamma, 1e-5)).y)


def test_clamp_and_exact_functions() -> None:
    drawn = draw("sm90_fp8xfp8")
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    call("sm90_fp8xfp8", make_buffer("sm90_fp8xfp8", drawn), drawn, y, activation_clamp=0.5, fast_math=False)
    assert same(
        y, expected("sm90_fp8xfp8", drawn, TOKENS, activation=Activation(clamp=0.5, fast_math=False)).y
    )
    assert not same(y, expected("sm90_fp8xfp8", drawn, TOKENS).y)


@pytest.mark.parametrize("name", ["sm90_fp8xfp8", "sm100_fp8xfp4"])
def test_no_tokens(name: str) -> None:
    drawn = draw(name, tokens=0)
    buffer = make_buffer(name, drawn)
    before = buffer.buffer.clone()
    stats = torch.zeros(EXPERTS, dtype=torch.int32)
    y = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
    call(name, buffer, drawn, y, cumulative_local_expert_recv_stats=stats)
    assert torch.equal(before, buffer.buffer)
    assert int(stats.sum()) == 0


def test_a_ring_shorter_than_the_pool_comes_round() -> None:
    """Where the pool wraps, a row holds the last token that was put there."""
    name = "sm100_fp8xfp4"
    drawn = draw(name, tokens=40)
    buffer = make_buffer(name, drawn)
    tile = launch_config(name, 40).tile
    buffer.l1_acts = buffer.l1_acts[: 2 * tile]
    buffer.l2_acts = buffer.l2_acts[: 2 * tile]
    y = torch.empty(40, HIDDEN, dtype=torch.bfloat16)
    call(name, buffer, drawn, y)
    result = expected(name, drawn, 40)
    assert result.pool.rows > 2 * tile
    for row in range(2 * tile):
        owners = [r for r in range(row, result.pool.rows, 2 * tile) if bool(result.pool.live[r])]
        if owners:
            assert same(buffer.l1_acts[row].view(torch.uint8), result.stages["l1_acts"][owners[-1]])


@pytest.mark.parametrize(
    ("argument", "name", "more"),
    [
        ("recipe", "sm90_fp8xfp8", {"recipe": (1, 1, 32)}),
        ("recipe", "sm100_fp8xfp4", {"recipe": (128, 128, 128)}),
        ("activation", "sm90_fp8xfp8", {"activation": "situ"}),
        ("activation_clamp", "sm90_fp8xfp8", {"activation_clamp": -1.0}),
        ("activation_alpha", "sm100_fp8xfp4", {"activation_alpha": float("nan")}),
        ("activation_clamp", "sm100_fp8xfp4", {"activation": "situ", "activation_clamp": 1.0}),
        (STATS, "sm90_fp8xfp8", {STATS: torch.zeros(3, dtype=torch.int32)}),
        ("l2_activation_scale", "sm100_nvfp4", {"l2_activation_scale": 0.0}),
        ("shared_l1_weights", "sm100_bf16", dict.fromkeys(SHARED, torch.zeros(4, 4))),
        ("shared_l2_weights", "sm100_bf16", {"shared_l1_weights": torch.zeros(4, 4)}),
        ("post_expert_norm_gamma", "sm100_bf16", {"post_expert_norm_gamma": torch.ones(HIDDEN + 1)}),
        ("x_bf16", "sm100_fp4xfp4", {"x_bf16": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)}),
    ],
)  # fmt: skip
def test_refusals_leave_everything_alone(argument: str, name: str, more: dict[str, Any]) -> None:
    drawn = draw(name)
    buffer = make_buffer(name, drawn)
    before, y = buffer.buffer.clone(), torch.full((TOKENS, HIDDEN), 7.0, dtype=torch.bfloat16)
    arguments = options(name, drawn, None) | more
    function = getattr(mega_moe, CALLS[name][0])
    with pytest.raises((ValueError, TypeError), match=f"^{argument}"):
        function(y, *kernel_layout(name, drawn.weights[0]), buffer, **arguments)
    assert torch.equal(buffer.buffer, before)
    assert bool((y == 7).all())


@pytest.mark.parametrize(
    ("name", "field", "shape"),
    [
        ("sm90_fp8xfp8", "l1_sf", (EXPERTS, 1, 1)),
        ("sm90_fp8xfp8", "l2_sf", None),
        ("sm100_fp8xfp4", "l1_sf", (EXPERTS, 1, HIDDEN // 32)),
        ("sm100_bf16", "l2_sf", (EXPERTS, HIDDEN, 1)),
        ("sm100_fp4xfp4", "l1_alphas", (EXPERTS, 3)),
        ("sm100_fp4xfp4", "a2_scales", (EXPERTS + 1,)),
        ("sm100_nvfp4", "l2_alphas", (1,)),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(name: str, field: str, shape: tuple[int, ...] | None) -> None:
    drawn = draw(name)
    wrong = dataclasses.replace(drawn.weights[0], **{field: None if shape is None else torch.ones(shape)})
    with pytest.raises(ValueError, match=f"^{field} of rank 0: expected"):
        forward(name, drawn.inputs, [wrong], [launch_config(name, TOKENS)], Activation())


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        (torch.zeros(TOKENS, HIDDEN), TypeError),
        (torch.zeros(TOKENS, HIDDEN + 1, dtype=torch.bfloat16), ValueError),
        (torch.zeros(5000, HIDDEN, dtype=torch.bfloat16), ValueError),
    ],
)
def test_outputs_that_do_not_fit_are_refused(y: Tensor, kind: type[Exception]) -> None:
    drawn = draw("sm90_fp8xfp8")
    with pytest.raises(kind, match=r"^y: expected"):
        call("sm90_fp8xfp8", make_buffer("sm90_fp8xfp8", drawn), drawn, y)


def test_strided_output() -> None:
    drawn = draw("sm90_fp8xfp8")
    wide = torch.full((TOKENS, HIDDEN + 8), 7.0, dtype=torch.bfloat16)
    call("sm90_fp8xfp8", make_buffer("sm90_fp8xfp8", drawn), drawn, wide[:, :HIDDEN])
    assert same(wide[:, :HIDDEN], expected("sm90_fp8xfp8", drawn, TOKENS).y)
    assert bool((wide[:, HIDDEN:] == 7).all())
