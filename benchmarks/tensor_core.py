"""Speed of the tensor-core models: python benchmarks/tensor_core.py [--device cuda] [--family hopper_fp8]
[--repeat 5].

Multiply-accumulates a second of ``reference.tensor_core.matmul``, beside the literal ``mma_step`` chain and
an exact float64 matrix product on the same device. Nothing is reported for a family whose fast loop does not
equal the chain on the benchmark's own operands.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference.tensor_core import FAMILIES, OPERAND_FORMATS, MmaFamily, matmul, mma_step

SHAPES = {
    "cpu": ((8, 4096, 1024), (64, 1024, 1024), (256, 1024, 512)),
    "cuda": ((64, 4096, 7168), (2048, 4096, 4096)),
}
TARGETS = {("hopper_fp8", "cpu"): 150e6, ("hopper_fp8", "cuda"): 50e9}  # multiply-accumulates a second


def operands(row: MmaFamily, m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Random finite codes with exponents as normal data has them, and unit scales."""
    name = row.operand_formats[0]
    fmt = OPERAND_FORMATS[name]
    generator = torch.Generator(device).manual_seed(0)
    codes = []
    for rows in (m, n):
        values = torch.randn(rows, k, generator=generator, device=device)
        if name == "bf16":
            codes.append(values.bfloat16())
        else:
            magnitude = (values.abs() * (fmt.max_code / 4)).long().clamp(max=fmt.max_code)
            codes.append((magnitude | (values < 0).long() << (fmt.bits - 1)).to(torch.uint8))
    arguments: dict[str, Any] = {"a_format": name, "b_format": name}
    if row.scale_group:
        one = 127 if row.scale_formats[0] == "ue8m0" else 0x38
        for side, rows in (("a_scales", m), ("b_scales", n)):
            arguments[side] = torch.full((rows, k // row.scale_group), one, dtype=torch.uint8, device=device)
    return codes[0], codes[1], arguments


def rate(macs: int, device: str, repeat: int, call: Callable[[], object]) -> float:
    """Median multiply-accumulates a second, one warm-up call first."""
    call()
    seconds = []
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return macs / statistics.median(seconds)


def part_of(
    row: MmaFamily, arguments: dict[str, Any], rows: slice, columns: slice, k: slice
) -> dict[str, Any]:
    """The keyword arguments that belong to a part of the operands."""
    if row.scale_group is None:
        return arguments
    groups = slice(k.start // row.scale_group, k.stop // row.scale_group)
    scales = {
        "a_scales": arguments["a_scales"][rows, groups],
        "b_scales": arguments["b_scales"][columns, groups],
    }
    return arguments | scales


def equals_chain(row: MmaFamily, a: Tensor, b: Tensor, arguments: dict[str, Any]) -> bool:
    """The fast loop against literal steps on a corner of the benchmark's operands."""
    rows, columns, depth = slice(0, 8), slice(0, 24), 4 * row.k_step
    whole = slice(0, depth)
    fast = matmul(row, a[rows, whole], b[columns, whole], **part_of(row, arguments, rows, columns, whole))
    c = torch.zeros_like(fast)
    for start in range(0, depth, row.k_step):
        k = slice(start, start + row.k_step)
        c = mma_step(row, a[rows, k], b[columns, k], c, **part_of(row, arguments, rows, columns, k))
    return torch.equal(fast.view(torch.int32), c.view(torch.int32))


def figures(row: MmaFamily, m: int, n: int, k: int, device: str, repeat: int) -> str | None:
    """One line of results, None if the fast loop is wrong."""
    a, b, arguments = operands(row, m, n, k, device)
    if not equals_chain(row, a, b, arguments):
        return None
    fast = rate(m * n * k, device, repeat, lambda: matmul(row, a, b, **arguments))
    rows, columns, depth = slice(0, 8), slice(0, 1024), slice(0, row.k_step)
    one = part_of(row, arguments, rows, columns, depth)
    small = (a[rows, depth], b[columns, depth])
    step = rate(small[0].numel() * len(small[1]), device, repeat, lambda: mma_step(row, *small, **one))
    left, right = torch.randn(m, k, device=device).double(), torch.randn(n, k, device=device).double()
    exact = rate(m * n * k, device, repeat, lambda: left @ right.T)
    target = TARGETS.get((row.name, device))
    goal = f", {fast / target:.2f} times the target of {target / 1e6:.0f}" if target else ""
    return (
        f"{row.name} m {m} n {n} k {k}: {fast / 1e6:.0f}, {fast / step:.0f} times the literal step, "
        f"1/{exact / fast:.0f} of a float64 product{goal}"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES))
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    device = options.device
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}; million MAC/s, median of {options.repeat}")
    failed = False
    for name in options.family or sorted(FAMILIES):
        for m, n, k in SHAPES[device]:
            line = figures(FAMILIES[name], m, n, k, device, options.repeat)
            failed |= line is None
            print(line or f"{name}: the fast loop differs from the chain of steps, no figure", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
