"""The corpus: every fault in several shapes, operations and sizes. ``CORPUS`` is a list of Fault."""

from __future__ import annotations

from functools import lru_cache, partial

import ml_dtypes
import numpy as np
import torch

from tests.explain import faults as f
from tests.explain import launches as launch
from tests.explain import quantizers as q
from tests.explain.faults import Fault
from tests.explain.scenes import (
    Scene,
    eplb_scene,
    fp4_launch_scene,
    fp8_scene,
    launch_scene,
    layout_scene,
    nvfp4_block_scene,
    nvfp4_scene,
    plain_scene,
    pre_dispatch_scene,
)

_cached = lru_cache(maxsize=64)
fp8 = _cached(fp8_scene)
nvfp4 = _cached(nvfp4_scene)
nvfp4_block = _cached(nvfp4_block_scene)
eplb = _cached(eplb_scene)
named = _cached(layout_scene)
forward = _cached(launch_scene)
fp4_forward = _cached(fp4_launch_scene)
pre_dispatch = _cached(pre_dispatch_scene)


@_cached
def weights(rows: int, columns: int, batch: int = 3, seed: int = 0) -> Scene:
    return named("gate_up_interleaved_8", seed, rows=rows, columns=columns, batch=batch)


@_cached
def swizzled(rows: int, groups: int) -> Scene:
    return named("swizzle_128x4", 1, rows=rows, groups=groups)


@_cached
def anonymous(rows: int, columns: int, kind: str = "uint8", seed: int = 0) -> Scene:
    rng = np.random.default_rng(seed)
    if kind == "float32":
        return plain_scene(torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32)))
    if kind == "bfloat16":
        return plain_scene(
            torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32)).bfloat16()
        )
    if kind == "int64":
        return plain_scene(torch.from_numpy(rng.integers(-1, 256, (rows, columns))), "topk_idx")
    return plain_scene(torch.from_numpy(rng.integers(0, 256, (rows, columns)).astype(np.uint8)))


def _many(cause: str, name: str, inject: f.Inject, **scenes: object) -> list[Fault]:
    return [
        Fault(f"{cause}-{name}-{label}" if name else f"{cause}-{label}", cause, scene, inject)
        for label, scene in scenes.items()
    ]  # type: ignore[arg-type]


S = partial
L = partial(forward, 5)
U = partial(fp8, 200, 512, block_m=64)  # UE8M0, with pages
SMALL = partial(fp8, 40, 256)
WIDE = partial(fp8, 64, 2304, pitch=2)
F128 = partial(fp8, 96, 512, group=128, fp32=True)
F32 = partial(fp8, 64, 512, group=32, fp32=True)
N2 = partial(nvfp4, 100, 512)
N2_SMALL = partial(nvfp4, 24, 256)
N1 = partial(nvfp4_block, 90, 512)
TIES = partial(fp8, 64, 512, kind="ties")
N1_TIES = partial(nvfp4_block, 64, 512, kind="ties")

