"""Weights on their way into a launch: layouts element by element, aliasing, refusals, shared experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_deep_gemm import expected_transform, interleaved_row, make_module, utccp_row

from megamoe.backends import (
    DeepGemmBf16MegaMoEBackend,
    DeepGemmFp4MegaMoEBackend,
    DeepGemmNvfp4MegaMoEBackend,
    DeepGemmSm90MegaMoEBackend,
    DeepGemmSm100MegaMoEBackend,
)
from megamoe.backends.scales import (
    e4m3_scales_to_words,
    expand_block_scale,
    find_not_power_of_two,
    ue8m0_bytes_to_float,
)

EXPERTS, HIDDEN, INTER = 3, 512, 256


def codes(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def sm100_weights(
    dtype: torch.dtype = torch.uint8, scale_dtype: torch.dtype = torch.uint8
) -> dict[str, torch.Tensor]:
    return {
        "w13_weight": codes(EXPERTS, 2 * INTER, HIDDEN // 2, seed=1).view(dtype),
        "w13_weight_scale": codes(EXPERTS, 2 * INTER, HIDDEN // 32, seed=2, low=100, high=140).view(
            scale_dtype
        ),
        "w2_weight": codes(EXPERTS, HIDDEN, INTER // 2, seed=3).view(dtype),
        "w2_weight_scale": codes(EXPERTS, HIDDEN, INTER // 32, seed=4, low=100, high=140).view(scale_dtype),
    }


def nvfp4_weights() -> dict[str, torch.Tensor]:
    return {
        "w13_weight": codes(EXPERTS, 2 * INTER, HIDDEN // 2, seed=1),
        "w13_weight_scale": codes(EXPERTS, 2 * INTER, HIDDEN // 16, seed=2, high=127).view(
            torch.float8_e4m3fn
        ),
        "w2_weight": codes(EXPERTS, HIDDEN, INTER // 2, seed=3),
        "w2_weight_scale": codes(EXPERTS, HIDDEN, INTER // 16, seed=4, high=127).view(torch.float8_e4m3fn),
    }


def sm90_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "w13_weight": codes(EXPERTS, 2 * INTER, HIDDEN, seed=1, high=127).view(torch.float8_e4m3fn),
        "w13_weight_scale": torch.rand(EXPERTS, 2 * INTER // 128, HIDDEN // 128, generator=generator),
        "w2_weight": codes(EXPERTS, HIDDEN, INTER, seed=3, high=127).view(torch.float8_e4m3fn),
        "w2_weight_scale": torch.rand(EXPERTS, HIDDEN // 128, INTER // 128, generator=generator),
    }


SIZES = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTER}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_sm100_every_byte_lands_where_the_formula_says(fake, dtype, scale_dtype):
    weights = sm100_weights(dtype, scale_dtype)
    (l1, sf1), (l2, sf2) = DeepGemmSm100MegaMoEBackend().transform_weights(**weights, **SIZES)
    assert (l1.dtype, l2.dtype, sf1.dtype, sf2.dtype) == (torch.int8, torch.int8, torch.int32, torch.int32)
    assert l2.data_ptr() == weights["w2_weight"].data_ptr()
    assert l1.data_ptr() != weights["w13_weight"].data_ptr()
    rows = torch.tensor([interleaved_row(r, INTER) for r in range(2 * INTER)])
    assert same_bytes(l1[:, rows], weights["w13_weight"])
    assert sf1.stride() == (2 * INTER * HIDDEN // 128, 1, 2 * INTER)
    assert sf2.stride() == (HIDDEN * INTER // 128, 1, HIDDEN)
    scale_rows = torch.tensor([utccp_row(interleaved_row(r, INTER)) for r in range(2 * INTER)])
    assert same_bytes(sf1[:, scale_rows], weights["w13_weight_scale"])
    assert same_bytes(sf2[:, torch.tensor([utccp_row(r) for r in range(HIDDEN)])], weights["w2_weight_scale"])
    assert [call[1]["activation"] for call in fake.calls.named("transform_weights_for_mega_moe")] == [
        "swiglu"
    ]


def test_sm100_forwards_the_activation_only_when_given(fake):
    DeepGemmSm100MegaMoEBackend().transform_weights(**sm100_weights(), **SIZES, activation="situ")
    assert fake.calls.named("transform_weights_for_mega_moe")[0][1] == {"activation": "situ"}


@pytest.mark.parametrize("backend", [DeepGemmNvfp4MegaMoEBackend, DeepGemmFp4MegaMoEBackend])
def test_nvfp4_every_byte_lands_where_the_formula_says(fake, backend):
    weights = nvfp4_weights()
    (l1, sf1), (l2, sf2) = backend().transform_weights(**weights, **SIZES)
    assert l2.data_ptr() == weights["w2_weight"].data_ptr()
    assert sf1.stride() == (2 * INTER * HIDDEN // 64, 1, 2 * INTER)
    assert sf2.stride() == (HIDDEN * INTER // 64, 1, HIDDEN)
    rows = torch.tensor([interleaved_row(r, INTER) for r in range(2 * INTER)])
    assert same_bytes(l1[:, rows], weights["w13_weight"])
    scale_rows = torch.tensor([utccp_row(interleaved_row(r, INTER)) for r in range(2 * INTER)])
    assert same_bytes(sf1[:, scale_rows], weights["w13_weight_scale"])
    assert same_bytes(sf2[:, torch.tensor([utccp_row(r) for r in range(HIDDEN)])], weights["w2_weight_scale"])


def test_bf16_and_sm90(fake):
    generator = torch.Generator().manual_seed(6)
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=generator).to(torch.bfloat16)
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, generator=generator).to(torch.bfloat16)
    l1, l2 = DeepGemmBf16MegaMoEBackend().transform_weights(
        w13_weight=w13, w13_weight_scale=None, w2_weight=w2, w2_weight_scale=None, **SIZES
    )
    assert l2.data_ptr() == w2.data_ptr()
    assert same_bytes(l1, expected_transform(w13, w2)[0])
    with pytest.raises(TypeError, match="w2_weight_scale must be None"):
        DeepGemmBf16MegaMoEBackend().transform_weights(
            w13_weight=w13, w13_weight_scale=None, w2_weight=w2, w2_weight_scale=w2, **SIZES
        )

    weights = sm90_weights()
    (l1, sf1), (l2, sf2) = DeepGemmSm90MegaMoEBackend().transform_weights(**weights, **SIZES)
    assert (l2.data_ptr(), sf2.data_ptr()) == (
        weights["w2_weight"].data_ptr(),
        weights["w2_weight_scale"].data_ptr(),
    )
    assert sf1 is weights["w13_weight_scale"]
    rows = torch.tensor([interleaved_row(r, INTER) for r in range(2 * INTER)])
    assert same_bytes(l1.view(torch.uint8)[:, rows], weights["w13_weight"])
    with pytest.raises(ValueError, match="activation must be swiglu on SM90"):
        DeepGemmSm90MegaMoEBackend().transform_weights(**weights, **SIZES, activation="situ")


FAMILIES = {
    "sm100": (DeepGemmSm100MegaMoEBackend, sm100_weights),
    "nvfp4": (DeepGemmNvfp4MegaMoEBackend, nvfp4_weights),
    "sm90": (DeepGemmSm90MegaMoEBackend, sm90_weights),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("argument", ["w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"])
@pytest.mark.parametrize("fault", ["shape", "experts", "dtype", "missing"])
def test_a_weight_that_does_not_fit_is_named_and_nothing_is_called(fake, family, argument, fault):
    backend, make = FAMILIES[family]
    weights = make()
    good = weights[argument]
    weights[argument] = {
        "shape": good[:, :-1],
        "experts": good[:-1],
        "dtype": good.to(torch.float32).to(torch.float64),
        "missing": None,
    }[fault]
    with pytest.raises((ValueError, TypeError), match=f"^{argument} must"):
        backend().transform_weights(**weights, **SIZES)
    assert fake.calls.calls == []


# -- scales ----------------------------------------------------------------------------------------


def test_ue8m0_bytes_decode_as_the_kernels_do():
    values = ue8m0_bytes_to_float(torch.arange(256, dtype=torch.uint8))
    assert float(values[0]) == 0.0
    assert float(values[255]) == float("inf")
    assert torch.equal(
        values[1:255], torch.pow(2.0, torch.arange(1, 255, dtype=torch.float64) - 127).to(torch.float32)
    )
    assert torch.equal(
        values, ue8m0_bytes_to_float(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    )
    with pytest.raises(TypeError, match="UE8M0 bytes"):
        ue8m0_bytes_to_float(torch.ones(3))


@pytest.mark.parametrize("wrong", [1.5, -1.0, -0.0, float("inf"), float("nan"), 2.0**-130, 3.0])
def test_find_not_power_of_two(wrong):
    scale = torch.ones(4, 6)
    assert find_not_power_of_two(scale) is None
    scale[2, 5] = wrong
    assert find_not_power_of_two(scale) == (2, 5)
    # -0.0 and subnormals have bits that UE8M0 does not
    assert find_not_power_of_two(torch.tensor([0.0, 2.0**-126, 2.0**127])) is None


def test_e4m3_words_refuse_odd_shapes():
    with pytest.raises(ValueError, match="multiples of 4, got 6 and 8"):
        e4m3_scales_to_words(torch.zeros(1, 6, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"\[experts, rows, groups\]"):
        e4m3_scales_to_words(torch.zeros(8, 8, dtype=torch.uint8))


# -- shared experts --------------------------------------------------------------------------------


def linear(
    rows: int, columns: int, scale: torch.Tensor | None, block=(128, 128), name="weight_scale", seed=0
):
    weight = torch.nn.Parameter(
        codes(rows, columns, seed=seed, high=127).view(torch.float8_e4m3fn), requires_grad=False
    )
    layer = SimpleNamespace(weight=weight, weight_block_size=block)
    setattr(layer, name, scale)
    return layer


def packed_words(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales as int32 words of one row each: byte c of a row is k-block c."""
    expanded = torch.zeros(rows, -(-columns // 128 // 4) * 4, dtype=torch.uint8)
    expanded[:, : columns // 128] = scale.repeat_interleave(128, dim=0)[:rows]
    return expanded.view(torch.int32)


@pytest.fixture
def experts():
    def make(num_shared=1, kind="uint8", **options):
        width = INTER * num_shared
        shapes = {"gate_up_proj": (2 * width, HIDDEN), "down_proj": (HIDDEN, width)}
        layers = {}
        for seed, (name, (rows, columns)) in enumerate(shapes.items()):
            scale = codes(rows // 128, columns // 128, seed=seed + 10, low=90, high=150)
            given = {
                "uint8": lambda s, r, c: s,
                "e8m0": lambda s, r, c: s.view(torch.float8_e8m0fnu),
                "words": packed_words,
                "words_mn_major": lambda s, r, c: packed_words(s, r, c).t().contiguous().t(),
                "float32": lambda s, r, c: s.to(torch.float32),
                "none": lambda s, r, c: None,
            }[kind](scale, rows, columns)
            layers[name] = linear(rows, columns, given, seed=seed, **options)
            layers[name].logical_scale = scale
        return SimpleNamespace(**layers)

    return make


def fuse(backend, shared, num_shared=1, prefix="layers.3.mlp"):
    return backend.transform_shared_expert_weights(
        shared_experts=shared,
        num_shared_experts=num_shared,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        prefix=prefix,
    )


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("kind", ["uint8", "e8m0", "words", "words_mn_major"])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_shared_experts_are_expanded_interleaved_and_aliased(fake, experts, num_shared, kind, name):
    shared = experts(num_shared, kind, name=name)
    before = shared.gate_up_proj.weight.data.clone()
    down = shared.down_proj.weight.data
    (l1, sf1), (l2, sf2) = fuse(DeepGemmSm100MegaMoEBackend(), shared, num_shared)
    width = INTER * num_shared
    assert l1.data_ptr() == shared.gate_up_proj.weight.data.data_ptr()
    assert l2.data_ptr() == down.data_ptr()
    assert same_bytes(
        l1.view(torch.uint8)[torch.tensor([interleaved_row(r, width) for r in range(2 * width)])], before
    )
    for sf, layer, rows, columns, place in (
        (sf1, shared.gate_up_proj, 2 * width, HIDDEN, lambda r: utccp_row(interleaved_row(r, width))),
        (sf2, shared.down_proj, HIDDEN, width, utccp_row),
    ):
        assert (sf.dtype, tuple(sf.shape), sf.stride()) == (torch.int32, (rows, columns // 128), (1, rows))
        expected = layer.logical_scale.repeat_interleave(128, 0).repeat_interleave(4, 1)
        assert same_bytes(sf[torch.tensor([place(r) for r in range(rows)])], expected)


def change(shared, attribute, **values):
    for name, value in values.items():
        setattr(getattr(shared, attribute), name, value)


FAULTS = {
    "no_scale": (
        lambda s: change(s, "down_proj", weight_scale=None),
        "down_proj has neither weight_scale nor",
    ),
    "float32_scale": (
        lambda s: [
            change(s, n, weight_scale=getattr(s, n).weight_scale.float())
            for n in ("gate_up_proj", "down_proj")
        ],
        "scales of gate_up_proj should be UE8M0",
    ),
    "no_block_size": (
        lambda s: change(s, "gate_up_proj", weight_block_size=None),
        "weight_block_size must be two",
    ),
    "one_block_size": (
        lambda s: change(s, "gate_up_proj", weight_block_size=[128]),
        "weight_block_size must be two",
    ),
    "odd_block": (
        lambda s: change(s, "down_proj", weight_block_size=(128, 48)),
        "does not consist of 1x32 groups",
    ),
    "scale_shape": (
        lambda s: change(s, "gate_up_proj", weight_scale=s.gate_up_proj.weight_scale[:-1]),
        r"gate_up_proj: the scale should have shape \(4, 4\), got \(3, 4\)",
    ),
    "words_shape": (
        lambda s: change(s, "gate_up_proj", weight_scale=torch.zeros(512, 2, dtype=torch.int32)),
        r"the scale should have shape \(512, 1\), got \(512, 2\)",
    ),
    "weight_dtype": (
        lambda s: change(s, "gate_up_proj", weight=s.gate_up_proj.weight.data.to(torch.bfloat16)),
        "gate_up_proj.weight should be float8_e4m3fn, got torch.bfloat16",
    ),
    "gate_up_shape": (
        lambda s: change(s, "gate_up_proj", weight=s.gate_up_proj.weight.data[:-2]),
        r"gate_up_proj.weight should have shape \(512, 512\)",
    ),
    "down_shape": (
        lambda s: change(s, "down_proj", weight=s.down_proj.weight.data[:, :-2]),
        r"down_proj.weight should have shape \(512, 256\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_fused_is_none_with_one_warning(fake, experts, fault):
    shared = experts()
    damage, message = FAULTS[fault]
    damage(shared)
    before = shared.gate_up_proj.weight.data
    backend = DeepGemmSm100MegaMoEBackend()
    with pytest.warns(
        RuntimeWarning, match=rf"layers\.3\.mlp: shared experts are not fused.*{message}"
    ) as warned:
        results = [fuse(backend, shared) for _ in range(2)]
    assert results == [None, None]
    assert len(warned) == 1
    assert shared.gate_up_proj.weight.data is before or same_bytes(shared.gate_up_proj.weight.data, before)
    assert fake.calls.named("transform_weights_for_mega_moe") == []
    with pytest.warns(RuntimeWarning, match="layers.4"):
        assert fuse(backend, shared, prefix="layers.4.mlp") is None


def test_families_without_fused_shared_experts(fake, experts):
    for backend in (DeepGemmSm90MegaMoEBackend, DeepGemmBf16MegaMoEBackend, DeepGemmFp4MegaMoEBackend):
        assert not backend().supports_shared_experts(fake)
        assert fuse(backend(make_module()), experts()) is None


def test_two_level_nvfp4_runs_mxfp8_shared_experts(fake, experts):
    backend = DeepGemmNvfp4MegaMoEBackend()
    assert backend.supports_shared_experts(fake)
    assert not backend.supports_shared_experts(make_module(without=("get_block_m_for_nvfp4_mega_moe",)))
    actual, expected = fuse(backend, experts()), fuse(DeepGemmSm100MegaMoEBackend(), experts())
    for one, other in zip(actual, expected, strict=True):
        assert all(same_bytes(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(130, 320, (128, 64)), (96, 96, (32, 32)), (5, 256, (1, 128))]
)
def test_expansion_of_ragged_blocks(rows, columns, block):
    scale = codes(-(-rows // block[0]), -(-columns // block[1]), low=100, high=140)
    values, why = expand_block_scale(scale, block, rows, columns)
    assert why == ""
    assert values.shape == (rows, columns // 32)
    for r in range(rows):
        for g in range(columns // 32):
            assert float(values[r, g]) == 2.0 ** (int(scale[r // block[0], g * 32 // block[1]]) - 127)
