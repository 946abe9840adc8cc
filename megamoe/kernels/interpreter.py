"""Runs the compiled kernels' own Python functions under Triton's interpreter, in the same process.

`TRITON_INTERPRET=1` decides for a whole process when a kernel is decorated. Here the tensors decide at
launch: the kernels are ordinary `triton.jit` functions (compiled for CUDA tensors), and `interpret` runs
the Python function behind one of them with NumPy for CPU tensors. While it runs, and only then,

* calls of other jitted functions (ours, or Triton's standard library's) are interpreted too;
* reductions by one of our own combine functions use the NumPy reduction that is registered for it
  (`register_reduction`), because the interpreter's generic reduction takes a Python step per element;
* operations of the interpreter that are wrong are replaced (`REPAIRS`), each only if its canary says so.

Canaries. The interpreter of Triton 3.6 to 3.9 rounds float32 to float8e4nv wrongly (1.97 becomes 1, 1000
becomes 256, NaN becomes 384), truncates float32 to bfloat16, loses bfloat16 subnormals, and, in 3.6,
computes fma with two roundings. `failing_canaries()` runs each operation on values whose right results
are known; a repair whose canary passes is not applied. A test lists what fails today, so that it says
when a Triton release has fixed something.

Nothing here is thread-safe beyond a lock around each launch: the interpreter patches `triton.language`
while it runs, so no kernel may be compiled at the same time in another thread.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton.runtime.jit import JITFunction

_LOCK = threading.RLock()
_REDUCTIONS: dict[Any, Callable[..., Any]] = {}


def register_reduction(combine: Any, reduction: Callable[..., Any]) -> None:
    """Say which NumPy reduction equals `tl.reduce(..., combine)` for a jitted `combine`."""
    # By the plain function: a jitted one hashes its whole source and dependencies.
    _REDUCTIONS[combine.fn] = reduction


# ---------------------------------------------------------------------------------------------------
# Right conversions and fma, on NumPy arrays in the interpreter's storage formats


def float32_to_e4m3(values: Any) -> Any:
    """float32 -> E4M3FN codes (uint8) as cvt.rn.satfinite: to nearest even, saturating, NaN is 0x7F."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    # Normal results: round the 23-bit mantissa to 3 bits in the integer domain; a carry moves the exponent.
    rounded = magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))
    normal = (rounded >> np.uint32(20)).astype(np.int64) - ((127 - 7) << 3)
    # Below 2^-6 the quantum is 2^-9: adding 2^14 leaves exactly that quantum in the float32 sum's last bit.
    magic = np.float32(2.0**14)
    clipped = np.minimum(magnitude, np.uint32(0x3F800000)).view(np.float32)  # 1.0; NaN is handled below
    subnormal = (clipped + magic).view(np.uint32).astype(np.int64) - int(magic.view(np.uint32))
    code = np.where(magnitude < np.uint32(0x3C800000), subnormal, normal)
    code = np.minimum(code, 0x7E)
    code = np.where(magnitude > np.uint32(0x7F800000), 0x7F, code | sign)
    return code.astype(np.uint8)


def _e4m3_value_table() -> Any:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent.astype(float) - 7)
    )
    value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return np.where(codes >= 128, -value, value).astype(np.float32)


_E4M3_VALUES = _e4m3_value_table()


def e4m3_to_float32(codes: Any) -> Any:
    """E4M3FN codes (uint8) -> float32."""
    return _E4M3_VALUES[np.asarray(codes)]


def float32_to_bfloat16(values: Any) -> Any:
    """float32 -> bfloat16 bits (uint16) as cvt.rn.bf16.f32: to nearest even, every NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(nan, np.uint32(0x7FFF), rounded).astype(np.uint16)


def bfloat16_to_float32(bits: Any) -> Any:
    """bfloat16 bits (uint16) -> float32, exact, subnormals and NaN payloads included."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def fused_multiply_add(x: Any, y: Any, z: Any) -> Any:
    """fl(x * y + z) in float32 with one rounding.

    The product is exact in float64. The float64 sum is rounded to odd (its lost part is recovered by
    two-sum), and rounding such a sum once more to float32 gives the single rounding.
    """
    x, y, z = np.broadcast_arrays(x, y, z)
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y.astype(np.float64)
        addend = z.astype(np.float64)
        total = product + addend
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        bits = np.ascontiguousarray(total).view(np.int64)
        inexact = np.isfinite(total) & (lost != 0) & ((bits & 1) == 0)
        away = (lost > 0) == (total > 0)
        odd = np.where(inexact, bits + np.where(away, 1, -1), bits).view(np.float64)
        return odd.astype(np.float32)


_CONVERSIONS: dict[tuple[Any, Any], Callable[[Any], Any]] = {
    (tl.float32, tl.float8e4nv): float32_to_e4m3,
    (tl.float8e4nv, tl.float32): e4m3_to_float32,
    (tl.float32, tl.bfloat16): float32_to_bfloat16,
    (tl.bfloat16, tl.float32): bfloat16_to_float32,
}


# ---------------------------------------------------------------------------------------------------
# Canaries and repairs


