"""SM100 with FP8 activations and FP4 weights: deep_gemm.fp8_fp4_mega_moe."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from megamoe.backends import shared_experts as shared
from megamoe.backends.base import DeepGemmMegaMoEBackend, Scaled, Weights
from megamoe.backends.checks import CheckpointWeights
from megamoe.backends.gate import call_mega_gate
from megamoe.backends.library import declares, keep_given
from megamoe.backends.scales import E8M0_DTYPES, ue8m0_bytes_to_float


class DeepGemmSm100Family(DeepGemmMegaMoEBackend):
    """What all SM100 backends share: the architecture, the mega gate, how block_m is asked for."""

    architecture = "SM100"
    capabilities = ((10, None),)
    hidden_multiple = 256
    # Functions whose build must know shared experts (buffer, launch, block_m); None where the family fuses
    # none.
    shared_functions: ClassVar[tuple[str, str, str] | None] = None

    def supports_bf16_mega_gate(self) -> bool:
        """True, unless a build is at hand that lacks the function: the architecture has the kernel."""
        return self._library is None or hasattr(self._library, "bf16_mega_gate")

    def bf16_mega_gate(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return call_mega_gate(self.library, arguments)

    def sibling(self, mma_type: str) -> DeepGemmMegaMoEBackend | None:
        from megamoe.backends.selection import BUILT_IN

        for backend in BUILT_IN:
            if backend.mma_type == mma_type and issubclass(backend, DeepGemmSm100Family):
                return backend(self._library)
        return None

    def supports_shared_experts(self, deep_gemm: Any) -> bool:
        """True if the build's functions take shared experts. AttributeError if a function itself is
        missing.
        """
        if self.shared_functions is None:
            return False
        create, run, block_m = self.shared_functions
        buffer, launch = getattr(deep_gemm, create), getattr(deep_gemm, run)
        return (
            hasattr(deep_gemm, block_m)
            and hasattr(deep_gemm, "transform_weights_for_mega_moe")
            and declares(buffer, "num_shared_experts")
            and declares(launch, "shared_l1_weights", "shared_l2_weights")
        )

    def transform_shared_expert_weights(
        self,
        *,
        shared_experts: Any,
        num_shared_experts: int,
        hidden_size: int,
        intermediate_size: int,
        prefix: str,
    ) -> tuple[Weights, Weights] | None:
        """((L1 weight, scale), (L2 weight, scale)) of block-FP8 shared experts, or None and one warning
        saying why.

        L1 weight is gate_up_proj.weight's new storage; L2 weight is down_proj.weight's. Layouts: NUMERICS
        5.6, 5.7.
        """
        if self.shared_functions is None:
            return None
        result, why = shared.transform(
            shared_experts, num_shared_experts, hidden_size, intermediate_size, self.library
        )
        if result is None:
            self.warn_once(f"{prefix}: shared experts are not fused into the MegaMoE launch: {why}")
        return result

    def staging_options(self, symm_buffer: Any, num_tokens: int) -> dict[str, Any]:
        return super().staging_options(symm_buffer, num_tokens) | self.shared_pages(symm_buffer, num_tokens)

    def shared_pages(self, symm_buffer: Any, num_tokens: int) -> dict[str, Any]:
        """Arguments that make staging write the shared experts' scale pages; empty without fused shared
        experts.

        The page size must be the block_m that the launch will choose for this number of tokens.
        """
        if not getattr(symm_buffer, "num_shared_experts", 0):
            return {}
        return {
            "shared_x_sf": symm_buffer.shared_l1_acts_sf,
            "shared_block_m": self.get_block_m(symm_buffer, num_tokens),
        }

    def get_block_m(self, symm_buffer: Any, num_tokens: int) -> int:
        """Tile height that a launch over ``num_tokens`` rows of this buffer uses."""
        return int(
            self.library.get_block_m_for_mega_moe(
                symm_buffer.group.size(),
                symm_buffer.num_experts,
                symm_buffer.num_max_tokens_per_rank,
                num_tokens,
                symm_buffer.num_topk,
                self.mma_type,
            )
        )


class DeepGemmSm100MegaMoEBackend(DeepGemmSm100Family):
    """FP8 (E4M3, UE8M0 per 32) activations x MXFP4 (E2M1, UE8M0 per 32) weights.

    A checkpoint has packed E2M1 weights, uint8 or int8 with the even column in the low nibble, and UE8M0
    bytes, uint8 or float8_e8m0fnu, per 1x32.
    """

    name = "deep_gemm_sm100"
    mma_type = "fp8xfp4"
    launch = "fp8_fp4_mega_moe"
    shared_functions = ("get_symm_buffer_for_mega_moe", "fp8_fp4_mega_moe", "get_block_m_for_mega_moe")
    requires = (
        "fp8_fp4_mega_moe",
        "transform_weights_for_mega_moe",
        "transform_sf_into_required_layout",
        "get_symm_buffer_for_mega_moe",
    )
    checkpoint = CheckpointWeights((torch.uint8, torch.int8), 2, E8M0_DTYPES, (1, 32))
    # Packed weights are int8 to the kernel.
    kernel_dtype: ClassVar[torch.dtype] = torch.int8

    def to_kernel_layout(self, w13: Scaled, w2: Scaled, activation: str | None) -> tuple[Weights, Weights]:
        """Weights interleaved (L1), scales as int32 words [L, rows, K / 128], MN-major."""
        pairs = []
        for weight, scale in (w13, w2):
            assert scale is not None
            experts, rows, groups = scale.shape
            values = ue8m0_bytes_to_float(scale).contiguous()
            words = self.library.transform_sf_into_required_layout(
                values, rows, groups * 32, (1, 32), experts
            )
            pairs.append((weight.view(self.kernel_dtype), words))
        result: tuple[Weights, Weights] = self.library.transform_weights_for_mega_moe(
            *pairs, **keep_given({"activation": activation})
        )
        return result


class DeepGemmSm100Fp8MegaMoEBackend(DeepGemmSm100MegaMoEBackend):
    """FP8 (E4M3, UE8M0 per 32) activations x MXFP8 (E4M3, UE8M0 per 32) weights, by the same launch."""

    name = "deep_gemm_sm100_fp8"
    mma_type = "fp8xfp8"
    checkpoint = CheckpointWeights((torch.float8_e4m3fn,), 1, E8M0_DTYPES, (1, 32))
    kernel_dtype = torch.float8_e4m3fn
