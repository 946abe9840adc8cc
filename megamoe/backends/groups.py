"""A process group of one rank, for machines and tests without torch.distributed."""

from __future__ import annotations


class LocalGroup:
    """Stands for a torch.distributed process group with a single rank: size, rank and a barrier that
    returns.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def barrier(self) -> None:
        return None

    def __repr__(self) -> str:
        return "LocalGroup(size=1)"
