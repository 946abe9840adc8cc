"""Inputs of whole launches: drawn from a seed, in the form of ``megamoe.suite.drivers.mega_moe``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference.eplb import eplb_map_to_physical_and_record
from reference.exact_inputs import draw_exact

__all__ = ["draw_launch"]


def draw_launch(params: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """x, x_sf, topk_idx, topk_weights of all ranks, and all experts' weights.

    values: "random" (all mantissas, exponents spread over 2^13, scales over 2^6), "specials" (the same with
    NaN, Inf, zero, subnormal and huge scales and odd routing weights in some tokens) or "exact"
    (reference.exact_inputs).
    """
    tokens, experts = list(params["tokens"]), params["experts"]
    if params["values"] == "exact":
        return _exact(params, tokens, seed)
    g = torch.Generator().manual_seed(seed)
    hidden, intermediate = params["hidden"], params["intermediate"]
    total = sum(tokens)
    topk_idx = torch.cat([_routes(params, rank, g) for rank in range(len(tokens))])
    gone = torch.rand(topk_idx.shape, generator=g) < params["masked"]
    found = {
        "x": _codes((total, hidden), g),
        "x_sf": _scales((total, hidden // 128), 1 / 32, g),
        "topk_idx": torch.where(gone, -1, topk_idx),
        "topk_weights": torch.rand(topk_idx.shape, generator=g) + 0.01,
        "l1_w": _codes((experts, 2 * intermediate, hidden), g),
        "l1_w_sf": _scales((experts, intermediate // 64, hidden // 128), 1 / (24 * hidden**0.5), g),
        "l2_w": _codes((experts, hidden, intermediate), g),
        "l2_w_sf": _scales((experts, hidden // 128, intermediate // 128), 1 / (24 * intermediate**0.5), g),
    }
    if params["values"] == "specials":
        _plant_specials(found)
    return found


def _codes(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """E4M3 codes of normal values, each row times a power of two of its own."""
    spread = torch.exp2(torch.randint(-3, 4, (*shape[:-1], 1), generator=g).float())
    values = torch.randn(shape, generator=g) * 16 * spread
    codes: Tensor = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes


def _scales(shape: tuple[int, ...], center: float, g: torch.Generator) -> Tensor:
    return torch.exp2(torch.rand(shape, generator=g) * 6 - 3) * center


def _routes(params: dict[str, Any], rank: int, g: torch.Generator) -> Tensor:
    """One rank's ids int64 [T, K]."""
    count, experts, topk = params["tokens"][rank], params["experts"], params["topk"]
    ranks = len(params["tokens"])
    if params["routing"] == "one_rank":
        local = experts // ranks
        return _distinct(count, local, min(topk, local), g).add(experts - local)
    if params["routing"] == "one_expert":
        rest = _distinct(count, experts - 1, topk - 1, g) + 1
        return torch.cat((torch.zeros(count, 1, dtype=torch.int64), rest), dim=1)
    if params["routing"] == "replicas":
        return _replicated(count, experts, topk, g)
    return _distinct(count, experts, topk, g)


def _distinct(rows: int, values: int, picks: int, g: torch.Generator) -> Tensor:
    """int64 [rows, picks]: different numbers below ``values`` in each row."""
    chosen: Tensor = torch.rand(rows, values, generator=g).topk(picks, dim=1).indices
    return chosen


def _replicated(count: int, physical: int, topk: int, g: torch.Generator) -> Tensor:
    """Half as many logical experts, each with two replicas half the physical experts apart: on different
    ranks."""
    logical = physical // 2
    ids = _distinct(count, logical, min(topk, logical), g)
    slots = torch.stack((torch.arange(logical), torch.arange(logical) + logical), dim=1)
    load = torch.zeros(physical, dtype=torch.int32)
    replicas = torch.full((logical,), 2, dtype=torch.int64)
    return eplb_map_to_physical_and_record(ids, load, slots, replicas, torch.tensor(True)).long()


def _plant_specials(found: dict[str, Tensor]) -> None:
    """One token a kind, as far as there are tokens."""
    x, x_sf, weights = found["x"], found["x_sf"], found["topk_weights"]
    nan, inf = float("nan"), float("inf")
    plants = (
        (x, (slice(5, 6),), 0x7F),
        (x, (slice(200, 201),), 0xFF),
        (x, (slice(3, 4),), 0x80),
        (x, (slice(None),), 0),
        (x_sf, (slice(1, 2),), inf),
        (x_sf, (slice(2, 3),), nan),
        (x_sf, (slice(0, 1),), 1e-44),
        (x_sf, (slice(None),), 0.0),
        (weights, (slice(0, 1),), nan),
        (weights, (slice(None),), 0.0),
        (weights, (slice(0, 1),), -1.5),
        (weights, (slice(0, 1),), inf),
        (x_sf, (slice(None),), 1e10),
        (x_sf, (slice(None),), 1e30),
        (x_sf, (slice(None),), 1e-20),
    )
    for token, (tensor, columns, value) in enumerate(plants[: len(x)]):
        tensor[(token, *columns)] = value


def _exact(params: dict[str, Any], tokens: list[int], seed: int) -> dict[str, Tensor]:
    names = ("topk", "hidden", "intermediate", "masked")
    sizes = {name: params[name] for name in names}
    launch = draw_exact("sm90_fp8xfp8", tokens, num_experts=params["experts"], seed=seed, **sizes)
    columns = {
        name: [getattr(each, name) for each in launch.inputs]
        for name in ("x", "x_sf", "topk_idx", "topk_weights")
    }
    parts = {
        "l1_w": [each.l1 for each in launch.weights],
        "l1_w_sf": [each.l1_sf for each in launch.weights],
        "l2_w": [each.l2 for each in launch.weights],
        "l2_w_sf": [each.l2_sf for each in launch.weights],
    }
    return {name: torch.cat(each) for name, each in (columns | parts).items()}  # type: ignore[arg-type]
