"""megamoe bench: what is timed, what is refused, what is written. No time is asserted."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from bench_cases import FP8, reference_implementation, small_case
from click.testing import CliRunner

import reference
from megamoe.cli import main
from megamoe.suite import bench_report, measurement, timing
from megamoe.suite.peers import PEERS, parse_peer

SMALL = ("--op", FP8, "--tokens", "1,5", "--hidden", "128", "--device", "cpu", "--rounds", "2")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of peers: one that agrees, one that is wrong in a single bit, one that raises."""
    module = types.ModuleType("bench_peers")
    calls: list[str] = []

    def agree(**arguments: object) -> None:
        calls.append("agree")
        reference.prepare_megamoe_inputs(**arguments)

    def differ(**arguments: object) -> None:
        calls.append("differ")
        reference.prepare_megamoe_inputs(**arguments)
        arguments["x"].view(torch.uint8)[-1, -1] ^= 1

    def fail(**arguments: object) -> None:
        calls.append("fail")
        raise NotImplementedError("not on this machine")

    module.agree, module.differ, module.fail, module.calls = agree, differ, fail, calls
    monkeypatch.setitem(sys.modules, "bench_peers", module)
    return module


def test_reference_and_peer_are_timed_side_by_side(peers: types.ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "lines.jsonl"
    text = run(*SMALL, "--peer", "theirs=bench_peers:agree", "--json", str(target))
    assert "the references, by wall clock" in text
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    timed = {
        (line["params"]["tokens"], line["implementation"]) for line in lines if line["status"] == "timed"
    }
    assert timed == {(tokens, name) for tokens in (1, 5) for name in ("reference", "theirs")}
    for line in lines:
        assert line["format"] == "megamoe-bench/1"
        if line["status"] == "timed":
            assert line["us"] > 0
            assert line["copy_us"] > 0
            assert line["low_us"] <= line["us"] <= line["high_us"]
            assert line["share_of_copy"] == line["copy_us"] / line["us"]
            assert line["method"] == "wall clock"
            assert (line["sets"], line["rotation_mib"]) == (2, None)


def test_nothing_is_timed_that_differs(peers: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[set[str]] = []
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda c, *rest: timed.append(set(c)) or measure(c, *rest))
    text = run(*SMALL, "--peer", "theirs=bench_peers:differ", "--json", "-", code=1)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    theirs = [line for line in lines if line["implementation"] == "theirs"]
    assert [line["status"] for line in theirs] == ["differs", "differs"]
    assert all(line["us"] is None and "bytes differ" in line["detail"] for line in theirs)
    assert peers.calls == ["differ", "differ"]
    assert timed == [{f"0{measurement.COPY}runtime", f"0{measurement.MARK}reference"}] * 2


def test_a_peer_that_raises_is_reported(peers: types.ModuleType) -> None:
    text = run(*SMALL, "--peer", "theirs=bench_peers:fail", code=1)
    assert "failed: theirs on 2 case(s)" in text
    assert "not on this machine" in text


def test_against_an_earlier_run(peers: types.ModuleType, tmp_path: Path) -> None:
    earlier, later = tmp_path / "earlier.jsonl", tmp_path / "later.jsonl"
    run(*SMALL, "--json", str(earlier))
    lines = [json.loads(line) for line in earlier.read_text().splitlines()]
    for line in lines:
        line["environment"]["device"] = "another device"
    lines[0]["rotation_mib"] = 8
    del lines[1]["rotation_mib"]  # as in early runs
    lines[1]["device"] = "cuda"
    earlier.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run(*SMALL, "--against", str(earlier), "--json", str(later))
    assert "/ earlier" in text
    rotations = ("", ", rotating over 256 MiB", ", rotating over 8 MiB")
    others = "; ".join(f"another device{rotation}" for rotation in rotations)
    here = json.loads(later.read_text().splitlines()[0])["environment"]["device"]
    assert f"Measured on: {here}. The earlier run: {others}" in text
    times, conditions = bench_report.read_lines(earlier)
    assert conditions == set(others.split("; "))
    assert len(times) == 2
    assert "The earlier run" not in run(*SMALL, "--against", str(later))


@pytest.mark.parametrize(
    "change",
    [
        {"rotation_mib": "[/x]"},
        {"rotation_mib": "256"},
        {"rotation_mib": True},
        {"rotation_mib": -3},
        {"rotation_mib": float("nan")},
        {"environment": {"device": None}},
        {"us": 10**400},
    ],
    ids=["markup", "text", "bool", "negative", "nan", "no_device", "huge"],
)
def test_against_refuses_fields_of_other_types(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    run(*SMALL, "--json", str(path))
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(line | change))
    assert f"{path}:1: expected a line of megamoe-bench/1" in run(*SMALL, "--against", str(path), code=2)


def test_against_prints_what_a_file_says_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    run(*SMALL, "--json", str(path))
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(line | {"environment": {"device": "[/x]"}}))
    assert "The earlier run: [/x]" in run(*SMALL, "--against", str(path))


