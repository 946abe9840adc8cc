"""What reaches a launch: forwarding rules of NUMERICS 11.1, options of each family, refusals before the
call.
"""

from __future__ import annotations

import pytest
import torch
from fake_deep_gemm import make_module

from megamoe.backends import (
    DeepGemmBf16MegaMoEBackend,
    DeepGemmFp4MegaMoEBackend,
    DeepGemmMegaMoEBackend,
    DeepGemmNvfp4MegaMoEBackend,
    DeepGemmSm90MegaMoEBackend,
    DeepGemmSm100MegaMoEBackend,
)
from megamoe.backends.library import FEATURES, features
from megamoe.quant_keys import kFp8Dynamic128, kMxfp8Dynamic, kNvfp4DynamicToken

BACKENDS = {
    "fp8_fp4_mega_moe": DeepGemmSm100MegaMoEBackend,
    "nvfp4_mega_moe": DeepGemmNvfp4MegaMoEBackend,
    "fp4_fp4_mega_moe": DeepGemmFp4MegaMoEBackend,
    "bf16_mega_moe": DeepGemmBf16MegaMoEBackend,
    "fp8_mega_moe": DeepGemmSm90MegaMoEBackend,
}
Y, L1, L2, BUFFER = torch.empty(2, 4), object(), object(), object()


def run(backend, **options):
    options.setdefault("activation_clamp", None)
    options.setdefault("fast_math", True)
    backend.run_mega_moe(y=Y, l1_weights=L1, l2_weights=L2, symm_buffer=BUFFER, **options)


@pytest.mark.parametrize("launch", BACKENDS)
@pytest.mark.parametrize("clamp", [None, 0.0, 7.5])
@pytest.mark.parametrize("fast_math", [True, False])
def test_tensors_by_position_and_only_clamp_and_fast_math_by_name(fake, launch, clamp, fast_math):
    run(BACKENDS[launch](), activation_clamp=clamp, fast_math=fast_math)
    ((name, arguments, options),) = fake.calls.calls
    assert name == launch
    assert all(a is b for a, b in zip(arguments, (Y, L1, L2, BUFFER), strict=True))
    assert options == {"activation_clamp": clamp, "fast_math": fast_math}


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "situ"},
        {"activation_alpha": 1.702},
        {"activation_beta": 0.0},
        {"activation": "swiglu", "activation_alpha": 4.0, "activation_beta": 25.0},
    ],
    ids="+".join,
)
def test_activation_options_are_forwarded_when_given(fake, options):
    run(DeepGemmSm100MegaMoEBackend(), **options)
    ((_, forwarded),) = fake.calls.named("fp8_fp4_mega_moe")
    assert forwarded == {"activation_clamp": None, "fast_math": True, **options}


@pytest.mark.parametrize("launch", ["fp8_fp4_mega_moe", "nvfp4_mega_moe", "fp4_fp4_mega_moe"])
def test_shared_weights_only_together(fake, launch):
    backend = BACKENDS[launch]()
    shared = {"shared_l1_weights": object(), "shared_l2_weights": object()}
    run(backend, **shared)
    assert fake.calls.named(launch)[0][1] == {"activation_clamp": None, "fast_math": True, **shared}
    with pytest.warns(RuntimeWarning, match="only one of shared_l1_weights and shared_l2_weights") as warned:
        [run(backend, **{name: weights}) for name, weights in shared.items()]
    assert len(warned) == 1
    assert [call[1] for call in fake.calls.named(launch)[1:]] == [
        {"activation_clamp": None, "fast_math": True}
    ] * 2


@pytest.mark.parametrize("name", ["activation_alpha", "activation_beta"])
def test_a_build_without_the_parameter_is_refused_before_the_launch(name):
    old = make_module(old=True)
    with pytest.raises(
        ValueError, match=rf"{name}: this build's deep_gemm.fp8_fp4_mega_moe has no such parameter"
    ):
        run(DeepGemmSm100MegaMoEBackend(old), **{name: 2.0})
    assert old.calls.calls == []
    run(DeepGemmSm100MegaMoEBackend(old))
    assert len(old.calls.calls) == 1


