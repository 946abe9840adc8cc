"""SM100 in bf16: deep_gemm.bf16_mega_moe."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.backends.base import Scaled, Weights
from megamoe.backends.checks import CheckpointWeights
from megamoe.backends.deep_gemm_sm100 import DeepGemmSm100Family
from megamoe.backends.library import keep_given


class DeepGemmBf16MegaMoEBackend(DeepGemmSm100Family):
    """bf16 activations and weights, no scales.

    Launch options: post_expert_norm_gamma float32 [H] with post_expert_norm_eps (not with shared experts).
    """

    name = "deep_gemm_bf16"
    mma_type = "bf16xbf16"
    hidden_quant = None
    launch = "bf16_mega_moe"
    launch_options = ("post_expert_norm_gamma", "post_expert_norm_eps")
    requires = ("bf16_mega_moe", "transform_weights_for_mega_moe", "get_symm_buffer_for_mega_moe")

    checkpoint = CheckpointWeights((torch.bfloat16,))
    stages_with = "prepare_megamoe_bf16_inputs"
    stages_with_eplb = False

    def to_kernel_layout(self, w13: Scaled, w2: Scaled, activation: str | None) -> tuple[Weights, Weights]:
        """(interleaved copy of w13_weight, w2_weight itself)."""
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe(
            w13[0], w2[0], **keep_given({"activation": activation})
        )
        return result

    def staged_views(self, symm_buffer: Any, rows: slice) -> tuple[torch.Tensor, ...]:
        return (symm_buffer.x[rows],)

    def staging_options(self, symm_buffer: Any, num_tokens: int) -> dict[str, Any]:
        return {}
