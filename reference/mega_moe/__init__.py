"""The MegaMoE forward in stages, bit for bit: dispatch and pool order, L1, activation and requantization,
L2, combine."""

from reference.mega_moe.epilogue import Activation
from reference.mega_moe.families import FAMILIES, MegaMoeFamily, get_family
from reference.mega_moe.forward import RankResult, forward
from reference.mega_moe.inputs import ExpertWeights, PostNorm, RankInputs, SharedExpert
from reference.mega_moe.launch import (
    LaunchConfig,
    launch_config,
    parse_generated_source,
    parse_printed_configs,
    sm90_launch_config,
)
from reference.mega_moe.twins import (
    bf16_mega_moe,
    fp4_fp4_mega_moe,
    fp8_fp4_mega_moe,
    fp8_mega_moe,
    nvfp4_mega_moe,
)

__all__ = [
    "FAMILIES",
    "Activation",
    "ExpertWeights",
    "LaunchConfig",
    "MegaMoeFamily",
    "PostNorm",
    "RankInputs",
    "RankResult",
    "SharedExpert",
    "bf16_mega_moe",
    "forward",
    "fp4_fp4_mega_moe",
    "fp8_fp4_mega_moe",
    "fp8_mega_moe",
    "get_family",
    "launch_config",
    "nvfp4_mega_moe",
    "parse_generated_source",
    "parse_printed_configs",
    "sm90_launch_config",
]
