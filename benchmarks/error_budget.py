"""Error budgets of MegaMoE forwards: python benchmarks/error_budget.py [--hidden H ...] [--plot FILE].

For a shape and each family, how much staging, L1, requantization, L2 and combine contribute to the error of
y against a float64 forward (reference.error_budget). Inputs are normal hidden states and weights of unit
gain; --plot draws the contributions as bars (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.error_budget import ErrorBudget, error_budget
from reference.formats import encode
from reference.fp8 import quantize_fp8_groups
from reference.mega_moe import (
    FAMILIES,
    Activation,
    ExpertWeights,
    LaunchConfig,
    MegaMoeFamily,
    sm90_launch_config,
)
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import RECIPES


def quantized(family: MegaMoeFamily, weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights float32 [e, N, K] in a family's own format: codes and scales as ExpertWeights has them."""
    if family.weight_format == "bf16":
        return weights.bfloat16(), None
    experts, rows, columns = weights.shape
    flat = weights.reshape(-1, columns)
    if family.scale_format is None:
        blocks = weights.view(experts, rows // 128, 128, columns // 128, 128)
        scales = blocks.abs().amax((2, 4)) / torch.tensor(448.0)
        return encode((blocks / scales[:, :, None, :, None]).reshape(weights.shape), "e4m3fn"), scales
    if family.scale_format == "ue4m3":
        found = quantize_nvfp4(flat, RECIPES["nvfp4_block"])  # type: ignore[arg-type]
        return found.codes.view(weights.shape), found.scale_codes.view(experts, rows, -1)
    recipe = "mxfp4_g32" if family.weight_format == "e2m1" else "fp8_ue8m0_g32"
    groups = quantize_fp8_groups(flat, RECIPES[recipe])  # type: ignore[arg-type]
    assert groups.exponents is not None
    return groups.codes.view(weights.shape), groups.exponents.view(experts, rows, -1)


def budget(name: str, options: argparse.Namespace) -> ErrorBudget:
    """One family's budget for the shape on the command line."""
    family = FAMILIES[name]
    g = torch.Generator().manual_seed(options.seed)
    hidden = torch.randn(options.tokens, options.hidden, generator=g).bfloat16()
    shape = (options.experts, 2 * options.intermediate, options.hidden)
    # NVFP4 weights sit in the middle of E4M3's range of scales, and the alphas take that back.
    gain = 64.0 if family.scale_format == "ue4m3" else 1.0
    l1, l1_sf = quantized(family, torch.randn(shape, generator=g) * gain / options.hidden**0.5)
    shape = (options.experts, options.hidden, options.intermediate)
    l2, l2_sf = quantized(family, torch.randn(shape, generator=g) * gain / options.intermediate**0.5)
    alpha = torch.full((options.experts,), 1 / gain) if gain != 1 else None
    a2 = torch.full((options.experts,), 2.0**-6) if name == "sm100_fp4xfp4" else None
    scale = 2.0**-6 if name == "sm100_nvfp4" else 1.0
    l2_alpha = alpha if alpha is None or scale == 1 else alpha * scale
    weights = ExpertWeights(l1, l2, l1_sf, l2_sf, alpha, l2_alpha, a2)
    ids = torch.rand(options.tokens, options.experts, generator=g).topk(options.topk, dim=1).indices
    routing = torch.rand(options.tokens, options.topk, generator=g)
    launch = LaunchConfig(128, options.hidden)
    if family.arch == "sm90":
        sizes = {"num_experts": options.experts, "num_topk": options.topk, "num_tokens": options.tokens}
        launch = sm90_launch_config(
            num_ranks=1, hidden=options.hidden, intermediate_hidden=options.intermediate, **sizes
        )
    activation = Activation(clamp=options.clamp, fast_math=not options.exact_math)
    return error_budget(
        family,
        hidden,
        ids,
        routing / routing.sum(1, keepdim=True),
        weights,
        launch,
        activation,
        l2_activation_scale=scale,
    )


def plot(budgets: list[ErrorBudget], path: Path) -> None:
    """The contributions as bars on a logarithmic scale, one group of bars a stage; the whole error beside
    them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    stages = [row.stage for row in budgets[0].rows] + ["total"]
    width = 0.8 / len(budgets)
    for index, each in enumerate(budgets):
        heights = [row.rms for row in each.rows] + [each.rows[-1].cumulative]
        places = [place + (index - (len(budgets) - 1) / 2) * width for place in range(len(stages))]
        axes.bar(places, heights, width, label=each.family)
    axes.set_xticks(range(len(stages)), stages)
    axes.set_yscale("log")
    axes.set_ylabel("rms of the contribution / rms of y")
    axes.set_title("Error of a MegaMoE forward against float64, by stage")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(budgets), fontsize="small")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("tokens", 32),
        ("hidden", 1024),
        ("intermediate", 512),
        ("experts", 4),
        ("topk", 2),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clamp", type=float)
    parser.add_argument(
        "--exact-math", action="store_true", help="expf and division in place of the approximate functions"
    )
    parser.add_argument(
        "--family", action="append", choices=sorted(FAMILIES), help="may be repeated; default all"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    budgets = [budget(name, options) for name in options.family or FAMILIES]
    for each in budgets:
        print(each.table(), end="\n\n")
    if options.json is not None:
        rows = {each.family: [asdict(row) for row in each.rows] for each in budgets}
        options.json.write_text(json.dumps(rows, indent=1))
    if options.plot is not None:
        plot(budgets, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
