"""Scale and weight layouts: the recorded cases, the maps written down in NumPy, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamoe import layouts
from megamoe.bundle import Case, read_bundle

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "layouts.safetensors"
CASES = read_bundle(GOLDENS).cases


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype.itemsize == expected.dtype.itemsize
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert torch.equal(actual.view(integers), expected.view(integers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.case)
def test_recorded_layouts(case: Case) -> None:
    given, wanted = case.inputs, {name: output.tensor for name, output in case.outputs.items()}
    if "sf" in given:
        same(getattr(layouts, case.op)(given["sf"]), wanted["out"])
    elif "l1" in given:
        l2 = torch.zeros(2, 32, 32, dtype=torch.bfloat16)
        first, second = layouts.transform_weights_for_mega_moe(given["l1"], l2)
        same(first, wanted["l1_out"])
        assert second is l2
    else:
        l2_weight = given.get("l2_w", torch.zeros(given["l2_sf"].shape[0], 4).to(given["l1_w"].dtype))
        (l1_weight, l1_scale), (same_l2, l2_scale) = layouts.transform_weights_for_mega_moe(
            (given["l1_w"], given["l1_sf"]), (l2_weight, given["l2_sf"])
        )
        same(l1_weight, wanted["l1_w_out"])
        same(l1_scale, wanted["l1_sf_out"])
        same(l2_scale, wanted["l2_sf_out"])
        assert same_l2 is l2_weight


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    """Powers of two, every exponent field among them, zero and infinity included."""
    exponents = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.int64)
    exponents = np.where(exponents == 255, 1, exponents)
    return torch.from_numpy((exponents.astype(np.int32) << 23).view(np.float32))


FORMS = {
    "rows": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT,
    "slice": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 4, 5, 9])
@pytest.mark.parametrize("rows", [1, 6, 130])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
def test_mn_major(batch: tuple[int, ...], rows: int, groups: int, form: str) -> None:
    sf = FORMS[form](scales(*batch, rows, groups))
    aligned = -(-rows // 4) * 4
    moved = layouts.get_mn_major_tma_aligned_tensor(sf)
    assert torch.equal(moved.view(torch.int32), sf.view(torch.int32))
    assert moved.stride() == (*([aligned * groups] if batch else []), 1, aligned)
    packed = layouts.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    words = -(-groups // 4)
    assert packed.shape == (*batch, rows, words)
    assert packed.stride() == (*([aligned * words] if batch else []), 1, aligned)
    exponents = (sf.contiguous().view(torch.int32) >> 23).numpy()
    padded = np.pad(exponents, [(0, 0)] * (exponents.ndim - 1) + [(0, words * 4 - groups)])
    expected = padded.astype(np.uint8).view(np.int32)
    np.testing.assert_array_equal(packed.contiguous().numpy(), expected)
    storage = torch.tensor([], dtype=torch.int32).set_(packed.untyped_storage())
    assert int((storage != 0).sum()) == int((expected != 0).sum())  # alignment rows are zero


def test_an_mn_major_input_is_returned_itself() -> None:
    sf = layouts.get_mn_major_tma_aligned_tensor(scales(2, 130, 7))
    assert layouts.get_mn_major_tma_aligned_tensor(sf) is sf


def source_row(row: int, half: int, order: str, utccp: bool) -> int:
    if utccp:
        block, inside = divmod(row, 128)
        row = 128 * block + 32 * (inside % 4) + inside // 4
    if order == "8":
        return (row // 8 % 2) * half + row // 16 * 8 + row % 8
    if order == "16":
        block, q = divmod(row, 32)
        return (q % 16 // 8) * half + 16 * block + 2 * (q % 8) + q // 16
    return row


@pytest.mark.parametrize("mma_type", ["fp8xfp4", "nvfp4xnvfp4"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("inter", [64, 192])
def test_weight_rows(inter: int, batch: tuple[int, ...], mma_type: str) -> None:
    rng = np.random.default_rng(inter)

    def pair(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.from_numpy(rng.integers(-128, 128, (*batch, rows, columns // 2), dtype=np.int8))
        words = torch.from_numpy(
            rng.integers(0, 1 << 31, (*batch, -(-columns // 128), rows)).astype(np.int32)
        )
        return weight, words.mT

    l1, l2 = pair(2 * inter, 384), pair(384, inter)
    first, second = layouts.transform_weights_for_mega_moe(l1, l2, mma_type=mma_type)
    order = "8" if mma_type == "fp8xfp4" else "16"
    rows = range(2 * inter)
    weight_rows = [source_row(r, inter, order, False) for r in rows]
    scale_rows = [source_row(r, inter, order, True) for r in rows]
    assert torch.equal(first[0], l1[0][..., weight_rows, :])
    assert torch.equal(first[1], l1[1][..., scale_rows, :])
    assert first[1].stride() == l1[1].stride()
    assert torch.equal(second[1], l2[1][..., [source_row(r, 0, "none", True) for r in range(384)], :])
    assert second[0] is l2[0]
    assert first[0].data_ptr() != l1[0].data_ptr()


def test_sm90_moves_only_the_first_weight() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2 * 256 * 128 // 256).reshape(2, 256, 128)
    l1 = (codes.view(torch.float8_e4m3fn), torch.rand(2, 2, 1))
    l2 = (codes[:, :128].contiguous().view(torch.float8_e4m3fn), torch.rand(2, 1, 1))
    (weight, scale), second = layouts.transform_weights_for_mega_moe_sm90(l1, l2)
    rows = [source_row(r, 128, "8", False) for r in range(256)]
    assert torch.equal(weight.view(torch.uint8), codes[:, rows])
    assert scale is l1[1]
    assert second[0] is l2[0]
    assert second[1] is l2[1]


@pytest.mark.parametrize("recipe", [(1, 32), (4, 32), (128, 128)])
def test_required_layout_on_sm100_repeats_rows_and_packs(recipe: tuple[int, int]) -> None:
    gm, gk = recipe
    sf = scales(2, -(-130 // gm), -(-640 // gk))
    result = layouts.transform_sf_into_required_layout(sf, 130, 640, recipe, 2)
    repeated = sf.repeat_interleave(gm, 1)[:, :130]
    assert torch.equal(result, layouts.get_mn_major_tma_aligned_packed_ue8m0_tensor(repeated))
    assert layouts.transform_sf_into_required_layout(result, 130, 640, (1, gk), 2) is result


def test_required_layout_on_sm90() -> None:
    sf = torch.rand(130, 5)
    moved = layouts.transform_sf_into_required_layout(sf, 130, 640, (1, 128), arch=90)
    assert torch.equal(moved, sf)
    assert moved.stride() == (1, 132)
    blocks = torch.rand(2, 5)
    assert layouts.transform_sf_into_required_layout(blocks, 130, 640, (128, 128), arch=90) is blocks
    operand = layouts.transform_sf_into_required_layout(sf, 130, 640, (1, 128, 128), is_sfa=True, arch=90)
    assert operand.stride() == (1, 132)


def test_ue8m0_bytes_by_the_shift() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = layouts.ue8m0_uint8_to_float(codes.reshape(16, 16).t())
    expected = (codes.int() << 23).view(torch.float32).reshape(16, 16).t()
    assert torch.equal(values, expected)
    assert values[0, 0] == 0
    assert torch.isinf(values[15, 15])
    assert torch.equal(
        layouts.ue8m0_uint8_to_float(codes.view(torch.float8_e8m0fnu)), expected.t().reshape(-1)
    )


FP4 = (torch.zeros(128, 64, dtype=torch.int8), torch.zeros(128, 1, dtype=torch.int32))
BF16 = torch.zeros(128, 64, dtype=torch.bfloat16)
SF = "transform_sf_into_required_layout"
WEIGHTS, WEIGHTS_SM90 = "transform_weights_for_mega_moe", "transform_weights_for_mega_moe_sm90"
PACKED = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
REFUSALS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "bytes-dtype": ("ue8m0_uint8_to_float", (torch.zeros(4),), {}, TypeError, "sf"),
    "mn-dtype": ("get_mn_major_tma_aligned_tensor", (torch.zeros(4, 4).half(),), {}, TypeError, "sf"),
    "mn-ndim": ("get_mn_major_tma_aligned_tensor", (torch.zeros(4),), {}, ValueError, "sf"),
    "pack-value": (PACKED, (torch.tensor([[1.0, 2], [4, 3]]),), {}, ValueError, "3.0 at row 1, group 1"),
    "pack-sign": (
        PACKED,
        (torch.tensor([[[1.0], [-2.0]]]),),
        {},
        ValueError,
        "-2.0 at batch 0, row 1, group 0",
    ),
    "sf-shape": (SF, (torch.ones(4, 4), 4, 128, (1, 128)), {}, ValueError, "sf"),
    "sf-arch": (SF, (torch.ones(4, 1), 4, 128, (1, 128)), {"arch": 80}, ValueError, "arch"),
    "sf-groups": (SF, (torch.ones(2, 4, 1), 4, 128, (1, 128), 3), {}, ValueError, "sf"),
    "sf-recipe": (SF, (torch.ones(4, 8), 4, 128, (1, 16)), {}, ValueError, "recipe"),
    "sf-recipe-length": (SF, (torch.ones(4, 1), 4, 128, (1, 1, 128)), {}, ValueError, "recipe"),
    "sf-words-rows": (SF, (torch.ones(4, 2, dtype=torch.int32), 4, 256, (1, 32)), {}, ValueError, "MN-major"),
    "w-activation": (WEIGHTS, (FP4, FP4), {"activation": "gelu"}, ValueError, "activation"),
    "w-type": (WEIGHTS, (FP4, FP4), {"mma_type": "int8"}, ValueError, "mma_type"),
    "w-mixed": (WEIGHTS, (FP4, BF16), {}, TypeError, "l2_weights"),
    "w-mixed-bf16": (WEIGHTS, (BF16, FP4), {}, TypeError, "l2_weights"),
    "w-situ-bf16": (WEIGHTS, (BF16, BF16), {"activation": "situ"}, ValueError, "activation"),
    "w-rows": (WEIGHTS, (BF16[:120], BF16), {}, ValueError, "l1_weights"),
    "w-scale-rows": (WEIGHTS, ((FP4[0], FP4[1][:64]), FP4), {}, ValueError, "l1_weights"),
    "w-scale-dtype": (WEIGHTS, ((FP4[0], FP4[1].float()), FP4), {}, TypeError, "l1_weights"),
    "w90-pair": (WEIGHTS_SM90, (BF16, BF16), {}, TypeError, "l1_weights"),
    "w90-dtype": (WEIGHTS_SM90, (FP4, FP4), {}, TypeError, "l1_weights"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_argument(case: str) -> None:
    function, args, kwargs, error, names = REFUSALS[case]
    with pytest.raises(error, match="expected") as caught:
        getattr(layouts, function)(*args, **kwargs)
    assert names in str(caught.value)
