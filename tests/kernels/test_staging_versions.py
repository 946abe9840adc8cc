"""benchmarks/staging_versions.py keeps two checkouts apart, and times nothing that differs."""

import importlib
import shutil
import sys
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


def test_other_bytes_are_found() -> None:
    buffers = {"x": torch.zeros(4, dtype=torch.uint8), "hidden_states": torch.zeros(4, dtype=torch.uint8)}

    def write(value: int) -> Callable[[], object]:
        return lambda: buffers["x"].fill_(value)

    made = {"a, no EPLB": [write(1)], "a, record EPLB": [write(2)], "b, no EPLB": [write(1)]}
    assert script.differing(made, buffers) == []
    made["b, record EPLB"] = [write(3)]
    assert script.differing(made, buffers) == ["b, record EPLB: x"]


def test_what_a_version_leaves_out_is_found() -> None:
    buffers = {"x": torch.zeros(4, dtype=torch.uint8)}
    made = {"a, no EPLB": [lambda: buffers["x"].fill_(5)], "b, no EPLB": [lambda: buffers["x"][:3].fill_(5)]}
    assert script.differing(made, buffers) == ["b, no EPLB: x"]


def test_a_directory_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a checkout with megamoe/__init__\.py"):
        script.load_version(tmp_path)
