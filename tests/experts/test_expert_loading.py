"""Checkpoint tensors into parameters: whose rows land where, what is refused, and that a refusal changes
nothing.
"""

from __future__ import annotations

import pytest
import torch
from checkpoints import LAYERS, mxfp4_layer, nvfp4_layer, split_experts
from expert_modules import KINDS, make_experts

from megamoe.experts import MegaMoEExperts, MuseSparkMegaMoEExperts
from megamoe.experts.loading import parse_expert_name

HIDDEN, INTER, EXPERTS = 256, 256, 4


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().contiguous().view(torch.uint8) for name, p in module.named_parameters()}


def unchanged(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = snapshot(module)
    return after.keys() == before.keys() and all(torch.equal(after[n], t) for n, t in before.items())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def test_nvfp4_parameters_are_those_of_the_checkpoint():
    module = make_experts("muse_spark", "nvfp4", num_experts=8, num_local_experts=2, hidden_size=512)
    expected = {
        "w13_weight": ((2, 512, 256), torch.uint8),
        "w13_weight_scale": ((2, 512, 32), torch.float8_e4m3fn),
        "w13_weight_scale_2": ((2, 2), torch.float32),
        "w13_input_scale": ((2, 2), torch.float32),
        "w2_weight": ((2, 512, 128), torch.uint8),
        "w2_weight_scale": ((2, 512, 16), torch.float8_e4m3fn),
        "w2_weight_scale_2": ((2,), torch.float32),
        "w2_input_scale": ((2,), torch.float32),
    }
    found = {name: (tuple(p.shape), p.dtype) for name, p in module.named_parameters()}
    assert found == expected
    assert not any(p.requires_grad for p in module.parameters())
    assert all(int(t.max()) == 0 for t in snapshot(module).values())


@pytest.mark.parametrize(("kind", "quant"), KINDS)
@pytest.mark.parametrize(("start", "local"), [(0, 4), (1, 2), (3, 1)])
def test_each_rank_takes_its_experts(kind, quant, start, local):
    layer = LAYERS[quant](EXPERTS, HIDDEN, INTER)
    module = make_experts(kind, quant, experts_start_idx=start, num_local_experts=local)
    assert list(module.load_weights(layer.items())) == list(layer)
    for name, tensor in layer.items():
        assert same_bytes(getattr(module, name).data, tensor[start : start + local]), name


@pytest.mark.parametrize(("kind", "quant"), KINDS)
def test_per_expert_names_give_the_same_parameters(kind, quant):
    layer = LAYERS[quant](EXPERTS, HIDDEN, INTER)
    stacked, single = (make_experts(kind, quant, experts_start_idx=1, num_local_experts=2) for _ in range(2))
    list(stacked.load_weights(layer.items()))
    names = split_experts(layer, INTER)
    assert list(single.load_weights(names.items())) == list(names)
    for name in layer:
        assert same_bytes(getattr(single, name).data, getattr(stacked, name).data), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("3.gate_proj.weight", ("w13_weight", "w1", 3)),
        ("experts.12.up_proj.weight_scale_2", ("w13_weight_scale_2", "w3", 12)),
        ("0.w2.weight_scale_inv", ("w2_weight_scale", "w2", 0)),
        ("0.w1.input_scale", ("w13_input_scale", "w1", 0)),
        ("0.w4.weight", None),
        ("w13_weight", None),
        ("0.w1.weight.extra", None),
    ],
)
def test_expert_names(name, expected):
    parsed = parse_expert_name(name)
    assert (parsed and (parsed.parameter, parsed.shard_id, parsed.expert_id)) == expected


def test_replicas_load_the_same_logical_expert():
    layer = LAYERS["mxfp4"](3, HIDDEN, INTER)
    module = make_experts("general", "mxfp4", num_experts=5, num_local_experts=5, num_logical_experts=3)
    assert module.logical_experts() == [0, 1, 2, 0, 1]
    list(module.load_weights(layer.items()))
    single = make_experts("general", "mxfp4", num_experts=5, num_local_experts=5, num_logical_experts=3)
    list(single.load_weights(split_experts(layer, INTER).items()))
    for name, tensor in layer.items():
        for candidate in (module, single):
            assert same_bytes(getattr(candidate, name).data, tensor[torch.tensor([0, 1, 2, 0, 1])]), name


