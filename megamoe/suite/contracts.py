"""What a row promises: "bitwise", or a weaker promise that is still checked exactly.

A contract sees all outputs of a call. It may replace expected bytes by others that the reference would have
given, had it taken another value where nobody specifies one; what comes out is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megamoe.suite.buffers import Buffer
from megamoe.suite.compare import Observed
from megamoe.suite.operation import Call

Outputs = Mapping[str, Observed]
Contract = Callable[[Call, Outputs, Outputs], Outputs]

RSTD_ULPS = 2


def bitwise(call: Call, expected: Outputs, actual: Outputs) -> Outputs:
    """The reference's bytes and no others."""
    return expected


def bitwise_given_rstd(call: Call, expected: Outputs, actual: Outputs) -> Outputs:
    """A row may be the one that the reference gives for a reciprocal deviation at most 2 ulp from its own.

    All of a row's bytes must come from one such value: a single code that is off remains a difference.
    """
    from reference.stages import stage_nvfp4_with_norm

    seen = {name: actual[name].tensor.cpu() for name in expected if name in actual}
    if seen.keys() != expected.keys() or any(
        tensor.shape != expected[name].tensor.shape for name, tensor in seen.items()
    ):
        return expected
    wrong = torch.stack([(seen[n] != expected[n].tensor).any(1) for n in expected]).any(0).nonzero().flatten()
    if not len(wrong):
        return expected
    arguments = [call.arguments[name] for name in ("hidden_states", "norm_weight", "norm_eps", "gain_center")]
    hidden, *others = arguments
    patched = {name: _copy(observed) for name, observed in expected.items()}
    norm = stage_nvfp4_with_norm(hidden[wrong], *others).norm
    assert norm is not None
    for step in (s * sign for s in range(1, RSTD_ULPS + 1) for sign in (1, -1)):
        rstd = (norm.rstd.view(torch.int32) + step).view(torch.float32)
        staged = stage_nvfp4_with_norm(hidden[wrong], *others, rstd=rstd)
        rows = {"x": staged.x, "x_sf": staged.x_sf}
        same = torch.stack([(rows[name] == seen[name][wrong]).all(1) for name in expected]).all(0)
        for name in expected:
            patched[name].tensor[wrong[same]] = rows[name][same]
    return patched


CONTRACTS: dict[str, Contract] = {"bitwise": bitwise, "bitwise_given_rstd": bitwise_given_rstd}


def _copy(observed: Observed) -> Observed:
    """The same output in memory of its own, with the same strides and surroundings."""
    if observed.buffer is None:
        return replace(observed, tensor=observed.tensor.clone())
    memory = observed.buffer.memory.clone()
    view: Tensor = observed.buffer.view
    moved = memory.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
    return replace(observed, tensor=moved, buffer=Buffer(memory, moved))
