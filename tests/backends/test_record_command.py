"""``megamoe record``: what is written replays by itself, and neither a fault nor a crash loses what came
before it.
"""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
from click.testing import CliRunner

from megamoe.bundle import read_bundle
from megamoe.suite import recording
from megamoe.suite.record import record
from megamoe.suite.replay import replay_case
from megamoe.suite.table import select, select_implementations

OPERATION = "prepare_megamoe_bf16_inputs"


def run(*arguments: str):
    return CliRunner().invoke(record, list(arguments), catch_exceptions=False)


def smoke(implementation: str, operations: str, *arguments: str):
    return run("--impl", implementation, "--op", operations, "--tier", "smoke", "--device", "cpu", *arguments)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of somebody's own functions, by its source."""

    def make(source: str) -> str:
        name = f"recorded_module_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(tmp_path))
        # for processes of their own
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return name

    yield make
    for name in [n for n in sys.modules if n.startswith("recorded_module_")]:
        del sys.modules[name]


def test_what_is_recorded_replays(tmp_path):
    out, report = tmp_path / "found.safetensors", tmp_path / "found.json"
    done = smoke("reference", f"{OPERATION},run_mega_moe_nvfp4", "--out", str(out), "--json", str(report))
    assert done.exit_code == 0, done.output
    document = json.loads(report.read_text())
    bundle = read_bundle(out)
    assert len(bundle.cases) == document["passed"] == document["cases"] > 1
    assert bundle.metadata["producer"] == "reference"
    assert document["files"] == [str(out)]
    assert document["bytes_differing"] == 0 < document["bytes_compared"]
    for case in bundle.cases:
        (operation,) = select(case.op)
        (reference,) = select_implementations(operation, "reference", "cpu")
        result = replay_case(case, reference)
        assert result.status == "passed", result.problems()
        assert result.bytes_compared > 0


def test_several_implementations_go_into_one_bundle(tmp_path):
    out = tmp_path / "both.safetensors"
    done = smoke("reference,triton", OPERATION, "--out", str(out))
    assert done.exit_code == 0, done.output
    bundle = read_bundle(out)
    assert bundle.metadata["producer"] == "reference, triton"
    first, second = bundle.cases
    assert {first.case.split("@")[1], second.case.split("@")[1]} == {"reference", "triton"}
    assert first.params == second.params


def test_a_difference_is_recorded_and_is_exit_code_1(tmp_path, module):
    name = module(f"""
        from reference.staging import {OPERATION} as right

        def {OPERATION}(hidden_states, topk_weights, topk_ids, x, topk_idx_out, topk_weights_out,
        is_padding=None):
            right(hidden_states, topk_weights, topk_ids, x, topk_idx_out, topk_weights_out, is_padding)
            topk_weights_out[0, 0] += 1
        """)
    out = tmp_path / "wrong.safetensors"
    done = run(
        "--impl", f"{name}:", "--op", OPERATION, "--tier", "smoke", "--device", "cpu", "--out", str(out)
    )
    assert done.exit_code == 1, done.output
    assert "topk_weights_out" in done.output
    (case,) = read_bundle(out).cases
    (operation,) = select(case.op)
    (reference,) = select_implementations(operation, "reference", "cpu")
    result = replay_case(case, reference)
    assert result.status == "failed"
    assert [o.output for o in result.outputs if o.problem] == ["topk_weights_out"]


def test_an_implementation_that_varies_is_not_recorded(tmp_path, module):
    name = module(f"""
        from reference.staging import {OPERATION} as right
        calls = []

        def {OPERATION}(hidden_states, topk_weights, topk_ids, x, topk_idx_out, topk_weights_out,
        is_padding=None):
            right(hidden_states, topk_weights, topk_ids, x, topk_idx_out, topk_weights_out, is_padding)
            calls.append(0)
            if len(calls) == 3:
                topk_idx_out[0, 0] += 1
        """)
    out = tmp_path / "unstable.safetensors"
    arguments = (
        "--impl",
        f"{name}:",
        "--op",
        OPERATION,
        "--tier",
        "smoke",
        "--device",
        "cpu",
        "--out",
        str(out),
    )
    done = run(*arguments, "--repeat", "3")
    assert done.exit_code == 1
    assert "not repeatable: topk_idx_out" in done.output
    assert not out.exists()


