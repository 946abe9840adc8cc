"""The MegaMoE kernels as data: one row a family, every point where their arithmetic differs is a field.

Sources: NUMERICS 8 (SM100: DeepGEMM as bundled with vLLM 0.33), 8.8 and 17 (SM90: sgl-deep-gemm 0.1.5,
measured on an H200). Rows of ``arch`` "sm100" rest on reading and on the literature's tensor-core models,
the SM90 row on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["FAMILIES", "MegaMoeFamily", "get_family"]

Requantization = Literal["fp32_g64", "ue8m0_g32", "bf16", "ue4m3_g16_scaled", "ue4m3_g16_divided"]


@dataclass(frozen=True)
class MegaMoeFamily:
    """Arithmetic of one kernel.

    mma: row of reference.tensor_core.FAMILIES. act_format, weight_format: operand codes; act_group: columns
    a scale of x covers; hidden_group: the same for l2_acts. scale_format: codes of the block scales that
    the instruction reads (None: none, or float32 scales that the kernel multiplies in). page_rows: scale
    rows a page is aligned to, utccp: scale rows of a page are permuted (NUMERICS 4). activation_recipe: row
    of reference.activation.ACTIVATION_RECIPES (SM100 rounds gate, up and the clamp to bf16).
    requantization: how the activation's result becomes l2_acts. weight_at: where the routing weight enters:
    the activation's result, the L2 output (a second bf16 rounding), or the combine. norm_weight_at: the
    same with a post-expert norm (always "combine"; None: the kernel has no norm). shared_first: where the
    shared expert's slot is added; combine_fma: acc = fma(o, w, acc) instead of acc + o. activations: names
    it accepts. shared: families a shared expert may run in.
    """

    name: str
    arch: Literal["sm90", "sm100"]
    mma_type: str
    mma: str
    act_format: str
    weight_format: str
    act_group: int | None
    hidden_group: int | None
    scale_format: str | None
    requantization: Requantization
    weight_at: Literal["activation", "output", "combine"]
    has_norm: bool = False
    activation_recipe: str = "sm100"
    shared_first: bool = True
    combine_fma: bool = False
    utccp: bool = True
    activations: tuple[str, ...] = ("swiglu",)
    shared: tuple[str, ...] = ()
    k_multiple: int = 128
    source: str = ""


_FP8 = MegaMoeFamily(
    "sm100_fp8xfp8",
    "sm100",
    "fp8xfp8",
    mma="blackwell_mxf8f6f4",
    act_format="e4m3",
    weight_format="e4m3",
    act_group=32,
    hidden_group=32,
    scale_format="ue8m0",
    requantization="ue8m0_g32",
    weight_at="activation",
    activations=("swiglu", "swiglustep", "situ"),
    shared=("sm100_fp8xfp8",),
    source="NUMERICS 8.2 to 8.5",
)

_FP4 = MegaMoeFamily(
    "sm100_fp4xfp4",
    "sm100",
    "fp4xfp4",
    mma="blackwell_mxf4nvf4",
    act_format="e2m1",
    weight_format="e2m1",
    act_group=16,
    hidden_group=16,
    scale_format="ue4m3",
    requantization="ue4m3_g16_scaled",
    weight_at="output",
    has_norm=True,
    shared_first=False,
    shared=("sm100_bf16",),
    k_multiple=256,
    source="NUMERICS 8.2 to 8.6",
)

_ROWS = (
    MegaMoeFamily(
        "sm90_fp8xfp8",
        "sm90",
        "fp8xfp8",
        mma="hopper_fp8",
        act_format="e4m3",
        weight_format="e4m3",
        act_group=128,
        hidden_group=64,
        scale_format=None,
        requantization="fp32_g64",
        weight_at="activation",
        activation_recipe="sm90",
        utccp=False,
        source="NUMERICS 8.8, 17",
    ),
    _FP8,
    replace(_FP8, name="sm100_fp8xfp4", mma_type="fp8xfp4", weight_format="e2m1"),
    MegaMoeFamily(
        "sm100_bf16",
        "sm100",
        "bf16xbf16",
        mma="blackwell_bf16",
        act_format="bf16",
        weight_format="bf16",
        act_group=None,
        hidden_group=None,
        scale_format=None,
        requantization="bf16",
        weight_at="activation",
        has_norm=True,
        utccp=False,
        activations=("swiglu", "swiglustep"),
        shared=("sm100_bf16",),
        source="NUMERICS 8.2 to 8.6",
    ),
    _FP4,
    replace(
        _FP4,
        name="sm100_nvfp4",
        mma_type="nvfp4",
        requantization="ue4m3_g16_divided",
        weight_at="combine",
        has_norm=False,
        combine_fma=True,
        activations=("swiglu", "swiglustep"),
        shared=("sm100_fp8xfp8", "sm100_bf16"),
        k_multiple=128,
        source="NUMERICS 8.2 to 8.5",
    ),
)

FAMILIES: dict[str, MegaMoeFamily] = {row.name: row for row in _ROWS}


def get_family(family: MegaMoeFamily | str) -> MegaMoeFamily:
    """A family by name; a row is passed through. ValueError for an unknown name."""
    if isinstance(family, MegaMoeFamily):
        return family
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {sorted(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