def test_shared_weights_are_refused_where_the_launch_has_none(fake):
    with pytest.raises(
        ValueError, match=r"shared_l1_weights, shared_l2_weights: this build's deep_gemm.fp8_mega_moe"
    ):
        run(DeepGemmSm90MegaMoEBackend(), shared_l1_weights=object(), shared_l2_weights=object())
    assert fake.calls.calls == []


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        ("nvfp4_mega_moe", {"l1_alpha": Y, "l2_alpha": Y, "l2_activation_scale": 0.5, "use_x_scales": True}),
        (
            "fp4_fp4_mega_moe",
            {
                "l1_alphas": Y,
                "l2_alphas": Y,
                "a2_scales": Y,
                "post_expert_norm_gamma": Y,
                "post_expert_norm_eps": 1e-5,
            },
        ),
        ("bf16_mega_moe", {"post_expert_norm_gamma": Y, "post_expert_norm_eps": 1e-5}),
    ],
)
def test_options_of_a_family(fake, launch, options):
    run(BACKENDS[launch](), **options)
    ((_, forwarded),) = fake.calls.named(launch)
    assert forwarded.keys() == {"activation_clamp", "fast_math", *options}
    assert all(forwarded[name] is value for name, value in options.items())
    with pytest.raises(TypeError, match="l1_alphabet: not an option of the"):
        run(BACKENDS[launch](), l1_alphabet=1)
    assert len(fake.calls.calls) == 1


def test_the_base_runs_nothing(fake):
    base = DeepGemmMegaMoEBackend()
    with pytest.raises(NotImplementedError):
        run(base)
    with pytest.raises(NotImplementedError):
        base.transform_weights(
            w13_weight=Y,
            w13_weight_scale=Y,
            w2_weight=Y,
            w2_weight_scale=Y,
            num_local_experts=1,
            hidden_size=128,
            intermediate_size=128,
        )
    with pytest.raises(NotImplementedError):
        base.bf16_mega_gate(x=Y, weight=Y, num_topk=1, scoring_func="x", routed_scaling_factor=1.0, ep_rank=0)
    assert not base.supports_shared_experts(fake)
    assert not base.supports_bf16_mega_gate()
    arguments = {"num_shared_experts": 1, "hidden_size": 128, "intermediate_size": 128, "prefix": "p"}
    assert base.transform_shared_expert_weights(shared_experts=object(), **arguments) is None
    assert fake.calls.calls == []


def test_attributes():
    expected = {
        DeepGemmMegaMoEBackend: ("fp8xfp4", kMxfp8Dynamic),
        DeepGemmSm100MegaMoEBackend: ("fp8xfp4", kMxfp8Dynamic),
        DeepGemmNvfp4MegaMoEBackend: ("nvfp4", kNvfp4DynamicToken),
        DeepGemmFp4MegaMoEBackend: ("fp4xfp4", None),
        DeepGemmBf16MegaMoEBackend: ("bf16xbf16", None),
        DeepGemmSm90MegaMoEBackend: ("fp8xfp8", kFp8Dynamic128),
    }
    assert {cls: (cls().mma_type, cls().hidden_quant) for cls in expected} == expected


# -- symmetric buffers -----------------------------------------------------------------------------

SIZES = {
    "num_experts": 8,
    "num_max_tokens_per_rank": 64,
    "num_topk": 2,
    "hidden": 512,
    "intermediate_hidden": 256,
}
GROUP = object()


def test_symmetric_buffers_of_each_family(fake):
    shared = DeepGemmSm100MegaMoEBackend().get_symm_buffer(GROUP, **SIZES, num_shared_experts=2)
    assert (shared.kind, shared.num_shared_experts, shared.options["mma_type"]) == ("main", 2, "fp8xfp4")
    owner = DeepGemmBf16MegaMoEBackend().get_symm_buffer(GROUP, **SIZES)
    view = DeepGemmFp4MegaMoEBackend().get_symm_buffer(GROUP, **SIZES, base=owner)
    assert (view.kind, view.options["mma_type"]) == ("main", "fp4xfp4")
    assert view.options["base"] is owner
    two_level = DeepGemmNvfp4MegaMoEBackend().get_symm_buffer(GROUP, **SIZES, shared_dtype=torch.bfloat16)
    assert (two_level.kind, two_level.options["shared_dtype"]) == ("nvfp4", torch.bfloat16)
    assert DeepGemmSm90MegaMoEBackend().get_symm_buffer(GROUP, **SIZES).kind == "sm90"


