"""Where every byte of a MegaMoE tensor lies: the named layouts.

A layout is one line in `_layout_expression`'s language, and a `Layout` derives from it whatever one may want
to know: the position of an element, the tensor in memory, the way back, the coordinates of a byte, which
bytes are padding and what they hold. Elements are the smallest things with a meaning of their own: a scale
byte and not the word it lies in, an E2M1 code and not its byte. So one expression says both how groups sit
in words and where words go.

    >>> pages = get_layout("shared_scale_pages", tokens=300, groups=16, block_m=192)
    >>> pages.storage_shape, pages.storage_strides
    ((512, 4), (1, 512))
    >>> int(pages.offsets(token=192, group=0)) // 4     # the row of token 192: the first of the second page
    256

Sources: the scale pages, TMA-aligned scales and gate/up orders of DeepGEMM's MegaMoE kernels, and the 128x4
scale-factor tile of tcgen05 and cuBLAS, restated and checked against recorded tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from reference._layout_core import DTYPES, Layout, LayoutFamily
from reference._layout_expression import Axis, Digit, Dimension

__all__ = ["DTYPES", "LAYOUTS", "Axis", "Digit", "Dimension", "Layout", "LayoutFamily", "get_layout"]

_BATCH = "experts (or other outer batch); None: the dimension is absent"
_GROUP_SIZE = "columns that share a scale; only for the derived coordinate `column`"
_SCALE_COLUMN = {"column": ("group", "group_size")}

_MXFP = "DeepGEMM MegaMoE (vLLM 0.33), UE8M0 or E4M3 scale bytes, four to an int32 word, little endian"

_FAMILIES = (
    LayoutFamily(
        "row_major",
        "batch:batch, row:rows, column:columns -> {dtype}[0: batch; 1: row; 2: column..row_stride]",
        {
            "rows": "rows",
            "columns": "columns",
            "dtype": "dtype of an element",
            "row_stride": "elements from row to row",
            "batch": _BATCH,
        },
        source="C order with a row pitch",
        defaults={"dtype": "float32", "row_stride": None, "batch": None},
    ),
    LayoutFamily(
        "fp8_rows",
        "token:tokens, column:columns -> float8_e4m3fn[0: token; 1: column..row_stride]",
        {"tokens": "rows", "columns": "hidden size", "row_stride": "bytes from row to row"},
        source="staging output x, E4M3",
        defaults={"row_stride": None},
    ),
    LayoutFamily(
        "e2m1_rows",
        "token:tokens, column:columns = byte nibble:2 -> uint8[0: token; 1: byte..row_stride; nibble]",
        {"tokens": "rows", "columns": "values in a row, even", "row_stride": "bytes from row to row"},
        source="packed E2M1: the even column in bits 3..0",
        defaults={"row_stride": None},
        multiples={"columns": 2},
    ),
    LayoutFamily(
        "topk_ids",
        "token:tokens, slot:topk -> int64[0: token; 1: slot..row_stride]",
        {"tokens": "rows", "topk": "slots of a token", "row_stride": "elements from row to row"},
        source="topk_idx of the symmetric buffer",
        defaults={"row_stride": None},
    ),
    LayoutFamily(
        "topk_weights",
        "token:tokens, slot:topk -> float32[0: token; 1: slot..row_stride]",
        {"tokens": "rows", "topk": "slots of a token", "row_stride": "elements from row to row"},
        source="topk_weights of the symmetric buffer",
        defaults={"row_stride": None},
    ),
    LayoutFamily(
        "packed_scale_rows",
        "token:tokens, group:groups = word byte:groups_per_word"
        " -> int32[0: token; 1: word..row_stride; byte..4]",
        {
            "tokens": "rows",
            "groups": "scale bytes in a row",
            "groups_per_word": "bytes of a word in use, the upper ones are zero (FP8 groups of 64 or 128)",
            "row_stride": "words from row to row",
            "group_size": _GROUP_SIZE,
        },
        source=_MXFP + ": x_sf, row-major",
        defaults={"groups_per_word": 4, "row_stride": None, "group_size": None},
        padding={"group": 0},
        scaled_axes=_SCALE_COLUMN,
    ),
    LayoutFamily(
        "mn_major_tma_aligned",
        "batch:batch, row:mn, group:groups -> {dtype}[0: batch; 2: group; 1: row~alignment]",
        {
            "mn": "rows",
            "groups": "scales in a row",
            "dtype": "a four-byte dtype",
            "batch": _BATCH,
            "group_size": _GROUP_SIZE,
        },
        source="DeepGEMM get_mn_major_tma_aligned_tensor: columns start at multiples of 16 bytes",
        defaults={"dtype": "float32", "batch": None, "group_size": None},
        derive=lambda params: {"alignment": 16 // DTYPES[str(params["dtype"])].itemsize},
        scaled_axes=_SCALE_COLUMN,
    ),
    LayoutFamily(
        "mn_major_packed_ue8m0",
        "batch:batch, row:mn, group:groups = word byte:4 -> int32[0: batch; 2: word; 1: row~4; byte]",
        {"mn": "rows", "groups": "scale bytes in a row", "batch": _BATCH, "group_size": _GROUP_SIZE},
        source="DeepGEMM get_mn_major_tma_aligned_packed_ue8m0_tensor; the bytes of missing groups are zero",
        defaults={"batch": None, "group_size": None},
        padding={"group": 0},
        scaled_axes=_SCALE_COLUMN,
    ),
    LayoutFamily(
        "shared_scale_pages",
        "token:tokens = page member:block_m, member = tile j:4 i:32, group:groups = word byte:4"
        " -> int32[1: word; 0: (page tile i j)=rows; byte]",
        {
            "tokens": "tokens",
            "groups": "scale bytes of a token",
            "block_m": "tokens of a page",
            "rows": "rows of the buffer; default: the pages that the tokens need",
            "group_size": _GROUP_SIZE,
        },
        source=_MXFP
        + ": shared_x_sf, l1_acts_sf, l2_acts_sf; pages of align(block_m, 128) rows in UTCCP order",
        defaults={"rows": None, "group_size": None},
        padding={"group": 0},
        scaled_axes=_SCALE_COLUMN,
    ),
    LayoutFamily(
        "shared_scale_pages_row_major",
        "token:tokens = page member:block_m, member = tile j:4 i:32, group:groups = word byte:4"
        " -> int32[0: (page tile i j)=rows; 1: word; byte]",
        {
            "tokens": "tokens",
            "groups": "scale bytes of a token",
            "block_m": "tokens of a page",
            "rows": "rows of the buffer; default: the pages that the tokens need",
            "group_size": _GROUP_SIZE,
        },
        source="the same pages in a contiguous tensor [rows, words]",
        defaults={"rows": None, "group_size": None},
        padding={"group": 0},
        scaled_axes=_SCALE_COLUMN,
    ),
    LayoutFamily(
        "utccp_scales",
        "batch:batch, row:mn = tile j:4 i:32, group:groups = word byte:4"
        " -> int32[0: batch; 2: word; 1: (tile i j); byte]",
        {
            "mn": "rows, a multiple of 128",
            "groups": "scale bytes in a row",
            "batch": _BATCH,
            "group_size": _GROUP_SIZE,
        },
        source="DeepGEMM weight scales after the UTCCP transposition: row 32j + i of 128 at 4i + j (L2)",
        defaults={"batch": None, "group_size": None},
        padding={"group": 0},
        scaled_axes=_SCALE_COLUMN,
        multiples={"mn": 128},
    ),
    LayoutFamily(
        "gate_up_utccp_scales",
        "batch:batch, row:mn = half:2 tile j:4 block:2 r:8, group:groups = word byte:4"
        " -> int32[0: batch; 2: word; 1: (tile block half r j); byte]",
        {
            "mn": "gate rows then up rows, together a multiple of 128",
            "groups": "scale bytes in a row",
            "batch": _BATCH,
            "group_size": _GROUP_SIZE,
        },
        source="DeepGEMM L1 weight scales: gate/up interleave of 8 rows, then the UTCCP transposition",
        defaults={"batch": None, "group_size": None},
        padding={"group": 0},
        scaled_axes=_SCALE_COLUMN,
        multiples={"mn": 128},
    ),
    LayoutFamily(
        "gate_up_interleaved_8",
        "batch:batch, row:rows = half:2 block r:8, column:columns"
        " -> {dtype}[0: batch; 1: (block half r); 2: column]",
        {
            "rows": "gate rows then up rows, a multiple of 16",
            "columns": "storage elements in a row (packed FP4: bytes)",
            "dtype": "dtype of a storage element",
            "batch": _BATCH,
        },
        source="DeepGEMM L1 weights: 8 gate rows, 8 up rows, ...",
        defaults={"dtype": "uint8", "batch": None},
        multiples={"rows": 16},
    ),
    LayoutFamily(
        "gate_up_interleaved_16_even_odd",
        "batch:batch, row:rows = half:2 block r:8 parity:2, column:columns"
        " -> {dtype}[0: batch; 1: (block parity half r); 2: column]",
        {
            "rows": "gate rows then up rows, a multiple of 32",
            "columns": "storage elements in a row (packed FP4: bytes)",
            "dtype": "dtype of a storage element",
            "batch": _BATCH,
        },
        source="sgl-deep-gemm FP4 x FP4 L1 weights: of 16 rows the even gate, even up, odd gate, odd up ones",
        defaults={"dtype": "uint8", "batch": None},
        multiples={"rows": 32},
    ),
    LayoutFamily(
        "swizzle_128x4",
        "row:rows = tile j:4 i:32, group:groups = strip byte:4"
        " -> uint8[0: tile; 1: strip; 2: i; 3: (j byte)]",
        {"rows": "rows", "groups": "scale bytes in a row", "group_size": _GROUP_SIZE},
        source="tcgen05 and cuBLAS block scale factors: tiles of 128 rows by 4 scales, 512 bytes each",
        defaults={"group_size": None},
        scaled_axes=_SCALE_COLUMN,
    ),
    LayoutFamily(
        "sm90_activation_scales",
        "pool_row:pool_rows = page member:tile, group:groups"
        " -> float32[1: group; 0: (page member..page_rows)=rows]",
        {
            "pool_rows": "rows of the token pool",
            "groups": "scales in a row",
            "tile": "rows of an MMA tile, at most 128",
            "rows": "rows of the buffer; default: the pages that the pool needs",
            "group_size": _GROUP_SIZE,
        },
        source="sgl-deep-gemm 0.1.5, SM90 l1_acts_sf and l2_acts_sf: pages of 128 rows, no UTCCP order",
        defaults={"rows": None, "group_size": None},
        derive=lambda params: {"page_rows": -(-int(str(params["tile"])) // 128) * 128},
        scaled_axes=_SCALE_COLUMN,
    ),
)

LAYOUTS: dict[str, LayoutFamily] = {family.name: family for family in _FAMILIES}


def _check_params(family: LayoutFamily, params: Mapping[str, object]) -> dict[str, object]:
    unknown = sorted(set(params) - set(family.params))
    missing = sorted(set(family.params) - set(params) - set(family.defaults))
    if unknown or missing:
        raise ValueError(
            f"layout {family.name} takes {sorted(family.params)}: "
            + "; ".join(
                f"{what} {names}" for what, names in (("unknown", unknown), ("missing", missing)) if names
            )
        )
    complete = {name: params.get(name, family.defaults.get(name)) for name in family.params}
    for name, value in complete.items():
        if name == "dtype":
            if value not in DTYPES:
                raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {value!r}")
        elif value is None and name in family.defaults and family.defaults[name] is None:
            continue
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer ({family.params[name]}), got {value!r}")
        elif value <= 0:
            raise ValueError(f"{name} must be positive ({family.params[name]}), got {value}")
    for name, multiple in family.multiples.items():
        size = complete[name]
        if isinstance(size, int) and size % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple} in layout {family.name}, got {size}")
    return complete


def get_layout(name: str, **params: object) -> Layout:
    """The named layout with these sizes; `LAYOUTS` lists the names and what each takes.

    ValueError: an unknown name, unknown or missing parameters, sizes that are not positive or do not fit the
    layout. TypeError: a size that is not an integer.
    """
    if name not in LAYOUTS:
        raise ValueError(f"no layout {name!r}; there are {sorted(LAYOUTS)}")
    family = LAYOUTS[name]
    complete = _check_params(family, params)
    names = {**complete, **(family.derive(complete) if family.derive else {})}
    return Layout(family, complete, names)
