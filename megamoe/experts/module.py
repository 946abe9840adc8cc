"""MegaMoEExperts: checkpoint in, kernel layout, launches, through any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from megamoe.backends.base import DeepGemmMegaMoEBackend
from megamoe.experts.buffers import cached_buffers, meet_before_first_launch
from megamoe.experts.finalize import prove_dropped, transform_in_place
from megamoe.experts.migration import permute_rows
from megamoe.experts.parameters import ExpertParameters


class MegaMoEExperts(ExpertParameters):
    """The local experts of one MoE layer.

    num_experts: experts of all ranks, in launch order (with EPLB the physical ones); this rank has
        num_local_experts of them from experts_start_idx on.
    num_logical_experts: those of the checkpoint, if they are fewer: physical expert p then starts as logical
        expert p % num_logical_experts.
    num_max_tokens_per_rank: what the symmetric buffer has room for.
    quant: mxfp4 (fp8xfp4), mxfp8 (fp8xfp8 on SM100), fp8_block (fp8xfp8 on SM90), nvfp4 (two-level) or bf16.
    backend: any DeepGemmMegaMoEBackend; without one, finalize_weights selects the device's.
    group: a torch.distributed group, or None for a single rank.
    registry: where layers enter themselves by prefix, so that a second layer of the same name is noticed.

    Parameters are those of the checkpoint, zero until loaded, never trained. finalize_weights puts them into
    kernel layout; only then can the module run. ValueError, naming the layer, for sizes that do not fit.
    """

    # Two kernels are called fp8xfp8, and their weights differ.
    architectures: ClassVar[dict[str, str]] = {"mxfp8": "SM100", "fp8_block": "SM90"}

    # Per-expert tensors besides the weights that launch or staging read: they migrate with their expert.
    read_by_launch: ClassVar[dict[str, tuple[str, ...]]] = {
        "nvfp4": ("w13_weight_scale_2", "w2_weight_scale_2", "l1_alpha", "l2_alpha")
    }

    l1_alpha: torch.Tensor
    l2_alpha: torch.Tensor

    # -- kernel layout -----------------------------------------------------------------------------

    def resolved_backend(self) -> DeepGemmMegaMoEBackend:
        """The backend given, or the one selected for the weights' device."""
        if self.backend is None:
            from megamoe.backends.selection import get_deep_gemm_mega_moe_backend

            self.backend = get_deep_gemm_mega_moe_backend(
                self.w2_weight.device, self.hidden_size, self.intermediate_size, mma_type=self.mma_type
            )
        wanted = self.architectures.get(self.quant, self.backend.architecture)
        if self.backend.architecture != wanted:
            raise NotImplementedError(
                f"{self.prefix}: {self.quant} weights are those of the {wanted} kernel, "
                f"and the {self.backend.name} backend is for {self.backend.architecture}"
            )
        return self.backend

    def finalize_weights(self) -> None:
        """Put the weights into kernel layout. Calling it again does nothing.

        w2_weight stays, as the L2 weight itself. w13_weight's storage becomes the L1 weight: rows are
        rearranged in place, a few experts at a time. What the launch no longer reads is set to None, after a
        proof that no kept tensor lives in its storage (AssertionError otherwise).
        """
        if self.is_finalized:
            return
        self.check_before_finalize()
        scales = {name: getattr(self, name, None) for name in ("w13_weight_scale", "w2_weight_scale")}
        l1, l2 = transform_in_place(
            self.resolved_backend(),
            w13_weight=self.w13_weight.data,
            w13_weight_scale=None if scales["w13_weight_scale"] is None else scales["w13_weight_scale"].data,
            w2_weight=self.w2_weight.data,
            w2_weight_scale=None if scales["w2_weight_scale"] is None else scales["w2_weight_scale"].data,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=None if self.activation.name == "swiglu" else self.activation.name,
        )
        dropped = {name: scale for name, scale in scales.items() if scale is not None}
        self.make_alphas()
        prove_dropped(dropped, self._kept(l1, l2))
        for name in ("w13_weight", *dropped):
            setattr(self, name, None)
        self._l1_weights, self._l2_weights = l1, l2

    def check_before_finalize(self) -> None:
        """ValueError if what was loaded cannot be launched."""
        if self.mma_type != "nvfp4":
            return
        gate, up = self.w13_weight_scale_2.unbind(1)
        # One alpha serves gate and up in this kernel.
        wrong = (gate - up).abs() > 1e-5 * torch.maximum(gate.abs(), up.abs())
        if bool(wrong.any()):
            slot = int(wrong.nonzero()[0])
            raise ValueError(
                f"{self.prefix}: w13_weight_scale_2: gate and up of expert {self.logical_experts()[slot]} "
                f"must have one scale (within 1e-5), got {float(gate[slot])!r} and {float(up[slot])!r}"
            )

    def make_alphas(self) -> None:
        """nvfp4: the launch's own per-expert factors, float32 [L]. Staging rewrites l2_alpha before every
        launch.
        """
        if self.mma_type == "nvfp4":
            scale = torch.tensor(self.l2_activation_scale(), device=self.w2_weight_scale_2.device)
            self.register_buffer(
                "l1_alpha", self.w13_weight_scale_2.data[:, 0].contiguous(), persistent=False
            )
            self.register_buffer("l2_alpha", self.w2_weight_scale_2.data * scale, persistent=False)

    def _kept(self, l1: Any, l2: Any) -> dict[str, torch.Tensor]:
        kept: dict[str, torch.Tensor] = {"w2_weight": self.w2_weight}
        for name, pair in (("l1", l1), ("l2", l2)):
            weight, scale = pair if isinstance(pair, tuple) else (pair, None)
            kept[f"{name} weight"] = weight
            if scale is not None:
                kept[f"{name} scale"] = scale
        kept.update({name: getattr(self, name) for name in self.read_by_launch.get(self.quant, ())})
        return kept

    # -- expert migration (EPLB) -------------------------------------------------------------------

    def expert_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that belongs to an expert, [num_local_experts, ...] each, without aliases.

        Row s of each is all that slot s holds: moving these rows moves the expert, before finalize_weights as
        after.
        """
        if not self.is_finalized:
            return {name: getattr(self, name).data for name in self._formats}
        kept = self._kept(self._l1_weights, self._l2_weights)
        del kept["w2_weight"]  # the L2 weight is the same storage
        return {name: tensor.data for name, tensor in kept.items()}

    def permute_experts(self, order: Sequence[int]) -> None:
        """Migrate within this rank: slot s takes what slot order[s] held. Entries may repeat (replicas).

        Works on checkpoint and on kernel layout with the same result, one expert's copy of extra memory a
        tensor.
        """
        if len(order) != self.num_local_experts or any(not 0 <= s < self.num_local_experts for s in order):
            raise ValueError(
                f"{self.prefix}: order must name {self.num_local_experts} local slots, got {list(order)}"
            )
        for tensor in self.expert_tensors().values():
            permute_rows(tensor, order)

    # -- running -----------------------------------------------------------------------------------

    def get_symm_buffer(self) -> Any:
        """The symmetric buffer of this layer's launches, shared with every layer of the same
        configuration.
        """
        backend = self.resolved_backend()
        sizes = (
            backend.family,
            self.mma_type,
            self.num_experts,
            self.num_max_tokens_per_rank,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
        )
        return cached_buffers(self.group, self.w2_weight.device, sizes, lambda: self._create_buffer(backend))

    def _create_buffer(self, backend: DeepGemmMegaMoEBackend, base: Any | None = None) -> Any:
        return backend.get_symm_buffer(
            self.group,
            num_experts=self.num_experts,
            num_max_tokens_per_rank=self.num_max_tokens_per_rank,
            num_topk=self.top_k,
            hidden=self.hidden_size,
            intermediate_hidden=self.intermediate_size,
            base=base,
            device=self.w2_weight.device,
        )

    def input_buffer(self, num_tokens: int) -> Any:
        """The symmetric buffer, for a producer that stages ``num_tokens`` rows itself and calls
        forward_prepared.

        ValueError for more tokens than the buffer was asked to hold, AssertionError before finalize_weights.
        """
        if num_tokens > self.num_max_tokens_per_rank:
            raise ValueError(
                f"{self.prefix}: num_tokens must be at most {self.num_max_tokens_per_rank}, got {num_tokens}"
            )
        if not self.is_finalized:
            raise AssertionError(f"{self.prefix}: finalize_weights must run before the experts do")
        return self.get_symm_buffer()

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [M, H], routing [M, K] (ids of all ranks' experts; logical ones with EPLB) -> bf16 [M,
        H].
        """
        buffer = self.input_buffer(hidden_states.shape[0])
        self.resolved_backend().prepare_inputs(
            buffer,
            hidden_states,
            topk_weights,
            topk_ids,
            is_padding=is_padding,
            eplb_state=self.eplb_state,
            **self.staging_arguments(),
        )
        return self.forward_prepared(hidden_states)

    def forward_prepared(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Launch over what the symmetric buffer's first M rows hold; only the shape of ``hidden_states`` is
        used.
        """
        buffer = self.input_buffer(hidden_states.shape[0])
        y = torch.empty_like(hidden_states, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        meet_before_first_launch(self.group, hidden_states.device)
        self.resolved_backend().run_mega_moe(
            y=y,
            l1_weights=self._l1_weights,
            l2_weights=self._l2_weights,
            symm_buffer=buffer,
            fast_math=self.fast_math,
            **self.activation.launch_arguments(),
            **self.launch_arguments(),
        )
        return y

    def l2_activation_scale(self) -> float:
        """The scale of the requantized intermediate (nvfp4): the largest of all experts' input scales, 1.0 if
        zero.
        """
        return self._largest_input_scale or 1.0

    def staging_arguments(self) -> dict[str, Any]:
        """What staging needs besides tokens and routing."""
        if self.mma_type != "nvfp4":
            return {}
        return {
            "w2_global_scale": self.w2_weight_scale_2,
            "l2_alpha": self.l2_alpha,
            "l2_activation_scale": self.l2_activation_scale(),
        }

    def launch_arguments(self) -> dict[str, Any]:
        """The family's own launch options."""
        if self.mma_type != "nvfp4":
            return {}
        return {
            "l1_alpha": self.l1_alpha,
            "l2_alpha": self.l2_alpha,
            "l2_activation_scale": self.l2_activation_scale(),
            "use_x_scales": True,
        }
