"""benchmarks/staging_versions.py keeps two checkouts apart, and times nothing that differs."""

import importlib
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_calls as calls
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    script: Any = importlib.import_module("staging_versions")


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A checkout whose kernels write another expert for padding."""
    shutil.copytree(ROOT / "megamoe", tmp_path / "megamoe", ignore=shutil.ignore_patterns("__pycache__"))
    constants = tmp_path / "megamoe" / "kernels" / "constants.py"
    text = constants.read_text(encoding="utf-8")
    assert text.count("PADDING_EXPERT_ID = -1") == 1
    constants.write_text(text.replace("PADDING_EXPERT_ID = -1", "PADDING_EXPERT_ID = -7"), encoding="utf-8")
    return tmp_path


def test_a_call_runs_the_kernels_of_its_own_version(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging imports its kernels when it is first called: by then another version may have been loaded."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before = {name: one for name, one in sys.modules.items() if name.startswith("megamoe")}
    versions = [script.load_version(one) for one in (ROOT, changed)]
    padding = []
    for version, directory in zip(versions, (ROOT, changed), strict=True):
        assert Path(str(version.modules["megamoe"].__file__)).is_relative_to(directory)
        arguments = calls.bf16_inputs(tokens=2, size=16)
        arguments["is_padding"] = torch.tensor([False, True])
        staging: Any = version.modules["megamoe.staging"]
        version.call(lambda f=staging.prepare_megamoe_bf16_inputs, a=arguments: f(**a))
        padding.append(arguments["topk_idx_out"][1].unique().tolist())
    assert padding == [[-1], [-7]]
    assert {name: one for name, one in sys.modules.items() if name.startswith("megamoe")} == before


def buffers() -> dict[str, torch.Tensor]:
    names = ("x", "topk_idx_out", "topk_weights_out", "hidden_states")
    return {name: torch.zeros(4, dtype=torch.uint8) for name in names}


@pytest.mark.parametrize("left_out", [None, "x", "topk_idx_out", "topk_weights_out", "load"])
def test_what_a_version_leaves_out_is_found(left_out: str | None) -> None:
    """The second version writes the last byte of one output in none of its calls."""
    state = types.SimpleNamespace(expert_load_view=torch.zeros(4, dtype=torch.int32))
    written = script.written_by(buffers(), {"no EPLB": {}, "record": {"eplb_state": state}})
    assert [list(one) for one in written.values()] == [
        ["x", "topk_idx_out", "topk_weights_out"],
        ["x", "topk_idx_out", "topk_weights_out", "load"],
    ]

    def write(kind: str, skipped: str | None) -> Callable[[], object]:
        return lambda: [one[: -1 if key == skipped else None].fill_(5) for key, one in written[kind].items()]

    made = {f"1 a, {kind}": [write(kind, None)] for kind in written}
    made |= {f"2 b, {kind}": [write(kind, left_out)] for kind in written}
    wrong = [f"2 b, {kind}: {left_out}" for kind in written if left_out in written[kind]]
    assert script.differing(made, written) == wrong


def test_versions_share_buffers_and_states(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also two of the same directory, which say how much the same kernels differ."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    here, other = script.load_version(ROOT), script.load_version(changed)
    monkeypatch.setattr(torch, "tensor", lambda *a, f=torch.tensor, **k: f(*a, **{**k, "device": "cpu"}))
    states = script.layer_states(here, "fp8", 1)
    made = script.calls([here, here, other], "fp8", [calls.bf16_inputs(tokens=2, size=128)], states)
    kinds = ("no EPLB", "record")
    names = [f"{i} {v.name}, {kind}" for i, v in ((1, here), (2, here), (3, other)) for kind in kinds]
    assert list(made) == names
    used = {id(one.args[0].keywords["eplb_state"]) for name, (one,) in made.items() if "record" in name}
    assert used == {id(states[0]["record"]["eplb_state"])}


def test_a_directory_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a checkout with megamoe/__init__\.py"):
        script.load_version(tmp_path)
