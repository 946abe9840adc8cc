"""Launches of the SM90 kernel over any number of ranks, one process a GPU (one rank: in this process).

A list of launches runs in order on one set of processes, and launches of equal sizes share their symmetric
buffers, as layers of a model do: what a launch leaves behind is there for the next. NVLink multicast stays
off.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megamoe.suite.drivers import nvcc_ahead
from megamoe.suite.drivers.deep_gemm_sm90 import Launch, Session, single_rank_group

__all__ = ["RankedLaunch", "RanksFailedError", "launch_ranks"]

_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class RanksFailedError(RuntimeError):
    """A rank failed. finished: what the launches before it left, [launch][rank]."""

    def __init__(self, message: str, finished: list[list[Launch]]) -> None:
        super().__init__(message)
        self.finished = finished


@dataclass(frozen=True)
class RankedLaunch:
    """One launch: tensors as megamoe.suite.drivers.mega_moe has them (x ... l2_w_sf, all ranks), tokens of
    each rank. poison: fill the buffers before it; without, it finds what the last launch of its sizes
    left."""

    tensors: tuple[Tensor, ...]
    tokens: tuple[int, ...]
    clamp: float | None = None
    fast_math: bool = True
    poison: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        experts, hidden, intermediate = self.tensors[6].shape
        return {
            "num_experts": experts,
            "topk": self.tensors[2].shape[1],
            "hidden": hidden,
            "intermediate": intermediate,
        }


def launch_ranks(launches: Sequence[RankedLaunch], compile_ahead: Path | None = None) -> list[list[Launch]]:
    """What every launch left on every rank: [launch][rank]. All launches have the same number of ranks.

    compile_ahead: a folder; every kernel is compiled into it first, all at the same time. Tensors come back
    on the CPU from several ranks, on the device from one. RanksFailedError says which rank failed and how,
    and has what was finished before.
    """
    ranks = len(launches[0].tokens)
    if any(len(each.tokens) != ranks for each in launches):
        raise ValueError("launches: expected the same number of ranks in each")
    if ranks == 1:
        return [[each] for each in _run(launches, 0, single_rank_group(), compile_ahead)]
    with tempfile.TemporaryDirectory(prefix="megamoe-ranks-") as folder:
        os.environ.update(_NO_MULTICAST)
        plain = [
            (tuple(each.cpu() for each in one.tensors), one.tokens, one.clamp, one.fast_math, one.poison)
            for one in launches
        ]
        torch.save(plain, f"{folder}/launches.pt")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (ranks, port, folder, compile_ahead)
        try:
            spawn(_rank_process, arguments, nprocs=ranks)
        except Exception as error:
            raise RanksFailedError(str(error), _read_results(folder, ranks, len(launches))) from error
        return _read_results(folder, ranks, len(launches))


def _read_results(folder: str, ranks: int, launches: int) -> list[list[Launch]]:
    """The launches that every rank has finished, in order."""
    found: list[list[Launch]] = []
    for index in range(launches):
        files = [Path(folder, f"{index}.{rank}.pt") for rank in range(ranks)]
        if not all(file.exists() for file in files):
            break
        found.append([torch.load(file, weights_only=False) for file in files])
    return found


def _rank_process(rank: int, ranks: int, port: int, folder: str, compile_ahead: Path | None) -> None:
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, device_id=device
    )
    launches = [RankedLaunch(*each) for each in torch.load(f"{folder}/launches.pt", weights_only=False)]
    for index, each in enumerate(_run(launches, rank, dist.group.WORLD, compile_ahead)):
        stages = {name: stage.cpu() for name, stage in each.stages.items()}
        partial = Path(folder, f"{index}.{rank}.partial")
        torch.save(Launch(each.y.cpu(), each.stats.cpu(), stages, each.config), partial)
        partial.rename(partial.with_suffix(".pt"))
    dist.barrier()
    dist.destroy_process_group()


def _run(
    launches: Sequence[RankedLaunch], rank: int, group: Any, compile_ahead: Path | None
) -> Iterator[Launch]:
    """One rank's side of every launch, one after another."""
    if compile_ahead is not None:
        nvcc_ahead.install(compile_ahead)
    import deep_gemm

    sessions: dict[tuple[int, ...], Session] = {}
    for only_compile in (True, False) if compile_ahead is not None else (False,):
        for one in launches:
            key = tuple(one.sizes.values())
            if key not in sessions:
                most = max(max(each.tokens) for each in launches if tuple(each.sizes.values()) == key)
                sessions[key] = Session(group, max_tokens=max(most, 1), **one.sizes)
            session = sessions[key]
            mine = _share(one, rank)
            weights = deep_gemm.transform_weights_for_mega_moe_sm90(
                (mine[4].view(torch.float8_e4m3fn), mine[5]), (mine[6].view(torch.float8_e4m3fn), mine[7])
            )
            if only_compile:
                os.environ["MEGAMOE_NVCC"] = "collect"
                session.configure(one.tokens[rank], *weights, clamp=one.clamp, fast_math=one.fast_math)
                os.environ["MEGAMOE_NVCC"] = "wait"
                continue
            if one.poison:
                session.poison()
            session.stage(*mine[:4])
            _meet(group)
            launch = session.launch(one.tokens[rank], *weights, clamp=one.clamp, fast_math=one.fast_math)
            # Nobody poisons or stages again while another rank still reads.
            _meet(group)
            yield launch
    for session in sessions.values():
        session.close()


def _share(one: RankedLaunch, rank: int) -> list[Tensor]:
    """A rank's tokens and experts, on its device."""
    first = sum(one.tokens[:rank])
    rows = slice(first, first + one.tokens[rank])
    parts = [tensor[rows] for tensor in one.tensors[:4]]
    parts += [tensor.chunk(len(one.tokens))[rank] for tensor in one.tensors[4:]]
    return [part.contiguous().cuda() for part in parts]


def _meet(group: Any) -> None:
    """Every rank's device has done what it was given."""
    torch.cuda.synchronize()
    if group.size() > 1:
        group.barrier().wait()
        torch.cuda.synchronize()
