"""The symmetric buffer: every recorded size and view, the SM90 pools, tiling, sharing, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megamoe.bundle import read_bundle
from reference.symm_buffer import (
    VIEW_NAMES,
    BufferSizes,
    SymmBuffer,
    get_symm_buffer_for_mega_moe,
    sm90_library_refusal,
    symm_buffer_fields,
    symm_buffer_num_bytes,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
TABLES = json.loads((GOLDENS / "host_tables.json").read_text())
SM90 = [
    case for case in read_bundle(GOLDENS / "sm90_mega_moe.safetensors").cases if case.op == "fp8_mega_moe"
]


class Group(SimpleNamespace):
    """A process group as far as a buffer looks at it."""

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def sizes_of(row: dict) -> BufferSizes:
    names = [
        "num_ranks",
        "num_experts",
        "num_max_tokens_per_rank",
        "num_topk",
        "hidden",
        "intermediate_hidden",
        "num_shared_experts",
    ]
    return BufferSizes(
        **{name: row[name] for name in names},
        num_sms=TABLES["num_sms"],
        shared_bf16=row.get("shared_bf16", False),
    )


def row_id(row: dict) -> str:
    shared = f"s{row['num_shared_experts']}" + ("bf16" if row.get("shared_bf16") else "")
    return f"{row['mma_type']}-r{row['num_ranks']}-e{row['num_experts']}-h{row['hidden']}-{shared}"


@pytest.mark.parametrize("row", TABLES["buffers"], ids=row_id)
def test_recorded_sizes(row):
    assert symm_buffer_num_bytes(sizes_of(row), row["mma_type"]) == row["num_bytes"]


# The largest buffers exist as field lists only: a gigabyte for each would prove nothing more.
SMALL_ROWS = [row for row in TABLES["buffers"] if "views" in row and row["num_bytes"] < 100e6]


@pytest.mark.parametrize("row", SMALL_ROWS, ids=row_id)
def test_recorded_views(row):
    sizes = sizes_of(row)
    buffer = SymmBuffer(
        Group(ranks=sizes.num_ranks),
        sizes.num_experts,
        sizes.num_max_tokens_per_rank - 7,  # rounded up
        sizes.num_topk,
        sizes.hidden,
        sizes.intermediate_hidden,
        sizes.num_shared_experts,
        row["mma_type"],
        num_sms=sizes.num_sms,
        shared_bf16=sizes.shared_bf16,
    )
    assert buffer.num_max_tokens_per_rank == sizes.num_max_tokens_per_rank
    assert buffer.buffer.numel() == row["num_bytes"]
    names = row.get("view_names", VIEW_NAMES)
    assert len(names) == len(row["views"])
    for name, recorded in zip(names, row["views"], strict=True):
        view = getattr(buffer, name)
        if recorded is None:
            assert view is None, name
            continue
        actual = {
            "offset": view.data_ptr() - buffer.buffer.data_ptr(),
            "shape": list(view.shape),
            "stride": list(view.stride()),
            "dtype": str(view.dtype),
        }
        assert actual == recorded, name


@pytest.mark.parametrize("row", [row for row in TABLES["buffers"] if "views" in row], ids=row_id)
def test_recorded_fields(row):
    fields = {field.name: field for field in symm_buffer_fields(sizes_of(row), row["mma_type"])}
    for name, recorded in zip(row.get("view_names", VIEW_NAMES), row["views"], strict=True):
        if recorded is None or name == "shared_l1_acts":
            continue
        field = fields[name]
        assert [field.offset, list(field.shape), list(field.stride), str(field.dtype)] == [
            recorded[key] for key in ("offset", "shape", "stride", "dtype")
        ], name


def test_every_recorded_row_has_its_views_or_says_nothing():
    assert sum("views" in row for row in TABLES["buffers"]) == len(TABLES["buffers"]) - 3
    assert len(SMALL_ROWS) > 20


@pytest.mark.parametrize("case", SM90, ids=lambda case: case.case)
def test_recorded_sm90_pools(case):
    experts, rows, hidden = case.inputs["l1_w"].shape
    sizes = BufferSizes(
        case.params["num_ranks"],
        experts,
        case.params["num_max_tokens_per_rank"],
        case.inputs["topk_idx"].shape[1],
        hidden,
        rows // 2,
    )
    fields = {field.name: field for field in symm_buffer_fields(sizes, "sm90")}
    assert list(fields["l1_acts"].shape) == case.params["pool_shape"]
    assert list(fields["l1_acts_sf"].shape) == case.params["sf_shape"]
    assert list(fields["l2_acts_sf"].shape) == case.params["l2_sf_shape"]


# Sizes and offsets (in the order of the views that SM90 has) that sgl-deep-gemm 0.1.5 gave on an H200:
# ranks, experts, tokens, topk, hidden, intermediate -> bytes, {view: offset}.
SM90_MEASURED = {
    (1, 4, 384, 2, 512, 256): (2997632, (27008, 223616, 229760, 235904, 238976, 1025408, 1424768, 1817984)),
    (1, 4, 384, 4, 512, 512): (5969408, (37376, 233984, 240128, 252416, 258560, 1438208, 2037248, 3216896)),
    (1, 4, 3840, 2, 512, 256): (
        21006848,
        (175616, 2141696, 2203136, 2264576, 2295296, 6620672, 8817152, 10979840),
    ),
    (1, 8, 384, 2, 512, 256): (4000352, ()),
    (1, 8, 768, 2, 1024, 512): (11918048, ()),
    (1, 16, 1152, 6, 2048, 1024): (82194464, ()),
    (2, 16, 384, 4, 1024, 512): (15496288, ()),
    (4, 32, 384, 4, 2048, 1024): (46774112, ()),
    (8, 64, 384, 6, 4096, 1536): (205686112, ()),
    (8, 256, 768, 8, 7168, 2048): (922129696, ()),
}


@pytest.mark.parametrize("sizes", SM90_MEASURED, ids=lambda sizes: "-".join(map(str, sizes)))
def test_measured_sm90_buffers(sizes):
    num_bytes, offsets = SM90_MEASURED[sizes]
    fields = {field.name: field for field in symm_buffer_fields(BufferSizes(*sizes), "sm90")}
    assert symm_buffer_num_bytes(BufferSizes(*sizes), "sm90") == num_bytes
    names = [name for name in VIEW_NAMES if not name.startswith("shared")]
    assert tuple(fields[name].offset for name in names)[: len(offsets)] == offsets


@pytest.mark.parametrize(
    ("hidden", "intermediate", "refused"),
    [
        (256, 128, True),
        (1280, 640, True),
        (512, 256, False),
        (7168, 2048, False),
        (512, 128, True),
        (256, 256, True),
    ],
)
def test_sizes_without_an_sm90_buffer(hidden, intermediate, refused):
    """Measured: the library makes none where a token's scales are not whole TMA units."""
    reason = sm90_library_refusal(hidden, intermediate)
    assert (reason is not None) is refused
    assert reason is None or f"got {hidden} and {intermediate}" in reason


