"""Facts of the compiled kernels, for sm_90a and sm_100a, without a GPU: conversions, divisions, contraction,
local memory, and the width of global accesses."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import kernel_calls as calls
import pytest
import torch
from kernel_calls import FUNCTIONS, fp8_key, poisoned

from megamoe.kernels import aot
from megamoe.kernels.launch import Launch, record

TOKENS, HIDDEN = 4096, 7168


def large(name: str, **changes: Any) -> dict[str, Any]:
    """Arguments of production size; nothing reads or writes them."""
    arguments = FUNCTIONS[name][1](tokens=1, size=HIDDEN)

    def grow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != 1:
            return value
        return torch.empty(TOKENS, *value.shape[1:], dtype=value.dtype)

    grown = {key: grow(value) for key, value in arguments.items()}
    if grown.get("shared_x_sf") is not None:
        grown["shared_x_sf"] = calls.pages(TOKENS, HIDDEN, grown["shared_block_m"])
    return grown | changes


def plain_fp8() -> dict[str, Any]:
    return large("fp8", shared_x_sf=None, shared_block_m=None, eplb_state=None, is_padding=None)


def fp8_fp32() -> dict[str, Any]:
    scales = torch.empty(TOKENS, HIDDEN // 128)
    return plain_fp8() | {"hidden_quant": fp8_key(128, torch.float32), "x_sf": scales}


def token(**changes: Any) -> dict[str, Any]:
    shared = {"shared_x": None, "shared_x_sf": None, "shared_block_m": None}
    return large("token", **shared, eplb_state=None, is_padding=None) | changes


# name -> (function, arguments, bytes of the widest load and store it promises)
KERNELS: dict[str, tuple[str, Callable[[], dict[str, Any]], int, int]] = {
    "fp8-ue8m0": ("fp8", plain_fp8, 16, 16),
    "fp8-fp32": ("fp8", fp8_fp32, 16, 16),
    "fp8-everything": ("fp8", lambda: large("fp8"), 16, 16),
    "token": ("token", token, 16, 8),
    "token-everything": ("token", lambda: large("token"), 16, 8),
    "token-fp32": ("token", lambda: token(hidden_states=torch.empty(TOKENS, HIDDEN)), 16, 8),
    "block": ("block", lambda: large("block"), 16, 8),
    "norm": ("norm", lambda: large("norm"), 16, 8),
}
FP8_WRITERS = ("fp8-ue8m0", "fp8-fp32", "fp8-everything", "token-everything")


@cache
def launched(name: str) -> Launch:
    function, arguments, _, _ = KERNELS[name]
    with record() as launches:
        FUNCTIONS[function][0](**arguments())
    assert len(launches) == 1
    return launches[0]


@cache
def compiled(name: str, target: str) -> aot.Compiled:
    return aot.compile_launch(launched(name), aot.TARGETS[target])


EVERY = pytest.mark.parametrize("target", aot.TARGETS)
KERNEL = pytest.mark.parametrize("name", KERNELS)


@EVERY
@KERNEL
def test_no_local_memory(name: str, target: str) -> None:
    result = compiled(name, target)
    assert not re.search(r"\b(ld|st)\.local", result.ptx)
    facts = aot.describe(result)
    assert facts.stack_bytes == 0
    assert facts.local_accesses == 0


@EVERY
@KERNEL
def test_global_accesses_are_wide(name: str, target: str) -> None:
    facts = aot.describe(compiled(name, target))
    _, _, widest_load, widest_store = KERNELS[name]
    assert max(facts.loads) == widest_load
    assert max(facts.stores) >= widest_store


@EVERY
@KERNEL
def test_conversions_to_e4m3_saturate(name: str, target: str) -> None:
    ptx = compiled(name, target).ptx
    conversions = set(re.findall(r"cvt\.[a-z.]*e4m3x2\.f32", ptx))
    assert conversions == {"cvt.rn.satfinite.e4m3x2.f32"}  # NVFP4 kernels convert their scales


@EVERY
@KERNEL
def test_divisions_are_the_stated_ones(name: str, target: str) -> None:
    """IEEE everywhere; only the start of an E4M3 scale's reciprocal pair may be off by 2 ulp."""
    pattern = r"\b(?:div|rcp|sqrt|rsqrt|ex2|lg2)\.[a-z0-9.]*f32"
    divisions = set(re.findall(pattern, compiled(name, target).ptx))
    allowed = {"div.rn.f32", "sqrt.rn.f32"}
    if not name.startswith("fp8"):
        allowed.add("div.full.f32")
    assert divisions <= allowed
    assert not re.search(r"\.ftz\.f32", compiled(name, target).ptx)  # 2^-127 must not be flushed


@EVERY
@KERNEL
def test_nothing_is_contracted(name: str, target: str) -> None:
    """The FP8 kernels have no fma at all; the NVFP4 kernels have those that are written."""
    ptx = compiled(name, target).ptx
    if name.startswith("fp8"):
        assert "fma.rn.f32" not in ptx
    else:
        assert "fma.rn.f32" in ptx
    sass = compiled(name, target).sass
    if name == "fp8-ue8m0":
        assert "FFMA" not in sass


@EVERY
def test_maxima_ignore_or_propagate_nan_as_written(target: str) -> None:
    assert "max.NaN.f32" not in compiled("fp8-ue8m0", target).ptx
    assert "max.NaN.f32" in compiled("token", target).ptx


@EVERY
def test_groups_stay_in_their_thread(target: str) -> None:
    """The one-level kernel exchanges nothing for a group: no shuffle but for the program's NaN test."""
    facts = aot.describe(compiled("block", target))
    assert facts.opcodes.get("SHFL", 0) <= 16
    assert facts.opcodes.get("LDS", 0) <= 8


def test_a_recorded_launch_starts_nothing() -> None:
    arguments = calls.fp8_inputs()
    before = calls.storage_bytes(arguments["x"])
    with record() as launches:
        FUNCTIONS["fp8"][0](**arguments)
    assert len(launches) == 1
    assert torch.equal(before, calls.storage_bytes(arguments["x"]))
    assert poisoned(1, dtype=torch.uint8)[0] == calls.POISON
