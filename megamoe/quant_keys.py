"""Quantization keys: what a tensor is quantized to, as plain frozen data.

`QuantKey` names the element type, the scale (its type, whether it is static, which elements share one),
an optional second scale, and symmetry. A scale dtype of uint8 or float8_e8m0fnu both mean UE8M0.
"""

from dataclasses import dataclass

import torch

E2M1_DTYPE = torch.uint8  # two E2M1 codes a byte, even column in bits 3..0
UE8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class GroupShape:
    """Rows and columns of the block that shares one scale; -1 means the whole extent."""

    row: int
    col: int

    def is_per_group(self) -> bool:
        """One row, and a stated number of columns."""
        return self.row == 1 and self.col >= 1


@dataclass(frozen=True)
class ScaleDesc:
    """A scale: its dtype, static (given ahead) or dynamic (from the data), and its group."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """Element dtype, scale, optional second-level scale, and whether the format is symmetric."""

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


kMxfp8Dynamic = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.uint8, False, GroupShape(1, 32)))
kFp8Dynamic128 = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, False, GroupShape(1, 128)))
kNvfp4DynamicToken = QuantKey(
    E2M1_DTYPE,
    ScaleDesc(torch.float8_e4m3fn, False, GroupShape(1, 16)),
    scale2=ScaleDesc(torch.float32, False, GroupShape(1, -1)),
)
