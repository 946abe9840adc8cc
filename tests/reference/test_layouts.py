"""Every named layout: a bijection with declared padding, told apart from its neighbours; known addresses."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.layouts import LAYOUTS, Layout, get_layout

SMALL = st.integers(1, 40)
MAYBE_BATCH = st.none() | st.integers(1, 3)


def sizes(**strategies):
    return st.fixed_dictionaries(strategies)


def pages(params: dict) -> dict:
    """Scale pages with some rows past the required ones."""
    extra = params.pop("extra")
    if extra:
        page = -(-params["block_m"] // 128) * 128
        params["rows"] = -(-params["tokens"] // params["block_m"]) * page + extra
    return params


PAGES = sizes(
    tokens=st.integers(1, 400), groups=st.integers(1, 9), block_m=st.integers(1, 260), extra=st.integers(0, 5)
).map(pages)
SCALES = sizes(mn=SMALL, groups=st.integers(1, 13), batch=MAYBE_BATCH)
TILED_SCALES = sizes(mn=st.integers(1, 3).map(lambda n: 128 * n), groups=st.integers(1, 9), batch=MAYBE_BATCH)


def weights(multiple: int):
    return sizes(
        rows=st.integers(1, 6).map(lambda n: multiple * n),
        columns=SMALL,
        dtype=st.sampled_from(["uint8", "bfloat16", "int32", "float8_e4m3fn"]),
        batch=MAYBE_BATCH,
    )


def with_stride(strategy, column: str, step: int = 1):
    """A row stride of zero to three storage elements more than the row."""

    def add(args):
        params, extra = args
        return {**params, "row_stride": -(-params[column] // step) + extra} if extra else params

    return st.tuples(strategy, st.integers(0, 3)).map(add)


PARAMS = {
    "row_major": with_stride(
        sizes(
            rows=SMALL,
            columns=SMALL,
            batch=MAYBE_BATCH,
            dtype=st.sampled_from(["uint8", "bfloat16", "float32", "int64"]),
        ),
        "columns",
    ),
    "fp8_rows": with_stride(sizes(tokens=SMALL, columns=SMALL), "columns"),
    "e2m1_rows": with_stride(sizes(tokens=SMALL, columns=SMALL.map(lambda n: 2 * n)), "columns", 2),
    "topk_ids": with_stride(sizes(tokens=SMALL, topk=st.integers(1, 8)), "topk"),
    "topk_weights": with_stride(sizes(tokens=SMALL, topk=st.integers(1, 8)), "topk"),
    "packed_scale_rows": st.sampled_from([1, 2, 4]).flatmap(
        lambda used: with_stride(
            sizes(tokens=SMALL, groups=st.integers(1, 13), groups_per_word=st.just(used)), "groups", used
        )
    ),
    "mn_major_tma_aligned": SCALES,
    "mn_major_packed_ue8m0": SCALES,
    "shared_scale_pages": PAGES,
    "shared_scale_pages_row_major": PAGES,
    "utccp_scales": TILED_SCALES,
    "gate_up_utccp_scales": TILED_SCALES,
    "gate_up_interleaved_8": weights(16),
    "gate_up_interleaved_16_even_odd": weights(32),
    "swizzle_128x4": sizes(rows=st.integers(1, 300), groups=st.integers(1, 13)),
    "sm90_activation_scales": sizes(
        pool_rows=st.integers(1, 300), groups=st.integers(1, 5), tile=st.sampled_from([8, 64, 128, 192])
    ),
}


def test_every_layout_has_a_property_test():
    assert set(PARAMS) == set(LAYOUTS)


def coded(layout: Layout) -> torch.Tensor:
    """Elements that differ from their neighbours: a running number, scrambled for narrow elements."""
    count = 1
    for size in layout.logical_shape:
        count *= size
    number = torch.arange(count, dtype=torch.int64) * 2654435761 % (1 << min(layout.element_bits, 62))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[layout.logical_dtype.itemsize]
    return number.to(carrier).reshape(layout.logical_shape)


def elements_of(layout: Layout, raw: torch.Tensor) -> torch.Tensor:
    """Memory as one integer an element, written out here a second time."""
    if layout.element_bits == 4:
        return torch.stack([raw % 16, raw // 16], 1).flatten().to(torch.int64)
    width = layout.element_bits // 8
    parts = raw.reshape(-1, width).to(torch.int64)
    value = sum(parts[:, byte] << (8 * byte) for byte in range(width))
    return (
        value if width == 8 else torch.where(value >= 1 << (8 * width - 1), value - (1 << 8 * width), value)
    )


def memory_of(layout: Layout, storage: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage.untyped_storage())[: layout.storage_bytes]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bijection_with_declared_padding(name, data):
    layout = get_layout(name, **data.draw(PARAMS[name]))
    offsets = layout.offsets()
    assert offsets.shape == layout.logical_shape
    assert offsets.unique().numel() == offsets.numel()
    assert int(offsets.min()) >= 0
    assert int(offsets.max()) < layout.elements == layout.storage_bytes * 8 // layout.element_bits

    # the way back: every element is found where it lies, everything else is padding
    positions = torch.arange(layout.elements)
    found = layout.locate_elements(positions)
    live = found[layout.axes[0].name] >= 0
    assert torch.equal(live, torch.isin(positions, offsets))
    indices = {axis.name: found[axis.name][live] for axis in layout.axes}
    assert torch.equal(layout.offsets(**indices), positions[live])
    assert all(bool((values[~live] == -1).all()) for values in found.values())

    # memory holds what the offsets say, and padding what it held before or what is declared
    values = coded(layout)
    storage = layout.pack(values, fill=0xA5)
    assert (tuple(storage.shape), storage.stride()) == (layout.storage_shape, layout.storage_strides)
    assert storage.dtype == layout.storage_dtype
    memory = memory_of(layout, storage)
    signed = values.to(torch.int64)
    stored = elements_of(layout, memory)[offsets]
    assert (
        torch.equal(stored & 0xFF, signed & 0xFF) if layout.element_bits <= 8 else torch.equal(stored, signed)
    )
    padding, undefined = layout.padding_mask(), layout.padding_mask(undefined_only=True)
    assert padding.shape == memory.shape
    assert torch.equal(memory[undefined], torch.full_like(memory[undefined], 0xA5))
    assert not bool((undefined & ~padding).any())
    assert not bool(memory[padding & ~undefined].any())  # all declared values are zero so far
    if layout.element_bits >= 8:
        per_element = layout.element_bits // 8
        assert torch.equal(padding, ~live.repeat_interleave(per_element))

    # and it comes back: from the tensor, from other strides, from raw memory
    restored = layout.unpack(storage)
    assert restored.dtype == layout.logical_dtype
    bits = restored.view(values.dtype)
    assert torch.equal(bits, values)
    elsewhere = storage.clone(memory_format=torch.contiguous_format)
    assert torch.equal(layout.unpack(elsewhere).view(values.dtype), values)
    if len(layout.storage_shape) > 1:
        assert torch.equal(layout.unpack(memory).view(values.dtype), values)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_pack_into_keeps_padding(name, data):
    layout = get_layout(name, **data.draw(PARAMS[name]))
    values = coded(layout)
    buffer = layout.view(torch.full((layout.storage_bytes,), 0x5A, dtype=torch.uint8))
    assert layout.pack(values, out=buffer) is buffer
    assert torch.equal(memory_of(layout, buffer), memory_of(layout, layout.pack(values, fill=0x5A)))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_locate_bytes(name, data):
    """Bytes of wide elements and nibbles of bytes find the element they belong to."""
    layout = get_layout(name, **data.draw(PARAMS[name]))
    offsets = layout.offsets().flatten()
    nibble, byte_in_element = 0, 0
    if layout.element_bits < 8:
        bytes_, nibble = offsets // 2, offsets % 2
    else:
        byte_in_element = layout.element_bits // 8 - 1
        bytes_ = offsets * (layout.element_bits // 8) + byte_in_element
    found = layout.locate(bytes_, nibble=nibble)
    expected = torch.meshgrid(*[torch.arange(axis.size) for axis in layout.axes], indexing="ij")
    for axis, index in zip(layout.axes, expected, strict=True):
        assert torch.equal(found[axis.name], index.flatten())
    if layout.element_bits > 8:
        assert bool((found["element_byte"] == byte_in_element).all())
    outside = layout.locate(torch.tensor([-1, layout.storage_bytes]))
    assert all(values.tolist() == [-1, -1] for values in outside.values())


# ---- known addresses


def page_row(token: int, block_m: int) -> int:
    page, m = divmod(token, block_m)
    aligned = (block_m + 127) & ~127
    return page * aligned + (m & ~127) + (m & 31) * 4 + ((m >> 5) & 3)


@pytest.mark.parametrize("block_m", [1, 8, 16, 32, 64, 96, 100, 128, 192, 240, 256, 300])
def test_scale_pages(block_m):
    """Every token's row, in both storage orders; rows that no token has are padding."""
    tokens = 500
    rows = torch.tensor([page_row(token, block_m) for token in range(tokens)])
    layout = get_layout("shared_scale_pages", tokens=tokens, groups=8, block_m=block_m)
    needed = -(-tokens // block_m) * ((block_m + 127) & ~127)
    assert layout.storage_shape == (needed, 2)
    assert layout.storage_strides == (1, needed)
    words = torch.arange(tokens * 8).remainder(251).to(torch.uint8).reshape(tokens, 8)
    expected = words.view(torch.int32)
    for name in ("shared_scale_pages", "shared_scale_pages_row_major"):
        pages = get_layout(name, tokens=tokens, groups=8, block_m=block_m).pack(words, fill=0xEE)
        assert torch.equal(pages[rows], expected)
        unused = torch.ones(needed, dtype=torch.bool)
        unused[rows] = False
        assert bool((pages[unused] == -0x11111112).all())


@pytest.mark.parametrize(
    ("block_m", "unused"), [(16, 112), (32, 96), (64, 64), (96, 32), (128, 0), (192, 64), (240, 16)]
)
def test_scale_pages_unused_rows(block_m, unused):
    layout = get_layout("shared_scale_pages", tokens=block_m, groups=4, block_m=block_m)
    assert int(layout.padding_mask().sum()) == 4 * unused


@pytest.mark.parametrize(
    ("token", "rows"),
    [
        (16, (128, 64, 64, 64, 64, 64)),
        (32, (256, 128, 1, 1, 1, 1)),
        (100, (784, 400, 145, 144, 19, 19)),
        (192, (1536, 768, 384, 256, 130, 256)),
    ],
)
def test_page_height_mismatch(token, rows):
    """CASES 18: the same token in pages of different height."""
    for block_m, row in zip((16, 32, 64, 96, 128, 192), rows, strict=True):
        layout = get_layout("shared_scale_pages", tokens=200, groups=4, block_m=block_m)
        assert int(layout.offsets(token=token, group=0)) == 4 * row
        assert int(layout.locate(torch.tensor([4 * row]))["token"]) == token


def test_page_rows_needed():
    heights = (16, 32, 64, 96, 128, 192)
    shapes = [
        get_layout("shared_scale_pages", tokens=200, groups=4, block_m=b).storage_shape[0] for b in heights
    ]
    assert shapes == [1664, 896, 512, 384, 256, 512]


def test_swizzle_tile():
    """CASES 17: (row 33, group 2) at byte 22; row-major has it at 134. 16 groups: its own inverse."""
    tile = get_layout("swizzle_128x4", rows=128, groups=4)
    assert int(tile.offsets(row=33, group=2)) == 22
    assert int(get_layout("row_major", rows=128, columns=4, dtype="uint8").offsets(row=33, column=2)) == 134
    coordinates = tile.locate(torch.tensor([22]))
    assert (int(coordinates["row"]), int(coordinates["group"])) == (33, 2)
    wide = get_layout("swizzle_128x4", rows=256, groups=8)
    assert int(wide.offsets(row=128, group=0)) == 1024
    assert int(wide.offsets(row=0, group=4)) == 512
    square = get_layout("swizzle_128x4", rows=128, groups=16).offsets().flatten()
    assert torch.equal(square[square], torch.arange(2048))
    assert not torch.equal(tile.offsets().flatten()[tile.offsets().flatten()], torch.arange(512))


@pytest.mark.parametrize("half", [16, 24, 64, 1152])
def test_gate_up_of_8(half):
    layout = get_layout("gate_up_interleaved_8", rows=2 * half, columns=1)
    rows = [(r // 8) * 16 + 8 * side + r % 8 for side in (0, 1) for r in range(half)]
    assert layout.offsets().flatten().tolist() == rows


def test_gate_up_orders():
    """CASES 20: 32 rows in blocks of 8 (an involution there, and not at 48 rows), and packed FP4."""
    source = torch.arange(32, dtype=torch.uint8)[:, None]
    plain = get_layout("gate_up_interleaved_8", rows=32, columns=1).pack(source).flatten().tolist()
    assert plain == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    even_odd = (
        get_layout("gate_up_interleaved_16_even_odd", rows=32, columns=1).pack(source).flatten().tolist()
    )
    assert even_odd == [*range(0, 16, 2), *range(16, 32, 2), *range(1, 16, 2), *range(17, 32, 2)]
    for rows, is_involution in ((32, True), (48, False), (2304, False)):
        order = get_layout("gate_up_interleaved_8", rows=rows, columns=1).offsets().flatten()
        assert torch.equal(order[order], torch.arange(rows)) is is_involution


@pytest.mark.parametrize("half", [64, 128, 192, 1024])
def test_gate_up_utccp(half):
    """The composition, and the closed form of loaders that write scale rows directly."""
    layout = get_layout("gate_up_utccp_scales", mn=2 * half, groups=4)
    actual = layout.axis_positions("row") // 4
    closed = []
    for side, r in itertools.product((0, 1), range(half)):
        b, j, q, m = r // 64, r % 64 // 16, r % 16 // 8, r % 8
        closed.append(128 * b + 64 * q + 32 * side + 4 * m + j)
    assert actual.tolist() == closed
    interleaved = get_layout("gate_up_interleaved_8", rows=2 * half, columns=1).axis_positions("row")
    utccp = get_layout("utccp_scales", mn=2 * half, groups=4).axis_positions("row") // 4
    assert torch.equal(actual, utccp[interleaved])


def test_utccp_direction():
    rows = get_layout("utccp_scales", mn=256, groups=4).axis_positions("row") // 4
    assert rows.tolist() == [128 * b + 4 * i + j for b in (0, 1) for j in range(4) for i in range(32)]


def test_padded_rows():
    """CASES 16: 72 scale bytes in rows of 80; a dense writer is 8 bytes off at token 1 and 16 at token 2."""
    padded = get_layout("row_major", rows=4, columns=72, dtype="uint8", row_stride=80)
    dense = get_layout("row_major", rows=4, columns=72, dtype="uint8")
    drift = padded.offsets() - dense.offsets()
    assert drift[:, 0].tolist() == [0, 8, 16, 24]
    found = padded.locate(dense.offsets(row=1, column=torch.arange(72)))
    assert found["row"].tolist() == [-1] * 8 + [1] * 64
    assert found["column"][8:].tolist() == list(range(64))


@pytest.mark.parametrize("k", [512, 640, 1024, 7168])
def test_mn_major_at_small_k(k):
    """CASES 19: one packed column hides the order; more than one does not."""
    groups = k // 128
    mn_major = get_layout("mn_major_packed_ue8m0", mn=8, groups=groups)
    rows = get_layout("packed_scale_rows", tokens=8, groups=groups)
    assert mn_major.storage_strides == (1, 8)
    values = torch.arange(8 * groups).remainder(255).to(torch.uint8).reshape(8, groups)
    same = torch.equal(memory_of(mn_major, mn_major.pack(values)), memory_of(rows, rows.pack(values)))
    assert same is (k == 512)
    assert get_layout("mn_major_packed_ue8m0", mn=6, groups=groups).storage_strides == (1, 8)


@pytest.mark.parametrize("tile", [64, 128])
def test_sm90_scales(tile):
    layout = get_layout("sm90_activation_scales", pool_rows=256, groups=4, tile=tile, rows=1024)
    assert (layout.storage_shape, layout.storage_strides) == ((1024, 4), (1, 1024))
    for row in (0, 1, 63, 64, 127, 128, 255):
        assert int(layout.offsets(pool_row=row, group=3)) == 3 * 1024 + row // tile * 128 + row % tile


def test_nibbles():
    layout = get_layout("e2m1_rows", tokens=1, columns=4)
    assert layout.pack(torch.tensor([[3, 9, 2, 7]], dtype=torch.uint8)).tolist() == [[0x93, 0x72]]
    assert layout.element_bits == 4


def test_words():
    """Four bytes a word, little endian; unused bytes of a word are zero."""
    codes = torch.tensor([[0x7F, 0x7E, 0x7D, 0x80]], dtype=torch.uint8)
    word = get_layout("packed_scale_rows", tokens=1, groups=4).pack(codes)
    assert word.tolist() == [[0x807D7E7F - (1 << 32)]]
    half = get_layout("packed_scale_rows", tokens=1, groups=3, groups_per_word=2).pack(
        codes[:, :3], fill=0xFF
    )
    assert half.tolist() == [[0x7E7F, 0x7D]]


def test_derived_columns():
    layout = get_layout("packed_scale_rows", tokens=3, groups=8, group_size=32)
    found = layout.locate(torch.tensor([0, 5, 8 + 7]))
    assert found["column"].tolist() == [0, 160, 224]
    assert "column" not in get_layout("packed_scale_rows", tokens=3, groups=8).locate(torch.tensor([0]))


# ---- telling layouts apart

SAME_TENSOR = {
    "mn_major_packed_ue8m0": {"mn": 256, "groups": 8},
    "packed_scale_rows": {"tokens": 256, "groups": 8},
    "utccp_scales": {"mn": 256, "groups": 8},
    "gate_up_utccp_scales": {"mn": 256, "groups": 8},
    "swizzle_128x4": {"rows": 256, "groups": 8},
    "shared_scale_pages": {"tokens": 256, "groups": 8, "block_m": 128},
    "shared_scale_pages_row_major": {"tokens": 256, "groups": 8, "block_m": 128},
    "gate_up_interleaved_8": {"rows": 256, "columns": 8},
    "gate_up_interleaved_16_even_odd": {"rows": 256, "columns": 8},
}


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(SAME_TENSOR, 2)))
def test_position_coded_scales_tell_layouts_apart(first, second):
    """Different bytes from the same 256 x 8 scales, except where two names mean the same bytes."""
    values = ((torch.arange(256)[:, None] * 8 + torch.arange(8)) * 37 % 253).to(torch.uint8)
    one, other = (get_layout(name, **SAME_TENSOR[name]) for name in (first, second))
    same = torch.equal(memory_of(one, one.pack(values)), memory_of(other, other.pack(values)))
    assert same is ((first, second) == ("utccp_scales", "shared_scale_pages"))


# ---- refusals and speed


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("nothing", {}, "no layout 'nothing'"),
        ("fp8_rows", {"tokens": 4}, r"missing \['columns'\]"),
        ("fp8_rows", {"tokens": 4, "columns": 4, "rows": 1}, r"unknown \['rows'\]"),
        ("fp8_rows", {"tokens": 0, "columns": 4}, "tokens must be positive"),
        ("fp8_rows", {"tokens": 4, "columns": 4, "row_stride": 3}, "row_stride must be at least 4"),
        ("e2m1_rows", {"tokens": 4, "columns": 5}, "columns must be a multiple of 2"),
        ("utccp_scales", {"mn": 64, "groups": 4}, "mn must be a multiple of 128"),
        ("gate_up_interleaved_8", {"rows": 24, "columns": 4}, "rows must be a multiple of 16"),
        ("gate_up_interleaved_16_even_odd", {"rows": 48, "columns": 4}, "rows must be a multiple of 32"),
        (
            "shared_scale_pages",
            {"tokens": 4, "groups": 4, "block_m": 16, "rows": 64},
            "rows must be at least 128",
        ),
        ("row_major", {"rows": 4, "columns": 4, "dtype": "float4"}, "dtype must be one of"),
    ],
)
def test_refused_values(name, params, message):
    with pytest.raises(ValueError, match=message):
        get_layout(name, **params)


