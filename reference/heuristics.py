"""Launch heuristics of MegaMoE: token alignment, pool tile height (block_m), ring capacity.

block_m is decided from the expected tokens of an expert, x = tokens * ranks * topk / experts, and its upper
estimate c = x + sqrt(x), everything in fp32 in this order. Staging needs the same answer as the launch: the
pages of shared scales depend on it. Builds differ, so each is a row of data.

Sources: DeepGEMM of vLLM 0.33 (recorded for every row of the host tables), deepseek-ai/DeepGEMM main and
sgl-deep-gemm 0.1.5 (read, alignment and candidates of the latter in its headers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = [
    "BUILDS",
    "Build",
    "get_block_m_for_mega_moe",
    "get_block_m_for_mega_moe_upstream",
    "get_block_m_for_nvfp4_mega_moe",
    "get_ring_tokens",
    "get_token_alignment_for_mega_moe",
]

MMA_TYPES = ("fp8xfp4", "fp8xfp8", "bf16xbf16", "fp4xfp4")


@dataclass(frozen=True)
class Build:
    """What one DeepGEMM build compiles in: the tile heights that its buffers must have room for."""

    name: str
    candidate_block_m: tuple[int, ...]
    source: str

    @property
    def alignment(self) -> int:
        """Tokens per rank, pools and rings are multiples of this: every candidate divides it."""
        return math.lcm(*self.candidate_block_m)


BUILDS = {
    build.name: build
    for build in (
        Build("vllm", (8, 16, 32, 64, 96, 128, 192, 240), "DeepGEMM of vLLM 0.33, layout/mega_moe.cuh"),
        Build("upstream", (8, 16, 32, 64, 96, 128, 192), "deepseek-ai/DeepGEMM main"),
        Build("sgl", (8, 16, 32, 64, 96, 128, 192), "sgl-deep-gemm 0.1.5, layout/mega_moe.cuh"),
    )
}


def get_token_alignment_for_mega_moe(build: str = "vllm") -> int:
    """Tokens per rank are rounded up to a multiple of this: 1920 (vllm) or 384 (upstream, sgl)."""
    if build not in BUILDS:
        raise ValueError(f"build must be one of {sorted(BUILDS)}, got {build!r}")
    return BUILDS[build].alignment


def _expected_tokens(
    num_ranks: int, num_experts: int, num_max_tokens_per_rank: int, num_tokens: int, num_topk: int
) -> tuple[np.float32, np.float32]:
    """(x, c) in fp32: tokens an expert expects, and that plus one standard deviation."""
    sizes = {"num_ranks": num_ranks, "num_experts": num_experts, "num_topk": num_topk}
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts must be a multiple of num_ranks={num_ranks}, got {num_experts}")
    if not 0 <= num_tokens <= num_max_tokens_per_rank:
        raise ValueError(f"num_tokens must lie in [0, {num_max_tokens_per_rank}], got {num_tokens}")
    x = np.float32(num_tokens) * np.float32(num_ranks) * np.float32(num_topk) / np.float32(num_experts)
    return x, x + np.sqrt(x)


def _first_at_least(candidates: tuple[int, ...], needed: np.float32, blocks: int = 1) -> int:
    return next((block for block in candidates if np.float32(blocks * block) >= needed), candidates[-1])


def get_block_m_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    mma_type: str,
) -> int:
    """Pool tile height of the fp8, bf16 and fp4xfp4 launches (vLLM 0.33); num_tokens is this rank's own
    count.

    num_max_tokens_per_rank and mma_type do not change the result. ValueError: an unknown mma_type, sizes
    that are not positive, experts that the ranks do not divide, more tokens than the maximum.
    """
    if mma_type not in MMA_TYPES:
        raise ValueError(f"mma_type must be one of {MMA_TYPES}, got {mma_type!r}")
    x, c = _expected_tokens(num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk)
    if x <= 10:
        return 16
    if x <= 24:
        return 32
    blocks = int(np.ceil(c / np.float32(240)))
    if blocks == 1 and c > 192 and num_experts // num_ranks < 14:
        blocks = 2
    return _first_at_least((64, 128, 192, 240), c, blocks)


def get_block_m_for_nvfp4_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
) -> int:
    """Pool tile height of the NVFP4 launch (vLLM 0.33 binary; an environment variable can override it
    there).
    """
    x, c = _expected_tokens(num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk)
    if x <= 10:
        return 16
    if x <= 24:
        return 32
    if c <= (240 if num_experts // num_ranks >= 14 else 192):
        return _first_at_least((64, 128, 192, 240), c)
    blocks = int(np.ceil(c / np.float32(192)))
    return _first_at_least((128, 192), c, blocks)


def get_block_m_for_mega_moe_upstream(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
) -> int:
    """Pool tile height in deepseek-ai/DeepGEMM main: thresholds on x alone."""
    x, _ = _expected_tokens(num_ranks, num_experts, num_max_tokens_per_rank, num_tokens, num_topk)
    steps = ((8.5, 16), (16.5, 32), (32.5, 64), (64.5, 96), (96.5, 128))
    return next((block for limit, block in steps if x <= limit), 192)


def get_ring_tokens(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_sms: int,
) -> int:
    """Rows of the token ring (vLLM 0.33): the tokens alive at once, for the worst candidate tile height.

    num_max_tokens_per_rank is the aligned value. A wave is what num_sms // 2 clusters compute at once; a
    block of tokens stays alive from the first of its L1 tiles to the last of its L2 tiles. ValueError: sizes
    that tiles of 256 do not divide.
    """
    if hidden % 256 or (2 * intermediate_hidden) % 256:
        raise ValueError(
            "hidden and 2 * intermediate_hidden must be multiples of 256, "
            f"got hidden={hidden}, intermediate_hidden={intermediate_hidden}"
        )
    if num_sms < 2:
        raise ValueError(f"num_sms must be at least 2, got {num_sms}")
    build = BUILDS["vllm"]
    experts = num_experts // num_ranks
    tokens = num_max_tokens_per_rank * num_ranks * min(num_topk, experts)
    clusters = num_sms // 2
    l1_tiles, l2_tiles = 2 * intermediate_hidden // 256, hidden // 256
    first_wave = _ceil_div(_ceil_div(clusters, l2_tiles) * l1_tiles, clusters)
    alive = 0
    for block_m in build.candidate_block_m:
        blocks = _ceil_div(tokens, block_m) + experts
        all_tiles = blocks * l1_tiles
        later = _ceil_div(l1_tiles + (blocks - 1) * max(l1_tiles - l2_tiles, 0), clusters) + 1
        waves = min(max(first_wave, later), _ceil_div(all_tiles, clusters))
        tiles = min(waves * clusters, all_tiles)
        live = _ceil_div(tiles, l1_tiles) + _ceil_div(clusters, min(l1_tiles, l2_tiles))
        if l2_tiles > l1_tiles:
            live += _ceil_div(blocks * (l2_tiles - l1_tiles), l2_tiles)
        alive = max(alive, min(blocks, live) * block_m)
    return _ceil_div(alive, build.alignment) * build.alignment


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
