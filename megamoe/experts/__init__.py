"""Expert modules: loading from checkpoints, kernel layout, launches through any backend.

The names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "MegaMoEActivation": "activation",
    "MegaMoEExperts": "module",
    "MuseSparkMegaMoEExperts": "muse_spark",
    "ShardTensor": "checkpoint",
    "find_shards": "checkpoint",
    "forget_buffers": "buffers",
    "padding_mask_for_rank": "padding",
    "stream_checkpoint": "checkpoint",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
