"""Copying a checkpoint tensor into a parameter: everything is checked before the first byte is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.experts.formats import ParameterFormat
from megamoe.experts.values import UnusableValueError

# Bytes copied in one go; a bound on the temporary memory of a conversion.
PIECE_BYTES = 4 << 20

# Names of one expert's tensors, as checkpoints write them; "w13_..." and "w2_..." hold all experts at once.
_EXPERT_NAME = re.compile(
    r"(?:experts\.)?(?P<expert>\d+)\.(?P<shard>w1|w2|w3|gate_proj|up_proj|down_proj)\."
    r"(?P<kind>weight|weight_scale|weight_scale_inv|weight_scale_2|input_scale)"
)
_SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
SHARD_IDS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class ExpertName:
    """Where one expert's checkpoint tensor belongs."""

    parameter: str
    shard_id: str
    expert_id: int


def parse_expert_name(name: str) -> ExpertName | None:
    """ "3.gate_proj.weight_scale" -> (w13_weight_scale, w1, 3); None if it is not a name of this form."""
    match = _EXPERT_NAME.fullmatch(name)
    if match is None:
        return None
    shard_id = _SHARDS.get(match["shard"], match["shard"])
    kind = "weight_scale" if match["kind"] == "weight_scale_inv" else match["kind"]
    return ExpertName(f"{'w2' if shard_id == 'w2' else 'w13'}_{kind}", shard_id, int(match["expert"]))


@dataclass(frozen=True)
class Target:
    """A parameter to write to and the name under which messages speak of it."""

    layer: str
    weight: str
    parameter: torch.Tensor
    format: ParameterFormat

    def refuse(self, what: str) -> ValueError:
        return ValueError(f"{self.layer}: {self.weight}: {what}")

    def check_dtype(self, loaded: Any) -> None:
        """TypeError unless the checkpoint's dtype holds this parameter's values exactly."""
        if loaded.dtype not in self.format.accepts:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.format.accepts)
            found = str(loaded.dtype).removeprefix("torch.")
            raise TypeError(f"{self.layer}: {self.weight}: dtype must be {wanted}, got {found}")

    def check_shape(self, loaded: Any, expected: tuple[int, ...]) -> None:
        """ValueError unless the checkpoint tensor has this shape."""
        if tuple(loaded.shape) != expected:
            raise self.refuse(f"shape must be {expected}, got {tuple(loaded.shape)}")

    def converted(self, piece: torch.Tensor, expert: int, *, stacked: bool) -> torch.Tensor:
        """Checked values in the parameter's dtype. ValueError naming expert and position of a value that
        cannot be used.

        ``piece`` holds one expert, or, stacked, several from ``expert`` on.
        """
        try:
            values = self.format.convert(piece) if self.format.convert is not None else piece
            if self.format.check is not None:
                self.format.check(values)
        except UnusableValueError as error:
            index = error.index
            if stacked:
                expert, index = expert + index[0], index[1:]
            raise self.refuse(f"expert {expert}, at {list(index)}: {error.what}") from None
        return values

    @property
    def checks_values(self) -> bool:
        return self.format.check is not None or self.format.convert is not None


def _runs(experts: Sequence[int], longest: int) -> list[tuple[int, int, int]]:
    """(first slot, first expert, count) of consecutive experts, at most ``longest`` of them at a time."""
    runs: list[tuple[int, int, int]] = []
    for slot, expert in enumerate(experts):
        if runs:
            first_slot, first, count = runs[-1]
            if expert == first + count and count < longest:
                runs[-1] = (first_slot, first, count + 1)
                continue
        runs.append((slot, expert, 1))
    return runs


def load_stacked(target: Target, loaded: Any, experts: Sequence[int], num_experts: int) -> None:
    """Copy the local experts of a checkpoint tensor [num_experts, ...]: slot s takes expert experts[s].

    ``loaded`` is a tensor or a ShardTensor. Values are checked in a first pass over all pieces and copied in
    a second, so that a refusal leaves the parameter as it was.
    """
    target.check_dtype(loaded)
    target.check_shape(loaded, (num_experts, *target.parameter.shape[1:]))
    one = max(target.parameter[0].numel() * target.parameter.element_size(), 1)
    runs = _runs(experts, max(PIECE_BYTES // one, 1))
    if len(runs) > 1 and target.checks_values:
        for _, first, count in runs:
            target.converted(loaded[first : first + count], first, stacked=True)
    for slot, first, count in runs:
        values = target.converted(loaded[first : first + count], first, stacked=True)
        target.parameter.data[slot : slot + count].copy_(values)


def load_expert(target: Target, loaded: Any, shard_id: str, expert_id: int, slots: Sequence[int]) -> None:
    """Copy one expert's tensor (w1 gate, w3 up, w2 down) into its local slots, possibly none or several."""
    if shard_id not in SHARD_IDS:
        raise target.refuse(f"shard id must be one of {', '.join(SHARD_IDS)}, got {shard_id!r}")
    if (shard_id == "w2") != target.format.name.startswith("w2_"):
        raise target.refuse(f"shard {shard_id} does not belong to {target.format.name}")
    target.check_dtype(loaded)
    shape = tuple(target.parameter.shape[1:])
    if shard_id == "w2":
        part = slice(None)
    else:
        half = shape[0] // 2
        part = slice(0, half) if shard_id == "w1" else slice(half, 2 * half)
        shape = (half, *shape[1:])
    # A global scale comes as a scalar or as one element.
    expected = () if shape == (1,) else shape
    if tuple(loaded.shape) == (1,) and expected == ():
        expected = (1,)
    target.check_shape(loaded, expected)
    if not slots:
        return
    tensor = loaded if isinstance(loaded, torch.Tensor) else loaded.load()
    values = target.converted(tensor, expert_id, stacked=False)
    for slot in slots:
        destination = target.parameter.data[slot] if shard_id == "w2" else target.parameter.data[slot, part]
        destination.copy_(values.reshape(destination.shape))
