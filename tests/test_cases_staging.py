"""CASES 1 to 12, 15, 16, 18 and 22 to 27: inputs on which real implementations went wrong, with the right
values.

Each is asked of the reference and of every implementation that runs here, through the operation that a user
calls.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megamoe.suite.operation import Case, load
from megamoe.suite.pytest_plugin import run_device, skip
from megamoe.suite.runner import execute, why_skipped
from megamoe.suite.table import select_implementations, table
from reference.formats import FORMATS, decode


def pytest_generate_tests(metafunc):
    """``implementation`` ranges over the names that any staging row has."""
    if "implementation" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--impl")
        names = ["reference", "triton"] if chosen is None else [chosen]
        metafunc.parametrize("implementation", names)


@pytest.fixture
def run(implementation, request):
    """Calls an operation with the given inputs and parameters; its outputs by name, on the CPU."""

    def call(operation, inputs, **params):
        row = table()[operation]
        hidden = inputs.get("hidden_states")
        if hidden is not None:
            params = {"tokens": hidden.shape[0], "hidden": hidden.shape[1]} | params
            inputs = _with_routing(inputs)
        params = row.defaults | params
        device = "cpu" if implementation == "reference" else run_device(request.config)
        (found,) = select_implementations(row, implementation, device)
        reason = why_skipped(found, device)
        if reason is not None:
            skip(reason)
        made = row.call(params, inputs)
        outputs = execute(made, load(found.target), Case(row, params).seed, device)
        return {name: seen.tensor.cpu() for name, seen in outputs.items()}

    return call


def _with_routing(inputs):
    tokens = inputs["hidden_states"].shape[0]
    routing = {"topk_ids": torch.zeros(tokens, 2, dtype=torch.int64), "topk_weights": torch.ones(tokens, 2)}
    if inputs.keys() & {"norm_weight"}:
        return inputs
    return routing | inputs


def _row(values, hidden=128, dtype=torch.float32):
    """One token that starts with these values, zeros after."""
    row = torch.zeros(1, hidden, dtype=dtype)
    row[0, : len(values)] = torch.tensor(values, dtype=torch.float64).to(dtype)
    return row


def _groups(rows, group=32, hidden=128, dtype=torch.float32):
    """One token whose groups start with these values."""
    made = torch.zeros(1, hidden, dtype=dtype)
    for index, values in enumerate(rows):
        made[0, index * group : index * group + len(values)] = torch.tensor(values, dtype=torch.float64).to(
            dtype
        )
    return made


def _fp8(run, hidden, recipe="fp8_ue8m0_g32", **params):
    found = run("prepare_megamoe_inputs", {"hidden_states": hidden}, recipe=recipe, **params)
    return found["x"].view(torch.uint8), found["x_sf"]


def _scale_bytes(words):
    return words.contiguous().view(torch.uint8)


def _decoded(codes, fmt="e4m3fn"):
    return decode(codes, FORMATS[fmt])


def test_01_payload_is_divided_by_the_rounded_scale(run):
    codes, words = _fp8(run, _row([300.0, -150.0, 10.0]))
    assert _scale_bytes(words)[0, 0] == 127
    assert _decoded(codes)[0, :3].tolist() == [288.0, -144.0, 10.0]


def test_02_exponent_of_a_scale_is_its_ceiling(run):
    """448 * 2^k and its neighbours by one and two ulps, of float32 and of bfloat16."""
    maxima, exponents = [], []
    for k in (*range(-21, 110, 7), -1, 0, 1):
        top = np.float32(448 * 2.0**k)
        bits = int(top.view(np.int32))
        for step in (-(2 << 16), -(1 << 16), -2, -1, 0, 1, 2, 1 << 16, 2 << 16):
            maxima.append(np.int32(bits + step).view(np.float32))
            exponents.append(127 + k + (step > 0))
    for start in range(0, len(maxima), 4):
        hidden = _groups([[float(value)] for value in maxima[start : start + 4]])
        _, words = _fp8(run, hidden)
        wanted = exponents[start : start + 4]
        assert _scale_bytes(words)[0, : len(wanted)].tolist() == wanted
    _, words = _fp8(run, _groups([[448 * 2.0**-10 * (1 + 2.0**-23)], [448.0], [224.0]]))
    assert _scale_bytes(words)[0, :3].tolist() == [127 - 9, 127, 126]


def test_03_floor_of_a_group_maximum(run):
    above = float(np.nextafter(np.float32(1e-4), np.float32(1)))
    codes, words = _fp8(run, _groups([[0.0], [1e-10], [1e-8], [1e-4]]))
    assert _scale_bytes(words)[0].tolist() == [105] * 4
    scaled = torch.tensor([0.0, 1e-10, 1e-8, 1e-4]) * 2.0**22
    assert torch.allclose(_decoded(codes[0, ::32]), scaled, rtol=1 / 16, atol=2.0**-10)
    assert codes[0, 32] == 0
    _, words = _fp8(run, _groups([[above], [448 * 2.0**-22], [448 * 2.0**-22 * (1 + 2.0**-23)]]))
    assert _scale_bytes(words)[0, :3].tolist() == [105, 105, 106]


@pytest.mark.parametrize(("raw", "exponent"), [(0.75, 127), (1.25, 128), (1.5, 128), (3.0, 129), (6.0, 130)])
def test_04_scales_round_up(run, raw, exponent):
    _, words = _fp8(run, _row([raw * 448]))
    assert _scale_bytes(words)[0, 0] == exponent


def test_05_infinity(run):
    codes, words = _fp8(run, _groups([[math.inf, 1.0], [-math.inf], [1.0]]))
    assert _scale_bytes(words)[0, :3].tolist() == [0xFE, 0xFE, 127 - 8]
    assert codes[0, :2].tolist() == [0x7E, 0x00]
    assert codes[0, 32] == 0xFE


def test_05_ends_of_ue8m0():
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    values = decode(codes, FORMATS["ue8m0"])
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert values[4].isnan()


def test_06_maximum_is_not_clipped(run):
    codes, words = _fp8(run, _row([959.5632, 957.0]))
    assert _scale_bytes(words)[0, 0] == 129
    assert (_decoded(codes)[0, :2] * 4).tolist() == [960.0, 960.0]


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_07_every_fp32_scale_has_a_column_of_its_own(run, group):
    maxima = torch.arange(1, 256 // group + 1, dtype=torch.float32)
    hidden = maxima.repeat_interleave(group).unsqueeze(0) * torch.tensor([[1.0], [100.0]])
    _, scales = _fp8(run, hidden, f"fp8_fp32_g{group}")
    reciprocal = torch.tensor(1 / 448, dtype=torch.float32)
    assert torch.equal(scales, torch.stack([maxima, maxima * 100]) * reciprocal)


def test_08_overflow_saturates_and_nan_stays(run):
    """Through a group whose scale is one: nothing may exceed 448, so overflow comes only with infinity."""
    codes, _ = _fp8(run, _groups([[448.0, math.nan, -448.0], [math.inf, math.nan]]))
    assert codes[0, :3].tolist() == [0x7E, 0x7F, 0xFE]
    assert codes[0, 32:34].tolist() == [0x7E, 0x7F]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (126.2386, 128.0),
        (31.6051, 32.0),
        (1.97, 2.0),
        (1.0625, 1.0),
        (-0.0, -0.0),
        (2.0**-10, 0.0),
        (2.0**-9 * 1.5, 2.0**-8),
    ],
)
def test_09_conversion_rounds_to_nearest_even(run, value, rounded):
    codes, words = _fp8(run, _row([448.0, value]))
    assert _scale_bytes(words)[0, 0] == 127
    found = _decoded(codes)[0, 1]
    assert found == rounded
    assert math.copysign(1, found) == math.copysign(1, rounded)


def test_10_exact_quotients_on_midpoints(run):
    """4.6875 / 0.9375 is 5 exactly, a tie of E2M1; the next float32 above it rounds the other way."""
    hidden = torch.zeros(1, 128)
    hidden[0, 0], hidden[0, 16], hidden[0, 17] = 2688.0, 6 * 0.9375, 4.6875
    found = run("prepare_megamoe_nvfp4_inputs", {"hidden_states": hidden})
    assert found["x_scales"].item() == 1.0
    assert _decoded(_scale_bytes(found["x_sf"])[0, 1], "e4m3fn") == 0.9375
    assert found["x"][0, 8].item() == 0x67  # 6, then the tie 5 to even: 4


def test_11_division_is_a_division(run):
    """Scale byte 0x07: 0.0239257794 / s rounds to 1.75's side below; times 1/s it becomes the tie and rounds
    up."""
    value = float(np.float32(0.0239257794))
    scale = float(_decoded(torch.tensor([0x07], dtype=torch.uint8))[0])
    hidden = torch.zeros(1, 128)
    hidden[0, 0], hidden[0, 16], hidden[0, 17] = 2688.0, 6 * scale, value
    found = run("prepare_megamoe_nvfp4_inputs", {"hidden_states": hidden})
    assert _scale_bytes(found["x_sf"])[0, 1] == 0x07
    assert _decoded(found["x"][0, 8] >> 4, "e2m1") == 1.5


def test_11_fp32_scales_are_products(run):
    """amax * fl(1/448), which differs from amax / 448 for about half of all bfloat16 values."""
    amax = (torch.arange(0x3F80, 0x4080, dtype=torch.int32) << 16).view(torch.float32)
    hidden = torch.zeros(2, 128 * 128)
    hidden[:, ::128] = amax.view(2, 128)
    _, scales = _fp8(run, hidden, "fp8_fp32_g128")
    product = amax * torch.tensor(1 / 448, dtype=torch.float32)
    assert torch.equal(scales.reshape(-1), product)
    assert (product != amax / torch.tensor(448.0)).float().mean() > 0.3


def test_12_e2m1_ties_and_signs(run):
    values = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.1, -0.0, -6.0, 1.0, 6.0]
    found = run("prepare_megamoe_nvfp4_block_inputs", {"hidden_states": _row(values)})
    packed = found["x"][0]
    codes = torch.stack([packed & 0xF, packed >> 4], dim=1).reshape(-1)[: len(values)]
    assert _decoded(codes, "e2m1").tolist() == [
        6.0,
        0.0,
        1.0,
        1.0,
        2.0,
        2.0,
        4.0,
        4.0,
        0.0,
        0.0,
        0.0,
        -6.0,
        1.0,
        6.0,
    ]
    assert codes[8:11].tolist() == [0, 0, 0]  # never code 8
    assert packed[6] == 0x72  # (1, 6), the even column in the low nibble


@pytest.mark.parametrize("operation", ["prepare_megamoe_nvfp4_inputs", "prepare_megamoe_nvfp4_block_inputs"])
def test_15_zero_rows_have_finite_scales(run, operation):
    found = run(operation, {"hidden_states": torch.zeros(2, 128)})
    scales = found["x_sf"].contiguous().view(torch.uint8)
    assert (scales == 0x01).all()  # 2^-9
    assert (found["x"] == 0).all()
    if "x_scales" in found:
        expected = torch.tensor(1e-12) * torch.tensor(1 / 2688, dtype=torch.float32)
        assert torch.equal(found["x_scales"], expected.expand(2))


def test_15_block_scales_stay_within_e4m3(run):
    found = run(
        "prepare_megamoe_nvfp4_block_inputs",
        {"hidden_states": _groups([[3e38], [1e-30], [math.inf]], group=16)},
    )
    assert found["x_sf"][0, :3].tolist() == [0x7E, 0x01, 0x7E]


def test_16_scale_rows_are_as_wide_as_the_buffer_says(run):
    """H = 2304: 72 bytes of scales a token, in rows that are wider."""
    hidden = (2.0 ** (torch.arange(2 * 72).view(2, 72) % 100)).repeat_interleave(32, 1)
    _, dense = _fp8(run, hidden)
    found = run("prepare_megamoe_inputs", {"hidden_states": hidden}, strides="rows")
    assert torch.equal(found["x_sf"], dense)
    # ceil(log2(2^k / 448)) = k - 8
    assert torch.equal(_scale_bytes(found["x_sf"])[1].int(), (72 + torch.arange(72)) % 100 + 127 - 8)


PAGE_ROWS = {
    8: {100: 1552, 192: 3072},
    16: {16: 128, 32: 256, 100: 784},
    32: {16: 64, 32: 128, 100: 400},
    64: {16: 64, 32: 1, 100: 145},
    96: {100: 144, 192: 256},
    128: {100: 19, 192: 130},
    192: {100: 19, 192: 256},
}
REQUIRED_ROWS = {16: 1664, 32: 896, 64: 512, 96: 384, 128: 256, 192: 512}


@pytest.mark.parametrize("block_m", PAGE_ROWS)
def test_18_rows_of_shared_pages(run, block_m):
    hidden = (2.0 ** (torch.arange(200) % 100)).view(200, 1).expand(200, 128).contiguous()
    found = run("prepare_megamoe_inputs", {"hidden_states": hidden}, shared_block_m=block_m, fill_byte=0x03)
    pages = found["shared_x_sf"][:, 0]
    for token, row in PAGE_ROWS[block_m].items():
        assert pages[row] == found["x_sf"][token, 0], (token, row)
    untouched = pages == 0x03030303  # below every scale that staging writes
    assert int((~untouched).sum()) == 200
    if block_m in REQUIRED_ROWS:
        assert pages.shape[0] == REQUIRED_ROWS[block_m] + 4  # the row adds four, which must stay as they were


def _map(ids, load, expert_map, counts, *, record=True, unpadded=None):
    inputs = {
        "topk_ids": torch.tensor(ids),
        "expert_load": torch.tensor(load, dtype=torch.int32),
        "logical_to_physical_map": torch.tensor(expert_map),
        "logical_replica_count": torch.tensor(counts),
    }
    return inputs, {"record": record, "num_unpadded_tokens": unpadded}


def test_22_padded_tokens_are_not_load(run):
    ids = [[2, 3], [2, 1], [3, 2]] + [[0, 1]] * 5
    inputs, params = _map(ids, [0] * 4, [[0], [1], [2], [3]], [1] * 4, unpadded=3)
    found = run("eplb_map_to_physical_and_record", inputs, **params)
    assert found["expert_load"].tolist() == [0, 1, 3, 2]
    assert found["physical_ids"].tolist() == ids  # mapped all the same
    inputs, params = _map(ids, [0] * 4, [[0], [1], [2], [3]], [1] * 4)
    assert run("eplb_map_to_physical_and_record", inputs, **params)["expert_load"].tolist() == [5, 6, 3, 2]


def test_23_replica_hash_is_unsigned_32_bits(run):
    inputs, params = _map([[0]] * 8, [0] * 3, [[0, 1, 2]], [3])
    found = run("eplb_map_to_physical_and_record", inputs, **params)
    assert found["physical_ids"].flatten().tolist() == [0, 0, 2, 2, 1, 0, 0, 2]


@pytest.mark.parametrize(
    "operation",
    [
        "prepare_megamoe_inputs",
        "prepare_megamoe_nvfp4_inputs",
        "prepare_megamoe_nvfp4_block_inputs",
        "prepare_megamoe_bf16_inputs",
    ],
)
def test_24_padding_rows_get_the_sentinel(run, operation):
    padding = torch.tensor([False, True, False])
    inputs = {
        "hidden_states": torch.ones(3, 128, dtype=torch.bfloat16),
        "topk_ids": torch.tensor([[4, 5], [6, 7], [-1, 2]]),
        "topk_weights": torch.tensor([[0.25, 0.5], [math.nan, math.inf], [1.0, 2.0]]),
        "is_padding": padding,
    }
    found = run(operation, inputs)
    assert found["topk_idx_out"].tolist() == [[4, 5], [-1, -1], [-1, 2]]
    assert found["topk_weights_out"].tolist() == [[0.25, 0.5], [0.0, 0.0], [1.0, 2.0]]
    assert not torch.signbit(found["topk_weights_out"]).any()


def test_24_no_tokens_write_the_alphas_all_the_same(run):
    inputs = {"hidden_states": torch.zeros(0, 128), "w2_global_scale": torch.tensor([1.0, 3.0, 0.1])}
    found = run("prepare_megamoe_nvfp4_inputs", inputs, l2_activation_scale=0.37)
    expected = torch.tensor([1.0, 3.0, 0.1]) * torch.tensor(0.37)
    assert torch.equal(found["l2_alpha"], expected)


def test_25_routing_is_repacked_as_it_is(run):
    """Duplicates, ids out of range and NaN weights of live tokens are the router's affair: nothing repairs
    them."""
    inputs = {
        "hidden_states": torch.zeros(2, 128),
        "topk_ids": torch.tensor([[0, 0, 0], [-7, 2**31, 2**40]]),
        "topk_weights": torch.tensor([[math.nan, 1.0, -0.0], [1e-40, math.inf, 2.0]]),
    }
    found = run("prepare_megamoe_inputs", inputs)
    assert torch.equal(found["topk_idx_out"], inputs["topk_ids"])
    assert torch.equal(found["topk_weights_out"].view(torch.int32), inputs["topk_weights"].view(torch.int32))


@pytest.mark.parametrize("operation", ["prepare_megamoe_inputs", "prepare_megamoe_nvfp4_inputs",
                                       "prepare_megamoe_nvfp4_block_inputs"])  # fmt: skip
def test_26_garbage_in_padding_changes_no_live_byte(run, operation):
    padding = torch.arange(8) >= 5
    live = torch.randn(8, 384, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(26))
    seen = []
    for garbage in (0.0, 448.0, math.nan):
        hidden = torch.where(padding[:, None], torch.tensor(garbage, dtype=torch.bfloat16), live)
        weights = torch.where(
            padding[:, None],
            torch.tensor(garbage),
            torch.rand(8, 2, generator=torch.Generator().manual_seed(1)),
        )
        inputs = {"hidden_states": hidden, "is_padding": padding, "topk_weights": weights,
                  "topk_ids": torch.arange(16).view(8, 2)}  # fmt: skip
        found = run(operation, inputs)
        seen.append([tensor[:5].contiguous().view(torch.uint8) for tensor in found.values()])
        assert (found["topk_idx_out"][5:] == -1).all()
        assert (found["topk_weights_out"][5:] == 0).all()
    for other in seen[1:]:
        assert all(torch.equal(left, right) for left, right in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("hidden", [128, 256, 384, 640, 2304, 7168])
def test_27_every_column_is_written(run, hidden):
    """Ones everywhere: a column that is not written keeps its poison."""
    ones = torch.ones(2, hidden, dtype=torch.bfloat16)
    codes, words = _fp8(run, ones)
    assert (codes == 0x78).all()  # 1 / 2^-8 = 256
    assert (_scale_bytes(words) == 119).all()
    found = run("prepare_megamoe_nvfp4_block_inputs", {"hidden_states": ones})
    assert found["x"].unique().numel() == 1
    assert found["x_sf"].unique().numel() == 1


def test_27_hidden_size_192_is_refused(run):
    with pytest.raises(ValueError, match="hidden"):
        _fp8(run, torch.ones(2, 192))
