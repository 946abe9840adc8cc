"""Access to the GPU's approximate functions, built from functions.cu when first used. Not a test module."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("functions.cu")
OPERATIONS = (
    re.search(r"enum Operation \{(.*?)\}", _SOURCE.read_text(), re.S)[1].replace(",", " ").lower().split()
)


@cache
def _library() -> ctypes.CDLL:
    folder = tempfile.mkdtemp(prefix="megamoe-hardware-")
    target = Path(folder, "functions.so")
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    suffix = "a" if capability in {"90", "100"} else ""
    subprocess.run(
        [
            "nvcc",
            "-O3",
            f"-arch=sm_{capability}{suffix}",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            str(_SOURCE),
            "-o",
            str(target),
        ],
        check=True,
    )
    library = ctypes.CDLL(str(target))
    library.run.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def evaluate(operation: str, values: Tensor) -> Tensor:
    """The device's own result for each float32 value of a contiguous CUDA tensor."""
    out = torch.empty_like(values)
    torch.cuda.synchronize()
    code = _library().run(OPERATIONS.index(operation), values.data_ptr(), out.data_ptr(), values.numel())
    if code:
        raise RuntimeError(f"{operation}: CUDA error {code}")
    return out


def all_floats(chunk: int = 1 << 28):
    """Every float32 bit pattern, in CUDA tensors of ``chunk`` values."""
    for start in range(0, 1 << 32, chunk):
        bits = torch.arange(start, start + chunk, device="cuda")
        yield torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
