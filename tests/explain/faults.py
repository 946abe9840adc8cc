"""Planted faults: each writes wrong outputs by its own formula (NumPy loops and index arithmetic), and names
its cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.explain import quantizers as q
from tests.explain.scenes import Scene, fp4_launch

Outputs = dict[str, Tensor]
Inject = Callable[[Scene], Outputs]


@dataclass(frozen=True)
class Fault:
    """id: short and stable. cause: the right answer. outputs: those that it shows in, in any order."""

    id: str
    cause: str
    scene: Callable[[], Scene]
    inject: Inject

    def actual(self, scene: Scene) -> Outputs:
        changed = self.inject(scene)
        return {name: changed.get(name, copied(tensor)) for name, tensor in scene.expected.items()}


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides and the same bytes between its elements."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def memory_of(tensor: Tensor) -> np.ndarray:
    """All bytes of a tensor's storage, writable."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def raw(tensor: Tensor) -> np.ndarray:
    """The elements as unsigned integers, sharing memory, strides kept."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()]).numpy()


def with_noise(outputs: Outputs, seed: int, share: float = 0.001) -> Outputs:
    """0.1% of the bytes of each differing output XORed with random values that are not zero."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, tensor in outputs.items():
        noisy = copied(tensor)
        elements = noisy.contiguous().view(torch.uint8).numpy().reshape(-1).copy()
        number = max(1, round(share * elements.size))
        places = rng.choice(elements.size, number, replace=False)
        elements[places] ^= rng.integers(1, 256, number).astype(np.uint8)
        raw(noisy)[...] = elements.view(raw(noisy).dtype).reshape(noisy.shape)
        found[name] = noisy
    return found


# ---- places


def nibbles(output: str) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        bytes_ = raw(actual).view(np.uint8)
        bytes_[...] = (bytes_ >> 4) | (bytes_ << 4)
        return {output: actual}

    return inject


def reversed_words(output: str, width: int = 4) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        elements = np.ascontiguousarray(raw(actual)).view(np.uint8)
        shape = elements.shape
        elements = elements.reshape(-1, width)[:, ::-1].reshape(shape)
        raw(actual)[...] = np.ascontiguousarray(elements).view(raw(actual).dtype)
        return {output: actual}

    return inject


def transposed(output: str) -> Inject:
    """The elements in column order, in a buffer of the same shape."""

    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        values = raw(actual)
        values[...] = np.array(
            [values[r, c] for c in range(values.shape[1]) for r in range(values.shape[0])]
        ).reshape(values.shape)
        return {output: actual}

    return inject


def rows_shifted(output: str, by: int, fill: int = 0x5A) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        values, old = raw(actual), raw(copied(actual))
        values[...] = np.frombuffer(bytes([fill]) * 8, dtype=values.dtype)[0]
        for row in range(values.shape[0]):
            if 0 <= row + by < values.shape[0]:
                values[row + by] = old[row]
        return {output: actual}

    return inject


def columns_shifted(output: str, by: int, fill: int = 0x5A) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        values, old = raw(actual), raw(copied(actual))
        values[...] = np.frombuffer(bytes([fill]) * 8, dtype=values.dtype)[0]
        for column in range(values.shape[1]):
            if 0 <= column + by < values.shape[1]:
                values[:, column + by] = old[:, column]
        return {output: actual}

    return inject


def dense_rows(output: str) -> Inject:
    """Rows written one after another where the buffer has a pitch; the rest of the buffer keeps its fill."""

    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        flat = memory_of(actual).view(raw(actual).dtype)
        elements = raw(actual).copy().reshape(-1)
        flat[...] = np.frombuffer(bytes([0x5A]) * 8, dtype=flat.dtype)[0]
        flat[: elements.size] = elements
        return {output: actual}

    return inject


def padded_rows(output: str, extra: int) -> Inject:
    """Rows written ``extra`` elements too far apart; what does not fit falls away."""

    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        values = raw(actual).copy()
        flat = raw(actual).reshape(-1)
        flat[...] = np.frombuffer(bytes([0x5A]) * 8, dtype=flat.dtype)[0]
        for row in range(values.shape[0]):
            start = row * (values.shape[1] + extra)
            room = max(0, min(values.shape[1], flat.size - start))
            flat[start : start + room] = values[row, :room]
        return {output: actual}

    return inject


