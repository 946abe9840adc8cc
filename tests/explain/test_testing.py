"""assert_bitwise as tests of other projects use it, and the plugin that keeps what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe.bundle import read_bundle
from megamoe.testing import BitwiseError, assert_bitwise
from reference.layouts import get_layout
from tests.explain import faults as f
from tests.explain.corpus import CORPUS
from tests.explain.scenes import fp8_scene

FAULTS = {fault.id: fault for fault in CORPUS}


def test_equal_tensors_pass() -> None:
    tensor = torch.arange(64, dtype=torch.int32).view(8, 8)
    assert_bitwise(tensor, tensor.clone())
    assert_bitwise({"a": tensor}, {"a": tensor.clone()})
    assert_bitwise(torch.zeros(0, 4), torch.zeros(0, 4))
    assert_bitwise(torch.tensor(3.0), torch.tensor(3.0))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([float("nan")]), -torch.tensor([float("nan")])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
        (torch.zeros(3, 2).T, torch.zeros(2, 3)),
    ],
    ids=["sign_of_zero", "one_ulp", "sign_of_nan", "bool", "shape", "dtype", "stride"],
)
def test_any_difference_fails(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(BitwiseError):
        assert_bitwise(actual, expected)


def test_the_same_nan_is_equal() -> None:
    assert_bitwise(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_message_with_a_layout_by_name() -> None:
    layout = get_layout("packed_scale_rows", tokens=6, groups=8)
    expected = layout.pack(torch.arange(100, 148, dtype=torch.uint8).view(6, 8))
    actual = expected.view(torch.uint8).view(6, 2, 4).flip(2).contiguous().view(torch.int32).view(6, 2)
    with pytest.raises(BitwiseError) as caught:
        assert_bitwise(
            actual,
            expected,
            layout="packed_scale_rows",
            params={"tokens": 6, "groups": 8},
            message="my kernel",
        )
    text = str(caught.value)
    assert text.splitlines()[0] == "my kernel"
    assert "byte_order (unique)" in text
    assert "token 0, group 0: expected 0x64" in text
    assert len(text.splitlines()) <= 25
    assert caught.value.report.findings[0].cause == "byte_order"


def test_form_comes_first() -> None:
    expected = torch.arange(12).view(3, 4)
    for actual, cause in (
        (expected.to(torch.int32), "id_width"),
        (expected[:2], "shape_differs"),
        (expected.float(), "dtype_differs"),
        (expected.T.contiguous().T, "stride_differs"),
    ):
        with pytest.raises(BitwiseError) as caught:
            assert_bitwise(actual, expected)
        assert [finding.cause for finding in caught.value.report.findings] == [cause]


def test_wrong_strides_of_an_mn_major_tensor() -> None:
    values = torch.arange(24, dtype=torch.int32).view(6, 4)
    expected = torch.zeros(4, 8, dtype=torch.int32).T[:6]
    expected.copy_(values)
    with pytest.raises(BitwiseError, match="mn_major_missing"):
        assert_bitwise(values.contiguous(), expected)


def test_gaps_between_rows_count_unless_undefined() -> None:
    wide = torch.zeros(4, 8, dtype=torch.uint8)
    other = wide.clone()
    other[1, 6] = 1
    with pytest.raises(BitwiseError, match="padding"):
        assert_bitwise(other[:, :5], wide[:, :5])
    assert_bitwise(other[:, :5], wide[:, :5], padding="undefined")


def test_before_names_what_was_never_written() -> None:
    """Poison that varies is recognized when the caller says what the buffer held."""
    g = torch.Generator().manual_seed(0)
    before = torch.randint(0, 256, (32, 64), generator=g, dtype=torch.uint8)
    expected = torch.randint(0, 256, (32, 64), generator=g, dtype=torch.uint8)
    actual = expected.clone()
    actual[10:14] = before[10:14]
    with pytest.raises(BitwiseError, match="unwritten"):
        assert_bitwise(actual, expected, before=before)


def test_bad_arguments() -> None:
    tensor = torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(TypeError, match="actual: expected a tensor, got list"):
        assert_bitwise([1, 2], tensor)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="both tensors"):
        assert_bitwise({"a": tensor}, tensor)
    with pytest.raises(ValueError, match="expected the outputs"):
        assert_bitwise({"a": tensor}, {"b": tensor})
    with pytest.raises(ValueError, match="layout: expected one of"):
        assert_bitwise(tensor, tensor, layout="none")
    with pytest.raises(ValueError, match="is stored as"):
        assert_bitwise(tensor, tensor, layout="swizzle_128x4", params={"rows": 128, "groups": 4})


@pytest.mark.parametrize(
    "names",
    [
        {"op": "prepare_megamoe_input"},
        {"op": "prepare_megamoe_inputs", "output": "x_scales"},
        {"dtype": "fp8"},
        {"code": "e8m0"},
    ],
    ids=["op", "output", "dtype", "code"],
)
def test_unknown_names_are_refused(names: dict[str, str]) -> None:
    """A misspelt name must not merely make the explanation poorer, and not wait for a difference."""
    tensor = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{list(names)[-1]}: expected one of"):
        assert_bitwise(tensor, tensor.clone(), **names)  # type: ignore[arg-type]


def test_artifacts(tmp_path: Path) -> None:
    fault = FAULTS["scale_rounding_floor-small"]
    scene = fault.scene()
    with pytest.raises(BitwiseError) as caught:
        assert_bitwise(
            fault.actual(scene),
            scene.expected,
            op=scene.op,
            params=scene.params,
            inputs=scene.inputs,
            message="my test",
            artifacts=tmp_path,
        )
    assert caught.value.page == tmp_path / "my_test.html"
    assert "scale_rounding_floor" in caught.value.page.read_text()
    for side, outputs in (("expected", scene.expected), ("actual", fault.actual(scene))):
        (case,) = read_bundle(tmp_path / f"my_test.{side}.safetensors").cases
        assert case.op == scene.op
        assert set(case.inputs) == set(scene.inputs)
        assert all(
            torch.equal(
                case.outputs[n].tensor.contiguous().view(torch.uint8), t.contiguous().view(torch.uint8)
            )
            for n, t in outputs.items()
        )


def test_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import torch
        from megamoe.testing import assert_bitwise

        def test_kernel():
            expected = torch.arange(64, dtype=torch.int32).view(8, 8)
            assert_bitwise(expected.T.contiguous(), expected)
    """)
    result = pytester.runpytest_subprocess("-p", "megamoe.testing_plugin", "--megamoe-artifacts=left")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*transposed (unique)*",
            "*page: *left*test_kernel.html*",
            "*megamoe explain *expected.safetensors *actual.safetensors*",
        ]
    )
    assert len(list((pytester.path / "left").iterdir())) == 3


