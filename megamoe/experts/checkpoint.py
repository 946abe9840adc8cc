"""Checkpoints as a stream: safetensors shards, one tensor at a time, in bounded memory.

A shard is mapped, not read, but every page that is touched stays resident while its mapping lives. The stream
therefore yields tensors that have not been read, reads the rows that are asked for, and maps a shard anew
after every ``window_bytes``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

WINDOW_BYTES = 16 << 20

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Shard:
    """One safetensors file, mapped while it is read from and mapped anew after ``window_bytes``."""

    def __init__(self, path: str | Path, window_bytes: int = WINDOW_BYTES) -> None:
        self.path = Path(path)
        self.window_bytes = window_bytes
        self._handle: Any = None
        self._read_bytes = 0

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unmap()

    def unmap(self) -> None:
        """Give the mapping back; the next read maps the file again."""
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle = None
        self._read_bytes = 0

    def handle(self) -> Any:
        from safetensors import safe_open

        if self._handle is None:
            self._handle = safe_open(str(self.path), framework="pt", device="cpu")
        return self._handle

    def tensors(self) -> Iterator[tuple[str, ShardTensor]]:
        """(name, unread tensor) for everything in the file, in the order of its bytes."""
        # Described first: a reference to the mapping here would keep its pages resident while the tensors are
        # read.
        yield from self._describe()

    def _describe(self) -> list[tuple[str, ShardTensor]]:
        handle = self.handle()
        described = []
        for name in handle.offset_keys() if hasattr(handle, "offset_keys") else handle.keys():
            piece = handle.get_slice(name)
            if piece.get_dtype() not in _DTYPES:
                raise TypeError(f"{self.path.name}: {name}: no torch dtype for {piece.get_dtype()}")
            tensor = ShardTensor(self, name, tuple(piece.get_shape()), _DTYPES[piece.get_dtype()])
            described.append((name, tensor))
        return described

    def read(self, name: str, rows: slice | None, size_bytes: int) -> torch.Tensor:
        """A copy of the whole tensor, or of ``rows`` of its first axis."""
        handle = self.handle()
        tensor = handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        copy: torch.Tensor = tensor.clone()
        del tensor
        self._read_bytes += size_bytes
        if self._read_bytes >= self.window_bytes:
            self.unmap()
        return copy


class ShardTensor:
    """A tensor of a shard that has not been read: shape and dtype are known, bytes come on request."""

    def __init__(self, shard: Shard, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shard = shard
        self._name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """The rows of the first axis in ``rows`` (step 1), read now."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows must have step 1, got {step}")
        stop = max(start, stop)
        return self._shard.read(
            self._name, slice(start, stop), (stop - start) * (self.nbytes // max(self.shape[0], 1))
        )

    def load(self) -> torch.Tensor:
        """The whole tensor, read now."""
        return self._shard.read(self._name, None, self.nbytes)

    def __repr__(self) -> str:
        return f"ShardTensor({self._name!r}, {tuple(self.shape)}, {self.dtype})"


def find_shards(path: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint: a file, or a folder with an index or with ``*.safetensors`` in
    it.

    FileNotFoundError if there is none, or if the index names a file that is not there.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        shards = [path / name for name in names]
    else:
        shards = sorted(path.glob("*.safetensors"))
    missing = [str(shard) for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise FileNotFoundError(f"no checkpoint at {path}: {', '.join(missing) or 'no safetensors file'}")
    return shards


def stream_checkpoint(
    paths: str | Path | Iterable[str | Path], *, prefix: str = "", window_bytes: int = WINDOW_BYTES
) -> Iterator[tuple[str, ShardTensor]]:
    """(name, unread tensor) over all shards, one file mapped at a time; only names that start with
    ``prefix``.

    ``prefix`` is removed from the names. A tensor must be read before the next one of another shard is asked
    for.
    """
    files = (
        find_shards(paths) if isinstance(paths, (str, Path)) else [f for p in paths for f in find_shards(p)]
    )
    for file in files:
        with Shard(file, window_bytes) as shard:
            for name, tensor in shard.tensors():
                if name.startswith(prefix):
                    yield name[len(prefix) :], tensor