@pytest.mark.parametrize("value", [4.0, "4", True])
def test_refused_types(value):
    with pytest.raises(TypeError, match="tokens must be an integer"):
        get_layout("fp8_rows", tokens=value, columns=4)


def test_refused_tensors():
    layout = get_layout("mn_major_packed_ue8m0", mn=6, groups=4)
    with pytest.raises(ValueError, match=r"holds \(6, 4\)"):
        layout.pack(torch.zeros(4, 6, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"holds torch\.uint8"):
        layout.pack(torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"stored as \(6, 1\)"):
        layout.unpack(torch.zeros(4, 6, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"stored as torch\.int32"):
        layout.unpack(torch.zeros(6, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="takes 24 to 32 bytes"):
        layout.unpack(torch.zeros(20, dtype=torch.uint8))
    with pytest.raises(ValueError, match="row must lie in"):
        layout.offsets(row=6, group=0)
    with pytest.raises(ValueError, match="axes"):
        layout.offsets(row=5)


def test_subset_of_a_large_tensor_is_not_materialised():
    layout = get_layout("gate_up_interleaved_8", rows=1 << 20, columns=1 << 14, batch=64)
    assert int(layout.offsets(batch=63, row=(1 << 19) + 8, column=5)) == ((63 << 20) + 24 << 14) + 5
    position = ((63 << 20) + 24 << 14) + 5
    found = layout.locate(torch.tensor([position]))
    assert [int(found[name]) for name in ("batch", "row", "column")] == [63, (1 << 19) + 8, 5]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_description_is_complete_plain_data(name, data):
    import json

    layout = get_layout(name, **data.draw(PARAMS[name]))
    description = json.loads(json.dumps(layout.describe()))
    stored = [digit for digit in description["digits"] if digit["stored"]]
    assert sorted(digit["name"] for digit in stored) == sorted(
        digit for entry in description["memory"] for digit in entry["digits"]
    )
    last = sum((digit["size"] - 1) * digit["stride"] for digit in stored)
    assert last < description["storage"]["bytes"] * 8 // description["element_bits"]
