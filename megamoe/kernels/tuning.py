"""Tile sizes and warps by shape: data and the rule that reads it.

Nothing here changes a byte. The tables are measured choices (docs/performance.md says how); under the
interpreter a program costs Python time per operation, so tiles there are as large as memory allows.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megamoe.kernels import constants

INTERPRETER_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Tile:
    """Tokens and columns of a program, and its warps."""

    block_m: int
    block_h: int
    num_warps: int


T = TypeVar("T")


@dataclass(frozen=True)
class Rule(Generic[T]):
    """What holds up to a number of tokens, or of what else the table says (None: any number).

    Of a tile, block_h is an upper limit.
    """

    limit: int | None
    value: T


GROUP_RULES = (
    Rule(1024, Tile(1, 2048, 4)),
    Rule(2048, Tile(2, 1024, 4)),
    Rule(None, Tile(4, 1024, 8)),
)
# With EPLB and few tokens, fewer warps: more would only repeat the loads of a routing program of few slots.
GROUP_EPLB_RULES = (Rule(512, Tile(1, 1024, 1)), Rule(1024, Tile(1, 1024, 2)), *GROUP_RULES[1:])
BLOCK_RULES = (
    Rule(16, Tile(1, 512, 1)),
    Rule(1024, Tile(1, 1024, 2)),
    Rule(None, Tile(1, 1024, 1)),
)
# By the tiles of a call. A program with several loads the next one while it quantizes; few tiles should
# rather have a program each, and beyond 2^26 the number of a token after the last may not fit 32 bits.
BLOCK_STEPS = (Rule(24576, 1), Rule(49152, 2), Rule(1 << 26, 4), Rule(None, 1))
TOKEN_RULES = (
    Rule(512, Tile(1, 4096, 8)),
    Rule(2048, Tile(1, 2048, 4)),
    Rule(None, Tile(1, 1024, 2)),
)
SHARED_TOKEN_RULES = (TOKEN_RULES[0], Rule(None, Tile(1, 2048, 4)))  # the shared copy takes registers too
NORM_TILE = Tile(1, 2048, 4)

# Recording the load of EPLB. Additions to the same counters wait for each other, which few slots do not feel:
# they are added one by one. Many are counted in shared memory first, LOAD_BINS counters at a time.
LOAD_BINS = 256
MAX_LOAD_PARTS = 8  # a longer load spreads its additions by itself
COUNTED_SLOTS = 256  # slots of a program that counts
COUNTED_WARP_SLOTS = 64  # or of each of its warps, if that makes more
# Of a program that loads replicas ahead of their count, up to a slot a thread.
AHEAD_TOKENS = (Rule(1, 1), Rule(4, 2), Rule(None, 1 << 30))


class EplbSizes(Protocol):
    """What a plan asks of a mapping: counters of the load, slots of an expert in the map."""

    @property
    def num_physical(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...


@dataclass(frozen=True)
class EplbStyle:
    """How EPLB's programs fit beside those of a kernel.

    ahead: few tokens may load replicas ahead of their count: it pays where quantizing is as quick as mapping.
    counts_from: token slots of a call from which a program counts before it adds.
    spreads: the share of the grid over which its programs are spread. All at the start, they would add at the
    same time while no program moved memory; in a small grid a late one would end last.
    apart: `megamoe.kernels.replicas.record_load` says what it means.
    fetches: do programs ask for the tables before they have ids? Data of small calls are in the L2 cache,
    and where quantizing takes long nobody waits for the tables.
    """

    ahead: bool
    counts_from: int
    spreads: tuple[Rule[float], ...]
    apart: bool = False
    fetches: tuple[Rule[bool], ...] = (Rule(None, False),)


GROUP_EPLB = EplbStyle(
    True,
    16384,
    (Rule(512, 0.0), Rule(4095, 0.2), Rule(None, 0.6)),
    fetches=(Rule(511, False), Rule(4095, True), Rule(None, False)),
)
TOKEN_EPLB = EplbStyle(False, 16384, (Rule(8192, 0.0), Rule(None, 0.6)), apart=True)


def power_of_two(value: int) -> int:
    """Smallest power of two not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def largest_divisor(hidden: int, limit: int) -> int:
    """Largest power of two that divides `hidden`, at most `limit`."""
    return min(hidden & -hidden, limit)


def _rule(rules: tuple[Rule[T], ...], number: int) -> T:
    for rule in rules:
        if rule.limit is None or number <= rule.limit:
            return rule.value
    raise AssertionError("the last rule has no limit")


