"""Tile sizes and warps by shape: data and the rule that reads it.

Nothing here changes a byte. The tables are measured choices (docs/performance.md says how); under the
interpreter a program costs Python time per operation, so tiles there are as large as memory allows.
"""

from dataclasses import dataclass

INTERPRETER_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Tile:
    """Tokens and columns of a program, and its warps."""

    block_m: int
    block_h: int
    num_warps: int


@dataclass(frozen=True)
class Rule:
    """The tile for up to `max_tokens` tokens (None: any number); block_h is an upper limit."""

    max_tokens: int | None
    tile: Tile


GROUP_RULES = (Rule(None, Tile(1, 1024, 2)),)
BLOCK_RULES = (
    Rule(16, Tile(1, 512, 1)),
    Rule(1024, Tile(1, 1024, 2)),
    Rule(None, Tile(1, 1024, 1)),
)
TOKEN_RULES = (
    Rule(1024, Tile(1, 4096, 8)),
    Rule(None, Tile(1, 1024, 2)),
)
NORM_TILE = Tile(1, 2048, 4)
LANE_SLOTS = 1  # token slots of a lane in a routing tile: more of them cost the quantizers' registers
COUNTING_SLOTS = 16384  # token slots of a call from which a program counts the load before it adds it
COUNTING_PROGRAMS = 64  # as many programs share the counting, until a program has COUNTING_TILES tiles
COUNTING_TILES = 8
MAX_LOAD_BINS = 1024


def power_of_two(value: int) -> int:
    """Smallest power of two not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def largest_divisor(hidden: int, limit: int) -> int:
    """Largest power of two that divides `hidden`, at most `limit`."""
    return min(hidden & -hidden, limit)


def _rule(rules: tuple[Rule, ...], num_tokens: int) -> Tile:
    for rule in rules:
        if rule.max_tokens is None or num_tokens <= rule.max_tokens:
            return rule.tile
    raise AssertionError("the last rule has no limit")


def _interpreted_rows(num_tokens: int, columns: int) -> int:
    return min(power_of_two(num_tokens), max(1, INTERPRETER_ELEMENTS // columns))


def column_tile(rules: tuple[Rule, ...], num_tokens: int, hidden: int, interpreted: bool) -> Tile:
    """For kernels whose programs may split a row anywhere at a multiple of 64 columns."""
    if interpreted:
        columns = power_of_two(hidden)
        return Tile(_interpreted_rows(num_tokens, columns), columns, 4)
    tile = _rule(rules, num_tokens)
    block_h = largest_divisor(hidden, tile.block_h)
    # A hidden size with few factors of two gets more rows a program instead.
    block_m = tile.block_m * min(tile.block_h // block_h, power_of_two(num_tokens))
    return Tile(block_m, block_h, tile.num_warps)


def row_tile(num_tokens: int, hidden: int, interpreted: bool) -> Tile:
    """For the two-level kernel, whose programs hold whole rows, in chunks of block_h columns."""
    if interpreted:
        columns = power_of_two(hidden)
        return Tile(_interpreted_rows(num_tokens, columns), columns, 4)
    tile = _rule(TOKEN_RULES, num_tokens)
    return Tile(tile.block_m, min(tile.block_h, power_of_two(hidden)), tile.num_warps)


def norm_tile(num_tokens: int, hidden: int, interpreted: bool) -> Tile:
    """For the norm-fused kernel: rows of a program, and the columns of a step of its second pass."""
    if interpreted:
        columns = max(power_of_two(hidden), 2048)
        return Tile(_interpreted_rows(num_tokens, columns), power_of_two(hidden), 4)
    return Tile(NORM_TILE.block_m, min(NORM_TILE.block_h, power_of_two(hidden)), NORM_TILE.num_warps)


@dataclass(frozen=True)
class RoutingTile:
    """Tokens of a tile, tiles of a routing program, and the bins in which it counts the load (0: none)."""

    tokens: int
    tiles: int
    load_bins: int


def routing_tile(
    topk: int, num_tokens: int, num_physical: int, num_warps: int, interpreted: bool
) -> RoutingTile:
    """For the routing programs; num_physical is 0 where no load is recorded."""
    padded = power_of_two(topk)
    limit = power_of_two(max(num_tokens, 1))
    bins = load_bins(num_physical)
    if interpreted:
        return RoutingTile(limit, 1, bins if limit * padded >= bins else 0)
    tokens = max(32 * num_warps * LANE_SLOTS // padded, 1)
    if bins and num_tokens * topk >= COUNTING_SLOTS:
        tiles = num_tokens // (tokens * COUNTING_PROGRAMS)
        return RoutingTile(tokens, min(max(power_of_two(tiles), 1), COUNTING_TILES), bins)
    return RoutingTile(min(tokens, limit), 1, 0)


def load_bins(num_physical: int) -> int:
    """Bins of the in-program counts; 0 where experts are too many for counting to pay."""
    return power_of_two(num_physical) if 0 < num_physical <= MAX_LOAD_BINS else 0
