"""Compares reference.mega_moe with deep_gemm.fp8_mega_moe on one GPU, stage by stage: python
tests/hardware/check_mega_moe.py.

Each kernel takes tens of seconds to compile, so the cases are spread over processes that share the JIT's
cache (--workers). --functions hardware evaluates ex2.approx and rcp.approx on the device instead of by
their models, which separates their errors from all others; the default compares both ways. Exit status 1 if
any byte differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]


@dataclass(frozen=True)
class Config:
    """One launch. masked: share of routes without an expert. values: kind of hidden states."""

    tokens: int
    experts: int
    topk: int
    hidden: int
    intermediate: int
    clamp: float | None = None
    fast_math: bool = False
    masked: float = 0.0
    values: str = "random"
    seed: int = 0

    @property
    def name(self) -> str:
        words = f"m{self.tokens}_e{self.experts}_k{self.topk}_h{self.hidden}_i{self.intermediate}"
        words += f"_clamp{self.clamp}_fast{int(self.fast_math)}_mask{self.masked}"
        return f"{words}_{self.values}_s{self.seed}"


def _small(fast: bool, clamp: float | None) -> list[Config]:
    tokens = ((1, 0.0), (37, 0.0), (128, 0.3), (130, 0.0), (200, 0.2), (300, 0.0), (2000, 0.1))
    return [Config(t, 8, 2, 512, 256, clamp, fast, m, seed=int(fast)) for t, m in tokens]


# Groups share compiled kernels; each is one worker's list.
GROUPS: tuple[list[Config], ...] = (
    _small(False, None),
    _small(True, None),
    [
        Config(5, 16, 8, 1024, 512, 10.0, True, 0.0),
        Config(64, 16, 8, 1024, 512, 10.0, True, 0.2),
        Config(257, 16, 8, 1024, 512, 10.0, True, 0.0),
        Config(1000, 16, 8, 1024, 512, 10.0, True, 0.1),
    ],
    [
        Config(5, 16, 8, 1024, 512, 0.5, False, 0.0),
        Config(100, 16, 8, 1024, 512, 0.5, False, 0.2),
        Config(1500, 16, 8, 1024, 512, 0.5, False, 0.0),
    ],
    [Config(8, 8, 8, 7168, 2048, 10.0, False), Config(60, 8, 8, 7168, 2048, 10.0, False, 0.3)],
    [Config(64, 8, 8, 7168, 2048, 7.0, False, 0.1), Config(700, 8, 8, 7168, 2048, 7.0, False)],
    [Config(70, 8, 8, 7168, 2048, None, True, 0.1), Config(800, 8, 8, 7168, 2048, None, True)],
    [Config(1, 4, 1, 4096, 3072, None, True), Config(130, 4, 1, 4096, 3072, None, True)],
    [Config(400, 4, 3, 4096, 3072, 10.0, True)],
    [
        Config(128, 32, 6, 2048, 1024, 10.0, False, 0.1),
        Config(300, 32, 6, 2048, 1024, 10.0, False, 0.1),
        Config(512, 32, 6, 2048, 1024, 10.0, False, 0.1),
    ],
    [
        Config(40, 4, 2, 512, 256, 10.0, False, values="specials"),
        Config(140, 4, 2, 512, 256, 10.0, False, values="specials"),
    ],
    [
        Config(40, 4, 2, 512, 256, None, True, values="specials"),
        Config(140, 4, 2, 512, 256, None, True, values="specials"),
    ],
)


def draw(config: Config):
    """Staged inputs and weights on the device: e4m3 codes with scales that spread over 2^8."""
    import torch

    from reference.mega_moe import ExpertWeights, RankInputs

    g = torch.Generator("cuda").manual_seed(_seed(config.name))
    experts, hidden, intermediate = config.experts, config.hidden, config.intermediate

    def codes(*shape: int) -> torch.Tensor:
        # Normal values times a power of two a row: many exponents, all mantissas.
        values = torch.randn(*shape, generator=g, device="cuda") * 16
        values = values * torch.exp2(
            torch.randint(-3, 4, (*shape[:-1], 1), generator=g, device="cuda").float()
        )
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    def scales(*shape: int, center: float) -> torch.Tensor:
        return torch.exp2(torch.rand(*shape, generator=g, device="cuda") * 6 - 3) * center

    x = codes(config.tokens, hidden)
    x_sf = scales(config.tokens, hidden // 128, center=1 / 32)
    l1 = codes(experts, 2 * intermediate, hidden)
    l1_sf = scales(experts, 2 * intermediate // 128, hidden // 128, center=1 / (24 * hidden**0.5))
    l2 = codes(experts, hidden, intermediate)
    l2_sf = scales(experts, hidden // 128, intermediate // 128, center=1 / (24 * intermediate**0.5))
    scores = torch.rand(config.tokens, experts, generator=g, device="cuda")
    topk_idx = scores.topk(config.topk, dim=1).indices
    topk_weights = torch.rand(config.tokens, config.topk, generator=g, device="cuda") + 0.01
    gone = torch.rand(config.tokens, config.topk, generator=g, device="cuda") < config.masked
    topk_idx = torch.where(gone, -1, topk_idx)
    if config.values == "specials":
        x[0, 5], x[1, 200], x[2, 3], x[3] = 0x7F, 0xFF, 0x80, 0
        x_sf[4, 1], x_sf[5, 2], x_sf[6, 0], x_sf[7] = float("inf"), float("nan"), 1e-44, 0.0
        topk_weights[8, 0], topk_weights[9], topk_weights[10, 0], topk_weights[11, 0] = (
            float("nan"),
            0.0,
            -1.5,
            float("inf"),
        )
        x_sf[12] *= 1e12
        x_sf[13] *= 1e30
        x_sf[14] *= 1e-20
    return RankInputs(x, x_sf, topk_idx, topk_weights), ExpertWeights(l1, l2, l1_sf, l2_sf)


def _seed(text: str) -> int:
    from megamoe.suite.operation import stable_seed

    return stable_seed(text) % (1 << 31)


def use_hardware_functions() -> None:
    """Replaces the models of the approximate instructions by the instructions."""
    from hardware import evaluate

    from reference import _mufu as models
    from reference import activation

    for name, operation in (("ex2", "ex2_approx_ftz"), ("rcp", "rcp_approx_ftz")):
        function = lambda values, operation=operation: evaluate(operation, values.contiguous())  # noqa: E731
        setattr(models, name, function)
        setattr(activation, name, function)


def same_on_cpu(expected: Any, inputs: Any, weights: Any, model: Any, activation: Any) -> list[str]:
    """The stages in which the reference differs between this device and the CPU."""
    from dataclasses import fields, replace

    from reference.mega_moe import forward

    def moved(row: Any) -> Any:
        values = {field.name: getattr(row, field.name) for field in fields(row)}
        return replace(row, **{name: value.cpu() for name, value in values.items() if value is not None})

    (there,) = forward("sm90_fp8xfp8", [moved(inputs)], [moved(weights)], [model], activation)
    pairs = {name: (stage, there.stages[name]) for name, stage in expected.stages.items()}
    pairs |= {"y": (expected.y, there.y), "stats": (expected.stats, there.stats)}
    return [name for name, (a, b) in pairs.items() if not _same_bytes(a.cpu(), b)]


def _same_bytes(a: Any, b: Any) -> bool:
    import torch

    return a.shape == b.shape and torch.equal(*(each.contiguous().view(torch.uint8) for each in (a, b)))


def run_group(index: int, functions: str, seed: int) -> None:
    import deep_gemm
    import torch

    from megamoe.suite.drivers.deep_gemm_sm90 import Session, single_rank_group
    from megamoe.suite.drivers.mega_moe_stages import compare_stages
    from reference.mega_moe import Activation, forward, sm90_launch_config

    group = single_rank_group()
    recorded = []
    for config in (replace(each, seed=each.seed + seed) for each in GROUPS[index]):
        session = Session(
            group,
            num_experts=config.experts,
            max_tokens=config.tokens,
            topk=config.topk,
            hidden=config.hidden,
            intermediate=config.intermediate,
        )
        inputs, weights = draw(config)
        as_e4m3 = [tensor.view(torch.float8_e4m3fn) for tensor in (weights.l1, weights.l2)]
        kernel = deep_gemm.transform_weights_for_mega_moe_sm90(
            (as_e4m3[0], weights.l1_sf), (as_e4m3[1], weights.l2_sf)
        )
        session.poison()
        session.stage(inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights)
        started = time.perf_counter()
        launch = session.launch(config.tokens, *kernel, clamp=config.clamp, fast_math=config.fast_math)
        seconds = time.perf_counter() - started
        recorded.append((config, inputs, weights, launch, seconds))
        session.close()
        del kernel
    ways = ("model", "hardware") if functions == "both" else (functions,)
    for way in ways:
        if way == "hardware":
            use_hardware_functions()
        for config, inputs, weights, launch, seconds in recorded:
            model = sm90_launch_config(
                num_ranks=1,
                num_experts=config.experts,
                num_topk=config.topk,
                num_tokens=config.tokens,
                hidden=config.hidden,
                intermediate_hidden=config.intermediate,
            )
            row = {
                "config": config.name,
                "functions": way,
                "accumulation": model.accumulation,
                "launch_s": round(seconds, 1),
            }
            if launch.config is not None and (launch.config.tile, launch.config.accumulation) != (
                model.tile,
                model.accumulation,
            ):
                row["configuration"] = f"library {launch.config}, model {model}"
            try:
                torch.cuda.synchronize()
                started = time.perf_counter()
                activation = Activation(clamp=config.clamp, fast_math=config.fast_math)
                expected = forward("sm90_fp8xfp8", [inputs], [weights], [model], activation)[0]
                torch.cuda.synchronize()
                seconds_taken = time.perf_counter() - started
                if way == "model" and config.tokens * config.topk * config.hidden < 1 << 17:
                    row["not_on_cpu"] = same_on_cpu(expected, inputs, weights, model, activation)
                row["reference_s"] = round(seconds_taken, 2)
                found = compare_stages(
                    "sm90_fp8xfp8", expected, launch.stages, launch.y, launch.stats, poison=0xA5
                )
                row["stages"] = [asdict(each) for each in found]
            except Exception:
                row["error"] = traceback.format_exc()[-1500:]
            print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, help="run one group here (what the workers do)")
    parser.add_argument("--workers", type=int, default=len(GROUPS))
    parser.add_argument("--functions", choices=("model", "hardware", "both"), default="model")
    parser.add_argument("--seed", type=int, default=0, help="added to every launch's own")
    parser.add_argument("--timeout", type=int, default=280, help="seconds for all of it")
    arguments = parser.parse_args()
    if arguments.group is not None:
        import torch

        torch.set_num_threads(1)  # the workers share the cores
        run_group(arguments.group, arguments.functions, arguments.seed)
        return 0
    environment = os.environ | {"DG_PRINT_CONFIGS": "1", "DG_JIT_USE_NVRTC": "0"}
    environment.setdefault("DG_JIT_CACHE_DIR", tempfile.mkdtemp(prefix="megamoe-jit-"))
    command = [sys.executable, __file__, "--functions", arguments.functions]
    command += ["--seed", str(arguments.seed), "--group"]
    deadline = time.monotonic() + arguments.timeout
    waiting, running, rows = list(range(len(GROUPS))), {}, []
    logs = Path(tempfile.mkdtemp(prefix="megamoe-check-"))
    while waiting or running:
        while waiting and len(running) < arguments.workers:
            index = waiting.pop(0)
            with (logs / f"{index}.out").open("w") as out, (logs / f"{index}.err").open("w") as err:
                running[index] = subprocess.Popen(
                    [*command, str(index)], stdout=out, stderr=err, env=environment
                )
        for index, process in list(running.items()):
            if process.poll() is None and time.monotonic() > deadline:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[index]
                lines = (logs / f"{index}.out").read_text().splitlines()
                rows += [json.loads(line) for line in lines if line.startswith("{")]
                if process.returncode:
                    tail = (logs / f"{index}.err").read_text()[-1500:]
                    print(f"GROUP {index} exit {process.returncode}: {tail}")
        time.sleep(0.2)
    return report(rows)


def report(rows: list[dict]) -> int:
    """Prints differences, one line a launch, and totals a stage."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    failed = not rows
    for row in rows:
        if "error" in row:
            failed = True
            print("ERROR", row["config"], row["functions"], row["error"])
            continue
        if "configuration" in row:
            failed = True
            print("CONFIGURATION", row["config"], row["configuration"])
        parts = [f"not the same on the CPU: {row['not_on_cpu']}"] if row.get("not_on_cpu") else []
        failed |= bool(parts)
        for stage in row["stages"]:
            total = totals[
                row["functions"] + ("" if "specials" not in row["config"] else " specials"), stage["stage"]
            ]
            total[0] += stage["bytes_compared"]
            total[1] += stage["bytes_differing"]
            total[2] += 1
            if stage["bytes_differing"]:
                failed = True
                count = f"{stage['bytes_differing']} of {stage['bytes_compared']}"
                parts.append(f"{stage['stage']} {count} ({stage['examples'][:330]})")
        times = f"launch {row['launch_s']} s, reference {row['reference_s']} s"
        print(row["config"], row["accumulation"], row["functions"], times, "; ".join(parts) or "0 differ")
    on_cpu = sum("not_on_cpu" in row for row in rows)
    print(f"launches {len(rows)}, computed on the CPU too {on_cpu}")
    for (functions, stage), (compared, differing, launches) in totals.items():
        print(f"{functions:18} {stage:22} launches {launches:3}  bytes {compared:12}  differing {differing}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
