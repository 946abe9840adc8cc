"""The forward, stage by stage, on any number of ranks.

A launch is three steps a rank, and between them ranks exchange what the symmetric buffers carry:
``run_experts`` (dispatch, L1, activation and requantization, L2) reads every rank's inputs and yields one
output row a route; ``combine_tokens`` adds the rows that belong to a rank's own tokens. ``forward`` runs
all ranks in one process; ``reference.mega_moe.distributed`` runs one a process with the same functions, so
the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.mega_moe.checks import check_launch
from reference.mega_moe.combine import combine, combine_norm, combine_normalized, norm_scales
from reference.mega_moe.dispatch import Pool, build_pool
from reference.mega_moe.epilogue import Activation, activate, scale_output
from reference.mega_moe.families import FAMILIES, MegaMoeFamily, get_family
from reference.mega_moe.inputs import ExpertWeights, PostNorm, RankInputs, SharedExpert
from reference.mega_moe.launch import LaunchConfig
from reference.mega_moe.linear import expert_gemm
from reference.mega_moe.requantize import HiddenActs, requantize
from reference.mega_moe.stages import Routes, StageWriter, pool_rows

__all__ = [
    "ExpertsResult",
    "RankResult",
    "combine_tokens",
    "forward",
    "run_experts",
    "run_shared",
]


@dataclass(frozen=True)
class RankResult:
    """One rank's side of a launch.

    y bfloat16 [T, H]. stats int32 [e]: tokens its experts received. used bool [T, K]: slots with a route.
    pool: who lies where. stages: tensors under the real buffers' names, in the buffers' own row order and
    dtype (bytes as uint8, packed scales as int32 words), as many rows as the pool uses; live: which rows of
    a stage hold something. combine [slot, token, H] lies on the source rank.
    """

    y: Tensor
    stats: Tensor
    used: Tensor
    pool: Pool
    stages: dict[str, Tensor]
    live: dict[str, Tensor]


@dataclass(frozen=True)
class ExpertsResult:
    """What one rank's experts leave: outputs bfloat16 [rows, H] (not live: 0), and the stages so far."""

    pool: Pool
    outputs: Tensor
    stages: dict[str, Tensor]
    live: dict[str, Tensor]
    stats: Tensor = field(repr=False)


def forward(
    family: MegaMoeFamily | str,
    inputs: Sequence[RankInputs],
    weights: Sequence[ExpertWeights],
    launches: Sequence[LaunchConfig],
    activation: Activation,
    *,
    shared: Sequence[SharedExpert] | None = None,
    norm: PostNorm | None = None,
    l2_activation_scale: float = 1.0,
) -> list[RankResult]:
    """All ranks of one launch: inputs, weights, launches and shared have one entry a rank, in rank order.

    ValueError naming the argument if they do not fit together. Source: NUMERICS 8.
    """
    family = get_family(family)
    check_launch(family, inputs, weights, launches, activation, shared, norm)
    experts = [
        run_experts(
            family, inputs, weights[rank], rank, launches[rank], activation,
            weighted=norm is None, l2_activation_scale=l2_activation_scale,
        )
        for rank in range(len(inputs))
    ]  # fmt: skip
    outputs = [(result.pool.token_src_metadata, result.outputs) for result in experts]
    finished = []
    for rank, result in enumerate(experts):
        y, stages = combine_tokens(
            family,
            inputs[rank],
            rank,
            outputs,
            activation,
            shared=None if shared is None else shared[rank],
            norm=norm,
        )
        used = inputs[rank].topk_idx >= 0
        finished.append(RankResult(y, result.stats, used, result.pool, result.stages | stages, result.live))
    return finished


