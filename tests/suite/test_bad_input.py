"""Bad and odd input: a message and exit code 2 from commands, an error from functions, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import reference.staging
from megamoe import staging
from megamoe.bundle import FORMAT, BundleError, read_bundle
from megamoe.cli import main

SIDES = {"reference": reference.staging, "production": staging}
OUTPUTS = ("x", "x_sf", "topk_idx_out", "topk_weights_out")


def _bundle(path: Path, manifest: str) -> Path:
    tensors = {"c/in/a": torch.ones(2, 3), "c/out/b": torch.ones(2)}
    save_file(tensors, str(path), {"format": FORMAT, "manifest": manifest})
    return path


def _entry(operation: str = "ue8m0_uint8_to_float", **output) -> dict:
    inputs = {"a": {"dtype": "float32", "shape": [2, 3]}}
    outputs = {"b": {"dtype": "float32", "shape": [2]} | output}
    return {"case": "c", "op": operation, "params": {}, "inputs": inputs, "outputs": outputs}


def _with_stride(stride: list[int]) -> str:
    entry = _entry()
    entry["inputs"]["a"]["stride"] = stride
    return json.dumps([entry])


MANIFESTS = {
    "shared_elements": _with_stride([0, 0]),
    "too_much_memory": _with_stride([10**15, 1]),
    "beyond_int64": _with_stride([10**30, 1]),
    "alias_list": json.dumps([_entry(aliases=["a"])]),
    "alias_object": json.dumps([_entry(aliases={})]),
    "nested_deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest(name, tmp_path):
    path = _bundle(tmp_path / "b.safetensors", MANIFESTS[name])
    with pytest.raises(BundleError, match=r"b\.safetensors"):
        read_bundle(path)
    done = CliRunner().invoke(main, ["replay", str(path)])
    assert done.exit_code == 2
    assert "b.safetensors" in done.stderr


def test_replay_without_outputs(tmp_path):
    from megamoe.suite.table import table

    entry = _entry(next(iter(table())))
    entry["outputs"] = {}
    path = _bundle(tmp_path / "b.safetensors", json.dumps([entry]))
    done = CliRunner().invoke(main, ["replay", str(path)])
    assert done.exit_code == 2
    assert "no outputs" in done.stderr


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_verify_into_a_file_in_the_way(option, tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "out"
    arguments = ["verify", "--op", "prepare_megamoe_bf16_inputs", "--tier", "smoke", "--device", "cpu", "-q"]
    done = CliRunner().invoke(main, [*arguments, "--jobs", "1", "--impl", "reference", option, str(target)])
    assert done.exit_code == 2
    assert "file" in done.stderr


def test_record_names_an_implementation_twice(tmp_path):
    out = tmp_path / "b.safetensors"
    arguments = ["record", "--op", "prepare_megamoe_bf16_inputs", "--tier", "smoke", "--device", "cpu"]
    done = CliRunner().invoke(main, [*arguments, "--impl", "reference,reference", "--out", str(out)])
    assert done.exit_code == 0
    names = [case.case for case in read_bundle(out).cases]
    assert names
    assert len(names) == len(set(names))


def _arguments() -> dict:
    return {
        "hidden_states": torch.ones(3, 256, dtype=torch.bfloat16),
        "topk_weights": torch.ones(3, 2),
        "topk_ids": torch.ones(3, 2, dtype=torch.int64),
        "x": torch.full((3, 256), 7, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "x_sf": torch.full((3, 2), 7, dtype=torch.int32),
        "topk_idx_out": torch.full((3, 2), 7),
        "topk_weights_out": torch.full((3, 2), 7.0),
    }


REFUSED = {
    "hidden_none": {"hidden_states": None},
    "hidden_scalar": {"hidden_states": torch.ones((), dtype=torch.bfloat16)},
    "hidden_sparse": {"hidden_states": torch.ones(3, 256).to_sparse()},
    "weights_sparse": {"topk_weights": torch.ones(3, 2).to_sparse()},
    "ids_sparse": {"topk_ids": torch.ones(3, 2, dtype=torch.int64).to_sparse()},
    "eplb_text": {"eplb_state": "x"},
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", REFUSED)
def test_staging_refuses_before_it_writes(name, side):
    arguments = _arguments() | REFUSED[name]
    before = {key: arguments[key].view(torch.uint8).clone() for key in OUTPUTS}
    with pytest.raises((TypeError, ValueError), match=next(iter(REFUSED[name]))):
        SIDES[side].prepare_megamoe_inputs(**arguments)
    for key, value in before.items():
        assert torch.equal(arguments[key].view(torch.uint8), value), key


def test_reference_refuses_outputs_torch_cannot_write():
    arguments = _arguments()
    arguments["topk_weights_out"].requires_grad_()
    with pytest.raises(ValueError, match="topk_weights_out"):
        reference.staging.prepare_megamoe_inputs(**arguments)
    assert bool((arguments["topk_idx_out"] == 7).all())
    assert bool((arguments["x_sf"] == 7).all())
    with torch.inference_mode():
        arguments = _arguments()
    with pytest.raises(ValueError, match="inference tensor"):
        reference.staging.prepare_megamoe_inputs(**arguments)
