"""Plain PyTorch references of MegaMoE data formats and arithmetic. Imports stdlib, torch and numpy only.

Functions and types are exported lazily: ``import reference`` loads no submodule.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS: dict[str, tuple[str, ...]] = {
    "formats": ("FORMATS", "Format", "decode", "encode"),
    "recipes": ("RECIPES", "Fp8GroupRecipe", "Nvfp4Recipe", "RoutingRecipe"),
    "fp8": ("Fp8Groups", "quantize_fp8_groups"),
    "nvfp4": ("Nvfp4Groups", "quantize_nvfp4", "rms_norm_bf16"),
    "eplb": ("eplb_map_to_physical_and_record",),
    "staging": (
        "prepare_megamoe_bf16_inputs",
        "prepare_megamoe_inputs",
        "prepare_megamoe_nvfp4_block_inputs",
        "prepare_megamoe_nvfp4_inputs",
        "prepare_megamoe_nvfp4_with_norm",
    ),
    "pre_dispatch": ("mega_moe_pre_dispatch", "mega_moe_pre_dispatch_sm90"),
    "weights": (
        "get_mn_major_tma_aligned_packed_ue8m0_tensor",
        "get_mn_major_tma_aligned_tensor",
        "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe",
        "transform_weights_for_mega_moe_sm90",
        "ue8m0_uint8_to_float",
    ),
    "symm_buffer": (
        "SymmBuffer",
        "get_block_m_for_mega_moe",
        "get_block_m_for_nvfp4_mega_moe",
        "get_token_alignment_for_mega_moe",
    ),
    "mega_moe": (
        "bf16_mega_moe",
        "fp4_fp4_mega_moe",
        "fp8_fp4_mega_moe",
        "fp8_mega_moe",
        "nvfp4_mega_moe",
    ),
    "gate": ("bf16_mega_gate",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
