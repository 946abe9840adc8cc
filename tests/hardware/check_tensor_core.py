"""Compares the Hopper rows of reference.tensor_core with wgmma.

A Triton ``tl.dot`` keeps the whole K loop in the tensor core (its PTX is checked for that), with an
accumulator
from memory. Prints, for operands, K and category, how many results were compared and how many differ.
Exit status 1 if any result differs.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "reference")]
from mma_inputs import CATEGORIES, draw  # noqa: E402

from reference import tensor_core  # noqa: E402

DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
OPERANDS = (
    (
        "hopper_fp8",
        "e4m3",
        "e4m3",
        (32, 64, 128, 256),
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3",
    ),
    (
        "hopper_bf16",
        "bf16",
        "bf16",
        (16, 32, 64, 128),
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    ),
    ("hopper_fp8", "e5m2", "e5m2", (32, 128), "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e5m2"),
    ("hopper_fp8", "e4m3", "e5m2", (32, 128), "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2"),
    ("hopper_bf16", "fp16", "fp16", (16, 64), "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"),
)
TILE = 64


@triton.jit
def dot_tiles(a_ptr, b_ptr, c_ptr, out_ptr, K: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    rows, k = tl.arange(0, TILE), tl.arange(0, K)
    a = tl.load(a_ptr + tile * TILE * K + rows[:, None] * K + k[None, :])
    b = tl.load(b_ptr + tile * TILE * K + k[:, None] + rows[None, :] * K)
    place = tile * TILE * TILE + rows[:, None] * TILE + rows[None, :]
    tl.store(out_ptr + place, tl.dot(a, b, tl.load(c_ptr + place)))


def typed(codes: torch.Tensor, name: str) -> torch.Tensor:
    if DTYPES[name].itemsize == 1:
        return codes.to(torch.uint8).view(DTYPES[name])
    return torch.where(codes >= 1 << 15, codes - (1 << 16), codes).to(torch.int16).view(DTYPES[name])


def hardware_dot(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, str]:
    """[tiles, 64, K] x [tiles, 64, K] + [tiles, 64, 64] on the tensor core, and the kernel's PTX."""
    out = torch.empty_like(c)
    kernel = dot_tiles[(a.shape[0],)](a, b, c, out, K=a.shape[-1], TILE=TILE, num_warps=4)
    return out, kernel.asm["ptx"]


def hexes(tensor: torch.Tensor) -> str:
    width = 2 * tensor.element_size()
    ints = (
        tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
        .flatten()
        .tolist()
    )
    return " ".join(f"{v & (1 << 4 * width) - 1:0{width}x}" for v in ints)


def report(a, b, c, expected, actual, limit: int) -> None:
    """The first differing results with their operands: those places where a product is not zero."""
    places = (expected.view(torch.int32) != actual.view(torch.int32)).nonzero()[:limit]
    for t, i, j in places.tolist():
        kept = ((a[t, i].float() != 0) & (b[t, j].float() != 0)).nonzero().flatten()[:32]
        zeros = a.shape[-1] - len(kept)
        results = f"model {hexes(expected[t, i, j])} hardware {hexes(actual[t, i, j])}"
        print(
            f"    c {hexes(c[t, i, j])} {results} zeros {zeros} "
            f"k {kept.tolist() if a.shape[-1] > 32 else ''} a {hexes(a[t, i, kept])} b {hexes(b[t, j, kept])}"
        )


