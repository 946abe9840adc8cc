"""MegaMoE backends: weights into kernel layout, tokens into the symmetric buffer, the launch.

The names below are loaded on first use, so that ``import megamoe.backends`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "DeepGemmMegaMoEBackend": "base",
    "DeepGemmSm100MegaMoEBackend": "deep_gemm_sm100",
    "DeepGemmNvfp4MegaMoEBackend": "deep_gemm_nvfp4",
    "DeepGemmFp4MegaMoEBackend": "deep_gemm_nvfp4",
    "DeepGemmBf16MegaMoEBackend": "deep_gemm_bf16",
    "DeepGemmSm100Fp8MegaMoEBackend": "deep_gemm_sm100",
    "DeepGemmSm90MegaMoEBackend": "deep_gemm_sm90",
    "EmulatedMegaMoEBackend": "emulated",
    "LocalGroup": "groups",
    "features": "library",
    "get_deep_gemm_mega_moe_backend": "selection",
    "registered_backends": "selection",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
