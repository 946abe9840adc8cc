"""Calling a build's fused router. Two conventions exist; the arithmetic is one (NUMERICS 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megamoe.backends.library import accepts, declares, keep_given, refuse_unknown


def call_mega_gate(library: Any, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """library.bf16_mega_gate with ``arguments`` unchanged; always (weights float32 [T, K], ids int64 [T, K]).

    DeepGEMM's own function also asks for shared-as-routed slots (never used here) and returns ids first.
    RuntimeError if the build has no mega gate, ValueError if it lacks one of the arguments that are not None.
    """
    gate = getattr(library, "bf16_mega_gate", None)
    if gate is None:
        raise RuntimeError("this build of deep_gemm has no bf16_mega_gate")
    refuse_unknown(gate, keep_given(arguments))
    options = {name: value for name, value in arguments.items() if accepts(gate, name)}
    if declares(gate, "use_shared_as_routed"):
        options.update(use_shared_as_routed=False, num_shared_experts=0)
    first, second = gate(**options)
    # Ids are integers and weights are not, whichever comes first.
    return (first, second) if first.dtype.is_floating_point else (second, first)
