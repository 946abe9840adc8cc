"""The reference as a backend: every launch on any device, with the bytes that the hardware would give.

It is the production backend of the same MMA type with another library behind it: where that calls deep_gemm,
this calls the function of the same name in ``reference``. So the loading code, the forwarding rules and the
refusals are the production ones, and only the kernels are emulated.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch

from megamoe.backends.base import DeepGemmMegaMoEBackend
from megamoe.backends.deep_gemm_bf16 import DeepGemmBf16MegaMoEBackend
from megamoe.backends.deep_gemm_nvfp4 import DeepGemmFp4MegaMoEBackend, DeepGemmNvfp4MegaMoEBackend
from megamoe.backends.deep_gemm_sm90 import DeepGemmSm90MegaMoEBackend
from megamoe.backends.deep_gemm_sm100 import DeepGemmSm100Fp8MegaMoEBackend, DeepGemmSm100MegaMoEBackend


class ReferenceLibrary:
    """The reference under deep_gemm's names.

    Most names are looked up in the modules of ``reference``. Where deep_gemm has a buffer class of its own
    for a kind, the reference has one class that takes the kind as an argument: those names are spelled out
    here.
    """

    MODULES = ("weights", "mega_moe.twins", "symm_buffer", "heuristics", "gate", "pre_dispatch")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for module in self.MODULES:
                if find_spec(f"reference.{module}") is None:
                    continue
                found = getattr(importlib.import_module(f"reference.{module}"), name, None)
                if found is not None:
                    return found
        raise AttributeError(f"the reference has no {name}")

    def NVFP4SymmBuffer(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        base: Any | None = None,
        shared_dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        device: torch.device | str = "cpu",
    ) -> Any:
        """The two-level NVFP4 buffer, with MXFP8 or bf16 shared experts."""
        if shared_dtype not in (torch.float8_e4m3fn, torch.bfloat16):
            raise ValueError(f"shared_dtype must be float8_e4m3fn or bfloat16, got {shared_dtype}")
        return self.SymmBuffer(
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            num_shared_experts,
            "nvfp4",
            base=base,
            shared_bf16=shared_dtype == torch.bfloat16,
            device=device,
        )

    def get_symm_buffer_for_sm90_mega_moe(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        activation: str = "swiglu",
        *,
        device: torch.device | str = "cpu",
    ) -> Any:
        """The SM90 buffer."""
        return self.SymmBuffer(
            group,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            mma_type="sm90",
            activation=activation,
            device=device,
        )


class EmulatedMegaMoEBackend(DeepGemmMegaMoEBackend):
    """``EmulatedMegaMoEBackend(mma_type)``: the reference forward of that MMA type, on the device of its
    tensors.

    MMA types: fp8xfp4, nvfp4, fp4xfp4 and bf16xbf16 (SM100), fp8xfp8 (SM90's kernel, or with
    architecture="SM100" the MXFP8 one). ValueError for another one. Sizes are checked as the real backend
    checks them, so that what runs here can run there.
    """

    name = "emulated"
    family = "emulated"

    def __new__(cls, mma_type: str = "fp8xfp4", architecture: str | None = None) -> EmulatedMegaMoEBackend:
        if cls is not EmulatedMegaMoEBackend:
            return object.__new__(cls)
        for concrete in _CONCRETE:
            if concrete.mma_type == mma_type and architecture in (None, concrete.architecture):
                return object.__new__(concrete)
        known = ", ".join(f"{concrete.mma_type} ({concrete.architecture})" for concrete in _CONCRETE)
        raise ValueError(f"mma_type must be one of {known}, got {mma_type!r} for {architecture or 'any'}")

    def __init__(self, mma_type: str = "fp8xfp4", architecture: str | None = None) -> None:
        super().__init__(ReferenceLibrary())

    @property
    def staging(self) -> Any:
        return importlib.import_module("reference.staging")

    @property
    def eplb(self) -> Any:
        return importlib.import_module("reference.eplb")

    def sibling(self, mma_type: str) -> EmulatedMegaMoEBackend:
        return EmulatedMegaMoEBackend(mma_type)

    @classmethod
    def supports_device(cls, device: torch.device) -> bool:
        """True: the reference runs wherever torch does."""
        return True


# One concrete class a real backend: what the emulated backend overrides comes first, the real one's steps
# follow. Where two have the same MMA type, the first is meant unless the architecture is given.
_CONCRETE: tuple[type[EmulatedMegaMoEBackend], ...] = tuple(
    type(f"Emulated{real.__name__}", (EmulatedMegaMoEBackend, real), {"__doc__": real.__doc__})
    for real in (
        DeepGemmSm100MegaMoEBackend,
        DeepGemmNvfp4MegaMoEBackend,
        DeepGemmFp4MegaMoEBackend,
        DeepGemmBf16MegaMoEBackend,
        DeepGemmSm90MegaMoEBackend,
        DeepGemmSm100Fp8MegaMoEBackend,
    )
)
