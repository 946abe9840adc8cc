"""MuseSparkMegaMoEExperts: one-level NVFP4 or bf16 experts whose outputs are normalized before they are
summed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

from megamoe.backends.base import DeepGemmMegaMoEBackend
from megamoe.experts.buffers import cached_buffers
from megamoe.experts.module import MegaMoEExperts


def folded_gamma(norm: Any) -> torch.Tensor:
    """The norm's gain as the launch wants it: float32 [H], contiguous, its centre added if the gain is
    zero-centred.

    ``norm`` has ``weight``, and with ``zero_centered_gamma`` true also ``gain_center``. The sum is a float32
    addition of the widened weight.
    """
    gamma: torch.Tensor = norm.weight.detach().to(torch.float32)
    if getattr(norm, "zero_centered_gamma", False):
        gamma = gamma + norm.gain_center
    return gamma.contiguous()


class MuseSparkMegaMoEExperts(MegaMoEExperts):
    """nvfp4 (fp4_fp4_mega_moe) or bf16 experts; both sizes must be multiples of 256.

    post_expert_norm: a norm applied to each expert's output (weight [H], zero_centered_gamma, gain_center),
    with norm_eps; None for none. Layers of both kinds share one buffer: bf16 owns it, nvfp4 views it.
    """

    default_quant: ClassVar[str] = "nvfp4"
    mma_types: ClassVar[dict[str, str]] = {"nvfp4": "fp4xfp4", "bf16": "bf16xbf16"}
    size_multiple: ClassVar[int] = 256
    read_by_launch: ClassVar[dict[str, tuple[str, ...]]] = {
        "nvfp4": ("w13_weight_scale_2", "w2_weight_scale_2", "w2_input_scale")
    }

    def __init__(
        self, *, post_expert_norm: Any | None = None, norm_eps: float = 1e-6, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        if post_expert_norm is not None and tuple(post_expert_norm.weight.shape) != (self.hidden_size,):
            raise ValueError(
                f"{self.prefix}: post_expert_norm.weight must have shape ({self.hidden_size},), "
                f"got {tuple(post_expert_norm.weight.shape)}"
            )
        # Kept in a tuple: the norm belongs to the model, and must not be registered here a second time.
        self._norm = (post_expert_norm,)
        self.norm_eps = norm_eps

    def finalize_weights(self) -> None:
        """As MegaMoEExperts does, and the norm's gain is folded into the launch's gamma."""
        if self.is_finalized:
            return
        super().finalize_weights()
        norm = self._norm[0]
        gamma = None if norm is None else folded_gamma(norm).to(self.w2_weight.device)
        self.register_buffer("gamma", gamma, persistent=False)

    def get_symm_buffer(self) -> Any:
        """This layer's view of the buffer pair (bf16, nvfp4): one storage, so such layers run one after the
        other.
        """
        backend = self.resolved_backend()
        sizes = (
            "muse_spark",
            backend.family,
            self.num_experts,
            self.num_max_tokens_per_rank,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
        )
        pair = cached_buffers(self.group, self.w2_weight.device, sizes, partial(self._create_pair, backend))
        return pair[1 if self.quant == "nvfp4" else 0]

    def _create_pair(self, backend: DeepGemmMegaMoEBackend) -> tuple[Any, Any]:
        """(bf16 buffer, nvfp4 view of it). A backend that has only one of the two types gets a buffer of its
        own.
        """
        owning, viewing = (
            backend if backend.mma_type == mma_type else backend.sibling(mma_type)
            for mma_type in (self.mma_types["bf16"], self.mma_types["nvfp4"])
        )
        owner = None if owning is None else self._create_buffer(owning)
        return owner, None if viewing is None else self._create_buffer(viewing, base=owner)

    def staging_arguments(self) -> dict[str, Any]:
        return {}

    def launch_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.gamma is not None:
            arguments.update(post_expert_norm_gamma=self.gamma, post_expert_norm_eps=self.norm_eps)
        if self.quant == "nvfp4":
            arguments.update(
                l1_alphas=self.w13_weight_scale_2.data,
                l2_alphas=self.w2_weight_scale_2.data,
                a2_scales=self.w2_input_scale.data,
            )
        return arguments
