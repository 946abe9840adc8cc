"""Which backend serves a device: the built-in ones by architecture, third-party ones by entry point.

A package registers a backend with

    [project.entry-points."megamoe.backends"]
    my_backend = "my_package.module:MyBackend"

where MyBackend is a subclass of DeepGemmMegaMoEBackend, constructed without arguments. It is found by its
name, and is asked (``supports_device``) for devices that no built-in backend serves.
"""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Any

import torch

from megamoe.backends.base import DeepGemmMegaMoEBackend
from megamoe.backends.deep_gemm_bf16 import DeepGemmBf16MegaMoEBackend
from megamoe.backends.deep_gemm_nvfp4 import DeepGemmFp4MegaMoEBackend, DeepGemmNvfp4MegaMoEBackend
from megamoe.backends.deep_gemm_sm90 import DeepGemmSm90MegaMoEBackend
from megamoe.backends.deep_gemm_sm100 import DeepGemmSm100Fp8MegaMoEBackend, DeepGemmSm100MegaMoEBackend
from megamoe.backends.emulated import EmulatedMegaMoEBackend

ENTRY_POINT_GROUP = "megamoe.backends"

# In order of preference: the first that serves the device and the MMA type is taken.
BUILT_IN: tuple[type[DeepGemmMegaMoEBackend], ...] = (
    DeepGemmSm100MegaMoEBackend,
    DeepGemmNvfp4MegaMoEBackend,
    DeepGemmFp4MegaMoEBackend,
    DeepGemmBf16MegaMoEBackend,
    DeepGemmSm100Fp8MegaMoEBackend,
    DeepGemmSm90MegaMoEBackend,
)


def describe_architecture(device: torch.device) -> str:
    """The device's architecture in words, for messages: "sm_80 (NVIDIA A100)", "gfx942", "cpu"."""
    if device.type != "cuda":
        return device.type
    try:
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName)
        major, minor = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:
        return f"cuda, which this machine does not have ({str(error).splitlines()[0]})"
    try:
        return f"sm_{major}{minor} ({torch.cuda.get_device_name(device)})"
    except (AssertionError, RuntimeError):
        return f"sm_{major}{minor}"


def registered_backends() -> dict[str, metadata.EntryPoint]:
    """Third-party entry points by name. A name that two distributions claim is served by the first, with a
    warning.
    """
    found: dict[str, metadata.EntryPoint] = {}
    for entry in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        if entry.name in found and entry.value != found[entry.name].value:
            warnings.warn(
                f"two packages register the MegaMoE backend {entry.name!r}: "
                f"{found[entry.name].value} is used, {entry.value} is not",
                RuntimeWarning,
                stacklevel=2,
            )
        found.setdefault(entry.name, entry)
    return found


def load_backend(entry: metadata.EntryPoint) -> type[DeepGemmMegaMoEBackend]:
    """The class behind an entry point. RuntimeError naming entry and reason if it is none or fails to
    load.
    """
    origin = f"the MegaMoE backend {entry.name!r} ({entry.value})"
    try:
        loaded: Any = entry.load()
    except Exception as error:
        raise RuntimeError(f"{origin} could not be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, DeepGemmMegaMoEBackend)):
        raise RuntimeError(f"{origin} is not a subclass of DeepGemmMegaMoEBackend: {loaded!r}")
    return loaded


def backend_class(name: str) -> type[DeepGemmMegaMoEBackend]:
    """A built-in or registered backend by its name; ValueError, listing the names, if there is none."""
    built_in: tuple[type[DeepGemmMegaMoEBackend], ...] = (*BUILT_IN, EmulatedMegaMoEBackend)
    known = {c.name: c for c in built_in}
    if name in known:
        return known[name]
    entries = registered_backends()
    if name in entries:
        return load_backend(entries[name])
    raise ValueError(
        f"no MegaMoE backend is called {name!r}; there are {', '.join(sorted({*known, *entries}))}"
    )


def _third_party(device: torch.device, mma_type: str | None) -> type[DeepGemmMegaMoEBackend] | None:
    """The first registered backend that serves the device. One that does not load is reported and passed
    over.
    """
    for entry in registered_backends().values():
        try:
            candidate = load_backend(entry)
        except RuntimeError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
            continue
        if candidate.supports_device(device) and mma_type in (None, candidate.mma_type):
            return candidate
    return None


def get_deep_gemm_mega_moe_backend(
    device: torch.device | str | int,
    hidden_size: int,
    intermediate_size: int,
    *,
    mma_type: str | None = None,
    name: str | None = None,
) -> DeepGemmMegaMoEBackend:
    """A backend that is ready to run on ``device``: architecture, sizes and library have been checked, in
    this order.

    Without ``mma_type`` the architecture's FP8 backend: fp8xfp4 on SM100, fp8xfp8 on SM90. ``name`` selects a
    backend by name instead, the emulated and registered ones included; its architecture is still checked.

    NotImplementedError, naming the architecture, if no backend serves the device; ValueError unless both
    sizes are multiples of 128 and of what the backend's symmetric buffer demands; RuntimeError if deep_gemm
    is missing or lacks a function that the backend calls.
    """
    device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    chosen: type[DeepGemmMegaMoEBackend] | None
    if name is not None:
        chosen = backend_class(name)
        if not chosen.supports_device(device):
            chosen = None
    else:
        fitting = (c for c in BUILT_IN if c.supports_device(device) and mma_type in (None, c.mma_type))
        chosen = next(fitting, None) or _third_party(device, mma_type)
    if chosen is None:
        wanted = name or (f"{mma_type} MegaMoE" if mma_type else "MegaMoE")
        offers = ", ".join(f"{c.mma_type} on {c.architecture}" for c in BUILT_IN)
        raise NotImplementedError(
            f"no DeepGEMM backend runs {wanted} on {describe_architecture(device)}: there are {offers}. "
            "EmulatedMegaMoEBackend computes the same bytes on any device, slowly"
        )
    backend = chosen(mma_type) if mma_type and issubclass(chosen, EmulatedMegaMoEBackend) else chosen()
    if mma_type not in (None, backend.mma_type):
        raise ValueError(f"mma_type: the {backend.name} backend runs {backend.mma_type}, got {mma_type!r}")
    backend.check_sizes(hidden_size, intermediate_size)
    backend.check_library()
    return backend
