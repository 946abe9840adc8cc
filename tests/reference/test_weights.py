"""Scale and weight transforms: recorded tensors, an independent transcription, aliasing, refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.bundle import Case, read_bundle
from reference import weights

BUNDLE = read_bundle(Path(__file__).parents[1] / "goldens" / "layouts.safetensors")
SCALE_OPS = ("get_mn_major_tma_aligned_tensor", "get_mn_major_tma_aligned_packed_ue8m0_tensor")


def recorded(*ops: str) -> list:
    cases = [case for case in BUNDLE.cases if case.op in ops]
    assert cases
    return [pytest.param(case, id=case.case) for case in cases]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)


def assert_recorded(case: Case, name: str, actual: torch.Tensor) -> None:
    """Shape, strides and the bytes of every element."""
    expected = case.outputs[name]
    assert tuple(actual.shape) == tuple(expected.shape)
    assert expected.stride is not None
    assert tuple(actual.stride()) == tuple(expected.stride)
    assert torch.equal(as_bytes(actual), as_bytes(expected.tensor))


@pytest.mark.parametrize("case", recorded(*SCALE_OPS))
def test_recorded_scales(case):
    actual = getattr(weights, case.op)(case.inputs["sf"])
    assert actual.dtype == case.outputs["out"].tensor.dtype
    assert_recorded(case, "out", actual)


@pytest.mark.parametrize("case", recorded("transform_weights_for_mega_moe"))
def test_recorded_weights(case):
    inputs = case.inputs
    if "l1" in inputs:
        l2 = torch.zeros(2, 32, 32, dtype=torch.bfloat16)
        l1_out, l2_out = weights.transform_weights_for_mega_moe(inputs["l1"], l2)
        assert_recorded(case, "l1_out", l1_out)
        assert l2_out is l2
        return
    l2_w = inputs.get("l2_w", torch.zeros(*inputs["l2_sf"].shape[:-1], 128, dtype=torch.int8))
    l1, l2 = weights.transform_weights_for_mega_moe(
        (inputs["l1_w"], inputs["l1_sf"]), (l2_w, inputs["l2_sf"])
    )
    for name, actual in (("l1_w_out", l1[0]), ("l1_sf_out", l1[1]), ("l2_sf_out", l2[1])):
        assert_recorded(case, name, actual)
    assert l2[0] is l2_w
    assert case.outputs["l2_w_out"].aliases == "l2_w" if "l2_w_out" in case.outputs else True
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    assert all(fresh.untyped_storage().data_ptr() not in storages for fresh in (l1[0], l1[1], l2[1]))


def test_recorded_cases_are_all_here():
    assert {case.op for case in BUNDLE.cases} == {*SCALE_OPS, "transform_weights_for_mega_moe"}


# ---- scales, transcribed in numpy


def powers_of_two(shape: tuple[int, ...], start: int = 1) -> torch.Tensor:
    """Position-coded: the exponent field runs through 1..254."""
    count = int(np.prod(shape))
    exponents = (torch.arange(count, dtype=torch.int32) * 7 + start) % 254 + 1
    return (exponents << 23).view(torch.float32).reshape(shape)


def words_of(scales: torch.Tensor) -> np.ndarray:
    """[.., mn, groups] -> int32 [.., mn, words], by shifts."""
    fields = (scales.contiguous().numpy().view(np.uint32) >> 23).astype(np.uint32)
    groups = fields.shape[-1]
    result = np.zeros((*fields.shape[:-1], -(-groups // 4)), np.uint32)
    for group in range(groups):
        result[..., group // 4] |= fields[..., group] << np.uint32(8 * (group % 4))
    return result.view(np.int32)


SHAPES = st.tuples(st.none() | st.integers(1, 3), st.integers(1, 140), st.integers(1, 13))
FORMS = st.sampled_from(["contiguous", "mn_major", "sliced", "reversed_batch"])


def lay_out(tensor: torch.Tensor, form: str) -> torch.Tensor:
    if form == "mn_major":
        return tensor.mT.contiguous().mT
    if form == "sliced":
        return torch.cat([tensor, tensor + 1], -1)[..., : tensor.shape[-1]]
    return tensor


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, form=FORMS, start=st.integers(0, 253))
def test_scale_layouts(shape, form, start):
    batch, mn, groups = shape
    logical = powers_of_two((mn, groups) if batch is None else (batch, mn, groups), start)
    scales = lay_out(logical, form)
    aligned = -(-mn // 4) * 4
    packed = weights.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    assert packed.dtype == torch.int32
    assert np.array_equal(packed.numpy(), words_of(logical))
    plain = weights.get_mn_major_tma_aligned_tensor(scales)
    assert torch.equal(plain.view(torch.int32), logical.view(torch.int32))
    for tensor, columns in ((packed, packed.shape[-1]), (plain, groups)):
        assert tensor.stride() == ((1, aligned) if batch is None else (aligned * columns, 1, aligned))
    assert weights.get_mn_major_tma_aligned_tensor(plain) is plain


def test_any_bits_survive_the_move():
    """fp32 scales are moved, not converted: NaN payloads, negative zero and subnormals stay."""
    bits = torch.tensor([[0x7F800001, -0x80000000, 1], [0x7FC12345, -1, 0x00400000]], dtype=torch.int32)
    moved = weights.get_mn_major_tma_aligned_tensor(bits.view(torch.float32))
    assert torch.equal(moved.view(torch.int32), bits)


def test_every_ue8m0_byte():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decoded = weights.ue8m0_uint8_to_float(codes)
    assert decoded[0] == 0.0
    assert torch.isinf(decoded[255])
    assert decoded[1:255].tolist() == [2.0 ** (code - 127) for code in range(1, 255)]
    assert torch.equal(weights.ue8m0_uint8_to_float(codes.view(torch.float8_e8m0fnu)), decoded)
    packed = weights.get_mn_major_tma_aligned_packed_ue8m0_tensor(decoded.reshape(64, 4))
    assert torch.equal(as_bytes(packed).flatten(), codes)
    with pytest.raises(TypeError, match="sf must be uint8"):
        weights.ue8m0_uint8_to_float(codes.to(torch.int32))


@pytest.mark.parametrize("value", [3.0, 1.0000001, -2.0, -0.0, 2.0**-127, float("nan"), float("-inf")])
def test_scales_that_are_no_powers_of_two(value):
    """Refused with row, group and value; nothing is written."""
    scales = torch.ones(2, 9, 5)
    scales[1, 7, 3] = value
    before = scales.clone()
    with pytest.raises(ValueError, match="batch 1, row 7, group 3") as refusal:
        weights.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    assert repr(float(scales[1, 7, 3])) in str(refusal.value)
    assert torch.equal(scales.view(torch.int32), before.view(torch.int32))
    with pytest.raises(ValueError, match=r"got .* at row 7, group 3; 1 of 45"):
        weights.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales[1])
    with pytest.raises(ValueError, match="row 7, group 3"):
        weights.transform_sf_into_required_layout(scales[1], 9, 160, (1, 32))


# ---- transform_sf_into_required_layout


@pytest.mark.parametrize("num_groups", [None, 1, 3])
@pytest.mark.parametrize(("mn", "k"), [(1, 128), (130, 7168), (256, 640), (6, 512)])
@pytest.mark.parametrize("gm", [1, 4, 128])
@pytest.mark.parametrize("gk", [32, 128])
@pytest.mark.parametrize("arch", [100, 120])
def test_sm100_scales(mn, k, gm, gk, num_groups, arch):
    shape = (-(-mn // gm), -(-k // gk))
    scales = powers_of_two(shape if num_groups is None else (num_groups, *shape))
    expected = words_of(scales)[..., np.arange(mn) // gm, :]
    actual = weights.transform_sf_into_required_layout(scales, mn, k, (gm, gk), num_groups, arch=arch)
    assert np.array_equal(actual.numpy(), expected)
    aligned, columns = -(-mn // 4) * 4, actual.shape[-1]
    assert actual.stride() == ((1, aligned) if num_groups is None else (aligned * columns, 1, aligned))
    three = (gm, 7, gk), (7, gm, gk)
    for recipe, is_sfa in zip(three, (True, False), strict=True):
        again = weights.transform_sf_into_required_layout(
            scales, mn, k, recipe, num_groups, is_sfa, arch=arch
        )
        assert torch.equal(again, actual)


@pytest.mark.parametrize(("arch", "disable"), [(90, False), (90, True), (100, True), (120, True)])
def test_fp32_scales(arch, disable):
    scales = torch.arange(130 * 5, dtype=torch.float32).reshape(130, 5) + 0.3
    actual = weights.transform_sf_into_required_layout(
        scales, 130, 640, (1, 128), disable_ue8m0_cast=disable, arch=arch
    )
    assert torch.equal(actual, scales)
    assert actual.stride() == (1, 132)
    blocks = scales[:2]
    for given_blocks in (blocks, blocks.mT.contiguous().mT):
        call = given_blocks, 130, 640, (128, 128)
        kept = weights.transform_sf_into_required_layout(*call, disable_ue8m0_cast=disable, arch=arch)
        assert kept is given_blocks
    with pytest.raises(ValueError, match="contiguous or MN-major"):
        weights.transform_sf_into_required_layout(
            torch.cat([blocks, blocks], 1)[:, :5], 130, 640, (128, 128), disable_ue8m0_cast=disable, arch=arch
        )


def test_words_are_checked_and_kept():
    words = weights.get_mn_major_tma_aligned_packed_ue8m0_tensor(powers_of_two((2, 130, 20)))
    call = {"mn": 130, "k": 640, "recipe": (1, 32), "num_groups": 2}
    assert weights.transform_sf_into_required_layout(words, **call) is words
    for wrong in (words.contiguous(), torch.empty_strided((2, 130, 5), (655, 1, 131), dtype=torch.int32)):
        with pytest.raises(ValueError, match="MN-major with aligned columns"):
            weights.transform_sf_into_required_layout(wrong, **call)
    with pytest.raises(ValueError, match="no layout for int32 scales"):
        weights.transform_sf_into_required_layout(words, **call, arch=90)


@pytest.mark.parametrize(
    ("shape", "dtype", "kwargs", "message"),
    [
        ((64, 4), torch.float32, {"recipe": (1, 32), "arch": 90}, "no layout for float32"),
        ((64, 8), torch.float32, {"recipe": (1, 16)}, "no layout for float32"),
        ((64, 4), torch.float32, {"recipe": (1, 32), "disable_ue8m0_cast": True}, "with disable_ue8m0_cast"),
        ((64, 1), torch.int32, {"recipe": (4, 32)}, "sf must be"),
        ((63, 4), torch.float32, {"recipe": (1, 32)}, r"sf must be \(64, 4\)"),
        ((64, 5), torch.float32, {"recipe": (1, 32)}, r"sf must be \(64, 4\)"),
        ((1, 64, 4), torch.float32, {"recipe": (1, 32)}, "2 dimensions"),
        ((64, 4), torch.float32, {"recipe": (1, 32), "num_groups": 1}, "3 dimensions"),
        ((2, 64, 4), torch.float32, {"recipe": (1, 32), "num_groups": 1}, r"sf must be \(1, 64, 4\)"),
        ((64, 4), torch.float32, {"recipe": (1, 1, 32)}, "is_sfa"),
        ((64, 4), torch.float32, {"recipe": (1, 32), "is_sfa": True}, "is_sfa"),
        ((64, 4), torch.float32, {"recipe": (1, 32), "arch": 80}, "arch must be"),
    ],
)
def test_refused_recipes(shape, dtype, kwargs, message):
    with pytest.raises(ValueError, match=message):
        weights.transform_sf_into_required_layout(torch.ones(shape, dtype=dtype), 64, 128, **kwargs)


def test_refused_dtypes():
    for function in (
        weights.get_mn_major_tma_aligned_tensor,
        weights.get_mn_major_tma_aligned_packed_ue8m0_tensor,
    ):
        with pytest.raises(TypeError, match="sf must be float32"):
            function(torch.ones(4, 4, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="2 or 3 dimensions"):
            function(torch.ones(4))
        with pytest.raises(ValueError, match="must not be empty"):
            function(torch.ones(0, 4))


# ---- weights


def rows_of(half: int, even_odd: bool) -> list[int]:
    """Source row of every destination row, block by block."""
    order = []
    if not even_odd:
        for first in range(0, half, 8):
            order += [*range(first, first + 8), *range(half + first, half + first + 8)]
        return order
    for first, parity in itertools.product(range(0, half, 16), (0, 1)):
        run = range(first + parity, first + 16, 2)
        order += [*run, *(half + row for row in run)]
    return order


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("experts", [None, 1, 3])
@pytest.mark.parametrize("mma_type", sorted(weights.ACTIVATIONS))
def test_interleaving(mma_type, experts, dtype):
    half = 48
    shape = (2 * half, 5) if experts is None else (experts, 2 * half, 5)
    count = int(np.prod(shape))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    source = (torch.arange(count) % 251).to(carrier).reshape(shape).view(dtype)
    actual = weights.interleave_gate_up(source, mma_type)
    order = rows_of(half, mma_type in ("mxf4xmxf4", "nvfp4xnvfp4"))
    assert torch.equal(actual.view(carrier), source.view(carrier)[..., order, :])
    assert actual.stride() == source.stride()
    assert actual.dtype == dtype


def test_strides_of_scale_words_are_kept():
    words = torch.arange(3 * 256 * 2, dtype=torch.int32).reshape(3, 2, 256).mT
    for moved in (weights.transpose_sf_for_utccp(words), weights.interleave_gate_up(words)):
        assert moved.stride() == words.stride() == (512, 1, 256)
    rows = [128 * block + 32 * j + i for block in (0, 1) for i in range(32) for j in range(4)]
    assert torch.equal(weights.transpose_sf_for_utccp(words), words[:, rows])


@pytest.mark.parametrize("mma_type", ["fp8xfp4", "nvfp4", "mxf4xmxf4"])
def test_l1_scales_follow_their_weights(mma_type):
    """Every weight row finds its own scale word behind the UTCCP permutation."""
    half, experts = 128, 2
    number = torch.arange(experts * 2 * half, dtype=torch.int32).reshape(experts, 2 * half, 1)
    l1, l2 = weights.transform_weights_for_mega_moe(
        (number.view(torch.int8).clone(), number.clone()),
        (torch.zeros(experts, 128, 4, dtype=torch.int8), torch.zeros(experts, 128, 1, dtype=torch.int32)),
        mma_type=mma_type,
    )
    rows = torch.arange(2 * half)
    scale_row = rows // 128 * 128 + rows % 32 * 4 + rows % 128 // 32
    assert torch.equal(l1[0].view(torch.int32), l1[1][:, scale_row])
    assert torch.equal(l2[1], torch.zeros_like(l2[1]))


@settings(max_examples=20, deadline=None)
@given(swap=st.permutations(range(4)), seed=st.integers(0, 2**31))
def test_migration_commutes(swap, seed):
    """CASES 21: transforming permuted experts equals permuting transformed experts."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int64)

    pairs = [
        (random(4, 256, 16).to(torch.int8), random(4, 256, 1).to(torch.int32)),
        (random(4, 128, 32).to(torch.int8), random(4, 128, 2).to(torch.int32)),
    ]
    swap = torch.tensor(swap)
    after = weights.transform_weights_for_mega_moe(*[tuple(part[swap] for part in pair) for pair in pairs])
    before = weights.transform_weights_for_mega_moe(*pairs)
    for one, other in zip(after, before, strict=True):
        for moved, kept in zip(one, other, strict=True):
            assert torch.equal(moved, kept[swap])


