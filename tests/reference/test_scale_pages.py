"""Scale pages: the worked table, bijection with declared padding, and writes that leave padding alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.scale_pages import (
    page_padding_mask,
    page_row_of_token,
    page_rows,
    read_scale_pages,
    required_rows,
    token_of_page_row,
    write_scale_pages,
)

BLOCK_MS = [16, 32, 64, 96, 128, 192, 240]
# NUMERICS 4.5: token -> row for each of BLOCK_MS.
WORKED = {
    15: [60, 60, 60, 60, 60, 60, 60],
    16: [128, 64, 64, 64, 64, 64, 64],
    31: [188, 124, 124, 124, 124, 124, 124],
    32: [256, 128, 1, 1, 1, 1, 1],
    63: [444, 252, 125, 125, 125, 125, 125],
    64: [512, 256, 128, 2, 2, 2, 2],
    95: [700, 380, 252, 126, 126, 126, 126],
    96: [768, 384, 129, 128, 3, 3, 3],
    127: [956, 508, 253, 252, 127, 127, 127],
    128: [1024, 512, 256, 129, 128, 128, 128],
    160: [1280, 640, 257, 130, 129, 129, 129],
    191: [1468, 764, 381, 254, 253, 253, 253],
    192: [1536, 768, 384, 256, 130, 256, 130],
    193: [1540, 772, 388, 260, 134, 260, 134],
    224: [1792, 896, 385, 257, 131, 257, 131],
    239: [1852, 956, 445, 317, 191, 317, 191],
    240: [1920, 960, 449, 321, 195, 321, 256],
    384: [3072, 1536, 768, 512, 384, 512, 448],
}


@pytest.mark.parametrize(("column", "block_m"), list(enumerate(BLOCK_MS)))
def test_worked_rows(column: int, block_m: int) -> None:
    tokens = torch.tensor(list(WORKED))
    assert page_row_of_token(tokens, block_m).tolist() == [rows[column] for rows in WORKED.values()]
    assert page_row_of_token(torch.arange(11), block_m).tolist() == list(range(0, 44, 4))


def test_block_m_mismatch() -> None:
    """CASES 18."""
    row = lambda token, block_m: page_row_of_token(torch.tensor(token), block_m).item()  # noqa: E731
    assert [row(16, b) for b in (16, 32, 64)] == [128, 64, 64]
    assert [row(32, b) for b in (16, 32, 64)] == [256, 128, 1]
    assert [row(100, b) for b in (16, 32, 64, 96, 128, 192)] == [784, 400, 145, 144, 19, 19]
    assert [row(192, b) for b in (128, 192)] == [130, 256]
    assert [required_rows(200, b) for b in (16, 32, 64, 96, 128, 192)] == [1664, 896, 512, 384, 256, 512]


@settings(max_examples=60, deadline=None)
@given(block_m=st.integers(1, 400), num_tokens=st.integers(0, 700))
def test_forward_and_inverse_are_one_bijection(block_m: int, num_tokens: int) -> None:
    rows = page_row_of_token(torch.arange(num_tokens), block_m)
    total = required_rows(num_tokens, block_m)
    assert total == (-(-num_tokens // block_m)) * page_rows(block_m)
    assert rows.unique().numel() == num_tokens
    assert num_tokens == 0 or (int(rows.min()) >= 0 and int(rows.max()) < total)
    inverse = token_of_page_row(torch.arange(total), block_m, num_tokens)
    assert torch.equal(inverse[rows], torch.arange(num_tokens))
    padding = page_padding_mask(num_tokens, block_m)
    assert torch.equal(padding, inverse < 0)
    assert int((~padding).sum()) == num_tokens


@pytest.mark.parametrize(
    ("block_m", "live"),
    [
        (16, lambda r: r % 4 == 0 and r < 64),
        (32, lambda r: r % 4 == 0),
        (64, lambda r: r % 4 in (0, 1)),
        (96, lambda r: r % 4 in (0, 1, 2)),
        (128, lambda r: True),
        (192, lambda r: r < 128 or r % 4 in (0, 1)),
        (240, lambda r: r not in range(195, 256, 4)),
    ],
)
def test_rows_never_written(block_m: int, live) -> None:
    """NUMERICS 4.4, for a full page."""
    expected = [not live(r) for r in range(page_rows(block_m))]
    assert page_padding_mask(block_m, block_m).tolist() == expected


def test_write_leaves_padding_and_read_inverts() -> None:
    words = torch.arange(1, 67 * 3 + 1, dtype=torch.int32).view(67, 3)
    storage = torch.full((3, 300), -7, dtype=torch.int32)  # MN-major, as the symmetric buffer has it
    pages = storage.t()
    write_scale_pages(words, 64, pages)
    assert torch.equal(read_scale_pages(pages, 64, 67), words)
    padding = page_padding_mask(67, 64, 300)
    assert bool((pages[padding] == -7).all())
    assert int(padding.sum()) == 300 - 67


@pytest.mark.parametrize("shape", [(127, 3), (128, 2), (128,)])
def test_refuses_pages_that_do_not_fit(shape: tuple[int, ...]) -> None:
    pages = torch.full(shape, -7, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages: expected \[>= 128, 3\]"):
        write_scale_pages(torch.zeros(5, 3, dtype=torch.int32), 64, pages)
    assert bool((pages == -7).all())


@pytest.mark.parametrize("block_m", [0, -16])
def test_refuses_block_m(block_m: int) -> None:
    with pytest.raises(ValueError, match="block_m: expected a positive"):
        page_rows(block_m)
