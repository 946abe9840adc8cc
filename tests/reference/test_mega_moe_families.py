"""Every family against a route-by-route transcription of NUMERICS 8: one token at a time, one MMA step at a
time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mega_moe_inputs import Drawn, draw_launch
from torch import Tensor

from reference.activation import cuda_expf, cuda_rsqrtf, ex2_approx, rcp_approx_ftz
from reference.formats import encode
from reference.mega_moe import (
    FAMILIES,
    Activation,
    ExpertWeights,
    LaunchConfig,
    PostNorm,
    RankInputs,
    forward,
)
from reference.mega_moe.requantize import requantize
from reference.tensor_core import FAMILIES as MMA
from reference.tensor_core import mma_step

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SM100 = [name for name in FAMILIES if name.startswith("sm100")]


def f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One rounding to float32 from 64 significant bits, which hold every product of two float32."""
    wide = [np.asarray(each.numpy(), dtype=np.longdouble) for each in (a, b, c)]
    return torch.from_numpy(np.asarray(wide[0] * wide[1] + wide[2], dtype=np.float32))


def bf16(value: Tensor) -> Tensor:
    return value.bfloat16().float()


def gemm_row(name: str, x: Tensor, x_sf: Tensor | None, w: Tensor, w_sf: Tensor | None) -> Tensor:
    """x [K] times w [N, K] as a chain of MMA steps."""
    family = FAMILIES[name]
    row = MMA[family.mma]
    total = torch.zeros(1, len(w))
    for k in range(0, len(x), row.k_step):
        cut = slice(k, k + row.k_step)
        scales = {}
        if row.scale_group is not None:
            group = slice(k // row.scale_group, (k + row.k_step) // row.scale_group)
            scales = {
                "a_scales": x_sf[None, group],
                "b_scales": w_sf[:, group],
                "scale_format": family.scale_format,
            }
        total = mma_step(
            row,
            x[None, cut],
            w[:, cut],
            total,
            a_format=family.act_format,
            b_format=family.weight_format,
            **scales,
        )
    return total[0]


def activation_row(options: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """8.2 steps 2 to 8 for one row."""
    gate, up = bf16(gate), bf16(up)
    if options.clamp is not None:
        bound = bf16(f32(options.clamp))
        if options.name != "swiglustep":
            gate = torch.minimum(gate, bound)
        up = torch.minimum(torch.maximum(up, -bound), bound)

    def sigmoid_parts(z: Tensor) -> Tensor:
        if options.fast_math:
            return 1 + ex2_approx(-z * f32(1.4426950408889634))
        return 1 + cuda_expf(-z)

    def sigmoid(z: Tensor) -> Tensor:
        return rcp_approx_ftz(sigmoid_parts(z)) if options.fast_math else f32(1.0) / sigmoid_parts(z)

    if options.name == "situ":

        def tanh(v: Tensor) -> Tensor:
            return 2 * sigmoid(2 * v) - 1

        a = tanh(gate * (f32(1) / f32(options.alpha))) * f32(options.alpha) * sigmoid(gate)
        if options.beta:
            up = tanh(up * (f32(1) / f32(options.beta))) * f32(options.beta)
        return a * up
    z = gate if options.alpha == 1 else f32(options.alpha) * gate
    a = gate * sigmoid(z) if options.fast_math else gate / sigmoid_parts(z)
    if options.name == "swiglustep" and options.clamp is not None:
        a = torch.minimum(a, f32(options.clamp))
    return a * (up if options.beta == 0 else up + f32(options.beta))


def requantize_row(
    name: str, p: Tensor, a2: Tensor | None, g: float, fast: bool
) -> tuple[Tensor, Tensor | None]:
    """8.3 for one row, group by group."""
    if name == "sm100_bf16":
        return p.bfloat16(), None
    codes, scales = [], []
    for group in p.split(FAMILIES[name].hidden_group):
        amax = group.abs().max()
        if name in ("sm100_fp8xfp4", "sm100_fp8xfp8"):
            exponent = max((int(amax.view(torch.int32)) + 0x1FFFFF) >> 23, 113) - 8
            inverse = f32(2.0 ** (127 - exponent))
            codes.append((group * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
            scales.append(exponent)
            continue
        if name == "sm100_fp4xfp4":
            r = rcp_approx_ftz(a2) if fast else f32(1) / a2
            s = (amax * f32(1 / 6) * r).clamp(min=2**-9, max=448)
            code = s.to(torch.float8_e4m3fn)
            inverse = r * rcp_approx_ftz(code.float()) if fast else (f32(1) / a2) / code.float()
        else:
            quotient = amax / (f32(6) * f32(g))
            code = quotient.clamp(2**-9, 448).to(torch.float8_e4m3fn)
            inverse = f32(1) / (code.float() * f32(g))
        codes.append(encode(group * inverse, "e2m1", negative_zero="keep", nan_code=7))
        scales.append(int(code.view(torch.uint8)))
    return torch.cat(codes), torch.tensor(scales, dtype=torch.uint8)


def expert_row(
    name: str,
    x: Tensor,
    x_sf: Tensor | None,
    weights: ExpertWeights,
    expert: int,
    weight: Tensor | None,
    options: Activation,
    x_scale: Tensor | None = None,
    g: float = 1.0,
    normed: bool = False,
) -> Tensor:
    """One token through one expert: the bf16 that lands in its combine slot, as float32."""
    sf1, sf2 = (None if sf is None else sf[expert] for sf in (weights.l1_sf, weights.l2_sf))
    acc = gemm_row(name, x, x_sf, weights.l1[expert], sf1)
    gate, up = acc[: len(acc) // 2], acc[len(acc) // 2 :]
    if weights.l1_alphas is not None:
        alphas = weights.l1_alphas[expert].expand(2)
        scale = alphas if x_scale is None else x_scale * alphas
        gate, up = gate * scale[0], up * scale[1]
    p = activation_row(options, gate, up)
    if name in ("sm100_fp8xfp4", "sm100_fp8xfp8", "sm100_bf16") and weight is not None and not normed:
        p = p * weight
    a2 = None if weights.a2_scales is None else weights.a2_scales[expert]
    h, h_sf = requantize_row(name, p, a2, g, options.fast_math)
    acc = gemm_row(name, h, h_sf, weights.l2[expert], sf2)
    if name == "sm100_fp4xfp4":
        acc = acc * (weights.l2_alphas[expert] * a2)
    elif name == "sm100_nvfp4":
        acc = acc * weights.l2_alphas[expert]
    out = bf16(acc)
    return bf16(out * weight) if name == "sm100_fp4xfp4" and weight is not None and not normed else out


def combine_row(name: str, slots: list[tuple[Tensor, Tensor]], shared: Tensor | None, hidden: int) -> Tensor:
    """8.5 for one token."""
    total = torch.zeros(hidden)
    if shared is not None and name not in ("sm100_nvfp4", "sm100_fp4xfp4"):
        total = total + shared
    for out, weight in slots:
        total = fma(out, weight, total) if name == "sm100_nvfp4" else total + out
    if shared is not None and name in ("sm100_nvfp4", "sm100_fp4xfp4"):
        total = total + shared
    return bf16(total)


def expected_y(name: str, drawn: Drawn, rank: int, options: Activation, g: float = 1.0) -> Tensor:
    own: RankInputs = drawn.inputs[rank]
    local, _, hidden = drawn.weights[0].l1.shape
    rows = []
    for t in range(len(own.x)):
        slots = []
        for k in range(own.topk_idx.shape[1]):
            expert = int(own.topk_idx[t, k])
            if expert < 0:
                continue
            weight = own.topk_weights[t, k]
            out = expert_row(
                name,
                own.x[t],
                None if own.x_sf is None else own.x_sf[t],
                drawn.weights[expert // local],
                expert % local,
                weight,
                options,
                None if own.x_scales is None else own.x_scales[t],
                g,
            )
            slots.append((out, weight))
        shared = None
        if drawn.shared is not None:
            entry = drawn.shared[rank]
            x, sf = (own.x, own.x_sf) if own.shared_x is None else (own.shared_x, own.shared_x_sf)
            shared = expert_row(
                entry.family, x[t], None if sf is None else sf[t], entry.weights, 0, None, options
            )
        rows.append(combine_row(name, slots, shared, hidden))
    return torch.stack(rows) if rows else torch.empty(0, hidden)


def launches(drawn: Drawn, tile: int = 16) -> list[LaunchConfig]:
    return [LaunchConfig(tile, drawn.weights[0].l1.shape[2]) for _ in drawn.inputs]


OPTIONS = {
    "plain": Activation(),
    "exact": Activation(fast_math=False),
    "clamp": Activation(clamp=0.7),
    "alpha_beta": Activation(clamp=0.9, alpha=1.702, beta=1.0, fast_math=False),
    "step": Activation("swiglustep", clamp=0.3),
    "situ": Activation("situ", alpha=2.0, beta=1.5),
}
GRID = [
    (name, option)
    for name in SM100
    for option, activation in OPTIONS.items()
    if activation.name in FAMILIES[name].activations
    and not (name == "sm100_fp4xfp4" and option == "alpha_beta")
]


@pytest.mark.parametrize(("name", "option"), GRID)
def test_outputs(name: str, option: str) -> None:
    drawn = draw_launch(name, (3, 2), seed=GRID.index((name, option)))
    scale = 0.37 if name == "sm100_nvfp4" else 1.0
    results = forward(
        name, drawn.inputs, drawn.weights, launches(drawn), OPTIONS[option], l2_activation_scale=scale
    )
    for rank, result in enumerate(results):
        expected = expected_y(name, drawn, rank, OPTIONS[option], scale)
        assert torch.equal(result.y.view(torch.int16), expected.bfloat16().view(torch.int16))
        assert bool((expected != 0).any())


@pytest.mark.parametrize(
    ("name", "shared"), [(name, each) for name in SM100 for each in FAMILIES[name].shared]
)
def test_shared_experts(name: str, shared: str) -> None:
    drawn = draw_launch(name, (2, 3), shared=shared, masked=0.5, seed=7)
    results = forward(
        name, drawn.inputs, drawn.weights, launches(drawn), OPTIONS["plain"], shared=drawn.shared
    )
    for rank, result in enumerate(results):
        expected = expected_y(name, drawn, rank, OPTIONS["plain"])
        assert torch.equal(result.y.view(torch.int16), expected.bfloat16().view(torch.int16))


@pytest.mark.parametrize("name", [name for name in SM100 if FAMILIES[name].has_norm])
def test_post_expert_norm(name: str) -> None:
    hidden = 512
    drawn = draw_launch(name, (3,), hidden=hidden, seed=11)
    gamma = torch.rand(hidden, generator=torch.Generator().manual_seed(1)) + 0.5
    norm = PostNorm(gamma, 1e-5)
    (result,) = forward(name, drawn.inputs, drawn.weights, launches(drawn), OPTIONS["plain"], norm=norm)
    own = drawn.inputs[0]
    for t in range(3):
        total = torch.zeros(hidden)
        for k in range(2):
            expert = int(own.topk_idx[t, k])
            if expert < 0:
                continue
            x_sf = None if own.x_sf is None else own.x_sf[t]
            out = expert_row(
                name,
                own.x[t],
                x_sf,
                drawn.weights[0],
                expert,
                own.topk_weights[t, k],
                OPTIONS["plain"],
                normed=True,
            )
            scaled = out * gamma
            tiles = torch.zeros(32)
            for tile, columns in enumerate(scaled.split(128)):
                lanes = torch.zeros(16)
                for lane in range(16):
                    for q in range(4):
                        x, y = columns[lane * 8 + 2 * q], columns[lane * 8 + 2 * q + 1]
                        lanes[lane] = fma(x, x, fma(y, y, lanes[lane]))
                for distance in (8, 4, 2, 1):
                    lanes = lanes + lanes[torch.arange(16) ^ distance]
                tiles[tile % 32] += lanes[0]
            for distance in (16, 8, 4, 2, 1):
                tiles = tiles + tiles[torch.arange(32) ^ distance]
            scale = cuda_rsqrtf(tiles[0] / f32(hidden) + f32(1e-5)) * own.topk_weights[t, k]
            total = fma(scaled, scale, total)
        assert torch.equal(result.y[t].view(torch.int16), total.bfloat16().view(torch.int16))


@pytest.mark.parametrize("name", SM100)
def test_close_to_float64(name: str) -> None:
    """A check that shares nothing with the models: float64 arithmetic on dequantized operands, within a few
    percent."""
    drawn = draw_launch(name, (4,), masked=0.0, seed=3)
    own, weights = drawn.inputs[0], drawn.weights[0]
    (result,) = forward(name, drawn.inputs, drawn.weights, launches(drawn), OPTIONS["exact"])

    def value(fmt: str, codes: Tensor, scales: Tensor | None) -> Tensor:
        if fmt == "bf16":
            return codes.double()
        table = E4M3 if fmt == "e4m3" else E2M1
        decoded = table[codes.long()].double()
        if FAMILIES[name].scale_format == "ue8m0":
            factor = torch.exp2(scales.double() - 127)
        else:
            factor = E4M3[scales.long()].double()
        return decoded * factor.repeat_interleave(codes.shape[-1] // scales.shape[-1], -1)

    family = FAMILIES[name]
    x = value(family.act_format, own.x, own.x_sf)
    w1 = value(family.weight_format, weights.l1, weights.l1_sf)
    w2 = value(family.weight_format, weights.l2, weights.l2_sf)
    y = torch.zeros(4, 256, dtype=torch.float64)
    for t in range(4):
        for k in range(2):
            e = int(own.topk_idx[t, k])
            gate, up = (w1[e] @ x[t]).chunk(2)
            if weights.l1_alphas is not None:
                token = 1.0 if own.x_scales is None else own.x_scales[t].double()
                alphas = weights.l1_alphas[e].double().expand(2) * token
                gate, up = gate * alphas[0], up * alphas[1]
            h = gate * torch.sigmoid(gate) * up
            alpha = 1.0 if weights.l2_alphas is None else weights.l2_alphas[e].double()
            if weights.a2_scales is not None:
                alpha = alpha * weights.a2_scales[e].double()
                h = h / weights.a2_scales[e].double()
            y[t] += own.topk_weights[t, k].double() * alpha * (w2[e] @ h)
    error = (result.y.double() - y).norm() / y.norm()
    limit = {"sm100_bf16": 0.01}.get(name, 0.06 if family.act_format == "e4m3" else 0.2)
    assert error < limit
    assert math.isfinite(error)


@pytest.mark.parametrize("swap_ab", [False, True])
def test_which_value_a_nan_hides_on_sm90(swap_ab: bool) -> None:
    """Group 0 has its largest value right of a NaN, group 1 left of one: launches with NaN on an H200 showed
    that the unswapped kernel misses the former."""
    values = torch.ones(1, 128)
    values[0, 10], values[0, 11] = math.nan, 8.0
    values[0, 64 + 10], values[0, 64 + 11] = 8.0, math.nan
    acts = requantize(FAMILIES["sm90_fp8xfp8"], values, torch.tensor([-2.0]), swap_ab=swap_ab)
    largest = torch.tensor([[16.0 if swap_ab else 2.0, 16.0]])
    assert torch.equal(acts.scales, largest * f32(1 / 448))
    assert acts.codes[0, [10, 75]].tolist() == [0x7F, 0x7F]
    assert acts.codes[0, 11].item() == 0xFE  # the hidden value saturates
