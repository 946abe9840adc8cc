"""pytest's side of the suite: options, header, strict skips, seeds, GPUs for xdist workers, CUDA errors that
stick, and a summary of what ran where. ``conftest.py`` loads it."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamoe.capability import all_names, probe
from megamoe.suite.environment import devices, versions
from megamoe.suite.operation import TIERS, stable_seed
from megamoe.suite.runner import SKIP_REASONS, Skip
from megamoe.suite.session import available_cores

_LOST = pytest.StashKey[str]()  # the test that broke this process's CUDA context
_PROPERTY = "megamoe_result"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megamoe")
    group.addoption(
        "--device", choices=["cpu", "cuda"], help="where implementations run (default: cuda if there is one)"
    )
    group.addoption("--tier", choices=TIERS, default="default", help="cases of the differential test")
    group.addoption("--impl", help="one implementation of the table, or package.module[:prefix]")
    group.addoption(
        "--require", action="append", default=[], metavar="CAP", help="skips for lack of CAP are failures"
    )
    group.addoption(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run each differential case N times: identical bytes",
    )
    group.addoption("--artifacts", default="artifacts", metavar="DIR", help="bundles and pages of failures")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(*capabilities): skip unless every capability is there")
    config.addinivalue_line("markers", "slow: more than ten seconds on one core")
    _steady_hypothesis()
    _share_cores(config)
    _bind_to_gpu(config)
    for name in config.getoption("--require"):
        try:
            probe(name)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    if config.getoption("--device") == "cuda" and not probe("cuda").ok:
        raise pytest.UsageError(f"--device cuda: {probe('cuda').reason}")


def _steady_hypothesis() -> None:
    """Examples come from the test, as every other input does, and no example is timed."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    hypothesis: Any = importlib.import_module("hypothesis")
    hypothesis.settings.register_profile("megamoe", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("megamoe")


def pytest_report_header(config: pytest.Config) -> list[str]:
    found = versions()
    have = [name for name in all_names() if probe(name).ok]
    return [
        "megamoe: " + ", ".join(f"{name} {version}" for name, version in found.items() if name != "megamoe"),
        f"devices: {'; '.join(devices())}",
        f"runs on: {run_device(config)}, tier {config.getoption('--tier')}; capabilities: {', '.join(have)}",
    ]


def run_device(config: pytest.Config) -> str:
    """Where implementations run in this session."""
    return config.getoption("--device") or ("cuda" if probe("cuda").ok else "cpu")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """ "cpu" or "cuda": where implementations run."""
    return run_device(request.config)


@pytest.fixture
def artifacts(request: pytest.FixtureRequest) -> Path:
    """Folder for what a failure leaves behind; created by whoever writes into it."""
    return Path(request.config.rootpath) / request.config.getoption("--artifacts")


def skip(reason: Skip) -> None:
    """Skip this test for a reason of the vocabulary."""
    pytest.skip(str(reason))


def note_result(
    request: pytest.FixtureRequest, *, op: str, implementation: str, device: str, compared: int
) -> None:
    """What the summary counts."""
    request.node.user_properties.append((_PROPERTY, (op, implementation, device, compared)))


# ---- seeds and skips


def pytest_runtest_setup(item: pytest.Item) -> None:
    seed = stable_seed(item.nodeid)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
    for mark in item.iter_markers("requires"):
        for name in mark.args:
            found = probe(name)
            if not found.ok:
                skip(Skip("needs capability", f"{name} ({found.reason})", name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        complaint = _complaint(_skip_reason(report), item.config.getoption("--require"))
        if complaint:
            report.outcome = "failed"
            report.longrepr = complaint
    return report


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def _complaint(reason: str, required: list[str]) -> str:
    """Why a skip must not pass as one, or ""."""
    kind, _, detail = reason.partition(": ")
    if kind not in SKIP_REASONS:
        return f"skipped for {reason!r}, which is none of: {', '.join(SKIP_REASONS)}"
    missing = re.match(r"[\w.]+", detail)
    for name in required:
        if (
            kind == "needs capability"
            and missing
            and (missing[0] == name or missing[0].startswith(f"{name}."))
        ):
            return f"required: {reason}"
    return ""


# ---- a CUDA error that sticks is the fault of one test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            error = device_error()
            if error:
                item.config.stash[_LOST] = item.nodeid
                pytest.fail(f"the CUDA context is lost: {error}", pytrace=False)


def device_error() -> str:
    """What the device says now, "" if it works."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """After a lost context, tests of this process run in processes of their own."""
    if _LOST not in item.config.stash:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_elsewhere(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_elsewhere(item: pytest.Item) -> Iterator[pytest.TestReport]:
    options = [f"--{name}={item.config.getoption(f'--{name}')}" for name in ("tier", "repeat", "artifacts")]
    options += [
        f"--{name}={value}" for name in ("device", "impl") if (value := item.config.getoption(f"--{name}"))
    ]
    options += [f"--require={name}" for name in item.config.getoption("--require")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-q",
        "-rs",
        *options,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, item.nodeid],
        cwd=item.config.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    skipped = re.search(r"^SKIPPED \[\d+\] \S+: (.*)$", done.stdout, re.MULTILINE)
    outcome: Any = "failed" if done.returncode else "skipped" if skipped else "passed"
    longrepr: Any = None
    if outcome == "failed":
        longrepr = f"in a process of its own, after {item.config.stash[_LOST]}:\n{done.stdout}\n{done.stderr}"
    elif skipped:
        longrepr = (str(item.path), item.location[1], f"Skipped: {skipped[1]}")
    for when in ("setup", "call", "teardown"):
        keywords: Any = dict.fromkeys(item.keywords, 1)
        here: Any = outcome if when == "call" else "passed"
        text = longrepr if when == "call" else None
        stage: Any = when
        yield pytest.TestReport(item.nodeid, item.location, keywords, here, text, stage)


# ---- xdist


def _share_cores(config: pytest.Config) -> None:
    """Workers of xdist divide the cores: more threads than cores wait for each other most of the time."""
    worker = getattr(config, "workerinput", None)
    if worker is None or "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, available_cores() // int(worker["workercount"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for the processes that tests start
    torch.set_num_threads(threads)


def _bind_to_gpu(config: pytest.Config) -> None:
    """Give each xdist worker one GPU and its share of the memory, before CUDA is initialized."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.getoption("--device") == "cpu":
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    if not gpus:
        return
    number = int(re.sub(r"\D", "", worker["workerid"]) or 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    if probe("cuda").ok:
        sharing = -(-int(worker["workercount"]) // len(gpus))
        torch.cuda.set_per_process_memory_fraction(0.9 / sharing)


# ---- what ran where


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == _PROPERTY and report.when == "call":
                    counts = ran[tuple(value[:3])]
                    counts[0] += 1
                    counts[1] += outcome == "failed"
                    counts[2] += value[3]
    skips = Counter(
        re.sub(r"\s+", " ", _skip_reason(report))
        for report in terminalreporter.stats.get("skipped", [])
        if not hasattr(report, "wasxfail")
    )
    if ran:
        terminalreporter.section("compared byte for byte")
        for (op, implementation, where), (count, failed, compared) in sorted(ran.items()):
            verdict = f", {failed} FAILED" if failed else ""
            terminalreporter.write_line(
                f"{op} {implementation} {where}: {count} cases, {compared:,} bytes{verdict}"
            )
    if skips:
        terminalreporter.section("not run")
        for reason, count in sorted(skips.items()):
            terminalreporter.write_line(f"{count} tests: {reason}")
