"""The router kernel bf16_mega_gate: logits, scores, top-k and renormalised weights of every token.

    logit  = x @ weight.T                       bf16 operands, fp32 sums (of K splits, added in split order)
    score  = sqrt(softplus(logit))              softplus(v) = v if v > 20 else log1p(exp(v)), fp32
    rank   = score + bias  with a bias or an image mask, the raw logit without
    ids    = the num_topk largest ranks, in descending order, ties to the smaller id
    weight = score / (sum of scores + 1e-20) * routed_scaling_factor

Easy to get wrong: without a bias the *logits* are ranked, and two logits whose scores round to the same
value still have an order; the bias never enters the weights; the sum is a butterfly over 8, 16 or 32 lanes;
NaN and -inf are never selected, and a round that finds nothing selects expert 0; ``unmapped_topk_idx`` is
overwritten for every token.

Given the scores, ids and weights are exact. The logits are a tensor core's: here they are the float64 sum
rounded to fp32, or with ``accumulation`` the model of a family of `reference.tensor_core`. expf is CUDA's
(`reference.activation.cuda_expf`); log1pf is correctly rounded, CUDA's is within 2 ulp of that.

Sources: DeepGEMM of vLLM 0.33, epilogue/sm100_mega_gate.cuh and csrc/apis/mega_gate.hpp; vLLM's wrapper for
the order of the results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference._checks import check_tensor, require
from reference.activation import cuda_expf

__all__ = ["bf16_mega_gate", "gate_logits", "gate_scores", "renormalized_weights", "select_experts"]

_MAX_TOKENS = 1 << 20
_REPLICA_STRIDE = 23333


def gate_logits(x: Tensor, weight: Tensor, *, num_splits: int = 1, accumulation: str = "float64") -> Tensor:
    """x [T, H] bf16, weight [E, H] bf16 -> fp32 [T, E].

    num_splits: parts of H whose fp32 sums are added in order (1, 2, 4 or 8; production chooses by token
    count). accumulation: "float64", or the name of a tensor-core family such as "blackwell_bf16". The order
    of the float64 sums is the library's: it shows only where a sum lies within its own error (about 2^-50)
    of a tie between two fp32 values. ValueError: other splits, or ones that do not divide H.
    """
    require(num_splits in (1, 2, 4, 8), "num_splits", "1, 2, 4 or 8", num_splits)
    require(x.shape[1] % num_splits == 0, "x", f"columns that {num_splits} splits divide", list(x.shape))
    total: Tensor | None = None
    for x_part, weight_part in zip(x.chunk(num_splits, 1), weight.chunk(num_splits, 1), strict=True):
        if accumulation == "float64":
            part = (x_part.double() @ weight_part.double().T).float()
        else:
            from reference.tensor_core import matmul

            part = matmul(accumulation, x_part, weight_part)
        total = part if total is None else total + part
    assert total is not None
    return total


def gate_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(logit)) in fp32, any shape; negative infinity gives 0, NaN stays NaN."""
    exponentials = cuda_expf(logits)
    softplus = torch.where(logits > 20, logits, torch.log1p(exponentials.double()).float())
    # The square root in double, rounded to fp32, is the correctly rounded one.
    return softplus.double().sqrt().float()


def select_experts(ranks: Tensor, num_topk: int) -> Tensor:
    """int64 [T, num_topk]: the largest ranks of every row (fp32 [T, E]), descending, ties to the smaller id.

    NaN and -inf are never selected; where nothing is left, expert 0 is.
    """
    comparable = torch.where(ranks.isnan(), -math.inf, ranks)
    ordered, ids = comparable.sort(dim=1, descending=True, stable=True)
    return torch.where(ordered[:, :num_topk] == -math.inf, 0, ids[:, :num_topk])


def renormalized_weights(scores: Tensor, routed_scaling_factor: float) -> Tensor:
    """Selected scores fp32 [T, K] -> weights: fl(fl(s / fl(sum + 1e-20)) * factor).

    The sum is a butterfly: K scores in 8, 16 or 32 lanes (the others 0), added at half the width, a quarter,
    ... 1.
    """
    lanes = next(width for width in (8, 16, 32) if scores.shape[1] <= width)
    sums = torch.nn.functional.pad(scores, (0, lanes - scores.shape[1]))
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    tiny = torch.tensor(1e-20, dtype=torch.float32, device=scores.device)
    factor = torch.tensor(routed_scaling_factor, dtype=torch.float32, device=scores.device)
    return scores / (sums + tiny) * factor


