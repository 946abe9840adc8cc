"""SM90 in FP8: deep_gemm.fp8_mega_moe, as Hopper builds of DeepGEMM have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megamoe.backends.base import DeepGemmMegaMoEBackend, Weights
from megamoe.backends.checks import check_tensor
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

    def transform_weights(
        self,
        *,
        w13_weight: torch.Tensor,
        w13_weight_scale: torch.Tensor | None,
        w2_weight: torch.Tensor,
        w2_weight_scale: torch.Tensor | None,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str | None = None,
    ) -> tuple[Weights, Weights]:
        """E4M3 weights [L, 2I, H] (gate rows first) and [L, H, I], float32 scales [L, rows / 128, K / 128].

        Returns ((interleaved copy, the scale itself), (w2_weight, its scale)) (NUMERICS 5.3).
        """
        if activation not in (None, "swiglu"):
            raise ValueError(f"activation must be swiglu on SM90, got {activation!r}")
        experts, hidden, inter = num_local_experts, hidden_size, intermediate_size
        fp8, fp32 = (torch.float8_e4m3fn,), (torch.float32,)
        w13 = check_tensor("w13_weight", w13_weight, (experts, 2 * inter, hidden), fp8)
        sf13 = check_tensor(
            "w13_weight_scale", w13_weight_scale, (experts, 2 * inter // 128, hidden // 128), fp32
        )
        w2 = check_tensor("w2_weight", w2_weight, (experts, hidden, inter), fp8)
        sf2 = check_tensor("w2_weight_scale", w2_weight_scale, (experts, hidden // 128, inter // 128), fp32)
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe_sm90(
            (w13.contiguous(), sf13.contiguous()), (w2.contiguous(), sf2.contiguous())
        )
        return result

    def buffer_constructor(self, base: Any | None) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The compact SM90 buffer: no shared experts, no base."""
        return self.library.get_symm_buffer_for_sm90_mega_moe, {}
