"""finalize_weights: kernel layout in place, what stays, what goes, and experts that migrate before or
after.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import LAYERS, nvfp4_layer
from expert_modules import KINDS, make_experts

from megamoe.backends import EmulatedMegaMoEBackend
from megamoe.experts.finalize import prove_dropped, shares_storage
from megamoe.experts.migration import permute_rows

HIDDEN, INTER, EXPERTS = 256, 256, 4


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def loaded(kind: str, quant: str, seed: int = 0, **changes):
    module = make_experts(kind, quant, **changes)
    list(module.load_weights(LAYERS[quant](EXPERTS, HIDDEN, INTER, seed).items()))
    return module


def pairs(weights):
    return weights if isinstance(weights, tuple) else (weights,)


@pytest.mark.parametrize(("kind", "quant"), KINDS)
@pytest.mark.parametrize("chunk_bytes", [1, 2 * 2 * INTER * HIDDEN, 1 << 30], ids=["one", "some", "all"])
def test_in_place_equals_the_backend_at_once(kind, quant, chunk_bytes, monkeypatch):
    monkeypatch.setattr("megamoe.experts.finalize.CHUNK_BYTES", chunk_bytes)
    module = loaded(kind, quant)
    layer = LAYERS[quant](EXPERTS, HIDDEN, INTER)
    expected = module.backend.transform_weights(
        w13_weight=layer["w13_weight"],
        w13_weight_scale=layer.get("w13_weight_scale"),
        w2_weight=layer["w2_weight"],
        w2_weight_scale=layer.get("w2_weight_scale"),
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
    )
    module.finalize_weights()
    for actual, wanted in zip((module._l1_weights, module._l2_weights), expected, strict=True):
        for one, other in zip(pairs(actual), pairs(wanted), strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(raw(one), raw(other))


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_what_stays_and_what_goes(kind, quant):
    module = loaded(kind, quant)
    w13_storage = module.w13_weight.untyped_storage().data_ptr()
    w2 = module.w2_weight
    scales = [getattr(module, n, None) for n in ("w13_weight_scale", "w2_weight_scale")]
    module.finalize_weights()
    assert module.is_finalized
    assert module.w2_weight is w2
    assert shares_storage(pairs(module._l2_weights)[0], w2)
    assert pairs(module._l1_weights)[0].untyped_storage().data_ptr() == w13_storage
    for name in ("w13_weight", "w13_weight_scale", "w2_weight_scale"):
        assert getattr(module, name, None) is None
    kept = [*pairs(module._l1_weights), *pairs(module._l2_weights)]
    assert not any(shares_storage(scale, k) for scale in scales if scale is not None for k in kept)
    names = {name for name, _ in module.named_parameters()}
    assert names == set(LAYERS[quant](1, HIDDEN, INTER)) - {
        "w13_weight",
        "w13_weight_scale",
        "w2_weight_scale",
    }
    before = (
        module._l1_weights,
        module._l2_weights,
        {n: raw(t).clone() for n, t in module.expert_tensors().items()},
    )
    module.finalize_weights()
    assert (module._l1_weights, module._l2_weights) == before[:2] or module._l1_weights is before[0]
    assert all(torch.equal(raw(t), before[2][n]) for n, t in module.expert_tensors().items())


def test_finalized_weights_cannot_be_loaded_again():
    module = loaded("muse_spark", "nvfp4")
    module.finalize_weights()
    with pytest.raises(RuntimeError, match=r"^layers\.7\.experts: weights are in kernel layout already"):
        list(module.load_weights([("w2_weight_scale_2", torch.ones(EXPERTS))]))


class Copying(EmulatedMegaMoEBackend):
    """A backend that breaks the rule that the L2 weight is w2_weight's storage."""

    def __new__(cls):
        return object.__new__(cls)

    def __init__(self):
        self.inner = EmulatedMegaMoEBackend("fp4xfp4")

    mma_type = "fp4xfp4"

    def transform_weights(self, **arguments):
        l1, (w2, sf2) = self.inner.transform_weights(**arguments)
        return l1, (w2.clone(), sf2)


def test_a_backend_that_copies_the_l2_weight_is_noticed_before_anything_is_written():
    module = loaded("muse_spark", "nvfp4", backend=Copying())
    before = raw(module.w13_weight).clone()
    with pytest.raises(AssertionError, match="does not share storage with w2_weight"):
        module.finalize_weights()
    assert not module.is_finalized
    assert torch.equal(raw(module.w13_weight), before)


class Keeping(Copying):
    """A backend whose scales are views of what is dropped; the in-place transform copies them out."""

    def transform_weights(self, **arguments):
        l1, l2 = self.inner.transform_weights(**arguments)
        scale = arguments["w13_weight_scale"].view(torch.uint8).view(torch.int32)
        return (l1[0], scale), l2


def test_scales_that_are_views_of_dropped_ones_are_copied_out():
    module = loaded("muse_spark", "nvfp4", backend=Keeping())
    module.finalize_weights()
    assert module.w13_weight_scale is None


def test_the_proof_names_both_tensors():
    storage = torch.zeros(16)
    with pytest.raises(AssertionError, match="scale is dropped but L1 still lives in its storage"):
        prove_dropped({"weight": torch.zeros(2), "scale": storage[:4]}, {"L1": storage[8:]})
    prove_dropped({"scale": storage.clone()}, {"L1": storage})
    prove_dropped({"empty": torch.zeros(0)}, {"none": torch.zeros(0)})


