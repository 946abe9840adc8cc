"""Bundles: what is written comes back, and what is malformed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megamoe.bundle import BundleError, Case, RecordedOutput, as_bytes, raw_memory, read_bundle, write_bundle

GOLDENS = Path(__file__).parents[1] / "goldens"
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
]


def _random(dtype, *shape):
    return (
        torch.randint(0, 2, shape, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.rand(shape).to(dtype)
    )


def _case(dtype=torch.int32, name="c"):
    wide = _random(dtype, 4, 8)
    strided = wide[:, :5]
    outputs = {
        "dense": RecordedOutput(_random(dtype, 2, 3), str(dtype)[6:], (2, 3)),
        "strided": RecordedOutput(strided, str(dtype)[6:], (4, 5), (8, 1), "undefined", "rows"),
    }
    return Case(name, "op", {"n": 1, "list": [1, None]}, {"x": _random(dtype, 3), "rows": strided}, outputs)


def _same(left, right):
    assert left.dtype == right.dtype
    assert left.stride() == right.stride()
    assert torch.equal(as_bytes(left).contiguous(), as_bytes(right).contiguous())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(tmp_path, dtype):
    case = _case(dtype)
    path = write_bundle(tmp_path / "deep" / "b.safetensors", [case], producer="test", device="here")
    bundle = read_bundle(path)
    assert bundle.metadata["producer"] == "test"
    assert bundle.metadata["device"] == "here"
    (read,) = bundle.cases
    assert (read.case, read.op, read.params) == (case.case, case.op, case.params)
    for name, tensor in case.inputs.items():
        _same(read.inputs[name], tensor)
    for name, output in case.outputs.items():
        found = read.outputs[name]
        _same(found.tensor, output.tensor)
        assert (found.dtype, found.shape, found.stride, found.padding, found.aliases) == (
            output.dtype,
            output.shape,
            output.stride,
            output.padding,
            output.aliases,
        )
    raw = [as_bytes(raw_memory(o.tensor)) for o in (read.outputs["strided"], case.outputs["strided"])]
    assert torch.equal(*raw)  # bytes between the elements too


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*.safetensors")), ids=lambda path: path.stem)
def test_goldens_round_trip(tmp_path, path):
    bundle = read_bundle(path)
    again = read_bundle(write_bundle(tmp_path / "b.safetensors", bundle.cases, producer="copy"))
    with safe_open(path, "pt") as one, safe_open(again.path, "pt") as two:
        assert json.loads(one.metadata()["manifest"]) == json.loads(two.metadata()["manifest"])
        assert set(one.keys()) == set(two.keys())
        for name in one.keys():  # noqa: SIM118
            assert torch.equal(as_bytes(one.get_tensor(name)).view(-1).view(torch.uint8),
                               as_bytes(two.get_tensor(name)).view(-1).view(torch.uint8))  # fmt: skip


def _write(tmp_path, change=lambda manifest, tensors, metadata: None):
    """A good bundle with a change: manifest is the parsed list; a change of metadata["manifest"] replaces its
    text."""
    good = write_bundle(tmp_path / "good.safetensors", [_case()], producer="test")
    with safe_open(good, "pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = metadata["manifest"]
    manifest = json.loads(text)
    change(manifest, tensors, metadata)
    if metadata.get("manifest") == text:
        metadata["manifest"] = json.dumps(manifest)
    save_file(tensors, tmp_path / "bad.safetensors", metadata)
    return tmp_path / "bad.safetensors"


def _input(**changes):
    return lambda manifest, tensors, metadata: manifest[0]["inputs"]["x"].update(changes)


def _output(name, **changes):
    return lambda manifest, tensors, metadata: manifest[0]["outputs"][name].update(changes)


BAD = {
    "format": (lambda m, t, d: d.update(format="megamoe-bundle/2"), "'format' must be 'megamoe-bundle/1'"),
    "no_manifest": (lambda m, t, d: d.pop("manifest"), "no 'manifest'"),
    "not_json": (lambda m, t, d: d.update(manifest="["), "not JSON"),
    "not_a_list": (lambda m, t, d: d.update(manifest='{"a": 1}'), "must be a list"),
    "entry": (lambda m, t, d: m.append(3), "must be an object"),
    "op": (lambda m, t, d: m[0].pop("op"), "'op' must be a str"),
    "twice": (lambda m, t, d: m.append(m[0]), "appears twice"),
    "missing_tensor": (lambda m, t, d: t.pop("c/in/x"), "input 'x': the file has no such tensor"),
    "shape": (_input(shape=[4]), "says shape [4], the file holds [3]"),
    "negative": (_input(shape=[-3]), "non-negative integers"),
    "dtype": (_output("dense", dtype="float7"), "unknown dtype 'float7'"),
    "wrong_dtype": (_output("dense", dtype="int64"), "says int64, the file holds torch.int32"),
    "stride": (_output("strided", stride=[9, 1]), "output 'strided': the manifest says shape"),
    "stride_rank": (_output("strided", stride=[8]), "'stride' must be a list of 2"),
    "padding": (_output("strided", padding="zero"), "'padding' must be one of"),
    "aliases": (_output("strided", aliases="y"), "aliases 'y', which is not an input"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed(tmp_path, name):
    change, message = BAD[name]
    path = _write(tmp_path, change)
    with pytest.raises(BundleError) as error:
        read_bundle(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_the_unchanged_file_is_good(tmp_path):
    assert len(read_bundle(_write(tmp_path)).cases) == 1


def test_not_a_safetensors_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not one")
    with pytest.raises(BundleError, match="not a safetensors file"):
        read_bundle(path)
    with pytest.raises(FileNotFoundError, match="no such bundle"):
        read_bundle(tmp_path / "none")


def test_writing_refuses(tmp_path):
    with pytest.raises(BundleError, match="same name"):
        write_bundle(tmp_path / "b", [_case(), _case()], producer="test")
    odd = Case("c", "op", {}, {"x": torch.zeros(2, dtype=torch.complex64)}, {})
    with pytest.raises(BundleError, match="complex64"):
        write_bundle(tmp_path / "b", [odd], producer="test")
