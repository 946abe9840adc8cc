"""Offsets in elements of a tensor, from indices and strides that may come as compile-time constants."""

# mypy: allow-untyped-defs, allow-untyped-decorators
import triton
import triton.language as tl


@triton.jit
def unsigned(value):
    """The same bits, so that one comparison refuses what is negative too."""
    if value.dtype == tl.int32:
        result = value.to(tl.uint32, bitcast=True)
    else:
        result = value.to(tl.uint64, bitcast=True)
    return result


@triton.jit
def stride_value(stride):
    """A stride, which is not negative, as an unsigned tensor, even where it is a constant."""
    return unsigned(stride + tl.zeros((), tl.int32))


@triton.jit
def offset_of(index, stride):
    """index * stride in 64 bits, of a uint32 and a stride: one instruction."""
    return index.to(tl.uint64) * stride_value(stride).to(tl.uint64)


@triton.jit
def close_offset_of(index, stride):
    """`offset_of` where the result fits 32 bits, but for masked lanes: one instruction with the pointer."""
    return index * stride_value(stride)


@triton.jit
def slot_offset(rows, stride_m, slots, stride_k):
    return offset_of(rows, stride_m) + offset_of(slots, stride_k)


@triton.jit
def close_slot_offset(rows, stride_m, slots, stride_k):
    return (close_offset_of(rows, stride_m) + close_offset_of(slots, stride_k)).to(tl.uint64)