def _interpreted_rows(num_tokens: int, columns: int) -> int:
    return min(power_of_two(num_tokens), max(1, INTERPRETER_ELEMENTS // columns))


def column_tile(rules: tuple[Rule[Tile], ...], num_tokens: int, hidden: int, interpreted: bool) -> Tile:
    """For kernels whose programs may split a row anywhere at a multiple of 64 columns."""
    if interpreted:
        columns = power_of_two(hidden)
        return Tile(_interpreted_rows(num_tokens, columns), columns, 4)
    tile = _rule(rules, num_tokens)
    block_h = largest_divisor(hidden, tile.block_h)
    # A hidden size with few factors of two gets more rows a program instead.
    block_m = tile.block_m * min(tile.block_h // block_h, power_of_two(num_tokens))
    return Tile(block_m, block_h, tile.num_warps)


def block_steps(tiles: int) -> int:
    """Tiles of a one-level program, one below the other."""
    return _rule(BLOCK_STEPS, tiles)


def row_tile(rules: tuple[Rule[Tile], ...], num_tokens: int, hidden: int, interpreted: bool) -> Tile:
    """For the two-level kernel, whose programs hold whole rows, in chunks of block_h columns."""
    if interpreted:
        columns = power_of_two(hidden)
        return Tile(_interpreted_rows(num_tokens, columns), columns, 4)
    tile = _rule(rules, num_tokens)
    return Tile(tile.block_m, min(tile.block_h, power_of_two(hidden)), tile.num_warps)


def norm_tile(num_tokens: int, hidden: int, interpreted: bool) -> Tile:
    """For the norm-fused kernel: rows of a program, and the columns of a step of its second pass."""
    if interpreted:
        columns = max(power_of_two(hidden), 2048)
        return Tile(_interpreted_rows(num_tokens, columns), power_of_two(hidden), 4)
    return Tile(NORM_TILE.block_m, min(NORM_TILE.block_h, power_of_two(hidden)), NORM_TILE.num_warps)


@dataclass(frozen=True)
class RoutingPlan:
    """Programs of a grid that repack the routing.

    programs, of `tokens` tokens each, in rows of `slots` slots; every 2^shift-th program is one of them.
    ahead; load_parts, apart; fetch: `map_ahead`, `record_load` and `fetch_tables` say what they mean, all of
    `megamoe.kernels.replicas`.
    """

    programs: int
    tokens: int
    slots: int
    shift: int = 0
    ahead: int = 0
    load_parts: int = 0
    apart: bool = False
    fetch: bool = False

    def constants(self, topk: int) -> tuple[int, int, int, int, int, bool, bool]:
        """The compile-time argument ROUTING of a kernel: top-k, slots, tokens, and the rest in this order."""
        return (topk, self.slots, self.tokens, self.ahead, self.load_parts, self.apart, self.fetch)


def routing_plan(
    topk: int,
    num_tokens: int,
    eplb: EplbSizes | None,
    num_warps: int,
    other_programs: int,
    interpreted: bool,
    style: EplbStyle,
) -> RoutingPlan:
    """For num_tokens tokens beside `other_programs` programs; eplb is None where nothing is mapped."""
    slots = power_of_two(topk)
    limit = power_of_two(num_tokens)
    counted = limit * slots >= LOAD_BINS if interpreted else num_tokens * topk >= style.counts_from
    parts = load_parts(eplb.num_physical) if eplb and counted else 0
    ahead = min(eplb.num_replicas, constants.AHEAD_REPLICAS) if eplb and style.ahead and not counted else 0
    if interpreted:
        tokens = min(limit, INTERPRETER_ELEMENTS // slots)
    elif parts:
        tokens = max(COUNTED_SLOTS, COUNTED_WARP_SLOTS * num_warps) // slots
    else:
        tokens = 32 * num_warps // slots
        if ahead:
            tokens = min(tokens, _rule(AHEAD_TOKENS, num_tokens))
    tokens = min(max(tokens, 1), limit)
    if ahead:  # whole warps, so that it takes one instruction to ask whether any count is high
        slots = max(slots, 32 // tokens)
    programs = -(-num_tokens // tokens)
    share = _rule(style.spreads, num_tokens) if eplb and not interpreted else 0.0
    period = max(int(share * (programs + other_programs) / max(programs, 1)), 1)
    apart = style.apart and parts > 0
    fetch = eplb is not None and _rule(style.fetches, num_tokens)
    return RoutingPlan(programs, tokens, slots, period.bit_length() - 1, ahead, parts, apart, fetch)


def load_parts(num_physical: int) -> int:
    """How many times LOAD_BINS counters a load has; 0 where it is not counted first."""
    parts = -(-num_physical // LOAD_BINS)
    return parts if parts <= MAX_LOAD_PARTS else 0