def test_loading_is_lazy():
    module = make_experts("muse_spark", "nvfp4")
    before = snapshot(module)
    stream = module.load_weights(nvfp4_layer(EXPERTS, HIDDEN, INTER).items())
    assert unchanged(module, before)
    assert next(stream) == "w13_weight"
    after = snapshot(module)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["w13_weight"]


# -- what is refused -------------------------------------------------------------------------------


def damaged(tensor: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "shape":
        return tensor[..., :-1] if tensor.dim() > 1 else tensor[:-1]
    if fault == "experts":
        return torch.cat([tensor, tensor[:1]])
    if fault == "rank":
        return tensor[None]
    return tensor.view(torch.uint8).to(torch.int64)


@pytest.mark.parametrize(("kind", "quant"), KINDS)
@pytest.mark.parametrize("fault", ["shape", "experts", "rank", "dtype"])
def test_a_tensor_that_does_not_fit_is_named_and_changes_nothing(kind, quant, fault):
    layer = LAYERS[quant](EXPERTS, HIDDEN, INTER)
    module = make_experts(kind, quant)
    list(module.load_weights(layer.items()))
    before = snapshot(module)
    other = LAYERS[quant](EXPERTS, HIDDEN, INTER, seed=99)
    for name, tensor in other.items():
        error = TypeError if fault == "dtype" else ValueError
        what = "dtype must be" if fault == "dtype" else "shape must be"
        with pytest.raises(error, match=rf"^layers\.7\.experts: {name}: {what} .*got"):
            list(module.load_weights([(name, damaged(tensor, fault))]))
        with pytest.raises(error, match=rf"^layers\.7\.experts: {name}: {what} .*got"):
            module.weight_loader(getattr(module, name), damaged(tensor, fault))
        assert unchanged(module, before)


@pytest.mark.parametrize("name", ["w13_bias", "experts.w13_weight", "0.w1.bias", "", "W13_weight"])
def test_an_unknown_name_is_refused(name):
    module = make_experts("muse_spark", "nvfp4")
    before = snapshot(module)
    with pytest.raises(AttributeError, match=rf"^layers\.7\.experts: {name} is not a weight of this layer"):
        list(module.load_weights([(name, torch.zeros(1))]))
    assert unchanged(module, before)


def test_a_scale_of_another_format_is_refused():
    module = make_experts("general", "mxfp4")
    with pytest.raises(AttributeError, match="w13_weight_scale_2 is not a weight of this layer"):
        list(module.load_weights([("w13_weight_scale_2", torch.ones(EXPERTS, 2))]))


@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
def test_power_of_two_scales_come_as_bytes_or_as_floats(name, dtype):
    tensor = mxfp4_layer(EXPERTS, HIDDEN, INTER)[name]
    given = tensor.view(dtype) if dtype != torch.float32 else torch.pow(2.0, tensor.float() - 127)
    module = make_experts("general", "mxfp4")
    list(module.load_weights([(name, given)]))
    assert torch.equal(getattr(module, name).data, tensor)


@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
@pytest.mark.parametrize("value", [1.5, -2.0, float("nan"), float("inf"), 2.0**-127])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_scale_that_is_no_power_of_two_is_named_and_changes_nothing(name, value, expert, monkeypatch):
    # one expert a piece: what is wrong in the last piece must be noticed before the first is copied
    monkeypatch.setattr("megamoe.experts.loading.PIECE_BYTES", 1)
    tensor = torch.pow(2.0, mxfp4_layer(EXPERTS, HIDDEN, INTER)[name].float() - 127)
    tensor[expert, 5, 1] = value
    module = make_experts("general", "mxfp4")
    before = snapshot(module)
    message = rf"^layers\.7\.experts: {name}: expert {expert}, at \[5, 1\]: .* is not a power of two"
    with pytest.raises(ValueError, match=message):
        list(module.load_weights([(name, tensor)]))
    assert unchanged(module, before)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF, 0xB8])
