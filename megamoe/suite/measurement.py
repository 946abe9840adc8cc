"""What `megamoe bench` measures: a case, the implementations side by side.

None of them is timed unless it compares equal on that very shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megamoe.bundle import extent
from megamoe.suite import timing
from megamoe.suite.compare import Observed
from megamoe.suite.operation import Call, Case, Implementation, Operation, Params, load
from megamoe.suite.rotation import Rotation
from megamoe.suite.runner import describe_error, execute, run_case

Status = Literal["timed", "differs", "skipped", "failed"]

# A row's generator makes at most this many tokens; a longer case draws its rows from them, in random order.
# Prime, and no size that another axis has: a first axis of this length is the axis of tokens.
GENERATED_TOKENS = 2039
TOGETHER = 4  # cases timed in the same rounds: their memory lives at the same time
COPY, MARK = " copy ", " by "  # between the number of a case and a name
# What is measured unless the command line says otherwise, where a row has the parameter.
DEFAULTS: Params = {"values": "random", "topk": 8, "experts": 256, "ids": "i32"}


@dataclass(frozen=True)
class Measurement:
    """One implementation on one case.

    bytes_moved: every input once and every output once. copy_us: what a device copy of as many bytes took in
    the same run. us: median; low_us and high_us: quartiles. sets: of buffers that its calls rotated over.
    seed: of its inputs. detail: why it was not timed.
    """

    op: str
    case: str
    params: Params
    implementation: str
    device: str
    status: Status
    detail: str = ""
    bytes_compared: int = 0
    bytes_moved: int = 0
    copy_us: float | None = None
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    method: str = ""
    sets: int = 0
    seed: int = 0

    @property
    def share_of_copy(self) -> float | None:
        """Of the copy limit: 1.0 is as fast as copying."""
        return None if self.us is None or self.copy_us is None else self.copy_us / self.us


def cases_of(operation: Operation, recipes: Sequence[str], axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """The product of the axes that the row has, over the row's parameters and DEFAULTS.

    Buffers that may have more rows than there are tokens ("rows") have as many unless an axis says otherwise.
    """
    params = operation.defaults | {k: v for k, v in DEFAULTS.items() if k in operation.defaults}
    found: list[Params] = [params]
    own = {name: values for name, values in axes.items() if name in operation.defaults}
    for name, values in (({"recipe": recipes} if recipes else {}) | own).items():
        found = [one | {name: value} for one in found for value in values]
    if "rows" in operation.defaults and "rows" not in own:
        found = [one | {"rows": one["tokens"]} for one in found]
    return [Case(operation, one) for one in found]


def together(cases: Sequence[Case], varied: Collection[str]) -> list[list[Case]]:
    """Runs of at most TOGETHER cases of one operation that differ in the parameters ``varied`` alone."""

    def fixed(case: Case) -> tuple[str, Params]:
        return case.operation.name, {k: v for k, v in case.params.items() if k not in varied}

    runs = [list(run) for _, run in groupby(cases, fixed)]
    return [run[i : i + TOGETHER] for run in runs for i in range(0, len(run), TOGETHER)]


def measure_cases(
    cases: Sequence[Case],
    implementations: Sequence[Implementation],
    device: str,
    rounds: int | None = None,
    rotation_bytes: int = timing.ROTATION_BYTES,
) -> list[Measurement]:
    """Compare each implementation with the reference on these very shapes, then time those that agree.

    ``cases`` of one operation, ``implementations`` of it. All are timed in the same rounds, on inputs drawn
    from one seed and, where they are the same, in the same memory, so that cases can be set against each
    other as well as implementations. The reference runs on ``device`` (its bytes do not depend on it).
    Whatever an implementation raises is its result. rotation_bytes: what the sets of buffers that the calls
    of a case rotate over hold together.
    """
    compared = [_compare(case, cases[0].seed, implementations, device) for case in cases]
    if device == "cuda":  # memory of earlier sizes is given back, not cut up for this one
        torch.cuda.empty_cache()
    candidates: dict[str, Sequence[timing.Call]] = {}
    sets = [timing.rotation_count(one.moved, device, rotation_bytes) for one in compared]
    rotation = Rotation(device)
    for index, one in enumerate(compared):
        made = _candidates(one, device, sets[index], rotation)
        candidates |= {f"{index}{name}": calls for name, calls in made.items()}
    timings = timing.measure(candidates, device, rounds) if candidates else {}
    found: list[Measurement] = []
    for index, one in enumerate(compared):
        copies = [timings[name].median_us for name in timings if name.startswith(f"{index}{COPY}")]
        for _, measured in one.measured:
            took = timings.get(f"{index}{MARK}{measured.implementation}")
            found.append(measured if took is None else _timed(measured, took, min(copies), sets[index]))
    return found


def _timed(measured: Measurement, took: timing.Timing, copy_us: float, sets: int) -> Measurement:
    return dataclasses.replace(
        measured,
        copy_us=copy_us,
        us=took.median_us,
        low_us=took.low_us,
        high_us=took.high_us,
        method=took.method,
        sets=sets,
    )


@dataclass(frozen=True)
class _Compared:
    """A case and what comparing said: its call (None if it cannot be made), bytes that must move, results."""

    call: Call | None
    moved: int
    measured: list[tuple[Implementation, Measurement]]


def _compare(case: Case, seed: int, implementations: Sequence[Implementation], device: str) -> _Compared:
    blank = Measurement(case.operation.name, case.id, case.params, "", device, "failed", seed=seed)
    try:
        call = case.operation.call(case.params, draw_inputs(case, seed))
        expected = execute(call, load(case.operation.reference), case.seed, device)
    except Exception as error:  # a case that cannot be made is the result of everything measured on it
        reason = f"reference: {describe_error(error)}"
        failed = [dataclasses.replace(blank, implementation=i.name, detail=reason) for i in implementations]
        return _Compared(None, 0, list(zip(implementations, failed, strict=True)))
    moved = moved_bytes(case.operation, call, expected)
    measured = []
    for implementation in implementations:
        result = run_case(case, implementation, device, expected, call).without_tensors()
        status: Status = "timed" if result.status == "passed" else "differs" if result.outputs else "failed"
        measurement = dataclasses.replace(
            blank,
            implementation=implementation.name,
            status="skipped" if result.skip else status,
            detail=str(result.skip) if result.skip else "; ".join(result.problems()),
            bytes_compared=result.bytes_compared,
            bytes_moved=moved,
        )
        measured.append((implementation, measurement))
    return _Compared(call, moved, measured)


def _candidates(
    compared: _Compared, device: str, sets: int, rotation: Rotation
) -> dict[str, Sequence[timing.Call]]:
    """What to time of a case: implementations that agree under MARK, copies of as many bytes under COPY."""
    green = [one for one, measured in compared.measured if measured.status == "timed"]
    if compared.call is None or not green:
        return {}
    keywords = rotation.keywords(compared.call, sets)
    found = {COPY + name: calls for name, calls in timing.copies(compared.moved, sets, device).items()}
    for implementation in green:
        function = load(implementation.target)
        found[MARK + implementation.name] = [partial(function, **one) for one in keywords]
    return found


def draw_inputs(case: Case, seed: int) -> dict[str, Tensor]:
    """The case's inputs from that seed; beyond GENERATED_TOKENS tokens, rows drawn from that many.

    Strides stay of the kind that the case has, and padding at the end stays there.
    """
    tokens = case.params["tokens"]
    generated = case.params | {"tokens": min(tokens, GENERATED_TOKENS)}
    made = case.operation.inputs(generated, np.random.default_rng(seed))
    if tokens <= GENERATED_TOKENS:
        return made
    rows = torch.from_numpy(np.random.default_rng((seed, tokens)).integers(0, GENERATED_TOKENS, tokens))
    rows[:GENERATED_TOKENS] = torch.arange(GENERATED_TOKENS)
    if case.params.get("padding") == "tail":
        rows = rows[made["is_padding"][rows].byte().argsort(stable=True)]
    return {
        name: _take(one, rows) if one.shape[:1] == (GENERATED_TOKENS,) else one for name, one in made.items()
    }


def _take(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows] with the tensor's strides (longer, if over all rows) and more of what is between them."""
    taken = tensor[rows]
    if tensor.is_contiguous():
        return taken
    span, longer = (count * tensor.stride(0) for count in (len(tensor), len(rows) - len(tensor)))
    strides = tuple(one + longer if one >= span else one for one in tensor.stride())
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    length = tensor.storage_offset() + extent(tuple(taken.shape), strides)
    memory = memory.repeat(-(-length // len(memory)))
    return memory.as_strided(taken.shape, strides, tensor.storage_offset()).copy_(taken)


def moved_bytes(operation: Operation, call: Call, expected: Mapping[str, Observed]) -> int:
    """Bytes that must move: each tensor that is read once, each output once (one that is added to: twice)."""
    total = sum(one.nbytes for one in call.arguments.values() if isinstance(one, Tensor))
    for name, observed in expected.items():
        size = observed.tensor.nbytes
        if (
            operation.outputs[name].layout == "shared_scale_pages"
        ):  # of a page, only the rows of tokens are written
            rows = call.arguments["hidden_states"].shape[0]
            size = rows * observed.tensor.shape[1] * observed.tensor.element_size()
        spec = call.buffers.get(name)
        total += size * (2 if spec is not None and spec.initial is not None else 1)
    return total
