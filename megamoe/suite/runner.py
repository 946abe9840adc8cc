"""Runs cases: the reference once, each implementation beside it, every output compared."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megamoe.capability import probe
from megamoe.suite.buffers import allocate
from megamoe.suite.compare import Observed, OutputComparison, compare_bitwise
from megamoe.suite.contracts import CONTRACTS
from megamoe.suite.operation import Call, Case, Implementation, Operation, load, stable_seed

Status = Literal["passed", "failed", "skipped"]
SkipReason = Literal["needs capability", "other device", "not provided", "not supported", "not for this kind"]
SKIP_REASONS: tuple[str, ...] = get_args(SkipReason)
_IMPLIES_CUDA = ("cuda", "sm", "deep_gemm")


@dataclass(frozen=True)
class Skip:
    """reason: one of SKIP_REASONS. capability: the missing one, if that is why. detail: in words."""

    reason: SkipReason
    detail: str
    capability: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Result:
    """What became of one case with one implementation on one device.

    unrecorded: outputs of a replayed call that its recording lacks, so that nothing compared them.
    """

    case: str
    op: str
    recipe: str
    implementation: str
    device: str
    status: Status
    outputs: tuple[OutputComparison, ...] = ()
    error: str = ""
    skip: Skip | None = None
    seconds: float = 0.0
    unrecorded: tuple[str, ...] = ()
    expected: Mapping[str, Observed] = field(default_factory=dict, repr=False)
    actual: Mapping[str, Observed] = field(default_factory=dict, repr=False)

    @property
    def bytes_compared(self) -> int:
        return sum(output.bytes_compared for output in self.outputs)

    @property
    def bytes_differing(self) -> int:
        return sum(output.bytes_differing for output in self.outputs)

    def problems(self) -> list[str]:
        """One line a failing output, or the error."""
        lines = [f"{output.output}: {output.problem}" for output in self.outputs if output.problem]
        return lines + ([self.error] if self.error else [])

    def without_tensors(self) -> Result:
        return replace(self, expected={}, actual={})


def why_skipped(implementation: Implementation, device: str, case: Case | None = None) -> Skip | None:
    """Why ``implementation`` cannot run here, or None if it can."""
    if device == "cpu" and any(need.startswith(_IMPLIES_CUDA) for need in implementation.needs):
        missing = next(need for need in implementation.needs if need.startswith(_IMPLIES_CUDA))
        found = probe(missing)
        if found.ok:
            return Skip("other device", "runs with --device cuda")
        return Skip("needs capability", f"{missing} ({found.reason})", missing)
    for need in implementation.needs:
        found = probe(need)
        if not found.ok:
            return Skip("needs capability", f"{need} ({found.reason})", need)
    if case is not None and implementation.supports is not None:
        refusal = implementation.supports(case.params)
        if refusal:
            return Skip("not supported", refusal)
    return None


def why_not_provided(implementation: Implementation) -> Skip | None:
    """Somebody's own module need not have every operation; an implementation of the table must exist."""
    if not is_module(implementation.name):
        return None
    try:
        load(implementation.target)
    except AttributeError as error:
        return Skip("not provided", str(error))
    return None


def prepare_process(device: str, implementation: str | None = None) -> None:
    """Call before an implementation is imported. Kernels of somebody's own module run in Triton's interpreter
    on a CPU; ours choose for each launch."""
    if device == "cpu" and implementation is not None and is_module(implementation):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def is_module(name: str) -> bool:
    """Whether an --impl is ``package.module[:prefix]`` rather than an implementation that a row names."""
    return "." in name or ":" in name


def execute(call: Call, function: Callable[..., Any], seed: int, device: str = "cpu") -> dict[str, Observed]:
    """Make the call on ``device`` with fresh copies of its arguments and freshly poisoned buffers; outputs by
    name.

    Raises AssertionError if an argument that is only read was changed, or if the returned values have other
    names or another number than the call declares; otherwise whatever the function raises.
    """
    arguments = copy_arguments(call.arguments, device)
    buffers = {
        name: allocate(spec, stable_seed(f"{seed}.{name}"), device) for name, spec in call.buffers.items()
    }
    views = {name: buffer.view for name, buffer in buffers.items()}
    keywords = call.bind(dict(arguments), views) if call.bind else {**arguments, **views}
    returned = function(**keywords)
    if device != "cpu":
        torch.cuda.synchronize()
    found = {name: Observed(buffer.view, buffer) for name, buffer in buffers.items()}
    found |= _name_returned(call.returns, returned, arguments)
    for name, before, after in _tensors(call.arguments, arguments):
        if not _same_storage_bytes(before, after):
            raise AssertionError(f"the argument {name} was changed by the call")
    return found


