from __future__ import annotations

from collections.abc import Iterator

import pytest

from megamoe.experts import forget_buffers


@pytest.fixture(autouse=True)
def fresh_buffers() -> Iterator[None]:
    """No symmetric buffer outlives a test."""
    yield
    forget_buffers()
