"""Where the error of a MegaMoE forward comes from, stage by stage, against a float64 forward.

The float64 forward takes the hidden states as they are and the weights that the checkpoint's codes stand
for. Then, one after another, its stages are replaced by the kernel's arithmetic: staging (quantizing the
hidden states), L1 (tensor-core sums, bf16 gate and up, the activation's functions), requantization, L2
(sums and bf16 outputs), combine. What each replacement changes in y is that stage's contribution; the
contributions add up to the whole error, element by element.

Weights are given, so their own quantization is not part of the budget. A contract that allows an error
should stay below the smallest contribution that it must not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from reference.fp8 import quantize_fp8_groups
from reference.mega_moe import Activation, ExpertWeights, LaunchConfig, MegaMoeFamily, get_family
from reference.mega_moe.combine import combine
from reference.mega_moe.dispatch import check_routing
from reference.mega_moe.epilogue import activate, scale_output
from reference.mega_moe.linear import expert_gemm
from reference.mega_moe.requantize import requantize
from reference.mega_moe.values import act_values, weight_values
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES, Fp8GroupRecipe, Nvfp4Recipe

__all__ = ["STAGES", "BudgetRow", "ErrorBudget", "error_budget", "staging_recipe"]

STAGES = ("staging", "l1", "requantization", "l2", "combine")
_RECIPES = {
    "sm90_fp8xfp8": "fp8_fp32_g128_divide",
    "sm100_fp8xfp4": "fp8_ue8m0_g32",
    "sm100_fp8xfp8": "fp8_ue8m0_g32",
    "sm100_fp4xfp4": "nvfp4_block",
    "sm100_nvfp4": "nvfp4_token",
}


@dataclass(frozen=True)
class BudgetRow:
    """One stage. rms: of its contribution, relative to the rms of the float64 y. worst_row: the same for
    the token where it is largest. largest: the largest element of the contribution, relative to the rms of
    y. cumulative: rms of the error with this stage and all before it. changed: share of y's elements that
    it changes by more than float64 rounding."""

    stage: str
    rms: float
    worst_row: float
    largest: float
    cumulative: float
    changed: float


@dataclass(frozen=True)
class ErrorBudget:
    """rows: one a stage, in the order of the data flow. outputs float64 [6, T, H]: the float64 y, then with
    one stage more replaced each time; the last is the kernel's y."""

    family: str
    rows: tuple[BudgetRow, ...]
    outputs: Tensor

    def table(self) -> str:
        """The rows as text, one line each."""
        head = f"{'stage':16}{'rms':>12}{'worst row':>12}{'largest':>12}{'cumulative':>12}{'changed':>10}"
        lines = [
            f"{row.stage:16}{row.rms:12.3e}{row.worst_row:12.3e}{row.largest:12.3e}{row.cumulative:12.3e}{row.changed:10.1%}"
            for row in self.rows
        ]
        return "\n".join([f"{self.family}, relative to the float64 output", head, *lines])


def staging_recipe(family: MegaMoeFamily | str) -> Fp8GroupRecipe | Nvfp4Recipe | None:
    """The recipe that stages hidden states for a family; None for bf16."""
    name = _RECIPES.get(get_family(family).name)
    return None if name is None else cast("Fp8GroupRecipe | Nvfp4Recipe", RECIPES[name])


def error_budget(
    family: MegaMoeFamily | str,
    hidden_states: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    launch: LaunchConfig,
    activation: Activation | None = None,
    *,
    recipe: Fp8GroupRecipe | Nvfp4Recipe | None = None,
    l2_activation_scale: float = 1.0,
) -> ErrorBudget:
    """The budget of one launch on one rank.

    hidden_states bfloat16 or float32 [T, H], topk_idx int64 and topk_weights float32 [T, K], weights of all
    experts. recipe: how hidden states are staged, by default the family's. ValueError for ids that are no
    experts, or no tokens at all.
    """
    family = get_family(family)
    activation = Activation() if activation is None else activation
    check_routing(topk_idx, len(weights.l1))
    if len(hidden_states) == 0:
        raise ValueError("hidden_states: expected at least one token, got none")
    recipe = staging_recipe(family) if recipe is None else recipe
    launch = replace(launch, hidden=hidden_states.shape[1])
    run = _Forward(
        family, hidden_states, topk_idx, topk_weights, weights, launch, activation, l2_activation_scale
    )
    run.stage(recipe)
    outputs = torch.stack([run.output(set(STAGES[:count])) for count in range(len(STAGES) + 1)])
    return ErrorBudget(family.name, tuple(_rows(outputs)), outputs)


def _rows(outputs: Tensor) -> Sequence[BudgetRow]:
    exact = outputs[0]
    scale = _rms(exact)
    of_rows = exact.square().mean(1).sqrt().clamp(min=1e-300)
    rows = []
    for index, stage in enumerate(STAGES, 1):
        change = outputs[index] - outputs[index - 1]
        worst = (change.square().mean(1).sqrt() / of_rows)[exact.abs().amax(1) > 0]
        noticeable = change.abs() > outputs[index].abs() * 2.0**-45
        rows.append(
            BudgetRow(
                stage,
                float(_rms(change) / scale),
                float(worst.max()) if len(worst) else 0.0,
                float(change.abs().max() / scale),
                float(_rms(outputs[index] - exact) / scale),
                float(noticeable.double().mean()),
            )
        )
    return rows


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


