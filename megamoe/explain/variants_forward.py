"""Knobs of the forward: activation, scales, where the routing weight enters, and the order of sums.

One rank, weights as in the checkpoint (a bundle's l1_w, l1_w_sf, l2_w, l2_w_sf and, for NVFP4, l1_alphas, l2_alphas,
a2_scales, x_scales). Most knobs are fields of the reference's own rows; where it has none, one of its functions is exchanged
for the length of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megamoe.explain.variants import Call, Outputs, Replay, Variant, placed, replays
from reference import formats
from reference.mega_moe import Activation, ExpertWeights, LaunchConfig, MegaMoeFamily, RankInputs, forward, get_family

_FAMILY_OF = {
    "fp8_mega_moe": "sm90_fp8xfp8",
    "bf16_mega_moe": "sm100_bf16",
    "nvfp4_mega_moe": "sm100_nvfp4",
    "fp4_fp4_mega_moe": "sm100_fp4xfp4",
}
_FEW_TOKENS = 12
_NEEDED = ("x", "topk_idx", "topk_weights", "l1_w", "l2_w")


@dataclass(frozen=True)
class _Launch:
    """Everything that a forward of one rank takes."""

    family: MegaMoeFamily
    inputs: RankInputs
    weights: ExpertWeights
    launch: LaunchConfig
    activation: Activation
    l2_activation_scale: float = 1.0

    def run(self) -> Outputs:
        result = forward(self.family, [self.inputs], [self.weights], [self.launch], self.activation,
                         l2_activation_scale=self.l2_activation_scale)[0]  # fmt: skip
        return {**result.stages, "y": result.y, "stats": result.stats}


@replays("fp8_mega_moe", "fp8_fp4_mega_moe", "bf16_mega_moe", "nvfp4_mega_moe", "fp4_fp4_mega_moe")
def _forward(call: Call) -> Replay | None:
    if any(name not in call.inputs for name in _NEEDED) or int(call.params.get("num_ranks", 1)) != 1:
        return None
    base = _launch_of(call)

    def variants(call: Call) -> Iterator[Variant]:
        for number, (cause, detail, cost, _) in enumerate(_variants(base)):
            yield Variant(cause, detail, lambda call, number=number: again(call, number), cost)

    def again(call: Call, number: int) -> Outputs:
        """That row of the table for other tokens; the launch stays that of the whole call."""
        rows = list(_variants(_launch_of(call, base.launch)))
        return placed(call, rows[number][3]())

    return Replay(lambda call: placed(call, _launch_of(call, base.launch).run()), variants, few_tokens=_FEW_TOKENS)


def _launch_of(call: Call, launch: LaunchConfig | None = None) -> _Launch:
    params = call.params
    given = {n: t.view(torch.uint8) if t.element_size() == 1 and t.is_floating_point() else t for n, t in call.inputs.items()}
    fallback = f"sm100_{params.get('mma_type', 'fp8xfp4')}"
    family = get_family(_FAMILY_OF.get(call.op, fallback))
    for name, fmt in (("x", family.act_format), ("l1_w", family.weight_format), ("l2_w", family.weight_format)):
        if fmt == "e2m1" and call.inputs[name].dtype in (torch.uint8, torch.int8) and name in call.params.get("packed", ("x", "l1_w", "l2_w")):
            given[name] = formats.unpack_e2m1(given[name].view(torch.uint8))
    if family.scale_format is not None:
        for name in ("x_sf", "l1_w_sf", "l2_w_sf"):
            if name in given and given[name].dtype == torch.int32:
                given[name] = formats.unpack_scale_words(given[name])
    inputs = RankInputs(given["x"], given.get("x_sf"), given["topk_idx"], given["topk_weights"], given.get("x_scales"))
    weights = ExpertWeights(given["l1_w"], given["l2_w"], given.get("l1_w_sf"), given.get("l2_w_sf"), given.get("l1_alphas"),
                            given.get("l2_alphas"), given.get("a2_scales"))  # fmt: skip
    clamp = params.get("activation_clamp")
    activation = Activation(str(params.get("activation", "swiglu")), clamp, float(params.get("activation_alpha", 1.0)),
                            float(params.get("activation_beta", 0.0)), bool(params.get("fast_math", True)))  # fmt: skip
    return _Launch(family, inputs, weights, launch or _config(params, given, family), activation, float(params.get("l2_activation_scale", 1.0)))


def _config(params: Any, given: dict[str, Tensor], family: MegaMoeFamily) -> LaunchConfig:
    hidden = int(given["l2_w"].shape[1])
    if family.arch == "sm90":
        from reference.mega_moe import sm90_launch_config

        tokens, topk = given["topk_idx"].shape
        return sm90_launch_config(num_ranks=1, num_experts=len(given["l1_w"]), num_topk=topk, num_tokens=tokens, hidden=hidden,
                                  intermediate_hidden=int(given["l2_w"].shape[2]))  # fmt: skip
    return LaunchConfig(int(params.get("block_m", params.get("tile", 128))), hidden)


Row = tuple[str, str, int, Callable[[], Outputs]]


def _variants(base: _Launch) -> Iterator[Row]:
    yield from _activation_rows(base)
    yield from _scale_rows(base)
    yield from _order_rows(base)


def _activation_rows(base: _Launch) -> Iterator[Row]:
    act = base.activation
    if act.clamp is not None:
        yield "clamp_missing", "", 1, replace(base, activation=replace(act, clamp=None)).run
        yield "clamp_symmetric", "", 1, _exchanging(base, "reference.mega_moe.forward.activate", _symmetric)
    yield "fast_math", "", 1, replace(base, activation=replace(act, fast_math=not act.fast_math)).run
    for recipe in ("sm90", "sm100", "sm100_sgl"):
        if recipe != base.family.activation_recipe:
            rounds = "sm90" in (recipe, base.family.activation_recipe)
            if rounds:
                yield "activation_rounding", f"as {recipe}", 1, replace(base, family=replace(base.family, activation_recipe=recipe)).run
            else:
                yield "reciprocal_instead_of_division", f"in the sigmoid, as {recipe}", 1, replace(base, family=replace(base.family, activation_recipe=recipe)).run
    swapped = replace(base, weights=replace(base.weights, l1=_halves(base.weights.l1), l1_sf=_halves_of(base.weights.l1_sf)))
    yield "gate_up_swapped", "", 1, swapped.run
    rows = base.weights.l1.shape[1]
    concatenated = replace(base.weights, l1=base.weights.l1[:, _read_as_interleaved(rows)])
    yield "interleave_missing", "gate and up read as interleaved", 1, replace(base, weights=concatenated).run


def _scale_rows(base: _Launch) -> Iterator[Row]:
    weights = base.weights
    alphas = weights.l1_alphas
    if alphas is not None and alphas.dim() == 2:
        for half, name in ((0, "gate's"), (1, "up's")):
            shared = alphas[:, half : half + 1].expand_as(alphas).contiguous()
            yield "gate_up_scale_shared", name, 1, replace(base, weights=replace(weights, l1_alphas=shared)).run
    for name in ("l1_alphas", "l2_alphas", "a2_scales"):
        value = getattr(weights, name)
        if value is None:
            continue
        for cause, other in (("global_scale_missing", torch.ones_like(value)), ("global_scale_inverted", 1 / value)):
            yield cause, name, 1, replace(base, weights=replace(weights, **{name: other})).run
    if base.inputs.x_scales is not None:
        scales = base.inputs.x_scales
        for cause, other in (("global_scale_missing", torch.ones_like(scales)), ("global_scale_inverted", 1 / scales)):
            yield cause, "x_scales", 1, replace(base, inputs=replace(base.inputs, x_scales=other)).run
    ones = torch.ones_like(base.inputs.topk_weights)
    yield "routing_weight_misplaced", "not applied", 1, replace(base, inputs=replace(base.inputs, topk_weights=ones)).run
    for place in ("activation", "output", "combine"):
        if place != base.family.weight_at:
            family = replace(base.family, weight_at=place, combine_fma=place == "combine")
            yield "routing_weight_misplaced", f"at the {place}", 1, replace(base, family=family).run


def _order_rows(base: _Launch) -> Iterator[Row]:
    if base.family.arch == "sm90":
        other = replace(base.launch, reuse_accumulator=not base.launch.reuse_accumulator)
        yield "accumulation_order", "the other way of joining K blocks", 1, replace(base, launch=other).run
    for mma in ("hopper_fp8", "blackwell_f8f6f4"):
        if base.family.act_format == "e4m3" and base.family.arch == "sm90" and mma != base.family.mma:
            yield "accumulation_order", f"as {mma} adds", 1, _exchanging(base, "reference.mega_moe.linear.matmul", _as_family(mma))
    yield "accumulation_order", "sums exact, rounded once", 1, _exchanging(base, "reference.mega_moe.linear.matmul", lambda _: _exact)
    topk = base.inputs.topk_idx.shape[1]
    if topk > 2:
        flipped = replace(base.inputs, topk_idx=base.inputs.topk_idx.flip(1).contiguous(), topk_weights=base.inputs.topk_weights.flip(1).contiguous())
        yield "accumulation_order", "routes added last first", 1, replace(base, inputs=flipped).run
    yield "accumulation_order", "routes added in bf16", 1, _exchanging(base, "reference.mega_moe.forward.combine", lambda _: _combine_bf16)


def _exchanging(base: _Launch, target: str, make: Callable[[Any], Any]) -> Callable[[], Outputs]:
    """A run with one of the reference's functions replaced by make(the function)."""

    def run() -> Outputs:
        import importlib

        module, _, name = target.rpartition(".")
        original = getattr(importlib.import_module(module), name)
        with patch(target, make(original)):
            return base.run()

    return run


