"""Shared experts in block FP8: expansion of scales, the pair for the kernel, and the ways out."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reference.shared_experts import (
    expand_block_scale,
    prepare_shared_expert_scale,
    transform_shared_expert_weights,
)
from reference.weights import transform_weights_for_mega_moe


def codes(rows: int, columns: int) -> torch.Tensor:
    return ((torch.arange(rows * columns) * 7) % 254 + 1).to(torch.uint8).reshape(rows, columns)


def packed(rows_of_codes: torch.Tensor) -> torch.Tensor:
    """int32 words of a code row each, garbage in the bytes past the last code."""
    rows, blocks = rows_of_codes.shape
    padded = torch.full((rows, -(-blocks // 4) * 4), 0xEE, dtype=torch.uint8)
    padded[:, :blocks] = rows_of_codes
    return padded.view(torch.int32)


@pytest.mark.parametrize("form", ["uint8", "e8m0", "words", "words_mn_major"])
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (64, 64), (128, 256)])
@pytest.mark.parametrize(("mn", "k"), [(128, 128), (256, 640), (300, 256), (1, 384)])
def test_expansion(mn, k, block, form):
    """Element (r, c) has the scale of block (r // rows, c // columns)."""
    rows, columns = block
    blocks = codes(-(-mn // rows), -(-k // columns))
    by_row = blocks[torch.arange(mn) // rows]
    scale = {
        "uint8": blocks,
        "e8m0": blocks.view(torch.float8_e8m0fnu),
        "words": packed(by_row),
        "words_mn_major": packed(by_row).mT.contiguous().mT,
    }[form]
    expected_codes = by_row[:, torch.arange(0, k, 32) // columns]
    expected = torch.tensor([2.0 ** (int(code) - 127) for code in expected_codes.flatten()]).reshape(mn, -1)
    actual = expand_block_scale(scale, block, mn, k)
    assert torch.equal(actual, expected)
    words = prepare_shared_expert_scale(scale, block, mn, k)
    assert words.dtype == torch.int32
    assert words.stride() == (1, -(-mn // 4) * 4)
    shifts = np.arange(4) * 8
    unpacked = (words.numpy()[:, :, None] >> shifts & 255).reshape(mn, -1)
    assert np.array_equal(unpacked[:, : k // 32], expected_codes.numpy())
    assert not unpacked[:, k // 32 :].any()


def linear(rows: int, columns: int, **changes) -> SimpleNamespace:
    count = torch.arange(rows * columns, dtype=torch.int64).remainder(0x7E).to(torch.uint8)
    weight = count.reshape(rows, columns).view(torch.float8_e4m3fn)
    values = {
        "weight": torch.nn.Parameter(weight, requires_grad=False),
        "weight_scale": codes(-(-rows // 128), -(-columns // 128)),
        "weight_block_size": [128, 128],
    }
    return SimpleNamespace(**(values | changes))


SIZES = {"num_shared_experts": 2, "hidden_size": 256, "intermediate_size": 128, "prefix": "layers.3.mlp"}


def experts(gate_up: dict | None = None, down: dict | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        gate_up_proj=linear(512, 256, **(gate_up or {})), down_proj=linear(256, 256, **(down or {}))
    )


@pytest.mark.parametrize("attribute", ["weight_scale", "weight_scale_inv"])
def test_pair(attribute):
    shared = experts()
    for layer in (shared.gate_up_proj, shared.down_proj):
        scale = layer.weight_scale
        del layer.weight_scale
        setattr(layer, attribute, scale)
    before = shared.gate_up_proj.weight.data
    scales = [
        prepare_shared_expert_scale(getattr(layer, attribute), (128, 128), *layer.weight.shape)
        for layer in (shared.gate_up_proj, shared.down_proj)
    ]
    expected = transform_weights_for_mega_moe((before, scales[0]), (shared.down_proj.weight.data, scales[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        l1, l2 = transform_shared_expert_weights(shared_experts=shared, **SIZES)
    assert torch.equal(l1[0].view(torch.uint8), expected[0][0].view(torch.uint8))
    assert torch.equal(l1[1], expected[0][1])
    assert torch.equal(l2[1], expected[1][1])
    assert l1[0].data_ptr() == shared.gate_up_proj.weight.data.data_ptr() != before.data_ptr()
    assert l2[0].data_ptr() == shared.down_proj.weight.data.data_ptr()


@pytest.mark.parametrize(
    ("gate_up", "down", "reason"),
    [
        ({"weight": torch.zeros(512, 256)}, {}, "gate_up_proj.weight must be float8_e4m3fn"),
        (
            {},
            {"weight": torch.zeros(256, 128, dtype=torch.float8_e4m3fn)},
            r"down_proj.weight must be \(256, 256\)",
        ),
        ({"weight_scale": torch.ones(4, 2)}, {}, "gate_up_proj: scale must be UE8M0"),
        ({"weight_block_size": None}, {}, "gate_up_proj: weight_block_size must be"),
        ({}, {"weight_block_size": [128]}, "down_proj: weight_block_size must be"),
        ({"weight_block_size": [128, 48]}, {}, "columns that 32 divides"),
        ({}, {"weight_scale": codes(2, 3)}, r"down_proj: scale must be \(2, 2\)"),
        ({"weight_scale": packed(codes(511, 2))}, {}, r"gate_up_proj: scale must be \(512, 1\)"),
    ],
)
def test_ways_out(gate_up, down, reason):
    """None, exactly one warning that says why, and nothing changed."""
    shared = experts(gate_up, down)
    before = [shared.gate_up_proj.weight.data, shared.down_proj.weight.data]
    with pytest.warns(UserWarning, match=reason) as caught:
        assert transform_shared_expert_weights(shared_experts=shared, **SIZES) is None
    assert len(caught) == 1
    assert str(caught[0].message).startswith("layers.3.mlp: ")
    assert shared.gate_up_proj.weight.data.data_ptr() == before[0].data_ptr()
    assert shared.down_proj.weight.data.data_ptr() == before[1].data_ptr()


def test_rows_that_no_permutation_takes():
    shared = SimpleNamespace(
        gate_up_proj=linear(64, 256), down_proj=linear(256, 32, weight_block_size=[128, 32])
    )
    sizes = {"num_shared_experts": 1, "hidden_size": 256, "intermediate_size": 32}
    with pytest.warns(UserWarning, match="multiple of 128"):
        assert transform_shared_expert_weights(shared_experts=shared, **sizes) is None