def run_experts(
    family: MegaMoeFamily,
    inputs: Sequence[RankInputs],
    weights: ExpertWeights,
    rank: int,
    launch: LaunchConfig,
    activation: Activation,
    *,
    weighted: bool = True,
    l2_activation_scale: float = 1.0,
) -> ExpertsResult:
    """Dispatch, L1, activation, requantization and L2 of ``rank``'s experts, for the tokens of all ranks.

    weighted: False with a post-expert norm, where the routing weight enters in the combine only.
    """
    local = weights.l1.shape[0]
    pool = build_pool([each.topk_idx for each in inputs], rank, local * len(inputs), launch.tile)
    routes = Routes(pool, inputs)
    stages: dict[str, Tensor] = {}
    live: dict[str, Tensor] = {}
    put = StageWriter(family, pool, stages, live)
    x = routes.gather([each.x for each in inputs])
    x_sf = None if inputs[0].x_sf is None else routes.gather([_present(each.x_sf) for each in inputs])
    x_scales = (
        None if inputs[0].x_scales is None else routes.gather([_present(each.x_scales) for each in inputs])
    )
    route_weights = routes.gather_slots([each.topk_weights for each in inputs])
    put.acts("l1_acts", x, family.act_format)
    put.scales("l1_acts_sf", x_sf)
    if family.weight_at == "activation" and weighted:
        put.acts("l1_topk_weights", route_weights, "raw")

    rows, hidden = pool.rows, weights.l2.shape[1]
    outputs = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=x.device)
    hidden_acts: list[HiddenActs] = []
    in_activation = family.weight_at == "activation" and weighted
    for expert in range(local):
        if pool.counts[expert] == 0:
            continue
        here = pool.expert_rows(expert)
        acc = expert_gemm(
            family, x[here], _rows(x_sf, here), weights.l1[expert], _rows(weights.l1_sf, expert),
            accumulation=launch.accumulation, fast_math=activation.fast_math,
        )  # fmt: skip
        values = activate(family, activation, acc, _rows(weights.l1_alphas, expert), _rows(x_scales, here))
        acts = requantize(
            family,
            values,
            route_weights[here] if in_activation else torch.ones_like(route_weights[here]),
            fast_math=activation.fast_math,
            swap_ab=bool(launch.swap_ab),
            a2_scale=_rows(weights.a2_scales, expert),
            l2_activation_scale=l2_activation_scale,
        )
        acc = expert_gemm(
            family, acts.codes, acts.scales, weights.l2[expert], _rows(weights.l2_sf, expert),
            accumulation=launch.accumulation, fast_math=activation.fast_math,
        )  # fmt: skip
        outputs[here] = scale_output(
            family,
            acc,
            _rows(weights.l2_alphas, expert),
            _rows(weights.a2_scales, expert),
            route_weights[here] if weighted else None,
        )
        hidden_acts.append(acts)
    put.acts(
        "l2_acts",
        pool_rows(pool, [acts.codes for acts in hidden_acts], weights.l2.shape[2], x),
        family.act_format,
    )
    if family.hidden_group is not None:
        scales = [_present(acts.scales) for acts in hidden_acts]
        like = _present(x_sf)
        put.scales("l2_acts_sf", pool_rows(pool, scales, weights.l2.shape[2] // family.hidden_group, like))
    stages["token_src_metadata"], live["token_src_metadata"] = pool.token_src_metadata, pool.live
    stats = torch.tensor(pool.counts, dtype=torch.int32, device=x.device)
    return ExpertsResult(pool, outputs, stages, live, stats)


def combine_tokens(
    family: MegaMoeFamily,
    inputs: RankInputs,
    rank: int,
    outputs: Sequence[tuple[Tensor, Tensor]],
    activation: Activation,
    *,
    shared: SharedExpert | None = None,
    norm: PostNorm | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """y of ``rank``'s tokens from (token_src_metadata, output rows) of every rank, and the stages "combine"
    and, with a shared expert, "shared_l2_acts", "shared_l2_acts_sf"."""
    tokens, topk = inputs.topk_idx.shape
    hidden = outputs[rank][1].shape[1]
    device = inputs.topk_idx.device
    slots = torch.zeros(topk, tokens, hidden, dtype=torch.bfloat16, device=device)
    for metadata, rows in outputs:
        mine = metadata[:, 0] == rank
        slots[metadata[mine, 2].long(), metadata[mine, 1].long()] = rows[mine]
    used = inputs.topk_idx >= 0
    stages: dict[str, Tensor] = {}
    shared_rows: Tensor | None = None
    if shared is not None:
        shared_rows, stages = run_shared(shared, inputs, activation)
    if norm is None:
        y = combine(family, slots, used, inputs.topk_weights, shared_rows)
    else:
        partial = combine_norm(slots, norm.gamma)
        scales = norm_scales(partial.transpose(0, 1), norm.eps, inputs.topk_weights, hidden)
        y = combine_normalized(slots, used, scales, norm.gamma)
        stages["combine_norm"] = partial
    stages["combine"] = slots if shared_rows is None else torch.cat((slots, shared_rows[None]))
    return y, stages


def run_shared(
    shared: SharedExpert, inputs: RankInputs, activation: Activation
) -> tuple[Tensor, dict[str, Tensor]]:
    """The shared expert's outputs bfloat16 [T, H] for a rank's own tokens, and its L2 operand, in token
    order."""
    family = FAMILIES[shared.family]
    x = inputs.x if inputs.shared_x is None else inputs.shared_x
    x_sf = inputs.x_sf if inputs.shared_x is None else inputs.shared_x_sf
    weights = shared.weights
    acc = expert_gemm(family, x, x_sf, weights.l1[0], _rows(weights.l1_sf, 0))
    values = activate(family, activation, acc, None, None)
    acts = requantize(family, values, torch.ones(len(x), device=x.device), fast_math=activation.fast_math)
    acc = expert_gemm(family, acts.codes, acts.scales, weights.l2[0], _rows(weights.l2_sf, 0))
    stages = {"shared_l2_acts": acts.codes}
    if acts.scales is not None:
        stages["shared_l2_acts_sf"] = acts.scales
    return scale_output(family, acc, None, None, None), stages


def _rows(tensor: Tensor | None, index: int | slice) -> Tensor | None:
    return None if tensor is None else tensor[index]


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
