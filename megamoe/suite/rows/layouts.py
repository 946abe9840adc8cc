"""Scale and weight layouts: checkpoint tensors to what the kernels read. Source: NUMERICS 4.6 and 5.

Scales are position-coded: exponents run through 1..254, so that no two neighbours agree, and a lost
permutation, a lost transposition and a group in the wrong byte all show. ``form`` is how an input lies in
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megamoe import bundle
from megamoe.suite.operation import Call, Implementation, Operation, Output, Params, Sweep

_FORMS = ("contiguous", "mn_major", "sliced")


def _shape(params: Params, *sizes: int) -> tuple[int, ...]:
    return sizes if params["batch"] is None else (params["batch"], *sizes)


def _powers_of_two(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    count = int(np.prod(shape))
    exponents = (np.arange(count, dtype=np.int64) * 97 + int(rng.integers(254))) % 254 + 1
    return torch.from_numpy((exponents.astype(np.int32) << 23).view(np.float32).reshape(shape))


def _any_floats(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """fp32 bit patterns of every kind: the transposition moves them all unchanged."""
    bits = rng.integers(-(2**31), 2**31, size=shape, dtype=np.int64).astype(np.int32)
    return torch.from_numpy(bits).view(torch.float32)


def _laid_out(tensor: Tensor, form: str) -> Tensor:
    if form == "mn_major":
        return tensor.mT.contiguous().mT
    if form == "sliced":
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    return tensor


def _scale_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    draw = _any_floats if params["values"] == "bits" else _powers_of_two
    return {"sf": _laid_out(draw(_shape(params, params["mn"], params["groups"]), rng), params["form"])}


def _scale_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    return Call({"sf": inputs["sf"]}, returns=("out",))


def _scale_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    shape = case.inputs["sf"].shape
    batch = shape[0] if len(shape) == 3 else None
    values = "bits" if case.op == "get_mn_major_tma_aligned_tensor" else "position"
    params = {"values": values, "batch": batch, "mn": shape[-2], "groups": shape[-1], "form": "contiguous"}
    return params, dict(case.inputs)


def _packable(params: Params) -> str | None:
    """DeepGEMM 0.1.5 packs a single batch with mn % 4 == 0 only where its rows or columns are dense."""
    if params["form"] == "sliced" and params["mn"] % 4 == 0 and params["batch"] in (None, 1):
        return "a slice of wider rows is refused by the library when mn is a multiple of 4"
    return None


def _triton(name: str, module: str = "megamoe.layouts") -> Implementation:
    return Implementation("triton", f"{module}:{name}", needs=("triton",))


def _scale_row(name: str, values: str, layout: str, **library: Any) -> Operation:
    defaults: Params = {"values": values, "batch": None, "mn": 130, "groups": 7, "form": "contiguous"}
    return Operation(
        name=name,
        reference=f"reference.weights:{name}",
        implementations=(
            Implementation(
                "deep_gemm", f"megamoe.suite.drivers.layouts:{name}", needs=(f"deep_gemm.{name}",), **library
            ),
            _triton(name),
        ),
        outputs={"out": Output(layout, "undefined")},
        defaults=defaults,
        sweeps=(
            Sweep("smoke", {"mn": (1, 130), "groups": (1, 7)}),
            Sweep("default", {"batch": (None, 1, 3), "mn": (1, 5, 64, 130), "groups": (1, 4, 5, 8)}),
            Sweep("default", {"batch": (None, 1, 2), "mn": (6, 8), "groups": (3, 8), "form": _FORMS}),
            Sweep(
                "full",
                {"batch": (None, 2), "mn": (127, 128, 1000, 4096, 4097), "groups": (2, 9, 14, 28, 56, 224)},
            ),
            Sweep("full", {"batch": (None, 1, 3), "mn": tuple(range(1, 34)), "groups": (1, 2, 3, 4, 5, 16)}),
        ),
        inputs=_scale_inputs,
        call=_scale_call,
        source="NUMERICS 5.5",
        golden=_scale_golden,
    )


# ---- transform_sf_into_required_layout


def _sf_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    gm, gk = params["gran"]
    shape = _shape(params, -(-params["mn"] // gm), -(-params["k"] // gk))
    if params["arch"] == 90 or params["disable_ue8m0_cast"]:
        return {"sf": _any_floats(shape, rng)}
    return {"sf": _powers_of_two(shape, rng)}


def _sf_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    gm, gk = params["gran"]
    operand = params["operand"]
    recipe = {None: (gm, gk), "a": (gm, 1, gk), "b": (1, gm, gk)}[operand]
    arguments = {
        "sf": inputs["sf"],
        "mn": params["mn"],
        "k": params["k"],
        "recipe": recipe,
        "num_groups": params["batch"],
        "is_sfa": None if operand is None else operand == "a",
        "disable_ue8m0_cast": params["disable_ue8m0_cast"],
        "arch": params["arch"],
    }
    return Call(arguments, returns=("out",))


def _this_architecture(params: Params) -> str | None:
    """The library asks the device; the reference is told."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
    if params["arch"] // 10 != major:
        return f"the library chooses sm_{params['arch']} layouts on such a device only"
    return None


