"""Numerical validation of MegaMoE kernels: staging kernels, backends, and the suite that checks them.

The public names of the production side are importable from here. They are loaded on first use, so that
`import megamoe` needs neither triton nor DeepGEMM nor a GPU, and is fast.
"""

import importlib
from typing import Any

_EXPORTS = {
    "megamoe.quant_keys": (
        "GroupShape",
        "QuantKey",
        "ScaleDesc",
        "kFp8Dynamic128",
        "kMxfp8Dynamic",
        "kNvfp4DynamicToken",
    ),
    "megamoe.eplb": ("EplbLayerState", "eplb_map_to_physical_and_record"),
    "megamoe.staging": (
        "prepare_megamoe_bf16_inputs",
        "prepare_megamoe_inputs",
        "prepare_megamoe_nvfp4_block_inputs",
        "prepare_megamoe_nvfp4_inputs",
        "prepare_megamoe_nvfp4_with_norm",
    ),
    "megamoe.layouts": (
        "get_mn_major_tma_aligned_packed_ue8m0_tensor",
        "get_mn_major_tma_aligned_tensor",
        "transform_sf_into_required_layout",
        "transform_weights_for_mega_moe",
        "transform_weights_for_mega_moe_sm90",
        "ue8m0_uint8_to_float",
    ),
    "megamoe.backends": ("get_deep_gemm_mega_moe_backend",),
    "megamoe.experts": ("MegaMoEExperts", "MuseSparkMegaMoEExperts"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
