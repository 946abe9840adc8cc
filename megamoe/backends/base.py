"""What a MegaMoE backend is: weights into kernel layout, tokens into the symmetric buffer, one launch.

A backend is a few class attributes (which architecture, which sizes, which functions of deep_gemm) and the
steps that differ. The steps that do not differ are here. ``library`` is the deep_gemm module unless the
caller supplies another object with the same functions, which is how the emulated backend and the tests run
the same code.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch

from megamoe.backends.checks import CheckpointWeights
from megamoe.backends.library import declares, keep_given, load_deep_gemm, missing_functions, refuse_unknown
from megamoe.backends.unfused import map_experts
from megamoe.quant_keys import QuantKey, kMxfp8Dynamic

Weights = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scaled = tuple[torch.Tensor, torch.Tensor | None]


class DeepGemmMegaMoEBackend:
    """Base of all backends. It runs nothing itself: each step raises NotImplementedError until a subclass has
    it.

    mma_type: operand formats, as the symmetric buffer and the heuristics name them.
    hidden_quant: how hidden states are quantized for dispatch; None where they are not, or not by such a key.
    """

    name: ClassVar[str] = "base"
    # Backends of one family can share a symmetric buffer's storage.
    family: ClassVar[str] = "deep_gemm"
    mma_type: str = "fp8xfp4"
    hidden_quant: QuantKey | None = kMxfp8Dynamic
    architecture: ClassVar[str] = "none"
    # Compute capabilities as (major, minor); minor None means the whole family.
    capabilities: ClassVar[tuple[tuple[int, int | None], ...]] = ()
    # Sizes must be multiples of these. Staging needs 128; what is above comes from the symmetric buffer.
    hidden_multiple: ClassVar[int] = 128
    intermediate_multiple: ClassVar[int] = 128
    # What a checkpoint's weights look like; None where the backend transforms none.
    checkpoint: ClassVar[CheckpointWeights | None] = None
    # The staging function, and whether it maps expert ids itself.
    stages_with: ClassVar[str] = "prepare_megamoe_inputs"
    stages_with_eplb: ClassVar[bool] = True
    launch: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    # Extra keyword arguments of run_mega_moe that this family's launch has.
    launch_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, library: Any | None = None) -> None:
        self._library = library
        self._warned: set[str] = set()

    # -- what it needs -----------------------------------------------------------------------------

    @property
    def library(self) -> Any:
        """The deep_gemm module. RuntimeError if it cannot be imported."""
        if self._library is None:
            self._library = load_deep_gemm()
        return self._library

    @property
    def staging(self) -> Any:
        """The module whose prepare_* functions fill the symmetric buffer."""
        return importlib.import_module("megamoe.staging")

    @property
    def eplb(self) -> Any:
        """The module with the stand-alone EPLB mapping, for staging functions that do not map themselves."""
        return importlib.import_module("megamoe.eplb")

    @classmethod
    def supports_device(cls, device: torch.device) -> bool:
        """True if the device's architecture is one of ``capabilities``. The library is not looked at."""
        if device.type != "cuda" or torch.version.hip is not None:
            return False
        try:
            major, minor = torch.cuda.get_device_capability(device)
        except (AssertionError, RuntimeError):  # no driver, or a torch built without CUDA
            return False
        return any(major == a and b in (None, minor) for a, b in cls.capabilities)

    @classmethod
    def check_sizes(cls, hidden_size: int, intermediate_size: int) -> None:
        """ValueError unless both sizes are multiples of 128 and of what this backend's symmetric buffer
        demands.
        """
        for argument, size, multiple in (
            ("hidden_size", hidden_size, cls.hidden_multiple),
            ("intermediate_size", intermediate_size, cls.intermediate_multiple),
        ):
            if size <= 0 or size % 128:
                raise ValueError(f"{argument} must be a positive multiple of 128, got {size}")
            if size % multiple:
                raise ValueError(
                    f"{argument} must be a multiple of {multiple} for the symmetric buffer of "
                    f"{cls.architecture} ({cls.mma_type}), got {size}; 128 is enough for staging only"
                )

    def check_library(self) -> None:
        """RuntimeError unless deep_gemm is there and has every function that this backend calls."""
        missing = missing_functions(self.library, self.requires)
        if missing:
            raise RuntimeError(
                f"the {self.name} backend needs {', '.join(missing)}, which this build of deep_gemm lacks"
            )

    # -- weights -----------------------------------------------------------------------------------

    def transform_weights(
        self,
        *,
        w13_weight: torch.Tensor,
        w13_weight_scale: torch.Tensor | None,
        w2_weight: torch.Tensor,
        w2_weight_scale: torch.Tensor | None,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str | None = None,
    ) -> tuple[Weights, Weights]:
        """Checkpoint weights of the local experts in the launch's layout: (L1, L2), each a weight or a pair
        (weight, scale). The L2 weight shares w2_weight's storage.

        w13_weight [L, 2I, H], gate rows first, and w2_weight [L, H, I], their scales and their dtypes as
        ``checkpoint`` says. TypeError or ValueError, naming the argument, for another dtype or shape.
        """
        if self.checkpoint is None:
            raise NotImplementedError(f"the {self.name} backend does not transform weights")
        self.checkpoint.check(
            "w13", w13_weight, w13_weight_scale, num_local_experts, 2 * intermediate_size, hidden_size
        )
        self.checkpoint.check(
            "w2", w2_weight, w2_weight_scale, num_local_experts, hidden_size, intermediate_size
        )
        return self.to_kernel_layout(
            (w13_weight.contiguous(), w13_weight_scale), (w2_weight.contiguous(), w2_weight_scale), activation
        )

    def to_kernel_layout(self, w13: Scaled, w2: Scaled, activation: str | None) -> tuple[Weights, Weights]:
        """The transform itself, of contiguous weights and scales that have been checked (NUMERICS 5.3,
        5.8).
        """
        raise NotImplementedError(f"the {self.name} backend does not transform weights")

    def supports_shared_experts(self, deep_gemm: Any) -> bool:
        """True if this build of deep_gemm can run shared experts inside the launch."""
        return False

    def transform_shared_expert_weights(
        self,
        *,
        shared_experts: Any,
        num_shared_experts: int,
        hidden_size: int,
        intermediate_size: int,
        prefix: str,
    ) -> tuple[Weights, Weights] | None:
        """Shared-expert weights in the launch's layout, or None (with one warning) if they cannot be
        fused.
        """
        return None

    # -- a launch ----------------------------------------------------------------------------------

    def get_symm_buffer(
        self,
        group: Any,
        *,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        activation: str | None = None,
        base: Any | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> Any:
        """A symmetric buffer for this backend's launches: the library's, with the library's fields.

        ``base`` shares another buffer's storage. device: where; the current CUDA device if None. Shared
        experts, an activation, a base and ``options`` are passed on only when they are asked for; ValueError
        if this build cannot have them.
        """
        create, fixed = self.buffer_constructor(base)
        asked = {
            "num_shared_experts": num_shared_experts or None,
            "activation": activation,
            "base": base,
            **options,
        }
        given = {**fixed, **keep_given(asked)}
        refuse_unknown(create, given)
        sizes = (group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
        if device is not None and declares(create, "device"):
            return create(*sizes, device=device, **given)
        with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
            return create(*sizes, **given)

    def buffer_constructor(self, base: Any | None) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The library's function or class that makes this family's buffer, and the options it always gets."""
        library = self.library
        create = library.get_symm_buffer_for_mega_moe if base is None else library.SymmBuffer
        return create, {"mma_type": self.mma_type}

    def prepare_inputs(
        self,
        symm_buffer: Any,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        is_padding: torch.Tensor | None = None,
        eplb_state: Any | None = None,
        **options: Any,
    ) -> None:
        """Stage hidden states [M, H] and their routing [M, K] into the first M rows of the symmetric buffer.

        ``options`` go to the staging function. With EPLB, ids are logical ones: they are mapped and the load
        is recorded on the way, or before, where the staging function does not.
        """
        rows = slice(hidden_states.shape[0])
        if self.stages_with_eplb:
            options["eplb_state"] = eplb_state
        else:
            topk_ids = map_experts(self.eplb, topk_ids, is_padding, eplb_state)
        getattr(self.staging, self.stages_with)(
            hidden_states,
            topk_weights,
            topk_ids,
            *self.staged_views(symm_buffer, rows),
            symm_buffer.topk_idx[rows],
            symm_buffer.topk_weights[rows],
            is_padding=is_padding,
            **self.staging_options(symm_buffer, hidden_states.shape[0]),
            **options,
        )

    def staged_views(self, symm_buffer: Any, rows: slice) -> tuple[torch.Tensor, ...]:
        """Where the quantized hidden states go."""
        return symm_buffer.x[rows], symm_buffer.x_sf[rows]

    def staging_options(self, symm_buffer: Any, num_tokens: int) -> dict[str, Any]:
        """What the family's staging function is told besides."""
        return {"hidden_quant": self.hidden_quant}

    def run_mega_moe(
        self,
        *,
        y: torch.Tensor,
        l1_weights: Weights,
        l2_weights: Weights,
        symm_buffer: Any,
        activation_clamp: float | None,
        fast_math: bool,
        activation: str | None = None,
        activation_alpha: float | None = None,
        activation_beta: float | None = None,
        shared_l1_weights: Weights | None = None,
        shared_l2_weights: Weights | None = None,
        **options: Any,
    ) -> None:
        """One launch over what the symmetric buffer holds; writes ``y`` [M, H] bf16, M <= the buffer's rows.

        ``activation``, ``activation_alpha`` and ``activation_beta`` are forwarded only when given, the shared
        weights only when both are. ``options`` are the family's own (``launch_options``), forwarded when
        given. Before the launch: TypeError for an option that the family does not have, ValueError for one
        that the build does not have.
        """
        if not self.launch:
            raise NotImplementedError(f"the {self.name} backend does not launch anything")
        unknown = sorted(set(options) - set(self.launch_options))
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: not an option of the {self.name} backend")
        forwarded = keep_given(
            {
                "activation": activation,
                "activation_alpha": activation_alpha,
                "activation_beta": activation_beta,
                **options,
            }
        )
        if shared_l1_weights is not None and shared_l2_weights is not None:
            forwarded.update(shared_l1_weights=shared_l1_weights, shared_l2_weights=shared_l2_weights)
        elif shared_l1_weights is not None or shared_l2_weights is not None:
            self.warn_once(
                "only one of shared_l1_weights and shared_l2_weights is given: no shared expert runs"
            )
        function = getattr(self.library, self.launch)
        refuse_unknown(function, forwarded)
        function(
            y,
            l1_weights,
            l2_weights,
            symm_buffer,
            activation_clamp=activation_clamp,
            fast_math=fast_math,
            **forwarded,
        )

    def sibling(self, mma_type: str) -> DeepGemmMegaMoEBackend | None:
        """The backend of another MMA type over the same library, or None if there is none."""
        return None

    # -- the router --------------------------------------------------------------------------------

    def supports_bf16_mega_gate(self) -> bool:
        """True if ``bf16_mega_gate`` can be called."""
        return False

    def bf16_mega_gate(
        self,
        *,
        x: torch.Tensor,
        weight: torch.Tensor,
        num_topk: int,
        scoring_func: str,
        routed_scaling_factor: float,
        ep_rank: int,
        bias: torch.Tensor | None = None,
        image_bias: torch.Tensor | None = None,
        image_token_mask: torch.Tensor | None = None,
        fix_routing_mask: torch.Tensor | None = None,
        unmapped_topk_idx: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Router scores, selection and weights in one kernel: (weights float32 [T, K], ids int64 [T, K])."""
        raise NotImplementedError(f"the {self.name} backend has no mega gate")

    # -- helpers -----------------------------------------------------------------------------------

    def warn_once(self, message: str) -> None:
        """A RuntimeWarning, the first time that this backend says ``message``."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=3)
