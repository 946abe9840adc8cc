"""The emulated backend as a whole: shared experts in the launch, the gate, both sides of shared weights."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from megamoe.backends import (
    DeepGemmMegaMoEBackend,
    DeepGemmSm100MegaMoEBackend,
    EmulatedMegaMoEBackend,
    LocalGroup,
    features,
)
from megamoe.backends.emulated import ReferenceLibrary
from reference.formats import unpack_e2m1
from reference.gate import bf16_mega_gate
from reference.mega_moe import Activation, ExpertWeights, LaunchConfig, RankInputs, SharedExpert, forward
from reference.recipes import RECIPES
from reference.shared_experts import transform_shared_expert_weights
from reference.staging import stage_fp8, stage_nvfp4

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 4, 512, 256, 2, 40


def codes(*shape: int, seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def shared_layers(num_shared: int) -> SimpleNamespace:
    """Block-FP8 shared experts: e4m3 codes of magnitude up to 1.875, UE8M0 scales around 2^-5."""
    width = INTER * num_shared
    shapes = {"gate_up_proj": (2 * width, HIDDEN), "down_proj": (HIDDEN, width)}
    layers = {}
    for seed, (name, (rows, columns)) in enumerate(shapes.items()):
        sign = codes(rows, columns, seed=seed + 40, high=2) * 128
        weight = (codes(rows, columns, seed=seed + 50, high=0x3F) + sign).view(torch.float8_e4m3fn)
        scale = codes(rows // 128, columns // 128, seed=seed + 60, low=120, high=124)
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        layers[name] = SimpleNamespace(weight=parameter, weight_scale=scale, weight_block_size=(128, 128))
    return SimpleNamespace(**layers)


def shared_in_checkpoint_layout(num_shared: int) -> ExpertWeights:
    layers = shared_layers(num_shared)
    tensors = []
    for layer in (layers.gate_up_proj, layers.down_proj):
        expanded = layer.weight_scale.repeat_interleave(128, 0).repeat_interleave(4, 1)
        tensors.append((layer.weight.data.view(torch.uint8)[None], expanded[None]))
    (l1, l1_sf), (l2, l2_sf) = tensors
    return ExpertWeights(l1, l2, l1_sf, l2_sf)


def routed(group: int) -> dict[str, torch.Tensor]:
    low, high, dtype = (119, 124, torch.uint8) if group == 32 else (0x18, 0x30, torch.float8_e4m3fn)
    return {
        "w13_weight": codes(EXPERTS, 2 * INTER, HIDDEN // 2, seed=1),
        "w13_weight_scale": codes(EXPERTS, 2 * INTER, HIDDEN // group, seed=2, low=low, high=high).view(
            dtype
        ),
        "w2_weight": codes(EXPERTS, HIDDEN, INTER // 2, seed=3),
        "w2_weight_scale": codes(EXPERTS, HIDDEN, INTER // group, seed=4, low=low, high=high).view(dtype),
    }


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices
    return hidden, torch.rand(TOKENS, TOP_K, generator=generator) + 0.1, ids


@pytest.mark.parametrize("mma_type", ["fp8xfp4", "nvfp4"])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
def test_shared_experts_inside_the_launch(mma_type, num_shared):
    """Scale pages, shared weights and their launch: the bytes of the forward on checkpoint layout."""
    backend = EmulatedMegaMoEBackend(mma_type)
    assert backend.supports_shared_experts(backend.library)
    group_columns = 32 if mma_type == "fp8xfp4" else 16
    weights = routed(group_columns)
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTER}
    l1, l2 = backend.transform_weights(**weights, **sizes)
    buffer = backend.get_symm_buffer(
        LocalGroup(), num_experts=EXPERTS, num_max_tokens_per_rank=TOKENS, num_topk=TOP_K, hidden=HIDDEN,
        intermediate_hidden=INTER, num_shared_experts=num_shared,
    )  # fmt: skip
    options = {}
    if num_shared:
        pair = backend.transform_shared_expert_weights(
            shared_experts=shared_layers(num_shared), num_shared_experts=num_shared, hidden_size=HIDDEN,
            intermediate_size=INTER, prefix="shared",
        )  # fmt: skip
        options = dict(zip(("shared_l1_weights", "shared_l2_weights"), pair, strict=True))
    if mma_type == "nvfp4":
        options["use_x_scales"] = True
    hidden, topk_weights, ids = tokens()
    backend.prepare_inputs(buffer, hidden, topk_weights, ids)
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    backend.run_mega_moe(
        y=y,
        l1_weights=l1,
        l2_weights=l2,
        symm_buffer=buffer,
        activation_clamp=10.0,
        fast_math=False,
        **options,
    )

    routes = {"topk_idx": ids, "topk_weights": topk_weights}
    mxfp8 = stage_fp8(hidden, RECIPES["fp8_ue8m0_g32"])
    mxfp8_scales = mxfp8.x_sf.contiguous().view(torch.uint8)
    if mma_type == "fp8xfp4":
        inputs = RankInputs(mxfp8.x, mxfp8_scales, **routes)
        family = "sm100_fp8xfp4"
    else:
        staged = stage_nvfp4(hidden, RECIPES["nvfp4_token"])
        scales = staged.x_sf.contiguous().view(torch.uint8)
        own = {"shared_x": mxfp8.x, "shared_x_sf": mxfp8_scales} if num_shared else {}
        inputs = RankInputs(unpack_e2m1(staged.x), scales, **routes, x_scales=staged.x_scales, **own)
        family = "sm100_nvfp4"
    experts = ExpertWeights(
        unpack_e2m1(weights["w13_weight"]), unpack_e2m1(weights["w2_weight"]),
        weights["w13_weight_scale"].view(torch.uint8), weights["w2_weight_scale"].view(torch.uint8),
    )  # fmt: skip
    shared = [SharedExpert("sm100_fp8xfp8", shared_in_checkpoint_layout(num_shared))] if num_shared else None
    launch = LaunchConfig(tile=64, hidden=HIDDEN)
    activation = Activation(clamp=10.0, fast_math=False)
    (expected,) = forward(family, [inputs], [experts], [launch], activation, shared=shared)
    assert torch.equal(y.view(torch.int16), expected.y.view(torch.int16))


@pytest.mark.parametrize("num_shared", [1, 2])
def test_both_sides_transform_shared_experts_alike(num_shared):
    """The production path over the reference's layouts, and the reference's own path, written apart."""
    arguments = {"num_shared_experts": num_shared, "hidden_size": HIDDEN, "intermediate_size": INTER}
    ours, theirs = shared_layers(num_shared), shared_layers(num_shared)
    backend = EmulatedMegaMoEBackend("fp8xfp4")
    actual = backend.transform_shared_expert_weights(shared_experts=ours, **arguments, prefix="p")
    expected = transform_shared_expert_weights(shared_experts=theirs, **arguments, prefix="p")
    for pair, other in zip(actual, expected, strict=True):
        for one, two in zip(pair, other, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (two.dtype, two.shape, two.stride())
            assert torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    for layers, (l1, l2) in ((ours, actual), (theirs, expected)):
        assert l1[0].data_ptr() == layers.gate_up_proj.weight.data.data_ptr()
        assert l2[0].data_ptr() == layers.down_proj.weight.data.data_ptr()


def test_the_gate_is_the_references():
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "x": torch.randn(6, 256, generator=generator).to(torch.bfloat16),
        "weight": torch.randn(8, 256, generator=generator).to(torch.bfloat16),
        "num_topk": 3,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 2.5,
        "ep_rank": 0,
        "bias": torch.randn(8, generator=generator),
    }
    backend = EmulatedMegaMoEBackend("fp8xfp4")
    assert backend.supports_bf16_mega_gate()
    weights, ids = backend.bf16_mega_gate(**arguments)
    found = bf16_mega_gate(**arguments)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert {weights.data.shape, ids.shape} == {torch.Size([6, 3])}
    assert any(torch.equal(weights, tensor) for tensor in found)
    assert any(torch.equal(ids, tensor) for tensor in found)
    assert not EmulatedMegaMoEBackend("fp8xfp8").supports_bf16_mega_gate()


def test_the_reference_has_every_feature_that_a_build_can_have():
    missing = [name for name, there in features(ReferenceLibrary()).items() if not there]
    assert missing == []
    with pytest.raises(AttributeError, match="the reference has no fp16_mega_moe"):
        _ = ReferenceLibrary().fp16_mega_moe


def test_signatures_are_those_of_the_base():
    """Callers may pass any backend: the emulated and the real ones take the base's arguments."""
    for method in ("transform_weights", "transform_shared_expert_weights", "run_mega_moe", "prepare_inputs"):
        base = inspect.signature(getattr(DeepGemmMegaMoEBackend, method))
        for cls in (DeepGemmSm100MegaMoEBackend, type(EmulatedMegaMoEBackend("nvfp4"))):
            found = inspect.signature(getattr(cls, method))
            assert list(found.parameters) == list(base.parameters)


def test_several_shared_dtypes_of_the_two_level_buffer():
    backend = EmulatedMegaMoEBackend("nvfp4")
    sizes = {
        "num_experts": EXPERTS, "num_max_tokens_per_rank": 8, "num_topk": TOP_K, "hidden": HIDDEN,
        "intermediate_hidden": INTER, "num_shared_experts": 1,
    }  # fmt: skip
    fp8 = backend.get_symm_buffer(LocalGroup(), **sizes)
    bf16 = backend.get_symm_buffer(LocalGroup(), **sizes, shared_dtype=torch.bfloat16)
    assert fp8.shared_l1_acts.dtype == torch.float8_e4m3fn
    assert bf16.shared_l1_acts.dtype == torch.bfloat16
    hidden, topk_weights, ids = (tensor[:8] for tensor in tokens())
    backend.prepare_inputs(bf16, hidden, topk_weights, ids)
    assert torch.equal(bf16.shared_l1_acts[:8], hidden)
    with pytest.raises(ValueError, match="shared_dtype must be float8_e4m3fn or bfloat16"):
        backend.get_symm_buffer(LocalGroup(), **sizes, shared_dtype=torch.float16)
