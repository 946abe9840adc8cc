from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # faulty.py, by name, as somebody's own module


@pytest.fixture
def in_child_processes(monkeypatch):
    """Let child processes find the modules beside these tests."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