@pytest.mark.parametrize(
    ("gate", "up", "fine"), [(1.0, 1.000009, True), (1.0, 1.00002, False), (0.0, 0.0, True)]
)
def test_two_level_nvfp4_needs_one_scale_for_gate_and_up(gate, up, fine):
    module = loaded("general", "nvfp4")
    module.w13_weight_scale_2.data[2] = torch.tensor([gate, up])
    if fine:
        module.finalize_weights()
    else:
        with pytest.raises(ValueError, match="gate and up of expert 2 must have one scale"):
            module.finalize_weights()
        assert not module.is_finalized
    # one level: alphas are kept apart, any pair will do
    other = loaded("muse_spark", "nvfp4")
    other.w13_weight_scale_2.data[2] = torch.tensor([1.0, 2.0])
    other.finalize_weights()


def test_l2_activation_scale_is_that_of_all_experts():
    layer = nvfp4_layer(EXPERTS, HIDDEN, INTER)
    module = make_experts("general", "nvfp4", experts_start_idx=0, num_local_experts=2)
    assert module.l2_activation_scale() == 1.0
    layer["w2_input_scale"] = torch.tensor([0.25, 0.5, 3.0, 0.125])
    list(module.load_weights(layer.items()))
    assert module.l2_activation_scale() == 3.0
    module.finalize_weights()
    assert torch.equal(module.l2_alpha, module.w2_weight_scale_2 * torch.tensor(3.0))
    assert torch.equal(module.l1_alpha, module.w13_weight_scale_2[:, 0])


# -- migration -------------------------------------------------------------------------------------

MIGRATIONS = {
    "swap": [[1, 0, 2, 3]],
    "two": [[1, 2, 3, 0], [3, 1, 0, 2]],
    "replicas": [[0, 0, 2, 3], [3, 1, 1, 0]],
    "three": [[2, 3, 0, 1], [0, 2, 1, 3], [3, 3, 3, 0]],
}


@pytest.mark.parametrize(("kind", "quant"), KINDS)
@pytest.mark.parametrize("migration", MIGRATIONS)
def test_migrating_after_the_transform_equals_migrating_before(kind, quant, migration):
    early, late = loaded(kind, quant), loaded(kind, quant)
    for order in MIGRATIONS[migration]:
        early.permute_experts(order)
    early.finalize_weights()
    late.finalize_weights()
    before = {name: raw(t).clone() for name, t in late.expert_tensors().items()}
    for order in MIGRATIONS[migration]:
        late.permute_experts(order)
    expected, actual = early.expert_tensors(), late.expert_tensors()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.stride() == actual[name].stride()
        assert torch.equal(raw(actual[name]), raw(tensor)), name
        # every kind of tensor that an expert has did move
        assert not torch.equal(raw(actual[name]), before[name]), name


def test_migration_covers_weights_scales_and_alphas_without_aliases():
    names = {
        ("muse_spark", "nvfp4"): {
            "l1 weight",
            "l1 scale",
            "l2 weight",
            "l2 scale",
            "w13_weight_scale_2",
            "w2_weight_scale_2",
            "w2_input_scale",
        },
        ("general", "nvfp4"): {
            "l1 weight",
            "l1 scale",
            "l2 weight",
            "l2 scale",
            "w13_weight_scale_2",
            "w2_weight_scale_2",
            "l1_alpha",
            "l2_alpha",
        },
        ("general", "mxfp4"): {"l1 weight", "l1 scale", "l2 weight", "l2 scale"},
        ("general", "bf16"): {"l1 weight", "l2 weight"},
    }
    for (kind, quant), expected in names.items():
        module = loaded(kind, quant)
        module.finalize_weights()
        tensors = module.expert_tensors()
        assert set(tensors) == expected
        storages = [t.untyped_storage().data_ptr() for t in tensors.values()]
        assert len(set(storages)) == len(storages)
        assert all(t.shape[0] == EXPERTS for t in tensors.values())


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 4], [-1, 0, 1, 2], []], ids=str)
def test_an_order_that_names_no_slot_is_refused(order):
    module = loaded("muse_spark", "nvfp4")
    before = {name: raw(t).clone() for name, t in module.expert_tensors().items()}
    with pytest.raises(ValueError, match="order must name 4 local slots"):
        module.permute_experts(order)
    assert all(torch.equal(raw(t), before[n]) for n, t in module.expert_tensors().items())


def test_permute_rows_over_every_map_of_four_rows():
    rows = torch.arange(4)
    for code in range(4**4):
        order = [(code // 4**i) % 4 for i in range(4)]
        tensor = rows.clone()
        permute_rows(tensor, order)
        assert torch.equal(tensor, rows[torch.tensor(order)]), order


# -- the norm's gain -------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_centred", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gamma(zero_centred, dtype):
    weight = torch.linspace(-1, 1, HIDDEN).to(dtype)
    norm = SimpleNamespace(weight=weight, zero_centered_gamma=zero_centred, gain_center=1.0)
    module = loaded("muse_spark", "nvfp4", post_expert_norm=norm)
    module.finalize_weights()
    expected = weight.float() + (1.0 if zero_centred else 0.0)
    assert module.gamma.dtype == torch.float32
    assert torch.equal(module.gamma, expected)
    assert module.gamma.is_contiguous()
    arguments = module.launch_arguments()
    assert arguments["post_expert_norm_gamma"] is module.gamma
    assert arguments["post_expert_norm_eps"] == module.norm_eps


def test_gamma_must_have_the_hidden_size():
    norm = SimpleNamespace(weight=torch.ones(HIDDEN + 1))
    with pytest.raises(ValueError, match=r"post_expert_norm.weight must have shape \(256,\), got \(257,\)"):
        make_experts("muse_spark", "nvfp4", post_expert_norm=norm)


def test_without_norm_nothing_is_passed():
    module = loaded("muse_spark", "bf16")
    module.finalize_weights()
    assert module.launch_arguments() == {}
