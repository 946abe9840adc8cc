"""Knobs of the forward: activation, scales, where the routing weight enters, and the order of sums.

Tokens of all ranks one after another (parameter "tokens" has one count a rank), weights as in the checkpoint:
l1_w, l1_w_sf, l2_w, l2_w_sf and, for NVFP4, l1_alphas, l2_alphas, a2_scales, x_scales. Most knobs are fields
of the reference's own rows; where it has none, one of its functions is exchanged for the length of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megamoe.explain.row_maps import interleaved
from megamoe.explain.variants import Call, Outputs, Replay, Variant, bound, placed, replays
from megamoe.suite.drivers.mega_moe import join_ranks
from reference import formats
from reference.mega_moe import (
    Activation,
    ExpertWeights,
    LaunchConfig,
    MegaMoeFamily,
    RankInputs,
    forward,
    get_family,
    sm90_launch_config,
)

_FAMILY_OF = {
    "fp8_mega_moe": "sm90_fp8xfp8",
    "bf16_mega_moe": "sm100_bf16",
    "nvfp4_mega_moe": "sm100_nvfp4",
    "fp4_fp4_mega_moe": "sm100_fp4xfp4",
}
_FEW_TOKENS = 6
_NEEDED = ("x", "topk_idx", "topk_weights", "l1_w", "l2_w")


@dataclass(frozen=True)
class _Launch:
    """Everything that a forward takes; one entry a rank."""

    family: MegaMoeFamily
    inputs: list[RankInputs]
    weights: list[ExpertWeights]
    launches: list[LaunchConfig]
    activation: Activation
    l2_activation_scale: float = 1.0

    def run(self) -> Outputs:
        results = forward(
            self.family,
            self.inputs,
            self.weights,
            self.launches,
            self.activation,
            l2_activation_scale=self.l2_activation_scale,
        )
        if self.family.arch == "sm90":  # every stage, as the suite's row for whole launches has them
            return join_ranks([(each.pool, each.used, each.stages, each.y, each.stats) for each in results])
        return {"y": torch.cat([r.y for r in results]), "stats": torch.cat([r.stats for r in results])}

    def with_weights(self, change: Callable[[ExpertWeights], ExpertWeights]) -> _Launch:
        return replace(self, weights=[change(each) for each in self.weights])

    def with_inputs(self, change: Callable[[RankInputs], RankInputs]) -> _Launch:
        return replace(self, inputs=[change(each) for each in self.inputs])


@replays("fp8_mega_moe", "fp8_fp4_mega_moe", "bf16_mega_moe", "nvfp4_mega_moe", "fp4_fp4_mega_moe")
def _forward(call: Call) -> Replay | None:
    if any(name not in call.inputs for name in _NEEDED):
        return None
    base = _launch_of(call)

    def variants(call: Call) -> Iterator[Variant]:
        for number, (cause, detail, cost, _) in enumerate(_variants(base)):
            yield Variant(cause, detail, bound(again, number), cost)

    def again(call: Call, number: int) -> Outputs:
        """That row of the table for other tokens; the launch stays that of the whole call."""
        rows = list(_variants(_launch_of(call, base)))
        return placed(call, rows[number][3]())

    return Replay(lambda call: placed(call, _launch_of(call, base).run()), variants, few_tokens=_FEW_TOKENS)


def _launch_of(call: Call, whole: _Launch | None = None) -> _Launch:
    """The launch of a call, or of some tokens of a larger one, whose configurations then hold."""
    params = call.params
    family = get_family(_FAMILY_OF.get(call.op, f"sm100_{params.get('mma_type', 'fp8xfp4')}"))
    given = _codes(call.inputs, family)
    number = len(given["topk_idx"])
    given_counts = params.get("tokens")
    whole_tokens = call.num_tokens if call.rows is None else call.whole_tokens
    counts = list(given_counts) if isinstance(given_counts, (list, tuple)) else [whole_tokens]
    if call.rows is not None:
        ends = torch.tensor(counts).cumsum(0)
        rank = torch.bucketize(call.rows, ends, right=True)
        counts = torch.bincount(rank, minlength=len(ends)).tolist()
    if sum(counts) != number:
        raise ValueError(f"tokens: expected {number} in all, got {counts}")
    parts = [
        _optional_split(given.get(name), counts)
        for name in ("x", "x_sf", "topk_idx", "topk_weights", "x_scales")
    ]
    inputs = [RankInputs(*row) for row in zip(*parts, strict=True)]
    names = ("l1_w", "l2_w", "l1_w_sf", "l2_w_sf", "l1_alphas", "l2_alphas", "a2_scales")
    ranks = len(counts)
    shares = [[None] * ranks if given.get(name) is None else list(given[name].chunk(ranks)) for name in names]
    weights = [ExpertWeights(*row) for row in zip(*shares, strict=True)]
    launches = (
        whole.launches if whole is not None else [_config(params, given, family, counts, n) for n in counts]
    )
    activation = Activation(
        str(params.get("activation", "swiglu")),
        params.get("activation_clamp", params.get("clamp")),
        float(params.get("activation_alpha", 1.0)),
        float(params.get("activation_beta", 0.0)),
        bool(params.get("fast_math", True)),
    )
    return _Launch(
        family, inputs, weights, launches, activation, float(params.get("l2_activation_scale") or 1.0)
    )


def _optional_split(tensor: Tensor | None, counts: list[int]) -> list[Tensor | None]:
    return [None] * len(counts) if tensor is None else list(tensor.split(counts))


def _codes(inputs: Mapping[str, Tensor], family: MegaMoeFamily) -> dict[str, Tensor]:
    """Bytes as codes, packed FP4 and scale words taken apart."""
    given = {
        n: t.view(torch.uint8) if t.element_size() == 1 and t.is_floating_point() else t
        for n, t in inputs.items()
    }
    hidden = given["l2_w"].shape[1]
    formats_of = (("x", family.act_format), ("l1_w", family.weight_format), ("l2_w", family.weight_format))
    columns = {"x": hidden, "l1_w": hidden, "l2_w": given["l1_w"].shape[1] // 2}
    for name, fmt in formats_of:
        if fmt == "e2m1" and given[name].shape[-1] * 2 == columns[name]:
            given[name] = formats.unpack_e2m1(given[name].view(torch.uint8))
    for name in ("x_sf", "l1_w_sf", "l2_w_sf"):
        if family.scale_format is not None and name in given and given[name].dtype == torch.int32:
            given[name] = formats.unpack_scale_words(given[name])
    return given


def _config(
    params: Mapping[str, Any], given: dict[str, Tensor], family: MegaMoeFamily, counts: list[int], tokens: int
) -> LaunchConfig:
    experts, hidden, intermediate = given["l2_w"].shape
    if family.arch == "sm90":
        return sm90_launch_config(
            num_ranks=len(counts),
            num_experts=experts,
            num_topk=given["topk_idx"].shape[1],
            num_tokens=tokens,
            hidden=hidden,
            intermediate_hidden=intermediate,
        )
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
    mine = base.family.activation_recipe
    for recipe in ("sm90", "sm100", "sm100_sgl"):
        if recipe == mine:
            continue
        cause = "activation_rounding" if "sm90" in (recipe, mine) else "reciprocal_instead_of_division"
        yield (
            cause,
            f"as {recipe}",
            1,
            replace(base, family=replace(base.family, activation_recipe=recipe)).run,
        )
    swapped = base.with_weights(
        lambda w: replace(w, l1=_halves(w.l1), l1_sf=None if w.l1_sf is None else _halves(w.l1_sf))
    )
    yield "gate_up_swapped", "", 1, swapped.run
    read = base.with_weights(lambda w: replace(w, l1=w.l1[:, interleaved(w.l1.shape[1], 8)]))
    yield "interleave_missing", "gate and up read as interleaved", 1, read.run


def _scale_rows(base: _Launch) -> Iterator[Row]:
    first = base.weights[0]
    if first.l1_alphas is not None and first.l1_alphas.dim() == 2:
        for half, name in ((0, "gate's"), (1, "up's")):
            yield (
                "gate_up_scale_shared",
                name,
                1,
                base.with_weights(partial(_alpha_of, half=half)).run,
            )
    for name in ("l1_alphas", "l2_alphas", "a2_scales"):
        if getattr(first, name) is None:
            continue
        for cause, function in (
            ("global_scale_missing", torch.ones_like),
            ("global_scale_inverted", torch.reciprocal),
        ):
            changed = base.with_weights(partial(_with, name=name, function=function))
            yield cause, name, 1, changed.run
    if base.inputs[0].x_scales is not None:
        for cause, function in (
            ("global_scale_missing", torch.ones_like),
            ("global_scale_inverted", torch.reciprocal),
        ):
            yield (
                cause,
                "x_scales",
                1,
                base.with_inputs(partial(_with, name="x_scales", function=function)).run,
            )
    plain = base.with_inputs(lambda i: replace(i, topk_weights=torch.ones_like(i.topk_weights)))
    yield "routing_weight_misplaced", "not applied", 1, plain.run
    for place in ("activation", "output", "combine"):
        if place != base.family.weight_at:
            family = replace(base.family, weight_at=place, combine_fma=place == "combine")
            yield "routing_weight_misplaced", f"at the {place}", 1, replace(base, family=family).run


def _with(holder: Any, name: str, function: Callable[[Tensor], Tensor]) -> Any:
    return replace(holder, **{name: function(getattr(holder, name))})


def _alpha_of(weights: ExpertWeights, half: int) -> ExpertWeights:
    assert weights.l1_alphas is not None
    shared = weights.l1_alphas[:, half : half + 1].expand_as(weights.l1_alphas)
    return replace(weights, l1_alphas=shared.contiguous())


def _order_rows(base: _Launch) -> Iterator[Row]:
    if base.family.arch == "sm90":
        other = [replace(each, reuse_accumulator=not each.reuse_accumulator) for each in base.launches]
        yield "accumulation_order", "the other way of joining K blocks", 1, replace(base, launches=other).run
        matmul = "reference.mega_moe.linear.matmul"
        yield (
            "accumulation_order",
            "as blackwell_f8f6f4 adds",
            1,
            _exchanging(base, matmul, _as_family("blackwell_f8f6f4")),
        )
    yield (
        "accumulation_order",
        "sums exact, rounded once",
        1,
        _exchanging(base, "reference.mega_moe.linear.matmul", lambda _: _exact),
    )
    yield (
        "accumulation_order",
        "routes added last first",
        1,
        _exchanging(base, "reference.mega_moe.forward.combine", _last_first),
    )
    yield (
        "accumulation_order",
        "routes added in bf16",
        1,
        _exchanging(base, "reference.mega_moe.forward.combine", lambda _: _combine_bf16),
    )


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
    def clamped(
        family: MegaMoeFamily,
        activation: Activation,
        acc: Tensor,
        alphas: Tensor | None,
        x_scales: Tensor | None,
    ) -> Tensor:
        assert activation.clamp is not None
        if alphas is None and x_scales is None:
            gate, up = acc.chunk(2, dim=1)
            acc = torch.cat([gate.clamp_min(-activation.clamp), up], dim=1)
        return activate(family, activation, acc, alphas, x_scales)

    return clamped


def _as_family(mma: str) -> Callable[[Any], Any]:
    return lambda matmul: lambda _, *args, **kwargs: matmul(mma, *args, **kwargs)


def _exact(
    mma: str,
    a: Tensor,
    b: Tensor,
    *,
    a_format: str,
    b_format: str,
    accumulator: Tensor | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    scale_format: str | None = None,
) -> Tensor:
    left = _decoded(a, a_format, a_scales, scale_format)
    right = _decoded(b, b_format, b_scales, scale_format)
    product = left @ right.transpose(-1, -2)
    return (product if accumulator is None else product + accumulator).float()


def _decoded(codes: Tensor, fmt: str, scales: Tensor | None, scale_format: str | None) -> Tensor:
    values = (
        codes.double() if fmt == "bf16" else formats.decode(codes, {"e4m3": "e4m3fn"}.get(fmt, fmt)).double()
    )
    if scales is None or scale_format is None:
        return values
    factor = formats.decode(scales, scale_format).double()
    return values * factor.repeat_interleave(values.shape[-1] // factor.shape[-1], -1)


def _last_first(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reversed_slots(
        family: MegaMoeFamily, slots: Tensor, used: Tensor, weights: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        return combine(family, slots.flip(0), used.flip(1), weights.flip(1), shared)

    return reversed_slots


def _combine_bf16(
    family: MegaMoeFamily, slots: Tensor, used: Tensor, weights: Tensor, shared: Tensor | None = None
) -> Tensor:
    total = torch.zeros_like(slots[0])
    for k in range(slots.shape[0]):
        total = torch.where(used[:, k, None], total + slots[k], total)
    return total if shared is None else total + shared


def _halves(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1)
