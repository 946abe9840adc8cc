"""Tiles and routing plans of the staging kernels: candidates beside the choice of `megamoe.kernels.tuning`.

    python benchmarks/staging_kernels.py [--hidden 7168 4096] [--tokens 1 8 ...] [--operation fp8 ...]

Method: that of `megamoe.suite.timing`, all candidates of a size in turns; microseconds per call. From what it
prints come the constants of `megamoe.kernels.tuning`. Run `staging_goldens.py` first: speed of wrong bytes
means nothing.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megamoe import eplb, staging
from megamoe.kernels import tuning
from megamoe.kernels.arguments import page_rows
from megamoe.kernels.tuning import Rule, Tile
from megamoe.suite.routing_inputs import eplb_tensors
from megamoe.suite.timing import Call, copies, measure, rotation_count

TOPK, EXPERTS, SLOTS = 8, 256, 4
RULES = {
    "fp8": "GROUP_RULES",
    "token": "TOKEN_RULES",
    "shared": "SHARED_TOKEN_RULES",  # with the MXFP8 input of shared experts
    "block": "BLOCK_RULES",
}
ONE_STEP = {"BLOCK_STEPS": (Rule(None, 1),)}
SHARED_BLOCK_M = 64
TILES = {
    "fp8": [(1, 512, 1), (1, 1024, 1), (1, 1024, 2), (1, 2048, 4), (2, 1024, 4), (4, 1024, 8)],
    "token": [(1, 2048, 4), (1, 4096, 8), (1, 8192, 16), (1, 4096, 4), (1, 1024, 2)],
    "shared": [(1, 2048, 4), (1, 4096, 8), (1, 1024, 2)],
    "block": [(1, 512, 1), (1, 1024, 1), (1, 1024, 2), (2, 1024, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 8)],
}  # fmt: skip
STYLES = {"fp8": "GROUP_EPLB", "token": "TOKEN_EPLB"}
EPLB: dict[str, tuple[range, dict[str, Any], dict[str, Any]]] = {  # for what tokens, settings, style
    "slot by slot": (range(1, 1 << 30), {}, {"counts_from": 1 << 40}),
    "slot by slot, spread": (range(64, 1 << 30), {}, {"counts_from": 1 << 40, "spreads": (Rule(None, 1.0),)}),
    "counted": (range(64, 1 << 30), {}, {"counts_from": 0}),
    "counted, 512 slots": (
        range(64, 1 << 30),
        {"COUNTED_SLOTS": 512, "COUNTED_WARP_SLOTS": 128},
        {"counts_from": 0},
    ),
    "tables not fetched": (range(512, 4096), {}, {"fetches": (Rule(None, False),)}),
    "tables fetched": (range(1, 1 << 30), {}, {"fetches": (Rule(None, True),)}),
    "ahead, 1 token": (range(1, 2048), {"AHEAD_TOKENS": (Rule(None, 1),)}, {}),
    "ahead, 2 tokens": (range(2, 2048), {"AHEAD_TOKENS": (Rule(None, 2),)}, {}),
    "ahead, 4 tokens": (range(4, 2048), {"AHEAD_TOKENS": (Rule(None, 4),)}, {}),
}


@dataclass(frozen=True)
class Candidate:
    """What is set in `megamoe.kernels.tuning`, and whether a call maps ("map") or also records ("record")."""

    settings: dict[str, Any] = field(default_factory=dict)
    eplb: str | None = None


def buffers(operation: str, tokens: int, hidden: int) -> dict[str, torch.Tensor]:
    """Inputs and outputs of one call."""
    device = "cuda"
    made = {
        "hidden_states": torch.randn(tokens, hidden, device=device).bfloat16(),
        "topk_weights": torch.rand(tokens, TOPK, device=device),
        "topk_ids": torch.randint(0, EXPERTS, (tokens, TOPK), dtype=torch.int32, device=device),
        "topk_idx_out": torch.empty(tokens, TOPK, dtype=torch.int64, device=device),
        "topk_weights_out": torch.empty(tokens, TOPK, device=device),
    }
    if operation == "fp8":
        made["x"] = torch.empty(tokens, hidden, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        made["x_sf"] = torch.empty(tokens, hidden // 128, dtype=torch.int32, device=device)
    else:
        made["x"] = torch.empty(tokens, hidden // 2, dtype=torch.uint8, device=device)
        if operation == "block":
            made["x_sf"] = torch.empty(tokens, hidden // 16, dtype=torch.uint8, device=device)
        else:
            made["x_sf"] = torch.empty(tokens, hidden // 64, dtype=torch.int32, device=device)
            made["x_scales"] = torch.empty(tokens, device=device)
        if operation == "shared":
            codes = torch.empty(tokens, hidden, dtype=torch.uint8, device=device)
            made["shared_x"] = codes.view(torch.float8_e4m3fn)
            rows = -(-tokens // SHARED_BLOCK_M) * page_rows(SHARED_BLOCK_M)
            made["shared_x_sf"] = torch.empty(hidden // 128, rows, dtype=torch.int32, device=device).t()
    return made


def rotating_buffers(operation: str, tokens: int, hidden: int) -> list[dict[str, torch.Tensor]]:
    """As many sets as calls rotate over."""
    count = rotation_count(moved_bytes(operation, tokens, hidden), "cuda")
    return [buffers(operation, tokens, hidden) for _ in range(count)]


FUNCTIONS: dict[str, Callable[..., None]] = {
    "fp8": staging.prepare_megamoe_inputs,
    "token": staging.prepare_megamoe_nvfp4_inputs,
    "shared": partial(staging.prepare_megamoe_nvfp4_inputs, shared_block_m=SHARED_BLOCK_M),
    "block": staging.prepare_megamoe_nvfp4_block_inputs,
}


def call_with(settings: dict[str, Any], function: Callable[..., None], arguments: dict[str, Any]) -> None:
    """A call under other constants, which are put back."""
    kept = {name: getattr(tuning, name) for name in settings}
    for name, value in settings.items():
        setattr(tuning, name, value)
    try:
        function(**arguments)
    finally:
        for name, value in kept.items():
            setattr(tuning, name, value)


def candidates(operation: str, tokens: int, hidden: int, tables_only: bool) -> dict[str, Candidate]:
    """By name; those of the tables first."""
    found = {"tables": Candidate()}
    if operation in STYLES:
        found |= {f"tables, eplb {kind}": Candidate(eplb=kind) for kind in ("record", "map")}
    if tables_only:
        return found
    for tile in TILES[operation]:
        if operation in ("fp8", "block") and hidden % tile[1]:
            continue
        name = "x".join(map(str, tile))
        rules = (Rule(None, Tile(*tile)),)
        found[name] = Candidate({RULES[operation]: rules} | (ONE_STEP if operation == "block" else {}))
        if operation == "fp8":
            found[f"{name}, eplb"] = Candidate({"GROUP_EPLB_RULES": rules}, "record")
    if operation == "block":
        steps = {n: Candidate({"BLOCK_STEPS": (Rule(None, n),)}) for n in (1, 2, 4, 8)}
        found |= {f"{n} tiles a program": one for n, one in steps.items()}
    if style := STYLES.get(operation):
        apart = getattr(tuning, style).apart
        other = {style: replace(getattr(tuning, style), apart=not apart)}
        found["eplb counters in runs" if apart else "eplb counters apart"] = Candidate(other, "record")
        for name, (numbers, settings, changes) in EPLB.items():
            if tokens in numbers:
                changed = {style: replace(getattr(tuning, style), **changes)}
                found[f"eplb {name}"] = Candidate(settings | changed, "record")
        for share in (0.0, 0.3, 0.9):
            spread = replace(getattr(tuning, style), spreads=(Rule(None, share),))
            found[f"eplb spread {share}"] = Candidate({style: spread}, "record")
    return found


def layer_state(kind: str) -> eplb.EplbLayerState:
    """Up to SLOTS replicas an expert, as in the table's cases, and a load that is recorded or not."""
    made = {name: one.cuda() for name, one in eplb_tensors(EXPERTS, SLOTS, np.random.default_rng(0)).items()}
    return eplb.EplbLayerState(
        made["expert_load"],
        made["logical_to_physical_map"],
        made["logical_replica_count"],
        torch.tensor(kind == "record", device="cuda"),
        [torch.tensor(1 << 30, dtype=torch.int32, device="cuda")],
    )


