"""Tile sizes of the staging kernels: times every candidate beside a device copy and DeepGEMM's kernel.

    python benchmarks/staging_kernels.py [--hidden 7168 4096] [--tokens 1 8 ...] [--operation fp8 ...]

Method: that of `megamoe.suite.timing`; microseconds per call. What it prints is where the tables of
`megamoe.kernels.tuning` come from. Run `staging_goldens.py` first: speed of wrong bytes means nothing.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch

from megamoe import eplb, staging
from megamoe.kernels import tuning
from megamoe.kernels.tuning import Tile
from megamoe.suite.timing import rotation_count, time_us

TOPK, EXPERTS = 8, 256
CANDIDATES = {
    "fp8": [(1, 512, 1), (1, 1024, 2), (1, 1024, 4), (2, 1024, 4)],
    "token": [(1, 2048, 4), (1, 4096, 8), (1, 8192, 16), (1, 4096, 4), (1, 8192, 8), (1, 1024, 2)],
    "block": [(1, 512, 1), (1, 1024, 1), (1, 1024, 2), (2, 1024, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 8)],
}  # fmt: skip

EPLB_VARIANTS = (
    ("LANE_SLOTS", 4),
    ("COUNTING_PROGRAMS", 64),
    ("COUNTING_TILES", 64),
    ("COUNTING_SLOTS", 4096),
    ("MAX_LOAD_BINS", 0),
)


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
        if operation == "token":
            made["x_sf"] = torch.empty(tokens, hidden // 64, dtype=torch.int32, device=device)
            made["x_scales"] = torch.empty(tokens, device=device)
        else:
            made["x_sf"] = torch.empty(tokens, hidden // 16, dtype=torch.uint8, device=device)
    return made


FUNCTIONS: dict[str, Callable[..., None]] = {
    "fp8": staging.prepare_megamoe_inputs,
    "token": staging.prepare_megamoe_nvfp4_inputs,
    "block": staging.prepare_megamoe_nvfp4_block_inputs,
}


def rotation(operation: str, tokens: int, hidden: int) -> list[dict[str, torch.Tensor]]:
    return [buffers(operation, tokens, hidden) for _ in range(rotation_count(tokens * hidden * 3, "cuda"))]


def use_tile(operation: str, tile: tuple[int, int, int] | None, saved: dict[str, object]) -> None:
    """Force one tile (None: what the tables say)."""
    for name, value in saved.items():
        setattr(tuning, name, value)
    if tile is None:
        return
    if operation == "token":
        tuning.row_tile = lambda *_: Tile(*tile)
    else:
        tuning.column_tile = lambda *_: Tile(*tile)


def layer_state() -> eplb.EplbLayerState:
    expert_map = torch.full((EXPERTS, 3), -1, dtype=torch.int64, device="cuda")
    expert_map[:, 0] = torch.arange(EXPERTS, device="cuda")
    expert_map[:32, 1] = torch.arange(EXPERTS, EXPERTS + 32, device="cuda")
    return eplb.EplbLayerState(
        torch.zeros(EXPERTS + 32, dtype=torch.int32, device="cuda"),
        expert_map,
        (expert_map >= 0).sum(1),
        torch.tensor(True, device="cuda"),
        [torch.tensor(1 << 30, dtype=torch.int32, device="cuda")],
    )


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


def moved_bytes(operation: str, hidden: int) -> float:
    """Bytes a token must move: the hidden states once, every output once, the routing."""
    routing = TOPK * (4 + 4 + 8 + 4)
    outputs = hidden + hidden // 32 if operation == "fp8" else hidden // 2 + hidden // 16 + 4
    return 2 * hidden + outputs + routing


def report(operation: str, tokens: list[int], hidden: int, tiles: list[tuple[int, int, int] | None]) -> None:
    saved = {"row_tile": tuning.row_tile, "column_tile": tuning.column_tile}
    rows: dict[str, list[float]] = {}
    copies, bandwidths = [], []
    peer = pre_dispatch() if operation == "fp8" else None
    for count in tokens:
        sets = rotation(operation, count, hidden)
        total = moved_bytes(operation, hidden) * count
        sizes = int(total) // 2
        pairs = [(torch.empty(sizes, dtype=torch.uint8, device="cuda"), torch.empty(sizes, dtype=torch.uint8,
                  device="cuda")) for _ in sets]  # fmt: skip
        copies.append(time_us([partial(b.copy_, a) for a, b in pairs]))
        bandwidths.append(total / copies[-1] * 1e-6)
        del pairs
        for tile in tiles:
            if tile is not None and operation != "token" and hidden % tile[1]:
                continue
            use_tile(operation, tile, saved)
            name = "tables" if tile is None else "x".join(map(str, tile))
            try:
                calls = [partial(FUNCTIONS[operation], **b) for b in sets]
                rows.setdefault(name, []).append(time_us(calls))
                if operation != "block" and tile is None:
                    state = layer_state()
                    calls = [partial(FUNCTIONS[operation], **b, eplb_state=state) for b in sets]
                    rows.setdefault("tables+eplb", []).append(time_us(calls))
                    for name, value in EPLB_VARIANTS if operation == "fp8" else ():
                        kept = getattr(tuning, name)
                        setattr(tuning, name, value)
                        rows.setdefault(f"eplb {name} {value}", []).append(time_us(calls))
                        setattr(tuning, name, kept)
                    assert state.should_record_tensor is not None
                    state.should_record_tensor.fill_(False)
                    rows.setdefault("eplb, not recording", []).append(time_us(calls))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                rows.setdefault(name, []).append(float("nan"))
        use_tile(operation, None, saved)
        if peer is not None:
            try:
                rows.setdefault("deep_gemm", []).append(
                    time_us([partial(deep_gemm_call, peer, b) for b in sets])
                )
            except Exception as error:
                print(f"deep_gemm: {type(error).__name__}: {str(error)[:200]}")
                peer = None
        del sets
        torch.cuda.empty_cache()
    print(f"\n{operation} hidden {hidden}, us a call; tokens: " + " ".join(f"{t:>8}" for t in tokens))
    print(f"{'device copy':>24} " + " ".join(f"{v:8.2f}" for v in copies))
    print(f"{'  TB/s':>24} " + " ".join(f"{v:8.2f}" for v in bandwidths))
    for name, values in rows.items():
        print(f"{name:>24} " + " ".join(f"{v:8.2f}" for v in values))
    best = [min(v[i] for v in rows.values() if i < len(v) and v[i] == v[i]) for i in range(len(tokens))]
    print(
        f"{'best, share of copy':>24} " + " ".join(f"{c / b:8.2f}" for c, b in zip(copies, best, strict=True))
    )


def warm(shard: int, shards: int, hidden: list[int], operations: list[str], tokens: list[int]) -> None:
    """Compile a share of the candidates into Triton's cache."""
    jobs = [(o, h, t) for o in operations for h in hidden for t in [*CANDIDATES[o], None]]
    saved = {"row_tile": tuning.row_tile, "column_tile": tuning.column_tile}
    for operation, size, tile in jobs[shard::shards]:
        if tile is not None and operation != "token" and size % tile[1]:
            continue
        use_tile(operation, tile, saved)
        for count in tokens if tile is None else {min(t, 64) for t in tokens}:
            try:
                b = buffers(operation, count, size)
                FUNCTIONS[operation](**b)
                if tile is None and operation != "block":
                    FUNCTIONS[operation](**b, eplb_state=layer_state())
            except Exception as error:
                print(f"{operation} {size} {tile}: {type(error).__name__}: {str(error)[:300]}")
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 2048, 8192, 32768])
    parser.add_argument("--operation", nargs="+", default=["fp8", "token", "block"], choices=list(CANDIDATES))
    parser.add_argument("--tables-only", action="store_true", help="no candidates, only the tables' choice")
    parser.add_argument("--warm", help="i/n: only compile share i of n")
    arguments = parser.parse_args()
    if arguments.warm:
        shard, shards = map(int, arguments.warm.split("/"))
        warm(shard, shards, arguments.hidden, arguments.operation, arguments.tokens)
        return
    command = [sys.executable, *sys.argv, "--warm"]
    workers = [subprocess.Popen([*command, f"{i}/8"]) for i in range(8)]
    for worker in workers:
        worker.wait()
    for operation in arguments.operation:
        for hidden in arguments.hidden:
            tiles = [None] if arguments.tables_only else [*CANDIDATES[operation], None]
            report(operation, arguments.tokens, hidden, tiles)


if __name__ == "__main__":
    main()
