"""Tensors as the kernels address them: strides, bytes, wider integers where rows are dense and aligned."""

import torch


def strides_of(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def as_integers(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The rows as wider integers, or None where they are not dense or not aligned."""
    size, per_word = dtype.itemsize, dtype.itemsize // tensor.element_size()
    rows, columns = tensor.shape
    stride = tensor.stride(0) if rows > 1 else 0
    dense = columns <= 1 or tensor.stride(1) == 1
    if not dense or tensor.data_ptr() % size or tensor.storage_offset() % per_word or stride % per_word:
        return None
    return tensor.as_strided((rows, columns), (stride, 1)).view(dtype)


def as_words(x: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """Packed FP4 rows as int32 words where they can be: (tensor, row stride, whether they are)."""
    x = as_bytes(x)
    words = as_integers(x, torch.int32)
    return (x, x.stride(0), False) if words is None else (words, words.stride(0), True)


def as_pairs(hidden: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Rows as integers of two elements where they can be: (tensor, whether they are)."""
    pairs = as_integers(hidden, torch.int64 if hidden.dtype == torch.float32 else torch.int32)
    return (hidden, False) if pairs is None else (pairs, True)
