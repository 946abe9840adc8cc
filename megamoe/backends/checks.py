"""Argument checks of the backends: one message form, naming the argument, what was expected and what came."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def check_tensor(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """TypeError or ValueError unless ``tensor`` has this shape and one of these dtypes."""
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a {wanted} tensor {shape}, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


@dataclass(frozen=True)
class CheckpointWeights:
    """What a checkpoint's weights look like: their dtypes, columns in a byte, and scales.

    scale_dtypes is empty where there are no scales; otherwise there is one per scale_block (rows, columns).
    """

    dtypes: tuple[torch.dtype, ...]
    columns_per_byte: int = 1
    scale_dtypes: tuple[torch.dtype, ...] = ()
    scale_block: tuple[int, int] = (1, 1)

    def check(
        self,
        prefix: str,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        experts: int,
        rows: int,
        columns: int,
    ) -> None:
        """TypeError or ValueError, naming the argument, unless the tensors are [experts, rows, columns]
        so.
        """
        check_tensor(
            f"{prefix}_weight", weight, (experts, rows, columns // self.columns_per_byte), self.dtypes
        )
        name = f"{prefix}_weight_scale"
        if self.scale_dtypes:
            high, wide = self.scale_block
            check_tensor(name, scale, (experts, rows // high, columns // wide), self.scale_dtypes)
        elif scale is not None:
            raise TypeError(f"{name} must be None: these weights have no scales")
