"""Scale factors as GEMM kernels read them: fp32 or packed, MN-major. See `reference.weights`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.formats import decode_ue8m0_shift, encode
from reference.layouts import Layout, get_layout


def check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], dims: Sequence[int]) -> None:
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
    check_tensor("sf", sf, (torch.float32,), (2, 3))
    layout = _scale_layout("mn_major_tma_aligned", sf)
    return sf if sf.stride() == layout.storage_strides else layout.pack(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    """fp32 power-of-two scales [batch,] mn, groups as UE8M0 words: int32 [batch,] mn, cdiv(groups, 4).

    Strides ([am * words,] 1, am) with am = align(mn, 4). The byte is the exponent field; bytes of missing
    groups and alignment rows are zero (the kernel leaves alignment rows as they were). Any input strides.
    ValueError: a value that is not a power of two, with its row, group and value.
    """
    check_tensor("sf", sf, (torch.float32,), (2, 3))
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
    check_tensor("sf", sf, (torch.float32, torch.int32), (2 if num_groups is None else 3,))
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
    check_tensor("sf", sf, (torch.float8_e4m3fn, torch.uint8), (2, 3))
    mn, groups = sf.shape[-2:]
    if mn % 4 or groups % 4:
        raise ValueError(f"sf must have rows and groups that are multiples of 4, got shape {tuple(sf.shape)}")
    return _scale_layout("mn_major_packed_ue8m0", sf).pack(sf.view(torch.uint8))


def transform_ue4m3_sf_into_required_layout(sf: Tensor, mn: int) -> Tensor:
    """fp32 scales [batch,] mn, groups rounded to E4M3 (saturating at 448), packed as `pack_e4m3_scales` does.

    TypeError, ValueError: another dtype, or other rows than mn.
    """
    check_tensor("sf", sf, (torch.float32,), (2, 3))
    if sf.shape[-2] != mn:
        raise ValueError(f"sf must have mn={mn} rows, got shape {tuple(sf.shape)}")
    return pack_e4m3_scales(encode(sf, "e4m3fn"))
