"""The reference with one rank a process (gloo, on CPUs), as an implementation beside the one that runs all
ranks at once."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megamoe.suite.drivers.mega_moe import FAMILY, join_ranks, split_ranks
from reference.mega_moe import Activation
from reference.mega_moe.distributed import forward_rank

__all__ = ["process_fp8_mega_moe"]


def process_fp8_mega_moe(
    x: Tensor,
    x_sf: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    l1_w: Tensor,
    l1_w_sf: Tensor,
    l2_w: Tensor,
    l2_w_sf: Tensor,
    tokens: Sequence[int],
    activation_clamp: float | None = None,
    fast_math: bool = True,
    recorded: Sequence[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Signature and result as in ``megamoe.suite.drivers.mega_moe``."""
    if recorded is not None:
        raise ValueError("recorded: a recording has one rank")
    tensors = (x, x_sf, topk_idx, topk_weights, l1_w, l1_w_sf, l2_w, l2_w_sf)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="megamoe-processes-") as folder:
        call = ([each.cpu() for each in tensors], list(tokens), activation_clamp, fast_math)
        torch.save(call, f"{folder}/call.pt")
        arguments = (len(tokens), port, folder)
        spawn(_rank_process, arguments, nprocs=len(tokens))  # type: ignore[no-untyped-call]
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(len(tokens))]
    return {name: stage.to(x.device) for name, stage in join_ranks(ranks).items()}


def _rank_process(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    tensors, tokens, clamp, fast_math = torch.load(f"{folder}/call.pt")
    inputs, weights, launches = split_ranks(tensors, tokens)
    activation = Activation(clamp=clamp, fast_math=fast_math)
    group = dist.group.WORLD
    assert group is not None
    result = forward_rank(FAMILY, inputs[rank], weights[rank], launches[rank], activation, group)
    torch.save((result.pool, result.used, result.stages, result.y, result.stats), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
