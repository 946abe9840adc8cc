"""Refusals of the forward: what no launch could take, named by argument, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from reference._checks import require
from reference.mega_moe.dispatch import check_routing
from reference.mega_moe.epilogue import Activation
from reference.mega_moe.families import MegaMoeFamily
from reference.mega_moe.inputs import ExpertWeights, PostNorm, RankInputs, SharedExpert
from reference.mega_moe.launch import LaunchConfig
from reference.mega_moe.linear import WEIGHT_BLOCK

__all__ = ["check_inputs", "check_launch", "check_options", "check_weights"]


def check_launch(
    family: MegaMoeFamily,
    inputs: Sequence[RankInputs],
    weights: Sequence[ExpertWeights],
    launches: Sequence[LaunchConfig],
    activation: Activation,
    shared: Sequence[SharedExpert] | None,
    norm: PostNorm | None,
) -> None:
    """ValueError naming the argument unless all of it fits together and ``family`` has it."""
    ranks = len(inputs)
    require(ranks > 0, "inputs", "at least one rank", "none")
    for name, per_rank in (("weights", weights), ("launches", launches), ("shared", shared)):
        if per_rank is not None:
            require(len(per_rank) == ranks, name, f"one entry for each of {ranks} ranks", len(per_rank))
    check_options(family, activation, shared, norm)
    for rank in range(ranks):
        check_weights(family, weights, rank)
        check_inputs(family, inputs, rank, weights[0].l1.shape[2], len(weights[0].l1) * ranks)


def check_options(
    family: MegaMoeFamily,
    activation: Activation,
    shared: Sequence[SharedExpert] | None,
    norm: PostNorm | None,
) -> None:
    """Activation, shared experts and norm: does the family have them?"""
    known = activation.name in family.activations
    require(known, "activation", f"one of {family.activations} for {family.name}", repr(activation.name))
    if norm is not None:
        require(family.has_norm, "norm", "none", f"a norm, which {family.name} does not have")
        require(shared is None, "norm", "no shared expert beside a post-expert norm", "both")
    for entry in shared or ():
        known = entry.family in family.shared
        require(known, "shared", f"one of {family.shared} beside {family.name}", repr(entry.family))


def check_weights(family: MegaMoeFamily, weights: Sequence[ExpertWeights], rank: int) -> None:
    """One rank's weights, scales and factors against rank 0's shapes and the family's sizes."""
    local, rows, hidden = weights[0].l1.shape
    for name, size in (("hidden size", hidden), ("intermediate size", rows // 2)):
        multiple = f"a {name} that is a multiple of {family.k_multiple}"
        require(size % family.k_multiple == 0, "weights", multiple, size)
    l1, l2 = tuple(weights[rank].l1.shape), tuple(weights[rank].l2.shape)
    expected = (local, rows, hidden), (local, hidden, rows // 2)
    require((l1, l2) == expected, f"weights of rank {rank}", f"l1 and l2 {expected}", (l1, l2))
    own, where = weights[rank], f" of rank {rank}"
    for name, scales, (_, n, k) in (("l1_sf", own.l1_sf, expected[0]), ("l2_sf", own.l2_sf, expected[1])):
        shape = _scale_shape(family, local, n, k)
        got = None if scales is None else tuple(scales.shape)
        require(got == shape, name + where, f"{shape}", got)
    for name, factors, shapes in (
        ("l1_alphas", own.l1_alphas, ((local,), (local, 2))),
        ("l2_alphas", own.l2_alphas, ((local,),)),
        ("a2_scales", own.a2_scales, ((local,),)),
    ):
        if factors is not None:
            fits = tuple(factors.shape) in shapes
            require(fits, name + where, " or ".join(map(str, shapes)), tuple(factors.shape))


def _scale_shape(family: MegaMoeFamily, experts: int, n: int, k: int) -> tuple[int, ...] | None:
    """Of the scales of weights [experts, n, k]; None for a family that has none."""
    if family.act_group is None:
        return None
    if family.scale_format is None:
        return experts, n // WEIGHT_BLOCK, k // WEIGHT_BLOCK
    return experts, n, k // family.act_group


def check_inputs(
    family: MegaMoeFamily, inputs: Sequence[RankInputs], rank: int, hidden: int, num_experts: int
) -> None:
    """One rank's tokens: shapes, scales and routes."""
    own, where = inputs[rank], f" of rank {rank}"
    tokens, topk = len(own.topk_idx), inputs[0].topk_idx.shape[1]
    for name, tensor in (("topk_idx", own.topk_idx), ("topk_weights", own.topk_weights)):
        require(tuple(tensor.shape) == (tokens, topk), name + where, f"{[tokens, topk]}", list(tensor.shape))
    require(tuple(own.x.shape) == (tokens, hidden), "x" + where, f"{[tokens, hidden]}", list(own.x.shape))
    scales = None if own.x_sf is None else tuple(own.x_sf.shape)
    expected = None if family.act_group is None else (tokens, hidden // family.act_group)
    require(scales == expected, "x_sf" + where, f"{expected}", scales)
    check_routing(own.topk_idx, num_experts, "topk_idx" + where)
