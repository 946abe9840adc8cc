"""The command line as a user calls it: exit codes, JSON, pages, bundles, own modules, lost processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from megamoe.bundle import read_bundle
from megamoe.capability import all_names, probe
from megamoe.cli import COMMANDS, main
from megamoe.suite.runner import SKIP_REASONS
from megamoe.suite.table import table

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = ["--op", "prepare_megamoe_bf16_inputs", "--tier", "smoke", "--device", "cpu"]


def _run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_help_lists_the_commands_that_exist():
    shown = _run("--help").output
    for name in ("verify", "replay", "list", "env", "explain"):
        assert re.search(rf"^  {name} ", shown, re.MULTILINE)
    assert _run("no_such_command").exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name):
    done = _run(name, "--help")
    if "No such command" in done.output:
        pytest.fail(f"the module of {name} does not exist")
    assert done.exit_code == 0
    assert done.output.startswith("Usage: ")


def test_verify_green():
    done = _run("verify", *SMALL)
    assert done.exit_code == 0
    assert "prepare_megamoe_bf16_inputs" in done.output
    assert re.search(r"\d+ cases, [\d,]+ bytes compared, 0 differ; 0 failed, 0 skipped", done.output)


def test_verify_json_and_page(tmp_path):
    done = _run("verify", *SMALL, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert done.exit_code == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["cases"] == len(found["results"]) == found["passed"]
    assert (found["failed"], found["skipped"], found["bytes_differing"]) == (0, 0, 0)
    assert found["bytes_compared"] == sum(result["bytes_compared"] for result in found["results"]) > 0
    page = (tmp_path / "r.html").read_text()
    assert found["results"][0]["case"] in page
    assert not re.search(r"(src|href)\s*=", page), "the page needs nothing but itself"


def test_verify_red_writes_bundles_that_travel(tmp_path):
    done = _run("verify", *SMALL, "--impl", "faulty:flip__x__", "--bundle-dir", tmp_path, "--jobs", 1)
    assert done.exit_code == 1
    assert "FAILED" in done.output
    assert "megamoe explain" in done.output
    expected, actual = (next(tmp_path.glob(f"*.{side}.safetensors")) for side in ("expected", "actual"))
    assert read_bundle(actual).metadata["producer"] == "faulty:flip__x__"
    assert _run("replay", expected).exit_code == 0
    replayed = _run("replay", actual, "--json")
    assert replayed.exit_code == 1
    assert json.loads(replayed.stdout)["bytes_differing"] == 1
    assert _run("replay", actual, "--impl", "faulty:flip__x__").exit_code == 0
    assert _run("explain", expected, actual).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "nothing"], "no case matches"),
        (["--impl", "nothing"], "expected one of"),
        (["--impl", "no_such.module"], "cannot import no_such.module"),
        (["--impl", "json.decoder"], "has none of the selected operations"),
        (["--require", "nothing"], "unknown capability"),
        (["--require", "sm70"], "--require sm70"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_verify_usage(arguments, message):
    done = _run("verify", *SMALL, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_skips_have_reasons_and_can_be_required(monkeypatch):
    arguments = [
        "verify",
        "--op",
        "fp8_mega_moe",
        "--tier",
        "smoke",
        "--device",
        "cpu",
        "--impl",
        "deep_gemm",
        "--json",
        "-",
    ]
    done = _run(*arguments)
    assert done.exit_code == 2, "nothing ran"
    found = json.loads(done.stdout)
    assert found["cases"] == found["skipped"] > 0
    assert {result["skip"]["reason"] for result in found["results"]} <= set(SKIP_REASONS)
    if not probe("sm90").ok:
        assert {result["skip"]["capability"] for result in found["results"]} == {"sm90"}


def test_a_required_skip_is_a_failure():
    from megamoe.suite.report import require
    from megamoe.suite.runner import Result, Skip

    skipped = Result(
        "c", "op", "", "deep_gemm", "cuda", "skipped", skip=Skip("needs capability", "x", "deep_gemm.f")
    )
    (other,) = require([skipped], ["sm90"])
    assert other.status == "skipped"
    for name in ("deep_gemm", "deep_gemm.f"):
        (strict,) = require([skipped], [name])
        assert strict.status == "failed"
        assert "required" in strict.error


def test_somebodys_module_with_some_of_the_operations(tmp_path, monkeypatch):
    source = "from reference.staging import prepare_megamoe_bf16_inputs as my_prepare_megamoe_bf16_inputs\n"
    (tmp_path / "partial_kernels.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    done = _run("verify", "--op", "prepare_*", "--tier", "smoke", "--device", "cpu", "--jobs", 1,
                "--impl", "partial_kernels:my_", "--json", "-")  # fmt: skip
    assert done.exit_code == 0
    results = json.loads(done.stdout)["results"]
    assert {result["op"] for result in results if result["status"] == "passed"} == {
        "prepare_megamoe_bf16_inputs"
    }
    assert {result["skip"]["reason"] for result in results if result["status"] == "skipped"} == {
        "not provided"
    }


def _module(*arguments):
    command = [sys.executable, "-m", "megamoe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("in_child_processes")
def test_a_case_that_kills_its_process_is_one_failure():
    cases = ["--op", "prepare_megamoe_bf16_inputs", "--case", "*.tokens[01].hidden128", "--device", "cpu"]
    done = _module("verify", *cases, "--jobs", 2, "--impl", "faulty:die__x__", "--json", "-")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["cases"] == found["failed"] > 1
    assert {result["error"] for result in found["results"]} == {"the process running it died"}


def test_processes_give_the_results_of_one():
    def results(jobs):
        done = _module(
            "verify", "--op", "eplb*", "--tier", "smoke", "--device", "cpu", "--jobs", jobs, "--json", "-"
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["results"]
        return [{key: value for key, value in result.items() if key != "seconds"} for result in found]

    assert results(1) == results(2)


def test_a_lost_device_is_not_held_against_later_cases(monkeypatch):
    """The process that reports a lost device is replaced, and the cases that it did not reach run in the new
    one."""
    from megamoe.suite import session

    lost = []

    def work(job):
        results = list(session.run_job(job))
        if not lost:
            lost.append(job)
            return results[:2], False
        return results, True

    class Pool:
        """Runs what it is given at once, in this process."""

        def submit(self, function, job):
            from concurrent.futures import Future

            future = Future()
            future.set_result(work(job))
            return future

        def shutdown(self, **_):
            pools.append(self)

    pools = []
    monkeypatch.setattr(session, "_pool", lambda jobs: Pool())
    cases = table()["eplb_map_to_physical_and_record"].cases("smoke")
    results = session.run_cases(cases, device="cpu", jobs=2)
    assert sorted(result.case for result in results) == sorted(case.id for case in cases)
    assert {result.status for result in results} == {"passed"}
    assert len(pools) == 2


def test_replay_of_staging_goldens():
    done = _run("replay", GOLDENS / "staging.safetensors", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["cases"], found["failed"], found["bytes_differing"]) == (0, 56, 0, 0)
    assert set(found) >= {"cases", "failed", "skipped", "bytes_compared", "bytes_differing", "results"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.safetensors"], "no such bundle"),
        ([__file__], "not a safetensors file"),
        ([GOLDENS / "staging.safetensors", "--case", "nothing"], "no case matches"),
        ([GOLDENS / "staging.safetensors", "--impl", "nothing"], "expected one of"),
    ],
    ids=["missing", "not_a_bundle", "no_case", "no_implementation"],
)
def test_replay_usage(arguments, message):
    done = _run("replay", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_replay_names_what_a_recording_lacks(tmp_path):
    from dataclasses import replace

    from megamoe.bundle import read_bundle, write_bundle

    cases = [c for c in read_bundle(GOLDENS / "staging.safetensors").cases if c.op.endswith("_with_norm")]
    cases = [replace(c, outputs={n: out for n, out in c.outputs.items() if n != "x_sf"}) for c in cases]
    path = write_bundle(tmp_path / "b.safetensors", cases, producer="test")
    done = _run("replay", path)
    expected = f"not recorded, not compared: x_sf of {cases[0].op} in {len(cases)} case(s)"
    assert (done.exit_code, expected in done.stdout) == (0, True)
    results = json.loads(_run("replay", path, "--json").stdout)["results"]
    assert [result["unrecorded"] for result in results] == [["x_sf"]] * len(cases)


def test_replay_of_an_unknown_operation(tmp_path):
    import torch

    from megamoe.bundle import Case, RecordedOutput, write_bundle

    out = RecordedOutput(torch.zeros(2), "float32", (2,))
    case = Case("c", "no_such_operation", {}, {}, {"out": out})
    path = write_bundle(tmp_path / "b.safetensors", [case], producer="test")
    done = _run("replay", path)
    assert done.exit_code == 2
    assert "no_such_operation" in done.stderr


def test_list():
    found = json.loads(_run("list", "--json").stdout)["operations"]
    assert [row["name"] for row in found] == list(table())
    ids = _run("list", "--cases", "--op", "prepare_megamoe_bf16_inputs", "--tier", "smoke").output.split()
    assert ids == [case.id for case in table()["prepare_megamoe_bf16_inputs"].cases("smoke")]
    assert "prepare_megamoe_inputs" in _run("list").output
    assert _run("list", "--op", "nothing").exit_code == 2


def test_env():
    found = json.loads(_run("env", "--json").stdout)
    assert set(found["capabilities"]) == set(all_names())
    assert all(answer["reason"] for answer in found["capabilities"].values())
    assert found["versions"]["torch"] != "not installed"
    assert _run("env").exit_code == 0


def test_probe_refuses_unknown_names():
    with pytest.raises(ValueError, match="unknown capability 'gpu'"):
        probe("gpu")


def test_an_operation_without_the_implementation_is_said_to_be_skipped():
    done = _run(
        "verify",
        "--op",
        "mega_moe_pre_dispatch",
        "--tier",
        "smoke",
        "--impl",
        "triton",
        "--device",
        "cpu",
        "--json",
        "-",
    )
    found = json.loads(done.stdout)
    assert (done.exit_code, found["skipped"]) == (2, found["cases"])
    assert {result["skip"]["reason"] for result in found["results"]} == {"not provided"}
