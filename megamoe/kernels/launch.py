"""One way to start a kernel: compiled for CUDA tensors, interpreted for CPU tensors, or only recorded."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """A kernel start: the jitted function, programs, runtime arguments, compile-time constants, warps."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


_RECORDING: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar(
    "megamoe_recording", default=None
)


@contextlib.contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect the launches made inside instead of starting them, with the tiles that CUDA would get.

    For compiling ahead of time on a machine without a GPU: tensors may be on the CPU.
    """
    launches: list[Launch] = []
    token = _RECORDING.set(launches)
    try:
        yield launches
    finally:
        _RECORDING.reset(token)


def is_interpreted(device: torch.device) -> bool:
    """True where `launch` runs the kernel's Python function with NumPy."""
    return device.type == "cpu" and _RECORDING.get() is None


def launch(
    kernel: Any,
    grid: int,
    device: torch.device,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
) -> None:
    """Start `kernel` on a one-dimensional grid.

    `enable_fp_fusion=False` forbids the compiler to contract a product and a sum into an fma: where the
    arithmetic wants an fma it says so with `tl.fma`. This is part of the byte contract, not a tuning
    option, and is therefore set here for every kernel.
    """
    recording = _RECORDING.get()
    if recording is not None:
        recording.append(Launch(kernel, grid, args, constants, num_warps))
        return
    if is_interpreted(device):
        from megamoe.kernels.interpreter import interpret

        interpret(kernel, (grid,), args, constants)
        return
    with torch.cuda.device(device):
        kernel[(grid,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)