def calls(operation: str, candidate: Candidate, sets: Sequence[dict[str, torch.Tensor]]) -> list[Call]:
    """One call a set of buffers."""
    made: list[Call] = []
    for arguments in sets:
        state = {"eplb_state": layer_state(candidate.eplb)} if candidate.eplb else {}
        made.append(partial(call_with, candidate.settings, FUNCTIONS[operation], {**arguments, **state}))
    return made


def pre_dispatch() -> Callable[..., None] | None:
    try:
        import deep_gemm
    except Exception as error:
        print(f"no deep_gemm: {type(error).__name__}: {error}")
        return None
    return getattr(deep_gemm, "mega_moe_pre_dispatch", None)


def deep_gemm_call(function: Callable[..., None], b: dict[str, torch.Tensor]) -> None:
    function(b["hidden_states"], b["topk_ids"], b["topk_weights"], b["x"], b["x_sf"], b["topk_idx_out"],
             b["topk_weights_out"], b["hidden_states"].shape[0], 32)  # fmt: skip


def moved_bytes(operation: str, tokens: int, hidden: int) -> int:
    """Bytes a call must move: the hidden states once, every output once, the routing."""
    routing = TOPK * (4 + 4 + 8 + 4)
    outputs = hidden + hidden // 32 if operation == "fp8" else hidden // 2 + hidden // 16 + 4
    outputs += hidden + hidden // 32 if operation == "shared" else 0
    return (2 * hidden + outputs + routing) * tokens


