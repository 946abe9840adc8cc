"""The staging kernels compiled for sm_90a and sm_100a without the hardware, beside docs/performance.md."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megamoe import kernels
from megamoe.kernels import aot

ROOT = Path(__file__).resolve().parents[2]
REGENERATE = "python benchmarks/aot_table.py --write"


# A kernel that is decorated under TRITON_INTERPRET cannot be compiled any more: decorate them all now.
with pytest.MonkeyPatch.context() as patch:
    patch.delenv("TRITON_INTERPRET", raising=False)
    patch.syspath_prepend(ROOT / "benchmarks")
    script: Any = importlib.import_module("aot_table")
    for info in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{info.name}")
DOCUMENTED = script.documented((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
EACH = [
    pytest.param(row, target, id=f"{row.name.replace(', ', '-').replace(' ', '_')}-{row.tokens}-{target}")
    for row in script.ROWS
    for target in aot.TARGETS
]


def compiled_with(document: str) -> str:
    """The Triton version that the table names."""
    words = document.split()
    return words[1].rstrip(",") if words[:1] == ["Triton"] else ""


@pytest.mark.parametrize(("row", "target"), EACH)
def test_kernel_is_what_the_document_says(row: object, target: str) -> None:
    """With the compiler that the table names, its line is compared; the rest holds with every compiler."""
    launch, facts = script.facts(row, target)
    assert facts.target == target
    assert facts.stack_bytes <= 16, "at most four registers a thread spilled"
    assert facts.local_accesses <= 8
    assert facts.registers * launch.num_warps * 32 <= 65536, "one program does not fit an SM"
    assert facts.shared_bytes <= 48 << 10
    assert max(facts.loads) >= 8, "hidden states are read in wide accesses"
    assert max(facts.stores) >= 4
    assert all(size <= 16 for size in (*facts.loads, *facts.stores))
    if compiled_with(DOCUMENTED) == triton.__version__:
        line = script.cells(row, launch, facts)
        assert line in DOCUMENTED.splitlines(), f"not in docs/performance.md ({REGENERATE}): {line}"


def test_document_has_every_kernel_and_no_other() -> None:
    lines = [line for line in DOCUMENTED.splitlines() if line.startswith("| ")][1:]
    keys = [tuple(cell.strip() for cell in line.strip("|").split("|")[:3]) for line in lines]
    expected = [(row.name, str(row.tokens), target) for row in script.ROWS for target in aot.TARGETS]
    assert keys == expected, REGENERATE
    assert compiled_with(DOCUMENTED), "the table names its compiler"


def test_facts_see_what_they_claim_to_see() -> None:
    """Known accesses: 16 bytes where the pointer allows it, else 2; and dynamic shared memory."""
    from megamoe.kernels.launch import Launch

    aligned = torch.empty(4096, dtype=torch.bfloat16)
    unaligned = torch.empty(4097, dtype=torch.bfloat16)[1:]
    found = {}
    for name, tensor in {"aligned": aligned, "unaligned": unaligned}.items():
        launch = Launch(_copy, 1, (tensor, torch.empty_like(aligned)), {"SIZE": 1024}, 4)
        found[name] = aot.describe(aot.compile_launch(launch, 90))
    assert found["aligned"].loads == {16: 1}
    assert set(found["unaligned"].loads) == {2}
    assert found["aligned"].stores == {16: 1}
    assert found["aligned"].shared_bytes == 0
    reduction = Launch(_sum, 1, (aligned, torch.empty(1, dtype=torch.float32)), {"SIZE": 1024}, 4)
    facts = aot.describe(aot.compile_launch(reduction, 100))
    assert facts.target == "sm_100a"
    assert facts.shared_bytes >= 4 * 4, "four warps exchange their sums"


@triton.jit
def _copy(source, target, SIZE: triton.language.constexpr) -> None:
    offsets = triton.language.arange(0, SIZE)
    triton.language.store(target + offsets, triton.language.load(source + offsets))


@triton.jit
def _sum(source, target, SIZE: triton.language.constexpr) -> None:
    values = triton.language.load(source + triton.language.arange(0, SIZE)).to(triton.language.float32)
    triton.language.store(target, triton.language.sum(values))
