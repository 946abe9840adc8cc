"""Compares the references' results on this GPU with those on the CPU, bit for bit: all MMA families and
functions.

Exit status 1 if any result differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "reference")]
from check_functions import FUNCTIONS, sample  # noqa: E402
from mma_inputs import CATEGORIES, draw  # noqa: E402

from reference.tensor_core import FAMILIES, OPERAND_FORMATS, matmul, mma_step  # noqa: E402


def as_codes(codes: torch.Tensor, name: str) -> torch.Tensor:
    if OPERAND_FORMATS[name].bits == 16:
        return torch.where(codes >= 1 << 15, codes - (1 << 16), codes).to(torch.int16)
    return codes.to(torch.uint8)


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    return int((left.cpu().view(torch.int32) != right.cpu().view(torch.int32)).sum())


def compare_family(name: str, generator: torch.Generator) -> tuple[int, int]:
    """(results, differing ones) over all categories, for the loop and for one literal step."""
    row = FAMILIES[name]
    compared = bad = 0
    for category in CATEGORIES:
        a_name, b_name = row.operand_formats[0], row.operand_formats[-1]
        a, b, c = draw(category, a_name, b_name, 2, 65, 130, 4 * row.k_step, generator)
        a, b = as_codes(a, a_name), as_codes(b, b_name)
        arguments = {"a_format": a_name, "b_format": b_name}
        scales: dict[str, torch.Tensor] = {}
        if row.scale_group:
            for side, operand in (("a_scales", a), ("b_scales", b)):
                shape = (*operand.shape[:-1], operand.shape[-1] // row.scale_group)
                scales[side] = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        on_gpu = {side: codes.cuda() for side, codes in scales.items()}
        cpu = matmul(row, a, b, accumulator=c, **arguments, **scales)
        gpu = matmul(row, a.cuda(), b.cuda(), accumulator=c.cuda(), **arguments, **on_gpu)
        first = slice(0, row.k_step)
        part = {side: codes[..., : row.k_step // (row.scale_group or 1)] for side, codes in on_gpu.items()}
        on_cpu = {side: codes.cpu() for side, codes in part.items()}
        whole = matmul(row, a[..., first], b[..., first], accumulator=c, **arguments, **on_cpu)
        step = mma_step(row, a[..., first].cuda(), b[..., first].cuda(), c.cuda(), **arguments, **part)
        compared += cpu.numel() + step.numel()
        bad += differing(cpu, gpu) + differing(whole, step)
    return compared, bad


def main() -> int:
    failed = 0
    generator = torch.Generator().manual_seed(0)
    for name in FAMILIES:
        compared, bad = compare_family(name, generator)
        print(f"{name}: {compared} results on both devices, {bad} differ", flush=True)
        failed |= bad
    values = sample()
    for name, model in FUNCTIONS.items():
        bad = differing(model(values), model(values.cpu()))
        print(f"{name}: {values.numel()} results on both devices, {bad} differ", flush=True)
        failed |= bad
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