CORPUS: list[Fault] = [
    # ---- layout
    *_many("nibble_order", "x", f.nibbles("x"), two=N2, one=N1, small=N2_SMALL),
    *_many("nibble_order", "plain", f.nibbles("output"), bytes=S(anonymous, 64, 128)),
    *_many("byte_order", "x_sf", f.reversed_words("x_sf"), ue8m0=U, wide=WIDE, nvfp4=N2),
    *_many("byte_order", "plain", f.reversed_words("output", 4), fp32=S(anonymous, 64, 128, "float32")),
    *_many("byte_order", "plain", f.reversed_words("output", 2), bf16=S(anonymous, 64, 128, "bfloat16")),
    *_many("transposed", "x", f.transposed("x"), fp8=U, small=SMALL),
    *_many(
        "transposed",
        "plain",
        f.transposed("output"),
        bytes=S(anonymous, 48, 80),
        fp32=S(anonymous, 30, 50, "float32"),
        square=S(anonymous, 64, 64),
    ),
    *_many("transposed", "x_sf", f.transposed("x_sf"), words=U),
    *_many("row_shift", "down", f.rows_shifted("x", 1), fp8=U, small=SMALL, nvfp4=N2),
    *_many("row_shift", "up", f.rows_shifted("x_sf", -1), fp8=U, wide=WIDE),
    *_many("row_shift", "plain", f.rows_shifted("output", 3), bytes=S(anonymous, 64, 40)),
    *_many("row_stride", "dense", f.dense_rows("x_sf"), h2304=WIDE, h512=S(fp8, 50, 512, pitch=12)),
    *_many("row_stride", "padded", f.padded_rows("x", 64), fp8=S(fp8, 60, 384)),
    *_many("row_stride", "plain", f.padded_rows("output", 8), bytes=S(anonymous, 64, 72)),
    *_many("tile_stride", "x_sf", f.tiles_overlap("x_sf", 4), g32=F32),
    *_many(
        "mn_major_missing",
        "",
        f.row_major_words,
        packed=S(named, "mn_major_packed_ue8m0", 3, mn=130, groups=28, batch=2),
        odd=S(named, "mn_major_packed_ue8m0", 4, mn=67, groups=224),
        fp32=S(named, "mn_major_tma_aligned", 5, mn=50, groups=12),
    ),
    *_many(
        "page_permutation_missing",
        "pages",
        f.pages(f.without_order),
        bm64=U,
        bm192=S(fp8, 300, 256, block_m=192),
        bm16=S(fp8, 100, 256, block_m=16),
    ),
    *_many(
        "page_permutation_missing",
        "weights",
        f.reordered(f.order_undone),
        l2=S(named, "utccp_scales", 6, mn=256, groups=16, batch=2),
        plain=S(anonymous, 256, 64, seed=9),
    ),
    *_many(
        "page_permutation_twice", "pages", f.pages(f.order_twice), bm64=U, bm128=S(fp8, 300, 256, block_m=128)
    ),
    *_many(
        "page_permutation_twice",
        "weights",
        f.reordered(f.ordered_again),
        l2=S(named, "utccp_scales", 6, mn=256, groups=16, batch=2),
    ),
    *_many(
        "wrong_block_m",
        "128",
        f.pages(lambda t, b: f.page_row(t, 128)),
        bm64=U,
        bm192=S(fp8, 300, 256, block_m=192),
    ),
    *_many(
        "wrong_block_m",
        "16",
        f.pages(lambda t, b: f.page_row(t, 16)),
        bm64=U,
        bm32=S(fp8, 150, 256, block_m=32),
    ),
    *_many(
        "wrong_block_m", "240", f.pages(lambda t, b: f.page_row(t, 240)), bm192=S(fp8, 500, 256, block_m=192)
    ),
    *_many("swizzle_128x4_missing", "256", f.swizzle_undone(256, 8), named=S(swizzled, 256, 8)),
    *_many("swizzle_128x4_missing", "128", f.swizzle_undone(128, 32), named=S(swizzled, 128, 32)),
    *_many("swizzle_128x4_twice", "256", f.swizzle_again(256, 8), named=S(swizzled, 256, 8)),
    *_many("swizzle_128x4_twice", "384", f.swizzle_again(384, 28), named=S(swizzled, 384, 28)),
    *_many(
        "interleave_missing",
        "",
        f.reordered(f.concatenated_row),
        r48=S(weights, 48, 64),
        r256=S(weights, 256, 128),
        sf=S(named, "gate_up_interleaved_8", 8, rows=96, columns=40),
    ),
    *_many("interleave_missing", "plain", f.reordered(f.concatenated_row), r96=S(anonymous, 96, 64)),
    *_many(
        "interleave_twice",
        "",
        f.reordered(f.interleaved_row),
        r48=S(weights, 48, 64),
        r256=S(weights, 256, 128),
    ),
    *_many(
        "interleave_granularity",
        "16",
        f.reordered(f.other_blocks(16)),
        r64=S(weights, 64, 64),
        r256=S(weights, 256, 128),
    ),
    *_many("interleave_granularity", "1", f.reordered(f.other_blocks(1)), r64=S(weights, 64, 64)),
    *_many(
        "gate_up_swapped",
        "",
        f.reordered(f.exchanged_halves),
        r48=S(weights, 48, 64),
        r256=S(weights, 256, 128),
    ),
    *_many("off_by_one_tile", "rows", f.rows_shifted("x", 128), fp8=S(fp8, 300, 256)),
    *_many("off_by_one_tile", "rows64", f.rows_shifted("x_sf", 64), fp8=U),
    *_many("off_by_one_tile", "columns", f.columns_shifted("x", 128), fp8=S(fp8, 40, 1024)),
    *_many("off_by_one_tile", "words", f.columns_shifted("x_sf", 1), fp8=S(fp8, 40, 1024)),
    # ---- rows and regions
    *_many("duplicated_rows", "", f.duplicated("x", 7, (8,)), fp8=U, nvfp4=N2),
    *_many("duplicated_rows", "many", f.duplicated("x_sf", 3, (10, 11, 30)), fp8=WIDE),
    *_many("swapped_rows", "", f.swapped("x", (3, 17)), fp8=U, nvfp4=N2, small=SMALL),
    *_many("swapped_rows", "two", f.swapped("x_sf", (2, 33), (8, 9)), fp8=WIDE),
    *_many(
        "swapped_rows",
        "experts",
        f.swapped("out", (0, 2)),
        weights=S(weights, 48, 64),
        scales=S(named, "utccp_scales", 6, mn=128, groups=16, batch=4),
    ),
    *_many(
        "unwritten",
        "columns",
        f.unwritten("x", slice(None), slice(256, 384), 0xA5),
        fp8=S(fp8, 60, 384),
        wide=S(fp8, 20, 1024),
    ),
    *_many("unwritten", "rows", f.unwritten("x", slice(64, 96), slice(None), 0xFF), fp8=U, nvfp4=N2),
    *_many("unwritten", "corner", f.unwritten("x", slice(30, 50), slice(128, 256), 0x00), fp8=U),
    *_many("unwritten", "words", f.unwritten("x_sf", slice(8, 24), slice(None), 0xCD), fp8=WIDE),
    # ---- scales
    *_many("scale_plus_one", "all", f.scale_bytes("x_sf", 1), fp8=U, small=SMALL),
    *_many("scale_plus_one", "tile", f.scale_bytes("x_sf", 1, slice(16, 32)), fp8=U, wide=WIDE),
    *_many("scale_plus_one", "fp32", f.scale_bytes("x_sf", 1), fp32=F128),
    *_many("scale_minus_one", "all", f.scale_bytes("x_sf", -1), fp8=U, small=SMALL),
    *_many("scale_minus_one", "fp32", f.scale_bytes("x_sf", -1), fp32=F128),
    *_many("scale_minus_one", "column", f.scale_bytes("x_sf", -1, columns=slice(0, 4)), fp8=U),
    *_many("bytes_look_like_fp32", "", f.fp32_in_place_of_bytes("x_sf"), fp8=U, wide=S(fp8, 64, 2304)),
    # ---- arithmetic, FP8
    *_many(
        "scale_rounding_floor",
        "",
        f.fp8(power=q.floor_power),
        fp8=U,
        small=SMALL,
        h2304=S(fp8, 64, 2304),
        g64=S(fp8, 64, 512, group=64),
    ),
    *_many(
        "scale_rounding_nearest",
        "",
        f.fp8(power=q.nearest_power),
        fp8=U,
        small=SMALL,
        g128=S(fp8, 64, 512, group=128),
    ),
    *_many("scale_rounding_log2", "frexp", f.fp8(power=f.frexp_exponent), fp8=U, small=SMALL),
    *_many(
        "scale_rounded_after_quantization",
        "",
        f.fp8(unrounded_division=True),
        fp8=U,
        small=SMALL,
        h2304=S(fp8, 64, 2304),
    ),
    *_many("amax_floor", "1e-10", f.fp8(floor=1e-10), fp8=U, small=SMALL),
    *_many("amax_floor", "fp32", f.fp8_fp32(floor=1e-10), fp32=F128),
    *_many("amax_floor", "large", f.fp8(floor=1e-2), fp8=U),
    *_many("ties_away", "fp8", f.fp8(cast=partial(q.e4m3_with_ties, ties="away")), fp8=U, ties=TIES),
    *_many("ties_toward_zero", "fp8", f.fp8(cast=partial(q.e4m3_with_ties, ties="zero")), fp8=U, ties=TIES),
    *_many("truncation", "fp8", f.fp8(cast=partial(q.e4m3_with_ties, ties="down")), fp8=U),
    *_many("negative_zero", "fp8", f.fp8(cast=f.e4m3_without_negative_zero), fp8=U, small=SMALL),
    *_many("flush_to_zero", "fp8", f.fp8(cast=f.e4m3_without_subnormals), fp8=U, small=SMALL),
    *_many(
        "overflow_nan",
        "fp8",
        f.fp8(power=q.ceil_power, cast=f.e4m3_overflow_to_nan),
        infs=S(fp8, 64, 512, kind="infs"),
    ),
    *_many("double_rounding", "fp32", f.fp8_fp32(between=f.through_bf16), g128=F128, g32=F32),
    *_many(
        "division_instead_of_reciprocal",
        "scale",
        f.fp8_fp32(scale=lambda a: (a / q.F(448)).astype(q.F)),
        g128=F128,
        g32=F32,
    ),
    *_many(
        "division_instead_of_reciprocal",
        "elements",
        f.fp8_fp32(divide=lambda h, s: (h / s).astype(q.F)),
        g128=S(fp8, 300, 1024, group=128, fp32=True),
    ),
    # ---- arithmetic, NVFP4
    *_many("ties_away", "nvfp4", f.nvfp4_block(codes=partial(q.e2m1_codes, ties="away")), one=N1_TIES),
    *_many("ties_toward_zero", "nvfp4", f.nvfp4_block(codes=partial(q.e2m1_codes, ties="zero")), one=N1_TIES),
    *_many("truncation", "nvfp4", f.nvfp4(codes=partial(q.e2m1_codes, ties="down")), two=N2),
    *_many(
        "negative_zero",
        "nvfp4",
        f.nvfp4(codes=partial(q.e2m1_codes, keep_negative_zero=True)),
        two=N2,
        small=N2_SMALL,
    ),
    *_many(
        "negative_zero",
        "nvfp4_block",
        f.nvfp4_block(codes=partial(q.e2m1_codes, keep_negative_zero=True)),
        one=N1,
    ),
    *_many("amax_floor", "nvfp4", f.nvfp4(low=0.0), two=N2),
    *_many("amax_floor", "token", f.nvfp4(token_floor=1e-4), two=S(nvfp4, 40, 256, kind="tiny")),
    *_many(
        "division_instead_of_reciprocal",
        "token",
        f.nvfp4(outer=lambda a: (a / q.F(2688)).astype(q.F)),
        two=N2,
    ),
    *_many(
        "division_instead_of_reciprocal",
        "block",
        f.nvfp4(block=lambda a: (a / q.F(6)).astype(q.F)),
        two=S(nvfp4, 400, 1024),
    ),
    *_many("double_rounding", "nvfp4", f.nvfp4(between=q.through(ml_dtypes.bfloat16)), two=N2),
    *_many("global_scale_missing", "values", f.nvfp4(normalize=lambda h, xs: h), two=N2, small=N2_SMALL),
    *_many("global_scale_missing", "stored", f.nvfp4(stored=np.ones_like), two=N2),
    *_many(
        "global_scale_inverted",
        "stored",
        f.nvfp4(stored=lambda xs: (q.F(1) / xs).astype(q.F)),
        two=N2,
        small=N2_SMALL,
    ),
    *_many("global_scale_inverted", "values", f.nvfp4(normalize=lambda h, xs: (h * xs).astype(q.F)), two=N2),
    *_many("global_scale_missing", "alpha", f.alpha(lambda w, s: w), two=N2),
    *_many("global_scale_inverted", "alpha", f.alpha(lambda w, s: w / s), two=N2),
    # ---- the forward
    *_many("clamp_missing", "", launch.launch, sm90=L),
    *_many(
        "clamp_symmetric",
        "",
        lambda s: launch.launch(
            s,
            **{**launch.clamped(s), "gate_bounds": lambda g: g.clamp(-s.params["clamp"], s.params["clamp"])},
        ),
        sm90=L,
    ),
    *_many("gate_up_swapped", "launch", lambda s: launch.launch(s, swap=True, **launch.clamped(s)), sm90=L),
    *_many(
        "activation_rounding",
        "",
        lambda s: launch.launch(s, before=lambda v: v.bfloat16().float(), **launch.clamped(s)),
        sm90=L,
    ),
    *_many(
        "routing_weight_misplaced",
        "none",
        lambda s: launch.launch(s, weigh=False, **launch.clamped(s)),
        sm90=L,
    ),
    *_many(
        "accumulation_order",
        "float64",
        lambda s: launch.launch(s, dot=launch.in_float64, **launch.clamped(s)),
        sm90=L,
    ),
    *_many(
        "gate_up_scale_shared",
        "",
        f.loaded_with(l1_alphas=lambda a: a[:, :1].repeat(1, 2)),
        gate=S(fp4_forward, 6),
    ),
    *_many(
        "gate_up_scale_shared",
        "",
        f.loaded_with(l1_alphas=lambda a: a[:, 1:].repeat(1, 2)),
        up=S(fp4_forward, 6, 3),
    ),
    *_many("global_scale_missing", "launch", f.loaded_with(l2_alphas=torch.ones_like), l2=S(fp4_forward, 6)),
    *_many("global_scale_inverted", "launch", f.loaded_with(l1_alphas=lambda a: 1 / a), l1=S(fp4_forward, 6)),
    # ---- DeepGEMM's own staging, which divides
    *_many(
        "reciprocal_instead_of_division",
        "scale",
        f.pre_dispatched(scale=lambda a: (a * q.F(1 / 448)).astype(q.F)),
        sm90=S(pre_dispatch, 60, 512),
    ),
    *_many("amax_floor", "pre_dispatch", f.pre_dispatched(floor=1e-4), sm90=S(pre_dispatch, 60, 512)),
    *_many(
        "double_rounding",
        "pre_dispatch",
        f.pre_dispatched(between=f.through_bf16),
        sm90=S(pre_dispatch, 60, 512),
    ),
    *_many(
        "reciprocal_instead_of_division",
        "nvfp4",
        f.nvfp4(element=lambda u, s: (u * (q.F(1) / s)).astype(q.F)),
        two=S(nvfp4, 300, 1024),
    ),
    # ---- routing
    *_many("padding_sentinel", "0", f.sentinel(0), fp8=U, nvfp4=N2),
    *_many("padding_sentinel", "big", f.sentinel(2**31 - 1), fp8=SMALL),
    *_many("padding_not_masked", "", f.mask_ignored, fp8=U, nvfp4=N2, one=N1),
    *_many("id_width", "zero_extended", f.zero_extended("topk_idx_out"), fp8=U),
    *_many("id_width", "narrow", f.narrow_rows("topk_idx_out"), fp8=U, nvfp4=N2),
    *_many("id_width", "plain", f.narrow_rows("topk_idx"), ids=S(anonymous, 50, 8, "int64")),
    *_many(
        "padded_tokens_counted",
        "",
        f.mapped(f.right_replica, count_all=True),
        k4=S(eplb, 60, 4),
        k1=S(eplb, 33, 1),
    ),
    *_many("replica_hash_width", "signed", f.mapped(f.signed_replica), k4=S(eplb, 60, 4)),
    *_many("replica_hash_width", "64", f.mapped(f.wide_replica), k4=S(eplb, 60, 4), k2=S(eplb, 130, 2)),
    *_many("invalid_id_kept", "", f.ids_kept, k4=S(eplb, 60, 4)),
    *_many("duplicate_experts", "", f.same_expert_again, fp8=SMALL),
    *_many("rows_permuted", "", f.shuffled("x"), fp8=SMALL, nvfp4=N2),
    *_many(
        "nan_propagated",
        "",
        f.fp8(amax=f.amax_with_nan, power=f.power_of_nan),
        nans=S(fp8, 64, 512, kind="nans"),
    ),
    *_many("replica_by_slot", "", f.mapped(f.slot_replica), k4=S(eplb, 60, 4)),
]