def report(operation: str, tokens: Sequence[int], hidden: int, tables_only: bool) -> None:
    rows: dict[str, dict[int, float]] = {}
    peer = pre_dispatch() if operation == "fp8" else None
    for count in tokens:
        sets = rotating_buffers(operation, count, hidden)
        moved = moved_bytes(operation, count, hidden)
        timed = {f"copy, {name}": found for name, found in copies(moved, len(sets), "cuda").items()}
        for name, candidate in candidates(operation, count, hidden, tables_only).items():
            timed[name] = calls(operation, candidate, sets)
        if peer is not None:
            timed["deep_gemm"] = [partial(deep_gemm_call, peer, one) for one in sets]
        for name, timing in measure(timed, "cuda").items():
            rows.setdefault(name, {})[count] = timing.median_us
        del sets, timed
        torch.cuda.empty_cache()
    print(f"\n{operation} hidden {hidden}, us a call; tokens: " + " ".join(f"{t:>8}" for t in tokens))
    for name, values in rows.items():
        print(f"{name:>24} " + " ".join(f"{values.get(t, float('nan')):8.2f}" for t in tokens))


def run_warm_shares(count: int = 8) -> None:
    """Run the script itself once a share, side by side: `--warm i/count` beside its other arguments."""
    command = [sys.executable, *sys.argv, "--warm"]
    for worker in [subprocess.Popen([*command, f"{i}/{count}"]) for i in range(count)]:
        worker.wait()


def warm(shard: int, shards: int, hidden: list[int], operations: list[str], tokens: list[int]) -> None:
    """Compile a share of the candidates into Triton's cache."""
    jobs = [
        (operation, size, count, candidate)
        for operation in operations
        for size in hidden
        for count in tokens
        for candidate in candidates(operation, count, size, False).values()
        if candidate.eplb != "map"
    ]
    for operation, size, count, candidate in jobs[shard::shards]:
        for call in calls(operation, candidate, [buffers(operation, count, size)]):
            call()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048, 8192, 32768])
    parser.add_argument("--operation", nargs="+", default=["fp8", "token", "block"], choices=list(FUNCTIONS))
    parser.add_argument("--tables-only", action="store_true", help="no candidates, only the tables' choice")
    parser.add_argument("--warm", help="i/n: only compile share i of n")
    arguments = parser.parse_args()
    if arguments.warm:
        shard, shards = map(int, arguments.warm.split("/"))
        warm(shard, shards, arguments.hidden, arguments.operation, arguments.tokens)
        return
    run_warm_shares()
    for operation in arguments.operation:
        for hidden in arguments.hidden:
            report(operation, arguments.tokens, hidden, arguments.tables_only)


if __name__ == "__main__":
    main()