TRANSFORM_SF = Operation(
    name="transform_sf_into_required_layout",
    reference="reference.weights:transform_sf_into_required_layout",
    implementations=(
        Implementation(
            "deep_gemm",
            "megamoe.suite.drivers.layouts:transform_sf_into_required_layout",
            needs=("deep_gemm.transform_sf_into_required_layout",),
            supports=_this_architecture,
        ),
        _triton("transform_sf_into_required_layout"),
    ),
    outputs={"out": Output("mn_major_packed_ue8m0", "undefined")},
    defaults={
        "batch": None,
        "mn": 256,
        "k": 1024,
        "gran": (1, 32),
        "operand": None,
        "arch": 100,
        "disable_ue8m0_cast": False,
    },
    sweeps=(
        Sweep("smoke", {"gran": ((1, 32),), "mn": (130,), "k": (640,)}),
        Sweep("smoke", {"gran": ((1, 128), (128, 128)), "arch": (90,)}),
        Sweep(
            "default",
            {
                "gran": ((1, 32), (1, 128), (128, 128), (4, 32)),
                "mn": (6, 130),
                "k": (512, 640),
                "batch": (None, 2),
            },
        ),
        Sweep(
            "default",
            {
                "gran": ((1, 128), (128, 128)),
                "mn": (6, 130),
                "k": (512, 640),
                "batch": (None, 2),
                "arch": (90,),
            },
        ),
        Sweep("default", {"gran": ((1, 128), (128, 128)), "operand": ("a", "b"), "arch": (90, 100)}),
        Sweep("default", {"gran": ((1, 128), (128, 128)), "disable_ue8m0_cast": (True,), "arch": (90, 100)}),
        Sweep(
            "full",
            {
                "gran": ((1, 128), (128, 128)),
                "mn": (1, 5, 128, 1000, 4096),
                "k": (128, 512, 640, 1024, 7168),
                "batch": (None, 1, 3),
                "arch": (90, 100),
            },
        ),
    ),
    inputs=_sf_inputs,
    call=_sf_call,
    source="NUMERICS 5.4",
)


# ---- weights

_WEIGHT_OUTPUTS = ("l1_w_out", "l1_sf_out", "l2_w_out", "l2_sf_out")


def _codes(shape: tuple[int, ...], rng: np.random.Generator, dtype: torch.dtype) -> Tensor:
    """Every byte value, neighbours different in rows and columns."""
    count = int(np.prod(shape))
    codes = (np.arange(count, dtype=np.int64) * 181 + int(rng.integers(256))) % 256 + np.arange(count) // 256
    return torch.from_numpy((codes % 256).astype(np.uint8).reshape(shape)).view(dtype)