def bf16_mega_gate(
    x: Tensor,
    weight: Tensor,
    num_topk: int,
    *,
    scoring_func: str,
    routed_scaling_factor: float,
    ep_rank: int,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    mask: Tensor | None = None,
    logical_to_physical_map: Tensor | None = None,
    logical_replica_count: Tensor | None = None,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(topk_weights fp32 [T, K], topk_idx int64 [T, K]).

    x: bf16 [T, H], weight: bf16 [E, H], both contiguous, H a multiple of 256, E a multiple of 4 up to 512, K
    up to 32. bias, image_bias: fp32 [E], added to the scores for ranking; image_bias where image_token_mask
    (bool [T]) is set. fix_routing_mask: bool [T]; such tokens take their experts from unmapped_topk_idx
    (int64 [T, K]), which for all tokens receives the logical ids. mask: bool [T]; tokens where it is false
    get id -1 and weight 0. logical_to_physical_map [E, slots] and logical_replica_count [E]: the returned id
    is map[id, (ep_rank + 23333 * token mod 2^32) mod count]. logits: fp32 [T, E] in place of `gate_logits`.

    ValueError or TypeError naming the argument for everything the kernel refuses, before anything is written.
    """
    _check_gate(x, weight, num_topk, scoring_func, routed_scaling_factor, ep_rank)
    tokens, experts = x.shape[0], weight.shape[0]
    for name, vector in (("bias", bias), ("image_bias", image_bias)):
        if vector is not None:
            check_tensor(name, vector, dtypes=(torch.float32,), shape=(experts,), device=x.device)
    flags = {"image_token_mask": image_token_mask, "fix_routing_mask": fix_routing_mask, "mask": mask}
    for name, flag in flags.items():
        if flag is not None:
            check_tensor(name, flag, dtypes=(torch.bool,), shape=(tokens,), device=x.device)
    require(
        (image_bias is None) == (image_token_mask is None),
        "image_bias",
        "a tensor if and only if there is an image_token_mask",
        "one of the two",
    )
    has_table = fix_routing_mask is None or unmapped_topk_idx is not None
    require(has_table, "unmapped_topk_idx", "a tensor together with fix_routing_mask", None)
    if unmapped_topk_idx is not None:
        shape = (tokens, num_topk)
        check_tensor(
            "unmapped_topk_idx",
            unmapped_topk_idx,
            dtypes=(torch.int64,),
            shape=shape,
            device=x.device,
            written=True,
        )
        require(
            num_topk == 1 or unmapped_topk_idx.stride(1) == 1,
            "unmapped_topk_idx",
            "rows of stride 1",
            unmapped_topk_idx.stride(),
        )
    if logits is None:
        logits = gate_logits(x, weight)
    else:
        check_tensor("logits", logits, dtypes=(torch.float32,), shape=(tokens, experts), device=x.device)

    live = torch.ones(tokens, dtype=torch.bool, device=x.device) if mask is None else mask
    ids = select_experts(_ranks(logits, bias, image_bias, image_token_mask), num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        given = unmapped_topk_idx[fix_routing_mask & live]
        wrong = (given < 0) | (given >= experts)
        expected = f"ids in [0, {experts}) where fixed"
        require(not bool(wrong.any()), "unmapped_topk_idx", expected, given[wrong].tolist())
        ids = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, ids)
        ids = torch.where(live[:, None], ids, 0)
    physical = _physical_ids(ids, ep_rank, logical_to_physical_map, logical_replica_count)
    weights = renormalized_weights(gate_scores(logits.gather(1, ids)), routed_scaling_factor)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(live[:, None], ids, -1))
    return torch.where(live[:, None], weights, 0.0), torch.where(live[:, None], physical, -1)


def _check_gate(
    x: Tensor, weight: Tensor, num_topk: int, scoring_func: str, routed_scaling_factor: float, ep_rank: int
) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        check_tensor(name, tensor, dtypes=(torch.bfloat16,), dim=2)
        require(tensor.is_contiguous(), name, "a contiguous tensor", f"stride {tensor.stride()}")
    require(x.shape[1] == weight.shape[1], "weight", f"{x.shape[1]} columns, as x has", list(weight.shape))
    require(x.shape[1] > 0 and x.shape[1] % 256 == 0, "x", "columns that 256 divides", list(x.shape))
    require(x.device == weight.device, "weight", f"device {x.device}", weight.device)
    experts = weight.shape[0]
    require(0 < experts <= 512 and experts % 4 == 0, "weight", "4 to 512 rows, a multiple of 4", experts)
    require(0 < num_topk <= min(experts, 32), "num_topk", f"1 to {min(experts, 32)}", num_topk)
    require(x.shape[0] <= _MAX_TOKENS, "x", f"at most {_MAX_TOKENS} rows", x.shape[0])
    require(scoring_func == "sqrtsoftplus", "scoring_func", "'sqrtsoftplus'", repr(scoring_func))
    require(
        math.isfinite(routed_scaling_factor),
        "routed_scaling_factor",
        "a finite number",
        routed_scaling_factor,
    )
    require(ep_rank >= 0, "ep_rank", "a rank", ep_rank)


def _ranks(
    logits: Tensor, bias: Tensor | None, image_bias: Tensor | None, image_token_mask: Tensor | None
) -> Tensor:
    """What is ranked: raw logits, or scores plus the bias that the token's kind has."""
    if bias is None and image_token_mask is None:
        return logits
    added = torch.zeros(logits.shape[1], device=logits.device) if bias is None else bias
    if image_bias is not None and image_token_mask is not None:
        added = torch.where(image_token_mask[:, None], image_bias, added)
    return gate_scores(logits) + added


def _physical_ids(ids: Tensor, ep_rank: int, mapping: Tensor | None, count: Tensor | None) -> Tensor:
    if mapping is None and count is None:
        return ids
    if mapping is None or count is None:
        raise ValueError("logical_to_physical_map: expected it and logical_replica_count, got one of them")
    token = torch.arange(ids.shape[0], device=ids.device)
    hashed = (ep_rank + token * _REPLICA_STRIDE) & 0xFFFFFFFF
    replica = hashed[:, None] % count.to(torch.int64)[ids].clamp(min=1)
    return mapping.to(torch.int64)[ids, replica]