def _convert(values: Any, source: Any, target: Any) -> Any:
    """What the running Triton's interpreter makes of a conversion, as raw storage."""
    data = np.asarray(values)
    with np.errstate(all="ignore"):
        rounding = triton_interpreter._ir.ROUNDING_MODE.RTNE
        builder = triton_interpreter.interpreter_builder
        if target == tl.bfloat16:
            return builder.create_fp_trunc(TensorHandle(data, source), target).data
        if tl.float8e4nv in (source, target):
            return builder.create_fp_to_fp(TensorHandle(data, source), target, rounding).data
        return builder.create_fp_ext(TensorHandle(data, source), target).data


def _conversion_is_right(source: Any, target: Any, inputs: Any) -> bool:
    expected = _CONVERSIONS[source, target](inputs)
    try:
        actual = np.asarray(_convert(inputs, source, target))
    except Exception:  # an interpreter that cannot convert at all needs the repair as well
        return False
    return actual.shape == expected.shape and actual.tobytes() == np.ascontiguousarray(expected).tobytes()


_CANARY_FLOATS = np.array(
    [
        *(
            126.2386,
            31.6051,
            1.97,
            1.0625,
            1.1875,
            1000.0,
            448.0,
            464.0,
            465.0,
            np.inf,
            -np.inf,
            np.nan,
            0.0,
            -0.0,
        ),
        *(2.0**-10, 1.5 * 2.0**-10, -1e-9, 3.0 * 2.0**-10, 0.0146, 2.0**-6, 1.00390625, 1.01171875),
    ],
    dtype=np.float32,
)


def _fma_is_right() -> bool:
    x = np.array([1.0000001, 0.18033688, 3.0], dtype=np.float32)
    y = np.array([1.0000001, 1134139801600.0, 1.0], dtype=np.float32)
    z = np.array([-1.0000002, -204527219712.0, 2.0**-30], dtype=np.float32)
    handles = [TensorHandle(a, tl.float32) for a in (x, y, z)]
    actual = triton_interpreter.interpreter_builder.create_fma(*handles).data
    return bool(actual.tobytes() == fused_multiply_add(x, y, z).tobytes())


@dataclass(frozen=True)
class Canary:
    """One operation of the interpreter: what is checked, and the check on the running Triton."""

    name: str
    is_right: Callable[[], bool]


CANARIES = (
    Canary(
        "float32 to float8e4nv",
        functools.partial(_conversion_is_right, tl.float32, tl.float8e4nv, _CANARY_FLOATS),
    ),
    Canary(
        "float8e4nv to float32",
        functools.partial(
            _conversion_is_right,
            tl.float8e4nv,
            tl.float32,
            np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]),
        ),
    ),
    Canary(
        "float32 to bfloat16",
        functools.partial(_conversion_is_right, tl.float32, tl.bfloat16, _CANARY_FLOATS),
    ),
    Canary(
        "bfloat16 to float32",
        functools.partial(
            _conversion_is_right,
            tl.bfloat16,
            tl.float32,
            np.array([0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x3F80, 0x7F80, 0xFF80], np.uint16),
        ),
    ),
    Canary("float32 fma", _fma_is_right),
)


@functools.cache
def failing_canaries() -> frozenset[str]:
    """Names of the operations that the running Triton's interpreter gets wrong."""
    return frozenset(canary.name for canary in CANARIES if not canary.is_right())


def _repaired_conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    names = {(tl.float32, tl.float8e4nv), (tl.float8e4nv, tl.float32)}
    names |= {(tl.float32, tl.bfloat16), (tl.bfloat16, tl.float32)}
    wrong = {pair for pair in names if f"{_NAMES[pair[0]]} to {_NAMES[pair[1]]}" in failing_canaries()}

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) in wrong:
            return _CONVERSIONS[source, target](data)
        return original(data, source, target, rounding_mode)

    return convert


_NAMES = {tl.float32: "float32", tl.float8e4nv: "float8e4nv", tl.bfloat16: "bfloat16"}


def _exact_fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)


def _reduction_by_registry(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, inputs: Any) -> Any:
        reduction = _REDUCTIONS.get(self.combine_fn.fn)
        if reduction is None:
            return original(self, inputs)
        data = inputs[0].handle.data
        return self.to_tensor(reduction(data, axis=self.axis, keepdims=self.keep_dims), inputs[0].dtype)

    return apply_impl


def _interpret_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return _interpreted(function.fn).rewrite()(*args, **kwargs)


@functools.cache
def _interpreted(function: Callable[..., Any]) -> InterpretedFunction:
    return InterpretedFunction(function)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    builder = triton_interpreter.InterpreterBuilder
    reduce_ops = triton_interpreter.ReduceOps
    failing = failing_canaries()
    changes: list[tuple[Any, str, Any]] = [
        (JITFunction, "__call__", _interpret_call),
        (reduce_ops, "apply_impl", _reduction_by_registry(reduce_ops.apply_impl)),
        (triton_interpreter, "_convert_float", _repaired_conversion(triton_interpreter._convert_float)),
    ]
    if "float32 fma" in failing:
        changes.append((builder, "create_fma", _exact_fma))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    # Triton's standard library (tl.max, tl.sum) reaches its builtins through triton.language.core.
    scope = triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
        scope.restore()


def interpret(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Run `kernel` (a jitted function) on CPU tensors, one program after another."""
    with _LOCK, _patched(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        function = _interpreted(kernel.fn)
        function[grid](*args, **constants)
