"""What the search may and may not claim: pairs of changes, ambiguities and what decides them, residues,
places in words.
"""

from __future__ import annotations

import pytest
import torch

from megamoe.explain import CAUSES, explain
from megamoe.explain.subject import PlainLayout, Subject, storage_dims
from megamoe.explain.where import in_words
from tests.explain import faults as f
from tests.explain.scenes import Scene, fp8_scene, layout_scene, plain_scene


def test_two_changes_of_layout() -> None:
    """Neither alone explains it; both in one order do."""
    scene = layout_scene("packed_scale_rows", tokens=48, groups=32)
    once = f.reversed_words("out")(scene)
    twice = f.rows_shifted("out", 3)(Scene(None, {}, {}, once))
    report = explain(twice["out"], scene.expected["out"], layout=scene.layouts["out"])
    assert {finding.cause for finding in report.findings} == {"byte_order", "row_shift"}
    assert {finding.confidence for finding in report.findings} == {"unique"}
    assert len(report.findings) == 2


def test_swizzle_of_sixteen_columns_is_ambiguous_and_eight_decide() -> None:
    """CASES 17: with 16 columns the swizzle is its own inverse."""
    for groups, confidence in ((16, "ambiguous"), (8, "unique")):
        scene = layout_scene("swizzle_128x4", rows=256 if groups == 8 else 128, groups=groups)
        actual = f.swizzle_undone(scene.layouts["out"].params["rows"], groups)(scene)["out"]
        (finding,) = explain(actual, scene.expected["out"], layout=scene.layouts["out"]).findings
        assert finding.confidence == confidence
        assert {finding.cause, *finding.alternatives} >= {"swizzle_128x4_missing"}
        if confidence == "ambiguous":
            assert {finding.cause, *finding.alternatives} == {"swizzle_128x4_missing", "swizzle_128x4_twice"}
            assert "256 rows by 8" in finding.decide


def test_interleave_of_32_rows_is_ambiguous_and_48_decide() -> None:
    """CASES 20: at 32 rows the interleave is its own inverse."""
    for rows, confidence in ((32, "ambiguous"), (48, "unique")):
        scene = layout_scene("gate_up_interleaved_8", rows=rows, columns=64, batch=2)
        actual = f.reordered(f.concatenated_row)(scene)["out"]
        (finding,) = explain(actual, scene.expected["out"], layout=scene.layouts["out"]).findings
        assert finding.confidence == confidence
        if confidence == "ambiguous":
            assert {finding.cause, *finding.alternatives} == {"interleave_missing", "interleave_twice"}
            assert "48 rows" in finding.decide


