"""An explanation as a whole predicted memory, for patterns that are read off the differences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megamoe.explain.fit import Fit, measure
from megamoe.explain.subject import Subject


@dataclass(frozen=True)
class Given:
    """predicted: units of the whole memory, with what is known of them. by_construction: copied from the
    actual side where the pattern holds, so only the number of explained differences speaks for it."""

    cause: str
    detail: str
    cost: int
    predicted: Tensor
    known: Tensor | None = None
    by_construction: bool = False
    min_hits: int = 4
    grain: int = 1  # units that one wrong byte spoils together
    doubts: tuple[str, ...] = ()

    def fit(self, subject: Subject) -> Fit:
        known = torch.ones_like(subject.different) if self.known is None else self.known
        if subject.compared is not None:
            known = known & subject.compared
        fit = measure(self.predicted, known, subject.expected, subject.actual)
        return replace(fit, unit_bytes=fit.unit_bytes * self.grain)
