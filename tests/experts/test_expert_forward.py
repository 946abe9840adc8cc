"""Expert modules end to end on the emulated backend: from checkpoint tensors to outputs, against two oracles.

The first oracle is the reference forward on the checkpoint's own layout, bit for bit: it sees no kernel
layout, no loader and no symmetric buffer. The second is a float64 mixture of experts on dequantized weights,
which knows nothing of the reference; it bounds the error of the worst row.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import LAYERS
from expert_modules import KINDS, make_experts

from megamoe.backends import EmulatedMegaMoEBackend, LocalGroup
from megamoe.eplb import EplbLayerState
from megamoe.experts import MegaMoEActivation, padding_mask_for_rank
from megamoe.experts.finalize import shares_storage
from reference.formats import decode, unpack_e2m1
from reference.mega_moe import Activation, ExpertWeights, LaunchConfig, PostNorm, RankInputs, forward
from reference.recipes import RECIPES
from reference.staging import stage_fp8, stage_nvfp4

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 4, 256, 256, 2, 7


def routing(tokens: int = TOKENS, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    weights = torch.rand(tokens, TOP_K, generator=generator) + 0.25
    return hidden, weights, ids


def finalized(kind: str, quant: str, **changes):
    module = make_experts(kind, quant, **changes)
    start, local = module.experts_start_idx, module.num_local_experts
    assert (start, local) == (0, EXPERTS)
    list(module.load_weights(LAYERS[quant](EXPERTS, HIDDEN, INTER).items()))
    module.finalize_weights()
    return module


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    return decode(unpack_e2m1(packed), "e2m1")


def dequantized(quant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [E, 2I, H], w2 [E, H, I]) in float64."""
    layer = LAYERS[quant](EXPERTS, HIDDEN, INTER)
    result = []
    for name in ("w13", "w2"):
        weight = layer[f"{name}_weight"]
        if quant == "bf16":
            result.append(weight.double())
            continue
        scale = layer[f"{name}_weight_scale"]
        if quant == "fp8_block":
            blocks = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
            result.append(weight.double() * blocks)
        elif quant == "mxfp8":
            result.append(weight.double() * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, 2))
        elif quant == "mxfp4":
            result.append(
                e2m1_values(weight).double() * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, 2)
            )
        else:
            whole = layer[f"{name}_weight_scale_2"].double()
            factor = whole[:, :1, None] if name == "w13" else whole[:, None, None]
            result.append(e2m1_values(weight).double() * scale.double().repeat_interleave(16, 2) * factor)
    return result[0], result[1]


