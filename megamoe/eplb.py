"""Expert-parallel load balancing: a layer's state, and the stand-alone mapping operation."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megamoe.kernels import checks, tuning

_MICRO_BATCH: contextvars.ContextVar[int] = contextvars.ContextVar("megamoe_micro_batch", default=0)


@contextlib.contextmanager
def micro_batch(index: int) -> Iterator[None]:
    """Staging inside uses `num_unpadded_tokens_tensors[index]` (per thread; 0 outside any such block)."""
    token = _MICRO_BATCH.set(index)
    try:
        yield
    finally:
        _MICRO_BATCH.reset(token)


def current_micro_batch() -> int:
    """Index of the micro-batch that this thread works on."""
    return _MICRO_BATCH.get()


@dataclass
class EplbLayerState:
    """What the mapping of one MoE layer reads and writes; inert while the map is None.

    expert_load_view: [physical experts] int32 or int64, incremented per routed live token.
    logical_to_physical_map: [logical experts, slots] int32 or int64; -1 beyond the replica count.
    logical_replica_count: [logical experts] int32 or int64, below 2^32.
    should_record_tensor: scalar bool; the load is recorded while it is true.
    num_unpadded_tokens_tensors: one scalar int32 or int64 tensor per micro-batch; tokens at or past that
    count are mapped but not recorded.
    """

    expert_load_view: torch.Tensor | None = None
    logical_to_physical_map: torch.Tensor | None = None
    logical_replica_count: torch.Tensor | None = None
    should_record_tensor: torch.Tensor | None = None
    num_unpadded_tokens_tensors: Sequence[torch.Tensor] | None = None

    def set_layer_state(
        self, layer: int, load: torch.Tensor, expert_map: torch.Tensor, count: torch.Tensor
    ) -> None:
        """Point at one layer's rows of the model-wide tensors [layers, ...]; nothing is copied."""
        self.expert_load_view = load[layer]
        self.logical_to_physical_map = expert_map[layer]
        self.logical_replica_count = count[layer]


@dataclass(frozen=True)
class EplbTensors:
    """The tensors of one mapping, checked, with the prefix under which errors name them."""

    load: torch.Tensor
    expert_map: torch.Tensor
    replica_count: torch.Tensor
    record: torch.Tensor
    num_unpadded: torch.Tensor | None
    names: tuple[str, str, str, str, str]

    @property
    def num_physical(self) -> int:
        """Counters of the load."""
        return self.load.shape[0]

    @property
    def num_replicas(self) -> int:
        """Slots of an expert in the map."""
        return self.expert_map.shape[1]

    @property
    def output(self) -> tuple[str, torch.Tensor]:
        """The tensor that the mapping writes."""
        return self.names[0], self.load

    @property
    def inputs(self) -> list[tuple[str, torch.Tensor | None]]:
        """The tensors that the mapping reads."""
        tensors = (self.expert_map, self.replica_count, self.record, self.num_unpadded)
        return list(zip(self.names[1:], tensors, strict=True))


def check_eplb_tensors(
    load: object,
    expert_map: object,
    replica_count: object,
    record: object,
    num_unpadded: object,
    device: torch.device,
    names: tuple[str, str, str, str, str],
) -> EplbTensors:
    """Refuse (TypeError, ValueError) any tensor of the mapping that is not as `EplbLayerState` says."""
    load_name, map_name, count_name, record_name, unpadded_name = names
    matrix = checks.require_matrix(map_name, expert_map)
    checks.require_dtype(map_name, matrix, checks.INDEX_DTYPES)
    checks.require_device(map_name, matrix, device)
    logical, slots = matrix.shape
    if logical == 0 or slots == 0:
        raise ValueError(f"{map_name}: expected at least one expert and one slot, got {tuple(matrix.shape)}")
    counts = checks.require(
        count_name, replica_count, checks.INDEX_DTYPES, (logical,), "logical experts", device
    )
    vector = checks.require_tensor(load_name, load)
    checks.require_dtype(load_name, vector, checks.INDEX_DTYPES)
    checks.require_device(load_name, vector, device)
    if vector.ndim != 1 or vector.shape[0] == 0:
        raise ValueError(f"{load_name}: expected shape (physical experts,), got {tuple(vector.shape)}")
    flag = checks.require_scalar(record_name, record, (torch.bool,), device)
    limit = None
    if num_unpadded is not None:
        limit = checks.require_scalar(unpadded_name, num_unpadded, checks.INDEX_DTYPES, device)
    return EplbTensors(vector, matrix, counts, flag, limit, names)


