"""Compares the functions of reference.activation with this GPU for every float32.

One line a function: how many of the 2^32 inputs differ, bit for bit, with examples. Exit status 1 if any
does.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2])]
from hardware import all_floats, evaluate  # noqa: E402

from reference import activation  # noqa: E402

FUNCTIONS = {
    "ex2_approx_ftz": activation.ex2_approx_ftz,
    "ex2_approx": activation.ex2_approx,
    "rcp_approx_ftz": activation.rcp_approx_ftz,
    "rcp_approx": activation.rcp_approx,
    "rsqrt_approx_ftz": activation.rsqrt_approx_ftz,
    "rsqrt_approx": activation.cuda_rsqrtf,
    "rsqrtf": activation.cuda_rsqrtf,
    "expf": activation.cuda_expf,
    "fast_expf": activation.fast_expf,
    "silu": lambda x: activation.swiglu(x, torch.ones_like(x), fast_math=False),
    "silu_fast": lambda x: activation.swiglu(x, torch.ones_like(x), fast_math=True),
}


def hexes(values: torch.Tensor) -> str:
    return " ".join(f"{v & 0xFFFFFFFF:08x}" for v in values.view(torch.int32).tolist())


def sample() -> torch.Tensor:
    """2^20 float32 patterns spread over all signs and exponents."""
    bits = torch.arange(1 << 20, device="cuda") * 4096 + 1234
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def main() -> int:
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
    failed = 0
    for name, model in FUNCTIONS.items():
        total, examples = 0, ""
        for x in all_floats(1 << 26):
            expected, actual = model(x), evaluate(name, x)
            differs = expected.view(torch.int32) != actual.view(torch.int32)
            bad = int(differs.sum())
            if bad and not examples:
                examples = " | ".join(hexes(t[differs][:4]) for t in (x, expected, actual))
            total += bad
        print(
            f"{name}: {total} of {1 << 32} differ {'input | model | GPU: ' + examples if total else ''}",
            flush=True,
        )
        failed |= total
        results = evaluate(name, sample()).cpu().numpy().tobytes()
        print(f'    "{name}": "{hashlib.sha256(results).hexdigest()}",', flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
