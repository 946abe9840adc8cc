"""One way to start a kernel: compiled for CUDA tensors, interpreted for CPU tensors."""

from typing import Any

import torch


def is_interpreted(device: torch.device) -> bool:
    """True where `launch` runs the kernel's Python function with NumPy."""
    return device.type == "cpu"


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
    if is_interpreted(device):
        from megamoe.kernels.interpreter import interpret

        interpret(kernel, (grid,), args, constants)
        return
    with torch.cuda.device(device):
        kernel[(grid,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)
