"""SM90 in FP8: deep_gemm.fp8_mega_moe, as Hopper builds of DeepGEMM have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megamoe.backends.base import DeepGemmMegaMoEBackend, Scaled, Weights
from megamoe.backends.checks import CheckpointWeights
from megamoe.quant_keys import kFp8Dynamic128


class DeepGemmSm90MegaMoEBackend(DeepGemmMegaMoEBackend):
    """FP8 activations (E4M3, float32 scale per 128) x FP8 weights (float32 scale per 128x128 block).

    No shared experts and no mega gate: the kernel has neither. Staging stores amax * fl(1 / 448) as the scale
    (NUMERICS 2.3); DeepGEMM's own SM90 pre-dispatch divides, and a third of its scales differ in the last
    bit. Callers who want those bytes call it themselves: the launch reads whatever scales it finds.
    """

    name = "deep_gemm_sm90"
    mma_type = "fp8xfp8"
    hidden_quant = kFp8Dynamic128
    architecture = "SM90"
    capabilities = ((9, 0),)
    # A token's float32 scales, one per 128 hidden and one per 64 intermediate columns, must fill 16-byte
    # pieces.
    hidden_multiple = 512
    intermediate_multiple = 256
    launch = "fp8_mega_moe"
    requires = (
        "fp8_mega_moe",
        "transform_weights_for_mega_moe_sm90",
        "get_symm_buffer_for_sm90_mega_moe",
    )

    checkpoint = CheckpointWeights((torch.float8_e4m3fn,), 1, (torch.float32,), (128, 128))

    def to_kernel_layout(self, w13: Scaled, w2: Scaled, activation: str | None) -> tuple[Weights, Weights]:
        """((interleaved copy, the scale itself), (w2_weight, its scale))."""
        if activation not in (None, "swiglu"):
            raise ValueError(f"activation must be swiglu on SM90, got {activation!r}")
        pairs = [(weight, scale.contiguous()) for weight, scale in (w13, w2) if scale is not None]
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe_sm90(*pairs)
        return result

    def buffer_constructor(self, base: Any | None) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The compact SM90 buffer: no shared experts, no base."""
        return self.library.get_symm_buffer_for_sm90_mega_moe, {}
