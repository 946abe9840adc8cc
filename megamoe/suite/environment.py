"""Where this runs: versions, devices, capabilities. For `megamoe env`, reports and pytest's header."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from megamoe.capability import all_names, probe

PACKAGES = ("megamoe", "torch", "triton", "numpy", "safetensors", "sgl-deep-gemm")


def versions() -> dict[str, str]:
    """Installed versions; "not installed" where there is none."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> list[str]:
    """The machine's processor and every CUDA device."""
    found = [f"cpu: {platform.machine()}, {os.cpu_count()} cores"]
    if probe("cuda").ok:
        import torch

        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            size_gib = properties.total_memory / 2**30
            found.append(
                f"cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}, "
                f"{properties.multi_processor_count} SMs, {size_gib:.0f} GiB"
            )
    return found


def environment() -> dict[str, Any]:
    """Everything, as JSON."""
    capabilities = {name: dict(probe(name)._asdict()) for name in all_names()}
    return {"versions": versions(), "devices": devices(), "capabilities": capabilities}


def short_environment(device: str) -> dict[str, str]:
    """What a report's header says."""
    found = versions()
    name = probe("cuda").reason if device == "cuda" else f"cpu ({platform.machine()})"
    return {"device": name} | {
        package: found[package] for package in ("megamoe", "torch", "triton", "python")
    }
