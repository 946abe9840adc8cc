"""Expert modules of every kind and format, small, on the emulated backend."""

from __future__ import annotations

from typing import Any

from megamoe.backends import EmulatedMegaMoEBackend
from megamoe.experts import MegaMoEExperts, MuseSparkMegaMoEExperts

SIZES = {
    "num_experts": 4,
    "num_local_experts": 4,
    "experts_start_idx": 0,
    "top_k": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_max_tokens_per_rank": 16,
}
MODULES = {"general": MegaMoEExperts, "muse_spark": MuseSparkMegaMoEExperts}
# Every module with every format that it has.
KINDS = [(kind, quant) for kind, cls in MODULES.items() for quant in cls.mma_types]


def make_experts(kind: str, quant: str, **changes: Any) -> MegaMoEExperts:
    """Sizes as in SIZES unless changed."""
    cls = MODULES[kind]
    arguments = {**SIZES, "quant": quant, "prefix": "layers.7.experts", **changes}
    if "backend" not in arguments:
        architecture = "SM90" if quant == "fp8_block" else "SM100"
        arguments["backend"] = EmulatedMegaMoEBackend(cls.mma_types[quant], architecture)
    return cls(**arguments)
