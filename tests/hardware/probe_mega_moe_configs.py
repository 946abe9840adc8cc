"""Which kernel DeepGEMM's host code picks, over a grid of shapes: python
tests/hardware/probe_mega_moe_configs.py.

Nothing is compiled or launched: the JIT gets a compiler that keeps the generated source and fails. Every
configuration is read from the source's template arguments and, independently, from the line that the
library prints; both are compared with reference.mega_moe.sm90_launch_config. Exit status 1 if any differs.
--json FILE writes what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

TOKENS = (
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    31,
    32,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    192,
    255,
    256,
    257,
    511,
    512,
    513,
    1000,
    2000,
)
# experts, top-k, hidden, intermediate
SHAPES = (
    (4, 2, 512, 256),
    (8, 2, 512, 256),
    (8, 8, 512, 512),
    (3, 1, 512, 256),
    (32, 6, 1024, 512),
    (64, 1, 512, 256),
    (8, 2, 512, 3072),
    (16, 4, 1024, 4096),
    (64, 1, 512, 3072),
    (4, 2, 7168, 2048),
    (8, 8, 4096, 1536),
)


def fake_compiler(folder: Path) -> Path:
    """A compiler that answers questions about itself, keeps the source it is given, and fails."""
    real = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    script = folder / "nvcc"
    script.write_text(
        "#!/bin/bash\n"
        f'case "$*" in *--version*) exec {real} "$@";; esac\n'
        f'for word in "$@"; do case "$word" in *.cu) cat "$word" > {folder}/last.cu;; esac; done\n'
        "exit 1\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="megamoe-configs-"))
    os.environ.update(
        DG_JIT_NVCC_COMPILER=str(fake_compiler(folder)),
        DG_JIT_USE_NVRTC="0",
        DG_PRINT_CONFIGS="1",
        DG_JIT_CACHE_DIR=str(folder / "cache"),
    )
    import torch

    from megamoe.suite.drivers.deep_gemm_sm90 import Session, captured_output, single_rank_group
    from reference.mega_moe import (
        launch_config,
        parse_generated_source,
        parse_printed_configs,
        sm90_launch_config,
    )

    group = single_rank_group()
    seen: list[dict[str, object]] = []
    differing = errors = 0
    for experts, topk, hidden, intermediate in SHAPES:
        session = Session(
            group,
            num_experts=experts,
            max_tokens=max(TOKENS),
            topk=topk,
            hidden=hidden,
            intermediate=intermediate,
        )
        e4m3 = torch.float8_e4m3fn
        l1 = (
            torch.empty(experts, 2 * intermediate, hidden, dtype=e4m3, device="cuda"),
            torch.empty(experts, 2 * intermediate // 128, hidden // 128, device="cuda"),
        )
        l2 = (
            torch.empty(experts, hidden, intermediate, dtype=e4m3, device="cuda"),
            torch.empty(experts, hidden // 128, intermediate // 128, device="cuda"),
        )
        for tokens in TOKENS:
            source = folder / "last.cu"
            source.unlink(missing_ok=True)
            y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
            reason = ""
            with captured_output() as text:
                try:
                    session.library.fp8_mega_moe(y, l1, l2, session.buffer, None)
                except Exception as error:
                    reason = f"{type(error).__name__}: {str(error)[:200]}"
            case = {
                "tokens": tokens,
                "experts": experts,
                "topk": topk,
                "hidden": hidden,
                "intermediate": intermediate,
            }
            model = sm90_launch_config(
                num_ranks=1,
                num_experts=experts,
                num_topk=topk,
                num_tokens=tokens,
                hidden=hidden,
                intermediate_hidden=intermediate,
            )
            printed = parse_printed_configs(text[0])
            generated = parse_generated_source(source.read_text()) if source.exists() else None
            if generated is None or not printed:
                errors += 1
                if errors <= 4:
                    print(
                        "NO CONFIGURATION",
                        case,
                        f"printed {len(printed)}, source {generated is not None};",
                        reason,
                    )
                continue
            found = {
                "source": launch_config(generated),
                "printed": launch_config(printed[-1]),
                "model": model,
            }
            # The printed key's swap_ab and the flag of the source may be different things: compare what
            # decides bytes.
            bits = {name: (each.tile, each.accumulation) for name, each in found.items()}
            exact = found["source"] == model
            seen.append(case | {"generated": generated, "equal": exact})
            if len(set(bits.values())) > 1 or not exact:
                differing += 1
                print("DIFFERS" if len(set(bits.values())) > 1 else "differs in no byte", case, found)
        session.close()
        del l1, l2
    print(f"configurations {len(seen)}, not the model's {differing}, without a source or a line {errors}")
    if seen:
        print("example", json.dumps(seen[0]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(seen))
    return 1 if differing or errors else 0


if __name__ == "__main__":
    sys.exit(main())