def test_scales_alone_cannot_tell_a_rounding_from_a_step() -> None:
    """Without a scale that is a power of two, and without the payload, rounding down is one step less."""
    scene = fp8_scene(32, 512, kind="ties", seed=4)
    # No group's amax is 448 times a power of two any more, and rounding to nearest would keep every second
    # one.
    factor = torch.where(torch.arange(512) // 32 % 2 == 0, 1.25, 1.75)
    hidden = scene.inputs["hidden_states"].float() * factor
    scene = _staged(hidden.bfloat16(), scene)
    wrong = f.fp8(power=f.q.floor_power)(scene)["x_sf"]
    arguments = {"op": scene.op, "params": scene.params, "inputs": scene.inputs}
    (finding,) = explain(wrong, scene.expected["x_sf"], output="x_sf", **arguments).findings
    assert finding.confidence == "ambiguous"
    assert {finding.cause, *finding.alternatives} >= {"scale_minus_one", "scale_rounding_floor"}
    assert "payload" in finding.decide
    # The payload decides.
    both = explain(
        {"x": scene.expected["x"], "x_sf": wrong}, {n: scene.expected[n] for n in ("x", "x_sf")}, **arguments
    )
    assert [(g.cause, g.confidence) for g in both.findings] == [("scale_minus_one", "unique")]
    follows = explain(
        f.fp8(power=f.q.floor_power)(scene), {n: scene.expected[n] for n in ("x", "x_sf")}, **arguments
    )
    assert {(g.cause, g.confidence) for g in follows.findings} == {("scale_rounding_floor", "unique")}


def _staged(hidden: torch.Tensor, scene: Scene) -> Scene:
    from dataclasses import replace

    from reference.staging import stage_fp8

    staged = stage_fp8(hidden)
    expected = {**scene.expected, "x": staged.x.view(torch.float8_e4m3fn), "x_sf": staged.x_sf}
    return replace(scene, inputs={**scene.inputs, "hidden_states": hidden}, expected=expected)


def test_a_replay_that_would_change_another_output_is_no_explanation() -> None:
    """The payload shows rounding down, but the scales are right: no single change of arithmetic does that."""
    scene = fp8_scene(40, 256)
    actual = {n: f.copied(t) for n, t in scene.expected.items()} | {
        "x": f.fp8(power=f.q.floor_power)(scene)["x"]
    }
    report = explain(actual, scene.expected, op=scene.op, params=scene.params, inputs=scene.inputs)
    assert [(g.output, g.confidence) for g in report.findings] == [("x", "unknown")]


def test_two_outputs_with_a_cause_each() -> None:
    scene = fp8_scene(64, 512)
    actual = {n: f.copied(t) for n, t in scene.expected.items()}
    actual |= f.swapped("x", (3, 9))(scene) | f.reversed_words("x_sf")(scene)
    report = explain(actual, scene.expected, op=scene.op, params=scene.params, inputs=scene.inputs)
    assert {(g.output, g.cause, g.confidence) for g in report.findings} == {
        ("x", "swapped_rows", "unique"),
        ("x_sf", "byte_order", "unique"),
    }


def test_an_expected_side_that_is_not_the_references_is_not_replayed() -> None:
    scene = fp8_scene(40, 256)
    expected = {n: f.copied(t) for n, t in scene.expected.items()}
    f.raw(expected["x"])[:] ^= 1
    actual = {n: f.copied(t) for n, t in expected.items()} | {"x": f.copied(scene.expected["x"])}
    report = explain(
        actual,
        expected,
        op=scene.op,
        params={},
        inputs={k: v for k, v in scene.inputs.items() if k == "hidden_states"},
    )
    assert report.findings[0].confidence == "unknown"
    assert report.notes


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_bit_is_not_explained_away(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    scene = fp8_scene(40, 256)
    actual = {n: f.copied(t) for n, t in scene.expected.items()}
    name = ("x", "x_sf")[seed % 2]
    elements = f.raw(actual[name]).reshape(-1)
    elements[int(torch.randint(0, elements.size, (1,), generator=g))] ^= 1 << (seed % 7)
    report = explain(actual, scene.expected, op=scene.op, params=scene.params, inputs=scene.inputs)
    assert [(each.output, each.count) for each in report.findings] == [(name, 1)]
    assert report.findings[0].confidence == "unknown", str(report)


def test_unrelated_data_is_unknown() -> None:
    left, right = fp8_scene(64, 512, seed=1), fp8_scene(64, 512, seed=2)
    report = explain({"x": right.expected["x"]}, {"x": left.expected["x"]})
    assert [(g.cause, g.confidence) for g in report.findings] == [("unknown", "unknown")]


def test_every_alternative_has_something_that_decides() -> None:
    assert all(
        cause.meaning and (cause.decide or cause.family == "form" or cause.name == "unknown")
        for cause in CAUSES.values()
    )


# ---- where


def words(shape: tuple[int, ...], mask: torch.Tensor) -> str:
    layout = PlainLayout(shape, 8)
    expected = torch.zeros(shape, dtype=torch.uint8)
    subject = Subject(
        "x",
        expected.reshape(-1),
        mask.to(torch.uint8).reshape(-1),
        8,
        layout,
        "values",
        "uint8",
        storage_dims(layout),
    )
    return in_words(subject, subject.positions)


def at(shape: tuple[int, ...], *index: slice | int | list[int]) -> torch.Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[index] = True
    return mask


@pytest.mark.parametrize(
    ("shape", "index", "expected"),
    [
        ((8, 64, 32), (5,), "only batch 5"),
        ((64, 32), (slice(10, 20),), "rows 10 to 19"),
        ((512, 32), ([r for r in range(512) if 32 <= r % 128 < 64],), "rows 32 to 63 of every 128"),
        ((64, 32), (slice(None), slice(3, None, 4)), "every fourth column (from 3)"),
        ((64, 32), (slice(None), slice(16, 32)), "columns 16 to 31"),
        ((64, 32), ([3, 17],), "rows 3, 17"),
        ((64, 32), ([r for r in range(64) if r not in (5, 9)],), "all rows but 5, 9"),
        ((64, 32), (slice(4, 8), slice(0, 8)), "rows 4 to 7; columns 0 to 7"),
        ((64, 32), (slice(None),), "everywhere"),
        ((64, 32), (7, 9), "row 7, column 9"),
    ],
)
def test_where_in_words(
    shape: tuple[int, ...], index: tuple[slice | int | list[int], ...], expected: str
) -> None:
    assert words(shape, at(shape, *index)) == expected


def test_noise_does_not_hide_a_place() -> None:
    mask = at((1024, 64), slice(128, 256))
    g = torch.Generator().manual_seed(0)
    mask.view(-1)[torch.randint(0, mask.numel(), (64,), generator=g)] = True
    assert words((1024, 64), mask) == "mostly rows 128 to 255"


def test_plain_scene_names_nothing_it_does_not_know() -> None:
    scene = plain_scene(torch.arange(60, dtype=torch.float32).view(6, 10))
    actual = scene.expected["output"] * 1.01
    (finding,) = explain(actual, scene.expected["output"]).findings
    assert (finding.cause, finding.confidence) == ("unknown", "unknown")


def test_the_documentation_has_every_cause() -> None:
    from pathlib import Path

    from megamoe.explain.causes import as_markdown

    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    assert page.endswith(as_markdown() + "\n"), "python -m megamoe.explain.causes writes the tables"
