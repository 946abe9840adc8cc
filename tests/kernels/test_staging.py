"""The staging functions against the arithmetic written down directly, over generators, types and strides."""

import zlib
from typing import Any

import kernel_calls as calls
import numpy as np
import oracle
import pytest
import torch
from kernel_calls import E4M3, FUNCTIONS, bytes_of, fp8_key, poisoned

from megamoe.eplb import EplbLayerState, eplb_map_to_physical_and_record, micro_batch
from megamoe.kernels import tuning

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _normal(rows: int, size: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, size, generator=g)


def _spread(rows: int, size: int, g: torch.Generator) -> torch.Tensor:
    """Group maxima over 28 binades: subnormal E4M3 scales, so the two-level kernel's second path."""
    exponents = torch.randint(-20, 8, (rows, size // 16, 1), generator=g)
    return torch.ldexp(torch.randn(rows, size // 16, 16, generator=g), exponents).reshape(rows, size)


def _near(rows: int, size: int, g: torch.Generator) -> torch.Tensor:
    """Groups within a factor of four: the two-level kernel's first path."""
    signs = torch.randint(0, 2, (rows, size), generator=g) * 2 - 1
    return signs * (0.25 + 0.75 * torch.rand(rows, size, generator=g)) * torch.rand(rows, size, generator=g)


def _ties(rows: int, size: int, g: torch.Generator) -> torch.Tensor:
    """Multiples of 21 / 16, so that h / (amax / 2688) meets midpoints times scales exactly."""
    return torch.randint(-128, 129, (rows, size), generator=g) * 1.3125


def _rows(rows: int, size: int, g: torch.Generator) -> torch.Tensor:
    """Rows from zero over subnormal to the largest finite value."""
    exponents = torch.linspace(-140, 126, rows)[:, None].round()
    values = torch.randn(rows, size, generator=g).clamp(-1.9, 1.9) * torch.exp2(exponents)
    values[0] = 0
    return values


def _specials(rows: int, size: int, g: torch.Generator) -> torch.Tensor:
    values = torch.randn(rows, size, generator=g)
    pick = torch.rand(rows, size, generator=g)
    for low, value in ((0.00, float("nan")), (0.01, -0.0), (0.02, 448.0), (0.03, 1e-40), (0.04, 0.0)):
        values[(pick >= low) & (pick < low + 0.005)] = value
    values[rows // 2 :, 5] = float("inf")
    values[-1, 7] = -float("inf")
    values[1] = float("nan")
    return values


GENERATORS = {
    "normal": _normal,
    "spread": _spread,
    "near": _near,
    "ties": _ties,
    "rows": _rows,
    "specials": _specials,
}


def make(generator: str, dtype: str, rows: int, size: int, seed: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return GENERATORS[generator](rows, size, g).to(DTYPES[dtype])


def same(actual: torch.Tensor, expected: np.ndarray, name: str) -> None:
    found = bytes_of(actual).numpy()
    wanted = np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
    assert found.shape == wanted.shape, name
    different = np.flatnonzero(found != wanted)
    assert different.size == 0, (
        f"{name}: {different.size} of {wanted.size} bytes differ, first {different[:5]}"
    )


GROUPS = [*((g, True) for g in (32, 64, 128)), *((g, False) for g in (8, 16, 32, 64, 128))]


@pytest.mark.parametrize(("group", "ue8m0"), GROUPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generator", GENERATORS)
def test_fp8_groups(generator: str, dtype: str, group: int, ue8m0: bool, request: Any) -> None:
    arguments = calls.fp8_inputs(tokens=9, size=384, block_m=None)
    arguments["hidden_states"] = make(generator, dtype, 9, 384, request.node.nodeid)
    arguments["hidden_quant"] = fp8_key(group, torch.float8_e8m0fnu if ue8m0 else torch.float32)
    if not ue8m0:
        arguments["x_sf"] = poisoned(9, 384 // group, dtype=torch.float32)
    FUNCTIONS["fp8"][0](**arguments)
    codes, scales = oracle.fp8_groups(arguments["hidden_states"], group, ue8m0)
    same(arguments["x"], codes, "x")
    same(arguments["x_sf"], scales, "x_sf")


@pytest.mark.parametrize("size", [128, 640, 2304])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generator", GENERATORS)
def test_nvfp4_token(generator: str, dtype: str, size: int, request: Any) -> None:
    arguments = calls.token_inputs(tokens=9, size=size)
    arguments["hidden_states"] = make(generator, dtype, 9, size, request.node.nodeid)
    FUNCTIONS["token"][0](**arguments)
    packed, scale_codes, xs = oracle.nvfp4_token(arguments["hidden_states"])
    same(arguments["x"], packed, "x")
    same(arguments["x_sf"], scale_codes, "x_sf")
    same(arguments["x_scales"], xs, "x_scales")
    codes, words = oracle.fp8_groups(arguments["hidden_states"], 32, True)
    same(arguments["shared_x"], codes, "shared_x")
    rows = [oracle.page_row(t, 64) for t in range(9)]
    same(arguments["shared_x_sf"][rows], words, "shared_x_sf")
    same(arguments["l2_alpha"], arguments["w2_global_scale"].numpy() * np.float32(0.37), "l2_alpha")


@pytest.mark.parametrize("size", [64, 192, 2304])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generator", GENERATORS)
def test_nvfp4_block(generator: str, dtype: str, size: int, request: Any) -> None:
    arguments = calls.block_inputs(tokens=9, size=size)
    arguments["hidden_states"] = make(generator, dtype, 9, size, request.node.nodeid)
    FUNCTIONS["block"][0](**arguments)
    packed, scale_codes = oracle.nvfp4_block(arguments["hidden_states"])
    same(arguments["x"], packed, "x")
    same(arguments["x_sf"], scale_codes, "x_sf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("steps", [2, 3, 4, 16])
def test_nvfp4_block_in_programs_of_several_tiles(
    steps: int, rows: int, dtype: str, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does with many tokens: no row is left out, done twice, or written beyond the last."""
    monkeypatch.setattr(tuning, "BLOCK_STEPS", (tuning.Rule(None, steps),))
    monkeypatch.setattr(tuning, "_interpreted_rows", lambda *_: rows)
    arguments = calls.block_inputs(tokens=13, size=192)
    arguments["hidden_states"] = make("specials", dtype, 13, 192, request.node.nodeid)
    longer = {name: poisoned(100, *arguments[name].shape[1:], dtype=torch.uint8) for name in ("x", "x_sf")}
    FUNCTIONS["block"][0](**arguments | {name: one[:13] for name, one in longer.items()})
    packed, scale_codes = oracle.nvfp4_block(arguments["hidden_states"])
    same(longer["x"][:13], packed, "x")
    same(longer["x_sf"][:13], scale_codes, "x_sf")
    for one in longer.values():
        assert (one[13:] == calls.POISON).all()


def test_one_tile_a_program_until_there_are_many() -> None:
    tiles = (0, 1, 24576, 24577, 49152, 49153, 1 << 26, (1 << 26) + 1)
    assert [tuning.block_steps(count) for count in tiles] == [1, 1, 1, 2, 2, 4, 4, 1]


@pytest.mark.parametrize("hidden", [64, 192, 1024, 7168])
def test_a_tile_after_the_last_has_token_numbers_of_32_bits(hidden: int) -> None:
    """At every number of tokens at which a program has several tiles; the rest is the tile's own."""
    for num_tokens in (1 << 20, 1 << 26, 1 << 30, (1 << 31) - 1):
        tile = tuning.column_tile(tuning.BLOCK_RULES, num_tokens, hidden, False)
        steps = tuning.block_steps(-(-num_tokens // tile.block_m) * -(-hidden // tile.block_h))
        assert steps == 1 or num_tokens + tile.block_m * steps <= 1 << 31


@pytest.mark.parametrize("size", [64, 1984, 2048, 4096])
@pytest.mark.parametrize("generator", ["normal", "spread", "rows", "specials"])
def test_nvfp4_norm(generator: str, size: int, request: Any) -> None:
    arguments = calls.norm_inputs(tokens=4, size=size)
    arguments["hidden_states"] = make(generator, "bf16", 4, size, request.node.nodeid)
    FUNCTIONS["norm"][0](**arguments)
    packed, scale_codes = oracle.nvfp4_norm(
        arguments["hidden_states"], arguments["norm_weight"], arguments["norm_eps"], arguments["gain_center"]
    )
    same(arguments["x"], packed, "x")
    same(arguments["x_sf"], scale_codes, "x_sf")


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values under other strides; what lies between the elements is POISON."""
    if how == "columns":
        made = poisoned(*reversed(tensor.shape), dtype=tensor.dtype).permute(*range(tensor.ndim - 1, -1, -1))
    elif how == "rows":
        # Rows inside a wider buffer, starting at an odd element.
        wide = poisoned(tensor.shape[0] + 1, *(n + 3 for n in tensor.shape[1:]), dtype=tensor.dtype)
        made = wide[tuple(slice(1, 1 + n) for n in tensor.shape)]
    else:
        made = poisoned(*(2 * n for n in tensor.shape), dtype=tensor.dtype)[
            (slice(None, None, 2),) * tensor.ndim
        ]
    bytewise = tensor.dtype == E4M3
    target, source = (made.view(torch.uint8), tensor.view(torch.uint8)) if bytewise else (made, tensor)
    target.copy_(source)
    return made


ROW_MAJOR = {"token": ("x", "x_sf", "shared_x"), "block": ("x",), "norm": ("x",)}


@pytest.mark.parametrize("how", ["columns", "rows", "every-second"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides_do_not_matter_and_gaps_keep_their_bytes(name: str, how: str) -> None:
    function, build = FUNCTIONS[name]
    plain, bent = build(), build()
    for key, value in bent.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 1:
            row_major = key in ROW_MAJOR.get(name, ())
            bent[key] = strided(value, "rows" if row_major else how)
    function(**plain)
    function(**bent)
    for key, value in calls.written(plain).items():
        if key == "load":
            assert torch.equal(value, bent["eplb_state"].expert_load_view)
            continue
        other = bent[key]
        assert torch.equal(bytes_of(value), bytes_of(other)), key
        # Erase the elements: what remains of the storage must be untouched poison.
        storage = torch.tensor([], dtype=torch.uint8).set_(other.untyped_storage())
        erased = (
            other.view(torch.uint8)
            if other.element_size() == 1
            else other.view({4: torch.int32, 8: torch.int64, 2: torch.int16}[other.element_size()])
        )
        pattern = poisoned(1, dtype=erased.dtype)[0]
        erased.fill_(pattern)
        assert bool((storage == calls.POISON).all()), f"{key}: a byte between the elements was written"


@pytest.mark.parametrize("function", ["fp8", "token", "block", "bf16"])
def test_topk_repack_and_padding(function: str) -> None:
    call, build = FUNCTIONS[function]
    arguments = build()
    arguments.pop("eplb_state", None)
    padding = arguments["is_padding"]
    padding[1] = True
    arguments["topk_weights"] = arguments["topk_weights"].bfloat16()
    arguments["topk_weights"][1] = float("nan")
    arguments["topk_ids"][0, 0] = -1
    arguments["topk_ids"][2, 1] = 2**31 - 1
    call(**arguments)
    live = ~padding[:, None]
    assert torch.equal(arguments["topk_idx_out"], torch.where(live, arguments["topk_ids"].long(), -1))
    weights = torch.where(live, arguments["topk_weights"].float(), 0.0)
    assert torch.equal(bytes_of(arguments["topk_weights_out"]), bytes_of(weights))


def test_garbage_in_padding_rows_changes_no_live_byte() -> None:
    for value in (0.0, 448.0, float("nan")):
        arguments = calls.token_inputs(tokens=6)
        arguments["hidden_states"][arguments["is_padding"]] = value
        FUNCTIONS["token"][0](**arguments)
        live = ~arguments["is_padding"]
        first = locals().get("kept") or {
            n: t[live].clone() for n, t in calls.written(arguments).items() if n in ("x", "x_sf", "x_scales")
        }
        kept = first
        for name, tensor in first.items():
            assert torch.equal(bytes_of(arguments[name][live]), bytes_of(tensor)), name


@pytest.mark.parametrize("block_m", [1, 8, 16, 32, 64, 96, 128, 192, 200, 240])
def test_scale_pages(block_m: int) -> None:
    arguments = calls.fp8_inputs(tokens=300, size=128, block_m=block_m)
    FUNCTIONS["fp8"][0](**arguments)
    _, words = oracle.fp8_groups(arguments["hidden_states"], 32, True)
    expected = poisoned(calls.page_rows(300, block_m), 1, dtype=torch.int32)
    for token in range(300):
        expected[oracle.page_row(token, block_m)] = int(words[token, 0])
    assert torch.equal(arguments["shared_x_sf"], expected)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_plain_copy(source: str, target: str) -> None:
    arguments = calls.fp8_inputs(tokens=7, block_m=None)
    arguments["hidden_states"] = make("specials", source, 7, 256, f"{source}-{target}")
    arguments |= {"hidden_quant": None, "x_sf": None, "x": poisoned(7, 256, dtype=DTYPES[target])}
    FUNCTIONS["fp8"][0](**arguments)
    values = arguments["hidden_states"]
    numbers = ~values.isnan()
    assert torch.equal(bytes_of(arguments["x"][numbers]), bytes_of(values[numbers].to(DTYPES[target])))
    assert bool(arguments["x"][~numbers].isnan().all())
    if source == target:
        assert torch.equal(bytes_of(arguments["x"]), bytes_of(values))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_tokens(name: str) -> None:
    function, build = FUNCTIONS[name]
    arguments = build(tokens=0)
    function(**arguments)
    for key, value in calls.written(arguments).items():
        if key == "l2_alpha":
            same(value, arguments["w2_global_scale"].numpy() * np.float32(0.37), key)
        elif key == "load":
            assert not value.any()
        else:
            assert bool((calls.storage_bytes(value) == calls.POISON).all()), key


@pytest.mark.parametrize("name", ["fp8", "block", "bf16"])
def test_no_tokens_returns_before_the_other_checks(name: str) -> None:
    function, build = FUNCTIONS[name]
    arguments = build(tokens=0)
    arguments["topk_ids"] = "anything"
    function(**arguments)


# ------------------------------------------------------------------------------------------------- EPLB


def mapped(ids: torch.Tensor, state: EplbLayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected physical ids and load, in Python integers."""
    assert state.logical_to_physical_map is not None
    assert state.logical_replica_count is not None
    assert state.expert_load_view is not None
    assert state.num_unpadded_tokens_tensors is not None
    load = torch.zeros_like(state.expert_load_view)
    physical = torch.full_like(ids, -1, dtype=torch.int64)
    limit = int(state.num_unpadded_tokens_tensors[0])
    for token, row in enumerate(ids.tolist()):
        for slot, logical in enumerate(row):
            if not 0 <= logical < len(state.logical_replica_count):
                continue
            count = max(int(state.logical_replica_count[logical]), 1)
            replica = (token * 2654435769 & 0xFFFFFFFF) % count
            physical[token, slot] = state.logical_to_physical_map[logical, replica]
            if token < limit and 0 <= physical[token, slot] < len(load) and state.should_record_tensor:
                load[physical[token, slot]] += 1
    return physical, load


def awkward_state(tokens: int, record: bool, limit: int) -> tuple[torch.Tensor, EplbLayerState]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 10, (tokens, 4), generator=generator)
    expert_map = torch.randint(-1, 16, (8, 3), generator=generator)  # -1 is hit; 14 and 15 are past the load
    counts = torch.randint(0, 4, (8,), generator=generator)  # 0 counts as 1
    load = torch.zeros(14, dtype=torch.int32)
    limits = [torch.tensor(limit, dtype=torch.int32)]
    return ids, EplbLayerState(load, expert_map, counts, torch.tensor(record), limits)


@pytest.mark.parametrize("record", [True, False], ids=["record", "still"])
@pytest.mark.parametrize("limit", [0, 9, 1000])
@pytest.mark.parametrize("tokens", [1, 37, 700])
def test_fused_eplb_is_the_stand_alone_one(tokens: int, limit: int, record: bool) -> None:
    ids, state = awkward_state(tokens, record, limit)
    physical, load = mapped(ids, state)
    arguments = calls.fp8_inputs(tokens=tokens, size=128, block_m=None)
    arguments |= calls.routing(tokens, topk=4) | {"topk_ids": ids, "is_padding": None, "eplb_state": state}
    FUNCTIONS["fp8"][0](**arguments)
    assert torch.equal(arguments["topk_idx_out"], physical)
    assert torch.equal(state.expert_load_view, load)
    assert torch.equal(arguments["topk_weights_out"], arguments["topk_weights"])  # also where the id is -1
    for dtype in (torch.int32, torch.int64):
        again = torch.zeros(14, dtype=torch.int32)
        result = eplb_map_to_physical_and_record(
            ids.to(dtype),
            again,
            state.logical_to_physical_map,
            state.logical_replica_count,
            state.should_record_tensor,
            state.num_unpadded_tokens_tensors[0],
        )
        assert result.dtype == dtype
        assert torch.equal(result.long(), physical)
        assert torch.equal(again, load)


def test_eplb_padding_is_not_recorded() -> None:
    ids, state = awkward_state(20, True, 1000)
    arguments = calls.fp8_inputs(tokens=20, size=128, block_m=None) | calls.routing(20, topk=4)
    arguments |= {"topk_ids": ids, "eplb_state": state}
    FUNCTIONS["fp8"][0](**arguments)
    masked = torch.where(arguments["is_padding"][:, None], -1, ids)
    physical, load = mapped(masked, state)
    assert torch.equal(arguments["topk_idx_out"], physical)
    assert torch.equal(state.expert_load_view, load)


def test_replica_hash_is_unsigned() -> None:
    expert_map, counts = torch.tensor([[10, 11, 12]]), torch.tensor([3])
    load = torch.zeros(13, dtype=torch.int32)
    ids = torch.zeros(8, 1, dtype=torch.int64)
    result = eplb_map_to_physical_and_record(ids, load, expert_map, counts, torch.tensor(True))
    assert (result[:, 0] - 10).tolist() == [0, 0, 2, 2, 1, 0, 0, 2]
    assert load[10:].tolist() == [4, 1, 3]


def test_stand_alone_ids_wrap_to_int32() -> None:
    expert_map, counts = torch.tensor([[5], [6]]), torch.tensor([1, 1])
    ids = torch.tensor([[2**32 + 1, 2**32 - 1]])
    load = torch.zeros(7, dtype=torch.int32)
    result = eplb_map_to_physical_and_record(ids, load, expert_map, counts, torch.tensor(True))
    assert result.tolist() == [[6, -1]]


def test_stand_alone_without_ids_returns_its_argument() -> None:
    ids = torch.zeros(0, 4, dtype=torch.int64)
    load = torch.zeros(4, dtype=torch.int32)
    expert_map, counts = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    assert eplb_map_to_physical_and_record(ids, load, expert_map, counts, torch.tensor(True)) is ids


def test_a_count_above_the_slots_maps_to_nothing() -> None:
    expert_map, counts = torch.tensor([[0, 1], [2, 3]]), torch.tensor([9, 9])
    load = torch.zeros(4, dtype=torch.int32)
    ids = torch.zeros(64, 1, dtype=torch.int64)
    result = eplb_map_to_physical_and_record(ids, load, expert_map, counts, torch.tensor(True))
    assert set(result.flatten().tolist()) == {-1, 0, 1}
    assert int(load.sum()) == int((result >= 0).sum())


def test_the_state_of_a_layer_is_a_view() -> None:
    load = torch.zeros(2, 3, dtype=torch.int32)
    expert_map = torch.arange(6).reshape(2, 3, 1) % 3
    counts = torch.ones(2, 3, dtype=torch.int64)
    state = EplbLayerState(should_record_tensor=torch.tensor(True))
    state.num_unpadded_tokens_tensors = [torch.tensor(1), torch.tensor(5)]
    arguments = calls.fp8_inputs(block_m=None) | {"is_padding": None, "eplb_state": state}
    arguments["topk_ids"] %= 3
    FUNCTIONS["fp8"][0](**arguments)  # inert: no map
    assert torch.equal(arguments["topk_idx_out"], arguments["topk_ids"].long())
    state.set_layer_state(1, load, expert_map, counts)
    FUNCTIONS["fp8"][0](**arguments)
    assert load.sum(1).tolist() == [0, 3]
    with micro_batch(1):
        FUNCTIONS["fp8"][0](**arguments)
    assert load.sum(1).tolist() == [0, 18]
