"""Hidden states that discriminate. Each generator fills [tokens, hidden] float32 values for groups of
``group`` columns.

Random normal data has three distinct UE8M0 bytes and hides most layout mistakes; here every scale and every
code is made to say where it came from ("position"), or the values sit where arithmetic goes wrong ("ties",
"edges", "specials").
``Target`` says what the values are quantized to, because ties and edges differ between formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference import formats


@dataclass(frozen=True)
class Target:
    """element: format of the elements. scale: "ue8m0", "fp32" or "e4m3" (a block scale below a token's scale
    or none). group: columns a scale. two_level: the row has a scale of its own."""

    element: str
    scale: str
    group: int
    two_level: bool = False

    @property
    def max_element(self) -> float:
        return formats.FORMATS[self.element].max_value


Generator = Callable[[tuple[int, int], Target, np.random.Generator], np.ndarray]

_E4M3_MAX = 448.0


def generate(
    name: str, shape: tuple[int, int], target: Target, rng: np.random.Generator, dtype: torch.dtype
) -> Tensor:
    """[tokens, hidden] values of ``dtype``. fp16 cannot hold most of them: they are scaled into its range
    first."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        values = VALUES[name](shape, target, rng)
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if dtype == torch.float16:
        tensor = torch.where(tensor.isfinite(), tensor.clamp(-65504, 65504), tensor)
    return tensor.to(dtype)


