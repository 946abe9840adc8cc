"""What the host decides before a launch, as far as it decides bits: the tile height, and how the K loop
accumulates.

SM90 (sgl-deep-gemm 0.1.5): the tile height follows from the expected tokens an expert, in float32,
``num_tokens * num_ranks * num_topk / num_experts``: 64 rows below 64, 128 from there on. ``num_tokens`` is
the calling rank's own count, so ranks of one launch may differ. A tile of 128 keeps its running sum in the
accumulator (``kReuseAccumAsFinal``), a tile of 64 promotes each K block; from hidden 7168 on the former
multiplies by one ratio. A launch can be described from three places, and they agree: the model here, the
line that ``DG_PRINT_CONFIGS=1`` prints, and the kernel source in the JIT's cache, whose template arguments
are the facts themselves.

SM100: the tile height is ``block_m`` (``reference.heuristics``); the accumulation is the instruction's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = [
    "Accumulation",
    "LaunchConfig",
    "launch_config",
    "parse_generated_source",
    "parse_printed_configs",
    "sm90_launch_config",
]

Accumulation = Literal["promote", "rescale", "rescale_ratio"]
"""How partial sums of K blocks meet. "promote": each block starts from zero and final = fma(scale, block,
final). "rescale": the sum is divided by the next block's scale and fed back as the accumulator.
"rescale_ratio": the same with one factor, previous scale / next scale."""

# The template parameters of the SM90 kernel that the host writes out, in order.
_TEMPLATE = (
    "num_max_tokens_per_rank",
    "hidden",
    "intermediate_hidden",
    "num_experts",
    "num_topk",
    "num_experts_per_wave",
    "block_m",
    "block_n",
    "block_k",
    "num_max_pool_tokens",
    "num_padded_sf_pool_tokens",
    "num_stages",
    "num_dispatch_threads",
    "num_non_epilogue_threads",
    "num_epilogue_threads",
    "num_sms",
    "num_ranks",
    "activation_clamp",
    "fast_math",
    "epilogue_registers",
    "reuse_accum_as_final",
    "l2_arrival_counter",
    "l2_epilogue_requires_full_sync",
    "split_phase_hot_path",
    "swap_ab",
)

_RATIO_FROM_HIDDEN = 7168
_SWAP_AB_TOKENS = 128


@dataclass(frozen=True)
class LaunchConfig:
    """The part of a launch's configuration that decides bytes.

    tile: rows of a pool block (block_m). reuse_accumulator: the tile keeps its running sum in the
    accumulator. swap_ab: weights are the MMA's first operand; it decides which values a NaN hides from a
    group's maximum, and no other byte (None: not known, taken as not). block_n: columns of a tile, recorded
    because the kernel branches on it; no byte depends on it.
    """

    tile: int
    hidden: int
    reuse_accumulator: bool = False
    block_n: int | None = None
    swap_ab: bool | None = None

    @property
    def accumulation(self) -> Accumulation:
        """The SM90 accumulation mode that these fields select."""
        if not self.reuse_accumulator:
            return "promote"
        return "rescale_ratio" if self.hidden >= _RATIO_FROM_HIDDEN else "rescale"


def sm90_launch_config(
    *, num_ranks: int, num_experts: int, num_topk: int, num_tokens: int, hidden: int, intermediate_hidden: int
) -> LaunchConfig:
    """The configuration that the library's host code picks on an H100 or H200 for one rank's launch.

    ``num_tokens`` is that rank's own count. ValueError for counts that no launch has.
    """
    for name, value in (("num_ranks", num_ranks), ("num_experts", num_experts), ("num_topk", num_topk)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if num_tokens < 0:
        raise ValueError(f"num_tokens: expected at least 0, got {num_tokens}")
    expected = torch.tensor(float(num_tokens), dtype=torch.float32) * num_ranks * num_topk
    expected = expected / torch.tensor(float(num_experts))
    if bool(expected >= 64):
        return LaunchConfig(128, hidden, reuse_accumulator=True, block_n=256, swap_ab=False)
    swap_ab = 0 < num_tokens <= _SWAP_AB_TOKENS
    wide = intermediate_hidden >= 3072 and bool(expected >= 0.25) and hidden % 256 == 0 and not swap_ab
    return LaunchConfig(64, hidden, block_n=256 if wide else 128, swap_ab=swap_ab)


def parse_generated_source(source: str) -> dict[str, int | float | bool]:
    """Template arguments of ``sm90_fp8_mega_moe_impl<...>`` in a kernel source of the JIT's cache, by name.

    ``launch_config`` turns them into a LaunchConfig. ValueError if the source instantiates no such kernel
    or has another number of arguments than the 0.1.5 kernel.
    """
    match = re.search(r"sm90_fp8_mega_moe_impl<(.*?)>\s*\)", source, re.DOTALL)
    if match is None:
        raise ValueError("source: expected an instantiation of sm90_fp8_mega_moe_impl, found none")
    arguments = [argument.strip() for argument in match.group(1).split(",")]
    if len(arguments) != len(_TEMPLATE):
        raise ValueError(
            f"source: expected {len(_TEMPLATE)} template arguments, got {len(arguments)}: {arguments}"
        )
    return {name: _value(text) for name, text in zip(_TEMPLATE, arguments, strict=True)}


def parse_printed_configs(output: str) -> list[dict[str, int | float | bool]]:
    """The configurations that ``DG_PRINT_CONFIGS=1`` printed, one dict a line: the launch's key and its
    choice together.

    The line names no accumulation flag; on SM90 the library sets it exactly where block_m is 128.
    """
    found = []
    pattern = r"MegaMoESM90Config\(([^)]*)\): MegaMoESM90Config\(([^)]*)\)"
    for key, choice in re.findall(pattern, output):
        fields = dict(field.strip().split("=", 1) for field in (key + "," + choice).split(","))
        row = {name: _value(text) for name, text in fields.items()}
        row["reuse_accum_as_final"] = row["block_m"] == 128
        found.append(row)
    return found


def launch_config(fields: dict[str, int | float | bool]) -> LaunchConfig:
    """A parsed configuration (either parser's) as a LaunchConfig."""
    return LaunchConfig(
        tile=int(fields["block_m"]),
        hidden=int(fields["hidden"]),
        reuse_accumulator=bool(fields["reuse_accum_as_final"]),
        block_n=int(fields["block_n"]),
        swap_ab=bool(fields["swap_ab"]),
    )


def _value(text: str) -> int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    if "infinity" in text:
        return float("inf")
    bits = re.fullmatch(r".*?(0x[0-9a-fA-F]+).*", text)
    if bits is not None:
        return float(
            torch.tensor(int(bits.group(1), 16), dtype=torch.int64).to(torch.int32).view(torch.float32)
        )
    return float(text.rstrip("f"))
