"""SM100 with FP4 activations and weights: E2M1 x E2M1 with an E4M3 scale per 16.

Two kernels have these operands. ``nvfp4_mega_moe`` quantizes in two levels (a float32 scale per token) and
has its own symmetric buffer; ``fp4_fp4_mega_moe`` quantizes in one level, takes alphas per expert and can
apply a norm to each expert's output. They share the weight layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megamoe.backends.base import Weights
from megamoe.backends.checks import check_tensor
from megamoe.backends.deep_gemm_sm100 import DeepGemmSm100Family
from megamoe.backends.library import keep_given
from megamoe.backends.scales import e4m3_scales_to_words
from megamoe.backends.unfused import map_experts
from megamoe.quant_keys import kNvfp4DynamicToken


class _Nvfp4Weights(DeepGemmSm100Family):
    """The weight layout of both kernels."""

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
        """Packed E2M1 weights (uint8 or int8, even column in the low nibble) and E4M3 scales per 1x16.

        w13_weight [L, 2I, H / 2], gate rows first; w13_weight_scale [L, 2I, H / 16] float8_e4m3fn; w2_weight
        [L, H, I / 2]; w2_weight_scale [L, H, I / 16]. Returns ((L1 weight, scale), (L2 weight, scale)): int8
        weights and int32 scale words [L, rows, K / 64], MN-major without row padding. The L2 weight shares
        w2_weight's storage (NUMERICS 5.8).
        """
        experts, hidden, inter = num_local_experts, hidden_size, intermediate_size
        packed, scales = (torch.uint8, torch.int8), (torch.float8_e4m3fn,)
        w13 = check_tensor("w13_weight", w13_weight, (experts, 2 * inter, hidden // 2), packed)
        sf13 = check_tensor("w13_weight_scale", w13_weight_scale, (experts, 2 * inter, hidden // 16), scales)
        w2 = check_tensor("w2_weight", w2_weight, (experts, hidden, inter // 2), packed)
        sf2 = check_tensor("w2_weight_scale", w2_weight_scale, (experts, hidden, inter // 16), scales)
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe(
            (w13.view(torch.int8).contiguous(), e4m3_scales_to_words(sf13)),
            (w2.view(torch.int8).contiguous(), e4m3_scales_to_words(sf2)),
            **keep_given({"activation": activation}),
        )
        return result


class DeepGemmNvfp4MegaMoEBackend(_Nvfp4Weights):
    """Two-level NVFP4: deep_gemm.nvfp4_mega_moe over an NVFP4SymmBuffer.

    Launch options: l1_alpha, l2_alpha float32 [L], l2_activation_scale (finite, > 0), use_x_scales.
    """

    name = "deep_gemm_nvfp4"
    mma_type = "nvfp4"
    hidden_quant = kNvfp4DynamicToken
    launch = "nvfp4_mega_moe"
    shared_functions = ("NVFP4SymmBuffer", "nvfp4_mega_moe", "get_block_m_for_nvfp4_mega_moe")
    launch_options = ("l1_alpha", "l2_alpha", "l2_activation_scale", "use_x_scales")
    requires = ("nvfp4_mega_moe", "NVFP4SymmBuffer", "transform_weights_for_mega_moe")

    def buffer_constructor(self, base: Any | None) -> tuple[Callable[..., Any], dict[str, Any]]:
        """NVFP4SymmBuffer; its option shared_dtype is float8_e4m3fn (the library's default) or bfloat16."""
        return self.library.NVFP4SymmBuffer, {}

    def get_block_m(self, symm_buffer: Any, num_tokens: int) -> int:
        """Tile height; this API has its own heuristic (NUMERICS 10.3)."""
        return int(
            self.library.get_block_m_for_nvfp4_mega_moe(
                symm_buffer.group.size(),
                symm_buffer.num_experts,
                symm_buffer.num_max_tokens_per_rank,
                num_tokens,
                symm_buffer.num_topk,
            )
        )

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
        """NVFP4 with a scale per token. Options: w2_global_scale, l2_alpha, l2_activation_scale.

        Fused shared experts get their own input: MXFP8 with scale pages, or a bf16 copy, as the buffer was
        made for.
        """
        rows = slice(hidden_states.shape[0])
        if getattr(symm_buffer, "num_shared_experts", 0):
            options["shared_x"] = symm_buffer.shared_l1_acts[rows]
            if symm_buffer.shared_l1_acts.dtype == torch.float8_e4m3fn:
                options.update(self.shared_pages(symm_buffer, hidden_states.shape[0]))
        self.staging.prepare_megamoe_nvfp4_inputs(
            hidden_states,
            topk_weights,
            topk_ids,
            symm_buffer.x[rows],
            symm_buffer.x_sf[rows],
            symm_buffer.x_scales[rows],
            symm_buffer.topk_idx[rows],
            symm_buffer.topk_weights[rows],
            is_padding=is_padding,
            eplb_state=eplb_state,
            **options,
        )


class DeepGemmFp4MegaMoEBackend(_Nvfp4Weights):
    """One-level NVFP4: deep_gemm.fp4_fp4_mega_moe.

    Launch options: l1_alphas float32 [L, 2] (gate, up), l2_alphas and a2_scales [L], post_expert_norm_gamma
    float32 [H] with post_expert_norm_eps, and for fused bf16 shared experts x_bf16. The kernel has plain
    SwiGLU only.
    """

    name = "deep_gemm_fp4"
    mma_type = "fp4xfp4"
    hidden_quant = None
    intermediate_multiple = 256
    launch = "fp4_fp4_mega_moe"
    launch_options = (
        "l1_alphas",
        "l2_alphas",
        "a2_scales",
        "post_expert_norm_gamma",
        "post_expert_norm_eps",
        "x_bf16",
        "routed_scaling_factor",
    )
    requires = ("fp4_fp4_mega_moe", "SymmBuffer", "transform_weights_for_mega_moe")

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
        """NVFP4 with unit token scale; expert ids are mapped first where there is EPLB."""
        rows = slice(hidden_states.shape[0])
        topk_ids = map_experts(self.eplb, topk_ids, is_padding, eplb_state)
        self.staging.prepare_megamoe_nvfp4_block_inputs(
            hidden_states,
            topk_weights,
            topk_ids,
            symm_buffer.x[rows],
            symm_buffer.x_sf[rows].view(torch.uint8),
            symm_buffer.topk_idx[rows],
            symm_buffer.topk_weights[rows],
            is_padding=is_padding,
            **options,
        )
