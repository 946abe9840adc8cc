"""Scale and weight layouts of the MegaMoE kernels, as Triton kernels: the production side of the twins in
`reference.weights`. Each function checks its arguments before it writes anything and returns new tensors,
except where it says that an input is returned itself.

Sources: DeepGEMM's layout API and weight transforms; NUMERICS 1.2, 4.6, 5.1 to 5.5.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels import checks, tuning
from megamoe.kernels.launch import is_interpreted, launch

Weights = Tensor | tuple[Tensor, Tensor]

_ACTIVATIONS = ("swiglu", "swiglustep", "situ")
_MMA_TYPES = ("fp8xfp4", "fp8xfp8", "fp4xfp4", "nvfp4", "bf16xbf16")
# Packed FP4 of the SGLang builds: even and odd rows of sixteen instead of gate and up by eights.
_EVEN_ODD_TYPES = ("mxf4xmxf4", "nvfp4xnvfp4")
_EVEN_ODD_ACTIVATIONS = ("swiglu", "swigluoai", "situ")
_WEIGHT_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _batched(name: str, value: object) -> Tensor:
    """The tensor as [batch, rows, columns]; two dimensions are a batch of one."""
    tensor = checks.require_tensor(name, value)
    checks.require_supported_device(name, tensor)
    if tensor.ndim not in (2, 3):
        raise ValueError(f"{name}: expected 2 or 3 dimensions, got shape {tuple(tensor.shape)}")
    return tensor if tensor.ndim == 3 else tensor[None]


def _tile(rows: int, columns: int, block_m: int, block_k: int, device: torch.device) -> tuple[int, int]:
    if is_interpreted(device):
        block_k = tuning.power_of_two(max(columns, 4))
        return min(tuning.power_of_two(rows), max(1, tuning.INTERPRETER_ELEMENTS // block_k)), block_k
    return block_m, min(block_k, tuning.power_of_two(max(columns, 4)))


# -------------------------------------------------------------------------------------------- scales


def ue8m0_uint8_to_float(sf: Tensor) -> Tensor:
    """UE8M0 bytes (uint8 or float8_e8m0fnu, any shape and strides) as float32 by the bit shift.

    2^(b - 127) for 1..254; byte 0 gives 0.0 and byte 255 infinity, as production has it. TypeError: dtype.
    """
    codes = checks.require_tensor("sf", sf)
    checks.require_dtype("sf", codes, (torch.uint8, torch.float8_e8m0fnu))
    checks.require_supported_device("sf", codes)
    codes = codes.contiguous().view(torch.uint8)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        from megamoe.kernels.layouts import ue8m0_to_float_kernel

        block = 1 << 16 if is_interpreted(codes.device) else 1024
        args = (codes, values, codes.numel())
        grid = -(-codes.numel() // block)
        launch(ue8m0_to_float_kernel, grid, codes.device, args, {"BLOCK": block}, num_warps=4)
    return values


def _mn_major(sf: Tensor, rows: int, row_repeat: int, pack: bool) -> Tensor:
    """[batch, scale rows, groups] float32 -> MN-major [batch, rows, columns], aligned to 16 bytes."""
    batch, _, groups = sf.shape
    columns = -(-groups // 4) if pack else groups
    aligned = _align(rows, 4)
    dtype = torch.int32 if pack else torch.float32
    out = torch.zeros(batch * columns * aligned, dtype=dtype, device=sf.device)
    out = out.as_strided((batch, rows, columns), (aligned * columns, 1, aligned))
    if out.numel():
        from megamoe.kernels.layouts import mn_major_kernel

        block_m, block_k = _tile(rows, groups, 64, 32, sf.device)
        row_tiles, column_tiles = -(-rows // block_m), -(-groups // block_k)
        launch(
            mn_major_kernel,
            batch * row_tiles * column_tiles,
            sf.device,
            (sf, *sf.stride(), out, out.stride(0), out.stride(2), rows, groups, row_tiles, column_tiles),
            {"ROW_REPEAT": row_repeat, "PACK": pack, "BLOCK_M": block_m, "BLOCK_K": block_k},
            num_warps=4,
        )
    return out


def _refuse_other_than_powers_of_two(sf: Tensor) -> None:
    """Sign and mantissa bits must be zero: the packer takes the exponent field alone."""
    bits = sf.contiguous().view(torch.int32) & ~0x7F800000
    wrong = bits.nonzero()
    if len(wrong):
        *lead, row, group = wrong[0].tolist()
        where = f"batch {lead[0]}, row {row}, group {group}" if lead else f"row {row}, group {group}"
        value = sf[tuple(wrong[0].tolist())].item()
        raise ValueError(f"sf: expected powers of two, got {value!r} at {where} ({len(wrong)} such scales)")


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """float32 scales [batch,] mn, groups in MN-major order, columns at multiples of 16 bytes.

    Strides ([am * groups,] 1, am) with am = align(mn, 4); alignment rows are zero. An input that has these
    strides already is returned itself. Any input strides. TypeError: dtype. ValueError: dimensions.
    """
    scales = _batched("sf", sf)
    checks.require_dtype("sf", scales, (torch.float32,))
    _, rows, groups = scales.shape
    aligned = _align(rows, 4)
    if tuple(sf.stride()) == (aligned * groups, 1, aligned)[-sf.ndim :]:
        return sf
    out = _mn_major(scales, rows, 1, pack=False)
    return out if sf.ndim == 3 else out[0]


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    """Power-of-two float32 scales [batch,] mn, groups as UE8M0 words: int32 [batch,] mn, ceil(groups / 4).

    Word w holds groups 4w..4w+3, group 4w in bits 7..0; missing groups are byte 0. Strides
    ([am * words,] 1, am) with am = align(mn, 4); alignment rows are zero. Any input strides.
    ValueError: a scale that is not a power of two, with its row, group and value; dimensions. TypeError:
    dtype.
    """
    scales = _batched("sf", sf)
    checks.require_dtype("sf", scales, (torch.float32,))
    _refuse_other_than_powers_of_two(sf)
    out = _mn_major(scales, scales.shape[1], 1, pack=True)
    return out if sf.ndim == 3 else out[0]


def _granularity(recipe: Sequence[int], is_sfa: bool | None) -> tuple[int, int]:
    if is_sfa is None:
        if len(recipe) != 2:
            raise ValueError(f"recipe: expected (gm, gk) where is_sfa is None, got {tuple(recipe)}")
        return recipe[0], recipe[1]
    if len(recipe) != 3:
        raise ValueError(f"recipe: expected (gm of A, gm of B, gk) with is_sfa, got {tuple(recipe)}")
    return recipe[0 if is_sfa else 1], recipe[2]


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
    """Scales of an [mn, k] operand as the GEMM kernels of one architecture want them.

    sf: float32 [num_groups,] ceil(mn / gm), ceil(k / gk), or int32 words [num_groups,] mn, ceil(k / (4 gk)).
    recipe: (gm, gk), or (gm of A, gm of B, gk) together with is_sfa. arch: 90, 100 or 120.

    float32 (1, 128) on SM90 or with disable_ue8m0_cast: MN-major float32. float32 (128, 128) there: sf
    itself, which must be contiguous as it is or transposed. float32 (gm, 32) and (gm, 128) on SM100 and
    SM120: every row for gm rows, packed UE8M0. int32 (1, 32) and (1, 128) there: sf itself, if its strides
    are those of the packer. ValueError: anything else. TypeError: dtype.
    """
    scales = _batched("sf", sf)
    checks.require_dtype("sf", scales, (torch.float32, torch.int32))
    if arch not in (90, 100, 120):
        raise ValueError(f"arch: expected 90, 100 or 120, got {arch}")
    if sf.ndim != (2 if num_groups is None else 3) or (num_groups is not None and sf.shape[0] != num_groups):
        raise ValueError(
            f"sf: expected {'2 dimensions' if num_groups is None else f'{num_groups} groups first'}, "
            f"got shape {tuple(sf.shape)}"
        )
    gm, gk = _granularity(recipe, is_sfa)
    words = sf.dtype == torch.int32
    shape = (-(-mn // gm), -(-k // (gk * (4 if words else 1))))
    if tuple(sf.shape[-2:]) != shape:
        raise ValueError(
            f"sf: expected {shape} rows and groups for mn {mn}, k {k}, got {tuple(sf.shape[-2:])}"
        )
    fp32_kernels = arch == 90 or disable_ue8m0_cast
    if not words and fp32_kernels and (gm, gk) == (1, 128):
        return get_mn_major_tma_aligned_tensor(sf)
    if not words and fp32_kernels and (gm, gk) == (128, 128):
        if not (sf.is_contiguous() or sf.mT.is_contiguous()):
            raise ValueError(f"sf: expected dense rows or columns, got strides {sf.stride()}")
        return sf
    if arch != 90 and not words and not disable_ue8m0_cast and gk in (32, 128):
        _refuse_other_than_powers_of_two(sf)
        out = _mn_major(scales, mn, gm, pack=True)
        return out if sf.ndim == 3 else out[0]
    if arch != 90 and words and gm == 1 and gk in (32, 128):
        columns, pitch = scales.shape[2], scales.stride(2)
        if (
            (mn != 1 and scales.stride(1) != 1)
            or pitch < _align(mn, 4)
            or pitch % 4
            or (sf.ndim == 3 and scales.stride(0) != pitch * columns)
        ):
            raise ValueError(f"sf: expected MN-major words aligned to 16 bytes, got strides {sf.stride()}")
        return sf
    raise ValueError(
        f"recipe: expected a granularity that sm_{arch} has for {sf.dtype}"
        f"{' without the UE8M0 cast' if disable_ue8m0_cast else ''}, got ({gm}, {gk})"
    )


# ------------------------------------------------------------------------------------------- weights


def _move_rows(tensor: Tensor, order: str, utccp: bool) -> Tensor:
    """A copy with the strides of the input and its rows in another order."""
    source = (tensor if tensor.ndim == 3 else tensor[None]).view(_INTEGERS[tensor.element_size()])
    out = torch.empty_like(tensor)
    target = (out if out.ndim == 3 else out[None]).view(source.dtype)
    # Rows of bytes move as wider integers where their strides allow it.
    for wide in (torch.int64, torch.int32):
        per = wide.itemsize // source.element_size()
        if per > 1 and all(
            t.stride(2) == 1
            and t.shape[2] % per == 0
            and t.stride(0) % per == 0
            and t.stride(1) % per == 0
            and t.storage_offset() % per == 0
            and t.data_ptr() % wide.itemsize == 0
            for t in (source, target)
        ):
            source, target = source.view(wide), target.view(wide)
            break
    batch, rows, columns = source.shape
    if source.numel():
        from megamoe.kernels.layouts import move_rows_kernel

        block_m, block_k = _tile(rows, columns, 16, 256, tensor.device)
        if source.stride(2) != 1 and not is_interpreted(tensor.device):
            block_m, block_k = 128, 4  # MN-major: neighbours are rows
        row_tiles, column_tiles = -(-rows // block_m), -(-columns // block_k)
        sizes = (rows, columns, row_tiles, column_tiles)
        launch(
            move_rows_kernel,
            batch * row_tiles * column_tiles,
            tensor.device,
            (source, *source.stride(), target, *target.stride(), *sizes),
            {"ORDER": order, "UTCCP": utccp, "BLOCK_M": block_m, "BLOCK_K": block_k},
            num_warps=4,
        )
    return out


def _check_weight(name: str, weight: object, dtypes: Sequence[torch.dtype], gate_up: bool) -> Tensor:
    tensor = _batched(name, weight)
    checks.require_dtype(name, tensor, dtypes)
    if gate_up and tensor.shape[1] % 16:
        raise ValueError(f"{name}: expected rows that are a multiple of 16, got {tensor.shape[1]}")
    return tensor


def _check_scaled(name: str, weights: object, gate_up: bool) -> tuple[Tensor, Tensor]:
    if not isinstance(weights, tuple) or len(weights) != 2:
        raise TypeError(f"{name}: expected a pair (weights, scale words), got {type(weights).__name__}")
    weight = _check_weight(f"{name}[0]", weights[0], _WEIGHT_DTYPES, gate_up)
    scale = _batched(f"{name}[1]", weights[1])
    checks.require_dtype(f"{name}[1]", scale, (torch.int32,))
    if weights[0].ndim != weights[1].ndim or weight.shape[:2] != scale.shape[:2]:
        raise ValueError(
            f"{name}[1]: expected the experts and rows of {name}[0] {tuple(weight.shape[:2])}, "
            f"got {tuple(scale.shape[:2])}"
        )
    if scale.shape[1] % 128:
        raise ValueError(f"{name}[1]: expected rows that are a multiple of 128, got {scale.shape[1]}")
    return weights[0], weights[1]


def transform_weights_for_mega_moe(
    l1_weights: Weights, l2_weights: Weights, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> tuple[Weights, Weights]:
    """Weights of one layer in the kernels' order.

    l1_weights: (weights [experts,] 2I, H (packed FP4: H / 2), scale words int32 [experts,] 2I, H / 128), or
    bfloat16 weights alone; gate rows first. l2_weights likewise with H rows. Two dimensions for a shared
    expert. Returns the same structure: L1 rows as eight gate rows, eight up rows and so on (mxf4xmxf4 and
    nvfp4xnvfp4: even and odd rows of sixteen); scale rows then permuted for UTCCP inside each 128. The L2
    weight is the input tensor itself; everything else is a copy with the strides of its input.

    ValueError: activation, mma_type, or rows that do not fit. TypeError: dtypes, or one layer with scales
    and one without.
    """
    even_odd = mma_type in _EVEN_ODD_TYPES
    if not even_odd and mma_type not in _MMA_TYPES:
        raise ValueError(f"mma_type: expected one of {_MMA_TYPES + _EVEN_ODD_TYPES}, got {mma_type!r}")
    activations = _EVEN_ODD_ACTIVATIONS if even_odd else _ACTIVATIONS
    if activation not in activations:
        raise ValueError(f"activation: expected one of {activations} for {mma_type}, got {activation!r}")
    if isinstance(l1_weights, Tensor):
        l1 = _check_weight("l1_weights", l1_weights, (torch.bfloat16,), gate_up=True)
        l2 = _check_weight("l2_weights", l2_weights, (torch.bfloat16,), gate_up=False)
        checks.require_device("l2_weights", l2, l1.device)
        if activation == "situ":
            raise ValueError("activation: expected one that bfloat16 weights have, got 'situ'")
        if even_odd:
            raise ValueError(f"mma_type: expected one that bfloat16 weights have, got {mma_type!r}")
        return _move_rows(l1_weights, "gate_up_8", utccp=False), l2_weights
    l1_weight, l1_scale = _check_scaled("l1_weights", l1_weights, gate_up=True)
    l2_weight, l2_scale = _check_scaled("l2_weights", l2_weights, gate_up=False)
    for name, tensor in (
        ("l1_weights[1]", l1_scale),
        ("l2_weights[0]", l2_weight),
        ("l2_weights[1]", l2_scale),
    ):
        checks.require_device(name, tensor, l1_weight.device)
    order = "gate_up_16_even_odd" if even_odd else "gate_up_8"
    if even_odd and l1_weight.shape[-2] % 32:
        raise ValueError(
            f"l1_weights[0]: expected a multiple of 32 rows for {mma_type}, got {l1_weight.shape[-2]}"
        )
    return (
        (_move_rows(l1_weight, order, utccp=False), _move_rows(l1_scale, order, utccp=True)),
        (l2_weight, _move_rows(l2_scale, "none", utccp=True)),
    )


def transform_weights_for_mega_moe_sm90(
    l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """SM90: e4m3 weights [experts, rows, K] with float32 scales per 128 x 128 block; only L1 rows move.

    The L1 scales and both L2 tensors are the inputs themselves. TypeError: dtypes, or not a pair.
    ValueError: dimensions, rows that are not a multiple of 16, or devices that differ.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, value in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
        pair: Any = value
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{name}: expected a pair (weights, scales), got {type(pair).__name__}")
        _check_weight(f"{name}[0]", pair[0], (torch.float8_e4m3fn,), gate_up=name == "l1_weights")
        checks.require_dtype(f"{name}[1]", _batched(f"{name}[1]", pair[1]), (torch.float32,))
        checks.require_device(f"{name}[1]", pair[1], pair[0].device)
        pairs.append(pair)
    (l1_weight, l1_scale), l2 = pairs
    checks.require_device("l2_weights[0]", l2[0], l1_weight.device)
    return (_move_rows(l1_weight, "gate_up_8", utccp=False), l1_scale), l2
