"""Argument checks of the staging functions: everything is refused before a kernel starts.

Each function raises TypeError (wrong type or dtype) or ValueError (wrong device, shape, stride or
overlap), naming the argument, what was expected and what came.
"""

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def require_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
    return value


def require_matrix(name: str, value: object) -> torch.Tensor:
    tensor = require_tensor(name, value)
    if tensor.ndim != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(tensor.shape)}")
    return tensor


def require_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {_names(dtypes)}, got {_names([tensor.dtype])}")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape} ({meaning}), got {tuple(tensor.shape)}")


def require(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shape: tuple[int, ...],
    meaning: str,
    device: torch.device,
) -> torch.Tensor:
    """A tensor of one of `dtypes`, of exactly `shape`, on `device`."""
    tensor = require_tensor(name, value)
    require_dtype(name, tensor, dtypes)
    require_shape(name, tensor, shape, meaning)
    require_device(name, tensor, device)
    return tensor


def require_scalar(
    name: str, value: object, dtypes: Sequence[torch.dtype], device: torch.device
) -> torch.Tensor:
    """A tensor of one element."""
    tensor = require_tensor(name, value)
    require_dtype(name, tensor, dtypes)
    require_device(name, tensor, device)
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {tuple(tensor.shape)}")
    return tensor


def require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} (that of hidden_states), got {tensor.device}")


def require_supported_device(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a cpu or cuda device, got {tensor.device}")


def require_row_major(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride(-1) == 1 (row-major), got strides {tensor.stride()}")


def require_multiple(name: str, hidden: torch.Tensor, multiple: int) -> int:
    size = hidden.shape[1]
    if size % multiple != 0 or size == 0:
        raise ValueError(f"{name}: expected a hidden size that is a multiple of {multiple}, got {size}")
    return size


def require_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that fits a float, got a larger one") from error


def require_positive_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"{name}: expected a positive value, got {value}")
    return value


# ------------------------------------------------------------------------------------------- overlap


def _dimensions(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) in bytes of the dimensions that move, small strides first; the element is the first."""
    element = tensor.element_size()
    moving = [
        (abs(stride) * element, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ]
    return [(1, element), *sorted(moving)]


def _span(dimensions: list[tuple[int, int]]) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in dimensions)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share bytes (a stride smaller than what lies inside it)."""
    dimensions = _dimensions(tensor)
    return any(
        stride < _span(dimensions[:position]) for position, (stride, _) in enumerate(dimensions) if position
    )


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share bytes: exact for slices of rows of one buffer, else by range."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_dimensions, b_dimensions = _dimensions(a), _dimensions(b)
    a_start, b_start = a.data_ptr(), b.data_ptr()
    if a_start + _span(a_dimensions) <= b_start or b_start + _span(b_dimensions) <= a_start:
        return False
    # Rows of equal pitch: the two columns ranges, modulo the pitch, decide.
    pitch = a_dimensions[-1][0]
    if len(a_dimensions) > 1 and len(b_dimensions) > 1 and pitch == b_dimensions[-1][0]:
        a_width, b_width = _span(a_dimensions[:-1]), _span(b_dimensions[:-1])
        if a_width <= pitch and b_width <= pitch:
            distance = (b_start - a_start) % pitch
            return not (a_width <= distance and distance + b_width <= pitch)
    return True


def require_disjoint(
    outputs: Sequence[tuple[str, torch.Tensor | None]], inputs: Sequence[tuple[str, torch.Tensor | None]]
) -> None:
    """No output shares memory with itself, with another output or with an input."""
    present = [(name, tensor) for name, tensor in outputs if tensor is not None]
    for position, (name, tensor) in enumerate(present):
        if overlaps_itself(tensor):
            raise ValueError(
                f"{name}: expected elements that do not share memory, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        others = present[position + 1 :] + [(n, t) for n, t in inputs if t is not None]
        for other_name, other in others:
            if overlap(tensor, other):
                raise ValueError(f"{name}: expected memory apart from {other_name}, got overlapping tensors")