@pytest.mark.parametrize(
    "text",
    ["", "no json\n", '{"format": "other/1"}\n', '{"format": "megamoe-bench/1"}\n', "[1]\n"],
    ids=["empty", "words", "other_format", "no_fields", "list"],
)
def test_against_refuses_other_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert str(path) in run(*SMALL, "--against", str(path), code=2)


@pytest.mark.requires("matplotlib")
def test_plot_is_written(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "plot.svg"
    run(*SMALL, "--set", "eplb=none,record", "--plot", str(target))
    assert b"<svg" in target.read_bytes()


def test_settings_multiply_where_the_row_has_them() -> None:
    arguments = (
        "--op",
        "prepare_megamoe_*",
        "--tokens",
        "2",
        "--hidden",
        "128",
        "--device",
        "cpu",
        "--rounds",
        "2",
    )
    text = run(*arguments, "--set", "eplb=none,record", "--json", "-")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found = [(one["op"], one["params"].get("eplb")) for one in lines if one["implementation"] == "reference"]
    assert found.count((FP8, "record")) == found.count((FP8, None)) == 1
    assert found.count(("prepare_megamoe_nvfp4_block_inputs", None)) == 1


def test_buffers_are_as_long_as_the_tokens() -> None:
    arguments = ("--op", "mega_moe_pre_dispatch*", "--tokens", "2,9", "--hidden", "512", "--device", "cpu")
    text = run(*arguments, "--rounds", "2", "--json", "-")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    timed = [(line["op"], line["params"]["rows"]) for line in lines if line["status"] == "timed"]
    assert timed == [(f"mega_moe_pre_dispatch{arch}", rows) for arch in ("", "_sm90") for rows in (2, 9)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "nothing*"), "no operation matches"),
        (("--recipe", "nothing*"), "no recipe"),
        (("--tokens", "0"), "--tokens: expected positive integers"),
        (("--hidden", "many"), "--hidden: expected positive integers"),
        (("--set", "nothing=1"), "expected NAME=VALUE"),
        (("--set", "eplb"), "expected NAME=VALUE"),
        (("--peer", "math:sqrt"), "expected NAME=module:callable"),
        (("--peer", "a=no_such_module:f"), "No module named"),
        (("--peer", "a=math:no_such_function"), "no_such_function"),
        (("--impl", "nobody"), "expected one of"),
        (("--impl", "triton"), "only interpreted"),
        (("--against", "no_such_file"), "no_such_file"),
        (("--rotate", "8", "--device", "cpu"), "on a CPU calls rotate over two sets"),
        (("--rotate", "0"), "0 is not in the range"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "_".join(value).lstrip("-"),
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    assert message in run(*SMALL, *arguments, code=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU refuses --device cuda")
def test_no_gpu_is_an_environment_error() -> None:
    assert "--device cuda" in run("--device", "cuda", code=2)


@pytest.mark.parametrize(
    "options",
    [("--peer", "reference=bench_peers:differ"), ("--impl", "reference", "--impl", "reference")],
    ids=["peer", "impl"],
)
def test_two_of_a_name_are_refused(peers: types.ModuleType, options: tuple[str, ...]) -> None:
    """Results are told apart by the name: one that differs must not get the time of one that does not."""
    text = run(*SMALL, *options, code=2)
    assert "expected one implementation a name" in text
    assert "several of reference" in text
    assert peers.calls == []


def test_a_bad_reference_call_is_a_failure() -> None:
    text = run("--op", FP8, "--tokens", "2", "--hidden", "100", "--device", "cpu", code=1)
    assert "reference: ValueError" in text


def test_bytes_moved_are_each_tensor_once() -> None:
    """FP8 with top-k 8: 2 H read, H + H / 32 written, 8 ids and weights of 4 bytes in, 8 and 4 bytes out."""
    case = small_case(tokens=3)
    (found,) = measurement.measure_cases([case], [reference_implementation()], "cpu", 2)
    assert found.bytes_moved == 3 * (2 * 256 + 256 + 256 // 32 + 8 * (4 + 4 + 8 + 4))
    paged = small_case(tokens=3, shared_block_m=64)
    (found_paged,) = measurement.measure_cases([paged], [reference_implementation()], "cpu", 2)
    assert found_paged.bytes_moved - found.bytes_moved == 3 * 256 // 32
    mapped = small_case(tokens=3, eplb="record")
    (found_mapped,) = measurement.measure_cases([mapped], [reference_implementation()], "cpu", 2)
    inputs = mapped.inputs()
    extra = sum(inputs[name].nbytes for name in ("logical_to_physical_map", "logical_replica_count"))
    assert found_mapped.bytes_moved - found.bytes_moved == extra + 2 * inputs["expert_load"].nbytes + 5


def test_cases_that_differ_in_a_setting_are_timed_in_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two good cases around one that cannot be made, each with copies of its own."""
    rounds: list[list[str]] = []

    def measure(candidates: dict[str, object], device: str, count: int | None) -> dict[str, timing.Timing]:
        rounds.append(list(candidates))
        return {name: timing.Timing(10.0 + i, 0, 0, "graph") for i, name in enumerate(candidates)}

    monkeypatch.setattr(timing, "measure", measure)
    cases = [small_case(), small_case(hidden=100), small_case(eplb="record")]
    found = measurement.measure_cases(cases, [reference_implementation()], "cpu", 2)
    assert [one.status for one in found] == ["timed", "failed", "timed"]
    assert [one.us for one in found] == [11.0, None, 13.0]
    assert [one.copy_us for one in found] == [10.0, None, 12.0]
    assert [one.case for one in found] == [case.id for case in cases]
    assert [len(names) for names in rounds] == [4]


def test_together_are_cases_that_differ_in_what_is_varied_alone() -> None:
    cases = [small_case(tokens, eplb=eplb) for tokens in (2, 3) for eplb in (None, "record", "map")]
    groups = measurement.together(cases, {"eplb"})
    assert groups == [cases[:3], cases[3:]]
    assert measurement.together(cases, set()) == [[case] for case in cases]
    assert [len(group) for group in measurement.together(cases, {"eplb", "tokens"})] == [4, 2]
    assert measurement.together([], {"eplb"}) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("eplb=bogus", "expected a word of map, record, record_many, numbers, true, false or none"),
        ("eplb=", "got ''"),
        ("eplb=none,records", "got 'records'"),
        ("num_unpadded_tokens=all", "expected no words, numbers, true, false or none, got 'all'"),
        ("tokens=0,1", "this one is --tokens"),
        ("hidden=128", "this one is --hidden"),
        ("recipe=nope", "this one is --recipe"),
    ],
    ids=["word", "empty", "second", "number", "tokens", "hidden", "recipe"],
)  # fmt: skip
def test_a_setting_that_no_case_has_is_refused(setting: str, message: str) -> None:
    """It would be measured as something else, or fail far away."""
    assert message in " ".join(run(*SMALL, "--set", setting, code=2).split())


def test_candidates_take_turns() -> None:
    order: list[str] = []
    calls = {name: [lambda name=name: order.append(name)] for name in "ab"}
    timing.measure(calls, "cpu", rounds=3)
    assert order == ["a", "b"] * (3 + timing.WARM_UP_ROUNDS["cpu"])


def test_rotation_is_larger_than_a_cache_or_as_long_as_the_graph() -> None:
    assert timing.rotation_count(1, "cuda") == timing.LAUNCHES
    assert timing.rotation_count(1 << 30, "cuda") == 2
    count = timing.rotation_count(20 << 20, "cuda")
    assert 2 < count < timing.LAUNCHES
    assert count * (20 << 20) > timing.ROTATION_BYTES * 0.9
    assert timing.rotation_count(3 << 20, "cuda", 24 << 20) == 8
    assert timing.rotation_count(3 << 20, "cuda", 1 << 20) == 2


def test_calls_rotate_over_the_bytes_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str, int]] = []
    made: list[int] = []

    def measure(candidates: dict[str, list[object]], *_: object) -> dict[str, timing.Timing]:
        made.extend(len(calls) for calls in candidates.values())
        return {name: timing.Timing(1.0, 1, 1, "graph") for name in candidates}

    monkeypatch.setattr(timing, "rotation_count", lambda *arguments: asked.append(arguments) or 3)
    monkeypatch.setattr(timing, "measure", measure)
    (found,) = measurement.measure_cases([small_case()], [reference_implementation()], "cpu", 2, 12345)
    assert asked == [(found.bytes_moved, "cpu", 12345)]
    assert made == [3, 3]
    assert found.sets == 3


def test_pre_dispatch_is_compared_where_its_bytes_must_be_equal() -> None:
    (peer,) = PEERS[FP8]
    assert peer.supports is not None
    assert peer.supports(small_case().params) is None
    for name, value in {
        "values": "specials",
        "eplb": "record",
        "recipe": "fp8_fp32_g128",
        "ids": "i64",
    }.items():
        assert peer.supports(small_case().params | {name: value})


def test_peer_arguments_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in peer's adapter, over a stand-in with the library's signature and the reference's bytes."""
    library = types.ModuleType("deep_gemm")
    library.mega_moe_pre_dispatch = reference.mega_moe_pre_dispatch
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    (peer,) = PEERS[FP8]
    (found,) = measurement.measure_cases([small_case()], [dataclasses.replace(peer, needs=())], "cpu", 2)
    assert (found.status, found.detail) == ("timed", "")


@pytest.mark.parametrize("text", ["", "a", "a=b", "=m:f", "a=:f", "a=m:"])
def test_parse_peer_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=module:callable"):
        parse_peer(text)
