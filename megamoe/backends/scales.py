"""Scale factors on their way from a checkpoint to a launch: UE8M0 bytes, E4M3 words, block-FP8 expansion.

Arithmetic: NUMERICS 1.2 (UE8M0), 1.5 (packed words), 5.6 (block-FP8 of shared experts), 5.8 (routed weights).
Nothing here rounds: a scale is moved, repeated or refused.
"""

from __future__ import annotations

import torch

E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


def ue8m0_bytes_to_float(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (uint8 or float8_e8m0fnu, any shape) as float32, by placing the byte in the exponent field.

    Byte 0 gives 0.0 and byte 255 gives inf, as the kernels decode them, not 2^-127 and NaN.
    """
    if scale.dtype not in E8M0_DTYPES:
        raise TypeError(f"scale must be uint8 or float8_e8m0fnu (UE8M0 bytes), got {scale.dtype}")
    return (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)


def find_not_power_of_two(scale: torch.Tensor) -> tuple[int, ...] | None:
    """Index of the first element of a float32 tensor that UE8M0 bytes 0..254 cannot hold, or None.

    Sign and mantissa must be zero and the value finite: 0.0 is byte 0.
    """
    bits = scale.contiguous().view(torch.int32)
    wrong = ((bits & 0x7FFFFF) != 0) | (bits < 0) | (bits == 0x7F800000)
    if not bool(wrong.any()):
        return None
    return tuple(int(i) for i in wrong.nonzero()[0])


def e4m3_scales_to_words(scale: torch.Tensor) -> torch.Tensor:
    """E4M3 group scales [L, rows, K / 16] as MN-major words: int32 [L, rows, K / 64], strides (rows * K / 64,
    1, rows).

    Four bytes along K a word, little endian. The rows are not padded, so rows % 4 must be 0 (the launch wants
    16-byte columns), and K / 16 must be a multiple of 4.
    """
    if scale.dim() != 3 or scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        found = f"{scale.dtype} {tuple(scale.shape)}"
        raise TypeError(f"scale must be [experts, rows, groups] float8_e4m3fn or uint8, got {found}")
    rows, groups = scale.shape[1:]
    if rows % 4 or groups % 4:
        raise ValueError(f"scale rows and groups must be multiples of 4, got {rows} and {groups}")
    words = scale.contiguous().view(torch.uint8).view(torch.int32)
    return words.transpose(1, 2).contiguous().transpose(1, 2)


def expand_block_scale(
    scale: torch.Tensor, block_size: object, mn: int, k: int
) -> tuple[torch.Tensor | None, str]:
    """Block scales of a linear layer, repeated to one float32 scale per row and 32 columns.

    scale: UE8M0 bytes [ceil(mn / block rows), ceil(k / block columns)], or int32 words [mn, ceil(blocks of k
    / 4)] whose bytes are the k-blocks of one row (any strides). Returns (float32 [mn, k / 32] contiguous, "")
    or (None, why not).
    """
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        return None, f"weight_block_size must be two numbers, got {block_size!r}"
    block_rows, block_columns = (int(value) for value in block_size)
    if block_rows <= 0 or block_columns <= 0 or block_columns % 32:
        return None, f"a weight block of {block_rows}x{block_columns} does not consist of 1x32 groups"
    blocks = -(-k // block_columns)
    packed = scale.dtype == torch.int32
    expected = (mn, -(-blocks // 4)) if packed else (-(-mn // block_rows), blocks)
    if tuple(scale.shape) != expected:
        return None, f"the scale should have shape {expected}, got {tuple(scale.shape)} ({scale.dtype})"
    if packed:
        # flatten() puts the words in row-major order first, whatever strides they came with.
        codes = scale.flatten().view(torch.uint8).reshape(mn, -1)[:, :blocks]
    else:
        codes = scale.view(torch.uint8).repeat_interleave(block_rows, dim=0)[:mn]
    values = ue8m0_bytes_to_float(codes.contiguous())
    return values.repeat_interleave(block_columns // 32, dim=1)[:, : k // 32].contiguous(), ""
