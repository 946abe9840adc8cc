"""What a checkpoint holds: one row per parameter and quantization format.

Shapes are those of one expert; a parameter has the local experts in front, a checkpoint tensor all of them.
H = hidden size, I = intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megamoe.experts.values import check_block_scale, check_global_scale, to_ue8m0

Shape = Callable[[int, int], tuple[int, ...]]
Convert = Callable[[torch.Tensor], torch.Tensor]
Check = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class ParameterFormat:
    """One parameter: ``shape(H, I)`` of an expert, the dtype it is kept in, and what a checkpoint may bring.

    accepts: dtypes that hold the same bits, or that ``convert`` turns into ``dtype`` exactly.
    check: refuses converted values that no kernel can use (UnusableValueError).
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    accepts: tuple[torch.dtype, ...]
    convert: Convert | None = None
    check: Check | None = None


@dataclass(frozen=True)
class WeightFormat:
    """A quantization format: its parameters, and the sizes it divides."""

    name: str
    parameters: tuple[ParameterFormat, ...]


def _packed(name: str, shape: Shape) -> ParameterFormat:
    return ParameterFormat(name, shape, torch.uint8, (torch.uint8, torch.int8), lambda t: t.view(torch.uint8))


def _ue8m0(name: str, shape: Shape) -> ParameterFormat:
    accepts = (torch.uint8, torch.float8_e8m0fnu, torch.float32)
    return ParameterFormat(name, shape, torch.uint8, accepts, to_ue8m0)


def _plain(name: str, shape: Shape, dtype: torch.dtype, check: Check | None = None) -> ParameterFormat:
    return ParameterFormat(name, shape, dtype, (dtype,), None, check)


MXFP4 = WeightFormat(
    "mxfp4",
    (
        _packed("w13_weight", lambda h, i: (2 * i, h // 2)),
        _ue8m0("w13_weight_scale", lambda h, i: (2 * i, h // 32)),
        _packed("w2_weight", lambda h, i: (h, i // 2)),
        _ue8m0("w2_weight_scale", lambda h, i: (h, i // 32)),
    ),
)

MXFP8 = WeightFormat(
    "mxfp8",
    (
        _plain("w13_weight", lambda h, i: (2 * i, h), torch.float8_e4m3fn),
        _ue8m0("w13_weight_scale", lambda h, i: (2 * i, h // 32)),
        _plain("w2_weight", lambda h, i: (h, i), torch.float8_e4m3fn),
        _ue8m0("w2_weight_scale", lambda h, i: (h, i // 32)),
    ),
)

FP8_BLOCK = WeightFormat(
    "fp8_block",
    (
        _plain("w13_weight", lambda h, i: (2 * i, h), torch.float8_e4m3fn),
        _plain("w13_weight_scale", lambda h, i: (2 * i // 128, h // 128), torch.float32, check_global_scale),
        _plain("w2_weight", lambda h, i: (h, i), torch.float8_e4m3fn),
        _plain("w2_weight_scale", lambda h, i: (h // 128, i // 128), torch.float32, check_global_scale),
    ),
)

NVFP4 = WeightFormat(
    "nvfp4",
    (
        _packed("w13_weight", lambda h, i: (2 * i, h // 2)),
        _plain("w13_weight_scale", lambda h, i: (2 * i, h // 16), torch.float8_e4m3fn, check_block_scale),
        _plain("w13_weight_scale_2", lambda h, i: (2,), torch.float32, check_global_scale),
        _plain("w13_input_scale", lambda h, i: (2,), torch.float32, check_global_scale),
        _packed("w2_weight", lambda h, i: (h, i // 2)),
        _plain("w2_weight_scale", lambda h, i: (h, i // 16), torch.float8_e4m3fn, check_block_scale),
        _plain("w2_weight_scale_2", lambda h, i: (), torch.float32, check_global_scale),
        _plain("w2_input_scale", lambda h, i: (), torch.float32, check_global_scale),
    ),
)

BF16 = WeightFormat(
    "bf16",
    (
        _plain("w13_weight", lambda h, i: (2 * i, h), torch.bfloat16),
        _plain("w2_weight", lambda h, i: (h, i), torch.bfloat16),
    ),
)

FORMATS = {f.name: f for f in (MXFP4, MXFP8, FP8_BLOCK, NVFP4, BF16)}