KINDS = ["fp8xfp4", "fp8xfp8", "bf16xbf16", "fp4xfp4", "nvfp4", "sm90"]


@pytest.mark.parametrize(
    ("kind", "shared"), [*((kind, shared) for kind in KINDS[:-1] for shared in (0, 1, 2)), ("sm90", 0)]
)
def test_regions_tile_the_buffer(kind, shared):
    """Regions follow each other without gaps, and a tensor's last element ends its region."""
    tokens = 384 if kind == "sm90" else 1920
    sizes = BufferSizes(2, 16, tokens, 4, 512, 256, shared)
    end = 0
    for field in symm_buffer_fields(sizes, kind):
        assert field.offset == end
        end += field.num_bytes
        if field.shape is not None:
            last = sum((size - 1) * stride for size, stride in zip(field.shape, field.stride, strict=True))
            assert (last + 1) * field.dtype.itemsize == field.num_bytes
    assert end == symm_buffer_num_bytes(sizes, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_views_do_not_overlap(kind):
    """Every view filled with its own value still holds it afterwards."""
    shared = 0 if kind == "sm90" else 1
    buffer = SymmBuffer(Group(ranks=1), 4, 1, 1, 512, 256, shared, kind, shared_bf16=False)
    views = {name: getattr(buffer, name) for name in (*VIEW_NAMES, "x_scales")}
    if views["shared_l1_acts"] is views["x"]:
        del views["shared_l1_acts"]
    views = {name: view for name, view in views.items() if view is not None}
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for number, view in enumerate(views.values(), 1):
        view.view(integers[view.dtype.itemsize]).fill_(number)
    for number, view in enumerate(views.values(), 1):
        assert bool((view.view(integers[view.dtype.itemsize]) == number).all())
    workspace = buffer.fields[0]
    assert not bool(buffer.buffer[: workspace.num_bytes].any())


def test_sharing():
    """CASES of two MMA types in one storage: the same bytes from the same start, nothing cleared."""
    group = Group(ranks=1)
    bf16 = get_symm_buffer_for_mega_moe(group, 4, 100, 1, 256, 256, mma_type="bf16xbf16")
    bf16.topk_idx.fill_(3)
    fp4 = SymmBuffer(group, 4, 100, 1, 256, 256, mma_type="fp4xfp4", base=bf16)
    assert fp4.buffer is bf16.buffer
    assert fp4.num_bytes < bf16.num_bytes
    assert bool((bf16.topk_idx == 3).all())
    fp4.x.fill_(0x5A)
    assert bool((bf16.x.view(torch.uint8).flatten()[: fp4.x.numel()] == 0x5A).all())
    small = get_symm_buffer_for_mega_moe(group, 4, 100, 1, 256, 256, mma_type="fp4xfp4")
    with pytest.raises(ValueError, match="base must have at least"):
        SymmBuffer(group, 4, 100, 1, 256, 256, mma_type="bf16xbf16", base=small)
    with pytest.raises(ValueError, match="same group"):
        SymmBuffer(Group(ranks=1), 4, 100, 1, 256, 256, mma_type="fp4xfp4", base=bf16)
    bf16.destroy()
    assert bf16.x is None
    assert bf16.buffer is None
    with pytest.raises(ValueError, match="destroyed"):
        SymmBuffer(group, 4, 100, 1, 256, 256, mma_type="fp4xfp4", base=bf16)


def test_shared_input_aliases():
    group = Group(ranks=1)
    for kind, shared, aliased in (
        ("fp8xfp4", 0, True),
        ("bf16xbf16", 1, True),
        ("nvfp4", 0, True),
        ("nvfp4", 1, False),
    ):
        buffer = SymmBuffer(group, 4, 1, 1, 256, 256, shared, kind)
        assert (buffer.shared_l1_acts is buffer.x) is aliased
    assert SymmBuffer(group, 4, 1, 1, 256, 256, 0, "fp4xfp4").shared_l1_acts is None


def test_sm_count_moves_what_lies_behind_the_ring():
    sizes = {sms: BufferSizes(8, 256, 1920, 8, 7168, 2048, 1, sms) for sms in (132, 160)}
    fields = {sms: {f.name: f for f in symm_buffer_fields(size)} for sms, size in sizes.items()}
    assert fields[132]["l1_acts"].offset == fields[160]["l1_acts"].offset
    assert fields[132]["l2_acts"].offset < fields[160]["l2_acts"].offset


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mma_type": "fp6"}, "mma_type must be one of"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank must be positive"),
        ({"num_experts": 0}, "num_experts must be positive"),
        ({"num_experts": 3, "ranks": 2}, "num_experts must be a multiple of num_ranks=2"),
        ({"num_topk": 5}, "num_topk must be at most num_experts=4"),
        ({"hidden": 384}, "multiples of 256"),
        ({"intermediate_hidden": 192}, "multiples of 256"),
        ({"num_shared_experts": -1}, "num_shared_experts must not be negative"),
        ({"num_experts": 73 * 2, "ranks": 73}, "num_ranks must be at most 72"),
        ({"num_experts": 513}, "experts of a rank must be at most 512"),
        ({"num_experts": 4096, "ranks": 64}, "num_experts must be at most 2048"),
        ({"num_max_tokens_per_rank": 32768 * 8 + 1}, "shared blocks must be at most"),
        ({"mma_type": "sm90", "num_shared_experts": 1}, "num_shared_experts must be 0 on SM90"),
        ({"mma_type": "sm90", "hidden": 192}, "multiples of 128"),
        ({"mma_type": "sm90", "intermediate_hidden": 64}, "multiples of 128"),
    ],
)
def test_refused(changes, message):
    arguments = {
        "num_experts": 4,
        "num_max_tokens_per_rank": 100,
        "num_topk": 1,
        "hidden": 256,
        "intermediate_hidden": 256,
    } | changes
    group = Group(ranks=arguments.pop("ranks", 1))
    with pytest.raises(ValueError, match=message):
        SymmBuffer(group, **arguments)


def test_unaligned_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 1920"):
        symm_buffer_fields(BufferSizes(1, 4, 100, 1, 256, 256))
    with pytest.raises(ValueError, match="multiple of 384"):
        symm_buffer_fields(BufferSizes(1, 4, 100, 1, 256, 256), "sm90")
    with pytest.raises(ValueError, match="has no tensor"):
        symm_buffer_fields(BufferSizes(1, 4, 1920, 1, 256, 256))[0].view(torch.zeros(1, dtype=torch.int8))
