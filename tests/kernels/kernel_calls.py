"""Valid arguments for every staging function, as dictionaries that a test bends before the call."""

import math
from collections.abc import Callable
from typing import Any

import torch

from megamoe import staging
from megamoe.eplb import EplbLayerState
from megamoe.quant_keys import GroupShape, QuantKey, ScaleDesc

E4M3 = torch.float8_e4m3fn
POISON = 0xA5

# The tensors that each function writes.
OUTPUTS = ("x", "x_sf", "x_scales", "topk_idx_out", "topk_weights_out", "shared_x", "shared_x_sf", "l2_alpha")


def fp8_key(group: int, scale_dtype: torch.dtype = torch.uint8, **changes: Any) -> QuantKey:
    fields = {"dtype": E4M3, "scale": ScaleDesc(scale_dtype, False, GroupShape(1, group)), **changes}
    return QuantKey(**fields)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor whose every byte is POISON."""
    count = math.prod(shape) * dtype.itemsize
    return torch.full((count,), POISON, dtype=torch.uint8).view(dtype).reshape(shape)


def hidden(tokens: int, size: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values whose groups of 16 have scales of their own, over six binades."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, size // 16, 16, generator=generator)
    exponents = torch.randint(-3, 4, (tokens, size // 16, 1), generator=generator)
    return torch.ldexp(values, exponents).reshape(tokens, size).to(dtype)


def routing(tokens: int, topk: int = 3, experts: int = 8, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "topk_weights": torch.rand(tokens, topk, generator=generator),
        "topk_ids": torch.randint(0, experts, (tokens, topk), generator=generator, dtype=torch.int32),
        "topk_idx_out": poisoned(tokens, topk, dtype=torch.int64),
        "topk_weights_out": poisoned(tokens, topk, dtype=torch.float32),
        "is_padding": torch.rand(tokens, generator=generator) < 0.3,
    }


def page_rows(tokens: int, block_m: int) -> int:
    return -(-tokens // block_m) * (-(-block_m // 128) * 128)


def pages(tokens: int, size: int, block_m: int) -> torch.Tensor:
    """Scale pages as the symmetric buffer has them: MN-major."""
    return poisoned(size // 128, page_rows(tokens, block_m), dtype=torch.int32).t()


def layer_state(experts: int = 8, slots: int = 3, physical: int = 14, limit: int = 1 << 30) -> EplbLayerState:
    generator = torch.Generator().manual_seed(5)
    expert_map = torch.randint(0, physical, (experts, slots), generator=generator)
    return EplbLayerState(
        torch.zeros(physical, dtype=torch.int32),
        expert_map,
        torch.randint(1, slots + 1, (experts,), generator=generator),
        torch.tensor(True),
        [torch.tensor(limit, dtype=torch.int32)],
    )


def fp8_inputs(tokens: int = 5, size: int = 256, block_m: int | None = 64) -> dict[str, Any]:
    return {
        "hidden_states": hidden(tokens, size),
        **routing(tokens),
        "x": poisoned(tokens, size, dtype=E4M3),
        "x_sf": poisoned(tokens, size // 128, dtype=torch.int32),
        "shared_x_sf": None if block_m is None else pages(tokens, size, block_m),
        "shared_block_m": block_m,
        "hidden_quant": fp8_key(32),
        "eplb_state": layer_state(),
    }


def token_inputs(tokens: int = 5, size: int = 256, block_m: int = 64) -> dict[str, Any]:
    return {
        "hidden_states": hidden(tokens, size),
        **routing(tokens),
        "x": poisoned(tokens, size // 2, dtype=torch.uint8),
        "x_sf": poisoned(tokens, size // 64, dtype=torch.int32),
        "x_scales": poisoned(tokens, dtype=torch.float32),
        "shared_x": poisoned(tokens, size, dtype=E4M3),
        "shared_x_sf": pages(tokens, size, block_m),
        "shared_block_m": block_m,
        "w2_global_scale": torch.rand(6, generator=torch.Generator().manual_seed(2)),
        "l2_alpha": poisoned(6, dtype=torch.float32),
        "l2_activation_scale": 0.37,
        "eplb_state": layer_state(),
    }


def block_inputs(tokens: int = 5, size: int = 192) -> dict[str, Any]:
    return {
        "hidden_states": hidden(tokens, size),
        **routing(tokens),
        "x": poisoned(tokens, size // 2, dtype=torch.uint8),
        "x_sf": poisoned(tokens, size // 16, dtype=torch.uint8),
    }


def norm_inputs(tokens: int = 3, size: int = 192) -> dict[str, Any]:
    return {
        "hidden_states": hidden(tokens, size),
        "norm_weight": torch.randn(size, generator=torch.Generator().manual_seed(3)).bfloat16(),
        "norm_eps": 1e-5,
        "gain_center": 1.0,
        "x": poisoned(tokens, size // 2, dtype=torch.uint8),
        "x_sf": poisoned(tokens, size // 16, dtype=torch.uint8),
    }


def bf16_inputs(tokens: int = 5, size: int = 256) -> dict[str, Any]:
    return {
        "hidden_states": hidden(tokens, size),
        **routing(tokens),
        "x": poisoned(tokens, size, dtype=torch.bfloat16),
    }


FUNCTIONS: dict[str, tuple[Callable[..., None], Callable[..., dict[str, Any]]]] = {
    "fp8": (staging.prepare_megamoe_inputs, fp8_inputs),
    "token": (staging.prepare_megamoe_nvfp4_inputs, token_inputs),
    "block": (staging.prepare_megamoe_nvfp4_block_inputs, block_inputs),
    "norm": (staging.prepare_megamoe_nvfp4_with_norm, norm_inputs),
    "bf16": (staging.prepare_megamoe_bf16_inputs, bf16_inputs),
}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The logical elements as bytes, whatever the strides."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return flat.view(torch.uint8)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of everything in a tensor's storage."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def written(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The output tensors of a call, the recorded load among them."""
    tensors = {n: v for n, v in arguments.items() if n in OUTPUTS and isinstance(v, torch.Tensor)}
    state = arguments.get("eplb_state")
    if state is not None and isinstance(getattr(state, "expert_load_view", None), torch.Tensor):
        tensors["load"] = state.expert_load_view
    return tensors
