"""Layout functions as the rows call them: DeepGEMM's with the signatures of the references, and transformed
weights by name, since what comes back depends on what went in.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack


def _torch_tensor(value: Any) -> Tensor:
    """Builds on tvm-ffi return their own tensors."""
    return value if isinstance(value, Tensor) else from_dlpack(value)


def _library() -> Any:
    return importlib.import_module("deep_gemm")


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    return _torch_tensor(_library().get_mn_major_tma_aligned_tensor(sf))


def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    return _torch_tensor(_library().get_mn_major_tma_aligned_packed_ue8m0_tensor(sf))


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    *,
    arch: int = 100,
) -> Tensor:
    """``arch`` is what the library finds on the device; the row runs only cases of that architecture."""
    transformed = _library().transform_sf_into_required_layout(
        sf, mn, k, tuple(recipe), num_groups, is_sfa, disable_ue8m0_cast
    )
    return _torch_tensor(transformed)


def expected_transform_weights_for_mega_moe(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> dict[str, Tensor]:
    """The reference, its results by name."""
    from reference.weights import transform_weights_for_mega_moe

    return _by_name(*transform_weights_for_mega_moe(l1_weights, l2_weights, activation, mma_type))


def transform_weights_for_mega_moe(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> dict[str, Tensor]:
    """The library's, its results by name. It asks for no mma_type: the order of rows is that of fp8xfp4."""
    return _by_name(*_library().transform_weights_for_mega_moe(l1_weights, l2_weights, activation))


def triton_transform_weights_for_mega_moe(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> dict[str, Tensor]:
    """Ours, its results by name."""
    from megamoe.layouts import transform_weights_for_mega_moe as transform

    return _by_name(*transform(l1_weights, l2_weights, activation, mma_type))


def _by_name(l1: Any, l2: Any) -> dict[str, Tensor]:
    if isinstance(l1, Tensor):
        return {"l1_out": l1, "l2_out": l2}
    return {"l1_w_out": l1[0], "l1_sf_out": l1[1], "l2_w_out": l2[0], "l2_sf_out": l2[1]}
