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


GROUP_RULES = (
    Rule(32, Tile(1, 256, 1)),
    Rule(512, Tile(1, 1024, 4)),
    Rule(None, Tile(2, 1024, 4)),
)
BLOCK_RULES = (
    Rule(32, Tile(1, 256, 1)),
    Rule(None, Tile(1, 1024, 4)),
)
TOKEN_RULES = (
    Rule(256, Tile(1, 1024, 8)),
    Rule(None, Tile(1, 1024, 4)),
)
NORM_TILE = Tile(1, 2048, 8)
ROUTING_ELEMENTS = 512  # token slots of one routing program


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
    """For the two-level kernel, whose programs hold whole rows in at most eight chunks of columns."""
    if interpreted:
        columns = power_of_two(hidden)
        return Tile(_interpreted_rows(num_tokens, columns), columns, 4)
    tile = _rule(TOKEN_RULES, num_tokens)
    block_h = largest_divisor(hidden, tile.block_h)
    if hidden // block_h > 8:
        block_h = power_of_two(-(-hidden // 8))
    return Tile(tile.block_m, block_h, tile.num_warps)


def routing_tokens(topk: int, num_tokens: int, interpreted: bool) -> int:
    """Tokens of one routing program."""
    if interpreted:
        return power_of_two(max(num_tokens, 1))
    return min(max(ROUTING_ELEMENTS // power_of_two(topk), 1), power_of_two(max(num_tokens, 1)))
