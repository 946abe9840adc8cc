"""The launches that ranks are compared on, for any number of them. Not a test module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RankCase", "rank_cases"]

_SMALL: dict[str, Any] = {"experts": 2, "topk": 2, "hidden": 512, "intermediate": 256}


@dataclass(frozen=True)
class RankCase:
    """params: of the table's row fp8_mega_moe. poison: the buffers are filled before it; without, the
    launch finds what the one before it left. record: worth keeping as a bundle (small)."""

    name: str
    params: dict[str, Any]
    poison: bool = True
    record: bool = False


def rank_cases(ranks: int) -> list[RankCase]:
    """At least ten launches: unequal and zero counts, one rank or expert taking everything, masks, replicas
    on different ranks, launches over stale buffers, both accumulation modes and the wide hidden size."""

    def per_rank(*counts: int) -> tuple[int, ...]:
        """counts, repeated for further ranks."""
        return tuple((counts * ranks)[:ranks])

    def case(
        name: str, tokens: Sequence[int], poison: bool = True, record: bool = False, **changes: Any
    ) -> RankCase:
        params = {
            "values": "random",
            "tokens": tuple(tokens),
            **_SMALL,
            "clamp": None,
            "fast_math": True,
            "masked": 0.0,
            "routing": "uniform",
        }
        params["experts"] = _SMALL["experts"] * ranks  # a rank's share stays the same
        return RankCase(name, params | changes, poison, record)

    only_first = (20, *([0] * (ranks - 1)))
    only_last = (*([0] * (ranks - 1)), 20)
    return [
        case("equal", per_rank(16)),
        case("unequal", per_rank(37, 5)),
        case("all_tokens_to_one_rank", per_rank(30, 12), routing="one_rank", record=True),
        case("one_expert_gets_every_token", per_rank(60, 20), routing="one_expert"),
        case("half_of_the_routes_masked", per_rank(40, 24), masked=0.5, record=True),
        case("no_route_at_all", per_rank(7, 3), masked=1.0),
        case("replicas_on_different_ranks", per_rank(33, 18), routing="replicas", record=True),
        case("different_tiles", per_rank(100, 20), record=True),
        case("large_tiles", per_rank(200, 150), fast_math=False, clamp=10.0, masked=0.1),
        case("small_tiles_exact", per_rank(50, 60), fast_math=False, clamp=10.0),
        case("exact_inputs", per_rank(48, 31), values="exact", masked=0.1),
        case("specials", per_rank(16, 15), values="specials", fast_math=False, clamp=10.0),
        case("many_experts", per_rank(64, 40), experts=16 * ranks, topk=6, masked=0.1, clamp=10.0),
        case("wide", per_rank(16, 44), hidden=7168, intermediate=2048, topk=4, fast_math=False),
        case("wide_large_tiles", per_rank(80, 70), hidden=7168, intermediate=2048, topk=4),
        case("stale_many", per_rank(100, 80)),
        case("stale_fewer", per_rank(9, 2), poison=False),
        case("only_first_rank_has_tokens", only_first, record=True),
        case("only_last_rank_has_tokens", only_last),
        case("stale_none_on_first_rank", per_rank(0, 1), poison=False),
    ]
