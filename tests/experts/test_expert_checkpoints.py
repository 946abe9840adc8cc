"""Checkpoints as a stream: order, names, laziness, errors, and the memory that loading takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import nvfp4_layer, write_checkpoint
from expert_modules import make_experts
from safetensors.torch import save_file

from megamoe.experts import find_shards, stream_checkpoint

HERE = Path(__file__).parent


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("window_bytes", [1, 10_000, 1 << 30])
def test_the_stream_equals_the_tensors(tmp_path, window_bytes):
    files, total = write_checkpoint(tmp_path, 2, 4, 256, 256)
    assert [f.name for f in find_shards(tmp_path)] == [f.name for f in files]
    seen = 0
    for layer in range(2):
        expected = nvfp4_layer(4, 256, 256, seed=1000 * layer)
        stream = stream_checkpoint(tmp_path, prefix=f"layers.{layer}.experts.", window_bytes=window_bytes)
        found = {}
        for name, tensor in stream:
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(expected[name].shape), expected[name].dtype)
            assert torch.equal(raw(tensor.load()), raw(expected[name]))
            assert torch.equal(raw(tensor[1:3]), raw(expected[name][1:3]))
            assert tensor[3:1].shape[0] == 0
            found[name] = tensor
            seen += tensor.nbytes
        assert found.keys() == expected.keys()
    assert seen == total


def test_a_module_loads_from_shards_what_it_loads_from_tensors(tmp_path):
    write_checkpoint(tmp_path, 1, 4, 256, 256)
    direct, streamed = (
        make_experts("muse_spark", "nvfp4", num_local_experts=2, experts_start_idx=1) for _ in "ab"
    )
    list(direct.load_weights(nvfp4_layer(4, 256, 256).items()))
    list(streamed.load_weights(stream_checkpoint(tmp_path, prefix="layers.0.experts.")))
    for (name, one), (_, other) in zip(direct.named_parameters(), streamed.named_parameters(), strict=True):
        assert torch.equal(raw(one), raw(other)), name


def test_an_index_decides_which_files_belong(tmp_path):
    files, _ = write_checkpoint(tmp_path, 2, 2, 256, 256)
    save_file({"stray": torch.zeros(1)}, str(tmp_path / "optimizer.safetensors"))
    index = {"weight_map": {"a": files[1].name, "b": files[0].name, "c": files[1].name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_shards(tmp_path) == sorted(files)
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match=files[0].name):
        find_shards(tmp_path)


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        list(stream_checkpoint(tmp_path))


def test_a_truncated_shard_is_an_error_not_a_short_read(tmp_path):
    (file,), _ = write_checkpoint(tmp_path, 1, 2, 256, 256)
    file.write_bytes(file.read_bytes()[:-100])
    module = make_experts("muse_spark", "nvfp4", num_experts=2, num_local_experts=2)
    with pytest.raises(Exception, match=r"(?i)metadata|header|size|incomplete"):
        list(module.load_weights(stream_checkpoint(file, prefix="layers.0.experts.")))


def test_a_shard_with_a_wrong_shape_is_refused_unread(tmp_path):
    file = tmp_path / "wrong.safetensors"
    save_file({"w13_weight": torch.zeros(3, 512, 128, dtype=torch.uint8)}, str(file))
    module = make_experts("muse_spark", "nvfp4")
    with pytest.raises(ValueError, match=r"w13_weight: shape must be \(4, 512, 128\), got \(3, 512, 128\)"):
        list(module.load_weights(stream_checkpoint(file)))


def test_loading_and_finalizing_stays_within_the_checkpoints_size(tmp_path):
    """2 layers of 64 NVFP4 experts: peak resident memory below 1.3 times the checkpoint, in a process of its
    own.
    """
    layers, experts, hidden, inter = 2, 64, 2048, 768
    _, total = write_checkpoint(tmp_path, layers, experts, hidden, inter)
    assert 300e6 < total < 400e6
    arguments = [
        str(HERE / "load_in_process.py"),
        str(tmp_path),
        *(str(n) for n in (layers, experts, hidden, inter)),
    ]
    root = HERE.parents[1]
    done = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["names"] == layers * 8
    # what is kept is what the kernel reads: all but the input scales that it does not
    assert report["digest"] == expected_digest(layers, experts, hidden, inter)
    assert report["kept_bytes"] > 0.9 * total
    assert report["peak_bytes"] < 1.3 * total, f"{report['peak_bytes'] / total:.3f} times the checkpoint"


def expected_digest(layers: int, experts: int, hidden: int, inter: int) -> int:
    """Sum of all bytes that a finalized layer keeps: layouts move bytes and change none."""
    kept = set(nvfp4_layer(1, 256, 256)) - {"w13_input_scale"}
    total = 0
    for layer in range(layers):
        tensors = nvfp4_layer(experts, hidden, inter, seed=1000 * layer)
        total += sum(int(raw(tensors[name]).sum(dtype=torch.int64)) for name in kept)
    return total
