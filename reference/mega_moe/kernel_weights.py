"""From the layout that kernels read back to the checkpoint's: rows of gate and up apart, scales by row and
group.

The inverse of ``reference.weights.transform_weights_for_mega_moe`` and of its SM90 form: what a launch is
handed, the forward undoes. The permutations are that module's own, applied to row numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference._bits import as_integers
from reference.formats import unpack_e2m1, unpack_scale_words
from reference.mega_moe.families import MegaMoeFamily
from reference.mega_moe.inputs import ExpertWeights
from reference.weights import interleave_gate_up, transpose_sf_for_utccp

__all__ = ["Weights", "from_kernel_layout"]

Weights = Tensor | tuple[Tensor, Tensor]


def from_kernel_layout(family: MegaMoeFamily, l1_weights: Weights, l2_weights: Weights) -> ExpertWeights:
    """l1_weights, l2_weights as the launch gets them: (weights, scales), for bf16 the weights alone; [e,
    rows, K], or two dimensions for a shared expert, which become one expert."""
    l1, l1_sf = _pair(l1_weights)
    l2, l2_sf = _pair(l2_weights)
    return ExpertWeights(
        l1=_codes(family, _undo(l1, interleave_gate_up)),
        l2=_codes(family, l2),
        l1_sf=_scales(family, l1_sf, interleaved=True),
        l2_sf=_scales(family, l2_sf, interleaved=False),
    )


def _pair(weights: Weights) -> tuple[Tensor, Tensor | None]:
    values, scales = (weights, None) if isinstance(weights, Tensor) else weights
    if values.dim() == 2:
        return values[None], None if scales is None else scales[None]
    return values, scales


def _codes(family: MegaMoeFamily, weights: Tensor) -> Tensor:
    if family.weight_format == "bf16":
        return weights
    codes = weights.view(torch.uint8)
    return unpack_e2m1(codes) if family.weight_format == "e2m1" else codes


def _scales(family: MegaMoeFamily, scales: Tensor | None, interleaved: bool) -> Tensor | None:
    if scales is None or family.scale_format is None:
        return scales  # SM90: float32 blocks, which nothing moves
    words = _undo(scales, transpose_sf_for_utccp)
    return unpack_scale_words(_undo(words, interleave_gate_up) if interleaved else words)


def _undo(tensor: Tensor, move_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows of ``tensor`` [e, rows, ...] back where ``move_rows`` took them from."""
    rows = torch.arange(tensor.shape[1], dtype=torch.int32, device=tensor.device)
    source = move_rows(rows[None, :, None])[0, :, 0].long()
    bits = as_integers(tensor)
    result = torch.empty(bits.shape, dtype=bits.dtype, device=bits.device)
    result[:, source] = bits
    return result.view(tensor.dtype)