def test_block_scales_that_the_tensor_core_misreads_are_refused(byte):
    tensor = nvfp4_layer(EXPERTS, HIDDEN, INTER)["w2_weight_scale"]
    tensor.view(torch.uint8)[2, 3, 4] = byte
    module = make_experts("muse_spark", "nvfp4")
    before = snapshot(module)
    with pytest.raises(ValueError, match=r"w2_weight_scale: expert 2, at \[3, 4\]: .* is NaN or negative"):
        list(module.load_weights([("w2_weight_scale", tensor)]))
    assert unchanged(module, before)


@pytest.mark.parametrize(
    "name", ["w13_weight_scale_2", "w2_weight_scale_2", "w2_input_scale", "w13_input_scale"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_global_scales_must_be_finite(name, value):
    tensor = nvfp4_layer(EXPERTS, HIDDEN, INTER)[name].clone()
    tensor.view(-1)[-1] = value
    module = make_experts("muse_spark", "nvfp4")
    before = snapshot(module)
    with pytest.raises(ValueError, match=rf"{name}: expert 3, at \[.*not a finite number"):
        list(module.load_weights([(name, tensor)]))
    assert unchanged(module, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard_id": "w4", "expert_id": 0}, "shard id must be one of w1, w2, w3, got 'w4'"),
        ({"shard_id": "w2", "expert_id": 0}, "shard w2 does not belong to w13_weight"),
        ({"shard_id": "w1", "expert_id": 4}, r"expert id must be in \[0, 4\), got 4"),
        ({"shard_id": "w1", "expert_id": -1}, r"expert id must be in \[0, 4\), got -1"),
        ({"shard_id": "w1"}, r"expert id must be in \[0, 4\), got None"),
    ],
)
def test_shards_that_do_not_exist(arguments, message):
    module = make_experts("general", "mxfp4")
    before = snapshot(module)
    tensor = torch.ones(INTER, HIDDEN // 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"^layers\.7\.experts: 0\.w1\.weight: {message}"):
        module.weight_loader(module.w13_weight, tensor, "0.w1.weight", **arguments)
    assert unchanged(module, before)


def test_another_tensor_is_no_parameter():
    module = make_experts("general", "mxfp4")
    with pytest.raises(ValueError, match="not a parameter of this layer"):
        module.weight_loader(torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 384}, "hidden_size must be a positive multiple of 256, got 384"),
        ({"intermediate_size": 128}, "intermediate_size must be a positive multiple of 256, got 128"),
        ({"num_local_experts": 5}, r"experts \[0, 5\) are not among the 4"),
        ({"experts_start_idx": 1}, r"experts \[1, 5\) are not among the 4"),
        ({"experts_start_idx": -1, "num_local_experts": 2}, r"experts \[-1, 1\) are not among the 4"),
        ({"num_local_experts": 0}, r"experts \[0, 0\) are not among the 4"),
        ({"top_k": 0}, r"top_k must be in \[1, 4\], got 0"),
        ({"top_k": 5}, r"top_k must be in \[1, 4\], got 5"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank must be positive, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_construction_is_checked(changes, message):
    with pytest.raises(ValueError, match=rf"^layers\.7\.experts: .*{message}"):
        make_experts("muse_spark", "nvfp4", **changes)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"^layers\.7\.experts: quant must be one of nvfp4, bf16, got"):
        make_experts("muse_spark", "mxfp4", backend=None)


def test_general_experts_take_multiples_of_128():
    make_experts("general", "mxfp4", intermediate_size=128)
    with pytest.raises(ValueError, match="hidden_size must be a positive multiple of 128, got 192"):
        make_experts("general", "mxfp4", hidden_size=192)


def test_a_prefix_is_registered_once():
    registry: dict = {}
    first = make_experts("muse_spark", "nvfp4", registry=registry)
    assert registry == {"layers.7.experts": first}
    with pytest.raises(ValueError, match=r"layers\.7\.experts"):
        make_experts("muse_spark", "nvfp4", registry=registry)


def test_the_two_modules_have_their_formats():
    assert set(MegaMoEExperts.mma_types) == {"mxfp4", "mxfp8", "nvfp4", "fp8_block", "bf16"}
    assert set(MuseSparkMegaMoEExperts.mma_types) == {"nvfp4", "bf16"}
