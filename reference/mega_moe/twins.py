"""The launches under their production names and signatures, over a ``SymmBuffer`` and weights in kernel
layout.

Every function reads this rank's staged tokens from ``sym_buffer``, runs one launch with the other ranks of
its group, and writes ``y`` [T, H] bfloat16 (T = this rank's tokens), the stages into the buffer (rows
without a token keep what they held) and, if given, ``cumulative_local_expert_recv_stats`` int32 [e], which
it adds to. Bad arguments raise ValueError or TypeError before anything is written. ``activation_clamp``
None is no clamp.

Weights are in kernel layout (``reference.weights.transform_weights_for_mega_moe`` and its SM90 form), e
experts of this rank: l1 [e, 2I, H], gate and up rows interleaved, l2 [e, H, I], FP4 as bytes of two. Scale
words are int32 MN-major in UTCCP order, [e, rows, K / 128] (UE8M0 per 32) or [e, rows, K / 64] (E4M3 per 16).

``cumulative_local_expert_recv_stats``, ``recipe`` and the names of activations are those of the libraries;
signatures are sgl-deep-gemm 0.1.5's for SM90 and DeepGEMM's as bundled with vLLM 0.33 for SM100. Source:
NUMERICS 8, 10, 11.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference.formats import unpack_scale_words
from reference.heuristics import get_block_m_for_mega_moe, get_block_m_for_nvfp4_mega_moe
from reference.mega_moe.buffer_io import read_inputs, write_results
from reference.mega_moe.distributed import forward_rank
from reference.mega_moe.epilogue import Activation
from reference.mega_moe.families import FAMILIES
from reference.mega_moe.inputs import PostNorm, SharedExpert
from reference.mega_moe.kernel_weights import Weights, from_kernel_layout
from reference.mega_moe.launch import LaunchConfig, sm90_launch_config
from reference.scale_pages import read_scale_pages

__all__ = ["bf16_mega_moe", "fp4_fp4_mega_moe", "fp8_fp4_mega_moe", "fp8_mega_moe", "nvfp4_mega_moe"]

Pair = tuple[Tensor, Tensor]


def fp8_mega_moe(
    y: Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: Any,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (128, 128, 128),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """SM90: E4M3 activations with float32 scales per 128, E4M3 weights with float32 scales per 128x128 block.

    l1_weights: (e4m3 [e, 2I, H], float32 [e, 2I / 128, H / 128]); l2_weights: (e4m3 [e, H, I], float32
    [e, H / 128, I / 128]); the scales keep the checkpoint's order. Source: NUMERICS 8.8, 17.
    """
    _check_recipe(recipe, (128, 128, 128))
    family = FAMILIES["sm90_fp8xfp8"]
    options = _activation(activation, activation_clamp, 1.0, 0.0, fast_math)
    tokens = _check_call(y, sym_buffer, cumulative_local_expert_recv_stats)
    launch = sm90_launch_config(
        num_ranks=sym_buffer.group.size(),
        num_experts=sym_buffer.num_experts,
        num_topk=sym_buffer.num_topk,
        num_tokens=tokens,
        hidden=sym_buffer.hidden,
        intermediate_hidden=sym_buffer.intermediate_hidden,
    )
    inputs = read_inputs(family, sym_buffer, tokens)
    weights = from_kernel_layout(family, l1_weights, l2_weights)
    result = forward_rank(family, inputs, weights, launch, options, sym_buffer.group)
    write_results(family, result, y, sym_buffer, cumulative_local_expert_recv_stats)


def fp8_fp4_mega_moe(
    y: Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: Any,
    shared_l1_weights: Pair | None = None,
    shared_l2_weights: Pair | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 32),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> None:
    """SM100: E4M3 activations, E2M1 or E4M3 weights (the buffer's mma_type says which), UE8M0 scales per 32.

    Shared experts: E4M3 with the same scales, l1 [2IS, H], l2 [H, IS]; their input is x, their scales the
    buffer's pages. Source: NUMERICS 8.2 to 8.5.
    """
    _check_recipe(recipe, (1, 1, 32))
    known = {"fp8xfp4": "sm100_fp8xfp4", "fp8xfp8": "sm100_fp8xfp8"}
    require(sym_buffer.mma_type in known, "sym_buffer", f"one for {' or '.join(known)}", sym_buffer.mma_type)
    family = FAMILIES[known[sym_buffer.mma_type]]
    options = _activation(activation, activation_clamp, activation_alpha, activation_beta, fast_math)
    tokens = _check_call(y, sym_buffer, cumulative_local_expert_recv_stats)
    launch = _sm100_launch(sym_buffer, tokens)
    inputs = read_inputs(family, sym_buffer, tokens)
    shared = _shared("sm100_fp8xfp8", shared_l1_weights, shared_l2_weights, sym_buffer)
    if shared is not None:
        # The kernel reads the pages, not x_sf: a page laid out for another tile height shows.
        pages = read_scale_pages(sym_buffer.shared_l1_acts_sf, launch.tile, tokens)
        inputs = replace(inputs, shared_x=inputs.x, shared_x_sf=unpack_scale_words(pages))
    weights = from_kernel_layout(family, l1_weights, l2_weights)
    result = forward_rank(family, inputs, weights, launch, options, sym_buffer.group, shared=shared)
    write_results(family, result, y, sym_buffer, cumulative_local_expert_recv_stats)


def bf16_mega_moe(
    y: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: Any,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    post_expert_norm_gamma: Tensor | None = None,
    post_expert_norm_eps: float = 1e-6,
) -> None:
    """SM100: bfloat16 throughout; with ``post_expert_norm_gamma`` float32 [H], RMSNorm of every expert's
    output and the routing weight after it (then no shared experts).

    Weights are bfloat16 tensors without scales, shared experts' l1 [2IS, H], l2 [H, IS]. Source: NUMERICS 8.2
    to 8.6.
    """
    family = FAMILIES["sm100_bf16"]
    options = _activation(activation, activation_clamp, activation_alpha, activation_beta, fast_math)
    tokens = _check_call(y, sym_buffer, cumulative_local_expert_recv_stats)
    launch = _sm100_launch(sym_buffer, tokens)
    inputs = read_inputs(family, sym_buffer, tokens)
    shared = _shared("sm100_bf16", shared_l1_weights, shared_l2_weights, sym_buffer)
    norm = _norm(post_expert_norm_gamma, post_expert_norm_eps, sym_buffer.hidden)
    weights = from_kernel_layout(family, l1_weights, l2_weights)
    result = forward_rank(
        family, inputs, weights, launch, options, sym_buffer.group, shared=shared, norm=norm
    )
    write_results(family, result, y, sym_buffer, cumulative_local_expert_recv_stats)


def nvfp4_mega_moe(
    y: Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: Any,
    shared_l1_weights: Weights | None = None,
    shared_l2_weights: Weights | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    l1_alpha: Tensor | None = None,
    l2_alpha: Tensor | None = None,
    l2_activation_scale: float = 1.0,
    use_x_scales: bool = False,
    activation: str = "swiglu",
) -> None:
    """SM100, two-level NVFP4: E2M1 with E4M3 scales per 16, float32 [e] alphas on both accumulators, and
    with use_x_scales the buffer's float32 scale a token. Shared experts E4M3 with UE8M0 scales, or
    bfloat16, from their own input. l2_activation_scale: a positive finite number. Source: NUMERICS 8.2 to
    8.5, 11.2."""
    family = FAMILIES["sm100_nvfp4"]
    plain = activation_alpha == 1.0 and activation_beta == 0.0 and shared_l1_weights is None
    require(
        activation != "swiglustep" or plain,
        "activation",
        "swiglustep alone",
        "alpha, beta or a shared expert",
    )
    usable = l2_activation_scale > 0 and math.isfinite(l2_activation_scale)
    require(usable, "l2_activation_scale", "a positive finite number", l2_activation_scale)
    options = _activation(activation, activation_clamp, activation_alpha, activation_beta, fast_math)
    tokens = _check_call(y, sym_buffer, cumulative_local_expert_recv_stats)
    ranks, experts = sym_buffer.group.size(), sym_buffer.num_experts
    limits = sym_buffer.num_max_tokens_per_rank, tokens, sym_buffer.num_topk
    launch = LaunchConfig(get_block_m_for_nvfp4_mega_moe(ranks, experts, *limits), sym_buffer.hidden)
    inputs = read_inputs(family, sym_buffer, tokens)
    if use_x_scales:
        inputs = replace(inputs, x_scales=sym_buffer.x_scales[:tokens].clone())
    scaled = not isinstance(shared_l1_weights, Tensor)
    name = "sm100_fp8xfp8" if scaled else "sm100_bf16"
    shared = _shared(name, shared_l1_weights, shared_l2_weights, sym_buffer)
    if shared is not None:
        own = sym_buffer.shared_l1_acts[:tokens]
        pages = read_scale_pages(sym_buffer.shared_l1_acts_sf, launch.tile, tokens) if scaled else None
        inputs = replace(
            inputs,
            shared_x=own.view(torch.uint8) if scaled else own,
            shared_x_sf=None if pages is None else unpack_scale_words(pages),
        )
    weights = from_kernel_layout(family, l1_weights, l2_weights)
    weights = replace(weights, l1_alphas=l1_alpha, l2_alphas=l2_alpha)
    result = forward_rank(
        family,
        inputs,
        weights,
        launch,
        options,
        sym_buffer.group,
        shared=shared,
        l2_activation_scale=l2_activation_scale,
    )
    write_results(family, result, y, sym_buffer, cumulative_local_expert_recv_stats)


def fp4_fp4_mega_moe(
    y: Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: Any,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    x_bf16: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 16),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    l1_alphas: Tensor | None = None,
    l2_alphas: Tensor | None = None,
    a2_scales: Tensor | None = None,
    post_expert_norm_gamma: Tensor | None = None,
    post_expert_norm_eps: float = 1e-6,
) -> None:
    """SM100, one-level NVFP4: E2M1 with E4M3 scales per 16; l1_alphas float32 [e, 2] (gate, up), l2_alphas
    and a2_scales [e]. Shared experts bfloat16, from ``x_bf16`` [T, H]: all three or none.
    ``post_expert_norm_gamma`` as for ``bf16_mega_moe``. Source: NUMERICS 8.2 to 8.6."""
    _check_recipe(recipe, (1, 1, 16))
    family = FAMILIES["sm100_fp4xfp4"]
    options = _activation(activation, activation_clamp, 1.0, 0.0, fast_math)
    tokens = _check_call(y, sym_buffer, cumulative_local_expert_recv_stats)
    together = (shared_l1_weights is None) == (x_bf16 is None)
    require(together, "x_bf16", "a tensor if and only if there are shared weights", "one without the other")
    launch = _sm100_launch(sym_buffer, tokens)
    inputs = replace(read_inputs(family, sym_buffer, tokens), shared_x=x_bf16)
    shared = _shared("sm100_bf16", shared_l1_weights, shared_l2_weights, sym_buffer)
    norm = _norm(post_expert_norm_gamma, post_expert_norm_eps, sym_buffer.hidden)
    weights = from_kernel_layout(family, l1_weights, l2_weights)
    weights = replace(weights, l1_alphas=l1_alphas, l2_alphas=l2_alphas, a2_scales=a2_scales)
    result = forward_rank(
        family, inputs, weights, launch, options, sym_buffer.group, shared=shared, norm=norm
    )
    write_results(family, result, y, sym_buffer, cumulative_local_expert_recv_stats)


def _check_recipe(recipe: Sequence[int], expected: tuple[int, int, int]) -> None:
    require(tuple(recipe) == expected, "recipe", f"{expected}", tuple(recipe))


def _activation(name: str, clamp: float | None, alpha: float, beta: float, fast_math: bool) -> Activation:
    require(clamp is None or clamp >= 0, "activation_clamp", "None or a number that is not negative", clamp)
    for argument, value in (("activation_alpha", alpha), ("activation_beta", beta)):
        require(math.isfinite(value), argument, "a finite number", value)
    if name == "situ":
        require(alpha > 0, "activation_alpha", "a positive number for situ", alpha)
        require(beta >= 0, "activation_beta", "a number that is not negative for situ", beta)
        require(clamp is None, "activation_clamp", "None for situ", clamp)
    return Activation(name, None if clamp == math.inf else clamp, alpha, beta, fast_math)


def _check_call(y: Tensor, sym_buffer: Any, stats: Tensor | None) -> int:
    """The number of this rank's tokens."""
    check_tensor("y", y, dtypes=(torch.bfloat16,), dim=2, written=True)
    require(y.shape[1] == sym_buffer.hidden, "y", f"{sym_buffer.hidden} columns", list(y.shape))
    limit = sym_buffer.num_max_tokens_per_rank
    require(len(y) <= limit, "y", f"at most {limit} rows, the buffer's tokens", len(y))
    if stats is not None:
        local = sym_buffer.num_experts // sym_buffer.group.size()
        name = "cumulative_local_expert_recv_stats"
        check_tensor(name, stats, dtypes=(torch.int32,), shape=(local,), device=y.device, written=True)
    return len(y)


def _sm100_launch(buffer: Any, tokens: int) -> LaunchConfig:
    block_m = get_block_m_for_mega_moe(
        buffer.group.size(),
        buffer.num_experts,
        buffer.num_max_tokens_per_rank,
        tokens,
        buffer.num_topk,
        buffer.mma_type,
    )
    return LaunchConfig(block_m, buffer.hidden)


def _shared(name: str, l1: Weights | None, l2: Weights | None, buffer: Any) -> SharedExpert | None:
    require((l1 is None) == (l2 is None), "shared_l2_weights", "given with shared_l1_weights", "one of them")
    expected = buffer.num_shared_experts > 0
    given = l1 is not None
    require(given == expected, "shared_l1_weights", "given" if expected else "None for this buffer", given)
    if l1 is None or l2 is None:
        return None
    return SharedExpert(name, from_kernel_layout(FAMILIES[name], l1, l2))


def _norm(gamma: Tensor | None, eps: float, hidden: int) -> PostNorm | None:
    if gamma is None:
        return None
    check_tensor("post_expert_norm_gamma", gamma, dtypes=(torch.float32,), shape=(hidden,))
    return PostNorm(gamma, eps)
