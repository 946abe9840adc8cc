"""Exact inputs: the proof holds, fails where it must, and the order of K does not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference.exact_inputs import ExactLaunch, bits_needed, check_exact, draw_exact
from reference.mega_moe import FAMILIES, Activation, LaunchConfig, RankResult, forward

EXACT = Activation(fast_math=False)


def launches(exact: ExactLaunch, **config: object) -> list[LaunchConfig]:
    return [LaunchConfig(64, exact.weights[0].l1.shape[2], **config) for _ in exact.inputs]  # type: ignore[arg-type]


def draw(name: str, tokens: tuple[int, ...] = (5, 3), **changes: int) -> ExactLaunch:
    sizes = {"num_experts": 4, "topk": 2, "hidden": 512, "intermediate": 256} | changes
    return draw_exact(name, tokens, masked=0.1, seed=4, **sizes)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_exact(name: str) -> None:
    exact = draw(name)
    report, results = check_exact(exact, launches(exact), EXACT)
    assert report.ok, report
    assert report.smallest_gate == 64
    assert all(len(result.y[result.y != 0].unique()) > 20 for result in results)


def test_large_sizes_stay_within_the_smallest_accumulator() -> None:
    """14 bits are what Hopper's FP8 accumulator holds: 13 of fraction and the leading one."""
    for hidden, intermediate in ((7168, 256), (512, 2048)):
        sizes = {"num_experts": 1, "topk": 1, "hidden": hidden, "intermediate": intermediate}
        exact = draw("sm90_fp8xfp8", (2,), **sizes)
        report, _ = check_exact(exact, launches(exact), EXACT)
        assert report.ok, report
        assert max(report.l1_bits, report.l2_bits) == 13


@pytest.mark.parametrize("name", ["sm90_fp8xfp8", "sm100_fp8xfp4"])
def test_accumulation_modes_and_approximations_agree(name: str) -> None:
    """What differs between accumulation modes, exact and approximate functions on other data is the same
    here."""
    exact = draw(name)
    outputs: list[list[RankResult]] = []
    for reuse in (False, True):
        for fast_math in (False, True):
            for hidden in (512, 7168):
                configs = [replace(each, hidden=hidden) for each in launches(exact, reuse_accumulator=reuse)]
                activation = Activation(fast_math=fast_math)
                outputs.append(forward(name, exact.inputs, exact.weights, configs, activation))
    for other in outputs[1:]:
        for expected, actual in zip(outputs[0], other, strict=True):
            assert torch.equal(expected.y.view(torch.int16), actual.y.view(torch.int16))
            assert torch.equal(expected.stages["l2_acts"], actual.stages["l2_acts"])


@pytest.mark.parametrize("name", FAMILIES)
def test_order_of_k_does_not_matter(name: str) -> None:
    """Columns of x and w1 in another order (whole scale groups move, and columns inside them): the same
    bytes."""
    exact = draw(name)
    family = FAMILIES[name]
    block = 128
    g = torch.Generator().manual_seed(1)
    blocks = torch.randperm(512 // block, generator=g)
    group = family.act_group or 32
    inside = torch.randperm(group, generator=g)
    columns = torch.cat([b * block + s * group + inside for b in blocks for s in range(block // group)])
    scales = columns.view(-1, group)[:, 0] // group

    def moved(tensor: torch.Tensor | None, by: torch.Tensor) -> torch.Tensor | None:
        return None if tensor is None else tensor[..., by].contiguous()

    inputs = [replace(each, x=moved(each.x, columns), x_sf=moved(each.x_sf, scales)) for each in exact.inputs]
    weight_scales = blocks if family.scale_format is None else scales
    weights = [
        replace(each, l1=moved(each.l1, columns), l1_sf=moved(each.l1_sf, weight_scales))
        for each in exact.weights
    ]
    expected = forward(name, exact.inputs, exact.weights, launches(exact), EXACT)
    actual = forward(name, inputs, weights, launches(exact), EXACT)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a.stages["l2_acts"].view(torch.uint8), b.stages["l2_acts"].view(torch.uint8))
        assert torch.equal(a.y.view(torch.int16), b.y.view(torch.int16))


def test_scales_are_position_coded() -> None:
    exact = draw("sm100_fp8xfp4")
    assert all(len(each.x_sf.unique()) > 4 for each in exact.inputs)
    assert all(len(each.l1_sf.unique()) == 3 for each in exact.weights)


def test_ordinary_inputs_are_not_exact() -> None:
    exact = draw("sm90_fp8xfp8")
    g = torch.Generator().manual_seed(0)
    inputs = [
        replace(each, x=torch.randint(0, 127, each.x.shape, generator=g, dtype=torch.uint8))
        for each in exact.inputs
    ]
    report, _ = check_exact(replace(exact, inputs=inputs), launches(exact), EXACT)
    assert not report.ok
    assert report.l1_bits > report.available_bits + 1
    assert "L1 needs" in report.reason


def test_one_wrong_scale_is_not_exact_and_shows() -> None:
    exact = draw("sm100_fp8xfp8")
    inputs = list(exact.inputs)
    x_sf = inputs[0].x_sf.clone()
    x_sf[0, 3] += 1
    inputs[0] = replace(inputs[0], x_sf=x_sf)
    expected = forward("sm100_fp8xfp8", exact.inputs, exact.weights, launches(exact), EXACT)
    actual = forward("sm100_fp8xfp8", inputs, exact.weights, launches(exact), EXACT)
    assert not torch.equal(expected[0].y, actual[0].y)


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [
        ([[1.0, 1.0]], [[1.0, -1.0]], 2),
        ([[1.0, 1.0]], [[1.0, 5.0]], 3),
        ([[0.0, 0.0]], [[1.0, 1.0]], 0),
        ([[1024.0, 1.0]], [[1.0, 1.0]], 11),
        ([[1.5, 3.0]], [[0.25, 0.25]], 4),
    ],
)
def test_bits_needed(a: list[list[float]], b: list[list[float]], bits: int) -> None:
    assert bits_needed(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)) == bits


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("hidden", {"hidden": 384}),
        ("hidden", {"hidden": 1 << 14}),
        ("intermediate", {"intermediate": 2560}),
        ("num_experts", {"num_experts": 3}),
    ],
)
def test_sizes_beyond_the_proof_are_refused(argument: str, changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{argument}: expected"):
        draw("sm90_fp8xfp8", **changes)
