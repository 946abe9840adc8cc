"""The prepare_* references: what is written where, what is left alone, and every refusal with outputs
untouched."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from staging_calls import (
    CALLS,
    E4M3,
    POISON,
    Call,
    block_call,
    eplb_state,
    fp8_call,
    key,
    make_hidden,
    norm_call,
    nvfp4_call,
    poisoned,
    raw_bytes,
)

import reference
from reference._quant_key import kFp8Dynamic128, kMxfp8Dynamic
from reference.eplb import map_experts
from reference.formats import UE4M3, decode, unpack_scale_words
from reference.fp8 import quantize_fp8_groups
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES
from reference.scale_pages import page_padding_mask, read_scale_pages, required_rows
from reference.staging import convert_hidden, stage_fp8, stage_nvfp4_with_norm, ue8m0_tile_words

# ---- what is written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kind", "group"), [("ue8m0", g) for g in (32, 64, 128)] + [("fp32", g) for g in (16, 32, 64, 128)]
)
def test_fp8_groups_are_stored_at_their_own_column(
    kind: str, group: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """CASES 7: fp32 scales at tile * (128 / group) + index; UE8M0 words hold 128 / group bytes, zero above
    them."""
    scale = torch.uint8 if kind == "ue8m0" else torch.float32
    call = fp8_call(generator, columns=640, quant=key(group, scale), dtype=dtype)
    arguments = call.run()
    groups = quantize_fp8_groups(arguments["hidden_states"], RECIPES[f"fp8_{kind}_g{group}"])
    assert torch.equal(arguments["x"].view(torch.uint8), groups.codes)
    if kind == "fp32":
        assert torch.equal(arguments["x_sf"], groups.scales)
        return
    stored = unpack_scale_words(arguments["x_sf"]).view(9, 5, 4)
    per_tile = 128 // group
    assert torch.equal(stored[..., :per_tile].reshape(9, -1), groups.exponents)
    assert not bool(stored[..., per_tile:].any())


@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_both_names_of_ue8m0(scale: torch.dtype, generator: torch.Generator) -> None:
    call = fp8_call(generator, quant=key(32, scale))
    arguments = call.run()
    assert torch.equal(arguments["x_sf"], stage_fp8(arguments["hidden_states"]).x_sf)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_unquantized(source: torch.dtype, target: torch.dtype, generator: torch.Generator) -> None:
    x = poisoned((9, 256), target)
    call = fp8_call(generator, quant=None, dtype=source, x=x, x_sf=None)
    call.arguments["hidden_states"][0, :3] = torch.tensor([float("inf"), -0.0, 1e-8]).to(source)
    arguments = call.run()
    assert torch.equal(raw_bytes(x), raw_bytes(arguments["hidden_states"].float().to(target)))


def test_conversion_of_nan() -> None:
    """The same dtype keeps the payload; a 16-bit result of another dtype has the canonical NaN 0x7FFF."""
    payload = torch.tensor([0x7F81, -0x7F], dtype=torch.int16)
    assert torch.equal(
        convert_hidden(payload.view(torch.bfloat16), torch.bfloat16).view(torch.int16), payload
    )
    for target in (torch.bfloat16, torch.float16):
        nan = convert_hidden(torch.tensor([float("nan"), -float("nan"), 1.0]), target)
        assert nan.view(torch.int16)[:2].tolist() == [0x7FFF] * 2
        assert nan[2].item() == 1.0


@pytest.mark.parametrize("columns", [128, 256, 384, 640, 2304, 7168])
@pytest.mark.parametrize("op", ["fp8", "nvfp4"])
def test_every_live_byte_is_written(op: str, columns: int, generator: torch.Generator) -> None:
    """CASES 27: two runs over different poison agree everywhere."""
    results = []
    for poison in (0x00, 0xFF):
        call = CALLS[op](generator, num_tokens=3, columns=columns)
        call.arguments["hidden_states"] = make_hidden(
            3, columns, torch.Generator().manual_seed(columns), torch.bfloat16
        )
        call.arguments["topk_ids"] = torch.arange(18).view(3, 6)
        call.arguments["topk_weights"] = torch.arange(18.0).view(3, 6)
        for name in call.outputs:
            call.arguments[name].view(torch.uint8).fill_(poison)
        call.run()
        results.append(call.output_bytes())
    for name, expected in results[0].items():
        assert torch.equal(expected, results[1][name]), name


@pytest.mark.parametrize("columns", [2176, 2304, 7296, 2048, 7168])
def test_rows_of_a_wider_buffer(columns: int, generator: torch.Generator) -> None:
    """CASES 16: scale rows padded to a multiple of 16 bytes; dense writing would shift every row after the
    first."""
    words, physical = columns // 128, -(-columns // 512) * 4
    storage = poisoned((9, physical), torch.int32)
    call = fp8_call(generator, columns=columns, x_sf=storage[:, :words])
    arguments = call.run()
    assert torch.equal(storage[:, :words], stage_fp8(arguments["hidden_states"]).x_sf)
    assert bool((raw_bytes(storage[:, words:]) == POISON).all())


@pytest.mark.parametrize("op", CALLS)
def test_any_strides_give_the_same_bytes(op: str, generator: torch.Generator) -> None:
    """Every other element of a reversed-order buffer; nothing between the elements is touched."""
    call = CALLS[op](generator)
    row_major = {"x", "x_sf"} if op == "nvfp4" else set()
    strided, backing = {}, {}
    for name, value in call.arguments.items():
        if isinstance(value, torch.Tensor) and name not in row_major:
            backing[name] = poisoned(tuple(2 * size + 1 for size in reversed(value.shape)), value.dtype)
            strided[name] = every_other(backing[name])
            strided[name].copy_(value)
    call.run()
    other = Call(call.name, call.arguments | strided, call.outputs)
    other.run()
    for name, expected in call.output_bytes().items():
        assert torch.equal(raw_bytes(other.arguments[name]), expected), name
    for name, wide in backing.items():
        every_other(wide).copy_(poisoned(tuple(strided[name].shape), wide.dtype))
        assert bool((raw_bytes(wide) == POISON).all()), name


def every_other(wide: torch.Tensor) -> torch.Tensor:
    return wide.permute(*reversed(range(wide.dim())))[(slice(1, None, 2),) * wide.dim()]


# ---- padding, stale rows, no tokens


@pytest.mark.parametrize("op", ["fp8", "nvfp4", "block", "bf16"])
def test_padding_tokens_and_stale_rows(op: str, generator: torch.Generator) -> None:
    """CASES 24: masked rows hold -1 and 0.0, rows past the tokens what they held."""
    call = CALLS[op](generator)
    ids, weights = poisoned((20, 6), torch.int64), poisoned((20, 6), torch.float32)
    is_padding = torch.tensor([False, True, False, False, True, False, False, False, True])
    call.arguments |= {"topk_idx_out": ids[:9], "topk_weights_out": weights[:9], "is_padding": is_padding}
    call.arguments["topk_weights"][1, 2] = float("nan")
    arguments = call.run()
    assert set(ids[:9][is_padding].flatten().tolist()) == {-1}
    assert set(raw_bytes(weights[:9][is_padding]).tolist()) == {0}
    live = ~is_padding
    assert torch.equal(ids[:9][live], arguments["topk_ids"][live])
    assert torch.equal(weights[:9][live], arguments["topk_weights"][live])
    assert bool((raw_bytes(ids[9:]) == POISON).all())
    assert bool((raw_bytes(weights[9:]) == POISON).all())


@pytest.mark.parametrize("op", ["fp8", "nvfp4", "block", "bf16"])
def test_padding_content_does_not_reach_live_bytes(op: str, generator: torch.Generator) -> None:
    """CASES 26: zeros, 448 and NaN in the padding tokens."""
    call = CALLS[op](generator)
    is_padding = torch.arange(9) >= 6
    call.arguments["is_padding"] = is_padding
    results = []
    for fill in (0.0, 448.0, float("nan")):
        call.arguments["hidden_states"][is_padding] = fill
        call.arguments["topk_weights"][is_padding] = fill
        call.run()
        results.append({name: raw_bytes(call.arguments[name][~is_padding]).clone() for name in call.outputs})
    for name, expected in results[0].items():
        assert all(torch.equal(expected, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("op", CALLS)
def test_no_tokens(op: str, generator: torch.Generator) -> None:
    call = CALLS[op](generator, num_tokens=0)
    call.run()
    if op in ("fp8", "block", "bf16"):  # returns before it looks at anything else
        hidden = call.arguments["hidden_states"]
        getattr(reference, call.name)(hidden, *[None] * (len(CALLS[op](generator).arguments) - 1))


def test_l2_alpha_is_written_without_tokens(generator: torch.Generator) -> None:
    scales = torch.tensor([0.1, 3.0, 7e-5])
    alpha = poisoned((3,), torch.float32)
    call = nvfp4_call(
        generator, num_tokens=0, w2_global_scale=scales, l2_alpha=alpha, l2_activation_scale=0.37
    )
    call.run()
    assert torch.equal(alpha, scales * torch.tensor(0.37))


# ---- shared experts


@pytest.mark.parametrize("block_m", [8, 16, 32, 64, 96, 128, 192, 240])
@pytest.mark.parametrize("op", ["fp8", "nvfp4"])
def test_shared_pages(op: str, block_m: int, generator: torch.Generator) -> None:
    """CASES 18: 200 tokens; padding rows and extra rows are left alone, tensor MN-major as in the buffer."""
    rows = required_rows(200, block_m)
    pages = poisoned((2, rows + 5), torch.int32).t()
    extra = {"shared_x_sf": pages, "shared_block_m": block_m}
    if op == "nvfp4":
        extra["shared_x"] = poisoned((200, 256), E4M3)
    arguments = CALLS[op](generator, num_tokens=200, **extra).run()
    expected = stage_fp8(arguments["hidden_states"])
    assert torch.equal(read_scale_pages(pages, block_m, 200), expected.x_sf)
    padding = page_padding_mask(200, block_m, rows + 5)
    assert bool((raw_bytes(pages[padding]) == POISON).all())
    assert torch.equal(arguments["shared_x" if op == "nvfp4" else "x"].view(torch.uint8), expected.x)


def test_shared_bf16_copy(generator: torch.Generator) -> None:
    shared = poisoned((9, 256), torch.bfloat16)
    arguments = nvfp4_call(generator, shared_x=shared).run()
    assert torch.equal(raw_bytes(shared), raw_bytes(arguments["hidden_states"]))


# ---- NVFP4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2], ids=str)
def test_nvfp4_two_levels(dtype: torch.dtype, generator: torch.Generator) -> None:
    call = nvfp4_call(generator)
    call.arguments["x"] = call.arguments["x"].view(dtype)
    arguments = call.run()
    groups = quantize_nvfp4(arguments["hidden_states"], RECIPES["nvfp4_token"])
    assert torch.equal(arguments["x"].view(torch.uint8), groups.packed)
    assert torch.equal(unpack_scale_words(arguments["x_sf"]), groups.scale_codes)
    assert torch.equal(arguments["x_scales"], groups.token_scales)


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3], ids=str)
def test_nvfp4_one_level(dtype: torch.dtype, generator: torch.Generator) -> None:
    call = block_call(generator)
    call.arguments["x_sf"] = call.arguments["x_sf"].view(dtype)
    arguments = call.run()
    groups = quantize_nvfp4(arguments["hidden_states"], RECIPES["nvfp4_block"])
    assert torch.equal(arguments["x"], groups.packed)
    assert torch.equal(arguments["x_sf"].view(torch.uint8), groups.scale_codes)


def test_nvfp4_with_norm_is_one_level_of_the_normalized(generator: torch.Generator) -> None:
    call = norm_call(generator)
    arguments = call.run()
    staged = stage_nvfp4_with_norm(arguments["hidden_states"], arguments["norm_weight"], 1e-5, 1.0)
    groups = quantize_nvfp4(staged.norm.normalized, RECIPES["nvfp4_block"])
    assert torch.equal(arguments["x"], groups.packed)
    assert torch.equal(arguments["x_sf"], groups.scale_codes)
    again = stage_nvfp4_with_norm(
        arguments["hidden_states"], arguments["norm_weight"], 1e-5, 1.0, rstd=staged.norm.rstd * 2
    )
    assert not torch.equal(again.x_sf, staged.x_sf)
    assert float(decode(staged.x_sf, UE4M3).max()) < 10


# ---- EPLB


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("unpadded", [0, 6, 1000])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["fp8", "nvfp4"])
def test_fused_eplb(
    op: str, id_dtype: torch.dtype, unpadded: int, record: bool, generator: torch.Generator
) -> None:
    """The ids after padding are mapped; -1 entries and invalid ids give -1 and keep their weight; load is
    counted."""
    state = eplb_state(
        generator,
        should_record_tensor=torch.tensor(record),
        num_unpadded_tokens_tensors=[torch.tensor(unpadded, dtype=torch.int32)],
    )
    call = CALLS[op](generator, eplb_state=state)
    is_padding = torch.arange(9) % 4 == 3
    call.arguments["topk_ids"][0, 0], call.arguments["topk_ids"][2, 1] = -1, 64
    call.arguments["topk_ids"] = call.arguments["topk_ids"].to(id_dtype)
    call.arguments["is_padding"] = is_padding
    before = state.expert_load_view.clone()
    arguments = call.run()
    ids = torch.where(is_padding.unsqueeze(1), -1, call.arguments["topk_ids"].long())
    mapping = map_experts(ids, state.logical_to_physical_map, state.logical_replica_count, 80, unpadded)
    assert torch.equal(arguments["topk_idx_out"], mapping.ids)
    assert int((mapping.ids == -1).sum()) > 12
    weights = torch.where(is_padding.unsqueeze(1), 0.0, arguments["topk_weights"])
    assert torch.equal(arguments["topk_weights_out"], weights)
    assert torch.equal(state.expert_load_view - before, mapping.load.int() * record)
    assert (int(mapping.load.sum()) > 0) == (unpadded > 0)


def test_fused_eplb_does_not_wrap_ids(generator: torch.Generator) -> None:
    call = fp8_call(generator, eplb_state=eplb_state(generator))
    call.arguments["topk_ids"][4] = 2**32 + 5
    assert call.run()["topk_idx_out"][4].tolist() == [-1] * 6


def test_unpadded_count_of_the_micro_batch_in_progress(generator: torch.Generator) -> None:
    """The first count, unless the state says which one holds."""
    counts = []
    for extra in ({}, {"num_unpadded_tokens": torch.tensor(0, dtype=torch.int32)}):
        state = eplb_state(generator, **extra)
        before = state.expert_load_view.clone()
        fp8_call(generator, eplb_state=state).run()
        counts.append(int((state.expert_load_view - before).sum()))
    assert counts[0] > 0
    assert counts[1] == 0


def test_inert_eplb_state(generator: torch.Generator) -> None:
    nothing = SimpleNamespace(**dict.fromkeys(vars(eplb_state(generator))))
    arguments = fp8_call(generator, eplb_state=nothing).run()
    assert torch.equal(arguments["topk_idx_out"], arguments["topk_ids"])


def test_keys_are_equal_by_their_fields() -> None:
    """A key of another package with the same fields is equal, in either order, so signatures can be
    compared."""
    foreign = SimpleNamespace(
        dtype=E4M3,
        scale=SimpleNamespace(
            dtype=torch.float8_e8m0fnu, static=False, group_shape=SimpleNamespace(row=1, col=32)
        ),
        scale2=None,
        symmetric=True,
    )
    assert kMxfp8Dynamic == foreign
    assert foreign == kMxfp8Dynamic
    assert kMxfp8Dynamic != kFp8Dynamic128
    assert kMxfp8Dynamic != "kMxfp8Dynamic"
    assert hash(kMxfp8Dynamic) == hash(key(32, torch.float8_e8m0fnu))
    foreign.symmetric = False
    assert kMxfp8Dynamic != foreign


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "prepare_megamoe_inputs",
            "hidden_states topk_weights topk_ids x x_sf topk_idx_out topk_weights_out is_padding shared_x_sf "
            "shared_block_m hidden_quant eplb_state",
        ),
        (
            "prepare_megamoe_nvfp4_inputs",
            "hidden_states topk_weights topk_ids x x_sf x_scales topk_idx_out topk_weights_out is_padding "
            "shared_x shared_x_sf shared_block_m w2_global_scale l2_alpha l2_activation_scale eplb_state",
        ),
        (
            "prepare_megamoe_nvfp4_block_inputs",
            "hidden_states topk_weights topk_ids x x_sf topk_idx_out topk_weights_out is_padding",
        ),
        ("prepare_megamoe_nvfp4_with_norm", "hidden_states norm_weight norm_eps gain_center x x_sf"),
        (
            "prepare_megamoe_bf16_inputs",
            "hidden_states topk_weights topk_ids x topk_idx_out topk_weights_out is_padding",
        ),
        (
            "eplb_map_to_physical_and_record",
            "topk_ids expert_load_view logical_to_physical_map logical_replica_count record_enabled "
            "num_unpadded_tokens",
        ),
    ],
)
def test_signatures_are_the_published_ones(name: str, parameters: str) -> None:
    signature = inspect.signature(getattr(reference, name))
    assert list(signature.parameters) == parameters.split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())


def test_tile_words_of_partial_tiles() -> None:
    exponents = torch.arange(1, 9, dtype=torch.uint8).view(2, 4)
    assert ue8m0_tile_words(exponents, 64).tolist() == [[0x0201, 0x0403], [0x0605, 0x0807]]
    assert ue8m0_tile_words(exponents, 128).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
