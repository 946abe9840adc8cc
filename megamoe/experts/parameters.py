"""The parameters of an expert module: those of the checkpoint, and how they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, ClassVar

import torch
from torch import nn

from megamoe.backends.base import DeepGemmMegaMoEBackend
from megamoe.backends.groups import LocalGroup
from megamoe.experts.activation import MegaMoEActivation
from megamoe.experts.formats import FORMATS
from megamoe.experts.loading import Target, load_expert, load_stacked, parse_expert_name


class ExpertParameters(nn.Module):
    """What ``MegaMoEExperts`` is made of before it can run: configuration, parameters, loading."""

    default_quant: ClassVar[str] = "mxfp4"
    mma_types: ClassVar[dict[str, str]] = {
        "mxfp4": "fp8xfp4",
        "mxfp8": "fp8xfp8",
        "nvfp4": "nvfp4",
        "fp8_block": "fp8xfp8",
        "bf16": "bf16xbf16",
    }
    size_multiple: ClassVar[int] = 128

    w13_weight: nn.Parameter
    w13_weight_scale: nn.Parameter
    w13_weight_scale_2: nn.Parameter
    w2_weight: nn.Parameter
    w2_weight_scale: nn.Parameter
    w2_weight_scale_2: nn.Parameter
    w2_input_scale: nn.Parameter

    def __init__(
        self,
        *,
        num_experts: int,
        num_local_experts: int,
        experts_start_idx: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        num_max_tokens_per_rank: int,
        quant: str | None = None,
        prefix: str = "experts",
        num_logical_experts: int | None = None,
        activation: MegaMoEActivation | None = None,
        fast_math: bool = True,
        backend: DeepGemmMegaMoEBackend | None = None,
        group: Any | None = None,
        device: torch.device | str | None = None,
        eplb_state: Any | None = None,
        registry: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.quant = self.default_quant if quant is None else quant
        if self.quant not in self.mma_types:
            raise ValueError(
                f"{prefix}: quant must be one of {', '.join(self.mma_types)}, got {self.quant!r}"
            )
        for argument, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if size <= 0 or size % self.size_multiple:
                raise ValueError(
                    f"{prefix}: {argument} must be a positive multiple of {self.size_multiple}, got {size}"
                )
        if num_local_experts <= 0 or not 0 <= experts_start_idx <= num_experts - num_local_experts:
            raise ValueError(
                f"{prefix}: experts [{experts_start_idx}, {experts_start_idx + num_local_experts}) "
                f"are not among the {num_experts} experts of all ranks"
            )
        if not 0 < top_k <= num_experts:
            raise ValueError(f"{prefix}: top_k must be in [1, {num_experts}], got {top_k}")
        if num_max_tokens_per_rank <= 0:
            raise ValueError(
                f"{prefix}: num_max_tokens_per_rank must be positive, got {num_max_tokens_per_rank}"
            )
        self.prefix = prefix
        self.num_experts = num_experts
        self.num_local_experts = num_local_experts
        self.experts_start_idx = experts_start_idx
        self.num_logical_experts = num_experts if num_logical_experts is None else num_logical_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.activation = activation or MegaMoEActivation()
        self.fast_math = fast_math
        self.backend = backend
        self.group = LocalGroup() if group is None else group
        self.eplb_state = eplb_state
        self._formats = {p.name: p for p in FORMATS[self.quant].parameters}
        for name, parameter in self._formats.items():
            shape = (num_local_experts, *parameter.shape(hidden_size, intermediate_size))
            data = torch.zeros(shape, dtype=parameter.dtype, device=device)
            self.register_parameter(name, nn.Parameter(data, requires_grad=False))
        self._l1_weights: Any = None
        self._l2_weights: Any = None
        self._largest_input_scale = 0.0
        if registry is not None:
            if prefix in registry:
                raise ValueError(f"{prefix}: a layer with this prefix is registered already")
            registry[prefix] = self

    @property
    def is_finalized(self) -> bool:
        return self._l1_weights is not None

    @property
    def mma_type(self) -> str:
        return self.mma_types[self.quant]

    # -- loading -----------------------------------------------------------------------------------

    def logical_experts(self) -> list[int]:
        """The checkpoint's expert of each local slot, before any migration."""
        start = self.experts_start_idx
        return [p % self.num_logical_experts for p in range(start, start + self.num_local_experts)]

    def _target(self, name: str, weight: str) -> Target:
        return Target(self.prefix, weight, getattr(self, name), self._formats[name])

    def _name_of(self, parameter: torch.Tensor) -> str:
        for name in self._formats:
            if getattr(self, name) is parameter:
                return name
        raise ValueError(f"{self.prefix}: the tensor given is not a parameter of this layer")

    def weight_loader(
        self,
        param: torch.Tensor,
        loaded_weight: Any,
        weight_name: str | None = None,
        shard_id: str | None = None,
        expert_id: int | None = None,
    ) -> None:
        """Copy this rank's part of a checkpoint tensor into ``param``, a parameter of this layer.

        Without ``shard_id``: a tensor of all experts [num_logical_experts, ...]. With ``shard_id`` (w1 gate,
        w3 up, w2 down) and ``expert_id``: one expert's tensor, copied into every local slot that holds this
        expert. ``loaded_weight`` is a tensor or an unread one (experts.checkpoint.ShardTensor).

        ValueError or TypeError, naming layer and weight, for a shape, dtype or value that does not fit; the
        parameter is then unchanged.
        """
        self._check_loadable()
        name = self._name_of(param)
        target = self._target(name, weight_name or name)
        if shard_id is None:
            load_stacked(target, loaded_weight, self.logical_experts(), self.num_logical_experts)
        else:
            if expert_id is None or not 0 <= expert_id < self.num_logical_experts:
                raise target.refuse(f"expert id must be in [0, {self.num_logical_experts}), got {expert_id}")
            slots = [slot for slot, e in enumerate(self.logical_experts()) if e == expert_id]
            load_expert(target, loaded_weight, shard_id, expert_id, slots)
        if name == "w2_input_scale":
            self._note_input_scale(loaded_weight)

    def _note_input_scale(self, loaded: Any) -> None:
        # Of all experts, local or not: every rank must quantize the intermediate with the same scale.
        values = loaded if isinstance(loaded, torch.Tensor) else loaded.load()
        self._largest_input_scale = max(self._largest_input_scale, float(values.max()))

    def _check_loadable(self) -> None:
        if self.is_finalized:
            raise RuntimeError(f"{self.prefix}: weights are in kernel layout already and cannot be loaded")

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> Iterator[str]:
        """Load (name, tensor) pairs as they come and yield each name once its tensor has been copied.

        Names: those of the parameters ("w13_weight"), or one expert's ("3.gate_proj.weight",
        "experts.3.w1.weight"). A generator: nothing is loaded that is not iterated over. AttributeError,
        naming layer and weight, for an unknown name.
        """
        for name, loaded in weights:
            expert = parse_expert_name(name)
            parameter = name if expert is None else expert.parameter
            if parameter not in self._formats:
                raise AttributeError(
                    f"{self.prefix}: {name} is not a weight of this layer; "
                    f"{self.quant} has {', '.join(self._formats)}"
                )
            self._check_loadable()
            if expert is None:
                self.weight_loader(getattr(self, parameter), loaded, name)
            else:
                self.weight_loader(getattr(self, parameter), loaded, name, expert.shard_id, expert.expert_id)
            yield name
