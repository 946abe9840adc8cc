"""From checkpoint scales and weights to what MegaMoE kernels read.

Scales: one scale per (row, group of k) becomes a UE8M0 byte, four consecutive groups an int32 word (little
endian), and the words an MN-major tensor whose columns start at multiples of 16 bytes. For SM90 the scales
stay fp32. Weights: gate and up rows alternate in runs of 8, so that one MMA tile holds both halves of a
column; scale rows follow their weights and are then permuted for UTCCP (row 32j + i of every 128 goes to 4i
+ j).

Easy to get wrong: packing takes exponents and never rounds, so a scale that is not a power of two is
refused; the interleaving comes before the UTCCP permutation; L2 weights are not copied; results keep the
strides of their inputs.

Sources: DeepGEMM (vLLM 0.33 build) mega/__init__.py and csrc/apis/layout.hpp, sgl-deep-gemm for the variants
named there. The permutations themselves are the layouts of `reference.layouts`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.formats import decode_ue8m0_shift, encode
from reference.layouts import Layout, get_layout

__all__ = [
    "ACTIVATIONS",
    "check_power_of_two_scales",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "interleave_gate_up",
    "pack_e4m3_scales",
    "transform_scales_for_mega_moe",
    "transform_sf_into_required_layout",
    "transform_ue4m3_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "transpose_sf_for_utccp",
    "ue8m0_uint8_to_float",
]

Weights = Tensor | tuple[Tensor, Tensor]

# By mma_type: the layout of L1 rows and the activations that the build's transform accepts.
_VLLM_ACTIVATIONS = ("swiglu", "swiglustep", "situ")
_SGL_ACTIVATIONS = ("swiglu", "swigluoai", "situ")
_L1_LAYOUT = {
    "fp8xfp4": "gate_up_interleaved_8",
    "fp8xfp8": "gate_up_interleaved_8",
    "bf16xbf16": "gate_up_interleaved_8",
    "fp4xfp4": "gate_up_interleaved_8",
    "nvfp4": "gate_up_interleaved_8",
    "mxf4xmxf4": "gate_up_interleaved_16_even_odd",
    "nvfp4xnvfp4": "gate_up_interleaved_16_even_odd",
}
ACTIVATIONS = {
    mma_type: _SGL_ACTIVATIONS if layout.endswith("even_odd") else _VLLM_ACTIVATIONS
    for mma_type, layout in _L1_LAYOUT.items()
}


def _check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], dims: Sequence[int]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.ndim not in dims:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, dims))} dimensions, got shape {tuple(tensor.shape)}"
        )
    if tensor.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")


# ---- scales


def ue8m0_uint8_to_float(sf: Tensor) -> Tensor:
    """UE8M0 bytes as fp32, any shape, by the shift that production uses: 2^(b - 127) for 1..254.

    sf: uint8 or float8_e8m0fnu. Byte 0 gives 0.0 and 255 gives inf, where the OCP format has 2^-127 and NaN.
    """
    if sf.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"sf must be uint8 or float8_e8m0fnu, got {sf.dtype}")
    return decode_ue8m0_shift(sf.view(torch.uint8))


def check_power_of_two_scales(name: str, sf: Tensor) -> None:
    """ValueError, with row, group and value of the first one, unless sign and mantissa bits of all scales
    are zero.

    That is the kernel's own rule: 2^-126 to 2^127, and besides them +0.0 (byte 0) and +inf (byte 255).
    sf: fp32 [batch,] rows, groups.
    """
    bad = (sf.view(torch.int32) & -0x7F800001) != 0
    if bool(bad.any()):
        index = [int(i) for i in bad.nonzero()[0]]
        where = f"row {index[-2]}, group {index[-1]}" if sf.ndim > 1 else f"group {index[0]}"
        if sf.ndim == 3:
            where = f"batch {index[0]}, {where}"
        value = float(sf[tuple(index)])
        raise ValueError(
            f"{name} must hold powers of two (UE8M0 has no sign and no mantissa), got {value!r} at {where}"
            f"; {int(bad.sum())} of {bad.numel()} values are not"
        )


def _scale_layout(name: str, sf: Tensor) -> Layout:
    batch = sf.shape[0] if sf.ndim == 3 else None
    return get_layout(name, mn=sf.shape[-2], groups=sf.shape[-1], batch=batch)


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """fp32 scales [batch,] mn, groups in MN-major order, columns at multiples of 16 bytes.

    Same shape, strides ([am * groups,] 1, am) with am = align(mn, 4). An input that has these strides is
    returned itself. Alignment rows are zero here; the kernel leaves what its memory held. Any input strides.
    """
    _check_tensor("sf", sf, (torch.float32,), (2, 3))
    layout = _scale_layout("mn_major_tma_aligned", sf)
    return sf if sf.stride() == layout.storage_strides else layout.pack(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    """fp32 power-of-two scales [batch,] mn, groups as UE8M0 words: int32 [batch,] mn, cdiv(groups, 4).

    Strides ([am * words,] 1, am) with am = align(mn, 4). The byte is the exponent field; bytes of missing
    groups and alignment rows are zero (the kernel leaves alignment rows as they were). Any input strides.
    ValueError: a value that is not a power of two, with its row, group and value.
    """
    _check_tensor("sf", sf, (torch.float32,), (2, 3))
    check_power_of_two_scales("sf", sf)
    layout = _scale_layout("mn_major_packed_ue8m0", sf)
    return layout.pack((sf.view(torch.int32) >> 23).to(torch.uint8))


def _granularity(recipe: Sequence[int], is_sfa: bool | None) -> tuple[int, int]:
    sizes = tuple(recipe)
    if len(sizes) == 2 and is_sfa is None:
        return sizes[0], sizes[1]
    if len(sizes) == 3 and is_sfa is not None:
        return (sizes[0] if is_sfa else sizes[1]), sizes[2]
    raise ValueError(
        "recipe must be (rows, columns) without is_sfa or (rows of A, rows of B, columns) with it, "
        f"got {sizes} and is_sfa={is_sfa}"
    )


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    *,
    arch: int = 100,
) -> Tensor:
    """Scales as the GEMM kernels of one architecture want them (DeepGEMM csrc/apis/layout.hpp).

    sf: fp32 [num_groups,] cdiv(mn, gm), cdiv(k, gk), or int32 words [num_groups,] cdiv(mn, gm), cdiv(k, 4 *
    gk). recipe: (gm, gk), or (gm of A, gm of B, gk) together with is_sfa. arch: 90, 100 or 120, stated and
    never guessed from a device, so that every machine gives every architecture's answer.

    fp32 (1, 128) on SM90 or with disable_ue8m0_cast: fp32, MN-major, TMA aligned. fp32 (128, 128) there: sf
    itself. fp32 (gm, 32) and (gm, 128) on SM100 and SM120: every row repeated gm times, packed UE8M0. int32
    (1, 32) and (1, 128) there: sf itself, if it has the strides. ValueError for everything else.
    """
    gm, gk = _granularity(recipe, is_sfa)
    if arch not in (90, 100, 120):
        raise ValueError(f"arch must be 90, 100 or 120, got {arch}")
    _check_tensor("sf", sf, (torch.float32, torch.int32), (2 if num_groups is None else 3,))
    per_column = gk if sf.dtype == torch.float32 else 4 * gk
    shape: tuple[int, ...] = (-(-mn // gm), -(-k // per_column))
    if num_groups is not None:
        shape = (num_groups, *shape)
    if tuple(sf.shape) != shape:
        raise ValueError(f"sf must be {shape} for mn={mn}, k={k}, recipe={(gm, gk)}, got {tuple(sf.shape)}")

    if sf.dtype == torch.float32 and (arch == 90 or disable_ue8m0_cast):
        if (gm, gk) == (1, 128):
            return get_mn_major_tma_aligned_tensor(sf)
        if (gm, gk) == (128, 128):
            if not (sf.is_contiguous() or sf.mT.is_contiguous()):
                raise ValueError(f"sf must be contiguous or MN-major, got strides {sf.stride()}")
            return sf
    elif sf.dtype == torch.float32 and gk in (32, 128):
        if gm != 1:
            rows = torch.arange(mn, device=sf.device).div(gm, rounding_mode="floor")
            sf = sf.index_select(-2, rows)
        return get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    elif sf.dtype == torch.int32 and arch != 90 and gm == 1 and gk in (32, 128):
        _check_mn_major_words(sf, mn)
        return sf
    raise ValueError(
        f"no layout for {str(sf.dtype).removeprefix('torch.')} scales of recipe {(gm, gk)} on sm_{arch}"
        + (" with disable_ue8m0_cast" if disable_ue8m0_cast else "")
    )


def _check_mn_major_words(sf: Tensor, mn: int) -> None:
    aligned = -(-mn // 4) * 4
    is_right = (
        (sf.stride(-2) == 1 or mn == 1)
        and sf.stride(-1) >= aligned
        and sf.stride(-1) % 4 == 0
        and (sf.ndim == 2 or sf.stride(-3) == sf.stride(-1) * sf.shape[-1])
    )
    if not is_right:
        expected = (1, aligned) if sf.ndim == 2 else (aligned * sf.shape[-1], 1, aligned)
        raise ValueError(f"sf must be MN-major with aligned columns, strides {expected}, got {sf.stride()}")


def pack_e4m3_scales(sf: Tensor) -> Tensor:
    """E4M3 scales [batch,] mn, groups as MN-major words without row padding (NVFP4 weights, before the UTCCP
    step).

    sf: float8_e4m3fn or uint8 [.., mn, k / 16], groups a multiple of 4, mn a multiple of 4. Returns int32
    [batch,] mn, groups / 4, strides ([mn * words,] 1, mn).
    """
    _check_tensor("sf", sf, (torch.float8_e4m3fn, torch.uint8), (2, 3))
    mn, groups = sf.shape[-2:]
    if mn % 4 or groups % 4:
        raise ValueError(f"sf must have rows and groups that are multiples of 4, got shape {tuple(sf.shape)}")
    return _scale_layout("mn_major_packed_ue8m0", sf).pack(sf.view(torch.uint8))


def transform_ue4m3_sf_into_required_layout(sf: Tensor, mn: int) -> Tensor:
    """fp32 scales [batch,] mn, groups rounded to E4M3 (saturating at 448) and packed as
    `pack_e4m3_scales`.
    """
    _check_tensor("sf", sf, (torch.float32,), (2, 3))
    if sf.shape[-2] != mn:
        raise ValueError(f"sf must have mn={mn} rows, got shape {tuple(sf.shape)}")
    return pack_e4m3_scales(encode(sf, "e4m3fn"))


# ---- weights


def _move_rows(tensor: Tensor, layout_name: str) -> Tensor:
    """The rows (second last dimension) in the order of the named layout, in a new tensor like the input."""
    rows = tensor.shape[-2]
    sizes = {"mn": rows, "groups": 4} if layout_name == "utccp_scales" else {"rows": rows, "columns": 1}
    layout = get_layout(layout_name, **sizes)
    destination = layout.axis_positions("row")
    if layout_name == "utccp_scales":
        destination = destination // 4  # four bytes a word
    result = torch.empty_like(tensor)
    _bits(result).index_copy_(tensor.ndim - 2, destination.to(tensor.device), _bits(tensor))
    return result


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def interleave_gate_up(weights: Tensor, mma_type: str = "fp8xfp4") -> Tensor:
    """[experts,] 2I rows (gate, then up), columns -> gate and up rows in alternation, a copy with the
    input's strides.

    Runs of 8 rows; for the packed-FP4 kinds of sgl-deep-gemm (mxf4xmxf4, nvfp4xnvfp4) the even rows of 16
    first. Any dtype of 1, 2 or 4 bytes: weights and their scale words alike.
    """
    if mma_type not in _L1_LAYOUT:
        raise ValueError(f"mma_type must be one of {sorted(_L1_LAYOUT)}, got {mma_type!r}")
    if weights.ndim not in (2, 3):
        raise ValueError(f"weights must have 2 or 3 dimensions, got shape {tuple(weights.shape)}")
    return _move_rows(weights, _L1_LAYOUT[mma_type])


def transpose_sf_for_utccp(sf: Tensor) -> Tensor:
    """int32 scale words [experts,] mn, words with row 32j + i of every 128 at 4i + j; a copy with the
    input's strides.

    mn must be a multiple of 128.
    """
    _check_tensor("sf", sf, (torch.int32,), (2, 3))
    return _move_rows(sf, "utccp_scales")


def transform_scales_for_mega_moe(
    l1_sf: Tensor, l2_sf: Tensor, mma_type: str = "fp8xfp4"
) -> tuple[Tensor, Tensor]:
    """L1 scale words interleaved and permuted, L2 scale words permuted; both copies."""
    return transpose_sf_for_utccp(interleave_gate_up(l1_sf, mma_type)), transpose_sf_for_utccp(l2_sf)


def transform_weights_for_mega_moe(
    l1_weights: Weights, l2_weights: Weights, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> tuple[Weights, Weights]:
    """Weights of one layer in the kernels' order.

    l1_weights: (weights [experts,] 2I, H (packed FP4: H / 2), scale words int32 [experts,] 2I, H / 128), or
    for bf16 the weights alone; gate rows first. l2_weights likewise with H rows. Two dimensions for a shared
    expert. Returns the same structure. The L2 weight is the input tensor itself; everything else is a copy
    with the strides of its input (so scale words must come MN-major).
    ValueError: an activation that the kind does not have, rows that do not fit (2I a multiple of 16, scale
    rows of 128), weights and scales of different row counts. TypeError: one layer with scales and one
    without, wrong dtypes.
    """
    if mma_type not in _L1_LAYOUT:
        raise ValueError(f"mma_type must be one of {sorted(_L1_LAYOUT)}, got {mma_type!r}")
    if activation not in ACTIVATIONS[mma_type]:
        raise ValueError(f"activation must be one of {ACTIVATIONS[mma_type]}, got {activation!r}")
    if isinstance(l1_weights, Tensor) and isinstance(l2_weights, Tensor):
        if activation == "situ":
            raise ValueError("activation 'situ' needs scaled weights: (weights, scales) pairs")
        return interleave_gate_up(l1_weights, mma_type), l2_weights
    if isinstance(l1_weights, Tensor) or isinstance(l2_weights, Tensor):
        raise TypeError("l1_weights and l2_weights must both be tensors or both (weights, scales) pairs")
    for name, (weight, scales) in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
        _check_tensor(f"{name}[1]", scales, (torch.int32,), (weight.ndim,))
        if weight.shape[:-1] != scales.shape[:-1]:
            raise ValueError(
                f"{name}: scales must have the rows of the weights, {tuple(weight.shape[:-1])}, "
                f"got {tuple(scales.shape[:-1])}"
            )
    l1_sf, l2_sf = transform_scales_for_mega_moe(l1_weights[1], l2_weights[1], mma_type)
    return (interleave_gate_up(l1_weights[0], mma_type), l1_sf), (l2_weights[0], l2_sf)


def transform_weights_for_mega_moe_sm90(
    l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """SM90: e4m3 weights [experts, rows, K] with fp32 scales per 128x128 block. Only the L1 weight rows move.

    The L1 scales and both L2 tensors are the inputs themselves: blocks of 128 rows hold 64 gate and 64 up
    rows after the interleaving, and the kernel looks their scales up in the unmoved tensor.
    """
    (l1_weight, l1_sf), (l2_weight, l2_sf) = l1_weights, l2_weights
    for name, weight in (("l1_weights[0]", l1_weight), ("l2_weights[0]", l2_weight)):
        _check_tensor(name, weight, (torch.float8_e4m3fn,), (2, 3))
    for name, scales in (("l1_weights[1]", l1_sf), ("l2_weights[1]", l2_sf)):
        _check_tensor(name, scales, (torch.float32,), (2, 3))
    return (interleave_gate_up(l1_weight, "fp8xfp8"), l1_sf), l2_weights
