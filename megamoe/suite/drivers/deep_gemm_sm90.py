"""Drives DeepGEMM's SM90 kernel (``deep_gemm.fp8_mega_moe``) and reads back everything a launch leaves in
its buffer.

One ``Session`` is one symmetric buffer on one rank; its methods are collective where the group has several
ranks. The buffer's data regions are poisoned before a launch, so that a byte the kernel should have
written, or should not have, shows. Regions without a view (source metadata, combine slots) are found by the
kernel's own layout, which the views check.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference.mega_moe import LaunchConfig, launch_config, parse_printed_configs

__all__ = ["Launch", "Session", "captured_output", "single_rank_group"]

_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 192  # candidate tile heights that size the pool's bookkeeping
_POISON = 0xA5


@dataclass(frozen=True)
class Launch:
    """What one rank's launch left: y, stats (added to zero), the stages under the buffers' names (bytes as
    uint8), and the configuration that the library printed (None if it printed none: it does so once for
    each)."""

    y: Tensor
    stats: Tensor
    stages: dict[str, Tensor]
    config: LaunchConfig | None


class Session:
    """A symmetric buffer of one rank. group: a torch.distributed group on CUDA devices
    (``single_rank_group()`` for one)."""

    def __init__(
        self, group: Any, *, num_experts: int, max_tokens: int, topk: int, hidden: int, intermediate: int
    ) -> None:
        import deep_gemm

        self.library = deep_gemm
        self.group, self.num_experts, self.topk, self.hidden = group, num_experts, topk, hidden
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            group, num_experts, max_tokens, topk, hidden, intermediate, mma_type="fp8xfp8"
        )
        self._configs: dict[int, LaunchConfig] = {}

    def close(self) -> None:
        self.buffer.destroy()

    def poison(self) -> None:
        """Fills every data region; the workspace in front of them holds counters that must stay."""
        start = self.buffer.x.data_ptr() - self.buffer.buffer.data_ptr()
        self.buffer.buffer[start:].view(torch.uint8).fill_(_POISON)

    def stage(self, x: Tensor, x_sf: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Writes a rank's inputs: x uint8 codes [T, H], x_sf float32 [T, H / 128], ids int64 and weights
        float32 [T, K]."""
        tokens = len(x)
        for name, value in (("x", x), ("x_sf", x_sf), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            view = getattr(self.buffer, name)[:tokens]
            view.copy_(value.view(view.dtype) if name == "x" else value)

    def launch(
        self,
        num_tokens: int,
        l1_weights: tuple[Tensor, Tensor],
        l2_weights: tuple[Tensor, Tensor],
        *,
        clamp: float | None = None,
        fast_math: bool = True,
    ) -> Launch:
        """One launch over the staged tokens; weights in kernel layout
        (``transform_weights_for_mega_moe_sm90``)."""
        device = self.buffer.x.device
        y = torch.full((num_tokens, self.hidden), -1, dtype=torch.int16, device=device).view(torch.bfloat16)
        stats = torch.zeros(self.num_experts // self.group.size(), dtype=torch.int32, device=device)
        with self._reading_configs():
            self.library.fp8_mega_moe(
                y, l1_weights, l2_weights, self.buffer, stats, activation_clamp=clamp, fast_math=fast_math
            )
            torch.cuda.synchronize()
        return Launch(y, stats, self.stages(), self._configs.get(num_tokens))

    def configure(
        self,
        num_tokens: int,
        l1_weights: tuple[Tensor, Tensor],
        l2_weights: tuple[Tensor, Tensor],
        *,
        clamp: float | None = None,
        fast_math: bool = True,
    ) -> None:
        """Everything of a launch up to the compilation of its kernel, for use with a compiler that fails.

        RuntimeError if the kernel was launched after all.
        """
        y = torch.empty(num_tokens, self.hidden, dtype=torch.bfloat16, device=self.buffer.x.device)
        with self._reading_configs():
            try:
                self.library.fp8_mega_moe(
                    y, l1_weights, l2_weights, self.buffer, activation_clamp=clamp, fast_math=fast_math
                )
            except Exception:
                return
        raise RuntimeError("the kernel was compiled already, and launched")

    @contextlib.contextmanager
    def _reading_configs(self) -> Iterator[None]:
        """Remembers the configurations that the library prints meanwhile, by number of tokens."""
        with captured_output() as text:
            yield
        for row in parse_printed_configs(text[0]):
            self._configs[int(row["num_tokens"])] = launch_config(row)

    def stages(self) -> dict[str, Tensor]:
        """Copies of the buffer's stages, whole: l1_acts ... l2_acts_sf, token_src_metadata [pool, 3],
        combine [K, T, H]."""
        views = {
            name: getattr(self.buffer, name) for name in ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")
        }
        views["l1_acts"] = views["l1_acts"].view(torch.uint8)
        views["l2_acts"] = views["l2_acts"].view(torch.uint8)
        return {name: view.clone() for name, view in views.items()} | {
            "token_src_metadata": self._metadata().clone(),
            "combine": self._combine().clone(),
        }

    def _metadata(self) -> Tensor:
        """The source metadata at the end of the workspace, int32 [pool, 3]."""
        buffer = self.buffer
        ranks = self.group.size()
        local = self.num_experts // ranks
        pool = buffer.l1_acts.shape[0]
        blocks = pool // _SMALLEST_BLOCK
        offset = 32 + self.num_experts * 16 + local * 8 + (blocks + blocks % 2) * 4 + blocks * 8
        offset += local * ranks * ranks * buffer.num_max_tokens_per_rank * 4
        end = buffer.x.data_ptr() - buffer.buffer.data_ptr()
        if -(-(offset + pool * 12) // 16) * 16 != end:
            raise RuntimeError(
                f"the workspace ends at byte {end}, not where its layout says ({offset + pool * 12})"
            )
        metadata: Tensor = buffer.buffer[offset : offset + pool * 12].view(torch.int32)
        return metadata.view(pool, 3)

    def _combine(self) -> Tensor:
        """The combine slots, the last region: bfloat16 [K, max_tokens, H]."""
        buffer = self.buffer
        offset = buffer.l2_acts_sf.data_ptr() - buffer.buffer.data_ptr() + buffer.l2_acts_sf.numel() * 4
        tokens = buffer.num_max_tokens_per_rank
        size = self.topk * tokens * self.hidden * 2
        if offset + size != buffer.buffer.numel():
            raise RuntimeError(
                f"the buffer ends at byte {buffer.buffer.numel()}, the combine slots at {offset + size}"
            )
        slots: Tensor = buffer.buffer[offset:].view(torch.bfloat16)
        return slots.view(self.topk, tokens, self.hidden)


def single_rank_group() -> Any:
    """A process group of this process alone, made once."""
    import torch.distributed as dist

    if not dist.is_initialized():
        file = tempfile.NamedTemporaryFile(prefix="megamoe-store-", delete=False)  # noqa: SIM115
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(
            "nccl", init_method=f"file://{file.name}.store", rank=0, world_size=1, device_id=device
        )
    return dist.group.WORLD


@contextlib.contextmanager
def captured_output() -> Iterator[list[str]]:
    """Everything written to file descriptor 1 meanwhile, by C++ too: the list's one element, set on
    leaving."""
    text = [""]
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            text[0] = file.read().decode(errors="replace")