def float64_experts(quant, hidden, topk_weights, ids, gamma=None, eps=0.0) -> torch.Tensor:
    w13, w2 = dequantized(quant)
    y = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(hidden.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            gate, up = (w13[expert] @ hidden[token].double()).chunk(2)
            out = w2[expert] @ (torch.nn.functional.silu(gate) * up)
            if gamma is not None:
                out = out * gamma.double()
                out = out / torch.sqrt((out * out).mean() + eps)
            y[token] += out * float(topk_weights[token, slot])
    return y


# Relative error of the worst row against float64, 1.3 to 2 times what these inputs show.
# of it).
WORST_ROW = {"fp8xfp4": 0.08, "nvfp4": 0.35, "fp4xfp4": 0.35, "fp8xfp8": 0.08, "bf16xbf16": 0.01}


def worst_row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_close_to_float64(kind, quant):
    module = finalized(kind, quant)
    hidden, weights, ids = routing()
    y = module(hidden, weights, ids)
    assert (y.dtype, y.shape, y.is_contiguous()) == (torch.bfloat16, hidden.shape, True)
    error = worst_row_error(y, float64_experts(quant, hidden, weights, ids))
    assert error < WORST_ROW[module.mma_type]


def expected_bits(module, hidden, weights, ids, norm: PostNorm | None = None) -> torch.Tensor:
    """The reference forward on checkpoint layout."""
    layer = LAYERS[module.quant](EXPERTS, HIDDEN, INTER)
    routes = {"topk_idx": ids.to(torch.int64), "topk_weights": weights}
    byte = {name: t.view(torch.uint8) if t.element_size() == 1 else t for name, t in layer.items()}
    extra, options = {}, {}
    if module.quant == "bf16":
        inputs = RankInputs(hidden, None, **routes)
        experts = ExpertWeights(layer["w13_weight"], layer["w2_weight"])
    elif module.quant == "fp8_block":
        staged = stage_fp8(hidden, RECIPES["fp8_fp32_g128"])
        inputs = RankInputs(staged.x, staged.x_sf, **routes)
        experts = ExpertWeights(
            byte["w13_weight"], byte["w2_weight"], layer["w13_weight_scale"], layer["w2_weight_scale"]
        )
    elif module.quant in ("mxfp4", "mxfp8"):
        staged = stage_fp8(hidden, RECIPES["fp8_ue8m0_g32"])
        scales = staged.x_sf.contiguous().view(torch.uint8)
        inputs = RankInputs(staged.x, scales, **routes)
        unpack = unpack_e2m1 if module.quant == "mxfp4" else torch.clone
        experts = ExpertWeights(
            unpack(byte["w13_weight"]),
            unpack(byte["w2_weight"]),
            byte["w13_weight_scale"],
            byte["w2_weight_scale"],
        )
    else:
        two_level = module.mma_type == "nvfp4"
        staged = stage_nvfp4(hidden, RECIPES["nvfp4_token" if two_level else "nvfp4_block"])
        if two_level:
            extra["x_scales"] = staged.x_scales
            scale = float(layer["w2_input_scale"].max())
            options["l2_activation_scale"] = scale
            alphas = {
                "l1_alphas": layer["w13_weight_scale_2"][:, 0].contiguous(),
                "l2_alphas": layer["w2_weight_scale_2"] * torch.tensor(scale),
            }
        else:
            alphas = {
                "l1_alphas": layer["w13_weight_scale_2"],
                "l2_alphas": layer["w2_weight_scale_2"],
                "a2_scales": layer["w2_input_scale"],
            }
        scales = staged.x_sf.contiguous().view(torch.uint8)
        inputs = RankInputs(unpack_e2m1(staged.x), scales, **routes, **extra)
        experts = ExpertWeights(
            unpack_e2m1(layer["w13_weight"]),
            unpack_e2m1(layer["w2_weight"]),
            byte["w13_weight_scale"],
            byte["w2_weight_scale"],
            **alphas,
        )
    family = {
        "fp8xfp4": "sm100_fp8xfp4",
        "nvfp4": "sm100_nvfp4",
        "fp4xfp4": "sm100_fp4xfp4",
        "bf16xbf16": "sm100_bf16",
        "fp8xfp8": "sm90_fp8xfp8" if module.quant == "fp8_block" else "sm100_fp8xfp8",
    }[module.mma_type]
    launch = LaunchConfig(tile=64, hidden=HIDDEN)
    activation = Activation(clamp=module.activation.clamp, fast_math=module.fast_math)
    (result,) = forward(family, [inputs], [experts], [launch], activation, norm=norm, **options)
    return result.y


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(("kind", "quant"), KINDS)
@pytest.mark.parametrize(("fast_math", "clamp"), [(True, None), (False, 0.5)])
def test_equal_to_the_forward_on_checkpoint_layout(kind, quant, fast_math, clamp):
    module = finalized(kind, quant, fast_math=fast_math, activation=MegaMoEActivation(clamp=clamp))
    hidden, weights, ids = routing()
    assert same_bits(module(hidden, weights, ids), expected_bits(module, hidden, weights, ids))


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
@pytest.mark.parametrize("zero_centred", [True, False])
def test_post_expert_norm(quant, zero_centred):
    gain = torch.linspace(0.5, 1.5, HIDDEN)
    norm = SimpleNamespace(
        weight=gain - 1.0 if zero_centred else gain, zero_centered_gamma=zero_centred, gain_center=1.0
    )
    module = finalized("muse_spark", quant, post_expert_norm=norm, norm_eps=1e-5)
    hidden, weights, ids = routing()
    y = module(hidden, weights, ids)
    assert same_bits(y, expected_bits(module, hidden, weights, ids, PostNorm(module.gamma, 1e-5)))
    exact = float64_experts(quant, hidden, weights, ids, gamma=gain, eps=1e-5)
    assert worst_row_error(y, exact) < WORST_ROW[module.mma_type]


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_a_producer_can_stage_itself(kind, quant):
    module = finalized(kind, quant)
    hidden, weights, ids = routing()
    expected = module(hidden, weights, ids)
    other = routing(seed=8)
    buffer = module.input_buffer(TOKENS)
    assert buffer is module.get_symm_buffer()
    module(*other)
    module.backend.prepare_inputs(buffer, hidden, weights, ids, **module.staging_arguments())
    assert same_bits(module.forward_prepared(torch.empty_like(hidden)), expected)


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_padding_tokens_are_not_routed(kind, quant):
    module = finalized(kind, quant)
    hidden, weights, ids = routing()
    padding = torch.tensor([False, True, False, False, True, False, True])
    weights[1] = float("nan")
    y = module(hidden, weights, ids, padding)
    assert int(y[padding].view(torch.int16).abs().max()) == 0
    live = module(hidden[~padding], weights[~padding], ids[~padding])
    assert same_bits(y[~padding].contiguous(), live)


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_no_token(kind, quant):
    module = finalized(kind, quant)
    hidden, weights, ids = routing()
    assert module(hidden[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_input_buffer_refuses(kind, quant):
    module = make_experts(kind, quant)
    with pytest.raises(AssertionError, match=r"^layers\.7\.experts: finalize_weights must run before"):
        module.input_buffer(1)
    module = finalized(kind, quant)
    module.input_buffer(16)
    with pytest.raises(ValueError, match=r"^layers\.7\.experts: num_tokens must be at most 16, got 17"):
        module.input_buffer(17)
    hidden = torch.zeros(17, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_tokens must be at most 16"):
        module(hidden, torch.zeros(17, TOP_K), torch.zeros(17, TOP_K, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_tokens must be at most 16"):
        module.forward_prepared(hidden)


# -- buffers ---------------------------------------------------------------------------------------


def test_layers_share_a_buffer_by_group_and_sizes():
    group = LocalGroup()
    first, second = (finalized("muse_spark", "nvfp4", group=group, prefix=p) for p in ("a", "b"))
    assert first.get_symm_buffer() is second.get_symm_buffer()
    for changes in (
        {"group": LocalGroup()},
        {"group": group, "top_k": 1},
        {"group": group, "num_max_tokens_per_rank": 17},
    ):
        assert finalized("muse_spark", "nvfp4", **changes).get_symm_buffer() is not first.get_symm_buffer()


def test_bf16_owns_the_storage_that_nvfp4_views():
    group = LocalGroup()
    fp4, bf16 = (finalized("muse_spark", quant, group=group) for quant in ("nvfp4", "bf16"))
    viewing, owning = fp4.get_symm_buffer(), bf16.get_symm_buffer()
    assert viewing is not owning
    assert (viewing.mma_type, owning.mma_type) == ("fp4xfp4", "bf16xbf16")
    assert shares_storage(viewing.buffer, owning.buffer)
    assert viewing.buffer.data_ptr() == owning.buffer.data_ptr()
    # and layers of the two kinds, one after the other, do not disturb each other
    hidden, weights, ids = routing()
    expected = [module(hidden, weights, ids) for module in (fp4, bf16)]
    for module, wanted in zip((bf16, fp4), reversed(expected), strict=True):
        assert same_bits(module(hidden, weights, ids), wanted)


def test_a_dead_groups_buffers_are_not_found_again():
    addresses = set()
    for _ in range(8):
        module = finalized("muse_spark", "bf16", group=LocalGroup())
        addresses.add(id(module.get_symm_buffer()))
        del module
    assert len(addresses) == 8


# -- EPLB ------------------------------------------------------------------------------------------


def eplb_state(physical_of: dict[int, list[int]], physical: int) -> EplbLayerState:
    slots = max(len(p) for p in physical_of.values())
    mapping = torch.full((len(physical_of), slots), -1)
    for logical, places in physical_of.items():
        mapping[logical, : len(places)] = torch.tensor(places)
    return EplbLayerState(
        expert_load_view=torch.zeros(physical, dtype=torch.int32),
        logical_to_physical_map=mapping,
        logical_replica_count=torch.tensor([len(physical_of[e]) for e in range(len(physical_of))]),
        should_record_tensor=torch.tensor(True),
        num_unpadded_tokens_tensors=[torch.tensor(TOKENS - 1, dtype=torch.int32)],
    )


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_outputs_survive_migrations_with_their_maps(kind, quant):
    """Experts move twice, the map follows: logical routing gives the same bytes, and the load follows the
    experts.
    """
    hidden, weights, ids = routing()
    expected = finalized(kind, quant)(hidden, weights, ids)
    module = finalized(kind, quant)
    holds = list(range(EXPERTS))
    counts = torch.bincount(ids[: TOKENS - 1].flatten(), minlength=EXPERTS)
    for order in ([1, 2, 3, 0], [2, 0, 3, 1]):
        module.permute_experts(order)
        holds = [holds[source] for source in order]
        state = eplb_state({e: [holds.index(e)] for e in range(EXPERTS)}, EXPERTS)
        module.eplb_state = state
        assert same_bits(module(hidden, weights, ids), expected)
        assert torch.equal(
            state.expert_load_view[torch.tensor([holds.index(e) for e in range(EXPERTS)])], counts.int()
        )


def test_replicas_compute_the_same():
    """5 physical experts for 4 logical ones: the replica chosen by token changes no byte."""
    kind, quant = "general", "mxfp4"
    hidden, weights, ids = routing()
    expected = finalized(kind, quant)(hidden, weights, ids)
    module = make_experts(kind, quant, num_experts=5, num_local_experts=5, num_logical_experts=EXPERTS)
    list(module.load_weights(LAYERS[quant](EXPERTS, HIDDEN, INTER).items()))
    module.finalize_weights()
    module.eplb_state = eplb_state({0: [0, 4], 1: [1], 2: [2], 3: [3]}, 5)
    assert same_bits(module(hidden, weights, ids), expected)
    assert int(module.eplb_state.expert_load_view[4]) > 0


# -- plain arguments -------------------------------------------------------------------------------


def test_padding_mask_for_rank():
    mask = torch.tensor([False, True, False, True, False])
    assert padding_mask_for_rank(None, 4) is None
    assert padding_mask_for_rank(mask, 3).tolist() == [False, True, False]
    ranks = [padding_mask_for_rank(mask, 3, tp_size=2, tp_rank=r).tolist() for r in range(2)]
    assert ranks == [[False, True, False], [True, False, True]]
    assert padding_mask_for_rank(mask, 2, tp_size=2, tp_rank=1).tolist() == [False, True]
    with pytest.raises(ValueError, match="at least 6 entries, got 5"):
        padding_mask_for_rank(mask, 6)
    with pytest.raises(ValueError, match=r"tp_rank must be in \[0, 2\), got 2"):
        padding_mask_for_rank(mask, 3, tp_size=2, tp_rank=2)
    with pytest.raises(TypeError, match="bool tensor"):
        padding_mask_for_rank(mask.int(), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gelu"}, "activation must be one of swiglu, swiglustep, situ, got 'gelu'"),
        ({"alpha": float("inf")}, "alpha must be finite"),
        ({"beta": float("nan")}, "beta must be finite"),
        ({"clamp": -1.0}, "clamp must be >= 0, got -1.0"),
        ({"clamp": float("nan")}, "clamp must be >= 0, got nan"),
        ({"name": "situ", "clamp": 1.0}, "situ takes no clamp"),
        ({"name": "situ", "alpha": 0.0}, "situ takes no clamp, alpha > 0"),
        ({"name": "situ", "beta": -1.0}, "beta >= 0"),
    ],
    ids=str,
)
def test_activations_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        MegaMoEActivation(**arguments)


def test_activation_arguments_only_where_not_default():
    assert MegaMoEActivation().launch_arguments() == {"activation_clamp": None}
    full = MegaMoEActivation("situ", alpha=4.0, beta=25.0).launch_arguments()
    assert full == {
        "activation_clamp": None,
        "activation": "situ",
        "activation_alpha": 4.0,
        "activation_beta": 25.0,
    }


def test_the_first_launch_of_a_group_meets_at_a_barrier():
    class Counting(LocalGroup):
        met = 0

        def barrier(self) -> None:
            self.met += 1

    group = Counting()
    hidden, weights, ids = routing()
    for _ in range(2):
        finalized("muse_spark", "bf16", group=group)(hidden, weights, ids)
    assert group.met == 1


@pytest.mark.parametrize(("quant", "other"), [("mxfp8", "SM90"), ("fp8_block", "SM100")])
def test_weights_of_the_other_fp8_kernel_are_refused(quant, other):
    module = make_experts("general", quant, backend=EmulatedMegaMoEBackend("fp8xfp8", other))
    with pytest.raises(NotImplementedError, match=rf"layers\.7\.experts: {quant} weights .* is for {other}"):
        module.finalize_weights()


def test_a_module_without_backend_selects_one_and_says_why_it_cannot():
    module = make_experts("muse_spark", "nvfp4", backend=None)
    with pytest.raises(NotImplementedError, match="fp4xfp4 MegaMoE on cpu"):
        module.finalize_weights()
    module.backend = EmulatedMegaMoEBackend("fp4xfp4")
    module.finalize_weights()