def tiles_overlap(output: str, per_tile: int) -> Inject:
    """The scales of tile j stored from column j on instead of j * per_tile, later tiles last."""

    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        right = raw(actual).copy()
        values = raw(actual)
        values[...] = np.frombuffer(bytes([0x5A]) * 8, dtype=values.dtype)[0]
        for tile in range(right.shape[1] // per_tile):
            for i in range(per_tile):
                if tile + i < right.shape[1]:
                    values[:, tile + i] = right[:, tile * per_tile + i]
        return {output: actual}

    return inject


def row_major_words(scene: Scene) -> Outputs:
    """MN-major words written row after row into the same memory."""
    actual = copied(scene.expected["out"])
    logical = raw(actual).copy()
    flat = memory_of(actual).view(logical.dtype)
    flat[...] = np.frombuffer(bytes([0x5A]) * 4, dtype=flat.dtype)[0]
    batches = logical.reshape(-1, *logical.shape[-2:])
    pitch = flat.size // batches.shape[0]
    for number, block in enumerate(batches):
        flat[number * pitch : number * pitch + block.size] = block.reshape(-1)
    return {"out": actual}


def page_row(token: int, block_m: int) -> int:
    page = (block_m + 127) // 128 * 128
    m = token % block_m
    return token // block_m * page + m // 128 * 128 + m % 32 * 4 + m % 128 // 32


def pages(rows_of: Callable[[int, int], int]) -> Inject:
    """shared_x_sf with token t in row rows_of(t, block_m); everything else keeps the fill."""

    def inject(scene: Scene) -> Outputs:
        block_m = scene.params["shared_block_m"]
        right = scene.expected["shared_x_sf"]
        tokens = scene.inputs["hidden_states"].shape[0]
        actual = copied(right)
        actual[...] = 0x3C3C3C3C
        for token in range(tokens):
            if rows_of(token, block_m) < actual.shape[0]:
                actual[rows_of(token, block_m)] = right[page_row(token, block_m)]
        return {"shared_x_sf": actual}

    return inject


def without_order(token: int, block_m: int) -> int:
    return token // block_m * ((block_m + 127) // 128 * 128) + token % block_m


def order_twice(token: int, block_m: int) -> int:
    row = page_row(token, block_m)
    m = row % 128
    return row - m + m % 32 * 4 + m // 32


def reordered(place: Callable[[int, int], int], axis: int = -2) -> Inject:
    """Rows along ``axis`` of the only output: expected row r goes to place(r, rows)."""

    def inject(scene: Scene) -> Outputs:
        (output,) = scene.expected
        actual = copied(scene.expected[output])
        values = np.moveaxis(raw(actual), axis, 0)
        old = values.copy()
        for row in range(old.shape[0]):
            values[place(row, old.shape[0])] = old[row]
        return {output: actual}

    return inject


def interleaved_row(row: int, rows: int, block: int = 8) -> int:
    half, r = divmod(row, rows // 2)
    return r // block * 2 * block + half * block + r % block


def concatenated_row(row: int, rows: int) -> int:
    """Inverse of interleaved_row."""
    pair, inside = divmod(row, 16)
    return (inside // 8) * (rows // 2) + pair * 8 + inside % 8


def other_blocks(block: int) -> Callable[[int, int], int]:
    return lambda row, rows: interleaved_row(concatenated_row(row, rows), rows, block)


def exchanged_halves(row: int, rows: int) -> int:
    """Gate and up blocks of 8 exchanged in interleaved rows."""
    return row + 8 if row % 16 < 8 else row - 8


def ordered_again(row: int, rows: int) -> int:
    return row // 128 * 128 + row % 32 * 4 + row % 128 // 32


def order_undone(row: int, rows: int) -> int:
    return row // 128 * 128 + row % 4 * 32 + row % 128 // 4


def swizzle_place(row: int, group: int, groups: int) -> int:
    strips = groups // 4
    return (row // 128 * strips + group // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


def swizzle_undone(rows: int, groups: int) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected["out"])
        old, new = raw(actual).copy().reshape(-1), raw(actual).reshape(-1)
        for row in range(rows):
            for group in range(groups):
                new[row * groups + group] = old[swizzle_place(row, group, groups)]
        return {"out": actual}

    return inject


def swizzle_again(rows: int, groups: int) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected["out"])
        old, new = raw(actual).copy().reshape(-1), raw(actual).reshape(-1)
        for row in range(rows):
            for group in range(groups):
                new[swizzle_place(row, group, groups)] = old[row * groups + group]
        return {"out": actual}

    return inject


# ---- rows


def duplicated(output: str, source: int, targets: tuple[int, ...]) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        for target in targets:
            raw(actual)[target] = raw(actual)[source]
        return {output: actual}

    return inject


def swapped(output: str, *pairs: tuple[int, int]) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        for left, right in pairs:
            raw(actual)[[left, right]] = raw(actual)[[right, left]]
        return {output: actual}

    return inject


def unwritten(output: str, rows: slice, columns: slice, fill: int) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        values = raw(actual)
        values[rows, columns] = np.frombuffer(bytes([fill]) * 8, dtype=values.dtype)[0]
        return {output: actual}

    return inject


# ---- units


def scale_bytes(output: str, step: int, rows: slice = slice(None), columns: slice = slice(None)) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        if actual.dtype == torch.float32:
            raw(actual)[rows, columns] += step << 23
            return {output: actual}
        elements = np.ascontiguousarray(raw(actual)).view(np.uint8)
        elements[rows, columns] += np.uint8(step % 256)
        raw(actual)[...] = elements.view(raw(actual).dtype)
        return {output: actual}

    return inject


def fp32_in_place_of_bytes(output: str) -> Inject:
    """The scales as float32, one after another, as far as the buffer goes."""

    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        codes = np.ascontiguousarray(raw(actual)).view(np.uint8).reshape(-1)
        floats = np.exp2(codes.astype(np.float64) - 127).astype(np.float32).view(np.uint8)
        raw(actual)[...] = floats[: codes.size].view(raw(actual).dtype).reshape(raw(actual).shape)
        return {output: actual}

    return inject


# ---- arithmetic


def fp8(**knobs: object) -> Inject:
    def inject(scene: Scene) -> Outputs:
        group = int(scene.params["recipe"].split("_g")[1])
        codes, scales = q.fp8_ue8m0(scene.hidden, group, **knobs)  # type: ignore[arg-type]
        bytes_ = np.zeros((scales.shape[0], scene.hidden.shape[1] // 128, 4), dtype=np.uint8)
        bytes_[..., : 128 // group] = scales.reshape(scales.shape[0], -1, 128 // group)
        words = bytes_.reshape(scales.shape[0], -1).view("<i4")
        return _fp8_outputs(scene, codes, words)

    return inject


def fp8_fp32(**knobs: object) -> Inject:
    def inject(scene: Scene) -> Outputs:
        group = int(scene.params["recipe"].split("_g")[1].split("_")[0])
        codes, scales = q.fp8_fp32(scene.hidden, group, **knobs)  # type: ignore[arg-type]
        return _fp8_outputs(scene, codes, scales.view(np.int32))

    return inject


def _fp8_outputs(scene: Scene, codes: np.ndarray, words: np.ndarray) -> Outputs:
    x, x_sf = copied(scene.expected["x"]), copied(scene.expected["x_sf"])
    raw(x)[...] = codes
    raw(x_sf)[...] = words
    found = {"x": x, "x_sf": x_sf}
    if "shared_x_sf" in scene.expected:
        pages_ = copied(scene.expected["shared_x_sf"])
        for token in range(codes.shape[0]):
            raw(pages_)[page_row(token, scene.params["shared_block_m"])] = words[token]
        found["shared_x_sf"] = pages_
    return found


def nvfp4(**knobs: object) -> Inject:
    def inject(scene: Scene) -> Outputs:
        x, scales, token_scales = q.nvfp4_two_level(scene.hidden, **knobs)  # type: ignore[arg-type]
        return {
            "x": torch.from_numpy(x),
            "x_sf": torch.from_numpy(q.words(scales).copy()),
            "x_scales": torch.from_numpy(token_scales),
        }

    return inject


def nvfp4_block(**knobs: object) -> Inject:
    def inject(scene: Scene) -> Outputs:
        x, scales, _ = q.nvfp4_two_level(scene.hidden, outer=np.ones_like, normalize=lambda h, xs: h, **knobs)  # type: ignore[arg-type]
        return {"x": torch.from_numpy(x), "x_sf": torch.from_numpy(scales)}

    return inject


def alpha(function: Callable[[np.ndarray, np.float32], np.ndarray]) -> Inject:
    def inject(scene: Scene) -> Outputs:
        weights = scene.inputs["w2_global_scale"].numpy()
        return {
            "l2_alpha": torch.from_numpy(
                function(weights, np.float32(scene.params["l2_activation_scale"])).astype(np.float32)
            )
        }

    return inject


def loaded_with(**changes: Callable[[Tensor], Tensor]) -> Inject:
    """A launch whose scales were loaded wrong: name of an input -> what became of it."""

    def inject(scene: Scene) -> Outputs:
        return fp4_launch(
            {**scene.inputs, **{name: change(scene.inputs[name]) for name, change in changes.items()}}
        )

    return inject


def pre_dispatched(**knobs: object) -> Inject:
    def inject(scene: Scene) -> Outputs:
        tokens = scene.params["num_tokens"]
        right = {"floor": 1e-10, "scale": lambda a: (a / q.F(448)).astype(q.F)}
        codes, scales = q.fp8_fp32(scene.hidden, 128, **{**right, **knobs})  # type: ignore[arg-type]
        x, x_sf = copied(scene.expected["x"]), copied(scene.expected["x_sf"])
        raw(x)[:tokens] = codes
        x_sf[:tokens] = torch.from_numpy(scales)
        return {"x": x, "x_sf": x_sf}

    return inject


def ids_kept(scene: Scene) -> Outputs:
    """Ids outside the logical experts come out as they went in."""
    ids = scene.inputs["topk_ids"]
    outside = (ids < 0) | (ids >= scene.inputs["logical_replica_count"].numel())
    return {"physical_ids": torch.where(outside, ids, scene.expected["physical_ids"])}


def same_expert_again(scene: Scene) -> Outputs:
    """The first choice of every third token in all of its slots."""
    actual = scene.expected["topk_idx_out"].clone()
    actual[::3] = torch.where(actual[::3] < 0, actual[::3], actual[::3, :1])
    return {"topk_idx_out": actual}


def shuffled(output: str, seed: int = 5) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        raw(actual)[...] = raw(actual)[np.random.default_rng(seed).permutation(actual.shape[0])]
        return {output: actual}

    return inject


def amax_with_nan(hidden: np.ndarray, group: int) -> np.ndarray:
    """A NaN in the group wins."""
    return np.abs(hidden).reshape(hidden.shape[0], -1, group).max(2).astype(np.float32)


def power_of_nan(scale: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(scale), 127, q.ceil_power(np.nan_to_num(scale, nan=1.0)))


def frexp_exponent(scale: np.ndarray) -> np.ndarray:
    return np.frexp(scale)[1]


def e4m3_overflow_to_nan(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) > 464, np.uint8(0x7F), q.e4m3_saturating(values))


def e4m3_without_subnormals(values: np.ndarray) -> np.ndarray:
    codes = q.e4m3_saturating(values)
    return np.where((codes & 0x78) == 0, codes & 0x80, codes).astype(np.uint8)


def e4m3_without_negative_zero(values: np.ndarray) -> np.ndarray:
    codes = q.e4m3_saturating(values)
    return np.where(codes == 0x80, 0, codes).astype(np.uint8)


def through_bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


# ---- routing


def sentinel(value: int) -> Inject:
    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected["topk_idx_out"])
        actual[scene.inputs["is_padding"]] = value
        return {"topk_idx_out": actual}

    return inject


def mask_ignored(scene: Scene) -> Outputs:
    return {
        "topk_idx_out": scene.inputs["topk_ids"].clone(),
        "topk_weights_out": scene.inputs["topk_weights"].clone(),
    }


def zero_extended(output: str) -> Inject:
    def inject(scene: Scene) -> Outputs:
        return {output: torch.from_numpy(raw(scene.expected[output]).astype(np.uint32).astype(np.int64))}

    return inject


def narrow_rows(output: str) -> Inject:
    """32-bit ids written one after another into the 64-bit buffer, whose rest keeps its fill."""

    def inject(scene: Scene) -> Outputs:
        actual = copied(scene.expected[output])
        ids = raw(actual).astype(np.int32).reshape(-1)
        memory = raw(actual).reshape(-1).view(np.int32)
        memory[...] = 0x5A5A5A5A
        memory[: ids.size] = ids
        return {output: actual}

    return inject


def mapped(replica: Callable[[int, int, int, int], int], *, count_all: bool = False) -> Inject:
    """EPLB in Python loops. replica(token, slot, topk, count) -> index of the replica (may be negative, as in
    C).
    """

    def inject(scene: Scene) -> Outputs:
        ids, table = scene.inputs["topk_ids"].tolist(), scene.inputs["logical_to_physical_map"].tolist()
        counts = scene.inputs["logical_replica_count"].tolist()
        load = scene.inputs["expert_load"].clone()
        physical = scene.expected["physical_ids"].clone()
        topk = len(ids[0])
        for token, row in enumerate(ids):
            for slot, expert in enumerate(row):
                found = -1
                if 0 <= expert < len(counts):
                    found = table[expert][replica(token, slot, topk, max(counts[expert], 1))]
                physical[token, slot] = found
                if found >= 0 and (count_all or token < scene.params["num_unpadded_tokens"]):
                    load[found] += 1
        return {"physical_ids": physical, "expert_load": load}

    return inject


def right_replica(token: int, slot: int, topk: int, count: int) -> int:
    return ((token * 2654435769) & 0xFFFFFFFF) % count


def signed_replica(token: int, slot: int, topk: int, count: int) -> int:
    value = (token * 2654435769) & 0xFFFFFFFF
    value -= (value >> 31) << 32
    return int(np.fmod(value, count))


def wide_replica(token: int, slot: int, topk: int, count: int) -> int:
    return (token * 2654435769) % count


def slot_replica(token: int, slot: int, topk: int, count: int) -> int:
    return (token * topk + slot) % count
