"""Running cases for a recording: bundles of what came out, one process an operation where a launch may take
it down.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megamoe import bundle
from megamoe.capability import probe
from megamoe.suite.buffers import Buffer
from megamoe.suite.compare import Observed
from megamoe.suite.operation import Case, Implementation, load
from megamoe.suite.replay import record_case
from megamoe.suite.runner import Result, compare_outputs, execute, run_case, why_skipped

__all__ = ["BundleWriter", "describe_producer", "groups_of", "record_cases", "record_in_processes"]


class BundleWriter:
    """Collects cases and writes them to ``path``; after ``file_bytes`` of tensors another file is begun, with
    a number before the suffix.
    """

    def __init__(self, path: Path, producer: str, device: str, file_bytes: int) -> None:
        self.path, self.producer, self.device, self.file_bytes = path, producer, device, file_bytes
        self.files: list[str] = []
        self._cases: list[bundle.Case] = []
        self._bytes = 0

    def add(self, case: bundle.Case) -> None:
        tensors = [*case.inputs.values(), *(output.tensor for output in case.outputs.values())]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._cases and self._bytes + size > self.file_bytes:
            self.flush()
        self._cases.append(case)
        self._bytes += size

    def flush(self) -> None:
        """Write what has been collected, if anything."""
        if not self._cases:
            return
        number = len(self.files) + 1
        path = (
            self.path if number == 1 else self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")
        )
        triton = probe("triton")
        version = triton.reason if triton.ok else None
        bundle.write_bundle(path, self._cases, producer=self.producer, device=self.device, triton=version)
        self.files.append(str(path))
        self._cases, self._bytes = [], 0


def describe_producer(implementation: str) -> str:
    """Implementation and, for deep_gemm, the version that its build claims."""
    found = probe("deep_gemm")
    return (
        f"{implementation} {found.reason}"
        if implementation.startswith("deep_gemm") and found.ok
        else implementation
    )


def record_cases(
    pairs: Sequence[tuple[Case, Implementation]],
    writer: BundleWriter,
    device: str,
    repeat: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Result]:
    """Run each case, compare it with the reference, and add what it produced to the bundle, equal or not.

    repeat: runs that must give the same bytes; a case that does not is a failure and is not recorded. A CUDA
    error that outlives its launch ends the recording: the rest of the cases are failures that say so.
    """
    results: list[Result] = []
    broken = ""
    several = len({implementation.name for _, implementation in pairs}) > 1
    for case, implementation in pairs:
        if broken:
            skeleton = Result(
                case.id, case.operation.name, case.recipe, implementation.name, device, "failed"
            )
            results.append(replace(skeleton, error=broken))
            continue
        result = run_case(case, implementation, device, keep=True)
        if result.actual:
            inputs = case.inputs()
            outputs = {name: _on_cpu(seen) for name, seen in result.actual.items()}
            unstable = _repeat(case, implementation, device, repeat - 1, outputs, inputs)
            if unstable:
                result = replace(result, status="failed", error=unstable)
            else:
                recorded = record_case(case, outputs, inputs)
                # A name is used once in a bundle: that of the implementation tells the recordings of a case
                # apart.
                writer.add(
                    replace(recorded, case=f"{recorded.case}@{implementation.name}") if several else recorded
                )
        elif result.status == "failed" and device == "cuda":
            reason = _broken_context()
            broken = f"not run: since {case.id} the device answers nothing more ({reason})" if reason else ""
        results.append(result.without_tensors())
        progress(1)
    writer.flush()
    return results


def _repeat(
    case: Case,
    implementation: Implementation,
    device: str,
    times: int,
    first: Mapping[str, Observed],
    inputs: dict[str, torch.Tensor],
) -> str:
    """What differed in a repetition, or ""."""
    function = load(implementation.target)
    for _ in range(times):
        again = execute(case.operation.call(case.params, inputs), function, case.seed, device)
        for output in compare_outputs(case.operation, first, again):
            if output.problem:
                return f"not repeatable: {output.output}: {output.problem}"
    return ""


def _on_cpu(seen: Observed) -> Observed:
    """The same output in CPU memory, with its strides: Tensor.cpu() would close the gaps between elements."""
    tensor = seen.tensor.detach()
    if not tensor.is_cuda:
        return seen
    memory = bundle.raw_memory(bundle.as_bytes(tensor)).cpu().view(tensor.dtype)
    buffer = None
    if seen.buffer is not None:
        whole = seen.buffer.memory.cpu()
        offset = tensor.storage_offset()
        buffer = Buffer(whole, whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset))
    return Observed(memory.as_strided(tensor.shape, tensor.stride()), buffer, seen.aliases)


def _broken_context() -> str:
    """Why this process's CUDA context is of no more use, or ""."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def groups_of(pairs: Sequence[tuple[Case, Implementation]], device: str) -> list[tuple[str, bool]]:
    """Operations that share a process, as globs, and whether any of their cases can run here at all.

    Operations with the same needs go together: each kernel of a library is a need of its own, and gets a
    process. Of functions without needs nothing is known: each gets one.
    """
    names: dict[tuple[str, ...], dict[str, None]] = {}
    runnable: dict[tuple[str, ...], bool] = {}
    needs: dict[str, set[str]] = {}
    for case, implementation in pairs:
        needs.setdefault(case.operation.name, set()).update(implementation.needs)
    for case, implementation in pairs:
        name = case.operation.name
        key = tuple(sorted(needs[name])) or (name,)
        names.setdefault(key, {})[name] = None
        runs = why_skipped(implementation, device, case) is None
        runnable[key] = runnable.get(key, False) or runs
    return [(",".join(found), runnable[key]) for key, found in names.items()]


def record_in_processes(
    groups: Sequence[str], writer: BundleWriter, arguments: Sequence[str], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One ``megamoe record`` process for each group, the parts put together: the documents of --json.

    A process that dies costs its group's cases, and its document says how it ended.
    """
    documents = []
    with tempfile.TemporaryDirectory(prefix="megamoe-record-") as folder:
        for number, names in enumerate(groups):
            part, report = Path(folder) / f"{number}.safetensors", Path(folder) / f"{number}.json"
            command = [sys.executable, "-m", "megamoe", "record", "--no-isolate", "--op", names, *arguments]
            done = subprocess.run(
                [*command, "--out", str(part), "--json", str(report)],
                capture_output=True,
                text=True,
                check=False,
            )
            if report.is_file():
                documents.append(json.loads(report.read_text()))
                progress(done.stdout.rstrip())
            else:
                tail = (done.stderr or done.stdout).strip().splitlines()[-5:]
                error = f"the process ended with {done.returncode}: {' | '.join(tail)}"
                documents.append({"op": names, "cases": 0, "failed": 1, "error": error})
                progress(f"{names}: {error}")
            for file in documents[-1].get("files", []):
                for case in bundle.read_bundle(file).cases:
                    writer.add(case)
    writer.flush()
    return documents
