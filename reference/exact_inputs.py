"""Inputs for which every partial sum is exact: in every model, in every order, on every machine.

Ordinary data make the last bits of a GEMM depend on how the hardware aligns, truncates and orders its sums,
which for some hardware is known from the literature only. Here nothing is ever truncated, so a correct
kernel gives one possible output:

* Every product in L1 is +1 or -1 (or 0): a code is a power of two and its scale the inverse. Scales differ
  from group to group all the same, so a scale read from the wrong place multiplies its group by a power of
  two. A sum of K such products is an integer of at most K in magnitude: K < 2^14 is exact even with the 13
  fraction bits of Hopper's FP8.
* Half of the columns repeat the other half with weights of the opposite sign: running sums wander, and come
  back. What remains decides the result: gate 64 in every column, up an integer from -7 to 7 that differs
  from token to token.
* sigmoid(64) is 1 in float32, whichever exponential and reciprocal compute it: the activation is gate * up
  exactly.
* The largest magnitude of each 64 columns is 7 * 64 = 448 times the routing weight, a power of two: scales
  are powers of two in the FP8 families, and all 15 values have codes. (NVFP4 families round here, by IEEE
  operations on exact values.)
* L2 repeats the construction: intermediate columns come in equal halves, w2 opposes them, and products are
  at most 7.
* Slots add up exactly: bf16 outputs of a token differ by few powers of two.

``check_exact`` does not rely on any of this. It decodes the operands that a forward really used and proves
the bound for each sum: if all products of a sum are multiples of u, and their magnitudes add up to less
than 2^(b+1) u, then no partial sum, in any order, needs more than the b fraction bits that the instruction
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.formats import encode, unpack_e2m1, unpack_scale_words
from reference.mega_moe import (
    Activation,
    ExpertWeights,
    LaunchConfig,
    MegaMoeFamily,
    RankInputs,
    RankResult,
    forward,
    get_family,
)
from reference.mega_moe.stages import scale_rows
from reference.mega_moe.values import act_values, weight_values
from reference.tensor_core import FAMILIES as MMA_FAMILIES

__all__ = ["ExactLaunch", "ExactnessReport", "check_exact", "draw_exact"]

_GATE = 64  # constant columns that the gate counts; sigmoid of it is 1
_UP = 7  # free columns that up counts
_MIN_HIDDEN = 512


@dataclass(frozen=True)
class ExactLaunch:
    """Arguments of ``reference.mega_moe.forward``, one entry a rank."""

    family: str
    inputs: list[RankInputs]
    weights: list[ExpertWeights]


@dataclass(frozen=True)
class ExactnessReport:
    """l1_bits, l2_bits: the largest number of bits that a sum needs, of available_bits that the instruction
    keeps. smallest_gate: of the gate values that are not zero (17 and more have a sigmoid of 1).
    combine_exact: the combine's sums are exact in float32. ok: all of it holds. reason: what does not."""

    l1_bits: int
    l2_bits: int
    available_bits: int
    smallest_gate: float
    combine_exact: bool
    reason: str

    @property
    def ok(self) -> bool:
        return not self.reason


