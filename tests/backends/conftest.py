from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_deep_gemm import make_module


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A complete deep_gemm, installed as the module of that name."""
    module = make_module()
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


@pytest.fixture
def on_architecture(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let torch report a compute capability, for every device index."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a test device")
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend
