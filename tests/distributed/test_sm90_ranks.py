"""Launches between ranks: on GPUs against the library, and everywhere the code that compares, records and
replays them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import check_sm90_ranks as check
from launches import RankCase, rank_cases

from megamoe.bundle import Case, read_bundle
from megamoe.suite.drivers import nvcc_ahead
from megamoe.suite.drivers.deep_gemm_sm90 import Launch, captured_output
from megamoe.suite.drivers.mega_moe import FAMILY, split_ranks
from megamoe.suite.drivers.sm90_ranks import RankedLaunch, launch_ranks
from megamoe.suite.replay import replay_case
from megamoe.suite.table import select_implementations, table
from reference.mega_moe import Activation, forward

pytestmark = pytest.mark.timeout(900)

RECORDED = read_bundle(Path(__file__).parents[1] / "goldens" / "sm90_two_ranks.safetensors").cases


@pytest.fixture(scope="module")
def launched() -> dict[str, tuple[RankCase, RankedLaunch, list[Launch]]]:
    """Every case, launched on all GPUs of this machine in one set of processes."""
    cases = rank_cases(torch.cuda.device_count())
    launches = [check.ranked_launch(case) for case in cases]
    return {
        case.name: (case, launch, ranks)
        for case, launch, ranks in zip(cases, launches, launch_ranks(launches), strict=True)
    }


@pytest.mark.requires("cuda2", "sm90", "deep_gemm.fp8_mega_moe")
@pytest.mark.parametrize("name", [case.name for case in rank_cases(2)])
def test_library_against_reference(
    name: str, launched: dict[str, tuple[RankCase, RankedLaunch, list[Launch]]]
) -> None:
    case, launch, ranks = launched[name]
    problems, totals = check.compare_launch(case, launch, ranks)
    assert not problems
    assert totals["y"][0] > 0


def emulated(launch: RankedLaunch, shuffled: bool = True) -> list[Launch]:
    """What a launch would leave, from the reference: pool rows in some other order inside each run, as
    atomics make it."""
    inputs, weights, configs = split_ranks(launch.tensors, launch.tokens)
    activation = Activation(clamp=launch.clamp, fast_math=launch.fast_math)
    results = forward(FAMILY, inputs, weights, configs, activation)
    found = []
    for result, config in zip(results, configs, strict=True):
        pool = result.pool
        order = torch.arange(pool.rows)
        for start, count in zip(pool.starts, pool.counts, strict=True):
            if shuffled:
                order[start : start + count] = start + torch.randperm(count)
        stages = dict(result.stages)
        spare = torch.full((64, stages["l1_acts"].shape[1]), check.POISON, dtype=torch.uint8)
        stages["l1_acts"] = torch.cat((stages["l1_acts"][order], spare))
        stages["l1_acts"][: pool.rows][~pool.live] = check.POISON
        stages["l2_acts"] = stages["l2_acts"][order]
        stages["token_src_metadata"] = stages["token_src_metadata"][order]
        rows = torch.arange(pool.rows)
        place = rows // pool.tile * 128 + rows % pool.tile
        for name in ("l1_acts_sf", "l2_acts_sf"):
            moved = stages[name].clone()
            moved[place] = stages[name][place[order]]
            stages[name] = moved
        found.append(Launch(result.y, result.stats, stages, config))
    return found


SMALL = [case for ranks in (2, 3) for case in rank_cases(ranks) if case.params["hidden"] < 1024]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name}-{len(case.params['tokens'])}")
def test_comparison_finds_nothing_in_what_the_reference_leaves(case: RankCase) -> None:
    launch = check.ranked_launch(case)
    problems, totals = check.compare_launch(case, launch, emulated(launch))
    assert not problems
    assert totals["y"][0] == sum(launch.tokens) * case.params["hidden"] * 2


STAGES = ("token_src_metadata", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf", "combine", "y", "stats")


@pytest.mark.parametrize("stage", STAGES)
def test_comparison_finds_one_changed_byte(stage: str) -> None:
    case = next(each for each in rank_cases(2) if each.name == "unequal")
    launch = check.ranked_launch(case)
    ranks = emulated(launch, shuffled=False)
    damaged = {"y": ranks[1].y, "stats": ranks[1].stats[None]}.get(stage, ranks[1].stages.get(stage))
    damaged = damaged[launch_row(ranks[1], stage)]
    damaged.view(torch.uint8).reshape(-1)[0] ^= 1
    problems, _ = check.compare_launch(case, launch, ranks)
    assert problems
    assert all(problem.startswith("rank 1") for problem in problems)
    assert stage in problems[0]


def launch_row(launch: Launch, stage: str) -> int:
    """A row of the stage that holds a token; a slot of the combine with one for the first token."""
    if stage == "combine":
        return int((launch.stages["combine"][:, 0] != 0).any(-1).nonzero()[0])
    if stage not in launch.stages:
        return 0
    row = int((launch.stages["token_src_metadata"][:, 0] >= 0).nonzero()[-1])
    return row // 64 * 128 + row % 64 if stage.endswith("_sf") else row


def test_recordings_replay_on_a_cpu(tmp_path: Path) -> None:
    cases = [case for case in rank_cases(2) if case.record]
    assert len(cases) >= 4
    launches = [check.ranked_launch(case) for case in cases]
    path = tmp_path / "ranks.safetensors"
    check.record(path, cases, launches, [emulated(launch) for launch in launches], device="emulated")
    assert path.stat().st_size < 10_000_000
    (reference,) = select_implementations(table()["fp8_mega_moe"], "reference", "cpu")
    recorded = read_bundle(path).cases
    assert [case.case for case in recorded] == [f"sm90_ranks2_{case.name}" for case in cases]
    for one in recorded:
        result = replay_case(one, reference)
        assert result.status == "passed", result.problems()
        assert result.bytes_compared > 50_000
    damaged = recorded[0].outputs["l2_acts"].tensor.view(torch.uint8)
    damaged[3, 5] ^= 0x80
    result = replay_case(recorded[0], reference)
    assert result.status == "failed"
    assert result.bytes_differing == 1


def test_every_kind_of_launch_is_there() -> None:
    """The list covers what goes wrong between ranks, whatever their number."""
    for ranks in (2, 4):
        cases = rank_cases(ranks)
        assert len(cases) >= 10
        assert len({case.name for case in cases}) == len(cases)
        assert all(len(case.params["tokens"]) == ranks for case in cases)
        assert any(0 in case.params["tokens"] and sum(case.params["tokens"]) for case in cases)
        modes = set()
        for case in cases:
            launch = replace_weights(case)
            modes |= {config.accumulation for config in split_ranks(launch, case.params["tokens"])[2]}
        assert modes == {"promote", "rescale", "rescale_ratio"}
        stale = [index for index, case in enumerate(cases) if not case.poison]
        for index in stale:
            before = [each for each in cases[:index] if sizes(each) == sizes(cases[index])][-1]
            assert sum(cases[index].params["tokens"]) < sum(before.params["tokens"])


def sizes(case: RankCase) -> tuple[int, ...]:
    return tuple(case.params[name] for name in ("experts", "topk", "hidden", "intermediate"))


def replace_weights(case: RankCase) -> list[torch.Tensor]:
    """Tensors of the case's shapes without values, for what depends on shapes alone."""
    experts, topk, hidden, intermediate = sizes(case)
    total = sum(case.params["tokens"])
    shapes = (
        (total, hidden),
        (total, 1),
        (total, topk),
        (total, topk),
        (experts, 1, hidden),
        (experts, 1, 1),
    )
    return [
        torch.empty(shape, device="meta")
        for shape in (*shapes, (experts, hidden, intermediate), (experts, 1, 1))
    ]