def draw_exact(
    family: MegaMoeFamily | str,
    tokens: Sequence[int],
    *,
    num_experts: int,
    topk: int,
    hidden: int,
    intermediate: int,
    masked: float = 0.0,
    seed: int = 0,
) -> ExactLaunch:
    """One launch of exact inputs: ``tokens[r]`` tokens on rank r, ``masked`` of the routes without an expert.

    ValueError for a hidden size below 512 or sizes beyond the proof (L1: hidden < 2^14; L2: 7 *
    intermediate < 2^14 on SM90).
    """
    family = get_family(family)
    if hidden < _MIN_HIDDEN or hidden % 256 or hidden >= 1 << 14:
        raise ValueError(f"hidden: expected a multiple of 256 from 512 to {(1 << 14) - 256}, got {hidden}")
    bits = _available_bits(family)
    if intermediate % 256 or _UP * intermediate >= 1 << (bits + 1):
        raise ValueError(
            f"intermediate: expected a multiple of 256 below {(1 << (bits + 1)) // _UP}, got {intermediate}"
        )
    ranks = len(tokens)
    if num_experts % ranks:
        raise ValueError(f"num_experts: expected a multiple of {ranks} ranks, got {num_experts}")
    g = torch.Generator().manual_seed(seed)
    inputs = [_draw_tokens(family, count, num_experts, topk, hidden, masked, g) for count in tokens]
    weights = [_draw_weights(family, num_experts // ranks, hidden, intermediate, g) for _ in tokens]
    return ExactLaunch(family.name, inputs, weights)


def _signs(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=g).float() * 2 - 1


def _draw_tokens(
    family: MegaMoeFamily,
    tokens: int,
    num_experts: int,
    topk: int,
    hidden: int,
    masked: float,
    g: torch.Generator,
) -> RankInputs:
    half = hidden // 2
    first = _signs((tokens, half), g)
    first[:, : _GATE + _UP] = 1.0  # constant columns: 64 for the gate, 7 for the largest up
    x, x_sf = _encode(family, torch.cat((first, first), dim=1), family.act_format, g)
    ids = torch.rand(tokens, num_experts, generator=g).topk(topk, dim=1).indices
    ids[torch.rand(tokens, topk, generator=g) < masked] = -1
    # Powers of two in [1/4, 1], by position: a weight of another slot or token shows.
    weights = torch.exp2(-((torch.arange(tokens)[:, None] + torch.arange(topk)) % 3).float())
    return RankInputs(x, x_sf, ids, weights)


def _draw_weights(
    family: MegaMoeFamily, local: int, hidden: int, intermediate: int, g: torch.Generator
) -> ExpertWeights:
    half, columns = hidden // 2, intermediate // 2
    # One row of gate and up a column of the first half; the second half of the columns repeats them.
    shape = (local, columns, half)
    gate_first, up_first = _signs(shape, g), _signs(shape, g)
    gate_second, up_second = -gate_first, -up_first
    # What is not cancelled: 64 constant columns for the gate, 7 free ones (or constant, in an anchor) for up.
    gate_first[..., :_GATE], gate_second[..., :_GATE] = 1.0, 0.0
    free = torch.rand(shape, generator=g)
    free[..., : _GATE + _UP] = -1.0
    chosen = free.topk(_UP, dim=-1).indices
    anchor = torch.arange(columns) % 32 == 0  # both halves: one column in 32 reaches the largest value
    anchored = torch.arange(_GATE, _GATE + _UP).expand(local, int(anchor.sum()), _UP)
    chosen[:, anchor] = anchored
    sign = torch.where(anchor[:, None], 1.0, _signs((local, columns, _UP), g))
    up_first.scatter_(2, chosen, sign)
    up_second.scatter_(2, chosen, 0.0)
    gate = torch.cat((gate_first, gate_second), dim=2)
    up = torch.cat((up_first, up_second), dim=2)
    l1, l1_sf = _encode(family, torch.cat((gate, gate, up, up), dim=1), family.weight_format, g, weight=True)
    first = _signs((local, hidden, columns), g)
    second = -first
    free = torch.rand(first.shape, generator=g)
    second.scatter_(2, free.topk(3, dim=-1).indices, 0.0)
    l2, l2_sf = _encode(family, torch.cat((first, second), dim=2), family.weight_format, g, weight=True)
    return ExpertWeights(l1, l2, l1_sf, l2_sf)


def _encode(
    family: MegaMoeFamily, values: Tensor, fmt: str, g: torch.Generator, weight: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Values 0, +1 and -1 as code * scale with a random power of two as the scale of each group."""
    if fmt == "bf16":
        return values.bfloat16(), None
    spread = (-1, 2) if fmt == "e2m1" else (-3, 4)  # codes 2^-1 to 2^1, or 2^-3 to 2^3
    block = weight and family.scale_format is None
    group = 128 if family.scale_format is None else family.act_group or 1
    rows = values.shape[-2] // 128 if block else values.shape[-2]
    shape = (*values.shape[:-2], rows, values.shape[-1] // group)
    exponents = torch.randint(spread[0], spread[1], shape, generator=g)
    each = exponents.repeat_interleave(group, -1)
    if block:
        each = each.repeat_interleave(128, -2)
    codes = encode(values * torch.exp2(-each.float()), "e4m3fn" if fmt == "e4m3" else "e2m1")
    scales = torch.exp2(exponents.float())
    if family.scale_format == "ue8m0":
        return codes, (exponents + 127).to(torch.uint8)
    return codes, encode(scales, "e4m3fn") if family.scale_format == "ue4m3" else scales


def check_exact(
    launch: ExactLaunch,
    launches: Sequence[LaunchConfig],
    activation: Activation | None = None,
    *,
    l2_activation_scale: float = 1.0,
) -> tuple[ExactnessReport, list[RankResult]]:
    """Runs the forward and proves from its operands that nothing in it was truncated; the proof and the
    outputs."""
    family = get_family(launch.family)
    activation = Activation() if activation is None else activation
    results = forward(
        family, launch.inputs, launch.weights, launches, activation, l2_activation_scale=l2_activation_scale
    )
    bits = [0, 0]
    smallest_gate = math.inf
    for rank, result in enumerate(results):
        weights = launch.weights[rank]
        acts = _decoded_rows(family, result, "l1_acts")
        hidden = _decoded_rows(family, result, "l2_acts")
        for expert, count in enumerate(result.pool.counts):
            if not count:
                continue
            here = result.pool.expert_rows(expert)
            w1 = weight_values(
                family, weights.l1[expert], None if weights.l1_sf is None else weights.l1_sf[expert]
            )
            w2 = weight_values(
                family, weights.l2[expert], None if weights.l2_sf is None else weights.l2_sf[expert]
            )
            bits[0] = max(bits[0], bits_needed(acts[here], w1))
            bits[1] = max(bits[1], bits_needed(hidden[here], w2))
            gate = acts[here] @ w1[: len(w1) // 2].T
            if weights.l1_alphas is not None:
                gate = gate * weights.l1_alphas[expert].reshape(-1)[0].double()
            if bool((gate != 0).any()):
                smallest_gate = min(smallest_gate, float(gate[gate != 0].min()))
    available = _available_bits(family)
    combined = all(_combine_is_exact(result) for result in results)
    problems = [
        f"L{layer} needs {need} bits of {available}"
        for layer, need in enumerate(bits, 1)
        if need > available + 1
    ]
    if smallest_gate < 17:
        problems.append(f"a gate of {smallest_gate} has a sigmoid below 1")
    if not combined:
        problems.append("the combine rounds")
    return ExactnessReport(bits[0], bits[1], available, smallest_gate, combined, "; ".join(problems)), results


def bits_needed(a: Tensor, b: Tensor) -> int:
    """The smallest n such that every sum over k of a[m, k] * b[n, k] has a unit u with all products
    multiples of u and magnitudes adding up to less than 2^n u. a [M, K], b [N, K] float64."""
    magnitude = a.abs() @ b.abs().T
    unit = _unit(a)[:, None] * _unit(b)[None, :]
    largest = float((magnitude / unit).max()) if magnitude.numel() else 0.0
    # 2^53 bounds what float64 adds exactly; beyond it the answer is "too many" anyway.
    return 0 if largest == 0 else math.floor(math.log2(largest)) + 1


def _unit(values: Tensor) -> Tensor:
    """For each row the largest power of two that divides all its values (1 for a row of zeros)."""
    fraction, exponent = torch.frexp(values)
    significand = (fraction.abs() * 2**53).long()
    lowest = significand & -significand
    trailing = torch.frexp(lowest.double())[1].long() - 1
    exponents = torch.where(values == 0, 1 << 20, exponent.long() - 53 + trailing)
    smallest = exponents.amin(-1)
    return torch.exp2(torch.where(smallest == 1 << 20, 0, smallest).double())


def _available_bits(family: MegaMoeFamily) -> int:
    row = MMA_FAMILIES[family.mma]
    return min(row.fraction_bits, row.output_fraction_bits)


def _decoded_rows(family: MegaMoeFamily, result: RankResult, name: str) -> Tensor:
    """A pool stage dequantized, float64 [rows, K]."""
    codes = result.stages[name]
    codes = unpack_e2m1(codes) if family.act_format == "e2m1" else codes
    if family.act_group is None:
        return act_values(family, codes, None)
    scales = result.stages[name + "_sf"][scale_rows(family, result.pool)]
    return act_values(family, codes, scales if family.scale_format is None else unpack_scale_words(scales))


def _combine_is_exact(result: RankResult) -> bool:
    """Whether every token's slots add up within float32's 24 bits in any order."""
    slots = result.stages["combine"].double().permute(1, 2, 0)  # [T, H, slots]
    flat = slots.reshape(-1, slots.shape[-1])
    if not flat.numel():
        return True
    return bool((flat.abs().sum(1) / _unit(flat) < 2**24).all())