def position(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Every scale distinct (as far as the scale format has codes), every element's code dependent on its
    column."""
    codes = _positive_values(target.element)
    element = _grouped_index(shape, target.group)
    payload = codes[(element * 5 + element // target.group * 3 + 1) % (len(codes) - 1)]
    token, column = np.indices(shape)
    signs = np.where((token + column // 3) % 2, -1.0, 1.0)
    peak = (_groups(shape, target.group) * 7) % target.group  # the largest element moves through the group
    payload = np.where(column % target.group == _spread(peak, target.group), target.max_element, payload)
    return payload * signs * _spread(_distinct_scales(shape, target), target.group)


def ties(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Elements exactly half way between two codes, and their neighbours by one bfloat16 ulp, under exact
    scales."""
    codes = _positive_values(target.element)
    middles = (codes[1:] + codes[:-1]) / 2
    steps = np.array([1.0, 1.0 - 2.0**-8, 1.0 + 2.0**-7])
    pool = np.concatenate([np.outer(steps, middles).ravel(), [0.0, codes[1] / 2, codes[-1]]])
    payload = rng.choice(pool, shape) * rng.choice([-1.0, 1.0], shape)
    peaks = rng.integers(0, target.group, _group_shape(shape, target.group))
    columns = np.indices(shape)[1] % target.group
    payload = np.where(columns == _spread(peaks, target.group), target.max_element, payload)
    return payload * _spread(_exact_scales(shape, target, rng), target.group)


def edges(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Group maxima where the scale changes: max * 2^k, E4M3 midpoints, every floor, each with neighbours of 1
    and 2 ulp."""
    top = target.max_element
    anchors = [top * 2.0**k for k in (*range(-40, 41, 5), -126, -100, 100, 119)]
    anchors += [1e-4, 1e-10, 1e-8, 1e-12, 1e-12 * 448, 2.0**-9 * 6, 2.0**-10 * 6, 448 * 6, 0.0]
    scales = _positive_values("e4m3fn")[1:41]
    anchors += list((scales[1:] + scales[:-1]) / 2 * 6)
    exact = np.array(anchors, dtype=np.float32)
    neighbours = [exact]
    for step in (1, 2, 1 << 16, 2 << 16):  # ulps of float32 and of bfloat16
        bits = exact.view(np.int32)
        neighbours += [(bits + step).view(np.float32), np.maximum(bits - step, 0).view(np.float32)]
    pool = np.concatenate(neighbours)
    amax = rng.permutation(np.resize(rng.permutation(pool), _group_shape(shape, target.group)).ravel())
    amax = amax.reshape(_group_shape(shape, target.group))
    fractions = rng.uniform(-1.0, 1.0, shape)
    peaks = rng.integers(0, target.group, amax.shape)
    columns = np.indices(shape)[1] % target.group
    fractions = np.where(columns == _spread(peaks, target.group), rng.choice([-1.0, 1.0], shape), fractions)
    # float64 holds the product; conversion to float32 then keeps the peak exact
    return fractions * _spread(amax.astype(np.float64), target.group)


def specials(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """NaN, both infinities, both zeros, subnormals and the largest finite values among ordinary ones, alone
    and in crowds."""
    values = rng.standard_normal(shape) * 4
    pool = np.array(
        [
            np.nan,
            np.inf,
            -np.inf,
            -0.0,
            0.0,
            1e-40,
            -1e-40,
            2.0**-133,
            3.3895e38,
            -3.3895e38,
            448,
            464,
            -480,
            1e-5,
        ],
        dtype=np.float64,
    )
    groups = _groups(shape, target.group)
    kinds = rng.permutation(np.resize(np.arange(len(pool) + 6), groups.size)).reshape(groups.shape)
    alone = rng.integers(0, target.group, groups.shape)
    kind, at = _spread(kinds, target.group), _spread(alone, target.group)
    columns = np.indices(shape)[1] % target.group
    single = (kind < len(pool)) & (columns == at)
    values = np.where(single, pool[np.minimum(kind, len(pool) - 1)], values)
    crowd = kind - len(pool)
    values = np.where(crowd == 0, np.nan, values)  # a group of NaN alone
    values = np.where(crowd == 1, 0.0, values)
    values = np.where(crowd == 2, -0.0, values)
    values = np.where(crowd == 3, rng.choice(pool, shape), values)
    return np.where(crowd == 4, rng.choice(pool[3:8], shape), values)


def codes(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Every code of the element format, as often as there is room, under exact scales."""
    positive = _positive_values(target.element)
    pool = np.concatenate([positive, -positive])
    payload = np.resize(pool, shape[0] * shape[1])
    payload = (payload if payload.size <= pool.size else rng.permutation(payload)).reshape(shape)
    payload[:, :: target.group] = target.max_element
    return payload * _spread(_exact_scales(shape, target, rng), target.group)


def every_amax(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Group maxima walk through the finite positive bfloat16 values, evenly over all of them."""
    groups = _group_shape(shape, target.group)
    bits = np.linspace(0, 0x7F7F, groups[0] * groups[1]).astype(np.uint32) << 16
    amax = rng.permutation(bits.view(np.float32)).reshape(groups).astype(np.float64)
    values = rng.uniform(-1.0, 1.0, shape)
    values[:, :: target.group] = 1.0
    return values * _spread(amax, target.group)


def random(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Normal values whose magnitude changes from token to token and from group to group."""
    exponents = rng.integers(-12, 8, (shape[0], 1)) + rng.integers(-4, 5, _group_shape(shape, target.group))
    return rng.standard_normal(shape) * _spread(2.0**exponents, target.group)


def outliers(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """What activations look like: normal values with a few channels a thousand times larger."""
    values = rng.standard_normal(shape)
    values[:, rng.integers(0, shape[1], max(1, shape[1] // 64))] *= 1000
    return values


def tiny(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Everything near and below the amax floors."""
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-13, -3, (shape[0], 1))


def saturating(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Maxima just above powers of two times the largest code, where a scale rounded down saturates."""
    groups = _group_shape(shape, target.group)
    amax = target.max_element * 2.0 ** rng.integers(-3, 4, groups) * rng.uniform(1.0, 2.0, groups)
    values = rng.uniform(-1.0, 1.0, shape)
    values[:, target.group - 1 :: target.group] = 1.0
    return values * _spread(amax, target.group)


VALUES: dict[str, Generator] = {
    "position": position,
    "ties": ties,
    "edges": edges,
    "specials": specials,
    "codes": codes,
    "every_amax": every_amax,
    "random": random,
    "outliers": outliers,
    "tiny": tiny,
    "saturating": saturating,
}


def _positive_values(name: str) -> np.ndarray:
    """Non-negative finite values of a format, ascending, float64."""
    fmt = formats.FORMATS[name]
    found = formats.decode(torch.arange(fmt.num_codes, dtype=torch.uint8), fmt).numpy().astype(np.float64)
    return np.unique(np.abs(found[np.isfinite(found)]))


def _group_shape(shape: tuple[int, int], group: int) -> tuple[int, int]:
    return shape[0], -(-shape[1] // group)


def _groups(shape: tuple[int, int], group: int) -> np.ndarray:
    """Index of each group, counted through the whole tensor."""
    rows, columns = _group_shape(shape, group)
    return np.arange(rows * columns).reshape(rows, columns)


def _grouped_index(shape: tuple[int, int], group: int) -> np.ndarray:
    return np.arange(shape[0] * shape[1]).reshape(shape)


def _spread(per_group: np.ndarray, group: int) -> np.ndarray:
    return np.repeat(per_group, group, axis=1)


def _distinct_scales(shape: tuple[int, int], target: Target) -> np.ndarray:
    """A scale for each group. Neighbours in every direction differ; all differ while there are codes
    enough."""
    index = _groups(shape, target.group)
    if target.scale == "ue8m0":
        return 2.0 ** ((index * 53) % 139 - 21.0)  # 139 exponents from 2^-21, above the floor, to 2^117
    if target.scale == "e4m3":
        scales = _positive_values("e4m3fn")[1:]
        found = scales[(index * 31) % len(scales)]
        if target.two_level:  # the row's largest group has scale 448, the others are relative to it
            found[:, 0] = np.where(np.arange(shape[0]) % 2, found[:, 0], _E4M3_MAX)
            found[np.arange(shape[0]), (np.arange(shape[0]) * 3) % found.shape[1]] = _E4M3_MAX
            return (
                found
                * (2.0 ** ((np.arange(shape[0]) * 5) % 23 - 16.0) * (1 + np.arange(shape[0]) % 8 / 8))[
                    :, None
                ]
            )
        return found
    # 4096 distinct bfloat16 maxima over 32 binades, far from their neighbours
    step = (index * 1237) % 4096
    return 2.0 ** (step % 32 - 12.0) * (1 + (step // 32) / 128) / target.max_element


def _exact_scales(shape: tuple[int, int], target: Target, rng: np.random.Generator) -> np.ndarray:
    """Scales that the quantizer will find exactly, given a group whose largest element is the largest
    code."""
    groups = _group_shape(shape, target.group)
    if target.scale == "e4m3":
        normal = _positive_values("e4m3fn")[8:]
        found = rng.choice(normal, groups)
        if target.two_level:
            found[:, 0] = _E4M3_MAX
        return found
    return 2.0 ** rng.integers(-8, 9, groups)