def _symmetric(activate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def clamped(family: MegaMoeFamily, activation: Activation, acc: Tensor, alphas: Tensor | None, x_scales: Tensor | None) -> Tensor:
        assert activation.clamp is not None
        if alphas is None and x_scales is None:
            gate, up = acc.chunk(2, dim=1)
            acc = torch.cat([gate.clamp_min(-activation.clamp), up], dim=1)
        return activate(family, activation, acc, alphas, x_scales)

    return clamped


def _as_family(mma: str) -> Callable[[Any], Any]:
    return lambda matmul: lambda _, *args, **kwargs: matmul(mma, *args, **kwargs)


def _exact(mma: str, a: Tensor, b: Tensor, *, a_format: str, b_format: str, accumulator: Tensor | None = None,
           a_scales: Tensor | None = None, b_scales: Tensor | None = None, scale_format: str | None = None) -> Tensor:  # fmt: skip
    left = _decoded(a, a_format, a_scales, scale_format)
    right = _decoded(b, b_format, b_scales, scale_format)
    product = left @ right.transpose(-1, -2)
    return (product if accumulator is None else product + accumulator).float()


def _decoded(codes: Tensor, fmt: str, scales: Tensor | None, scale_format: str | None) -> Tensor:
    values = codes.double() if fmt == "bf16" else formats.decode(codes, {"e4m3": "e4m3fn"}.get(fmt, fmt)).double()
    if scales is None or scale_format is None:
        return values
    factor = formats.decode(scales, scale_format).double()
    return values * factor.repeat_interleave(values.shape[-1] // factor.shape[-1], -1)


def _combine_bf16(family: MegaMoeFamily, slots: Tensor, used: Tensor, weights: Tensor, shared: Tensor | None = None) -> Tensor:
    total = torch.zeros_like(slots[0])
    for k in range(slots.shape[0]):
        total = torch.where(used[:, k, None], total + slots[k], total)
    return total if shared is None else total + shared


def _halves(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1)


def _halves_of(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else _halves(rows)


def _read_as_interleaved(rows: int) -> Tensor:
    """Which stored row a kernel takes for logical row r, if concatenated rows are read as blocks of eight that alternate."""
    from megamoe.explain.row_maps import interleaved

    return interleaved(rows, 8)
