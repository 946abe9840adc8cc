"""The closed vocabulary: every cause that an explanation can name, with its meaning and what tells it apart.

A row: name, family, one-line meaning, and a shape or an input on which this cause cannot be mistaken for
another. Families: "layout" (bytes are right, their places are not), "recipe" (other arithmetic), "routing"
(ids, weights, load), "kind" (a pattern that needs neither), "form" (dtype, shape or stride).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["layout", "recipe", "routing", "kind", "form"]


@dataclass(frozen=True)
class Cause:
    """name: as in reports. meaning: what the actual side did. decide: what would settle a doubt."""

    name: str
    family: Family
    meaning: str
    decide: str


_ROWS: tuple[tuple[str, Family, str, str], ...] = (
    (
        "nibble_order",
        "layout",
        "the two FP4 codes of each byte are exchanged: the even column belongs in bits 3..0",
        "a row (1.0, 6.0): 0x72 is right, 0x27 is exchanged",
    ),
    (
        "byte_order",
        "layout",
        "the bytes of each word are reversed: group 0 belongs in the lowest byte",
        "four different scales in one word",
    ),
    (
        "transposed",
        "layout",
        "rows and columns are exchanged in memory",
        "a matrix that is not square, all values different",
    ),
    (
        "row_shift",
        "layout",
        "every row is stored some rows too early or too late",
        "rows that all differ, and two tile heights",
    ),
    (
        "row_stride",
        "layout",
        "rows start at multiples of another distance (dense rows in padded memory, or padded in dense)",
        "at least three rows that all differ; hidden 2304 has 72 live and 80 stored scale bytes",
    ),
    (
        "tile_stride",
        "layout",
        "tiles are stored at a wrong distance and overwrite each other's scales",
        "group 32 and hidden 256, every scale different",
    ),
    (
        "mn_major_missing",
        "layout",
        "scales are stored row-major where MN-major (rows fastest, columns aligned) was wanted",
        "K = 1024 or more and rows that are no multiple of 4; at K = 512 one packed column hides it",
    ),
    (
        "page_permutation_missing",
        "layout",
        "scale pages lack the UTCCP order: row 32j + i of 128 belongs at 4i + j",
        "64 tokens or more, every scale different",
    ),
    (
        "page_permutation_twice",
        "layout",
        "the UTCCP order of scale pages was applied twice",
        "64 tokens or more, every scale different",
    ),
    (
        "wrong_block_m",
        "layout",
        "scale pages are laid out for tiles of another height than the launch uses",
        "more tokens than the smaller block_m, e.g. 200; the first min(block_m) tokens agree",
    ),
    (
        "swizzle_128x4_missing",
        "layout",
        "scales are row-major where tiles of 128 x 4 were wanted",
        "256 rows by 8 scale columns; with exactly 16 columns the swizzle is its own inverse",
    ),
    (
        "swizzle_128x4_twice",
        "layout",
        "the 128 x 4 swizzle was applied twice",
        "256 rows by 8 scale columns; with exactly 16 columns the swizzle is its own inverse",
    ),
    (
        "interleave_missing",
        "layout",
        "gate and up rows are concatenated where they should alternate in blocks",
        "48 rows: at 32 rows and blocks of 8 the interleave is its own inverse",
    ),
    (
        "interleave_twice",
        "layout",
        "gate and up rows were interleaved twice",
        "48 rows: at 32 rows and blocks of 8 the interleave is its own inverse",
    ),
    (
        "interleave_granularity",
        "layout",
        "gate and up rows alternate in blocks of another size",
        "64 rows or more, all different",
    ),
    (
        "gate_up_swapped",
        "layout",
        "up comes first where gate should",
        "gate and up rows that all differ",
    ),
    (
        "rows_permuted",
        "layout",
        "the right rows in another order, which no named layout gives",
        "rows that all differ",
    ),
    (
        "off_by_one_tile",
        "layout",
        "whole tiles are stored one tile too early or too late",
        "two tile sizes, tiles that all differ",
    ),
    (
        "duplicated_rows",
        "kind",
        "rows hold a copy of another row",
        "rows that all differ",
    ),
    (
        "swapped_rows",
        "kind",
        "pairs of rows are exchanged",
        "rows that all differ",
    ),
    (
        "unwritten",
        "kind",
        "the region still holds its fill: it was never written",
        "the same call with another fill byte",
    ),
    (
        "stale",
        "kind",
        "the region holds what an earlier call or the buffer before this call held",
        "the same call on a freshly filled buffer",
    ),
    (
        "bytes_look_like_fp32",
        "kind",
        "float32 values lie where narrower codes were wanted",
        "the dtype that the writer believes in",
    ),
    (
        "scale_plus_one",
        "kind",
        "the scale is one exponent step too large, the payload is not",
        "the payload of the same groups",
    ),
    (
        "scale_minus_one",
        "kind",
        "the scale is one exponent step too small, the payload is not",
        "a group whose amax / 448 is an exact power of two, or the payload of the same groups",
    ),
    (
        "scale_rounding_floor",
        "recipe",
        "the scale was rounded down to a power of two instead of up",
        "a group whose amax is 448 (kept) beside one of 449 (changed)",
    ),
    (
        "scale_rounding_nearest",
        "recipe",
        "the scale was rounded to the nearest power of two instead of up",
        "groups of amax 1.25 * 448 (changed) and 1.75 * 448 (kept)",
    ),
    (
        "scale_rounding_log2",
        "recipe",
        "the power of two was computed through log2 or frexp instead of from the bits",
        "amax 448 (frexp is off) and the float32 just above 448 (log2 is off)",
    ),
    (
        "scale_rounded_after_quantization",
        "recipe",
        "values were divided by the unrounded scale; only the stored one was rounded",
        "group [300, -150, 10, 0...]: dequantized 288, -144, 10 is right",
    ),
    (
        "amax_floor",
        "recipe",
        "another lower bound for a group's (or a token's) largest magnitude, or none",
        "a zero group and one of 1e-8",
    ),
    (
        "reciprocal_instead_of_division",
        "recipe",
        "multiplied by a rounded reciprocal where a division was wanted",
        "E4M3 scale byte 0x07 with 0.0239257794: 1.5 divided, 2.0 multiplied",
    ),
    (
        "division_instead_of_reciprocal",
        "recipe",
        "divided where a product with the rounded reciprocal was wanted",
        "every bf16 amax: the two differ in about half of the float32 scales",
    ),
    (
        "ties_away",
        "recipe",
        "halfway values were rounded away from zero instead of to the even code",
        "exact midpoints: E2M1 0.25, 1.25, 2.5, 5.0",
    ),
    (
        "ties_toward_zero",
        "recipe",
        "halfway values were rounded toward zero instead of to the even code",
        "exact midpoints: E2M1 0.75, 1.75, 3.5",
    ),
    (
        "truncation",
        "recipe",
        "values were cut off toward zero instead of rounded",
        "values just below a code",
    ),
    (
        "negative_zero",
        "recipe",
        "the sign of zero was dropped where it is kept, or kept where it is dropped",
        "-0.0 and tiny negative values",
    ),
    (
        "overflow_nan",
        "recipe",
        "values beyond the largest finite one became NaN instead of saturating",
        "464, 465, 1000 and inf",
    ),
    (
        "double_rounding",
        "recipe",
        "values were rounded to bf16 or fp16 first and then to the codes",
        "values that bf16 rounds onto a midpoint, with scales that are no powers of two",
    ),
    (
        "flush_to_zero",
        "recipe",
        "subnormal results became zero",
        "codes 0x01 to 0x07",
    ),
    (
        "nan_propagated",
        "recipe",
        "a NaN element entered its group's amax instead of being ignored",
        "one NaN in a group of ordinary values",
    ),
    (
        "inf_handling",
        "recipe",
        "an infinite amax leads to another scale or reciprocal",
        "one Inf in a group of ordinary values",
    ),
    (
        "product_of_scales",
        "recipe",
        "values were divided once by the product of the scales instead of by one after the other",
        "scales with long significands, values next to midpoints",
    ),
    (
        "special_codes",
        "recipe",
        "UE8M0 bytes 0 and 255 were decoded as the format says (2^-127, NaN) not by the shift (0, inf)",
        "bytes 0 and 255",
    ),
    (
        "scale_ceiling",
        "recipe",
        "the block scale has another upper bound",
        "a group amax above 2688",
    ),
    (
        "global_scale_missing",
        "recipe",
        "the outer (global or per-token) scale was not applied",
        "an outer scale far from 1",
    ),
    (
        "global_scale_inverted",
        "recipe",
        "the outer scale's reciprocal was used, or a stored divisor as a factor",
        "an outer scale far from 1",
    ),
    (
        "gate_up_scale_shared",
        "recipe",
        "gate and up have their own scales, but one was applied to both",
        "scales in the ratio 2",
    ),
    (
        "clamp_missing",
        "recipe",
        "the activation was not clamped",
        "limit 10: gate 12, up -15",
    ),
    (
        "clamp_symmetric",
        "recipe",
        "the gate was clamped from below too",
        "limit 10: gate -20, up 5",
    ),
    (
        "activation_rounding",
        "recipe",
        "gate and up were (or were not) rounded to bf16 before the activation",
        "gate values between two bf16 numbers",
    ),
    (
        "routing_weight_misplaced",
        "recipe",
        "the routing weight was applied at another stage, or not at all",
        "weights far from 1",
    ),
    (
        "fast_math",
        "recipe",
        "exponential and reciprocal are approximate where exact ones were wanted, or the reverse",
        "the same call with the other fast_math",
    ),
    (
        "accumulation_order",
        "recipe",
        "the same terms were added in another order or precision",
        "inputs whose every partial sum is exact",
    ),
    (
        "padding_sentinel",
        "routing",
        "padding slots hold another sentinel than -1 and 0.0",
        "a masked token",
    ),
    (
        "padding_not_masked",
        "routing",
        "padding tokens kept their ids or weights",
        "a masked token with live ids",
    ),
    (
        "padded_tokens_counted",
        "routing",
        "load was recorded for padding tokens too",
        "fewer unpadded tokens than rows",
    ),
    (
        "replica_hash_width",
        "routing",
        "the replica hash has another width or is signed",
        "3 replicas, tokens 0 to 7: 0,0,2,2,1,0,0,2",
    ),
    (
        "replica_by_slot",
        "routing",
        "the replica was chosen by flat slot instead of by token",
        "two slots and two replicas",
    ),
    (
        "invalid_id_kept",
        "routing",
        "ids outside the logical experts were kept instead of becoming -1",
        "an id beyond the number of experts",
    ),
    (
        "id_width",
        "routing",
        "ids were written or converted with another integer width",
        "an id of -1 and one above 2^31",
    ),
    (
        "duplicate_experts",
        "routing",
        "a token lists the same expert more than once",
        "rows of equal or NaN logits",
    ),
    (
        "dtype_differs",
        "form",
        "the tensors have different dtypes",
        "",
    ),
    (
        "shape_differs",
        "form",
        "the tensors have different shapes",
        "",
    ),
    (
        "stride_differs",
        "form",
        "the values agree but the tensor is laid out with other strides",
        "",
    ),
    (
        "missing_output",
        "form",
        "one side has no such output",
        "",
    ),
    (
        "unknown",
        "kind",
        "no single named change reproduces the actual bytes",
        "",
    ),
)

CAUSES: dict[str, Cause] = {row[0]: Cause(*row) for row in _ROWS}

_TITLES: tuple[tuple[Family, str], ...] = (
    ("layout", "Right bytes in wrong places"),
    ("recipe", "Other arithmetic"),
    ("routing", "Ids, weights and load"),
    ("kind", "Patterns"),
    ("form", "Form"),
)


def as_markdown() -> str:
    """The vocabulary as tables, for docs/explain.md."""
    lines: list[str] = []
    for family, title in _TITLES:
        lines += [
            f"### {title}",
            "",
            "| cause | what the actual side did | what settles a doubt |",
            "|---|---|---|",
        ]
        rows = [cause for cause in CAUSES.values() if cause.family == family]
        lines += [f"| `{cause.name}` | {cause.meaning} | {cause.decide} |" for cause in rows]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
