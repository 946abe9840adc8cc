"""The staging arithmetic written down directly in NumPy and ml_dtypes: divisions where production divides,
comparisons where production compares. No shortcut of the kernels is repeated here."""

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32)
UP_AT_TIE = np.array([False, True, False, True, False, True, False])


def float32(hidden: torch.Tensor) -> np.ndarray:
    return hidden.float().numpy()


def e4m3(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def e4m3_value(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(F32)


def group_amax(h: np.ndarray, group: int) -> np.ndarray:
    magnitude = np.abs(np.where(np.isnan(h), F32(0), h))
    return magnitude.reshape(len(h), -1, group).max(2)


def fp8_groups(hidden: torch.Tensor, group: int, ue8m0: bool) -> tuple[np.ndarray, np.ndarray]:
    """Element codes [M, H]; scale words [M, H / 128] int32 or scales [M, H / group] float32."""
    h = float32(hidden)
    with np.errstate(all="ignore"):
        scale = np.maximum(group_amax(h, group), F32(1e-4)) * (F32(1) / F32(448))
        if ue8m0:
            mantissa, exponent = np.frexp(scale.astype(np.float64))
            code = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent) + 127, 1, 254)
            code = np.where(np.isinf(scale), 254, code).astype(np.int64)
            inverse = np.ldexp(1.0, 127 - code).astype(F32)
        else:
            inverse = F32(1) / scale
        codes = e4m3((h.reshape(*scale.shape, group) * inverse[..., None]).astype(F32)).reshape(h.shape)
    if not ue8m0:
        return codes, scale
    per_word = 128 // group
    by_word = code.reshape(len(h), -1, per_word) << (8 * np.arange(per_word))
    return codes, by_word.sum(2).astype(np.uint32).view(np.int32)


def e2m1(w: np.ndarray) -> np.ndarray:
    m = np.abs(w)[..., None]
    index = np.where(UP_AT_TIE, m >= MIDPOINTS, m > MIDPOINTS).sum(-1)
    return (index | np.where((w < 0) & (index != 0), 8, 0)).astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def nvfp4_token(hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes [M, H / 2], scale codes [M, H / 16], token scales [M]."""
    h = float32(hidden)
    with np.errstate(all="ignore"):
        xs = np.maximum(group_amax(h, 16).max(1), F32(1e-12)) * (F32(1) / F32(2688))
        u = (h / xs[:, None]).astype(F32)
        amax = group_amax(u, 16)
        scale = e4m3(np.clip(amax * (F32(1) / F32(6)), F32(2.0**-9), F32(448)))
        w = (u.reshape(*scale.shape, 16) / e4m3_value(scale)[..., None]).astype(F32)
    return pack(e2m1(w).reshape(h.shape)), scale, xs


def nvfp4_block(hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes [M, H / 2] and scale codes [M, H / 16]: |h| compared with midpoint * scale."""
    h = float32(hidden)
    with np.errstate(all="ignore"):
        scale = e4m3(np.maximum(group_amax(h, 16) * (F32(1) / F32(6)), F32(2.0**-9)))
    m = np.abs(h).reshape(*scale.shape, 16)[..., None]
    edges = e4m3_value(scale)[..., None, None] * MIDPOINTS
    index = np.where(UP_AT_TIE, m >= edges, m > edges).sum(-1).reshape(h.shape)
    return pack((index | np.where((h < 0) & (index != 0), 8, 0)).astype(np.uint8)), scale


def square_sums(h: np.ndarray) -> np.ndarray:
    """Row sums of squares in the stated order: 256 lanes of eight columns, then pairs of lanes."""
    h = np.pad(h, ((0, 0), (0, -h.shape[1] % 2048)))
    columns = (h * h).astype(F32).reshape(len(h), -1, 256, 8)
    lanes = np.zeros((len(h), 256), F32)
    for chunk in range(columns.shape[1]):
        for element in range(8):
            lanes = lanes + columns[:, chunk, :, element]
    lanes = lanes.reshape(len(h), 8, 32)
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes[:, :, :distance] + lanes[:, :, distance : 2 * distance]
    warps = lanes[:, :, 0]
    for distance in (4, 2, 1):
        warps = warps[:, :distance] + warps[:, distance : 2 * distance]
    return warps[:, 0]


def nvfp4_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, center: float
) -> tuple[np.ndarray, np.ndarray]:
    h = float32(hidden)
    with np.errstate(all="ignore"):
        mean = square_sums(h) * F32(1.0 / h.shape[1]) + F32(eps)
        rstd = F32(1) / np.sqrt(mean)
        normed = (h * rstd[:, None]) * (float32(weight) + F32(center))
    return nvfp4_block(torch.from_numpy(normed.astype(F32)).bfloat16())


def page_row(token: int, block_m: int) -> int:
    page, m = divmod(token, block_m)
    return page * (-(-block_m // 128) * 128) + m // 128 * 128 + m % 32 * 4 + m % 128 // 32