def test_equal_outputs_cost_only_the_comparison() -> None:
    """Nothing of the search is imported for tensors that agree."""
    import subprocess
    import sys

    code = (
        "import sys, torch; from megamoe.testing import assert_bitwise; "
        "t = torch.zeros(8, 8); assert_bitwise(t, t.clone());"
        "assert 'megamoe.explain.variants_fp8' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_scene_is_what_a_kernel_would_be_given() -> None:
    """The expected sides of the corpus are the reference's, so that replays apply to them."""
    scene = fp8_scene(40, 256)
    assert_bitwise(
        {n: f.copied(t) for n, t in scene.expected.items()},
        scene.expected,
        op=scene.op,
        params=scene.params,
        inputs=scene.inputs,
    )


@pytest.mark.parametrize(
    "odd",
    [
        torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
        torch.zeros(4).to_sparse(),
        torch.zeros(4, device="meta"),
        [0.0],
    ],
    ids=["quantized", "sparse", "meta", "list"],
)
def test_tensors_without_plain_memory_are_refused(odd):
    with pytest.raises(TypeError, match="actual: expected a"):
        assert_bitwise(odd, torch.zeros(4))
    with pytest.raises(TypeError, match="expected"):
        assert_bitwise(torch.zeros(4), odd)


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="actual: expected at least one output"):
        assert_bitwise({}, {})
    with pytest.raises(ValueError, match="padding: expected None"):
        assert_bitwise(torch.zeros(4), torch.zeros(4), padding="undefind")


def test_lazy_conjugates_are_compared_by_value():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert_bitwise(values.conj(), values.conj().resolve_conj())
    assert_bitwise(values.conj().imag, values.conj().imag.resolve_neg())


def test_a_page_that_cannot_be_written_hides_no_difference(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(AssertionError, match="not written"):
        assert_bitwise(torch.zeros(4), torch.ones(4), artifacts=blocked)