def test_sm90_weights():
    l1 = (torch.arange(2 * 256 * 128).to(torch.uint8).reshape(2, 256, 128).view(torch.float8_e4m3fn),)
    l1 = (l1[0], torch.rand(2, 2, 1))
    l2 = (torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn), torch.rand(2, 1, 1))
    (weight, scales), kept = weights.transform_weights_for_mega_moe_sm90(l1, l2)
    assert scales is l1[1]
    assert kept is l2
    assert torch.equal(weight.view(torch.uint8), l1[0].view(torch.uint8)[:, rows_of(128, False)])
    with pytest.raises(TypeError, match=r"l1_weights\[0\] must be float8_e4m3fn"):
        weights.transform_weights_for_mega_moe_sm90((l1[0].view(torch.uint8), l1[1]), l2)


def pair(rows: int, dtype=torch.int8, words: int | None = None):
    return torch.zeros(rows, 64, dtype=dtype), torch.zeros(words or rows, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("l1", "l2", "kwargs", "error", "message"),
    [
        (pair(256), pair(128), {"activation": "relu"}, ValueError, "activation must be one of"),
        (pair(256), pair(128), {"activation": "swigluoai"}, ValueError, "activation must be one of"),
        (pair(256), pair(128), {"mma_type": "fp6"}, ValueError, "mma_type must be one of"),
        (pair(256), pair(128)[0], {}, TypeError, "must both be"),
        (pair(128), pair(64), {}, ValueError, "multiple of 128"),
        (pair(256, words=128), pair(128), {}, ValueError, "l1_weights: scales must have the rows"),
        (pair(256), (pair(128)[0], torch.zeros(128, 1)), {}, TypeError, r"l2_weights\[1\] must be int32"),
        (pair(24)[0], pair(128)[0], {}, ValueError, "multiple of 16"),
        (pair(32)[0], pair(128)[0], {"activation": "situ"}, ValueError, "scaled weights"),
    ],
)
def test_refused_weights(l1, l2, kwargs, error, message):
    with pytest.raises(error, match=message):
        weights.transform_weights_for_mega_moe(l1, l2, **kwargs)


def test_nvfp4_scale_words():
    codes = torch.arange(8 * 8, dtype=torch.int32).to(torch.uint8).reshape(8, 8)
    words = weights.pack_e4m3_scales(codes.view(torch.float8_e4m3fn))
    assert words.stride() == (1, 8)
    assert torch.equal(words, codes.view(torch.int32))
    values = torch.tensor([[0.0, 1.0, 448.0, 1e9]] * 4)
    rounded = weights.transform_ue4m3_sf_into_required_layout(values, 4)
    assert rounded[0].tolist() == [0x7E7E3800]
    with pytest.raises(ValueError, match="multiples of 4"):
        weights.pack_e4m3_scales(codes[:6])
