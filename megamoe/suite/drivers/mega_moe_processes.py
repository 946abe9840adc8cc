"""The reference with one rank a process (gloo, on CPUs), as an implementation beside the one that runs all
ranks at once."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megamoe.suite.drivers.mega_moe import FAMILY, WholeLaunch, join_ranks, split_ranks, whole_launch
from reference.mega_moe.distributed import forward_rank

__all__ = ["process_fp8_mega_moe"]


@whole_launch
def process_fp8_mega_moe(launch: WholeLaunch) -> dict[str, Tensor]:
    """Signature and result as in ``megamoe.suite.drivers.mega_moe``."""
    if launch.recorded is not None:
        raise ValueError("recorded: a recording has one rank")
    ranks = len(launch.tokens)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="megamoe-processes-") as folder:
        on_cpu = replace(launch, tensors=tuple(each.cpu() for each in launch.tensors))
        torch.save(on_cpu, f"{folder}/launch.pt")
        spawn(_rank_process, (ranks, port, folder), nprocs=ranks)
        left = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {name: stage.to(launch.tensors[0].device) for name, stage in join_ranks(left).items()}


def _rank_process(rank: int, ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    launch: WholeLaunch = torch.load(f"{folder}/launch.pt", weights_only=False)
    inputs, weights, launches = split_ranks(launch.tensors, launch.tokens)
    group = dist.group.WORLD
    assert group is not None
    result = forward_rank(FAMILY, inputs[rank], weights[rank], launches[rank], launch.activation, group)
    torch.save((result.pool, result.used, result.stages, result.y, result.stats), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