def special_cases() -> None:
    """Directed questions, answered by the hardware alone."""

    def ask(name: str, a_values, b_values, c_bits: int, family: str) -> None:
        k = 32 if DTYPES[name].itemsize == 1 else 16
        a = torch.zeros(1, TILE, k, dtype=torch.float32, device="cuda")
        b = torch.zeros(1, TILE, k, dtype=torch.float32, device="cuda")
        a[0, 0, : len(a_values)] = torch.tensor(a_values, device="cuda")
        b[0, 0, : len(b_values)] = torch.tensor(b_values, device="cuda")
        a, b = a.to(DTYPES[name]), b.to(DTYPES[name])
        c = torch.zeros(1, TILE, TILE, device="cuda")
        c[0, 0, 0] = torch.tensor([c_bits - (1 << 32) * (c_bits >> 31)], dtype=torch.int32).view(
            torch.float32
        )[0]
        out = hexes(hardware_dot(a, b, c)[0][0, 0, 0])
        model = hexes(tensor_core.matmul(family, a, b, accumulator=c)[0, 0, 0])
        verdict = "" if out == model else "DIFFERS"
        print(f"  {name} a {a_values} b {b_values} c {c_bits:08x} -> hardware {out} model {model} {verdict}")

    for c_bits in (0x30800000, 0x30800001, 0x00000001, 0x00012345, 0x80000000, 0x7F7FFFFF, 0x3F8FFFFF):
        ask("e4m3", [0.0], [448.0], c_bits, "hopper_fp8")
        ask("bf16", [0.0], [1.0], c_bits, "hopper_bf16")
    ask("bf16", [0.0], [2.0**120], 0x0D800001, "hopper_bf16")
    ask("bf16", [2.0**127], [2.0**127], 0, "hopper_bf16")
    ask("bf16", [2.0**127, 2.0**127, 1.0], [2.0**127, -(2.0**127), 1.0], 0, "hopper_bf16")
    ask("bf16", [2.0**120], [2.0**7], 0x7F7FFFFF, "hopper_bf16")
    ask("bf16", [2.0**120], [2.0**7 * 1.9921875], 0x7F000000, "hopper_bf16")
    ask("bf16", [2.0**100], [1.0], 0x7F7FFFFF, "hopper_bf16")
    ask("bf16", [-0.0] * 16, [1.0] * 16, 0x80000000, "hopper_bf16")
    ask("bf16", [1.0, -1.0], [1.0, 1.0], 0x80000000, "hopper_bf16")
    for c_bits in (0x7FC00001, 0xFFC00001, 0x7F800000, 0xFF800000):
        ask("e4m3", [1.0], [1.0], c_bits, "hopper_fp8")
        ask("bf16", [1.0], [1.0], c_bits, "hopper_bf16")
    ask("bf16", [float("inf")], [0.0], 0, "hopper_bf16")
    ask("bf16", [float("inf")], [1.0], 0xFF800000, "hopper_bf16")
    ask("bf16", [float("inf"), float("inf")], [1.0, -1.0], 0, "hopper_bf16")
    print("exponent of zero terms: 2**-149 - 2**-(149+j) rounds to zero while the second term is seen")
    for j in range(1, 40):
        ask("bf16", [2.0**-23, -(2.0 ** -(23 + j))], [2.0**-126] * 2, 0, "hopper_bf16")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument(
        "--record", type=Path, help="keep a few results of each category in this safetensors file"
    )
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    generator = torch.Generator("cuda").manual_seed(options.seed)
    totals: dict[str, list[int]] = {}
    recorded: dict[str, torch.Tensor] = {}
    start = time.time()
    for family, a_name, b_name, lengths, instruction in OPERANDS:
        for k in lengths:
            line = []
            try:
                for category in CATEGORIES:
                    a, b, c = draw(category, a_name, b_name, options.tiles, TILE, TILE, k, generator)
                    a, b = typed(a, a_name), typed(b, b_name)
                    actual, ptx = hardware_dot(a, b, c)
                    seen = set(re.findall(r"wgmma\.mma_async\S+", ptx))
                    if (
                        seen != {instruction}
                        or ptx.count("wgmma.mma_async") != k // tensor_core.FAMILIES[family].k_step
                    ):
                        print(f"UNEXPECTED instructions {seen}, not {instruction}, or not one a step")
                        break
                    if k == lengths[1]:
                        keep = {"a": a[0, :16], "b": b[0, :8], "c": c[0, :16, :8], "out": actual[0, :16, :8]}
                        for part, tensor in keep.items():
                            raw = tensor.contiguous().view(
                                torch.uint8 if tensor.element_size() == 1 else torch.int16
                            )
                            recorded[f"{family}/{a_name}/{b_name}/{category}/{part}"] = raw.cpu()
                    expected = tensor_core.matmul(family, a, b, accumulator=c)
                    bad = int((expected.view(torch.int32) != actual.view(torch.int32)).sum())
                    total = totals.setdefault(f"{family} {a_name} {b_name}", [0, 0])
                    total[0] += c.numel()
                    total[1] += bad
                    line.append(f"{category} {bad}")
                    if bad:
                        print(f"  {family} {a_name}x{b_name} K {k} {category}: {bad} of {c.numel()} differ")
                        report(a, b, c, expected, actual, options.examples)
            except Exception as error:
                print("FAILED", family, a_name, b_name, k, repr(error)[:300])
            each = options.tiles * TILE * TILE
            print(
                f"{family} {a_name}x{b_name} K {k}, {each} a category, differing: {', '.join(line)}",
                flush=True,
            )
    print(f"{time.time() - start:.1f} s")
    if options.record:
        save_file(
            recorded, options.record, {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
        )
    try:
        special_cases()
    except Exception as error:
        print("FAILED special cases", repr(error)[:300])
    if options.speed:
        from reference import _tensor_core_fast as fast

        for block in (24, 25, 26, 27, 28):
            fast._GPU_BLOCK_PRODUCTS = 1 << block
            for m, n, k in ((2048, 4096, 4096), (64, 4096, 7168)):
                a = torch.randn(m, k, device="cuda").mul(40).clamp(-448, 448).to(torch.float8_e4m3fn)
                b = torch.randn(n, k, device="cuda").mul(40).clamp(-448, 448).to(torch.float8_e4m3fn)
                rates = []
                for _ in range(3):
                    torch.cuda.synchronize()
                    begin = time.time()
                    tensor_core.matmul("hopper_fp8", a, b)
                    torch.cuda.synchronize()
                    rates.append(m * n * k / (time.time() - begin) / 1e9)
                figures = [round(rate, 1) for rate in rates]
                print(f"SPEED hopper_fp8 m {m} n {n} k {k} block 2^{block}: {figures} G MAC/s", flush=True)
    for name, (compared, bad) in totals.items():
        print(f"TOTAL {name}: {compared} results compared, {bad} differ")
    return int(any(bad for _, bad in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
