"""A deep_gemm module that records its calls, with signatures and layouts written out from NUMERICS 5 and 11.

Layouts are produced element by element from the formulas, so that nothing here shares code with what is
tested.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch


def interleaved_row(row: int, intermediate: int) -> int:
    """Destination of row ``row`` of [2I, ...]: gate and up in turns of 8 rows."""
    half, r = divmod(row, intermediate)
    return (r // 8) * 16 + 8 * half + r % 8


def utccp_row(row: int) -> int:
    """Destination of a scale row: 128 b + 32 j + i goes to 128 b + 4 i + j."""
    block, inside = divmod(row, 128)
    j, i = divmod(inside, 32)
    return 128 * block + 4 * i + j


def move_rows(tensor: torch.Tensor, destination: list[int]) -> torch.Tensor:
    """Rows (second to last axis but the last) moved: result[..., destination[r], :] = tensor[..., r, :]."""
    result = torch.empty_like(tensor)
    result[..., torch.tensor(destination), :] = tensor
    return result


def expected_transform(l1: Any, l2: Any) -> tuple[Any, Any]:
    """transform_weights_for_mega_moe, for 2-D and 3-D, with and without scales."""

    def interleave(t: torch.Tensor) -> torch.Tensor:
        return move_rows(t, [interleaved_row(r, t.shape[-2] // 2) for r in range(t.shape[-2])])

    def utccp(t: torch.Tensor) -> torch.Tensor:
        return move_rows(t, [utccp_row(r) for r in range(t.shape[-2])])

    if isinstance(l1, tuple):
        return (interleave(l1[0]), utccp(interleave(l1[1]))), (l2[0], utccp(l2[1]))
    return interleave(l1), l2


def expected_packed_scales(sf: torch.Tensor) -> torch.Tensor:
    """float32 powers of two [G, mn, k] -> int32 [G, mn, ceil(k / 4)], MN-major, mn rounded up to 4."""
    groups, mn, k = sf.shape
    words, aligned = -(-k // 4), -(-mn // 4) * 4
    result = torch.zeros(groups * words * aligned, dtype=torch.int32).as_strided(
        (groups, mn, words), (words * aligned, 1, aligned)
    )
    codes = torch.zeros(groups, mn, words * 4, dtype=torch.uint8)
    codes[..., :k] = torch.log2(sf).to(torch.int32).add(127).to(torch.uint8)
    result.copy_(codes.view(torch.int32))
    return result


class Recorder:
    """Calls in order: (function, positional arguments, keyword arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, name: str, *arguments: Any, **options: Any) -> None:
        self.calls.append((name, arguments, options))

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


