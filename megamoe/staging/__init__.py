"""Staging: hidden states and routing into the buffers that the MegaMoE kernels read.

Every function checks all of its arguments, then starts one kernel that writes caller-owned buffers, and
returns None. A refusal (TypeError, ValueError) names the argument and leaves every buffer as it was. CUDA
tensors run the compiled kernel, CPU tensors the same kernel under Triton's interpreter.

Arithmetic: docs and sources are in the kernel modules (`megamoe.kernels.numerics`, `.fp8_groups`,
`.nvfp4`, `.routing`). M = tokens, H = hidden size, K = top-k, L = local experts. Strides are free unless
a function says otherwise. No output may overlap an input, another output or itself.
"""

from megamoe.staging.groups import prepare_megamoe_bf16_inputs, prepare_megamoe_inputs
from megamoe.staging.nvfp4 import prepare_megamoe_nvfp4_inputs
from megamoe.staging.nvfp4_block import prepare_megamoe_nvfp4_block_inputs, prepare_megamoe_nvfp4_with_norm

__all__ = [
    "prepare_megamoe_bf16_inputs",
    "prepare_megamoe_inputs",
    "prepare_megamoe_nvfp4_block_inputs",
    "prepare_megamoe_nvfp4_inputs",
    "prepare_megamoe_nvfp4_with_norm",
]
