"""Runs many cases: in this process, or over several that can be lost without losing the run."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from megamoe import capability
from megamoe.suite.failure import write_failure
from megamoe.suite.operation import Case, Params
from megamoe.suite.runner import (
    Result,
    Skip,
    describe_error,
    expected_outputs,
    prepare_process,
    run_case,
    why_skipped,
)
from megamoe.suite.table import select_implementations, table

_CHUNK = 8  # cases handed to a process at a time
_WORTH_PROCESSES = 40  # fewer cases than this run faster than a second process starts


@dataclass(frozen=True)
class Job:
    """Cases to run, and how. Everything in it can be sent to another process."""

    cases: tuple[tuple[str, Params], ...]
    implementation: str | None
    device: str
    bundle_dir: str | None = None
    threads: int | None = None


def default_jobs(device: str, num_cases: int) -> int:
    """Processes to use, at most eight. On a GPU they share it: most of the time goes into compiling kernels
    and into the reference, which gets two cores each."""
    if num_cases < _WORTH_PROCESSES:
        return 1
    return max(1, min(8, available_cores() // (1 if device == "cpu" else 2)))


def run_cases(
    cases: Sequence[Case],
    implementation: str | None = None,
    device: str = "cpu",
    jobs: int = 1,
    bundle_dir: Path | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Result]:
    """Results of every case with every selected implementation, in the order of the cases. progress: called
    with the number of cases that were finished since the last call."""
    directory = None if bundle_dir is None else str(bundle_dir)
    isolated = jobs > 1 or device != "cpu"
    threads = max(1, available_cores() // jobs) if isolated else None
    size = max(1, min(_CHUNK, len(cases) // (4 * jobs))) if jobs > 1 else _CHUNK
    job = Job((), implementation, device, directory, threads)
    chunks = [
        replace(job, cases=tuple((case.operation.name, case.params) for case in cases[i : i + size]))
        for i in range(0, len(cases), size)
    ]
    found: list[list[Result]] = [[] for _ in chunks]
    if not isolated:
        for index, chunk in enumerate(chunks):
            for done in run_job(chunk):
                found[index] += done
                progress(1)
    else:
        for index, results, finished in _run_isolated(chunks, jobs):
            found[index] += results
            progress(finished)
    return [result for results in found for result in results]


def run_job(job: Job) -> Iterator[list[Result]]:
    """The results of each case of a job, one implementation after the other against one run of the
    reference."""
    if job.threads is not None:
        import torch

        torch.set_num_threads(job.threads)
    prepare_process(job.device, job.implementation)
    for name, params in job.cases:
        case = Case(table()[name], params)
        yield _run_one(case, job)


def _run_one(case: Case, job: Job) -> list[Result]:
    implementations = select_implementations(case.operation, job.implementation, job.device)
    call = expected = None
    results = []
    if not implementations:
        missing = Skip("not provided", f"no implementation {job.implementation or ''}".strip())
        name = job.implementation or "none"
        return [Result(case.id, case.operation.name, case.recipe, name, job.device, "skipped", skip=missing)]
    for implementation in implementations:
        if expected is None and why_skipped(implementation, job.device, case) is None:
            try:
                call = case.operation.call(case.params, inputs := case.inputs())
                expected = expected_outputs(case, call)
            except Exception as error:  # the reference failed: that is the result of every implementation
                results.append(
                    _failed(case, implementation.name, job.device, f"reference: {describe_error(error)}")
                )
                continue
        result = run_case(case, implementation, job.device, expected, call, keep=job.bundle_dir is not None)
        if job.bundle_dir is not None and result.status == "failed" and result.actual:
            write_failure(case, result, Path(job.bundle_dir), inputs)
        results.append(result.without_tensors())
    return results


def _failed(case: Case, implementation: str, device: str, error: str) -> Result:
    return Result(case.id, case.operation.name, case.recipe, implementation, device, "failed", error=error)


# ---- isolated processes


def _work(job: Job) -> tuple[list[list[Result]], bool]:
    """What a process does with a job: the results of its first cases, and whether the process can go on.
    After an error that a CUDA context does not recover from, it stops, so that later cases are not blamed."""
    found = []
    for results in run_job(job):
        found.append(results)
        if (
            job.device != "cpu"
            and any(result.status == "failed" for result in results)
            and not _device_works()
        ):
            return found, False
    return found, True


def _device_works() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).cpu()
    except RuntimeError:
        return False
    return True


def _run_isolated(chunks: list[Job], jobs: int) -> Iterator[tuple[int, list[Result], int]]:
    """(index of the chunk, results, cases finished), in order of completion. Cases after a lost process run
    in a new one; a case that loses its process alone is a failure."""
    todo = deque(enumerate(chunks))
    pool = _pool(jobs)
    running: dict[Future[tuple[list[list[Result]], bool]], tuple[int, Job]] = {}
    try:
        while todo or running:
            while todo and len(running) < jobs:
                index, job = todo.popleft()
                running[pool.submit(_work, job)] = (index, job)
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken: list[tuple[int, Job]] = []
            for future in done:
                index, job = running.pop(future)
                try:
                    results, healthy = future.result()
                except BrokenProcessPool:
                    broken.append((index, job))
                    continue
                yield index, [result for group in results for result in group], len(results)
                if not healthy:
                    todo.appendleft((index, replace(job, cases=job.cases[len(results) :])))
                    pool.shutdown()
                    pool = _pool(jobs)
            if broken:
                pool.shutdown()
                for index, job in [*broken, *running.values()]:
                    for single in job.cases:
                        yield index, _run_alone(replace(job, cases=(single,))), 1
                running.clear()
                pool = _pool(jobs)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_alone(job: Job) -> list[Result]:
    (name, params), *_ = job.cases
    case = Case(table()[name], params)
    with _pool(1) as pool:
        try:
            results, _ = pool.submit(_work, job).result()
        except BrokenProcessPool:
            implementation = job.implementation or "+".join(
                row.name for row in case.operation.implementations
            )
            return [_failed(case, implementation, job.device, "the process running it died")]
    return [result for group in results for result in group]


def _pool(jobs: int) -> ProcessPoolExecutor:
    # a forked child of a process that has used CUDA or several threads cannot be trusted
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_device() -> str:
    return "cuda" if capability.probe("cuda").ok else "cpu"
