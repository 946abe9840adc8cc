"""DeepGEMM's own staging, as references: fills, specials that differ from vLLM's, E2M1 activations,
refusals."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import reference
from reference.formats import unpack_e2m1, unpack_scale_words
from reference.fp8 import quantize_fp8_groups
from reference.recipes import RECIPES

E4M3 = torch.float8_e4m3fn


def make_call(
    generator: torch.Generator, *, sm90: bool = False, rows: int = 12, columns: int = 512, fp4: bool = False
) -> dict[str, Any]:
    """Seven tokens of nine rows into a buffer of ``rows``."""
    words = columns // 128
    return {
        "x": (torch.randn(9, columns, generator=generator) * 4).bfloat16(),
        "topk_idx": torch.randint(-1, 32, (9, 3), generator=generator, dtype=torch.int32),
        "topk_weights": torch.rand(9, 3, generator=generator),
        "buf_x": torch.full((rows, columns // 2), 0x5A, dtype=torch.int8)
        if fp4
        else torch.full((rows, columns), 0x5A, dtype=torch.uint8).view(E4M3),
        "buf_x_sf": torch.full(
            (rows, words), 77.0 if sm90 else 0x5A5A5A5A, dtype=torch.float32 if sm90 else torch.int32
        ),
        "buf_topk_idx": torch.full((rows, 3), 77, dtype=torch.int64),
        "buf_topk_weights": torch.full((rows, 3), 7.0),
        "num_tokens": 7,
    }


OPS = {"sm100": reference.mega_moe_pre_dispatch, "sm90": reference.mega_moe_pre_dispatch_sm90}


@pytest.mark.parametrize("op", OPS)
def test_rows_past_the_tokens(op: str, generator: torch.Generator) -> None:
    """x and its scales keep what they held, the top-k slots become (-1, 0.0); a live -1 keeps its weight."""
    call = make_call(generator, sm90=op == "sm90")
    call["topk_idx"][2, 1] = -1
    before = {name: call[name][7:].clone() for name in ("buf_x", "buf_x_sf")}
    assert OPS[op](**call) is None
    assert torch.equal(call["buf_x"][7:].view(torch.uint8), before["buf_x"].view(torch.uint8))
    assert torch.equal(call["buf_x_sf"][7:], before["buf_x_sf"])
    assert torch.equal(call["buf_topk_idx"][:7], call["topk_idx"][:7].long())
    assert torch.equal(call["buf_topk_weights"][:7], call["topk_weights"][:7])
    assert set(call["buf_topk_idx"][7:].flatten().tolist()) == {-1}
    assert not bool(call["buf_topk_weights"][7:].view(torch.int32).any())


@pytest.mark.parametrize("num_tokens", [0, 9])
@pytest.mark.parametrize("op", OPS)
def test_no_tokens_and_no_room_left(op: str, num_tokens: int, generator: torch.Generator) -> None:
    call = make_call(generator, sm90=op == "sm90", rows=9) | {"num_tokens": num_tokens}
    OPS[op](**call)
    assert int((call["buf_topk_idx"] == call["topk_idx"]).all(dim=1).sum()) >= num_tokens
    assert (set(call["buf_topk_idx"].flatten().tolist()) == {-1}) == (num_tokens == 0)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_sm100_groups(group: int, fp4: bool, generator: torch.Generator) -> None:
    """Scale bytes lie group after group, four to a word, for every group size."""
    call = make_call(generator, fp4=fp4)
    call["buf_x_sf"] = torch.zeros(12, 512 // (4 * group), dtype=torch.int32)
    reference.mega_moe_pre_dispatch(**call, group_size=group, use_fp4_acts=fp4)
    values = call["x"][:7].float().numpy().reshape(7, -1, group)
    raw = np.maximum(np.abs(values).max(axis=-1), np.float32(1e-4)) / np.float32(6 if fp4 else 448)
    mantissa, exponent = np.frexp(raw)
    np.testing.assert_array_equal(
        unpack_scale_words(call["buf_x_sf"][:7]).numpy(), exponent - (mantissa == 0.5) + 127
    )
    if not fp4:
        groups = quantize_fp8_groups(call["x"][:7], RECIPES[f"fp8_ue8m0_g{group}"])
        assert torch.equal(call["buf_x"][:7].view(torch.uint8), groups.codes)
        return
    scaled = (values / np.ldexp(np.float32(1), exponent - (mantissa == 0.5))[..., None]).reshape(7, -1)
    magnitude = sum((np.abs(scaled) > m).astype(np.uint8) for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    codes = magnitude | np.where((scaled < 0) & (magnitude > 0), np.uint8(8), np.uint8(0))
    np.testing.assert_array_equal(unpack_e2m1(call["buf_x"][:7].view(torch.uint8)).numpy(), codes)


def test_fp4_ties_go_toward_zero(generator: torch.Generator) -> None:
    call = make_call(generator, fp4=True)
    call["x"].zero_()
    call["x"][0, :8] = torch.tensor([6.0, 0.75, 1.75, 3.5, -0.75, -5.0, -0.25, float("nan")])
    reference.mega_moe_pre_dispatch(**call, use_fp4_acts=True)
    assert unpack_e2m1(call["buf_x"].view(torch.uint8))[0, :8].tolist() == [7, 1, 3, 5, 9, 14, 0, 0]


def test_inf_is_nan_in_a_group_with_reciprocal_zero(generator: torch.Generator) -> None:
    """Scale byte 254 as in vLLM's staging, but the payload 0x7F for Inf and zeros for the rest."""
    call = make_call(generator)
    call["x"][3, 40], call["x"][3, 41] = float("inf"), -float("inf")
    reference.mega_moe_pre_dispatch(**call)
    payload = call["buf_x"].view(torch.uint8)[3, 32:64]
    assert payload[8:10].tolist() == [0x7F, 0x7F]
    assert set((payload & 0x7F).tolist()) == {0, 0x7F}
    assert unpack_scale_words(call["buf_x_sf"])[3, 1].item() == 254