def run_case(
    case: Case,
    implementation: Implementation,
    device: str = "cpu",
    expected: Mapping[str, Observed] | None = None,
    call: Call | None = None,
    keep: bool = False,
) -> Result:
    """Run one case and compare. expected: the reference's outputs if they are known already
    (expected_outputs). keep: leave the outputs in the result."""
    operation = case.operation
    result = Result(case.id, operation.name, case.recipe, implementation.name, device, "passed")
    skip = why_skipped(implementation, device, case)
    if skip is not None:
        return replace(result, status="skipped", skip=skip)
    missing = why_not_provided(implementation)
    if missing is not None:
        return replace(result, status="skipped", skip=missing)
    started = time.perf_counter()
    try:
        call = operation.call(case.params, case.inputs()) if call is None else call
        if expected is None:
            expected = expected_outputs(case, call)
        actual = execute(call, load(implementation.target), case.seed, device)
        allowed = CONTRACTS[operation.contract](call, expected, actual)
        outputs = compare_outputs(operation, allowed, actual)
    except Exception as error:  # whatever an implementation raises is a failure of the case
        seconds = time.perf_counter() - started
        return replace(result, status="failed", error=describe_error(error), seconds=seconds)
    equal = all(output.equal for output in outputs)
    result = replace(
        result,
        status="passed" if equal else "failed",
        outputs=outputs,
        seconds=time.perf_counter() - started,
    )
    return replace(result, expected=expected, actual=actual) if keep else result


def expected_outputs(case: Case, call: Call | None = None) -> dict[str, Observed]:
    """The reference's outputs, on the CPU."""
    call = case.operation.call(case.params, case.inputs()) if call is None else call
    return execute(call, load(case.operation.reference), case.seed)


def compare_outputs(
    operation: Operation, expected: Mapping[str, Observed], actual: Mapping[str, Observed]
) -> tuple[OutputComparison, ...]:
    """Every output of the reference, in order; one that is missing or that the row does not declare is a
    difference."""
    found = []
    for name, left in expected.items():
        if name not in operation.outputs:
            raise KeyError(f"{operation.name} does not declare its output {name}")
        if name not in actual:
            found.append(OutputComparison(name, "not produced"))
            continue
        found.append(compare_bitwise(name, left, actual[name], operation.outputs[name].padding))
    return tuple(found)


def copy_arguments(arguments: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Deep copies on ``device`` with the same strides, offsets and shared storages."""
    storages: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_tensor(value, device, storages)
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        return value

    return {name: copy(value) for name, value in arguments.items()}


def storage_bytes(tensor: Tensor) -> Tensor:
    """uint8: all of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copy_tensor(tensor: Tensor, device: str, storages: dict[int, Tensor] | None = None) -> Tensor:
    """A copy of the whole storage on ``device`` with the same strides and offset. storages: copies that there
    are already, by address; they are shared and added to."""
    storages = {} if storages is None else storages
    storage = storage_bytes(tensor)
    key = storage.data_ptr() if storage.numel() else -id(tensor)
    if key not in storages:
        storages[key] = storage.to(device, copy=True)
    memory = storages[key]
    typed = torch.empty(0, dtype=tensor.dtype, device=device)
    return typed.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _name_returned(names: tuple[str, ...], returned: Any, arguments: dict[str, Any]) -> dict[str, Observed]:
    if not names:
        if returned is not None:
            raise AssertionError(f"the call must return None, got {type(returned).__name__}")
        return {}
    if isinstance(returned, Mapping):
        values = dict(returned)
    else:
        flat = _flatten(returned)
        if len(flat) != len(names):
            raise AssertionError(
                f"the call must return {len(names)} tensors ({', '.join(names)}), got {len(flat)}"
            )
        values = dict(zip(names, flat, strict=True))
    owners = {
        tensor.untyped_storage().data_ptr(): name
        for name, tensor, _ in _tensors(arguments, arguments)
        if tensor.numel()
    }
    found = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise AssertionError(f"the returned {name} must be a tensor, got {type(value).__name__}")
        found[name] = Observed(value, aliases=owners.get(value.untyped_storage().data_ptr()))
    return found


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]


def _tensors(before: Any, after: Any, name: str = "") -> list[tuple[str, Tensor, Tensor]]:
    if isinstance(before, Tensor):
        return [(name, before, after)]
    if isinstance(before, Mapping):
        items: Any = [(str(key), value, after[key]) for key, value in before.items()]
    elif isinstance(before, (list, tuple)):
        items = [(str(i), value, after[i]) for i, value in enumerate(before)]
    else:
        return []
    return [
        found for key, left, right in items for found in _tensors(left, right, f"{name}.{key}".lstrip("."))
    ]


def _same_storage_bytes(before: Tensor, after: Tensor) -> bool:
    return torch.equal(storage_bytes(before), storage_bytes(after).cpu())


def describe_error(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"