def test_replicas_lie_on_different_ranks() -> None:
    case = next(each for each in rank_cases(2) if each.name == "replicas_on_different_ranks")
    launch = check.ranked_launch(case)
    ids = launch.tensors[2][: launch.tokens[0]]
    local = case.params["experts"] // 2
    first, second = ids[0::2] // local, ids[1::2] // local
    assert set(first[first >= 0].tolist()) == {0}
    assert set(second[second >= 0].tolist()) == {1}


FAKE_COMPILER = """#!/bin/sh
echo "$@" >> {folder}/calls
sleep 0.3
out=; previous=
for word in "$@"; do [ "$previous" = -o ] && out=$word; previous=$word; done
case "$*" in *--version*) echo fake; exit 0;; esac
for word in "$@"; do
  case "$word" in *.cu) grep -q broken "$word" && echo "error: broken" >&2 && exit 2;; esac
done
echo compiled > "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """nvcc_ahead in front of a compiler that takes its time; the folder it works in."""
    for name in (*os.environ,):
        if name.startswith(("DG_", "MEGAMOE_NVCC")):
            monkeypatch.delenv(name)
    real = tmp_path / "real"
    real.write_text(FAKE_COMPILER.format(folder=tmp_path))
    real.chmod(0o755)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["DG_JIT_NVCC_COMPILER"] = str(real)
    nvcc_ahead.install(tmp_path / "ahead")
    return tmp_path


def compile_one(folder: Path, name: str, mode: str) -> subprocess.CompletedProcess[str]:
    source = folder / f"{name}.cu"
    source.write_text(f"// {name}")
    command = [
        os.environ["DG_JIT_NVCC_COMPILER"],
        str(source),
        "-cubin",
        "-o",
        str(folder / f"{name}.cubin"),
        "-O3",
    ]
    environment = os.environ | {"MEGAMOE_NVCC": mode}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_kernels_are_compiled_once_and_ahead(compiler: Path) -> None:
    names = [f"kernel{n}" for n in range(4)]
    started = time.monotonic()
    assert all(compile_one(compiler, name, "collect").returncode != 0 for name in names)
    assert all(compile_one(compiler, name, "collect").returncode != 0 for name in names)
    assert not (compiler / "kernel0.cubin").exists()
    for name in names:
        assert compile_one(compiler, name, "wait").returncode == 0
        assert (compiler / f"{name}.cubin").read_text() == "compiled\n"
    assert len((compiler / "calls").read_text().splitlines()) == len(names)
    assert time.monotonic() - started < 60


def test_a_failing_compilation_is_reported(compiler: Path) -> None:
    assert compile_one(compiler, "broken", "collect").returncode != 0
    result = compile_one(compiler, "broken", "wait")
    assert result.returncode != 0
    assert "error: broken" in result.stderr


def test_questions_reach_the_compiler(compiler: Path) -> None:
    command = [os.environ["DG_JIT_NVCC_COMPILER"], "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {})
    assert (result.returncode, result.stdout) == (0, "fake\n")


def test_output_of_native_code_is_captured() -> None:
    with captured_output() as text:
        os.write(1, b"from here\n")
        subprocess.run(["echo", "from a child"], check=True)
    assert text[0].split("\n") == ["from here", "from a child", ""]


def test_ranks_of_different_numbers_are_refused() -> None:
    launch = check.ranked_launch(rank_cases(2)[0])
    with pytest.raises(ValueError, match="launches: expected the same number of ranks"):
        launch_ranks([launch, replace(launch, tokens=(1, 2, 3))])


RECORDED = read_bundle(Path(__file__).parents[1] / "goldens" / "sm90_two_ranks.safetensors").cases


def test_recorded_launches_cover_what_ranks_get_wrong() -> None:
    """Their bytes are compared in tests/test_goldens.py, on any machine."""
    tokens = [case.params["tokens"] for case in RECORDED]
    assert len(RECORDED) >= 4
    assert all(len(each) == 2 for each in tokens)
    assert any(0 in each for each in tokens)
    assert {case.params["routing"] for case in RECORDED} == {"uniform", "one_rank", "replicas"}
    assert any(case.params["masked"] > 0 for case in RECORDED)
    tiles = {
        tuple(config.tile for config in split_ranks(list(case.inputs.values())[:8], case.params["tokens"])[2])
        for case in map(in_order, RECORDED)
    }
    assert (128, 64) in tiles


def in_order(case: Case) -> Case:
    """The case with its inputs in the order of the row's signature."""
    return replace(case, inputs={name: case.inputs[name] for name in check.NAMES})


def test_recorded_launches_come_out_of_one_process_a_rank() -> None:
    (processes,) = select_implementations(table()["fp8_mega_moe"], "processes", "cpu")
    case = next(each for each in RECORDED if 0 in each.params["tokens"])
    result = replay_case(case, processes)
    assert result.status == "passed", result.problems()
    assert {output.output for output in result.outputs} == set(case.outputs)
