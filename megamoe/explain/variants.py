"""Replays of the reference with one knob turned: what each operation's outputs would be under another
arithmetic.

``replay_of`` finds the operation's entry; ``Replay.variants`` lists (cause, detail, outputs). An operation
registers with ``@replays("name", ...)``; adding one is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """One call as a bundle records it. outputs: the expected ones, for shapes and for what buffers hold."""

    op: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None  # which tokens of a larger call these are
    whole_tokens: int = 0  # how many that call had

    def tokens(self, rows: Tensor) -> Call:
        """The call with these token rows only (for operations whose tokens do not depend on each other)."""
        number = self.num_tokens
        taken = {
            n: t[rows] if t.dim() and t.shape[0] == number and n in TOKEN_INPUTS else t
            for n, t in self.inputs.items()
        }
        outputs = {
            n: t[rows]
            for n, t in self.outputs.items()
            if t.dim() and t.shape[0] >= number and n in TOKEN_OUTPUTS
        }
        params = {k: v for k, v in self.params.items() if k != "num_tokens"}
        return Call(self.op, params, taken, outputs, rows, number)

    @property
    def num_tokens(self) -> int:
        for name in ("hidden_states", "topk_ids", "topk_idx_in", "x"):
            if name in self.inputs:
                return int(self.inputs[name].shape[0])
        return 0


TOKEN_INPUTS = (
    "x",
    "x_sf",
    "x_scales",
    "topk_idx",
    "hidden_states",
    "topk_ids",
    "topk_weights",
    "topk_idx_in",
    "topk_weights_in",
    "is_padding",
)
TOKEN_OUTPUTS = (
    "y",
    "x",
    "x_sf",
    "x_scales",
    "shared_x",
    "topk_idx_out",
    "topk_weights_out",
    "topk_idx",
    "topk_weights",
)


@dataclass(frozen=True)
class Variant:
    """outputs: the call -> those outputs that this arithmetic decides, as logical tensors. cost: 2 with a
    parameter. by_token: whether a token's outputs depend on that token alone, so that a few tokens can be
    tried first."""

    cause: str
    detail: str
    outputs: Callable[[Call], Outputs]
    cost: int = 1
    by_token: bool = True


@dataclass(frozen=True)
class Replay:
    """baseline: the outputs as they should be. variants: with one knob turned. intermediates: (call, output)
    -> values before rounding, for examples. few_tokens: calls with more tokens are first tried on that many.
    """

    baseline: Callable[[Call], Outputs]
    variants: Callable[[Call], Iterator[Variant]]
    intermediates: Callable[[Call, str], Intermediates | None] | None = None
    few_tokens: int = 64


@dataclass(frozen=True)
class Intermediates:
    """scaled: float32 [T, H], values before rounding. scales: float32 [T, G]. group: columns of a scale."""

    scaled: Tensor
    scales: Tensor
    group: int


REPLAYS: dict[str, Callable[[Call], Replay | None]] = {}


def replays(*operations: str) -> Callable[[Callable[[Call], Replay | None]], Callable[[Call], Replay | None]]:
    """Registers how an operation is replayed; third parties may use it too."""

    def register(function: Callable[[Call], Replay | None]) -> Callable[[Call], Replay | None]:
        for name in operations:
            REPLAYS[name] = function
        return function

    return register


def all_replays() -> Mapping[str, Callable[[Call], Replay | None]]:
    """How operations are replayed, by name."""
    from megamoe.explain import (  # noqa: F401 (they register)
        variants_forward,
        variants_fp8,
        variants_nvfp4,
        variants_routing,
    )

    return REPLAYS


def replay_of(call: Call) -> Replay | None:
    """The replay of a call, or None if the operation has none or the inputs do not suffice."""
    make = all_replays().get(call.op)
    return make(call) if make is not None else None


def turned(recipe: Any, knobs: Mapping[str, Any]) -> Any:
    """The recipe with these knobs, or None if that changes nothing."""
    changed = replace(recipe, **knobs)
    return None if changed == recipe else changed


def bound(function: Callable[..., Outputs], *values: Any, **options: Any) -> Callable[[Call], Outputs]:
    """The function of a call alone, with everything after the call fixed now, not when a loop has gone on."""
    return lambda call: function(call, *values, **options)


def placed(call: Call, outputs: Outputs) -> Outputs:
    """The outputs that the call has, each as large as the expected one: rows past the call's tokens keep what
    they are.
    """
    found: Outputs = {}
    for name, tensor in outputs.items():
        expected = call.outputs.get(name)
        if expected is None:
            continue
        if tuple(expected.shape) == tuple(tensor.shape):
            found[name] = tensor
            continue
        if (
            expected.dim() == tensor.dim()
            and expected.shape[1:] == tensor.shape[1:]
            and expected.shape[0] > tensor.shape[0]
        ):
            whole = expected.clone()
            as_integers(whole)[: tensor.shape[0]] = as_integers(tensor.contiguous()).view(
                as_integers(whole).dtype
            )
            found[name] = whole
    return found


def as_integers(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])