def test_buffers_that_a_build_cannot_have_are_refused(fake):
    old = make_module(old=True)
    with pytest.raises(ValueError, match="num_shared_experts: this build's"):
        DeepGemmSm100MegaMoEBackend(old).get_symm_buffer(GROUP, **SIZES, num_shared_experts=1)
    for options in ({"num_shared_experts": 1}, {"base": object()}):
        with pytest.raises(ValueError, match="get_symm_buffer_for_sm90_mega_moe has no such parameter"):
            DeepGemmSm90MegaMoEBackend().get_symm_buffer(GROUP, **SIZES, **options)
    with pytest.raises(ValueError, match=r"activation: this build's deep_gemm.NVFP4SymmBuffer has no such"):
        DeepGemmNvfp4MegaMoEBackend().get_symm_buffer(GROUP, **SIZES, activation="situ")


# -- probes ----------------------------------------------------------------------------------------


def test_features_tell_builds_apart():
    new, old = features(make_module()), features(make_module(old=True))
    assert new.keys() == old.keys() == FEATURES.keys()
    differ = {name for name in FEATURES if new[name] != old[name]}
    assert differ == {
        "shared experts in the launch",
        "shared experts in the buffer",
        "activation alpha and beta",
    }
    assert not features(make_module(without=("fp8_mega_moe",)))["fp8_mega_moe"]


def test_shared_experts_are_probed_not_assumed(fake):
    backend = DeepGemmSm100MegaMoEBackend()
    assert backend.supports_shared_experts(fake)
    assert not backend.supports_shared_experts(make_module(old=True))
    for function in ("get_block_m_for_mega_moe", "transform_weights_for_mega_moe"):
        assert not backend.supports_shared_experts(make_module(without=(function,)))
    with pytest.raises(AttributeError):
        backend.supports_shared_experts(make_module(without=("fp8_fp4_mega_moe",)))
    opaque = make_module()
    opaque.fp8_fp4_mega_moe = dict.fromkeys  # a built-in whose signature cannot be read
    assert not backend.supports_shared_experts(opaque)
    swallowing = make_module()
    swallowing.fp8_fp4_mega_moe = lambda *arguments, **options: None
    assert not backend.supports_shared_experts(swallowing)
    assert fake.calls.calls == []


# -- the mega gate ---------------------------------------------------------------------------------

GATE = {
    "x": torch.zeros(2, 256),
    "weight": torch.zeros(4, 256),
    "num_topk": 2,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 2.5,
    "ep_rank": 3,
    "bias": torch.zeros(4),
    "image_bias": torch.ones(4),
    "image_token_mask": torch.zeros(2, dtype=torch.bool),
    "fix_routing_mask": torch.ones(2, dtype=torch.bool),
    "unmapped_topk_idx": torch.zeros(2, 2, dtype=torch.int64),
}
WEIGHTS, IDS = torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int64)


def test_gate_arguments_pass_through_and_weights_come_first(fake):
    seen = []
    fake.bf16_mega_gate = lambda **options: (seen.append(options), (IDS, WEIGHTS))[1]
    backend = DeepGemmSm100MegaMoEBackend(fake)
    assert backend.supports_bf16_mega_gate()
    weights, ids = backend.bf16_mega_gate(**GATE)
    assert weights is WEIGHTS
    assert ids is IDS
    assert seen[0].keys() == GATE.keys()
    assert all(seen[0][name] is value for name, value in GATE.items())


def test_gate_of_deep_gemm_itself(fake):
    seen = {}

    def bf16_mega_gate(
        x,
        weight,
        num_topk,
        use_shared_as_routed,
        num_shared_experts,
        routed_scaling_factor,
        ep_rank,
        *,
        scoring_func,
        bias=None,
        unmapped_topk_idx=None,
    ):
        seen.update(locals())
        return IDS, WEIGHTS

    fake.bf16_mega_gate = bf16_mega_gate
    backend = DeepGemmSm100MegaMoEBackend(fake)
    plain = {**GATE, "image_bias": None, "image_token_mask": None, "fix_routing_mask": None}
    weights, _ = backend.bf16_mega_gate(**plain)
    assert weights is WEIGHTS
    assert (seen["use_shared_as_routed"], seen["num_shared_experts"]) == (False, 0)
    with pytest.raises(ValueError, match="image_bias, image_token_mask, fix_routing_mask: this build's"):
        backend.bf16_mega_gate(**GATE)


def test_a_build_without_gate(fake):
    backend = DeepGemmSm100MegaMoEBackend(fake)
    assert not backend.supports_bf16_mega_gate()
    with pytest.raises(RuntimeError, match="no bf16_mega_gate"):
        backend.bf16_mega_gate(**GATE)
    assert not DeepGemmSm90MegaMoEBackend(fake).supports_bf16_mega_gate()
    assert DeepGemmSm100MegaMoEBackend().supports_bf16_mega_gate()
