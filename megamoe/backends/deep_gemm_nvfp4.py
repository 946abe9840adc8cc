"""SM100 with FP4 activations and weights: E2M1 x E2M1 with an E4M3 scale per 16.

Two kernels have these operands. ``nvfp4_mega_moe`` quantizes in two levels (a float32 scale per token) and
has its own symmetric buffer; ``fp4_fp4_mega_moe`` quantizes in one level, takes alphas per expert and can
apply a norm to each expert's output. They share the weight layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megamoe.backends.base import Scaled, Weights
from megamoe.backends.checks import CheckpointWeights
from megamoe.backends.deep_gemm_sm100 import DeepGemmSm100Family
from megamoe.backends.library import keep_given
from megamoe.backends.scales import e4m3_scales_to_words
from megamoe.quant_keys import kNvfp4DynamicToken


class _Nvfp4Weights(DeepGemmSm100Family):
    """The weight layout of both kernels: packed E2M1 weights, uint8 or int8 with the even column in the low
    nibble, and E4M3 scales per 1x16.
    """

    checkpoint = CheckpointWeights((torch.uint8, torch.int8), 2, (torch.float8_e4m3fn,), (1, 16))

    def to_kernel_layout(self, w13: Scaled, w2: Scaled, activation: str | None) -> tuple[Weights, Weights]:
        """int8 weights (L1 interleaved), scales as int32 words [L, rows, K / 64], MN-major without row
        padding.
        """
        pairs = []
        for weight, scale in (w13, w2):
            assert scale is not None
            pairs.append((weight.view(torch.int8), e4m3_scales_to_words(scale)))
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe(
            *pairs, **keep_given({"activation": activation})
        )
        return result


class DeepGemmNvfp4MegaMoEBackend(_Nvfp4Weights):
    """Two-level NVFP4: deep_gemm.nvfp4_mega_moe over an NVFP4SymmBuffer.

    Launch options: l1_alpha, l2_alpha float32 [L], l2_activation_scale (finite, > 0), use_x_scales.
    """

    name = "deep_gemm_nvfp4"
    mma_type = "nvfp4"
    hidden_quant = kNvfp4DynamicToken
    stages_with = "prepare_megamoe_nvfp4_inputs"
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

    def staged_views(self, symm_buffer: Any, rows: slice) -> tuple[torch.Tensor, ...]:
        return symm_buffer.x[rows], symm_buffer.x_sf[rows], symm_buffer.x_scales[rows]

    def staging_options(self, symm_buffer: Any, num_tokens: int) -> dict[str, Any]:
        """Fused shared experts get their own input: MXFP8 with scale pages, or a bf16 copy, as the buffer was
        made for. Callers add w2_global_scale, l2_alpha and l2_activation_scale.
        """
        if not getattr(symm_buffer, "num_shared_experts", 0):
            return {}
        shared = symm_buffer.shared_l1_acts
        pages = self.shared_pages(symm_buffer, num_tokens) if shared.dtype == torch.float8_e4m3fn else {}
        return {"shared_x": shared[:num_tokens], **pages}


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
    stages_with = "prepare_megamoe_nvfp4_block_inputs"
    stages_with_eplb = False
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

    def staged_views(self, symm_buffer: Any, rows: slice) -> tuple[torch.Tensor, ...]:
        return symm_buffer.x[rows], symm_buffer.x_sf[rows].view(torch.uint8)

    def staging_options(self, symm_buffer: Any, num_tokens: int) -> dict[str, Any]:
        return {}