class Buffer:
    """What a symmetric buffer's constructor was given."""

    def __init__(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kind, self.arguments, self.options = kind, arguments, options
        self.group, self.num_experts, self.num_max_tokens_per_rank, self.num_topk = arguments[:4]
        self.num_shared_experts = options.get("num_shared_experts") or 0


def make_module(*, without: tuple[str, ...] = (), old: bool = False) -> types.ModuleType:
    """A module named deep_gemm with ``calls``. ``old``: a build without shared experts, base= and
    alpha/beta.
    """
    module = types.ModuleType("deep_gemm")
    record = Recorder()
    module.calls = record  # type: ignore[attr-defined]

    if old:

        def fp8_fp4_mega_moe(
            y,
            l1_weights,
            l2_weights,
            sym_buffer,
            cumulative_local_expert_recv_stats=None,
            recipe=(1, 1, 32),
            activation="swiglu",
            activation_clamp=None,
            fast_math=True,
        ):
            given = {"activation": activation, "activation_clamp": activation_clamp, "fast_math": fast_math}
            record("fp8_fp4_mega_moe", y, l1_weights, l2_weights, sym_buffer, **given)

        def get_symm_buffer_for_mega_moe(
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            use_fp8_dispatch=None,
            mma_type="fp8xfp4",
            activation="swiglu",
        ):
            return Buffer(
                "main", (group, num_experts, num_max_tokens_per_rank, num_topk), {"mma_type": mma_type}
            )
    else:

        def fp8_fp4_mega_moe(
            y,
            l1_weights,
            l2_weights,
            sym_buffer,
            shared_l1_weights=None,
            shared_l2_weights=None,
            activation="swiglu",
            activation_clamp=None,
            activation_alpha=1.0,
            activation_beta=0.0,
            fast_math=True,
            **rest,
        ):
            raise AssertionError("replaced below")

        def get_symm_buffer_for_mega_moe(
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            num_shared_experts=0,
            mma_type="fp8xfp4",
            activation="swiglu",
        ):
            options = {
                "num_shared_experts": num_shared_experts,
                "mma_type": mma_type,
                "activation": activation,
            }
            return Buffer("main", (group, num_experts, num_max_tokens_per_rank, num_topk), options)

    def recording(name: str, like: Any) -> Any:
        def function(*arguments: Any, **options: Any) -> None:
            record(name, *arguments, **options)

        function.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
        function.__name__ = name
        return function

    def bf16_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        activation="swiglu",
        activation_clamp=None,
        fast_math=True,
        post_expert_norm_gamma=None,
        post_expert_norm_eps=1e-6,
    ):
        raise AssertionError("replaced below")

    def nvfp4_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        shared_l1_weights=None,
        shared_l2_weights=None,
        activation_clamp=None,
        fast_math=True,
        activation_alpha=1.0,
        activation_beta=0.0,
        l1_alpha=None,
        l2_alpha=None,
        l2_activation_scale=1.0,
        use_x_scales=False,
    ):
        raise AssertionError("replaced below")

    def fp4_fp4_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        shared_l1_weights=None,
        shared_l2_weights=None,
        x_bf16=None,
        activation="swiglu",
        activation_clamp=None,
        fast_math=True,
        l1_alphas=None,
        l2_alphas=None,
        a2_scales=None,
        post_expert_norm_gamma=None,
        post_expert_norm_eps=1e-6,
    ):
        raise AssertionError("replaced below")

    def fp8_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats=None,
        recipe=(128, 128, 128),
        activation="swiglu",
        activation_clamp=None,
        fast_math=True,
    ):
        raise AssertionError("replaced below")

    def transform_weights_for_mega_moe(l1_weights, l2_weights, activation="swiglu"):
        record("transform_weights_for_mega_moe", l1_weights, l2_weights, activation=activation)
        return expected_transform(l1_weights, l2_weights)

    def transform_weights_for_mega_moe_sm90(l1_weights, l2_weights):
        record("transform_weights_for_mega_moe_sm90", l1_weights, l2_weights)
        return (expected_transform(l1_weights[0], None)[0], l1_weights[1]), l2_weights

    def transform_sf_into_required_layout(sf, mn, k, recipe, num_groups=None):
        record("transform_sf_into_required_layout", sf, mn, k, recipe, num_groups)
        expected = (torch.float32, True, (num_groups, mn, k // 32), (1, 32))
        assert (sf.dtype, sf.is_contiguous(), tuple(sf.shape), recipe) == expected
        return expected_packed_scales(sf)

    class SymmBuffer(Buffer):
        def __init__(
            self,
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            num_shared_experts=0,
            mma_type="fp8xfp4",
            activation="swiglu",
            base=None,
        ):
            sizes = (group, num_experts, num_max_tokens_per_rank, num_topk)
            super().__init__("main", sizes, {"mma_type": mma_type, "base": base})

    class NVFP4SymmBuffer(Buffer):
        def __init__(
            self,
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            num_shared_experts=0,
            base=None,
            shared_dtype=torch.float8_e4m3fn,
        ):
            sizes = (group, num_experts, num_max_tokens_per_rank, num_topk)
            super().__init__(
                "nvfp4", sizes, {"num_shared_experts": num_shared_experts, "shared_dtype": shared_dtype}
            )

    def get_symm_buffer_for_sm90_mega_moe(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        use_fp8_dispatch=True,
        activation="swiglu",
    ):
        return Buffer(
            "sm90", (group, num_experts, num_max_tokens_per_rank, num_topk), {"activation": activation}
        )

    def get_block_m_for_mega_moe(
        num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk, mma_type
    ):
        record(
            "get_block_m_for_mega_moe",
            num_ranks,
            num_experts,
            num_max_tokens_per_rank,
            num_tokens,
            num_topk,
            mma_type,
        )
        return 64

    def get_block_m_for_nvfp4_mega_moe(num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk):
        record(
            "get_block_m_for_nvfp4_mega_moe",
            num_ranks,
            num_experts,
            num_max_tokens_per_rank,
            num_tokens,
            num_topk,
        )
        return 32

    launches = {
        "fp8_fp4_mega_moe": fp8_fp4_mega_moe,
        "bf16_mega_moe": bf16_mega_moe,
        "nvfp4_mega_moe": nvfp4_mega_moe,
        "fp4_fp4_mega_moe": fp4_fp4_mega_moe,
        "fp8_mega_moe": fp8_mega_moe,
    }
    exports = {name: recording(name, function) for name, function in launches.items()}
    if old:
        exports["fp8_fp4_mega_moe"] = fp8_fp4_mega_moe
    others = (
        transform_weights_for_mega_moe,
        transform_weights_for_mega_moe_sm90,
        transform_sf_into_required_layout,
        SymmBuffer,
        NVFP4SymmBuffer,
        get_symm_buffer_for_mega_moe,
        get_symm_buffer_for_sm90_mega_moe,
        get_block_m_for_mega_moe,
        get_block_m_for_nvfp4_mega_moe,
    )
    exports.update({function.__name__: function for function in others})
    for name, function in exports.items():
        if name not in without:
            setattr(module, name, function)
    return module
