"""deep_gemm.fp8_mega_moe over several GPUs against reference.mega_moe, every rank, stage by stage:

    python tests/distributed/check_sm90_ranks.py [--ranks N] [--record FILE] [--only NAME]

One process a GPU; kernels are compiled ahead, all at once. Prints bytes compared and differing a stage;
--record keeps the launches marked for it, with the library's own outputs, as a bundle that replays on a
CPU. Exit status 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import torch  # noqa: E402
from launches import RankCase, rank_cases  # noqa: E402

from megamoe import bundle  # noqa: E402
from megamoe.suite.compare import Observed  # noqa: E402
from megamoe.suite.drivers.deep_gemm_sm90 import Launch  # noqa: E402
from megamoe.suite.drivers.mega_moe import FAMILY, join_ranks, split_ranks  # noqa: E402
from megamoe.suite.drivers.mega_moe_inputs import draw_launch  # noqa: E402
from megamoe.suite.drivers.mega_moe_stages import compare_stages  # noqa: E402
from megamoe.suite.drivers.sm90_ranks import RankedLaunch, RanksFailedError, launch_ranks  # noqa: E402
from megamoe.suite.operation import Case, stable_seed  # noqa: E402
from megamoe.suite.replay import record_case  # noqa: E402
from megamoe.suite.table import table  # noqa: E402
from reference.mega_moe import Activation, forward  # noqa: E402
from reference.mega_moe.dispatch import build_pool  # noqa: E402

NAMES = ("x", "x_sf", "topk_idx", "topk_weights", "l1_w", "l1_w_sf", "l2_w", "l2_w_sf")
POISON = 0xA5


def hardware_functions() -> None:
    """The device's own ex2.approx and rcp.approx in place of their models."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "hardware"))
    from check_mega_moe import use_hardware_functions

    use_hardware_functions()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only", help="substring of the launches' names")
    parser.add_argument("--functions", choices=("model", "hardware", "both"), default="model")
    arguments = parser.parse_args()
    cases = [
        each for each in rank_cases(arguments.ranks) if arguments.only is None or arguments.only in each.name
    ]
    launches = [ranked_launch(each) for each in cases]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="megamoe-jit-") as folder:
        failed = False
        try:
            launched = launch_ranks(launches, compile_ahead=Path(folder))
        except RanksFailedError as error:
            launched, failed = error.finished, True
            print(f"FAILED in {cases[len(launched)].name}: {error}", flush=True)
    done = len(launched)
    cases, launches = cases[:done], launches[:done]
    print(
        f"{len(cases)} launches on {arguments.ranks} ranks in {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    if arguments.record is not None:
        record(arguments.record, cases, launches, launched, torch.cuda.get_device_name())
    for way in ("model", "hardware") if arguments.functions == "both" else (arguments.functions,):
        if way == "hardware":
            hardware_functions()
        failed |= compare(way, cases, launches, launched)
    return int(failed)


def ranked_launch(case: RankCase) -> RankedLaunch:
    """The launch of a case, its tensors drawn from the case's name."""
    tensors = draw_launch(case.params, stable_seed(case.name) % (1 << 31))
    return RankedLaunch(
        tuple(tensors[name] for name in NAMES),
        case.params["tokens"],
        case.params["clamp"],
        case.params["fast_math"],
        case.poison,
    )


def compare(
    way: str, cases: list[RankCase], launches: list[RankedLaunch], launched: list[list[Launch]]
) -> bool:
    """Prints a line a launch and a table a stage; True if anything differs."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    failed = False
    for case, launch, ranks in zip(cases, launches, launched, strict=True):
        try:
            problems, found = compare_launch(case, launch, ranks)
        except Exception:
            problems, found = [traceback.format_exc()[-1200:]], {}
        failed |= bool(problems)
        for stage, (compared, differing) in found.items():
            totals[stage][0] += compared
            totals[stage][1] += differing
        modes = "/".join("none" if each.config is None else each.config.accumulation for each in ranks)
        verdict = "; ".join(problems) or "0 differ"
        print(f"{way:9} {case.name:30} tokens {launch.tokens} {modes}: {verdict}", flush=True)
    for stage, (compared, differing) in totals.items():
        print(f"{way:9} {stage:22} bytes {compared:12}  differing {differing}")
    return failed


def compare_launch(
    case: RankCase, launch: RankedLaunch, ranks: list[Launch]
) -> tuple[list[str], dict[str, list[int]]]:
    """What differs on any rank, in words, and [bytes compared, bytes differing] a stage."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs, weights, configs = split_ranks([tensor.to(device) for tensor in launch.tensors], launch.tokens)
    problems = []
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    activation = Activation(clamp=launch.clamp, fast_math=launch.fast_math)
    expected = forward(FAMILY, inputs, weights, configs, activation)
    for rank, (mine, actual, config) in enumerate(zip(expected, ranks, configs, strict=True)):
        found = actual.config
        if found is None or (found.tile, found.accumulation) != (config.tile, config.accumulation):
            problems.append(f"rank {rank}: configuration {found}, expected {config}")
        stages = {name: stage.to(device) for name, stage in actual.stages.items()}
        y, stats = actual.y.to(device), actual.stats.to(device)
        poison = POISON if case.poison else None
        for each in compare_stages(FAMILY, mine, stages, y, stats, poison=poison):
            totals[each.stage][0] += each.bytes_compared
            totals[each.stage][1] += each.bytes_differing
            if each.bytes_differing:
                count = f"{each.bytes_differing} of {each.bytes_compared}"
                problems.append(f"rank {rank}: {each.stage} {count} ({each.examples[:250]})")
    return problems, totals


def record(
    path: Path, cases: list[RankCase], launches: list[RankedLaunch], launched: list[list[Launch]], device: str
) -> None:
    """The library's outputs in the row's form, one case a launch; inputs are stored with them, so weights
    are most of it."""
    operation = table()["fp8_mega_moe"]
    kept = []
    for case, launch, ranks in zip(cases, launches, launched, strict=True):
        if not case.record:
            continue
        ids = torch.split(launch.tensors[2], list(launch.tokens))
        _, _, configs = split_ranks(launch.tensors, launch.tokens)
        rows = [
            (
                build_pool(ids, rank, case.params["experts"], configs[rank].tile),
                ids[rank] >= 0,
                each.stages,
                each.y,
                each.stats,
            )
            for rank, each in enumerate(ranks)
        ]
        outputs = {name: Observed(stage) for name, stage in join_ranks(rows).items()}
        params = case.params | {"values": "recorded"}
        inputs = dict(zip(NAMES, launch.tensors, strict=True))
        one = record_case(Case(operation, params), outputs, inputs)
        kept.append(replace(one, case=f"sm90_ranks{len(ranks)}_{case.name}"))
    bundle.write_bundle(path, kept, producer="sgl-deep-gemm 0.1.5", device=device)
    print(f"recorded {len(kept)} launches, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
