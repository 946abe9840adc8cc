"""`megamoe explain` and `megamoe layout` on files: bundles, safetensors, .pt, .npy, and everything that is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

from megamoe.bundle import Case, RecordedOutput, write_bundle
from megamoe.explain.cli import explain, layout
from tests.explain import faults as f
from tests.explain.corpus import CORPUS
from tests.explain.scenes import Scene, fp8_scene, layout_scene

FAULTS = {fault.id: fault for fault in CORPUS}


def case_of(scene: Scene, outputs: dict[str, Tensor], name: str = "case") -> Case:
    recorded = {
        key: RecordedOutput(
            t, scene.dtypes.get(key, str(t.dtype).removeprefix("torch.")), tuple(t.shape), t.stride()
        )
        for key, t in outputs.items()
    }
    return Case(name, scene.op or "", scene.params, scene.inputs, recorded)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(explain, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def write_pair(folder: Path, scene: Scene, actual: dict[str, Tensor]) -> tuple[Path, Path]:
    paths = folder / "expected.safetensors", folder / "actual.safetensors"
    for path, outputs in zip(paths, (scene.expected, actual), strict=True):
        write_bundle(path, [case_of(scene, outputs)], producer="test")
    return paths


@pytest.mark.parametrize(
    "name",
    [
        "scale_rounding_floor-fp8",
        "wrong_block_m-128-bm64",
        "nibble_order-x-two",
        "padded_tokens_counted-k4",
        "clamp_missing-sm90",
    ],
)
def test_bundles(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    scene = fault.scene()
    pair = write_pair(tmp_path, scene, fault.actual(scene))
    code, out, _ = run(*pair, "--json", "--html", tmp_path / "page.html")
    found = json.loads(out)
    assert code == 1
    assert found["equal"] is False
    assert {(each["cause"], each["confidence"]) for each in found["findings"]} == {(fault.cause, "unique")}
    for each in found["findings"]:
        assert list(each) == [
            "output",
            "cause",
            "confidence",
            "alternatives",
            "count",
            "total",
            "where",
            "examples",
        ]
        assert 0 < each["count"] <= each["total"]
        assert each["examples"]
    page = (tmp_path / "page.html").read_text()
    assert fault.cause in page
    for reference in ("http://", "https://", "src=", "@import", "url("):
        assert reference not in page  # it works offline
    code, out, _ = run(*pair)
    assert code == 1
    assert fault.cause in out
    assert len(out.splitlines()) <= 25


def test_equal_bundles(tmp_path: Path) -> None:
    scene = fp8_scene(20, 256)
    pair = write_pair(tmp_path, scene, {name: f.copied(t) for name, t in scene.expected.items()})
    code, out, _ = run(*pair, "--json")
    assert code == 0
    assert json.loads(out) == {"equal": True, "findings": []}
    code, out, _ = run(*pair)
    assert (code, out.splitlines()[0][:6]) == (0, "equal:")


def test_one_output_of_a_bundle(tmp_path: Path) -> None:
    fault = FAULTS["scale_rounding_floor-fp8"]
    scene = fault.scene()
    pair = write_pair(tmp_path, scene, fault.actual(scene))
    code, out, _ = run(*pair, "--json", "--output", "x")
    assert code == 1
    assert {each["output"] for each in json.loads(out)["findings"]} == {"x"}
    code, _, _ = run(*pair, "--output", "topk_idx_out")
    assert code == 0


def test_stale_rows_of_an_earlier_case(tmp_path: Path) -> None:
    """The last rows still hold what the call before left."""
    before, now = fp8_scene(64, 256, seed=1), fp8_scene(64, 256, seed=2)
    actual = {name: f.copied(t) for name, t in now.expected.items()}
    f.raw(actual["x"])[40:] = f.raw(before.expected["x"])[40:]
    paths = tmp_path / "expected.safetensors", tmp_path / "actual.safetensors"
    for path, outputs in zip(paths, (now.expected, actual), strict=True):
        write_bundle(
            path,
            [case_of(before, before.expected, "first"), case_of(now, outputs, "second")],
            producer="test",
        )
    code, out, _ = run(*paths, "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 1
    assert (finding["output"], finding["cause"], finding["confidence"]) == ("x", "stale", "unique")
    assert "40 to 63" in finding["where"]


def test_missing_output(tmp_path: Path) -> None:
    scene = fp8_scene(20, 256)
    pair = write_pair(tmp_path, scene, {name: t for name, t in scene.expected.items() if name != "x_sf"})
    code, out, _ = run(*pair, "--json")
    assert code == 1
    assert [(e["output"], e["cause"]) for e in json.loads(out)["findings"]] == [("x_sf", "missing_output")]


def swizzle_pair() -> tuple[Tensor, Tensor]:
    fault = FAULTS["swizzle_128x4_missing-256-named"]
    scene = fault.scene()
    return scene.expected["out"], fault.actual(scene)["out"]


def save(path: Path, tensor: Tensor) -> Path:
    if path.suffix == ".npy":
        np.save(path, tensor.numpy())
    elif path.suffix == ".pt":
        torch.save({"x_sf": tensor}, path)
    else:
        save_file({"x_sf": tensor.contiguous()}, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npy"])
@pytest.mark.parametrize(
    "options",
    [["--layout", "swizzle_128x4", "--param", "rows=256", "--param", "groups=8"], []],
    ids=["layout", "nothing"],
)
def test_bare_files(suffix: str, options: list[str], tmp_path: Path) -> None:
    expected, actual = swizzle_pair()
    code, out, _ = run(
        save(tmp_path / f"e{suffix}", expected), save(tmp_path / f"a{suffix}", actual), "--json", *options
    )
    (finding,) = json.loads(out)["findings"]
    assert code == 1
    assert (finding["cause"], finding["confidence"]) == ("swizzle_128x4_missing", "unique")


def test_layout_sizes_are_read_off_the_tensor(tmp_path: Path) -> None:
    scene = layout_scene("packed_scale_rows", tokens=40, groups=16)
    fault = f.reversed_words("out")(scene)
    pair = save(tmp_path / "e.pt", scene.expected["out"]), save(tmp_path / "a.pt", fault["out"])
    code, out, _ = run(*pair, "--layout", "packed_scale_rows", "--json")
    assert code == 1
    assert json.loads(out)["findings"][0]["cause"] == "byte_order"


def test_nothing_known_and_nothing_found(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    pair = [
        save(tmp_path / f"{side}.npy", torch.randint(0, 256, (40, 50), generator=g, dtype=torch.uint8))
        for side in "ea"
    ]
    code, out, _ = run(*pair, "--json")
    assert code == 1
    assert [(e["cause"], e["confidence"]) for e in json.loads(out)["findings"]] == [("unknown", "unknown")]
    _, text, _ = run(*pair)
    assert "without the operation and its inputs" in text


def test_files_of_two_kinds(tmp_path: Path) -> None:
    expected, _ = swizzle_pair()
    code, _, _ = run(save(tmp_path / "e.npy", expected), save(tmp_path / "a.safetensors", expected))
    assert code == 0


def _text(path: Path) -> Path:
    path.write_text("no tensors")
    return path


def _same(folder: Path, shape: tuple[int, int]) -> tuple[Path, Path]:
    tensor = torch.zeros(shape, dtype=torch.uint8)
    return save(folder / "e.npy", tensor), save(folder / "a.npy", tensor)


def _dict(path: Path, *names: str) -> Path:
    torch.save({name: torch.zeros(4, 4) for name in names}, path)
    return path


def _many(folder: Path) -> tuple[Path, Path]:
    return _dict(folder / "e.pt", "p", "q"), _dict(folder / "a.pt", "p", "q")


def _pickled(path: Path) -> Path:
    torch.save({"a": 1}, path)
    return path


REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "no_file": (lambda d: (d / "none.pt", d / "none.pt"), [], "no such file"),
    "suffix": (lambda d: (_text(d / "a.txt"), _text(d / "b.txt")), [], "expected a file ending in"),
    "not_safetensors": (
        lambda d: (_text(d / "a.safetensors"), _text(d / "b.safetensors")),
        [],
        "cannot be read",
    ),
    "not_npy": (lambda d: (_text(d / "a.npy"), _text(d / "b.npy")), [], "cannot be read"),
    "unknown_layout": (lambda d: _same(d, (8, 8)), ["--layout", "none"], "expected one of"),
    "missing_size": (lambda d: _same(d, (8, 8)), ["--layout", "shared_scale_pages"], "--param block_m=..."),
    "wrong_size": (
        lambda d: _same(d, (8, 8)),
        ["--layout", "swizzle_128x4", "--param", "rows=256", "--param", "groups=8"],
        "is stored as",
    ),
    "bad_param": (lambda d: _same(d, (8, 8)), ["--param", "rows"], "NAME=VALUE"),
    "unknown_output": (_many, ["--output", "none"], "no tensor 'none'"),
    "layout_of_many": (_many, ["--layout", "row_major"], "name it with --output"),
    "nothing_shared": (
        lambda d: (_dict(d / "a.pt", "p", "q"), _dict(d / "b.pt", "r", "s")),
        [],
        "share no tensor",
    ),
    "not_tensors": (lambda d: (_pickled(d / "a.pt"), _pickled(d / "b.pt")), [], "expected a tensor"),
    "unknown_case": (
        lambda d: write_pair(d, fp8_scene(20, 256), fp8_scene(20, 256).expected),
        ["--case", "none"],
        "no case matches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    make, options, words = REFUSED[name]
    code, out, err = run(*make(tmp_path), *options)
    assert code == 2
    assert out == ""
    assert words in err


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save(Bomb(), tmp_path / "a.pt")
    code, _, err = run(tmp_path / "a.pt", tmp_path / "a.pt")
    assert code == 2
    assert "cannot be read" in err
    assert not (tmp_path / "exploded").exists()


# ---- megamoe layout


def run_layout(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(layout, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def test_layout_in_the_terminal() -> None:
    code, out, _ = run_layout(
        "shared_scale_pages", "--shape", "200x8", "--param", "block_m=64", "--from", "128", "--rows", "2"
    )
    assert code == 0
    rows = {
        line.split()[0]: line.split()[1:]
        for line in out.splitlines()
        if line.split()[:1] in (["128"], ["129"])
    }
    assert rows == {"128": [f"64,{g}" for g in range(8)], "129": [f"96,{g}" for g in range(8)]}
    assert "padding" in out


def test_layout_of_memory_shows_the_alignment() -> None:
    code, out, _ = run_layout("mn_major_tma_aligned", "--shape", "6x3", "--memory")
    assert code == 0
    assert "··" in out


def test_layout_as_svg(tmp_path: Path) -> None:
    import xml.etree.ElementTree as ET

    for name, arguments in {
        "shared_scale_pages": ["--shape", "200x8", "--param", "block_m=192"],
        "e2m1_rows": ["--shape", "4x64"],
        "swizzle_128x4": ["--shape", "200x6"],
        "gate_up_utccp_scales": ["--shape", "2x128x8"],
    }.items():
        path = tmp_path / f"{name}.svg"
        code, _, err = run_layout(name, *arguments, "--svg", str(path))
        assert (code, err) == (0, "")
        root = ET.fromstring(path.read_text())
        titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
        assert titles[0] is not None
        assert titles[0].startswith("byte 0:")


def test_layouts_are_listed() -> None:
    from reference.layouts import LAYOUTS

    code, out, _ = run_layout()
    assert code == 0
    assert all(name in out for name in LAYOUTS)
    assert [each["name"] for each in json.loads(run_layout("--json")[1])] == list(LAYOUTS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "no layout 'none'"),
        (["e2m1_rows", "--shape", "4"], "has the axes tokens x columns"),
        (["e2m1_rows", "--shape", "4xb"], "expected sizes like"),
        (["e2m1_rows", "--shape", "4x3"], "multiple of 2"),
        (["shared_scale_pages", "--shape", "4x8"], "--param block_m=..."),
    ],
)
def test_layout_refuses(arguments: list[str], words: str) -> None:
    code, out, err = run_layout(*arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    "option", [["--shape", "200x8"], ["--param", "block_m=64"], ["--memory"], ["--from", "3"]]
)
def test_layout_options_need_a_name(option: list[str]) -> None:
    result = CliRunner().invoke(layout, option)
    assert result.exit_code == 2
    assert "NAME" in result.output
