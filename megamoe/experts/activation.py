"""The activation between the two GEMMs, as an expert module is configured with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("swiglu", "swiglustep", "situ")


@dataclass(frozen=True)
class MegaMoEActivation:
    """name: swiglu, swiglustep or situ. clamp: None for no clamp. alpha and beta: see NUMERICS 8.2.

    ValueError for an unknown name, a negative or NaN clamp, non-finite alpha or beta, and for situ with a
    clamp, alpha <= 0 or beta < 0.
    """

    name: str = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.name!r}")
        for argument in ("alpha", "beta"):
            if not math.isfinite(getattr(self, argument)):
                raise ValueError(f"activation {argument} must be finite, got {getattr(self, argument)}")
        if self.clamp is not None and not self.clamp >= 0:
            raise ValueError(f"activation clamp must be >= 0, got {self.clamp}")
        if self.name == "situ" and (self.clamp is not None or self.alpha <= 0 or self.beta < 0):
            raise ValueError(
                "situ takes no clamp, alpha > 0 and beta >= 0, "
                f"got clamp {self.clamp}, alpha {self.alpha}, beta {self.beta}"
            )

    def launch_arguments(self) -> dict[str, Any]:
        """Keyword arguments for run_mega_moe: the clamp always, the rest only where it is not the default."""
        arguments: dict[str, Any] = {"activation_clamp": self.clamp}
        if self.name != "swiglu":
            arguments["activation"] = self.name
        if self.alpha != 1.0:
            arguments["activation_alpha"] = self.alpha
        if self.beta != 0.0:
            arguments["activation_beta"] = self.beta
        return arguments