@dataclass
class _Forward:
    """One launch, each of whose stages is the kernel's arithmetic or float64."""

    family: MegaMoeFamily
    hidden_states: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    weights: ExpertWeights
    launch: LaunchConfig
    activation: Activation
    l2_activation_scale: float
    codes: Tensor | None = None
    scales: Tensor | None = None
    token_scales: Tensor | None = None

    def stage(self, recipe: Fp8GroupRecipe | Nvfp4Recipe | None) -> None:
        """Quantizes the hidden states as the family's staging does."""
        if isinstance(recipe, Nvfp4Recipe):
            nvfp4 = quantize_nvfp4(self.hidden_states, recipe)
            self.codes, self.scales, self.token_scales = nvfp4.codes, nvfp4.scale_codes, nvfp4.token_scales
        elif recipe is not None:
            fp8 = quantize_fp8_groups(self.hidden_states, recipe)
            self.codes, self.scales = fp8.codes, fp8.scales if fp8.exponents is None else fp8.exponents
        else:
            self.codes = self.hidden_states.bfloat16()

    def output(self, kernel: set[str]) -> Tensor:
        """y float64 [T, H] with the stages in ``kernel`` as the kernel computes them."""
        tokens, topk = self.topk_idx.shape
        slots = torch.zeros(
            topk, tokens, self.hidden_states.shape[1], dtype=torch.float64, device=self.topk_idx.device
        )
        for expert in range(len(self.weights.l1)):
            token, slot = (self.topk_idx == expert).nonzero(as_tuple=True)
            if len(token):
                slots[slot, token] = self._expert(expert, token, self.topk_weights[token, slot], kernel)
        used = self.topk_idx >= 0
        if "combine" in kernel:
            # bf16 outputs of L2 are what the combine reads: with L2 in the kernel's arithmetic they are
            # bf16 already.
            return combine(self.family, slots.bfloat16(), used, self.topk_weights).double()
        factors = (
            self.topk_weights.double()
            if self.family.weight_at == "combine"
            else torch.ones_like(used).double()
        )
        return (slots * torch.where(used, factors, 0.0).t()[:, :, None]).sum(0)

    def _expert(self, expert: int, token: Tensor, weight: Tensor, kernel: set[str]) -> Tensor:
        family, weights = self.family, self.weights
        alphas, l2_alpha, a2 = (
            _at(each, expert) for each in (weights.l1_alphas, weights.l2_alphas, weights.a2_scales)
        )
        token_scales = None if self.token_scales is None else self.token_scales[token]
        if "l1" in kernel:
            assert self.codes is not None
            x_sf = _at(self.scales, token)
            acc = self._gemm(self.codes[token], x_sf, weights.l1[expert], _at(weights.l1_sf, expert))
            p32 = activate(family, self.activation, acc, alphas, token_scales)
            values = p32.double()
        else:
            values = self._exact_l1(expert, token, alphas, "staging" in kernel)
        in_activation = family.weight_at == "activation"
        outer = _outer_scale(a2, self.l2_activation_scale, family)
        if "requantization" in kernel:
            acts = requantize(
                family,
                p32,
                weight if in_activation else torch.ones_like(weight),
                fast_math=self.activation.fast_math,
                a2_scale=a2,
                l2_activation_scale=self.l2_activation_scale,
            )
            operand = act_values(family, acts.codes, acts.scales)
        else:
            operand = (values * weight.double()[:, None] if in_activation else values) / outer
        if "l2" in kernel:
            acc = self._gemm(acts.codes, acts.scales, weights.l2[expert], _at(weights.l2_sf, expert))
            return scale_output(family, acc, l2_alpha, a2, weight).double()
        out = operand @ weight_values(family, weights.l2[expert], _at(weights.l2_sf, expert)).T
        for factor in (l2_alpha, a2):
            out = out if factor is None else out * factor.double()
        return out * weight.double()[:, None] if family.weight_at == "output" else out

    def _gemm(
        self, acts: Tensor, acts_scale: Tensor | None, weights: Tensor, scales: Tensor | None
    ) -> Tensor:
        mode, fast_math = self.launch.accumulation, self.activation.fast_math
        return expert_gemm(
            self.family, acts, acts_scale, weights, scales, accumulation=mode, fast_math=fast_math
        )

    def _exact_l1(self, expert: int, token: Tensor, alphas: Tensor | None, staged: bool) -> Tensor:
        family = self.family
        x = self.hidden_states[token].double()
        if staged:
            assert self.codes is not None
            x = act_values(family, self.codes[token], _at(self.scales, token))
            if self.token_scales is not None:
                x = x * self.token_scales[token].double()[:, None]
        weights = weight_values(family, self.weights.l1[expert], _at(self.weights.l1_sf, expert))
        gate, up = (x @ weights.T).chunk(2, dim=1)
        if alphas is not None:
            both = alphas.double().expand(2)
            gate, up = gate * both[0], up * both[1]
        return _exact_activation(self.activation, gate, up)


def _exact_activation(options: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The activation in float64."""
    if options.name == "situ":
        left = options.alpha * torch.tanh(gate / options.alpha) * torch.sigmoid(gate)
        return left * (options.beta * torch.tanh(up / options.beta) if options.beta else up)
    bound = options.clamp
    if bound is not None:
        gate = gate if options.name == "swiglustep" else gate.clamp(max=bound)
        up = up.clamp(-bound, bound)
    left = gate * torch.sigmoid(options.alpha * gate)
    if bound is not None and options.name == "swiglustep":
        left = left.clamp(max=bound)
    return left * (up + options.beta)


def _outer_scale(a2: Tensor | None, l2_activation_scale: float, family: MegaMoeFamily) -> float:
    """What the L2 operand is divided by and l2_alpha (times a2) multiplies back."""
    if family.requantization == "ue4m3_g16_divided":
        return l2_activation_scale
    return 1.0 if a2 is None else float(a2)


def _at(tensor: Tensor | None, index: int | Tensor) -> Tensor | None:
    return None if tensor is None else tensor[index]
