"""How long it takes to explain a pair of 64 MB, on two cores.

    python benchmarks/explain.py [--megabytes 64] [--threads 2]

Prints one line a pair: what was planted, what was found, seconds for equal and for differing tensors, and
peak memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megamoe.explain import Report, explain
from reference.layouts import get_layout
from reference.staging import stage_fp8, stage_nvfp4


def rows_of(megabytes: int, row_bytes: int) -> int:
    return megabytes * (1 << 20) // row_bytes // 128 * 128


def staged(megabytes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """x of this size and its scales, and the hidden states they came from."""
    tokens = rows_of(megabytes, 7168)
    hidden = torch.randn(tokens, 7168).bfloat16()
    found = stage_fp8(hidden)
    return {"x": found.x.view(torch.float8_e4m3fn), "x_sf": found.x_sf}, {"hidden_states": hidden}


def wrong_arithmetic(megabytes: int) -> tuple[str, Callable[[bool], Report]]:
    """A launch's outputs under a scale rounded down, replayed from its inputs."""
    from dataclasses import replace

    from reference.staging import MXFP8

    expected, inputs = staged(megabytes)
    other = stage_fp8(inputs["hidden_states"], replace(MXFP8, scale_rounding="floor"))
    wrong = {"x": other.x.view(torch.float8_e4m3fn), "x_sf": other.x_sf}

    def run(equal: bool) -> Report:
        actual = {name: tensor.clone() for name, tensor in expected.items()} if equal else wrong
        return explain(
            actual, expected, op="prepare_megamoe_inputs", params={"recipe": "fp8_ue8m0_g32"}, inputs=inputs
        )

    return "scale_rounding_floor", run


def swapped_rows(megabytes: int) -> tuple[str, Callable[[bool], Report]]:
    tokens = rows_of(megabytes, 7168)
    expected = torch.randint(0, 256, (tokens, 7168), dtype=torch.uint8)
    wrong = expected.clone()
    wrong[[100, 4000]] = wrong[[4000, 100]]
    return "swapped_rows", lambda equal: explain(expected.clone() if equal else wrong, expected)


def exchanged_nibbles(megabytes: int) -> tuple[str, Callable[[bool], Report]]:
    tokens = rows_of(megabytes, 3584)
    expected = stage_nvfp4(torch.randn(256, 7168).bfloat16()).x.repeat(tokens // 256, 1)[:tokens].contiguous()
    wrong = (expected << 4) | (expected >> 4)
    return "nibble_order", lambda equal: explain(
        expected.clone() if equal else wrong, expected, dtype="e2m1x2"
    )


def swizzle_left_out(megabytes: int) -> tuple[str, Callable[[bool], Report]]:
    rows = rows_of(megabytes, 448)
    layout = get_layout("swizzle_128x4", rows=rows, groups=448)
    logical = torch.randint(100, 140, (rows, 448), dtype=torch.uint8)
    expected = layout.pack(logical)
    wrong = logical.reshape(expected.shape)
    return "swizzle_128x4_missing", lambda equal: explain(
        expected.clone() if equal else wrong, expected, layout=layout
    )


def wrong_pages(megabytes: int) -> tuple[str, Callable[[bool], Report]]:
    tokens = rows_of(megabytes, 448) // 2
    pages = get_layout("shared_scale_pages", tokens=tokens, groups=224, block_m=64)
    logical = torch.randint(100, 140, (tokens, 224), dtype=torch.uint8)
    expected = pages.pack(logical)
    other = get_layout(
        "shared_scale_pages", tokens=tokens, groups=224, block_m=192, rows=pages.storage_shape[0]
    )
    wrong = other.pack(logical)
    return "wrong_block_m", lambda equal: explain(
        expected.clone() if equal else wrong, expected, layout=pages
    )


def noise(megabytes: int) -> tuple[str, Callable[[bool], Report]]:
    """Nothing explains it: the whole search runs."""
    expected, inputs = staged(megabytes)
    wrong: dict[str, Any] = {name: tensor.clone() for name, tensor in expected.items()}
    elements = wrong["x"].view(torch.uint8).view(-1)
    places = torch.randint(0, elements.numel(), (elements.numel() // 1000,))
    elements[places] ^= torch.randint(1, 256, places.shape, dtype=torch.uint8)

    def run(equal: bool) -> Report:
        actual = {name: tensor.clone() for name, tensor in expected.items()} if equal else wrong
        return explain(
            actual, expected, op="prepare_megamoe_inputs", params={"recipe": "fp8_ue8m0_g32"}, inputs=inputs
        )

    return "unknown", run


PAIRS = (wrong_arithmetic, swapped_rows, exchanged_nibbles, swizzle_left_out, wrong_pages, noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.megabytes} MB, {arguments.threads} threads")
    print(
        f"{'pair':<22}{'planted':<24}{'found':<24}{'confidence':<12}"
        f"{'equal s':>8}{'explain s':>11}{'CPU s':>8}{'peak GB':>9}"
    )
    for make in PAIRS:
        if arguments.only not in make.__name__:
            continue
        planted, run = make(arguments.megabytes)
        started = time.perf_counter()
        assert run(True).equal
        middle, cpu = time.perf_counter(), time.process_time()
        report = run(False)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        first = report.findings[0]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        print(
            f"{make.__name__:<22}{planted:<24}{first.cause:<24}{first.confidence:<12}"
            f"{middle - started:>8.2f}{ended - middle:>11.2f}{cpu:>8.2f}{peak:>9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
