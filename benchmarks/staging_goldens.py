"""Runs the staging kernels on the recorded cases and counts differing bytes, with nothing but torch.

    python benchmarks/staging_goldens.py [--device cpu|cuda] [BUNDLE]

A gate for the timing scripts, which run where only torch and triton are installed. The tests and
`megamoe replay` do the same through the suite.
"""

import argparse
import json
import struct
import sys
import time
from pathlib import Path

import torch

from megamoe import eplb, staging
from megamoe.quant_keys import kFp8Dynamic128, kMxfp8Dynamic

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "goldens" / "staging.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "BOOL": torch.bool}
DTYPES |= {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "I8": torch.int8}
KEYS = {"mxfp8": kMxfp8Dynamic, "fp8_g128_f32": kFp8Dynamic128}


def read(path: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    manifest = json.loads(header.pop("__metadata__")["manifest"])
    body = bytearray(data[8 + size :])
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw = torch.frombuffer(body, dtype=torch.uint8, offset=start, count=end - start).clone()
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return manifest, tensors


def allocate(case: dict, device: str) -> dict[str, torch.Tensor]:
    fill = case["params"].get("fill_byte", 0xA5)
    buffers = {}
    for name, entry in case["outputs"].items():
        shape, dtype = list(entry["shape"]), entry["dtype"]
        dtype = torch.uint8 if dtype == "e2m1x2" else getattr(torch, dtype)
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        buffers[name] = (
            torch.full((count,), fill, dtype=torch.uint8, device=device).view(dtype).reshape(shape)
        )
    return buffers


def run(case: dict, inputs: dict[str, torch.Tensor], out: dict[str, torch.Tensor], device: str) -> None:
    """Calls the production function of one recorded case; missing routing is supplied."""
    params, op = case["params"], case["op"]
    if op == "eplb_map_to_physical_and_record":
        limit = params["num_unpadded_tokens"]
        load = inputs["expert_load"]
        out["physical_ids"] = eplb.eplb_map_to_physical_and_record(
            inputs["topk_ids"],
            load,
            inputs["logical_to_physical_map"],
            inputs["logical_replica_count"],
            torch.tensor(params["record"], device=device),
            None if limit is None else torch.tensor(limit, dtype=torch.int32, device=device),
        )
        out["expert_load"] = load
        return
    if op == "prepare_megamoe_nvfp4_with_norm":
        staging.prepare_megamoe_nvfp4_with_norm(
            inputs["hidden_states"], inputs["norm_weight"], params["norm_eps"], params["gain_center"], **out
        )
        return
    tokens = inputs["hidden_states"].shape[0]
    routing = {
        "topk_weights": inputs.get("topk_weights", torch.ones(tokens, 2, device=device)),
        "topk_ids": inputs.get("topk_ids", torch.zeros(tokens, 2, dtype=torch.int64, device=device)),
    }
    outputs = dict(out)
    shape = routing["topk_ids"].shape
    outputs.setdefault("topk_idx_out", torch.empty(shape, dtype=torch.int64, device=device))
    outputs.setdefault("topk_weights_out", torch.empty(shape, device=device))
    extra = {"is_padding": inputs.get("is_padding")}
    if op == "prepare_megamoe_inputs":
        extra["hidden_quant"] = KEYS[params["hidden_quant"]]
        extra["shared_block_m"] = params.get("shared_block_m")
    elif op == "prepare_megamoe_nvfp4_inputs":
        extra["w2_global_scale"] = inputs.get("w2_global_scale")
        extra["l2_activation_scale"] = params.get("l2_activation_scale", 1.0)
        extra["shared_block_m"] = params.get("shared_block_m")
    getattr(staging, op)(inputs["hidden_states"], **routing, **outputs, **extra)


def differing_bytes(actual: torch.Tensor, expected: torch.Tensor) -> int:
    a = actual.contiguous().view(-1).view(torch.uint8).cpu()
    b = expected.contiguous().view(-1).view(torch.uint8)
    return a.numel() if a.shape != b.shape else int((a != b).sum())


def main(device: str, path: Path) -> int:
    manifest, tensors = read(path)
    total = wrong = 0
    started = time.time()
    for case in manifest:
        name = case["case"]
        inputs = {n: tensors[f"{name}/in/{n}"].to(device) for n in case["inputs"]}
        out = allocate(case, device)
        try:
            run(case, inputs, out, device)
            counts = {n: differing_bytes(out[n], tensors[f"{name}/out/{n}"]) for n in case["outputs"]}
        except Exception as error:
            counts = {f"{type(error).__name__}: {error}"[:300]: 1}
        bad = {n: c for n, c in counts.items() if c}
        total += sum(
            tensors[f"{name}/out/{n}"].numel() * tensors[f"{name}/out/{n}"].element_size()
            for n in case["outputs"]
        )
        wrong += sum(bad.values())
        if bad:
            print(f"DIFFERS {name}: {bad}")
    seconds = time.time() - started
    print(f"goldens on {device}: {len(manifest)} cases, {total} bytes, {wrong} differ, {seconds:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("bundle", nargs="?", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    sys.exit(main(arguments.device, arguments.bundle))
