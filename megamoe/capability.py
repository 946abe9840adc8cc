"""What this machine can run. ``probe(name)`` never raises: it answers with a flag and a reason.

Known names: ``torch``, ``triton``, ``cuda``, ``cuda2``, ``cuda4``, ``cuda8`` (as many devices), ``sm90``,
``sm100``, ``matplotlib``, ``deep_gemm`` and ``deep_gemm.<attribute>`` for one of its functions. Features are
probed, versions never compared.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple


class Probe(NamedTuple):
    """ok: the capability is there. reason: why it is or is not, in a few words."""

    ok: bool
    reason: str


NAMES = ("torch", "triton", "cuda", "cuda2", "sm90", "sm100", "deep_gemm", "matplotlib")
DEEP_GEMM_FUNCTIONS = (
    "mega_moe_pre_dispatch",
    "mega_moe_pre_dispatch_sm90",
    "fp8_mega_moe",
    "fp8_fp4_mega_moe",
    "bf16_mega_moe",
    "fp4_fp4_mega_moe",
    "nvfp4_mega_moe",
    "bf16_mega_gate",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "get_symm_buffer_for_mega_moe",
)


@functools.cache
def probe(name: str) -> Probe:
    """Whether this process can use ``name``. Raises ValueError for a name that is not in the vocabulary."""
    if name in _PROBES:
        return _PROBES[name]()
    if name.startswith("cuda") and name[4:].isdigit():
        return _cuda_devices(int(name[4:]))
    if name.startswith("sm") and name[2:].isdigit():
        return _architecture(int(name[2:]))
    if name.startswith("deep_gemm.") and name.count(".") == 1:
        return _deep_gemm_function(name.split(".")[1])
    raise ValueError(f"unknown capability {name!r}: expected {', '.join(NAMES)} or deep_gemm.<function>")


def all_names() -> tuple[str, ...]:
    """The capabilities that ``megamoe env`` lists."""
    return (*NAMES, *(f"deep_gemm.{function}" for function in DEEP_GEMM_FUNCTIONS))


def _module(name: str) -> Probe:
    if importlib.util.find_spec(name) is None:
        return Probe(False, "not installed")
    try:
        module: Any = importlib.import_module(name)
    except Exception as error:  # a broken installation is an answer, not an accident of ours
        return Probe(False, f"import fails: {type(error).__name__}: {_first_line(error)}")
    return Probe(True, str(getattr(module, "__version__", "installed")))


def _triton() -> Probe:
    return _module("triton")


def _cuda() -> Probe:
    import torch

    if torch.version.cuda is None:
        return Probe(False, f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return Probe(False, "torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    return Probe(True, f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}")


def _cuda_devices(count: int) -> Probe:
    cuda = probe("cuda")
    if not cuda.ok:
        return cuda
    import torch

    return Probe(torch.cuda.device_count() >= count, f"{torch.cuda.device_count()} CUDA device(s)")


def _architecture(number: int) -> Probe:
    cuda = probe("cuda")
    if not cuda.ok:
        return cuda
    import torch

    major, minor = torch.cuda.get_device_capability()
    return Probe(major == number // 10, f"the device is sm_{major}{minor}")


def _deep_gemm() -> Probe:
    if importlib.util.find_spec("deep_gemm") is None:
        return Probe(False, "not installed")
    cuda = probe("cuda")
    if not cuda.ok:  # importing it without a driver aborts in some builds
        return Probe(False, f"needs CUDA: {cuda.reason}")
    return _module("deep_gemm")


def _deep_gemm_function(function: str) -> Probe:
    library = probe("deep_gemm")
    if not library.ok:
        return library
    module: Any = importlib.import_module("deep_gemm")
    if callable(getattr(module, function, None)):
        return Probe(True, f"deep_gemm {library.reason}")
    return Probe(False, f"deep_gemm {library.reason} has no {function}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


_PROBES = {
    "torch": lambda: _module("torch"),
    "triton": _triton,
    "cuda": _cuda,
    "deep_gemm": _deep_gemm,
    "matplotlib": lambda: _module("matplotlib"),
}
