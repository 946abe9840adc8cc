"""Calls that faults are planted in: inputs that discriminate, and the expected outputs, which come from the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import reference
from megamoe.quant_keys import GroupShape, QuantKey, ScaleDesc
from reference.layouts import get_layout


@dataclass(frozen=True)
class Scene:
    """op, params, inputs, expected: as in a bundle's case. dtypes: real dtypes of byte tensors. layouts: by
    output.
    """

    op: str | None
    params: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    layouts: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    code: str | None = None

    @property
    def hidden(self) -> np.ndarray:
        return self.inputs["hidden_states"].float().numpy()


def hidden_states(tokens: int, hidden: int, seed: int, group: int = 32, kind: str = "spread") -> Tensor:
    """bf16. "spread": every group at its own magnitude, with exact powers of two, zeros, tiny and subnormal
    groups among them ("infs": with infinities, "tiny": with whole rows below the floors). "ties": multiples
    of small powers of two, so that quotients fall on midpoints."""
    rng = np.random.default_rng(seed)
    groups = hidden // group
    exponent = rng.integers(-9, 10, (tokens, groups)).repeat(group, 1)
    if kind == "ties":
        values = rng.integers(-255, 256, (tokens, hidden)) * np.exp2(exponent - 6.0)
        values[:, ::group] = 448 * np.exp2(exponent[:, ::group].astype(float))
    else:
        values = rng.standard_normal((tokens, hidden)) * np.exp2(exponent.astype(float))
        values[:, 1::7] *= 2.0**-11  # results that are subnormal codes, zeros and negative zeros
        values[::5, :group] = 0.0
        values[1::5, :group] *= 1e-9
        values[2::5, -group] = 448.0 * 2.0 ** rng.integers(12, 15, values[2::5, -group].shape)
        if kind == "infs":
            values[rng.random(values.shape) < 0.002] = np.inf
        if kind == "nans":
            values[rng.random(values.shape) < 0.002] = np.nan
        if kind == "tiny":
            values[::2] *= 2.0**-36
    return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)


def routing(tokens: int, topk: int, experts: int, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed + 1)
    ids = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)])
    mask = rng.random(tokens) < 0.3
    mask[1] = True
    return {
        "topk_ids": torch.from_numpy(ids.astype(np.int64)),
        "topk_weights": torch.from_numpy(rng.uniform(0.1, 1.0, (tokens, topk)).astype(np.float32)),
        "is_padding": torch.from_numpy(mask),
    }


def fp8_scene(
    tokens: int,
    hidden: int,
    seed: int = 0,
    *,
    group: int = 32,
    fp32: bool = False,
    block_m: int | None = None,
    kind: str = "spread",
    pitch: int = 0,
) -> Scene:
    """prepare_megamoe_inputs. pitch: extra words at the end of each row of x_sf."""
    states = hidden_states(tokens, hidden, seed, group, kind)
    inputs = {"hidden_states": states, **routing(tokens, 6, 24, seed)}
    columns = hidden // (group if fp32 else 128)
    dtype = torch.float32 if fp32 else torch.int32
    x = torch.zeros(tokens, hidden, dtype=torch.uint8).view(torch.float8_e4m3fn)
    memory = torch.full((tokens, columns + pitch), 0x5A5A5A5A, dtype=torch.int32).view(dtype)
    expected = {
        "x": x,
        "x_sf": memory[:, :columns],
        "topk_idx_out": torch.zeros(tokens, 6, dtype=torch.int64),
        "topk_weights_out": torch.zeros(tokens, 6),
    }
    extra: dict[str, Any] = {}
    params: dict[str, Any] = {"recipe": f"fp8_{'fp32' if fp32 else 'ue8m0'}_g{group}"}
    if block_m is not None:
        rows = -(-tokens // block_m) * (-(-block_m // 128) * 128) + 4
        pages = torch.full((columns, rows), 0x3C3C3C3C, dtype=torch.int32).T
        expected["shared_x_sf"] = pages
        extra = {"shared_x_sf": pages, "shared_block_m": block_m}
        params["shared_block_m"] = block_m
    key = QuantKey(
        torch.float8_e4m3fn, ScaleDesc(torch.float32 if fp32 else torch.uint8, False, GroupShape(1, group))
    )
    reference.prepare_megamoe_inputs(
        states,
        inputs["topk_weights"],
        inputs["topk_ids"],
        x,
        expected["x_sf"],
        expected["topk_idx_out"],
        expected["topk_weights_out"],
        inputs["is_padding"],
        hidden_quant=key,
        **extra,
    )
    return Scene("prepare_megamoe_inputs", params, inputs, expected)


def nvfp4_scene(tokens: int, hidden: int, seed: int = 0, kind: str = "spread") -> Scene:
    """prepare_megamoe_nvfp4_inputs, two levels, with l2_alpha."""
    states = hidden_states(tokens, hidden, seed, 16, kind)
    rng = np.random.default_rng(seed + 2)
    alpha = torch.from_numpy(rng.uniform(1e-5, 1e-3, 9).astype(np.float32))
    inputs = {"hidden_states": states, "w2_global_scale": alpha, **routing(tokens, 6, 24, seed)}
    expected = {
        "x": torch.zeros(tokens, hidden // 2, dtype=torch.uint8),
        "x_sf": torch.zeros(tokens, hidden // 64, dtype=torch.int32),
        "x_scales": torch.zeros(tokens),
        "l2_alpha": torch.zeros(9),
        "topk_idx_out": torch.zeros(tokens, 6, dtype=torch.int64),
        "topk_weights_out": torch.zeros(tokens, 6),
    }
    buffers = {
        name: expected[name]
        for name in ("x", "x_sf", "x_scales", "topk_idx_out", "topk_weights_out", "l2_alpha")
    }
    reference.prepare_megamoe_nvfp4_inputs(
        states,
        inputs["topk_weights"],
        inputs["topk_ids"],
        **buffers,
        is_padding=inputs["is_padding"],
        w2_global_scale=alpha,
        l2_activation_scale=0.37,
    )
    params = {"recipe": "nvfp4_token", "l2_activation_scale": 0.37}
    return Scene("prepare_megamoe_nvfp4_inputs", params, inputs, expected, dtypes={"x": "e2m1x2"})


def nvfp4_block_scene(tokens: int, hidden: int, seed: int = 0, kind: str = "spread") -> Scene:
    """prepare_megamoe_nvfp4_block_inputs, one level."""
    states = hidden_states(tokens, hidden, seed, 16, kind)
    inputs = {"hidden_states": states, **routing(tokens, 4, 16, seed)}
    expected = {
        "x": torch.zeros(tokens, hidden // 2, dtype=torch.uint8),
        "x_sf": torch.zeros(tokens, hidden // 16, dtype=torch.uint8),
        "topk_idx_out": torch.zeros(tokens, 4, dtype=torch.int64),
        "topk_weights_out": torch.zeros(tokens, 4),
    }
    reference.prepare_megamoe_nvfp4_block_inputs(
        states, inputs["topk_weights"], inputs["topk_ids"], **expected, is_padding=inputs["is_padding"]
    )
    return Scene(
        "prepare_megamoe_nvfp4_block_inputs",
        {"recipe": "nvfp4_block"},
        inputs,
        expected,
        dtypes={"x": "e2m1x2"},
    )


def eplb_scene(tokens: int, topk: int, seed: int = 0, replicas: int = 3) -> Scene:
    """eplb_map_to_physical_and_record, with ids out of range and fewer unpadded tokens than rows."""
    rng = np.random.default_rng(seed)
    experts = 16
    counts = rng.integers(1, replicas + 1, experts)
    counts[:4] = replicas
    table = np.full((experts, replicas), -1, dtype=np.int64)
    table[np.arange(replicas)[None] < counts[:, None]] = rng.permutation(int(counts.sum()))
    ids = rng.integers(0, experts, (tokens, topk))
    ids[::7, 0] = -1
    ids[3::9, topk - 1] = experts + 5
    inputs = {
        "topk_ids": torch.from_numpy(ids),
        "expert_load": torch.zeros(int(counts.sum()), dtype=torch.int32),
        "logical_to_physical_map": torch.from_numpy(table),
        "logical_replica_count": torch.from_numpy(counts),
    }
    unpadded = tokens * 3 // 4
    load = inputs["expert_load"].clone()
    physical = reference.eplb_map_to_physical_and_record(
        inputs["topk_ids"],
        load,
        inputs["logical_to_physical_map"],
        inputs["logical_replica_count"],
        torch.tensor(True),
        torch.tensor(unpadded),
    )
    params = {"record": True, "num_unpadded_tokens": unpadded}
    return Scene(
        "eplb_map_to_physical_and_record", params, inputs, {"physical_ids": physical, "expert_load": load}
    )


def layout_scene(name: str, seed: int = 0, code: str | None = None, fill: int = 0x5A, **params: Any) -> Scene:
    """A tensor in a named layout whose units all differ as far as their width allows."""
    layout = get_layout(name, **params)
    rng = np.random.default_rng(seed)
    shape = layout.logical_shape
    number = int(np.prod(shape))
    dtype = layout.logical_dtype
    if dtype == torch.float32:
        values = torch.from_numpy(
            (1 + np.arange(number) / number).astype(np.float32).reshape(shape)
            * 2.0 ** rng.integers(-9, 9, shape)
        )
        logical = values.to(torch.float32)
    elif layout.element_bits == 4:
        logical = torch.from_numpy(rng.integers(0, 16, shape).astype(np.uint8))
    elif dtype.itemsize == 1:
        logical = torch.from_numpy(rng.integers(90, 150, shape).astype(np.uint8)).view(dtype)
    else:
        logical = torch.from_numpy(rng.integers(-(2**15), 2**15, shape).astype(np.int16)).view(dtype)
    return Scene(
        None,
        params,
        {"logical": logical},
        {"out": layout.pack(logical, fill=fill)},
        {"out": layout},
        code=code,
    )


def plain_scene(tensor: Tensor, name: str = "output") -> Scene:
    """Two tensors of which nothing is known."""
    return Scene(None, {}, {}, {name: tensor})


def launch_scene(
    tokens: int,
    seed: int = 0,
    *,
    hidden: int = 256,
    intermediate: int = 128,
    experts: int = 2,
    clamp: float | None = 1.0,
) -> Scene:
    """fp8_mega_moe on one rank, exact exponentials, with every stage."""
    from megamoe.suite.drivers.mega_moe import expected_fp8_mega_moe

    rng = np.random.default_rng(seed)

    def codes(*shape: int) -> Tensor:
        values = rng.standard_normal(shape).astype(np.float32) * 16
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8)

    def scales(center: float, *shape: int) -> Tensor:
        return torch.from_numpy((np.exp2(rng.uniform(-1, 1, shape)) * center).astype(np.float32))

    inputs = {
        "x": codes(tokens, hidden),
        "x_sf": scales(1 / 16, tokens, hidden // 128),
        "topk_idx": torch.from_numpy(np.stack([rng.permutation(experts)[:2] for _ in range(tokens)])),
        "topk_weights": torch.from_numpy(rng.uniform(0.1, 1.0, (tokens, 2)).astype(np.float32)),
        "l1_w": codes(experts, 2 * intermediate, hidden),
        "l1_w_sf": scales(1 / 64, experts, 2 * intermediate // 128, hidden // 128),
        "l2_w": codes(experts, hidden, intermediate),
        "l2_w_sf": scales(1 / 64, experts, hidden // 128, intermediate // 128),
    }
    params = {"tokens": [tokens], "clamp": clamp, "fast_math": False}
    expected = expected_fp8_mega_moe(**inputs, tokens=[tokens], activation_clamp=clamp, fast_math=False)
    return Scene("fp8_mega_moe", params, inputs, expected)


def pre_dispatch_scene(tokens: int, hidden: int, seed: int = 0) -> Scene:
    """mega_moe_pre_dispatch_sm90: scales by true division, groups of 128, five rows past the tokens."""
    states = hidden_states(tokens, hidden, seed, 128)
    given = routing(tokens, 6, 24, seed)
    inputs = {
        "hidden_states": states,
        "topk_idx_in": given["topk_ids"].to(torch.int32),
        "topk_weights_in": given["topk_weights"],
    }
    rows = tokens + 5
    expected = {
        "x": torch.full((rows, hidden), 0x5A, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "x_sf": torch.full((rows, hidden // 128), 7.0),
        "topk_idx": torch.full((rows, 6), 77),
        "topk_weights": torch.full((rows, 6), 7.0),
    }
    reference.mega_moe_pre_dispatch_sm90(
        states, inputs["topk_idx_in"], inputs["topk_weights_in"], *expected.values(), tokens
    )
    return Scene("mega_moe_pre_dispatch_sm90", {"num_tokens": tokens}, inputs, expected)


def fp4_launch_scene(tokens: int, seed: int = 0) -> Scene:
    """fp4_fp4_mega_moe on one rank: gate and up have scales of their own."""
    from tests.reference.mega_moe_inputs import draw_launch

    drawn = draw_launch("sm100_fp4xfp4", (tokens,), experts=2, seed=seed)
    given, weights = drawn.inputs[0], drawn.weights[0]
    inputs = {
        "x": given.x,
        "x_sf": given.x_sf,
        "topk_idx": given.topk_idx,
        "topk_weights": given.topk_weights,
        "l1_w": weights.l1,
        "l1_w_sf": weights.l1_sf,
        "l2_w": weights.l2,
        "l2_w_sf": weights.l2_sf,
        "l1_alphas": weights.l1_alphas,
        "l2_alphas": weights.l2_alphas,
        "a2_scales": weights.a2_scales,
    }
    return Scene(
        "fp4_fp4_mega_moe",
        {"fast_math": False},
        {k: v for k, v in inputs.items() if v is not None},
        fp4_launch(inputs),
    )


def fp4_launch(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The reference's outputs for such inputs."""
    from reference.mega_moe import Activation, ExpertWeights, LaunchConfig, RankInputs, forward

    weights = ExpertWeights(
        inputs["l1_w"],
        inputs["l2_w"],
        inputs["l1_w_sf"],
        inputs["l2_w_sf"],
        inputs["l1_alphas"],
        inputs["l2_alphas"],
        inputs["a2_scales"],
    )
    rank = RankInputs(inputs["x"], inputs["x_sf"], inputs["topk_idx"], inputs["topk_weights"])
    launch = LaunchConfig(128, inputs["l2_w"].shape[1])
    result = forward("sm100_fp4xfp4", [rank], [weights], [launch], Activation(fast_math=False))[0]
    return {"y": result.y, "stats": result.stats}
