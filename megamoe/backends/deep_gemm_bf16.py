"""SM100 in bf16: deep_gemm.bf16_mega_moe."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.backends.base import Weights
from megamoe.backends.checks import check_tensor
from megamoe.backends.deep_gemm_sm100 import DeepGemmSm100Family
from megamoe.backends.library import keep_given
from megamoe.backends.unfused import map_experts


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

    def transform_weights(
        self,
        *,
        w13_weight: torch.Tensor,
        w13_weight_scale: torch.Tensor | None = None,
        w2_weight: torch.Tensor,
        w2_weight_scale: torch.Tensor | None = None,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str | None = None,
    ) -> tuple[Weights, Weights]:
        """w13_weight [L, 2I, H] and w2_weight [L, H, I], bf16: (interleaved copy, w2_weight itself)."""
        for argument, scale in (("w13_weight_scale", w13_weight_scale), ("w2_weight_scale", w2_weight_scale)):
            if scale is not None:
                raise TypeError(f"{argument} must be None: bf16 weights have no scales")
        experts, hidden, inter = num_local_experts, hidden_size, intermediate_size
        check_tensor("w13_weight", w13_weight, (experts, 2 * inter, hidden), (torch.bfloat16,))
        check_tensor("w2_weight", w2_weight, (experts, hidden, inter), (torch.bfloat16,))
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe(
            w13_weight.contiguous(), w2_weight.contiguous(), **keep_given({"activation": activation})
        )
        return result

    def prepare_inputs(
        self,
        symm_buffer: Any,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        is_padding: torch.Tensor | None = None,
        eplb_state: Any | None = None,
        **options: Any,
    ) -> None:
        """A copy of the hidden states; expert ids are mapped first where there is EPLB."""
        rows = slice(hidden_states.shape[0])
        topk_ids = map_experts(self.eplb, topk_ids, is_padding, eplb_state)
        self.staging.prepare_megamoe_bf16_inputs(
            hidden_states,
            topk_weights,
            topk_ids,
            symm_buffer.x[rows],
            symm_buffer.topk_idx[rows],
            symm_buffer.topk_weights[rows],
            is_padding=is_padding,
            **options,
        )