def _words(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    words = rng.permutation(int(np.prod(shape))).astype(np.int32) * np.int32(0x01010101 * 5)
    return _laid_out(torch.from_numpy(words.reshape(shape)), "mn_major")


def _weight_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    inter, hidden = params["intermediate"], params["hidden"]
    shapes = {"l1": _shape(params, 2 * inter, hidden), "l2": _shape(params, hidden, inter)}
    if params["kind"] == "bf16":
        return {
            name: torch.from_numpy(rng.integers(-(2**15), 2**15, size=shape).astype(np.int16)).view(
                torch.bfloat16
            )
            for name, shape in shapes.items()
        }
    found = {}
    for name, (*lead, rows, columns) in shapes.items():
        dtype, width = (torch.int8, 2) if params["kind"] == "fp4" else (torch.float8_e4m3fn, 1)
        found[f"{name}_w"] = _codes((*lead, rows, columns // width), rng, dtype)
        found[f"{name}_sf"] = _words((*lead, rows, -(-columns // 128)), rng)
    return found


def _pairs(arguments: dict[str, Any], _: dict[str, Tensor]) -> dict[str, Any]:
    if "l1" in arguments:
        return {"l1_weights": arguments["l1"], "l2_weights": arguments["l2"]}
    return {
        "l1_weights": (arguments["l1_w"], arguments["l1_sf"]),
        "l2_weights": (arguments["l2_w"], arguments["l2_sf"]),
    }


def _weight_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    return Call(inputs, bind=_pairs, returns=("l1_out", "l2_out") if "l1" in inputs else _WEIGHT_OUTPUTS)


def _weight_golden(case: bundle.Case) -> tuple[Params, dict[str, Tensor]]:
    """The recorded inputs; an L2 weight where the recording has none, which no recorded output depends on."""
    inputs = dict(case.inputs)
    if "l1" in inputs:
        experts, rows, hidden = inputs["l1"].shape
        batch: int | None = experts
        inputs.setdefault("l2", torch.zeros(experts, hidden, rows // 2, dtype=torch.bfloat16))
        kind = "bf16"
    else:
        weight = inputs["l1_w"]
        batch = weight.shape[0] if weight.ndim == 3 else None
        kind = "fp4" if weight.dtype == torch.int8 else "fp8"
        rows, hidden = weight.shape[-2], weight.shape[-1] * (2 if kind == "fp4" else 1)
        columns = rows // 2 // (2 if kind == "fp4" else 1)
        shape = (*inputs["l2_sf"].shape[:-1], columns)
        inputs.setdefault("l2_w", torch.zeros(shape, dtype=torch.uint8).view(weight.dtype))
    params = {"kind": kind, "batch": batch, "intermediate": rows // 2, "hidden": hidden}
    return params, inputs


def _experts_only(params: Params) -> str | None:
    return "the library's function takes three dimensions" if params["batch"] is None else None


TRANSFORM_WEIGHTS = Operation(
    name="transform_weights_for_mega_moe",
    reference="megamoe.suite.drivers.layouts:expected_transform_weights_for_mega_moe",
    implementations=(
        Implementation(
            "deep_gemm",
            "megamoe.suite.drivers.layouts:transform_weights_for_mega_moe",
            needs=("deep_gemm.transform_weights_for_mega_moe",),
            supports=_experts_only,
        ),
        _triton("triton_transform_weights_for_mega_moe", "megamoe.suite.drivers.layouts"),
    ),
    outputs={
        "l1_w_out": Output("gate_up_interleaved_8", "undefined"),
        "l1_sf_out": Output("gate_up_utccp_scales", "undefined"),
        "l2_w_out": Output("row_major", "undefined"),
        "l2_sf_out": Output("utccp_scales", "undefined"),
        "l1_out": Output("gate_up_interleaved_8", "undefined"),
        "l2_out": Output("row_major", "undefined"),
    },
    defaults={"kind": "fp4", "batch": 2, "intermediate": 128, "hidden": 256},
    sweeps=(
        Sweep("smoke", {"kind": ("fp4", "fp8", "bf16")}),
        Sweep(
            "default",
            {
                "kind": ("fp4", "fp8", "bf16"),
                "batch": (None, 1, 3),
                "intermediate": (128, 192, 320),
                "hidden": (128, 384, 1024),
            },
        ),
        Sweep(
            "full",
            {"kind": ("fp4", "fp8", "bf16"), "batch": (4,), "intermediate": (2048,), "hidden": (7168,)},
        ),
        Sweep(
            "full",
            {
                "kind": ("fp4", "fp8"),
                "batch": (None, 5),
                "intermediate": (64, 448, 512),
                "hidden": (128, 640, 2304),
            },
        ),
    ),
    inputs=_weight_inputs,
    call=_weight_call,
    source="NUMERICS 5.1, 5.3, 4.6",
    golden=_weight_golden,
)


def _sm90_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    experts, inter, hidden = params["experts"], params["intermediate"], params["hidden"]
    found = {}
    for name, rows, columns in (("l1", 2 * inter, hidden), ("l2", hidden, inter)):
        found[f"{name}_w"] = _codes((experts, rows, columns), rng, torch.float8_e4m3fn)
        found[f"{name}_sf"] = torch.from_numpy(
            rng.random((experts, rows // 128, columns // 128), dtype=np.float32)
        )
    return found


def _sm90_call(params: Params, inputs: dict[str, Tensor]) -> Call:
    return Call(inputs, bind=_pairs, returns=_WEIGHT_OUTPUTS)


TRANSFORM_WEIGHTS_SM90 = Operation(
    name="transform_weights_for_mega_moe_sm90",
    reference="reference.weights:transform_weights_for_mega_moe_sm90",
    implementations=(
        Implementation(
            "deep_gemm",
            "deep_gemm:transform_weights_for_mega_moe_sm90",
            needs=("deep_gemm.transform_weights_for_mega_moe_sm90",),
        ),
        _triton("transform_weights_for_mega_moe_sm90"),
    ),
    outputs={
        "l1_w_out": Output("gate_up_interleaved_8", "undefined"),
        "l1_sf_out": Output("row_major", "undefined"),
        "l2_w_out": Output("row_major", "undefined"),
        "l2_sf_out": Output("row_major", "undefined"),
    },
    defaults={"experts": 2, "intermediate": 128, "hidden": 256},
    sweeps=(
        Sweep("smoke", {"experts": (2,)}),
        Sweep("default", {"experts": (1, 3), "intermediate": (128, 384), "hidden": (128, 640)}),
        Sweep("full", {"experts": (4,), "intermediate": (2048,), "hidden": (7168,)}),
    ),
    inputs=_sm90_inputs,
    call=_sm90_call,
    source="NUMERICS 5.3 (sgl-deep-gemm 0.1.5)",
)


# ---- scale bytes


def _byte_inputs(params: Params, rng: np.random.Generator) -> dict[str, Tensor]:
    codes = torch.arange(params["rows"] * 256, dtype=torch.int64).remainder(256).to(torch.uint8)
    scales = codes.reshape(params["rows"], 256)[:, : params["groups"]]
    return {"sf": scales.view(torch.float8_e8m0fnu) if params["e8m0"] else scales}


UE8M0_TO_FLOAT = Operation(
    name="ue8m0_uint8_to_float",
    reference="reference.weights:ue8m0_uint8_to_float",
    implementations=(_triton("ue8m0_uint8_to_float"),),
    outputs={"out": Output("row_major", "undefined")},
    defaults={"rows": 1, "groups": 256, "e8m0": False},
    sweeps=(
        Sweep("smoke", {"rows": (1,)}),
        Sweep("default", {"rows": (1, 3), "groups": (1, 7, 256), "e8m0": (False, True)}),
    ),
    inputs=_byte_inputs,
    call=_scale_call,
    source="NUMERICS 1.2",
)

ROWS = (
    UE8M0_TO_FLOAT,
    _scale_row("get_mn_major_tma_aligned_tensor", "bits", "mn_major_tma_aligned"),
    _scale_row(
        "get_mn_major_tma_aligned_packed_ue8m0_tensor",
        "position",
        "mn_major_packed_ue8m0",
        supports=_packable,
    ),
    TRANSFORM_SF,
    TRANSFORM_WEIGHTS,
    TRANSFORM_WEIGHTS_SM90,
)
