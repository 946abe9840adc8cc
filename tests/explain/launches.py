"""An SM90 forward by hand, route by route, so that a fault is a different function in one place.

The tensor core's and CUDA's own functions are the reference's (they are not what is planted here); everything
between them is written again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference.activation import cuda_expf
from reference.tensor_core import matmul
from tests.explain.quantizers import e4m3_saturating
from tests.explain.scenes import Scene

Rows = Callable[[Tensor], Tensor]
Gemm = Callable[[Tensor, Tensor], Tensor]


def hopper(a: Tensor, b: Tensor) -> Tensor:
    return matmul("hopper_fp8", a, b, a_format="e4m3", b_format="e4m3")


def in_float64(a: Tensor, b: Tensor) -> Tensor:
    """What a CPU emulation without a tensor-core model would compute."""
    left, right = (codes.view(torch.float8_e4m3fn).double() for codes in (a, b))
    return (left @ right.T).float()


def gemm(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, dot: Gemm) -> Tensor:
    """One row [K] by [N, K]: blocks of K / len(a_sf), each from zero, joined by float32 fma."""
    group = a.numel() // a_sf.numel()
    final = torch.zeros(b.shape[0], dtype=torch.float32)
    for block in range(a_sf.numel()):
        columns = slice(block * group, (block + 1) * group)
        part = dot(a[None, columns].contiguous(), b[:, columns].contiguous())[0]
        scale = (a_sf[block] * b_sf[:, block * group // 128]).repeat_interleave(128)
        final = (scale.double() * part.double() + final.double()).float()
    return final


def launch(
    scene: Scene,
    *,
    gate_bounds: Rows = lambda g: g,
    up_bounds: Rows = lambda u: u,
    before: Rows = lambda v: v,
    swap: bool = False,
    weigh: bool = True,
    dot: Gemm = hopper,
    order: Callable[[int], list[int]] = lambda slots: list(range(slots)),
) -> dict[str, Tensor]:
    """l2_acts, l2_acts_sf (by expert, then token), combine (by slot, then token) and y of one rank."""
    given = scene.inputs
    tokens, slots = given["topk_idx"].shape
    routes = sorted((int(given["topk_idx"][t, k]), t, k) for t in range(tokens) for k in range(slots))
    acts, scales, rows = [], [], {}
    for expert, token, slot in routes:
        both = gemm(
            given["x"][token], given["x_sf"][token], given["l1_w"][expert], given["l1_w_sf"][expert], dot
        )
        gate, up = both.chunk(2) if not swap else both.chunk(2)[::-1]
        gate, up = gate_bounds(before(gate)), up_bounds(before(up))
        value = (gate * (1 / (1 + cuda_expf(-gate)))) * up
        weight = given["topk_weights"][token, slot] if weigh else torch.tensor(1.0)
        weighted = value * weight
        amax = value.abs().view(-1, 64).amax(1) * weight.abs()
        scale = amax.clamp_min(1e-10) * torch.tensor(1 / 448, dtype=torch.float32)
        code = e4m3_saturating((weighted.view(-1, 64) * (1 / scale)[:, None]).numpy().reshape(-1))
        acts.append(torch.from_numpy(code))
        scales.append(scale)
        rows[slot, token] = gemm(
            acts[-1], scale, given["l2_w"][expert], given["l2_w_sf"][expert], dot
        ).bfloat16()
    y = torch.zeros(tokens, given["x"].shape[1])
    for slot in order(slots):
        y = y + torch.stack([rows[slot, token] for token in range(tokens)]).float()
    combine = torch.stack([rows[slot, token] for slot in range(slots) for token in range(tokens)])
    return {
        "l2_acts": torch.stack(acts),
        "l2_acts_sf": torch.stack(scales),
        "combine": combine,
        "y": y.bfloat16(),
    }


def clamped(scene: Scene) -> dict[str, Rows]:
    """The right bounds: the gate from above, up on both sides."""
    c = scene.params["clamp"]
    return {"gate_bounds": lambda g: g.clamp_max(c), "up_bounds": lambda u: u.clamp(-c, c)}