def active_tensors(state: object, device: torch.device) -> EplbTensors | None:
    """The checked tensors of a layer's state for the current micro-batch; None if the state is inert."""
    if state is None:
        return None
    fields = list(EplbLayerState.__dataclass_fields__)
    for field in fields:
        if not hasattr(state, field):
            raise TypeError(f"eplb_state: expected an EplbLayerState, got {type(state).__name__}")
    values = [getattr(state, field) for field in fields]
    load, expert_map, count, record, limits = values
    if expert_map is None:
        return None
    for field, value in zip(fields, values, strict=True):
        if value is None:
            raise ValueError(f"eplb_state.{field}: expected a value beside logical_to_physical_map, got None")
    index = current_micro_batch()
    limits_name = "eplb_state.num_unpadded_tokens_tensors"
    if isinstance(limits, torch.Tensor) or not isinstance(limits, Sequence):
        raise TypeError(f"{limits_name}: expected a sequence of tensors, got {type(limits).__name__}")
    if index >= len(limits):
        raise ValueError(f"{limits_name}: expected a count for micro-batch {index}, got {len(limits)} counts")
    load_name, map_name, count_name, record_name = (f"eplb_state.{field}" for field in fields[:4])
    names = (load_name, map_name, count_name, record_name, f"{limits_name}[{index}]")
    limit = checks.require_tensor(names[4], limits[index])
    return check_eplb_tensors(load, expert_map, count, record, limit, device, names)


def eplb_map_to_physical_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Physical expert ids of `topk_ids` [M, K] (int32 or int64), same dtype and shape; records the load.

    id outside [0, logical experts) -> -1. Replica of token t: (t * 2654435769 mod 2^32) mod count, a count
    of 0 counting as 1. `expert_load_view[physical] += 1` for every slot of tokens below
    `num_unpadded_tokens` (all tokens where it is None) while `record_enabled` is true. Ids wrap to int32
    first, as in production. An empty `topk_ids` is returned as it is.

    Raises TypeError or ValueError, before anything is written, for wrong dtypes, devices and shapes.
    """
    checks.require_matrix("topk_ids", topk_ids)
    checks.require_dtype("topk_ids", topk_ids, checks.INDEX_DTYPES)
    checks.require_supported_device("topk_ids", topk_ids)
    tensors = check_eplb_tensors(
        expert_load_view,
        logical_to_physical_map,
        logical_replica_count,
        record_enabled,
        num_unpadded_tokens,
        topk_ids.device,
        (
            "expert_load_view",
            "logical_to_physical_map",
            "logical_replica_count",
            "record_enabled",
            "num_unpadded_tokens",
        ),
    )
    checks.require_disjoint([tensors.output], [("topk_ids", topk_ids), *tensors.inputs])
    if topk_ids.numel() == 0:
        return topk_ids
    from megamoe.kernels.launch import is_interpreted, launch
    from megamoe.kernels.routing import eplb_kernel, pack_eplb

    ids = topk_ids.contiguous()
    physical_ids = torch.empty_like(ids)
    block = 4096 if is_interpreted(ids.device) else 1024
    parts = tuning.load_parts(tensors.num_physical) if ids.numel() >= tuning.LOAD_BINS else 0
    launch(
        eplb_kernel,
        -(-ids.numel() // block),
        ids.device,
        (ids, physical_ids, ids.numel(), ids.shape[1], *pack_eplb(tensors)),
        {"BLOCK": block, "LOAD_PARTS": parts},
        num_warps=4,
    )
    return physical_ids
