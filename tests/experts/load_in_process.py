"""Load and finalize a checkpoint in this process and print how much memory that took, as JSON.

Arguments: checkpoint folder, layers, experts, hidden size, intermediate size. Peak memory is the kernel's
high-water mark of this process's resident set (VmHWM), which is reset when everything is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    folder, layers, experts, hidden, inter = sys.argv[1], *(int(a) for a in sys.argv[2:6])
    from megamoe.backends import EmulatedMegaMoEBackend
    from megamoe.experts import MuseSparkMegaMoEExperts, stream_checkpoint

    def make(size: tuple[int, int, int], prefix: str) -> MuseSparkMegaMoEExperts:
        return MuseSparkMegaMoEExperts(
            num_experts=size[0],
            num_local_experts=size[0],
            experts_start_idx=0,
            top_k=2,
            hidden_size=size[1],
            intermediate_size=size[2],
            num_max_tokens_per_rank=16,
            prefix=prefix,
            backend=EmulatedMegaMoEBackend("fp4xfp4"),
        )

    make(
        (2, 256, 256), "warm"
    ).finalize_weights()  # imports, allocator pools and code paths are not the checkpoint's
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    modules = [make((experts, hidden, inter), f"layers.{layer}.experts") for layer in range(layers)]
    loaded = 0
    for module in modules:
        loaded += len(list(module.load_weights(stream_checkpoint(folder, prefix=module.prefix + "."))))
        module.finalize_weights()
    after = resident_bytes("VmRSS")
    peak = resident_bytes("VmHWM")
    digest = sum(
        int(t.contiguous().view(torch.uint8).sum(dtype=torch.int64))
        for m in modules
        for t in m.expert_tensors().values()
    )
    print(
        json.dumps(
            {"peak_bytes": peak - before, "kept_bytes": after - before, "names": loaded, "digest": digest}
        )
    )


if __name__ == "__main__":
    main()
