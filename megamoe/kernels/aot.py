"""Compiles recorded launches for a GPU that need not be there, and reads facts out of the result.

    with record() as launches:
        prepare_megamoe_inputs(...)          # CPU tensors of the shapes in question
    facts = describe(compile_launch(launches[0], 90))

The specialization is the one that the just-in-time compiler would choose for these arguments: integers
equal to 1 are constants, pointers and integers divisible by 16 are marked so.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megamoe.kernels.launch import Launch

TARGETS = {"sm_90a": 90, "sm_100a": 100}

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target: PTX text, SASS text, the resource-usage line of the cubin, and the shared
    memory that a launch asks for (dynamic: the cubin does not tell)."""

    target: str
    ptx: str
    sass: str
    usage: str
    shared_bytes: int


@dataclass(frozen=True)
class Facts:
    """What the compiler made of a kernel.

    registers a thread; stack and spill bytes (local memory); shared_bytes; SASS instructions by opcode;
    global accesses as (opcode, bytes a thread) -> count.
    """

    target: str
    registers: int
    stack_bytes: int
    local_accesses: int
    shared_bytes: int
    instructions: int
    opcodes: dict[str, int]
    loads: dict[int, int]
    stores: dict[int, int]


def _specialize(
    arg: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    if isinstance(arg, tuple):
        return tuple(_specialize(item, (*path, i), constants, attributes) for i, item in enumerate(arg))
    if arg is None or arg is True or arg is False or (isinstance(arg, int) and arg == 1):
        constants[path] = arg
        return "constexpr"
    if isinstance(arg, torch.Tensor):
        if arg.data_ptr() % 16 == 0:
            attributes[path] = _DIVISIBLE
        return _POINTERS[arg.dtype]
    if isinstance(arg, int):
        if arg % 16 == 0:
            attributes[path] = _DIVISIBLE
        return "i32" if -(2**31) <= arg < 2**31 else "i64"
    if isinstance(arg, float):
        return "fp32"
    raise TypeError(f"cannot specialize {type(arg).__name__}")


def source(launch: Launch) -> ASTSource:
    """The compiler's input for a recorded launch."""
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    signature: dict[str, Any] = {}
    names = launch.kernel.arg_names
    for position, arg in enumerate(launch.args):
        if launch.kernel.params[position].do_not_specialize:
            signature[names[position]] = "i32"
        else:
            signature[names[position]] = _specialize(arg, (position,), constants, attributes)
    for name, value in launch.constants.items():
        signature[name] = "constexpr"
        constants[(names.index(name),)] = value
    return ASTSource(launch.kernel, signature, constants, attributes)


def _tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_launch(launch: Launch, capability: int, **options: Any) -> Compiled:
    """Compile for compute capability 90 (sm_90a) or 100 (sm_100a); needs no GPU and no driver."""
    compiled = triton.compile(
        source(launch),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "enable_fp_fusion": False, **options},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        sass = _run(str(_tool("nvdisasm")), "-c", str(cubin))
        usage = _run(str(_tool("cuobjdump")), "--dump-resource-usage", str(cubin))
    return Compiled(f"sm_{capability}a", compiled.asm["ptx"], sass, usage, compiled.metadata.shared)


_INSTRUCTION = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\s", re.MULTILINE)


def _access_bytes(opcode: str) -> int:
    parts = opcode.split(".")
    for part, size in (
        ("128", 16),
        ("64", 8),
        ("U16", 2),
        ("S16", 2),
        ("16", 2),
        ("U8", 1),
        ("S8", 1),
        ("8", 1),
    ):
        if part in parts:
            return size
    return 4


def describe(compiled: Compiled) -> Facts:
    """Registers, local and shared memory, instruction counts, and bytes per global access."""
    opcodes = [
        op
        for op in _INSTRUCTION.findall(compiled.sass)
        if not op.startswith(("NOP", "BRA", "EXIT")) or op == "EXIT"
    ]
    usage = dict(re.findall(r"(REG|STACK):(\d+)", compiled.usage))
    loads: Counter[int] = Counter(_access_bytes(op) for op in opcodes if op.startswith("LDG"))
    stores: Counter[int] = Counter(_access_bytes(op) for op in opcodes if op.startswith("STG"))
    return Facts(
        target=compiled.target,
        registers=int(usage["REG"]),
        stack_bytes=int(usage["STACK"]),
        local_accesses=sum(op.startswith(("LDL", "STL")) for op in opcodes),
        shared_bytes=compiled.shared_bytes,
        instructions=len(opcodes),
        opcodes=dict(Counter(op.split(".")[0] for op in opcodes)),
        loads=dict(loads),
        stores=dict(stores),
    )