def test_sm90_scales_and_weights(generator: torch.Generator) -> None:
    call = make_call(generator, sm90=True)
    call["x"][1] = 0.0
    reference.mega_moe_pre_dispatch_sm90(**call, routed_scaling_factor=2.7)
    values = call["x"][:7].float().numpy().reshape(7, 4, 128)
    scales = np.maximum(np.abs(values).max(axis=-1), np.float32(1e-10)) / np.float32(448)
    np.testing.assert_array_equal(call["buf_x_sf"][:7].numpy(), scales)
    weights = call["topk_weights"].numpy()[:7] * np.float32(2.7)
    np.testing.assert_array_equal(call["buf_topk_weights"][:7].numpy(), weights)


@pytest.mark.parametrize(
    ("op", "name", "change", "error"),
    [
        ("sm100", "group_size", {"group_size": 16}, ValueError),
        ("sm90", "group_size", {"group_size": 64}, ValueError),
        ("sm100", "x", {"x": torch.zeros(9, 512)}, TypeError),
        ("sm100", "x", {"x": torch.zeros(9, 576).bfloat16()}, ValueError),
        ("sm100", "x", {"x": torch.zeros(9, 384).bfloat16(), "group_size": 128}, ValueError),
        ("sm90", "x", {"x": torch.zeros(9, 192).bfloat16()}, ValueError),
        ("sm100", "topk_idx", {"topk_idx": torch.zeros(9, 3).long()}, TypeError),
        ("sm100", "topk_idx", {"topk_idx": torch.zeros(8, 3).int()}, ValueError),
        ("sm90", "topk_weights", {"topk_weights": torch.zeros(9, 2)}, ValueError),
        ("sm90", "topk_weights", {"topk_weights": torch.zeros(9, 3).half()}, TypeError),
        ("sm100", "num_tokens", {"num_tokens": 10}, ValueError),
        ("sm90", "num_tokens", {"num_tokens": -1}, ValueError),
        ("sm100", "num_tokens", {"num_tokens": 7.0}, TypeError),
        ("sm100", "buf_x", {"buf_x": torch.zeros(6, 512).to(E4M3)}, ValueError),
        ("sm100", "buf_x", {"buf_x": torch.zeros(12, 256).to(E4M3)}, ValueError),
        ("sm90", "buf_x", {"buf_x": torch.zeros(12, 512)}, TypeError),
        ("sm100", "buf_x", {"use_fp4_acts": True}, TypeError),
        ("sm100", "buf_x_sf", {"buf_x_sf": torch.zeros(12, 4)}, TypeError),
        ("sm90", "buf_x_sf", {"buf_x_sf": torch.zeros(12, 4).int()}, TypeError),
        ("sm100", "buf_x_sf", {"buf_x_sf": torch.zeros(12, 3).int()}, ValueError),
        ("sm90", "buf_x_sf", {"buf_x_sf": torch.zeros(11, 4)}, ValueError),
        ("sm100", "buf_topk_idx", {"buf_topk_idx": torch.zeros(12, 3).int()}, TypeError),
        ("sm90", "buf_topk_idx", {"buf_topk_idx": torch.zeros(11, 3).long()}, ValueError),
        ("sm100", "buf_topk_weights", {"buf_topk_weights": torch.zeros(12, 4)}, ValueError),
    ],
)
def test_refusals_name_the_argument_and_write_nothing(
    op: str, name: str, change: dict[str, Any], error: type[Exception], generator: torch.Generator
) -> None:
    call = make_call(generator, sm90=op == "sm90") | change
    buffers = [call[key] for key in ("buf_x", "buf_x_sf", "buf_topk_idx", "buf_topk_weights")]
    before = [buffer.view(torch.uint8).clone() for buffer in buffers]
    with pytest.raises(error, match=f"^{name}: expected .*got"):
        OPS[op](**call)
    assert all(torch.equal(b, buffer.view(torch.uint8)) for b, buffer in zip(before, buffers, strict=True))


def test_signatures() -> None:
    common = [
        "x",
        "topk_idx",
        "topk_weights",
        "buf_x",
        "buf_x_sf",
        "buf_topk_idx",
        "buf_topk_weights",
        "num_tokens",
        "group_size",
    ]
    sm100 = inspect.signature(reference.mega_moe_pre_dispatch).parameters
    sm90 = inspect.signature(reference.mega_moe_pre_dispatch_sm90).parameters
    assert list(sm100) == [*common, "use_fp4_acts"]
    assert list(sm90) == [*common, "routed_scaling_factor"]
    assert (sm100["group_size"].default, sm90["group_size"].default) == (32, 128)
