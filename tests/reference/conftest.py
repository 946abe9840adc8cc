"""Fixtures of the reference tests."""

from __future__ import annotations

import zlib

import pytest
import torch


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator seeded from the test's node id, so that any order and any worker draws the same."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))
