"""Well-formed prepare_* calls with poisoned outputs, for tests to change an argument of."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import reference
from reference._quant_key import GroupShape, QuantKey, ScaleDesc, kMxfp8Dynamic

E4M3 = torch.float8_e4m3fn
POISON = 0xA5


def key(group: int, scale: torch.dtype, **changes: Any) -> QuantKey:
    """A hidden_quant key; changes: static, row, and any field of QuantKey."""
    desc = ScaleDesc(scale, changes.pop("static", False), GroupShape(changes.pop("row", 1), group))
    return QuantKey(changes.pop("dtype", E4M3), desc, **changes)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


@dataclass
class Call:
    """Arguments of one prepare_* call; ``outputs`` names those that are written."""

    name: str
    arguments: dict[str, Any]
    outputs: list[str] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        assert getattr(reference, self.name)(**self.arguments) is None
        return self.arguments

    def output_bytes(self) -> dict[str, torch.Tensor]:
        tensors = {name: self.arguments[name] for name in self.outputs}
        return {name: raw_bytes(t).clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def routing_arguments(num_tokens: int, generator: torch.Generator, topk: int = 6) -> dict[str, Any]:
    return {
        "topk_weights": torch.rand(num_tokens, topk, generator=generator),
        "topk_ids": torch.randint(0, 64, (num_tokens, topk), generator=generator),
        "topk_idx_out": poisoned((num_tokens, topk), torch.int64),
        "topk_weights_out": poisoned((num_tokens, topk), torch.float32),
    }


def make_hidden(
    num_tokens: int, columns: int, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    return (torch.randn(num_tokens, columns, generator=generator) * 3).to(dtype)


def fp8_call(
    generator: torch.Generator,
    num_tokens: int = 9,
    columns: int = 256,
    quant: QuantKey | None = kMxfp8Dynamic,
    dtype: torch.dtype = torch.bfloat16,
    **extra: Any,
) -> Call:
    outputs = ["x", "x_sf", "topk_idx_out", "topk_weights_out", "shared_x_sf"]
    arguments = {
        "hidden_states": make_hidden(num_tokens, columns, generator, dtype),
        **routing_arguments(num_tokens, generator),
        "x": poisoned((num_tokens, columns), E4M3),
        "x_sf": poisoned((num_tokens, columns // 128), torch.int32),
        "hidden_quant": quant,
    }
    if quant is not None and quant.scale.dtype == torch.float32:
        arguments["x_sf"] = poisoned((num_tokens, columns // quant.scale.group_shape.col), torch.float32)
    return Call(
        "prepare_megamoe_inputs", arguments | extra, outputs if "shared_x_sf" in extra else outputs[:-1]
    )


def nvfp4_call(generator: torch.Generator, num_tokens: int = 9, columns: int = 256, **extra: Any) -> Call:
    arguments = {
        "hidden_states": make_hidden(num_tokens, columns, generator, torch.bfloat16),
        **routing_arguments(num_tokens, generator),
        "x": poisoned((num_tokens, columns // 2), torch.uint8),
        "x_sf": poisoned((num_tokens, columns // 64), torch.int32),
        "x_scales": poisoned((num_tokens,), torch.float32),
    }
    outputs = ["x", "x_sf", "x_scales", "topk_idx_out", "topk_weights_out"]
    optional = [name for name in ("shared_x", "shared_x_sf", "l2_alpha") if name in extra]
    return Call("prepare_megamoe_nvfp4_inputs", arguments | extra, outputs + optional)


def block_call(generator: torch.Generator, num_tokens: int = 9, columns: int = 192) -> Call:
    arguments = {
        "hidden_states": make_hidden(num_tokens, columns, generator, torch.bfloat16),
        **routing_arguments(num_tokens, generator),
        "x": poisoned((num_tokens, columns // 2), torch.uint8),
        "x_sf": poisoned((num_tokens, columns // 16), torch.uint8),
    }
    outputs = ["x", "x_sf", "topk_idx_out", "topk_weights_out"]
    return Call("prepare_megamoe_nvfp4_block_inputs", arguments, outputs)


def norm_call(generator: torch.Generator, num_tokens: int = 9, columns: int = 192) -> Call:
    arguments = {
        "hidden_states": make_hidden(num_tokens, columns, generator, torch.bfloat16),
        "norm_weight": torch.randn(columns, generator=generator).bfloat16(),
        "norm_eps": 1e-5,
        "gain_center": 1.0,
        "x": poisoned((num_tokens, columns // 2), torch.uint8),
        "x_sf": poisoned((num_tokens, columns // 16), torch.uint8),
    }
    return Call("prepare_megamoe_nvfp4_with_norm", arguments, ["x", "x_sf"])


def bf16_call(generator: torch.Generator, num_tokens: int = 9, columns: int = 200) -> Call:
    arguments = {
        "hidden_states": make_hidden(num_tokens, columns, generator, torch.bfloat16),
        **routing_arguments(num_tokens, generator),
        "x": poisoned((num_tokens, columns), torch.bfloat16),
    }
    return Call("prepare_megamoe_bf16_inputs", arguments, ["x", "topk_idx_out", "topk_weights_out"])


CALLS = {"fp8": fp8_call, "nvfp4": nvfp4_call, "block": block_call, "norm": norm_call, "bf16": bf16_call}


def eplb_state(
    generator: torch.Generator, experts: int = 64, physical: int = 80, **changes: Any
) -> SimpleNamespace:
    state = SimpleNamespace(
        expert_load_view=torch.arange(physical, dtype=torch.int32),
        logical_to_physical_map=torch.randint(-1, physical, (experts, 3), generator=generator),
        logical_replica_count=torch.randint(0, 4, (experts,), generator=generator),
        should_record_tensor=torch.tensor(True),
        num_unpadded_tokens_tensors=[torch.tensor(6, dtype=torch.int32), torch.tensor(0, dtype=torch.int32)],
    )
    vars(state).update(changes)
    return state
