"""Scale pages of shared experts: where the scale word of token t lies, and which rows hold no token.

The consumer reads tiles of ``block_m`` tokens. Each has a page of ``align(block_m, 128)`` rows, in which
every 128 rows are transposed from [4, 32] to [32, 4] for the tensor core's scale copy (UTCCP):

    tile = t // block_m, m = t % block_m
    row  = tile * page + (m // 128) * 128 + (m % 32) * 4 + (m % 128) // 32

Easy to get wrong: the page is ``align(block_m, 128)`` rows, not ``block_m``; the map depends on this launch's
block_m, and only the first min(block_m, 32) tokens agree for all of them; rows without a token keep what they
held.

Source: NUMERICS 4.1 to 4.5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_rows(block_m: int) -> int:
    """Rows of one page: block_m rounded up to a multiple of 128. ValueError unless block_m is positive."""
    if block_m <= 0:
        raise ValueError(f"block_m: expected a positive tile height, got {block_m}")
    return -(-block_m // 128) * 128


def required_rows(num_tokens: int, block_m: int) -> int:
    """Rows that a buffer needs for num_tokens tokens: whole pages."""
    return -(-num_tokens // block_m) * page_rows(block_m) if num_tokens else 0


def page_row_of_token(tokens: Tensor, block_m: int) -> Tensor:
    """Forward map: token indices (integer tensor, any shape) -> rows, int64, same shape."""
    tokens = tokens.to(torch.int64)
    tile, m = tokens // block_m, tokens % block_m
    return tile * page_rows(block_m) + (m // 128) * 128 + (m % 32) * 4 + (m % 128) // 32


def token_of_page_row(rows: Tensor, block_m: int, num_tokens: int) -> Tensor:
    """Inverse map: row indices (integer tensor, any shape) -> tokens, int64, same shape; -1 for padding."""
    rows = rows.to(torch.int64)
    page = page_rows(block_m)
    in_page, in_square = rows % page, rows % 128
    m = (in_page // 128) * 128 + (in_square % 4) * 32 + in_square // 4
    tokens = (rows // page) * block_m + m
    return torch.where((m < block_m) & (tokens < num_tokens), tokens, -torch.ones_like(tokens))


def page_padding_mask(num_tokens: int, block_m: int, num_rows: int | None = None) -> Tensor:
    """bool [num_rows]: True where no token's scales are stored. num_rows: by default the required rows."""
    num_rows = required_rows(num_tokens, block_m) if num_rows is None else num_rows
    return token_of_page_row(torch.arange(num_rows), block_m, num_tokens) < 0


def write_scale_pages(words: Tensor, block_m: int, pages: Tensor) -> None:
    """Writes words int32 [T, W] into pages int32 [rows, W] (any strides); rows without a token are left
    alone.

    ValueError for a page tensor with other columns or fewer than the required rows.
    Source: NUMERICS 4.3, 4.4.
    """
    num_tokens, num_words = words.shape
    needed = required_rows(num_tokens, block_m)
    if pages.dim() != 2 or pages.shape[1] != num_words or pages.shape[0] < needed:
        raise ValueError(f"pages: expected [>= {needed}, {num_words}], got {list(pages.shape)}")
    pages[page_row_of_token(torch.arange(num_tokens, device=words.device), block_m)] = words


def read_scale_pages(pages: Tensor, block_m: int, num_tokens: int) -> Tensor:
    """The inverse of write_scale_pages: int32 [rows, W] -> [num_tokens, W]."""
    return pages[page_row_of_token(torch.arange(num_tokens, device=pages.device), block_m)]