def test_an_exception_costs_its_case_only(tmp_path, module):
    name = module(f"""
        from reference.staging import {OPERATION} as right

        def {OPERATION}(hidden_states, *arguments, **options):
            if hidden_states.shape[0] == 1:
                raise RuntimeError("no kernel for one token")
            right(hidden_states, *arguments, **options)
        """)
    out, report = tmp_path / "some.safetensors", tmp_path / "some.json"
    done = run(
        "--impl", f"{name}:", "--op", OPERATION, "--device", "cpu", "--out", str(out), "--json", str(report)
    )
    assert done.exit_code == 1
    document = json.loads(report.read_text())
    assert document["failed"] > 0
    assert len(read_bundle(out).cases) == document["passed"] == document["cases"] - document["failed"] > 0
    errors = [result["error"] for result in document["results"] if result["status"] == "failed"]
    assert all("no kernel for one token" in error for error in errors)


def test_a_process_that_dies_costs_its_operation_only(tmp_path, module):
    name = module(f"""
        import os
        from reference.staging import {OPERATION}

        def prepare_megamoe_nvfp4_block_inputs(*arguments, **options):
            os.abort()
        """)
    out, report = tmp_path / "rest.safetensors", tmp_path / "rest.json"
    operations = f"{OPERATION},prepare_megamoe_nvfp4_block_inputs"
    done = smoke(f"{name}:", operations, "--isolate", "--out", str(out), "--json", str(report))
    assert done.exit_code == 1, done.output
    assert {case.op for case in read_bundle(out).cases} == {OPERATION}
    document = json.loads(report.read_text())
    (dead,) = [each for each in document["operations"] if "error" in each]
    assert dead["op"] == "prepare_megamoe_nvfp4_block_inputs"
    assert "the process ended with -6" in dead["error"]


def test_a_broken_device_ends_the_recording(tmp_path, monkeypatch):
    """After a sticky CUDA error every launch fails: the cases that come later are not blamed for it."""
    (operation,) = select(OPERATION)
    cases = operation.cases("default")[:4]
    (implementation,) = select_implementations(operation, "reference", "cpu")
    from megamoe.suite.runner import Result

    def run_case(case, implementation, device, keep):
        number = cases.index(case)
        result = Result(
            case.id, case.operation.name, "", "reference", device, "failed" if number else "passed"
        )
        return result if number else real_run_case(case, implementation, "cpu", keep=True)

    real_run_case = recording.run_case
    monkeypatch.setattr(recording, "run_case", run_case)
    monkeypatch.setattr(recording, "_broken_context", lambda: "an illegal memory access was encountered")
    writer = recording.BundleWriter(tmp_path / "part.safetensors", "test", "cuda", 1 << 30)
    results = recording.record_cases([(case, implementation) for case in cases], writer, "cuda")
    assert [r.status for r in results] == ["passed", "failed", "failed", "failed"]
    assert [("answers nothing more" in r.error) for r in results] == [False, False, True, True]
    assert len(read_bundle(tmp_path / "part.safetensors").cases) == 1


def test_large_recordings_are_split(tmp_path):
    (operation,) = select(OPERATION)
    (implementation,) = select_implementations(operation, "reference", "cpu")
    pairs = [(case, implementation) for case in operation.cases("default")]
    writer = recording.BundleWriter(tmp_path / "many.safetensors", "reference", "cpu", 20_000)
    recording.record_cases(pairs, writer, "cpu")
    assert len(writer.files) > 2
    assert writer.files[1].endswith("many-2.safetensors")
    found = [case.case for file in writer.files for case in read_bundle(file).cases]
    assert found == [case.id for case, _ in pairs]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--impl", "nobody"), "--impl 'nobody': expected one of"),
        (("--impl", "reference", "--op", "nothing"), "no operation matches --op 'nothing'"),
        (("--impl", "reference", "--case", "nothing"), "no case matches"),
        (("--impl", "reference", "--require", "sm20"), "--require sm20"),
        (("--impl", "deep_gemm", "--op", "run_mega_moe_*"), "nothing was recorded: every case was skipped"),
    ],
)
def test_what_cannot_run_is_exit_code_2(tmp_path, arguments, message):
    out = tmp_path / "none.safetensors"
    done = run(*arguments, "--device", "cpu", "--out", str(out))
    assert done.exit_code == 2
    assert message in done.stderr
    assert not out.exists()
