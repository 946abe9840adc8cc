"""How long calls take. The one harness of `megamoe bench` and of the scripts in benchmarks/.

On a GPU: a CUDA graph of LAUNCHES calls over rotating sets of buffers (ROTATION_BYTES together, if nothing
else is asked for and that many sets can hold them), replayed between two events. A replay that is not timed
goes directly before: the device is still busy when the timed one is queued, so that the host's work is not in
it, and a candidate finds the caches as it left them itself, not as its neighbour in the round did. On a CPU:
one call a round, wall clock. The candidates of a measurement take turns within every round, so that a clock
that drifts is the same for all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

LAUNCHES = 20  # calls in a graph
ROUNDS = {"cuda": 15, "cpu": 5}
WARM_UP_ROUNDS = {"cuda": 3, "cpu": 1}
ROTATION_BYTES = 256 << 20  # several times the L2 cache of any GPU

_cuda: Any = torch.cuda  # parts of it have no types

Call = Callable[[], object]
Method = Literal["graph", "events", "wall clock"]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over the rounds and its quartiles.

    method: "graph" and "events" are GPU events around a graph and, for what cannot be captured, around the
    same calls one by one.
    """

    median_us: float
    low_us: float
    high_us: float
    method: Method


def rotation_count(set_bytes: int, device: str, rotation_bytes: int = ROTATION_BYTES) -> int:
    """How many sets of buffers of this size to rotate over: two, or more up to `rotation_bytes` together."""
    if device == "cpu":
        return 2
    return min(LAUNCHES, max(2, rotation_bytes // max(set_bytes, 1)))


def copies(num_bytes: int, sets: int, device: str) -> dict[str, Sequence[Call]]:
    """Copies that read and write ``num_bytes`` together: the faster says what moving so many bytes takes.

    The runtime's copy and, on a GPU, an elementwise kernel: the runtime's is fast or slow (2.7 of 4.2 TB/s on
    an H200) depending on sizes and addresses.
    """
    half = -(-max(num_bytes, 1) // 32) * 16
    shape, dtype = (half // 4,), torch.int32
    pairs = [
        (
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device).random_(),
        )
        for _ in range(sets)
    ]
    found: dict[str, Sequence[Call]] = {
        "runtime": [partial(target.copy_, source) for target, source in pairs]
    }
    if device != "cpu":
        found["kernel"] = [partial(torch.bitwise_not, source, out=target) for target, source in pairs]
    return found


def measure(
    candidates: Mapping[str, Sequence[Call]], device: str, rounds: int | None = None
) -> dict[str, Timing]:
    """Time every candidate: a sequence of equivalent calls, one a set of buffers, called in rotation."""
    if device == "cpu":
        return _measure_cpu(candidates, rounds or ROUNDS["cpu"])
    return _measure_cuda(candidates, rounds or ROUNDS["cuda"])


def _summarize(samples: list[float], method: Method) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return Timing(median, low, high, method)


def _measure_cpu(candidates: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(WARM_UP_ROUNDS["cpu"] + rounds):
        for name, calls in candidates.items():
            started = time.perf_counter()
            calls[index % len(calls)]()
            samples[name].append((time.perf_counter() - started) * 1e6)
    return {name: _summarize(found[WARM_UP_ROUNDS["cpu"] :], "wall clock") for name, found in samples.items()}


def _measure_cuda(candidates: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Timing]:
    torch.cuda.synchronize()  # the buffers were filled on another stream
    stream = _cuda.Stream()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    with torch.cuda.stream(stream):
        runs = {name: _captured(calls, stream) for name, calls in candidates.items()}
        for _ in range(WARM_UP_ROUNDS["cuda"] + rounds):
            for name, (run, _) in runs.items():
                start, end = _event(), _event()
                run()
                start.record(stream)
                run()
                end.record(stream)
                end.synchronize()
                samples[name].append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return {
        name: _summarize(samples[name][WARM_UP_ROUNDS["cuda"] :], method)
        for name, (_, method) in runs.items()
    }


def _event() -> Any:
    return _cuda.Event(enable_timing=True)


def _captured(calls: Sequence[Call], stream: Any) -> tuple[Call, Method]:
    def launch_all() -> None:
        for index in range(LAUNCHES):
            calls[index % len(calls)]()

    for call in calls[:2]:  # compiles and loads what the calls need
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            launch_all()
    except RuntimeError:  # it waits for the device, for example: time it as it is
        torch.cuda.synchronize()
        return launch_all, "events"
    return graph.replay, "graph"
