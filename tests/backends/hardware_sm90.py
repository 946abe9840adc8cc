"""The SM90 backend on an H200: selection, layouts, staging, launches and expert modules against the emulated
backend.

    python tests/backends/hardware_sm90.py [quick|smoke|default|full [selection experts rows sizes]]

Needs an SM90 device and deep_gemm. Prints a line a check and ends with a summary; the exit code says whether
all agree.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "experts")]

QUICK = ("", "no_fast_math", "tokens40.clamp1.0", "exact.tokens16", "exact.tokens16.masked0.3")

SIZE_PROBE = """
import sys
import torch
from megamoe.backends import DeepGemmSm90MegaMoEBackend
from megamoe.suite.drivers.deep_gemm_sm90 import single_rank_group

hidden, inter = int(sys.argv[1]), int(sys.argv[2])
backend, group, device = DeepGemmSm90MegaMoEBackend(), single_rank_group(), "cuda"
fp8 = torch.float8_e4m3fn
l1, l2 = backend.transform_weights(
    w13_weight=torch.zeros(2, 2 * inter, hidden, device=device).to(fp8),
    w13_weight_scale=torch.ones(2, 2 * inter // 128, hidden // 128, device=device),
    w2_weight=torch.zeros(2, hidden, inter, device=device).to(fp8),
    w2_weight_scale=torch.ones(2, hidden // 128, inter // 128, device=device),
    num_local_experts=2,
    hidden_size=hidden,
    intermediate_size=inter,
)
sizes = {"num_experts": 2, "num_max_tokens_per_rank": 8, "num_topk": 1}
buffer = backend.get_symm_buffer(group, **sizes, hidden=hidden, intermediate_hidden=inter)
states = torch.ones(8, hidden, dtype=torch.bfloat16, device=device)
ids = torch.zeros(8, 1, dtype=torch.int64, device=device)
backend.prepare_inputs(buffer, states, torch.ones(8, 1, device=device), ids)
y = torch.full((8, hidden), 7.0, dtype=torch.bfloat16, device=device)
weights = {"l1_weights": l1, "l2_weights": l2, "symm_buffer": buffer}
backend.run_mega_moe(y=y, **weights, activation_clamp=None, fast_math=True)
torch.cuda.synchronize()
print("all zero" if int(y.view(torch.int16).abs().max()) == 0 else "WRONG VALUES")
"""


def check_selection() -> str:
    from megamoe.backends import DeepGemmSm90MegaMoEBackend, features, get_deep_gemm_mega_moe_backend

    backend = get_deep_gemm_mega_moe_backend("cuda", 512, 256)
    assert type(backend) is DeepGemmSm90MegaMoEBackend, backend
    assert not backend.supports_bf16_mega_gate()
    for mma_type in ("fp8xfp4", "nvfp4", "fp4xfp4", "bf16xbf16"):
        with pytest.raises(NotImplementedError, match="sm_90"):
            get_deep_gemm_mega_moe_backend("cuda", 512, 256, mma_type=mma_type)
    present = [name for name, there in features().items() if there]
    return f"{backend.name}; this build has: {', '.join(present)}"


def check_rows(tier: str) -> str:
    """The row run_mega_moe_fp8xfp8: every output of every case, bit for bit."""
    from megamoe.suite.runner import run_case
    from megamoe.suite.table import select, select_cases

    (operation,) = select("run_mega_moe_fp8xfp8")
    (implementation,) = operation.implementations
    lines, wrong, compared = [], 0, 0
    # Clamp and fast_math are compiled into the kernel: a few cases stand for all of them unless more are
    # asked for.
    cases = [
        c
        for c in select_cases(operation.name, "default" if tier == "quick" else tier)
        if tier != "quick" or c.short_id in QUICK
    ]
    for case in cases:
        result = run_case(case, implementation, "cuda")
        compared += result.bytes_compared
        if result.status != "passed":
            wrong += 1
            lines.append(
                f"  {case.id}: {result.status} {result.skip or ''} {'; '.join(result.problems())[:400]}"
            )
    for line in lines:
        print(line, flush=True)
    assert not wrong, f"{wrong} cases differ"
    assert compared, "nothing was compared"
    return f"{len(cases)} cases, {compared} bytes, 0 differ"


def check_experts() -> str:
    """MegaMoEExperts on the device with the backend it selects, against the same on the CPU, emulated."""
    differing = compared = 0
    for fast_math in (False, True):
        for tokens, wrong, outputs in compare_experts(fast_math):
            print(
                f"  fast_math {fast_math}, {tokens} tokens: {wrong} of {outputs} outputs differ", flush=True
            )
            differing += wrong
            compared += outputs
    assert not differing, f"{differing} of {compared} outputs differ"
    return f"8 forwards, a migration between them: {compared} outputs, 0 differ"


def compare_experts(fast_math: bool) -> Iterator[tuple[int, int, int]]:
    """(tokens, differing outputs, outputs) of forwards with padding; experts migrate half way."""
    from checkpoints import fp8_block_layer

    from megamoe.backends import EmulatedMegaMoEBackend
    from megamoe.experts import MegaMoEActivation, MegaMoEExperts
    from megamoe.suite.drivers.deep_gemm_sm90 import single_rank_group

    experts, hidden, inter, topk = 8, 512, 256, 4
    layer = fp8_block_layer(experts, hidden, inter)
    sizes = {
        "num_experts": experts,
        "num_local_experts": experts,
        "experts_start_idx": 0,
        "top_k": topk,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_max_tokens_per_rank": 256,
        "quant": "fp8_block",
        "activation": MegaMoEActivation(clamp=10.0),
        "fast_math": fast_math,
    }
    real = MegaMoEExperts(**sizes, device="cuda", group=single_rank_group())
    emulated = MegaMoEExperts(**sizes, backend=EmulatedMegaMoEBackend("fp8xfp8"))
    for module in (real, emulated):
        list(module.load_weights(layer.items()))
        module.finalize_weights()
    generator = torch.Generator().manual_seed(0)
    for step, tokens in enumerate((1, 40, 200, 13)):
        if step == 2:
            for module in (real, emulated):
                module.permute_experts([3, 1, 0, 2, 7, 6, 5, 4])
        states = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
        ids = torch.rand(tokens, experts, generator=generator).topk(topk, dim=1).indices
        weights = torch.rand(tokens, topk, generator=generator)
        padding = torch.rand(tokens, generator=generator) < 0.2
        given = (states, weights, ids, padding)
        actual = real(*(t.cuda() for t in given)).cpu()
        expected = emulated(*given)
        yield tokens, int((actual.view(torch.int16) != expected.view(torch.int16)).sum()), actual.numel()


# Sizes and whether the kernel runs with them; None: to be found out.
SIZES = {(512, 256): True, (768, 256): False, (512, 128): False, (1536, 256): None}


def start_size_probes() -> dict[tuple[int, int], subprocess.Popen[str]]:
    """A process for each pair of sizes: a kernel that cannot be compiled must not end this one."""
    arguments = {sizes: [sys.executable, "-c", SIZE_PROBE, *map(str, sizes)] for sizes in SIZES}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": HERE.parents[1]}
    return {sizes: subprocess.Popen(command, **pipes) for sizes, command in arguments.items()}


def check_sizes(started: dict[tuple[int, int], subprocess.Popen[str]]) -> str:
    """The multiples that selection demands are those that the kernel needs."""
    found, wrong = {}, []
    for sizes, process in started.items():
        try:
            output = process.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\ntimed out"
        found[sizes] = output.strip().endswith("all zero")
        if not found[sizes]:
            lines = output.splitlines()
            reason = next((x for x in lines if "assert" in x.lower() or "Error" in x), output[-300:])
            print(f"  {sizes}: {reason.strip()[:300]}", flush=True)
        if SIZES[sizes] not in (None, found[sizes]):
            wrong.append(sizes)
    assert not wrong, f"not as expected: {wrong}, found {found}"
    return f"runs: {found}"


def main() -> int:
    tier = sys.argv[1] if len(sys.argv) > 1 else "quick"
    wanted = sys.argv[2:]
    probes = start_size_probes() if not wanted or "sizes" in wanted else {}
    checks = {
        "selection": check_selection,
        "experts": check_experts,
        "rows": lambda: check_rows(tier),
        "sizes": lambda: check_sizes(probes),
    }
    summary, failed = [], 0
    for name, check in checks.items():
        if wanted and name not in wanted:
            continue
        started = time.perf_counter()
        try:
            line = f"ok    {name}: {check()}"
        except Exception as error:
            failed += 1
            traceback.print_exc(limit=-4)
            line = f"FAIL  {name}: {type(error).__name__}: {str(error)[:500]}"
        summary.append(f"{line} ({time.perf_counter() - started:.1f} s)")
        print(summary[-1], flush=True)
    print("\n=== summary\n" + "\n".join(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
