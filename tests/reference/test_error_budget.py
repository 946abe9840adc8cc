"""The error budget: its last output is the forward's, its contributions add up, and known stages contribute
what they must."""

from __future__ import annotations

import pytest
import torch
from mega_moe_inputs import draw_weights

from reference.error_budget import STAGES, ErrorBudget, error_budget, staging_recipe
from reference.exact_inputs import draw_exact
from reference.fp8 import quantize_fp8_groups
from reference.mega_moe import FAMILIES, Activation, LaunchConfig, RankInputs, forward
from reference.mega_moe.values import act_values
from reference.nvfp4 import quantize_nvfp4
from reference.recipes import Fp8GroupRecipe, Nvfp4Recipe

EXACT = Activation(clamp=5.0, fast_math=False)
CONFIG = LaunchConfig(64, 256)


def draw(name: str, tokens: int = 12):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(6)
    hidden = torch.randn(tokens, 256, generator=g).bfloat16()
    weights = draw_weights(FAMILIES[name], 4, 256, 256, g)
    ids = torch.rand(tokens, 4, generator=g).topk(2, dim=1).indices
    ids[torch.rand(tokens, 2, generator=g) < 0.2] = -1
    return hidden, ids, torch.rand(tokens, 2, generator=g) + 0.1, weights


def budget(name: str) -> ErrorBudget:
    scale = 0.5 if name == "sm100_nvfp4" else 1.0
    return error_budget(name, *draw(name), CONFIG, EXACT, l2_activation_scale=scale)


@pytest.mark.parametrize("name", FAMILIES)
def test_last_output_is_the_forward(name: str) -> None:
    hidden, ids, routing, weights = draw(name)
    recipe = staging_recipe(name)
    x, x_sf, x_scales = hidden, None, None
    if isinstance(recipe, Nvfp4Recipe):
        found = quantize_nvfp4(hidden, recipe)
        x, x_sf, x_scales = found.codes, found.scale_codes, found.token_scales
    elif isinstance(recipe, Fp8GroupRecipe):
        groups = quantize_fp8_groups(hidden, recipe)
        x, x_sf = groups.codes, groups.scales if groups.exponents is None else groups.exponents
    inputs = [RankInputs(x, x_sf, ids, routing, x_scales)]
    scale = 0.5 if name == "sm100_nvfp4" else 1.0
    (result,) = forward(name, inputs, [weights], [CONFIG], EXACT, l2_activation_scale=scale)
    assert torch.equal(budget(name).outputs[-1], result.y.double())


@pytest.mark.parametrize("name", FAMILIES)
def test_contributions(name: str) -> None:
    found = budget(name)
    assert [row.stage for row in found.rows] == list(STAGES)
    total = found.outputs[-1] - found.outputs[0]
    parts = sum(after - before for before, after in zip(found.outputs[:-1], found.outputs[1:], strict=True))
    assert torch.allclose(parts, total, rtol=0, atol=1e-9 * float(found.outputs[0].abs().max()))
    by_stage = {row.stage: row for row in found.rows}
    assert (by_stage["staging"].rms == 0) == (name == "sm100_bf16")
    for stage in STAGES[1:]:
        assert by_stage[stage].rms > 1e-6, stage
    # Rounding y to bf16 costs 2^-9 at most an element; quantizing to eight or four bits costs percents.
    assert by_stage["combine"].rms < 2.0**-8
    if FAMILIES[name].act_format != "bf16":
        assert by_stage["requantization"].rms > 3 * by_stage["l1"].rms
    assert found.rows[-1].cumulative < 0.3
    assert len(found.table().splitlines()) == 2 + len(STAGES)


def test_nothing_is_lost_on_exact_inputs() -> None:
    """Exact inputs have no error at all before the bf16 outputs: every stage up to L2 reproduces float64."""
    name = "sm100_fp8xfp8"
    exact = draw_exact(name, (6,), num_experts=4, topk=2, hidden=512, intermediate=256, seed=1)
    inputs, weights = exact.inputs[0], exact.weights[0]
    hidden = act_values(FAMILIES[name], inputs.x, inputs.x_sf).float()
    found = error_budget(
        name, hidden, inputs.topk_idx, inputs.topk_weights, weights, CONFIG, EXACT.__class__(fast_math=False)
    )
    assert {row.stage: row.rms for row in found.rows} == dict.fromkeys(STAGES, 0.0)


def test_refusals() -> None:
    hidden, ids, routing, weights = draw("sm90_fp8xfp8")
    with pytest.raises(ValueError, match="topk_idx: expected ids below 4"):
        error_budget("sm90_fp8xfp8", hidden, ids + 4, routing, weights, CONFIG)
    with pytest.raises(ValueError, match="hidden_states: expected at least one token"):
        error_budget("sm90_fp8xfp8", hidden[:0], ids[:0], routing[:0], weights, CONFIG)
